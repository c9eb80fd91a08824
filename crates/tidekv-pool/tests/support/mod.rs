//! What the tests of the pool have in common: a small device with a folder of its own, and waiting for events.

#![allow(dead_code, clippy::unwrap_used, reason = "every test binary uses another part; a test may panic")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tidekv_core::blocks::BlockLease;
use tidekv_core::geometry::{Capacity, ChunkChoice, GeometryConfig, KvShape, Layout};
use tidekv_core::pages::Fence;
use tidekv_core::units::{Bytes, Step};
use tidekv_mem::Backend;
use tidekv_mem::fake::FakeBackend;
use tidekv_pool::{KvPool, PoolConfig, PoolSnapshot, ReservePolicy};
use tidekv_shm::{DeviceName, Ledger, LedgerEntry, LedgerView, PoolName, RuntimeDir, Watch};

/// A page of [`Device::config`]: 2 layers x K and V x 16 KiB.
pub(crate) const PAGE: Bytes = Bytes::kib(64);
/// Blocks of such a page.
pub(crate) const BLOCKS: u32 = 8;
/// No device work ever saw the blocks.
pub(crate) const NO_WORK: Fence = Fence::Step(Step(0));
/// Every event comes within this, or the test fails.
pub(crate) const SOON: Duration = Duration::from_secs(10);

/// Fake memory, a budget for all pools on it, and a folder for their files.
pub(crate) struct Device {
    pub(crate) dir: TempDir,
    pub(crate) backend: Arc<FakeBackend>,
    pub(crate) budget_pages: u32,
}

impl Device {
    pub(crate) fn new(budget_pages: u32) -> Self {
        let dir = tempfile::Builder::new().prefix("kvcached-test").tempdir_in("/dev/shm").unwrap();
        Self { dir, backend: Arc::new(FakeBackend::default()), budget_pages }
    }

    pub(crate) fn runtime_dir(&self) -> RuntimeDir {
        RuntimeDir::at(self.dir.path())
    }

    /// A pool of 64 small pages without a reserve: nothing is mapped but what the test asks for.
    pub(crate) fn config(&self, name: &str) -> PoolConfig {
        let geometry = GeometryConfig {
            shape: KvShape::heads(2, 1, 64, 2, 16),
            layout: Layout::Slab,
            granularity: self.backend.capabilities().granularity,
            chunk: ChunkChoice::Bytes(Bytes::kib(16)),
            capacity: Capacity::Pages(64),
        };
        let backend: Arc<dyn Backend> = self.backend.clone();
        PoolConfig {
            runtime_dir: self.runtime_dir(),
            budget: Some(pages(self.budget_pages)),
            reserve: ReservePolicy::Fixed { min: 0, max: 64 },
            ..PoolConfig::new(PoolName::new(name).unwrap(), backend, geometry)
        }
    }

    pub(crate) fn pool(&self, name: &str) -> KvPool {
        KvPool::open(self.config(name)).unwrap()
    }

    pub(crate) fn ledger(&self) -> Ledger {
        let device = DeviceName::new(&self.backend.capabilities().id).unwrap();
        Ledger::open_existing(&self.runtime_dir(), &device).unwrap().expect("a pool is open")
    }

    pub(crate) fn entry(&self, pool: &KvPool) -> LedgerEntry {
        let view = self.ledger().read().unwrap();
        view.by_name(pool.name().as_str(), tidekv_core::units::GroupId(0)).expect("the pool is open").clone()
    }

    /// Waits until `done`, looking again whenever the ledger changes.
    pub(crate) fn until(&self, what: &str, mut done: impl FnMut(&LedgerView) -> bool) {
        let ledger = self.ledger();
        let watch = ledger.watch().unwrap();
        wait_until(what, &watch, || done(&ledger.read().unwrap()));
    }
}

/// Waits until `done`, looking again whenever the watch wakes (and now and then, for what it cannot see).
pub(crate) fn wait_until(what: &str, watch: &Watch, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !done() {
        assert!(Instant::now() < deadline, "waited {SOON:?} for: {what}");
        watch.wait(Duration::from_millis(20)).unwrap();
    }
}

pub(crate) fn pages(count: u32) -> Bytes {
    Bytes(PAGE.0 * u64::from(count))
}

pub(crate) fn alloc(pool: &KvPool, count: u32) -> Vec<BlockLease> {
    let mut leases = Vec::new();
    pool.alloc(count, &mut leases).unwrap();
    assert_eq!(leases.len(), count as usize);
    leases
}

/// Books, driver and witness agree, as soon as nothing is being mapped or unmapped.
pub(crate) fn assert_balanced(pool: &KvPool) -> PoolSnapshot {
    let deadline = Instant::now() + SOON;
    let agree = |snapshot: &PoolSnapshot| {
        snapshot.ledger_bytes == snapshot.mapped_bytes && snapshot.witness_bytes == Some(snapshot.mapped_bytes)
    };
    let mut snapshot = pool.snapshot();
    // A page that the background thread takes away leaves driver, ledger and table one after another.
    while !agree(&snapshot) && Instant::now() < deadline {
        std::thread::yield_now();
        snapshot = pool.snapshot();
    }
    assert!(agree(&snapshot), "{snapshot:#?}");
    snapshot
}
