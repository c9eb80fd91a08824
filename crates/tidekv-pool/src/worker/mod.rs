//! A worker: the process of one rank, with the memory of one device, that does what its scheduler orders.
//!
//! ```text
//!   scheduler                      worker process
//!   ---------                      --------------
//!   Fleet  === orders ===>  WorkerServer -> Hand -> WorkerGroup   one for each group: reservation, ledger entry, book
//!          <== answers ===        one thread, one order at a time, in the order received
//!
//!   engine (same process)  <---- Arc<Reservation>: the addresses that its kernels use
//!                          ----> DeviceFence: when the device is done with a step
//! ```
//!
//! A worker reserves in the ledger of its own device before it maps, under a name of its own (`<pool>-w<rank>`), so its
//! neighbours there see it like any pool. When its scheduler's connection ends, for whatever reason, it waits for its device,
//! gives every page back and waits for the next scheduler.

mod book;
mod fence;
mod group;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tidekv_core::units::{Bytes, GroupId, PageId, Step};
use tidekv_ipc::message::{Balance, Deed, Order, Refusal, RefusalKind, Verdict};
use tidekv_ipc::server::{Handler, Stopper, WorkerServer};
use tidekv_ipc::{IpcError, SocketDir};
use tidekv_mem::Reservation;
use tidekv_shm::{DeviceName, EntrySpec, NameError, PoolName, RuntimeDir, UNLIMITED};

use crate::config::{ConfigError, Share};
use crate::entry::Terms;
use crate::error::PoolError;
use crate::fleet::RankId;
use crate::grow::deadline_in;
use fence::Synchronise;
use group::{WorkerGroup, describe, refusal};

pub use fence::{DeviceFence, FenceError};

#[cfg(test)]
pub(crate) use book::{Plan, WorkerBook};

/// How long a worker waits for its device before it refuses an unmap, unless told otherwise.
const FENCE_PATIENCE: Duration = Duration::from_secs(5);

/// Which worker this is.
#[derive(Debug)]
pub struct WorkerConfig {
    /// Name of the scheduler's pool: it finds us by it.
    pub pool: PoolName,
    /// Which rank of which stage.
    pub rank: RankId,
    /// Root of the sockets' folder; `None` for `KVCACHED_RUNTIME_DIR`, else `/tmp`.
    pub socket_root: Option<PathBuf>,
    /// Folder of the ledgers.
    pub runtime_dir: RuntimeDir,
    /// How to wait for the device; `None` to synchronise all of it.
    pub fence: Option<Box<dyn DeviceFence>>,
    /// How long to wait for the device before an unmap is refused. Less than the scheduler waits for us.
    pub fence_patience: Duration,
}

impl WorkerConfig {
    /// The defaults: everything from the environment, no events.
    pub fn new(pool: PoolName, rank: RankId) -> Self {
        Self {
            pool,
            rank,
            socket_root: None,
            runtime_dir: RuntimeDir::from_env(),
            fence: None,
            fence_patience: FENCE_PATIENCE,
        }
    }
}

/// The worker's part of one group of layers.
#[derive(Clone, Debug)]
pub struct WorkerGroupConfig {
    /// Which.
    pub group: GroupId,
    /// Where its pages appear. At least as many as the scheduler's pool has; its size of a page is this worker's own.
    pub reservation: Arc<Reservation>,
    /// Whose ledger to use; `None` for the back-end's own.
    pub device: Option<DeviceName>,
    /// What all pools of the device may hold together, as [`PoolConfig::budget`](crate::PoolConfig::budget).
    pub budget: Option<Bytes>,
    /// Part of the device that pools may use, as [`PoolConfig::utilization`](crate::PoolConfig::utilization).
    pub utilization: Option<f64>,
    /// Part of the device under contention.
    pub share: Share,
}

impl WorkerGroupConfig {
    /// The defaults: the device's own ledger, shared alike.
    pub fn new(group: GroupId, reservation: Arc<Reservation>) -> Self {
        Self { group, reservation, device: None, budget: None, utilization: None, share: Share::default() }
    }
}

/// One rank, ready to serve.
#[derive(Debug)]
pub struct Worker {
    server: WorkerServer,
    hand: Hand,
    groups: WorkerGroups,
}

/// The groups of a worker, to which more can be added while it runs: an engine makes its caches after its workers. Clones
/// are the same groups. They outlive the worker, but nobody orders anything of them then.
#[derive(Clone, Debug)]
pub struct WorkerGroups {
    groups: Arc<Mutex<BTreeMap<GroupId, WorkerGroup>>>,
    pool: PoolName,
    rank: RankId,
    runtime_dir: RuntimeDir,
}

impl Worker {
    /// Takes the rank's place. A scheduler that connects from now on is answered once [`run`](Self::run) runs.
    ///
    /// # Errors
    /// A living worker has the place, or its folder or socket cannot be made.
    pub fn new(config: WorkerConfig) -> Result<Self, IpcError> {
        let WorkerConfig { pool, rank, socket_root, runtime_dir, fence, fence_patience } = config;
        let dir = socket_root.map_or_else(|| SocketDir::from_env(&pool), |root| SocketDir::new(root, &pool));
        let server = WorkerServer::bind(&dir, rank.stage, rank.rank)?;
        let groups = WorkerGroups { groups: Arc::default(), pool, rank, runtime_dir };
        let hand = Hand { groups: groups.clone(), fence, fence_patience, served: false };
        Ok(Self { server, hand, groups })
    }

    /// Its groups, to add more from another thread.
    pub fn groups(&self) -> WorkerGroups {
        self.groups.clone()
    }

    /// Adds a group and takes its place in the device's ledger.
    ///
    /// # Errors
    /// As [`WorkerGroups::add`].
    pub fn add_group(&mut self, config: WorkerGroupConfig) -> Result<(), PoolError> {
        self.groups.add(config)
    }

    /// Drawn anew for every worker.
    pub fn instance(&self) -> u64 {
        self.server.instance()
    }

    /// Ends [`run`](Self::run) from another thread.
    pub fn stopper(&self) -> Stopper {
        self.server.stopper()
    }

    /// Serves schedulers, one after the other, until it is stopped. On the device's own thread where the driver has such.
    ///
    /// # Errors
    /// The socket failed; everything has been given back.
    pub fn run(&mut self) -> Result<(), IpcError> {
        let outcome = self.server.serve(&mut self.hand);
        if self.hand.served {
            self.hand.scheduler_gone();
        }
        outcome
    }
}

impl WorkerGroups {
    /// Adds a group and takes its place in the device's ledger. Waits for an order that is being carried out.
    ///
    /// # Errors
    /// As opening a pool: settings that make no sense, a ledger that is not usable.
    pub fn add(&self, config: WorkerGroupConfig) -> Result<(), PoolError> {
        let WorkerGroupConfig { group, reservation, device, budget, utilization, share } = config;
        if share.weight == 0 {
            return Err(ConfigError::Weight.into());
        }
        let backend = reservation.backend();
        let device = match device {
            Some(device) => device,
            None => DeviceName::new(&backend.capabilities().id).map_err(ConfigError::Name)?,
        };
        let spec = EntrySpec {
            floor: share.floor,
            ceiling: share.ceiling.unwrap_or(UNLIMITED),
            weight: share.weight,
            priority: share.priority,
            ..EntrySpec::new(self.entry_name()?, group, reservation.placement().page_bytes())
        };
        let memory = backend.memory()?;
        let backend = Some(Arc::clone(backend));
        let runtime_dir = &self.runtime_dir;
        let terms = Terms { runtime_dir, device, memory, backend, budget, utilization, has_table: false };
        let account = terms.register(spec).map_err(PoolError::Ledger)?;
        let mut group_state = WorkerGroup::new(reservation, account);
        group_state.tend();
        self.lock().insert(group, group_state);
        Ok(())
    }

    /// `<pool>-w<rank>`, with the stage before the rank where there are several.
    fn entry_name(&self) -> Result<PoolName, ConfigError> {
        const LONGEST: usize = 64;
        let suffix = match self.rank {
            RankId { stage: 0, rank } => format!("-w{rank}"),
            RankId { stage, rank } => format!("-pp{stage}-w{rank}"),
        };
        let stem: String = self.pool.as_str().chars().take(LONGEST - suffix.len()).collect();
        PoolName::new(&(stem + &suffix)).map_err(|error: NameError| ConfigError::Name(error))
    }

    /// Which there are, in the order of their numbers.
    pub fn ids(&self) -> Vec<GroupId> {
        self.lock().keys().copied().collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<GroupId, WorkerGroup>> {
        // A group whose order panicked answers by its book, which is written last.
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Does what orders say.
#[derive(Debug)]
struct Hand {
    groups: WorkerGroups,
    fence: Option<Box<dyn DeviceFence>>,
    fence_patience: Duration,
    /// Whether a scheduler is connected.
    served: bool,
}

impl Hand {
    fn unmap(&mut self, order: &Order, pages: &[PageId], after: Option<Step>) -> Verdict {
        let mut groups = self.groups.lock();
        let Some(group) = groups.get_mut(&order.group) else { return unknown(order.group) };
        let deadline = deadline_in(self.fence_patience);
        let device = Synchronise(Arc::clone(group.reservation().backend()));
        let fence = &mut self.fence;
        group.unmap(order.epoch, pages, || wait(fence, device, after, deadline))
    }
}

impl Handler for Hand {
    fn handle(&mut self, order: &Order) -> Verdict {
        let mut groups = self.groups.lock();
        let Some(group) = groups.get_mut(&order.group) else { return unknown(order.group) };
        group.settle(order.settled);
        group.hear_idle(order);
        match &order.deed {
            Deed::Map { pages, ahead } => group.map(order.epoch, pages, *ahead),
            Deed::Unmap { pages, after } => {
                drop(groups);
                self.unmap(order, pages, *after)
            }
            Deed::Abort => group.abort(order.epoch),
            Deed::Held => Verdict::Held(group.held()),
            Deed::Hello { .. } | Deed::Ping => Verdict::Done,
        }
    }

    fn balance(&mut self, order: &Order) -> Balance {
        let mut groups = self.groups.lock();
        let Some(group) = groups.get_mut(&order.group) else { return Balance::default() };
        group.hear_idle(order);
        group.balance()
    }

    fn scheduler_came(&mut self) {
        self.served = true;
    }

    fn scheduler_gone(&mut self) {
        self.served = false;
        for group in self.groups.lock().values_mut() {
            // Kernels of the last steps may still run. Work that failed is no reason to keep the memory.
            if group.holds_any()
                && let Err(error) = group.reservation().backend().synchronise()
            {
                tracing::warn!(%error, "the device could not be waited for");
            }
            // Also where it holds nothing: the next scheduler counts its epochs from 1 again.
            group.give_all_back();
        }
    }

    fn tick(&mut self) {
        for group in self.groups.lock().values_mut() {
            // What the driver would not take back when the last scheduler went.
            if !self.served && group.holds_any() {
                group.give_all_back();
            }
            group.tend();
        }
    }
}

fn wait(
    fence: &mut Option<Box<dyn DeviceFence>>,
    mut device: Synchronise,
    after: Option<Step>,
    deadline: Instant,
) -> Result<(), Refusal> {
    let waited = match fence {
        Some(fence) => fence.wait(after, deadline),
        None => device.wait(after, deadline),
    };
    waited.map_err(|error| {
        let kind = match &error {
            FenceError::TimedOut => RefusalKind::StepTimeout,
            FenceError::Device(_) => RefusalKind::Driver,
        };
        refusal(kind, describe(&error))
    })
}

fn unknown(group: GroupId) -> Verdict {
    Verdict::Refused(refusal(RefusalKind::UnknownGroup, format!("this worker has no group {group}")))
}
