//! tidekv-pool RUNS: the elastic pool of KV-cache blocks that engines allocate from, and the one background thread that
//! keeps it in step with its neighbours on the device.
//!
//! ```text
//!                    KvPool            alloc, free, available: one lock, no system call
//!                      |
//!        +-------------+--------------+-----------------+
//!      table         grow           shrink            keeper (background thread)
//!   blocks, gauges   plan -> ledger   retire -> fence    refill ahead of demand, decay, limits,
//!                    -> map -> commit -> unmap -> ledger  balloon, publishing, dead neighbours
//!                      |              |                 |
//!                   account: what the ledger says we may hold and do hold
//!
//!   memory               where the pages are: a reservation of this process, or every rank of a fleet
//!   fleet, worker        one scheduler, many workers: a page is mapped on all of them or on none
//!   reserve, limits      pure decisions: how many idle pages, which limit is in force
//!   owed, reclaim        what neighbours are owed, and how the engine hears that it should evict
//!   departures           why pages leave, for those who ask later
//! ```
//!
//! Lock order: the ledger's lock, then the limits; the fleet's wires, then the table's lock, then the fleet's book. While the
//! table's is held no driver is called and nobody is waited for. `table` checks that in debug builds.
//!
//! ```
//! use std::sync::Arc;
//!
//! use tidekv_core::geometry::{Capacity, ChunkChoice, GeometryConfig, KvShape, Layout};
//! use tidekv_core::pages::Fence;
//! use tidekv_core::units::{Bytes, Step};
//! use tidekv_mem::fake::FakeBackend;
//! use tidekv_pool::{KvPool, PoolConfig};
//! use tidekv_shm::{PoolName, RuntimeDir};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! let geometry = GeometryConfig {
//!     shape: KvShape::heads(32, 8, 128, 2, 16),
//!     layout: Layout::Slab,
//!     granularity: Bytes::kib(4),
//!     chunk: ChunkChoice::Auto,
//!     capacity: Capacity::Budget(Bytes::gib(1)),
//! };
//! let name = PoolName::new("kvcached_example")?;
//! let mut config = PoolConfig::new(name, Arc::new(FakeBackend::default()), geometry);
//! # config.runtime_dir = RuntimeDir::at(dir.path());
//! config.budget = Some(Bytes::gib(1));
//! let pool = KvPool::open(config)?;
//!
//! let mut leases = Vec::new();
//! pool.alloc(100, &mut leases)?;
//! let first = pool.kernel_id(leases[0])?;
//! // ... step 1 of the engine reads and writes these blocks ...
//! pool.free(&leases, Fence::Step(Step(1)))?;
//! pool.step_completed(Step(1));
//! # let _ = first;
//! # Ok(())
//! # }
//! ```
//!
//! A pool over several devices is opened with [`PoolConfig::on_fleet`]: see [`fleet`].
//!
//! A pool is a value built from a [`PoolConfig`]; there are no globals, so several fit into one process. Nothing here
//! ends the host process, every wait has a deadline, and a pool inherited through `fork` answers
//! [`PoolError::Forked`].

#![forbid(unsafe_code)]

mod account;
mod config;
mod departures;
mod entry;
mod error;
pub mod fleet;
mod grow;
mod inner;
mod keeper;
mod limits;
mod memory;
mod open;
mod owed;
mod pool;
mod reclaim;
mod reserve;
mod returning;
mod shrink;
mod snapshot;
mod steps;
mod table;
mod wake;
pub mod worker;

pub use config::{
    ConfigError, DEFAULT_DECAY, DEFAULT_MAX_CACHED_TOKENS, MemorySource, PoolConfig, Share, max_cached_tokens,
};
pub use error::{PoolError, Shortage};
pub use fleet::{Fleet, FleetConfig, FleetError, FleetGroup, FleetPages, RankFault, RankId, Scope};
pub use limits::{LimitState, LimitStatus};
pub use pool::KvPool;
pub use reclaim::ReclaimRequest;
pub use reserve::{AUTO_RESERVE_MAX, ReservePolicy};
pub use snapshot::PoolSnapshot;
pub use tidekv_shm::DEFAULT_UTILIZATION;
pub use worker::{Worker, WorkerConfig, WorkerGroupConfig, WorkerGroups};
