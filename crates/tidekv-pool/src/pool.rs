//! The pool as engines use it: blocks in, blocks out, and what operators see of it.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tidekv_core::blocks::BlockLease;
use tidekv_core::geometry::Geometry;
use tidekv_core::pages::Fence;
use tidekv_core::units::{BlockIndex, Bytes, KernelId, PageId, Step};
use tidekv_mem::Reservation;
use tidekv_shm::PoolName;

use crate::config::PoolConfig;
use crate::error::PoolError;
use crate::grow::Purpose;
use crate::inner::Inner;
use crate::keeper::Runner;
use crate::limits::{LimitState, Verdict};
use crate::reclaim::ReclaimRequest;
use crate::snapshot::PoolSnapshot;

/// An elastic pool of KV-cache blocks. Clones are the same pool; it ends when the last one is dropped.
///
/// All methods may be called from any thread. Allocating and freeing from memory that is mapped takes one lock and
/// makes no system call.
#[derive(Clone, Debug)]
pub struct KvPool {
    inner: Arc<Inner>,
    wait: Duration,
    /// Ends the background thread with the last clone.
    _runner: Arc<Runner>,
}

/// Opening and reading.
impl KvPool {
    /// Opens a pool: reserves address space, takes a place in the device's ledger, starts the background thread.
    ///
    /// # Errors
    /// Settings that make no sense, address space or descriptors that cannot be had, a ledger that is not usable, and
    /// [`PoolError::Exhausted`] where not even the null block's page can be mapped.
    pub fn open(config: PoolConfig) -> Result<Self, PoolError> {
        let wait = config.wait;
        let (inner, runner) = crate::open::open(config)?;
        Ok(Self { inner, wait, _runner: Arc::new(runner) })
    }

    /// The name in use: the one asked for, or a numbered one where a living pool had it.
    pub fn name(&self) -> &PoolName {
        &self.inner.name
    }

    /// The address arithmetic.
    pub fn geometry(&self) -> &Geometry {
        &self.inner.geometry
    }

    /// Address of byte 0 of the reservation, the same for the life of the pool. `None` on a fleet, where every worker has
    /// its own.
    pub fn base_address(&self) -> Option<u64> {
        self.reservation().map(|reservation| reservation.base_address())
    }

    /// The reservation, to read and write bytes through. `None` on a fleet, whose memory is the workers'. Who keeps it
    /// longer than the pool keeps its addresses: their memory goes with the pool.
    pub fn reservation(&self) -> Option<&Arc<Reservation>> {
        self.inner.memory.reservation()
    }

    /// The id that attention kernels know a leased block by.
    ///
    /// # Errors
    /// [`PoolError::Geometry`] for a block that is not of this pool.
    pub fn kernel_id(&self, lease: BlockLease) -> Result<KernelId, PoolError> {
        Ok(self.inner.geometry.kernel_id(lease.block)?)
    }

    /// Blocks that an allocation may hope for: free ones of mapped pages, and those of pages that limit and shared
    /// budget would allow at the last look. One load.
    pub fn available(&self) -> u32 {
        self.inner.table.available()
    }

    /// Everything there is to know, at one moment.
    pub fn snapshot(&self) -> PoolSnapshot {
        PoolSnapshot::of(&self.inner)
    }

    /// Blocks in use on each of these pages; 0 for pages that the pool does not have. To shrink, evict where few are.
    pub fn occupancy(&self, pages: &[PageId]) -> Vec<u32> {
        if self.inner.check_birth().is_err() {
            return vec![0; pages.len()];
        }
        let table = self.inner.table.lock();
        let page_count = table.blocks.pages().page_count();
        pages.iter().map(|&page| if page.0 < page_count { table.blocks.live_blocks(page) } else { 0 }).collect()
    }
}

/// Blocks.
impl KvPool {
    /// Leases `count` blocks and appends them to `out`, all or none.
    ///
    /// # Errors
    /// [`PoolError::Exhausted`] (transient) where limit, shared budget or device leave too little; what is missing is
    /// posted as demand, so that a retry a little later finds more.
    pub fn alloc(&self, count: u32, out: &mut Vec<BlockLease>) -> Result<(), PoolError> {
        self.alloc_within(count, self.wait, out)
    }

    /// [`alloc`](Self::alloc) that waits up to `wait` for neighbours to give memory back, or for frees.
    ///
    /// # Errors
    /// As there, after the wait.
    #[inline]
    pub fn alloc_within(&self, count: u32, wait: Duration, out: &mut Vec<BlockLease>) -> Result<(), PoolError> {
        if self.alloc_mapped(count, out)? { Ok(()) } else { self.inner.grow(count, Purpose::Lease, wait, out) }
    }

    /// The part of [`alloc`](Self::alloc) that waits for nothing and makes no system call but to wake the background
    /// thread: leases `count` blocks of memory that is mapped. False, and nothing leased, where that is too little.
    ///
    /// # Errors
    /// [`PoolError::Forked`].
    #[inline]
    pub fn alloc_mapped(&self, count: u32, out: &mut Vec<BlockLease>) -> Result<bool, PoolError> {
        self.inner.check_birth()?;
        let (taken, look) = {
            let mut table = self.inner.table.lock();
            let taken = table.blocks.alloc_mapped(count, out).is_ok();
            (taken, taken && table.publish())
        };
        if look {
            self.inner.bell.ring();
        }
        Ok(taken)
    }

    /// Says that `count` blocks will be allocated soon, so that neighbours give back what is missing of them *before* an
    /// allocation finds too little: idle pages, and what their engines only keep ([`set_evictable`](Self::set_evictable)).
    /// No running request is stopped for it: that takes an allocation. Nothing is allocated and nothing is promised. The word
    /// holds for a quarter of a second; say it again for as long as it is true. What the pool's own limit forbids is not asked
    /// for.
    ///
    /// Costs an update of the ledger where something is missing, so say it now and then and not for every block.
    ///
    /// # Errors
    /// [`PoolError::Ledger`] where the ledger could not be written, [`PoolError::Forked`].
    pub fn ask(&self, count: u32) -> Result<(), PoolError> {
        self.inner.check_birth()?;
        self.inner.ask(count)
    }

    /// For an engine that can do nothing with what it has: if this pool has its share and another one of the device waits for
    /// memory too, takes back what refused allocations and [`ask`](Self::ask) have posted for this one, and says so. Then free what
    /// the engine can do without, and allocate again later. Of several pools that wait for each other and do this at the same
    /// moment, one is told `false`. A pool below its share is told so too: others owe it what it waits for. Callers inside
    /// [`alloc_within`](Self::alloc_within) go on waiting.
    ///
    /// On a fleet it is always `false`: the devices with neighbours are the workers'.
    ///
    /// # Errors
    /// [`PoolError::Ledger`] where the ledger could not be written, [`PoolError::Forked`].
    pub fn give_way(&self) -> Result<bool, PoolError> {
        self.inner.check_birth()?;
        self.inner.give_way()
    }

    /// Ends these leases, all or none. Pages that become empty stay mapped and are not unmapped before `fence`.
    ///
    /// # Errors
    /// [`PoolError::Free`] names the first block that is not leased by the lease given for it.
    #[inline]
    pub fn free(&self, leases: &[BlockLease], fence: Fence) -> Result<(), PoolError> {
        self.inner.check_birth()?;
        let mut table = self.inner.table.lock();
        table.blocks.free(leases, fence)?;
        let look = table.publish();
        drop(table);
        self.freed(look);
        Ok(())
    }

    /// [`free`](Self::free) for callers that keep block indices alone.
    ///
    /// # Errors
    /// [`PoolError::Free`] names the first block that is not leased.
    pub fn free_blocks(&self, blocks: &[BlockIndex], fence: Fence) -> Result<(), PoolError> {
        self.inner.check_birth()?;
        let mut table = self.inner.table.lock();
        table.blocks.free_blocks(blocks, fence)?;
        let look = table.publish();
        drop(table);
        self.freed(look);
        Ok(())
    }

    fn freed(&self, look: bool) {
        if look {
            self.inner.bell.ring();
        }
        self.inner.progress.announce();
    }

    /// Sets `count` more blocks aside, so that [`alloc_reserved`](Self::alloc_reserved) cannot fail.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn reserve(&self, count: u32) -> Result<(), PoolError> {
        self.inner.check_birth()?;
        let mut table = self.inner.table.lock();
        let taken = table.blocks.reserve(count).is_ok();
        let look = table.publish();
        drop(table);
        if look {
            self.inner.bell.ring();
        }
        if taken { Ok(()) } else { self.inner.grow(count, Purpose::SetAside, self.wait, &mut Vec::new()) }
    }

    /// The blocks that are set aside, oldest first.
    pub fn reserved_blocks(&self) -> Vec<BlockIndex> {
        if self.inner.check_birth().is_err() {
            return Vec::new();
        }
        self.inner.table.lock().blocks.set_aside().collect()
    }

    /// Leases `count` of the blocks set aside, first those that were set aside first.
    ///
    /// # Errors
    /// [`PoolError::NotReserved`] where fewer are set aside.
    pub fn alloc_reserved(&self, count: u32, out: &mut Vec<BlockLease>) -> Result<(), PoolError> {
        self.inner.check_birth()?;
        let mut table = self.inner.table.lock();
        table.blocks.alloc_reserved(count, out)?;
        table.publish();
        Ok(())
    }

    /// Makes all blocks that are set aside free again.
    ///
    /// # Errors
    /// [`PoolError::Forked`].
    pub fn free_reserved(&self) -> Result<(), PoolError> {
        self.inner.check_birth()?;
        let mut table = self.inner.table.lock();
        table.blocks.free_reserved();
        let look = table.publish();
        drop(table);
        self.freed(look);
        Ok(())
    }

    /// Ends every lease and every reservation of blocks, as at the end of an engine's test run. Leases that callers
    /// still keep are stale from then on. Says how many blocks were freed.
    ///
    /// # Errors
    /// [`PoolError::Forked`].
    pub fn clear(&self) -> Result<u32, PoolError> {
        self.inner.check_birth()?;
        let mut table = self.inner.table.lock();
        let total = table.blocks.total_blocks();
        let leased: Vec<_> = (0..total).map(BlockIndex).filter(|&block| table.blocks.is_leased(block)).collect();
        let reserved = table.blocks.reserved_blocks();
        table.blocks.free_blocks(&leased, Fence::Unknown)?;
        table.blocks.free_reserved();
        let look = table.publish();
        drop(table);
        self.freed(look);
        Ok(u32::try_from(leased.len()).unwrap_or(u32::MAX).saturating_add(reserved))
    }

    /// The device has finished this step and all before it: pages freed behind it may be unmapped.
    pub fn step_completed(&self, step: Step) {
        if self.inner.check_birth().is_err() {
            return;
        }
        if self.inner.steps.complete(step) {
            self.inner.bell.ring();
        }
    }
}

/// Limits and giving back.
impl KvPool {
    /// Gives back every idle page that the device is done with, on this thread. Says how much memory that was.
    ///
    /// # Errors
    /// [`PoolError::Unmap`] or [`PoolError::Fleet`] where the driver or a rank would not take something back; that part
    /// stays counted and is tried again.
    pub fn trim(&self) -> Result<Bytes, PoolError> {
        self.inner.check_birth()?;
        self.inner.trimmed.store(true, Relaxed);
        let shrunk = self.inner.trim();
        self.inner.bell.ring();
        match shrunk.refused {
            Some(failure) => Err(failure.into()),
            None => Ok(self.inner.bytes_of(shrunk.pages as usize)),
        }
    }

    /// Sets the limit, in bytes of all layers. In force at once for new allocations; memory above it is given back by
    /// the background thread, idle pages first, then what the engine evicts.
    ///
    /// # Errors
    /// [`PoolError::Ledger`] where the ledger could not be written; the limit is unchanged then.
    pub fn set_limit(&self, bytes: Bytes, revision: u64) -> Result<LimitState, PoolError> {
        self.inner.check_birth()?;
        self.inner.order_limit(|limits| limits.order(bytes, revision))
    }

    /// [`set_limit`](Self::set_limit) with the next revision, whatever that is.
    ///
    /// # Errors
    /// As there.
    pub fn resize(&self, bytes: Bytes) -> Result<LimitState, PoolError> {
        self.inner.check_birth()?;
        self.inner.order_limit(|limits| {
            limits.order_next(bytes);
            Verdict::New
        })
    }

    /// Sets what is kept for this pool whatever neighbours want, and says what it was: an engine that sleeps needs
    /// nothing kept. An operator may change it as well (`kvctl share --floor`); the last word counts.
    ///
    /// # Errors
    /// [`PoolError::Ledger`] where the ledger could not be written; the floor is unchanged then.
    pub fn set_floor(&self, bytes: Bytes) -> Result<Bytes, PoolError> {
        self.inner.check_birth()?;
        self.inner.set_floor(bytes)
    }

    /// Says how many of the leased blocks are only kept in case they are asked for again: cached prefixes that no request
    /// uses. They count as used for operators, and not as needed when a neighbour waits: then the engine is asked to evict
    /// them ([`on_reclaim`](Self::on_reclaim)), also where this pool holds no more than its share; that part of a request is
    /// not firm ([`ReclaimRequest::firm_pages`]), so no running request need make room for it.
    ///
    /// Costs one store; call it whenever the number changes.
    pub fn set_evictable(&self, blocks: u32) {
        self.inner.evictable_blocks.store(blocks, Relaxed);
    }

    /// The limit in force and what it has come to.
    pub fn limit_state(&self) -> LimitState {
        self.inner.limit_state(Verdict::Repeated)
    }

    /// Calls `callback` whenever the pool owes memory that only the engine can free. It runs on the background thread
    /// with no lock held and may free blocks, but must not wait for memory; it replaces an earlier one. It must not keep
    /// a clone of the pool, which would then never end.
    pub fn on_reclaim(&self, callback: impl Fn(ReclaimRequest) + Send + 'static) {
        if self.inner.check_birth().is_err() {
            return;
        }
        self.inner.mailbox.on_request(Box::new(callback));
        self.inner.bell.ring();
    }

    /// What the pool asks the engine to free at this moment, for engines that poll. Makes
    /// [`reclaim_fd`](Self::reclaim_fd) silent until the request changes.
    pub fn reclaim_requested(&self) -> ReclaimRequest {
        if self.inner.check_birth().is_err() {
            return ReclaimRequest::default();
        }
        let request = self.inner.mailbox.requested();
        // What was freed since counts at once, so that an engine that polls quickly does not evict twice.
        let pages = request.pages.min(self.inner.table.lock().debt());
        let firm_pages = pages.saturating_sub(request.pages - request.firm_pages);
        ReclaimRequest { pages, firm_pages, bytes: self.inner.bytes_of(pages as usize), ..request }
    }

    /// An eventfd that is readable while there is a request that nobody has looked at. Forked children close it.
    pub fn reclaim_fd(&self) -> BorrowedFd<'_> {
        self.inner.mailbox.as_fd()
    }
}
