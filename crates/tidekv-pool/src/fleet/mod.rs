//! A fleet: the workers of a model that is split over several devices, as one memory.
//!
//! ```text
//!   KvPool (scheduler process)                          workers, one process for each rank
//!     table, limits, keeper                               stage 0: w0  w1  w2  w3
//!       |                                                 stage 1: w0  w1  w2  w3
//!     memory: FleetGroup (group 0, all stages) --+
//!   KvPool                                       +-- Fleet -- one Broadcaster for each stage
//!     memory: FleetGroup (group 1, stage 0) -----+     book: who has what, who is missing
//! ```
//!
//! A page is mapped on every rank of its group or on none. A rank that refuses, dies or is silent undoes the operation
//! everywhere, and one error names it; pages whose undoing a rank has not acked are *quarantined*: the pool keeps them
//! claimed and counts them, as it does with pages that a driver will not take back.
//!
//! | module     | what                                                                   |
//! |------------|------------------------------------------------------------------------|
//! | `book`     | pure: pages, operations, ranks                                         |
//! | `exchange` | operations: map in two phases, unmap, quarantine                       |
//! | `tend`     | the heartbeat: ping, reconnect, rejoin, exclude                        |
//! | `wire`     | what is needed of the connections, so that tests can lose messages     |
//!
//! The contents of pages are the workers' own. A worker that was restarted gets its pages mapped again and they are blank:
//! an engine compares [`RankStatus::rejoins`] and drops what it had cached.
//!
//! ```
//! use std::sync::Arc;
//!
//! use tidekv_core::geometry::{Capacity, ChunkChoice, Geometry, GeometryConfig, KvShape, Layout};
//! use tidekv_core::units::{Bytes, GroupId};
//! use tidekv_mem::fake::FakeBackend;
//! use tidekv_mem::{RegionOptions, Reservation};
//! use tidekv_pool::{Fleet, FleetConfig, KvPool, PoolConfig, RankId, Scope, Worker, WorkerConfig, WorkerGroupConfig};
//! use tidekv_shm::{PoolName, RuntimeDir};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! let name = PoolName::new("kvcached_example")?;
//! let geometry = GeometryConfig {
//!     shape: KvShape::heads(32, 4, 128, 2, 16), // the heads of one rank
//!     layout: Layout::Slab,
//!     granularity: Bytes::kib(4),
//!     chunk: ChunkChoice::Auto,
//!     capacity: Capacity::Pages(64),
//! };
//!
//! // Two workers. Threads here, processes in life: each has a device of its own.
//! let mut threads = Vec::new();
//! for rank in 0..2 {
//!     let mut config = WorkerConfig::new(name.clone(), RankId { stage: 0, rank });
//! #   config.socket_root = Some(dir.path().into());
//! #   config.runtime_dir = RuntimeDir::at(dir.path());
//!     let mut worker = Worker::new(config)?;
//!     let backend = Arc::new(FakeBackend::default());
//!     let placement = *Geometry::new(&geometry)?.placement();
//!     let reservation = Arc::new(Reservation::new(backend, placement, RegionOptions::default())?);
//!     worker.add_group(WorkerGroupConfig::new(GroupId(0), reservation))?;
//!     threads.push((worker.stopper(), std::thread::spawn(move || worker.run())));
//! }
//!
//! // The scheduler: a pool like any other, whose pages lie on both.
//! let mut config = FleetConfig::new(name.clone(), vec![2]);
//! # config.socket_root = Some(dir.path().into());
//! let fleet = Fleet::connect(config)?;
//! let mut config = PoolConfig::on_fleet(name, fleet.group(GroupId(0), Scope::AllStages), geometry);
//! # config.runtime_dir = RuntimeDir::at(dir.path());
//! let pool = KvPool::open(config)?;
//! let mut leases = Vec::new();
//! pool.alloc(100, &mut leases)?;
//! let held = fleet.held(GroupId(0))?;
//! assert_eq!(held[0].pages, held[1].pages);
//!
//! drop((pool, fleet));
//! for (stopper, thread) in threads {
//!     stopper.stop();
//!     thread.join().expect("the worker did not panic")?;
//! }
//! # Ok(())
//! # }
//! ```

mod book;
mod config;
mod error;
mod exchange;
mod tend;
mod wire;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tidekv_core::pages::Fence;
use tidekv_core::units::{GroupId, PageId};
use tidekv_ipc::broadcast::{Broadcaster, strategy};

use crate::grow::deadline_in;
use crate::owed::Owed;
use book::Standing;
use exchange::{Exchange, Wires};
use wire::Wire;

pub(crate) use book::IdlePages;
pub use book::Scope;
pub use config::FleetConfig;
pub use error::{FleetError, PageMark, RankFault, RankId};
pub(crate) use exchange::Kept;

/// How often connecting looks again for workers that have not started.
const START_LOOK: Duration = Duration::from_millis(10);
/// How long closing a pool waits for its workers to take their pages back. What is left goes with the connection.
const CLOSE_PATIENCE: Duration = Duration::from_secs(2);

/// The workers of one model. Clones are the same fleet; its connections end with the last one and the last pool on it,
/// and every worker gives back what it holds then.
#[derive(Clone, Debug)]
pub struct Fleet(Arc<Exchange>);

/// One rank at this moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankStatus {
    /// Which.
    pub at: RankId,
    /// Whether it takes part.
    pub state: RankState,
    /// Drawn anew by each start of the worker; 0 before the first connection.
    pub instance: u64,
    /// How often it came back without its pages. They are mapped again, but what was in them is lost.
    pub rejoins: u64,
}

/// What one rank says that it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankPages {
    /// Which rank.
    pub at: RankId,
    /// Its pages with memory, sorted, or why it did not say.
    pub pages: Result<Vec<PageId>, FleetError>,
}

/// Whether a rank takes part.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RankState {
    /// It has every page that the pools have.
    Member,
    /// It is connected and did not answer in time: nothing new is mapped until it does.
    Late {
        /// For how long.
        silent: Duration,
    },
    /// Its connection is gone, and it is looked for.
    Lost {
        /// For how long.
        missing: Duration,
        /// How.
        cause: String,
    },
    /// It is back, and its pages are being mapped again.
    Rejoining,
    /// It does not count any more, and nothing is mapped without it.
    Excluded {
        /// Why.
        reason: String,
    },
}

impl Fleet {
    /// Connects to all workers, waiting for those that have not started.
    ///
    /// # Errors
    /// A strategy that does not exist; [`FleetError::Rank`] names the first rank that was not there in time.
    pub fn connect(config: FleetConfig) -> Result<Self, FleetError> {
        if config.stages.is_empty() || config.stages.contains(&0) {
            return Err(FleetError::NoRanks { stages: config.stages });
        }
        let entry = strategy(&config.strategy)?;
        let dir = config.socket_dir();
        let wire = |(stage, &ranks): (u32, &u32)| -> Box<dyn Wire> {
            Box::new(Broadcaster::new(dir.clone(), stage, ranks, entry, config.timeout))
        };
        let wires: Wires = (0..).zip(&config.stages).map(wire).collect();
        Self::over(config, wires)
    }

    fn over(config: FleetConfig, wires: Wires) -> Result<Self, FleetError> {
        let deadline = deadline_in(config.start_patience);
        let exchange = Exchange::new(config, wires);
        loop {
            exchange.look_for_the_lost(&mut exchange.wires());
            let missing = {
                let book = exchange.book();
                book.obstacle(book.indices(), Instant::now())
            };
            match missing {
                None => return Ok(Self(Arc::new(exchange))),
                Some(error) if Instant::now() >= deadline => return Err(error),
                Some(_) => std::thread::sleep(START_LOOK),
            }
        }
    }

    /// A group of layers on these ranks, for one pool to be opened on.
    pub fn group(&self, group: GroupId, scope: Scope) -> FleetGroup {
        FleetGroup { fleet: self.clone(), group, scope }
    }

    /// Every rank, by stage and rank.
    pub fn status(&self) -> Vec<RankStatus> {
        if self.0.check_birth().is_err() {
            return Vec::new();
        }
        let book = self.0.book();
        let status = |rank| RankStatus {
            at: book.id(rank),
            state: RankState::from(book.standing(rank)),
            instance: book.instance(rank),
            rejoins: book.rejoins(rank),
        };
        book.indices().map(status).collect()
    }

    /// Pages of a group that some rank has not given back, or has not said so.
    pub fn quarantined(&self, group: GroupId) -> usize {
        if self.0.check_birth().is_err() {
            return 0;
        }
        self.0.book().quarantined(group)
    }

    /// Which pages of a group every connected rank of it says that it has. Asks them, so it waits for an operation that is
    /// under way, and for slow ranks up to the timeout.
    ///
    /// # Errors
    /// [`FleetError::GroupNotOpen`], [`FleetError::Forked`].
    pub fn held(&self, group: GroupId) -> Result<Vec<RankPages>, FleetError> {
        self.0.check_birth()?;
        self.0.held(group)
    }

    /// Whether every rank of the scope has this group, so that a pool can be opened on it.
    ///
    /// # Errors
    /// [`FleetError::Rank`] names a rank that did not answer.
    pub fn has_group(&self, group: GroupId, scope: Scope) -> Result<bool, FleetError> {
        self.0.check_birth()?;
        self.0.has_group(group, scope)
    }

    /// Counts a rank out: what waits for it no longer does, and every map says that it is excluded. Waits for an operation
    /// that is under way.
    ///
    /// # Errors
    /// [`FleetError::NoSuchRank`].
    pub fn exclude(&self, at: RankId, reason: &str) -> Result<(), FleetError> {
        self.0.check_birth()?;
        let rank = self.0.book().index(at).ok_or(FleetError::NoSuchRank { at })?;
        self.0.exclude(&mut self.0.wires(), rank, reason.to_owned());
        Ok(())
    }

    /// Lets an excluded rank come back, as if it had been lost just now.
    ///
    /// # Errors
    /// [`FleetError::NoSuchRank`].
    pub fn readmit(&self, at: RankId) -> Result<(), FleetError> {
        self.0.check_birth()?;
        let mut book = self.0.book();
        let rank = book.index(at).ok_or(FleetError::NoSuchRank { at })?;
        book.readmit(rank, Instant::now());
        Ok(())
    }
}

impl From<&Standing> for RankState {
    fn from(standing: &Standing) -> Self {
        match standing {
            Standing::Member => Self::Member,
            Standing::Late { since } => Self::Late { silent: since.elapsed() },
            Standing::Lost { since, cause } => Self::Lost { missing: since.elapsed(), cause: cause.to_string() },
            Standing::Rejoining { .. } => Self::Rejoining,
            Standing::Excluded { reason } => Self::Excluded { reason: reason.clone() },
        }
    }
}

/// A group of layers on some ranks of a fleet. A description: the pool that is opened on it takes it.
#[derive(Clone, Debug)]
pub struct FleetGroup {
    fleet: Fleet,
    group: GroupId,
    scope: Scope,
}

impl FleetGroup {
    /// The fleet.
    pub fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    /// Which group.
    pub fn id(&self) -> GroupId {
        self.group
    }

    /// On which ranks.
    pub fn scope(&self) -> Scope {
        self.scope
    }

    /// Takes the group to map its pages by hand, without a pool that decides.
    ///
    /// # Errors
    /// As opening a pool on it: a rank that is missing or does not have the group, a group that is in use.
    pub fn take(&self, page_count: u32) -> Result<FleetPages, FleetError> {
        self.open(page_count).map(FleetPages)
    }

    pub(crate) fn open(&self, page_count: u32) -> Result<OpenGroup, FleetError> {
        self.fleet.0.open_group(self.group, self.scope, page_count)?;
        Ok(OpenGroup { exchange: Arc::clone(&self.fleet.0), group: self.group })
    }
}

/// Pages of a group that are mapped by hand. Dropping it gives them back.
#[derive(Debug)]
pub struct FleetPages(OpenGroup);

impl FleetPages {
    /// Maps pages on every rank, or on none.
    ///
    /// # Errors
    /// [`FleetError`] names the rank that stood in the way.
    pub fn map(&self, pages: &[PageId]) -> Result<(), FleetError> {
        self.0.map(pages)
    }

    /// Gives pages back on every rank, each behind `fence` on its own device.
    ///
    /// # Errors
    /// Why some page is kept on some rank; those may be unmapped again.
    pub fn unmap(&self, pages: &[PageId], fence: Fence) -> Result<(), FleetError> {
        self.0.unmap(pages, |_| fence).map_err(|kept| kept.error)
    }

    /// Looks after the fleet where that is due, which a pool's thread does for its own. Says when to come again.
    pub fn tend(&self) -> Duration {
        self.0.tend()
    }
}

/// A pool's pages on a fleet. Dropping it gives them back.
#[derive(Debug)]
pub(crate) struct OpenGroup {
    exchange: Arc<Exchange>,
    group: GroupId,
}

impl OpenGroup {
    pub(crate) fn map(&self, pages: &[PageId]) -> Result<(), FleetError> {
        self.exchange.map(self.group, pages, false)
    }

    /// Maps pages that nobody waits for: a rank that has too little refuses and does not ask its neighbours for more.
    pub(crate) fn map_ahead(&self, pages: &[PageId]) -> Result<(), FleetError> {
        self.exchange.map(self.group, pages, true)
    }

    pub(crate) fn unmap(&self, pages: &[PageId], fence: impl Fn(PageId) -> Fence) -> Result<(), Kept> {
        self.exchange.unmap(self.group, pages, fence)
    }

    /// Whether some rank may have memory for a page that no pool uses.
    pub(crate) fn is_quarantined(&self, page: PageId) -> bool {
        self.exchange.book().mark(self.group, page) != PageMark::Free
    }

    /// What every order from now on says of pages that the pool could do without.
    pub(crate) fn note_idle(&self, idle: IdlePages) {
        self.exchange.book().note_idle(self.group, idle);
    }

    /// The most pages that neighbours of any rank are owed, now that so many are spare.
    pub(crate) fn owed(&self, spare_pages: u32) -> Owed {
        self.exchange.book().owed(self.group, spare_pages)
    }

    /// Pages that every rank's device would grant, as far as the ranks have said.
    pub(crate) fn grantable_pages(&self) -> u32 {
        self.exchange.book().grantable(self.group)
    }

    /// Looks after the fleet, where that is due. Says when to come again.
    pub(crate) fn tend(&self) -> Duration {
        self.exchange.tend()
    }
}

impl Drop for OpenGroup {
    fn drop(&mut self) {
        self.exchange.close_group(self.group, CLOSE_PATIENCE);
    }
}
