//! A reservation: one address range, and which of its pages have memory.
//!
//! ```text
//!   page       0         1         2         3
//!          [ Mapped ][  --   ][ Mapped ][ Stuck ]        `--` has address space but no memory
//!
//!             map: claim -> memory -> Mapped
//!      --  ------------------------------------>  Mapped        a call that fails midway undoes the whole batch
//!          <------------------------------------
//!             unmap: claim -> give back -> --                   what the system will not take back is Stuck:
//!                                                               counted, reported, and may be unmapped again
//! ```
//!
//! Each page has one atomic state. A call first claims all its pages (state `Busy`) and only then talks to the system
//! below, so no lock is held across a driver call and calls on different pages run side by side. This is the only
//! caller of [`Region`]'s unsafe methods: the states prove their conditions.
//!
//! A page that is copied from or to stays mapped, and its state says by whom: one writer, or a number of readers. Who finds
//! it taken for a copy of another kind, or in the middle of a map or unmap, waits for that, since both are over soon.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tidekv_core::geometry::{Place, Placement};
use tidekv_core::units::{ByteOffset, Bytes, PageId};

use crate::{Backend, MapError, MemError, Region, RegionOptions, UnmapError, UnmappedReads};
use tidekv_fork::Birth;

const UNMAPPED: u8 = 0;
const MAPPED: u8 = 1;
const BUSY: u8 = 2;
const STUCK: u8 = 3;
/// Mapped, and one call copies into it.
const WRITTEN: u8 = 4;
/// Mapped, and one call copies out of it; each further one adds 1.
const READ: u8 = 5;

/// How long a copy waits for the call that has its page. A copy and a driver call take milliseconds.
const COPY_PATIENCE: Duration = Duration::from_secs(1);
/// Looks at a busy page without a pause: most copies are over by then.
const EAGER_LOOKS: u32 = 50;
/// Between the looks after those.
const LOOK_PAUSE: Duration = Duration::from_micros(50);

/// What a copy does with its page.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    /// Others may read meanwhile. `unmapped`: also where there is no memory.
    Read {
        unmapped: bool,
    },
    Write,
}

impl Access {
    /// The state of a page in `state` while this copy runs; `None` where it cannot run.
    fn claimed(self, state: u8) -> Option<u8> {
        match (self, state) {
            (Self::Read { .. }, MAPPED) => Some(READ),
            (Self::Read { .. }, READ..) => state.checked_add(1),
            (Self::Read { unmapped: true }, UNMAPPED) => Some(BUSY),
            (Self::Write, MAPPED) => Some(WRITTEN),
            _ => None,
        }
    }

    /// The state after it.
    fn released(state: u8) -> u8 {
        match state {
            BUSY => UNMAPPED,
            WRITTEN | READ => MAPPED,
            readers => readers - 1,
        }
    }
}

/// Whether a page has memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageUse {
    /// Address space only.
    Unmapped,
    /// Memory behind every byte.
    Mapped,
    /// A call is changing it.
    Busy,
    /// Not usable, but some of its memory could not be given back.
    Stuck,
}

/// One address range whose pages come and go. Its addresses stay the same for its whole life.
#[derive(Debug)]
pub struct Reservation {
    // Declared first: the region gives its memory back before the back-end can go.
    region: Box<dyn Region>,
    placement: Placement,
    options: RegionOptions,
    states: Box<[AtomicU8]>,
    mapped: AtomicU32,
    stuck: AtomicU32,
    birth: Birth,
    backend: Arc<dyn Backend>,
}

impl Reservation {
    /// Takes address space for every page of `placement`, and no memory.
    ///
    /// # Errors
    /// A page size off the back-end's granularity, or address space that cannot be had.
    pub fn new(backend: Arc<dyn Backend>, placement: Placement, options: RegionOptions) -> Result<Self, MemError> {
        check_granular(&*backend, placement.handle_bytes())?;
        let region = backend.open_region(&placement, options)?;
        let states = (0..placement.page_count()).map(|_| AtomicU8::new(UNMAPPED)).collect();
        Ok(Self {
            region,
            placement,
            options,
            states,
            mapped: AtomicU32::new(0),
            stuck: AtomicU32::new(0),
            birth: Birth::here(),
            backend,
        })
    }

    /// Address of byte 0, the same until the reservation is dropped.
    pub fn base_address(&self) -> u64 {
        self.region.base()
    }

    /// Where its pages lie.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Where its memory comes from.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// Pages that have memory and can be used.
    pub fn mapped_pages(&self) -> u32 {
        self.mapped.load(Ordering::Relaxed)
    }

    /// Pages that hold memory which could not be given back.
    pub fn stuck_pages(&self) -> u32 {
        self.stuck.load(Ordering::Relaxed)
    }

    /// Memory behind the usable pages.
    pub fn mapped_bytes(&self) -> Bytes {
        Bytes(self.placement.page_bytes().0 * u64::from(self.mapped_pages()))
    }

    /// Memory behind the reservation as an independent witness counts it, where there is one.
    pub fn witness(&self) -> Option<Bytes> {
        self.region.witness()
    }

    /// What a page is at the moment; `None` past the end.
    pub fn page_use(&self, page: PageId) -> Option<PageUse> {
        Some(match self.states.get(page.index())?.load(Ordering::Acquire) {
            MAPPED | WRITTEN.. => PageUse::Mapped,
            BUSY => PageUse::Busy,
            STUCK => PageUse::Stuck,
            _ => PageUse::Unmapped,
        })
    }

    /// Puts memory behind all of `pages`, or behind none of them.
    ///
    /// # Errors
    /// [`MapError`]; whatever it is, the pages are as they were before (but see [`MapError::Refused`]'s `stuck`).
    pub fn map_pages(&self, pages: &[PageId]) -> Result<(), MapError> {
        self.claim(pages, |state| state == UNMAPPED).map_err(|refusal| self.map_error(refusal))?;
        for (index, &page) in pages.iter().enumerate() {
            if let Err(source) = self.map_claimed(page) {
                let stuck = self.roll_back(pages, index);
                return Err(MapError::Refused { page, stuck, source });
            }
        }
        for &page in pages {
            self.set(page, MAPPED);
        }
        self.mapped.fetch_add(count(pages), Ordering::Relaxed);
        Ok(())
    }

    /// Gives back the memory of all of `pages`. The caller knows that nothing uses them any more: where the device may
    /// still be reading, wait for the fence or [`Backend::synchronise`] first.
    ///
    /// # Errors
    /// [`UnmapError`]; only [`UnmapError::Stuck`] means that some pages were unmapped.
    pub fn unmap_pages(&self, pages: &[PageId]) -> Result<(), UnmapError> {
        let previous = self
            .claim(pages, |state| state == MAPPED || state == STUCK)
            .map_err(|refusal| self.unmap_error(refusal))?;
        let mut stuck = Vec::new();
        let mut first_cause = None;
        for (&page, was) in pages.iter().zip(previous) {
            match was {
                STUCK => self.stuck.fetch_sub(1, Ordering::Relaxed),
                _ => self.mapped.fetch_sub(1, Ordering::Relaxed),
            };
            if let Err(source) = self.give_back(page) {
                stuck.push(page);
                first_cause.get_or_insert(source);
            }
        }
        match first_cause {
            None => Ok(()),
            Some(source) => Err(UnmapError::Stuck { stuck, source }),
        }
    }

    /// Waits for the device and gives the memory of every page back that no other call is changing; the addresses stay
    /// taken. For owners that end while others, such as tensors, still know the addresses. Says how many pages keep memory
    /// that the system will not take. Does nothing in a forked child.
    pub fn unmap_all(&self) -> u32 {
        let has_memory = |page: &PageId| matches!(self.page_use(*page), Some(PageUse::Mapped | PageUse::Stuck));
        let held: Vec<PageId> = (0..self.placement.page_count()).map(PageId).filter(has_memory).collect();
        if held.is_empty() || self.birth.is_foreign() {
            return 0;
        }
        if self.backend.capabilities().needs_fence {
            // As at the end: work that already failed is no reason to stay.
            let _ = self.backend.synchronise();
        }
        let refused = |page| matches!(self.unmap_pages(&[page]), Err(UnmapError::Stuck { .. }));
        held.into_iter().map(|page| u32::from(refused(page))).sum()
    }

    /// Copies bytes of one page out: a mapped one, or any where unmapped addresses read as zeros.
    ///
    /// # Errors
    /// [`MemError::NotMapped`] unless the whole range lies in one readable handle; [`MemError::Busy`] where another call has
    /// the page all the time.
    pub fn read(&self, offset: ByteOffset, into: &mut [u8]) -> Result<(), MemError> {
        let unmapped = self.options.unmapped_reads == UnmappedReads::Zeros;
        self.with_page(offset, into.len(), Access::Read { unmapped }, |_| {
            // SAFETY: `with_page` checked that the range lies in one handle and holds its page claimed meanwhile.
            unsafe { self.region.read(offset, into) }
        })
    }

    /// That a range lies inside one handle, whether it has memory or not: for callers that make room for it before they
    /// [`read`](Self::read).
    ///
    /// # Errors
    /// [`MemError::NotMapped`].
    pub fn check_range(&self, offset: ByteOffset, len: u64) -> Result<(), MemError> {
        self.locate(offset, len).map(drop)
    }

    /// Copies bytes into one mapped page.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn write(&self, offset: ByteOffset, from: &[u8]) -> Result<(), MemError> {
        self.with_page(offset, from.len(), Access::Write, |_| {
            // SAFETY: as in `read`; the claim keeps other callers of this type out, and raw users of the address are
            // bound by their own promises.
            unsafe { self.region.write(offset, from) }
        })
    }

    /// A descriptor of one mapped handle's memory, for another process to map.
    ///
    /// # Errors
    /// [`MemError::Unsupported`] where the back-end was not opened for sharing; [`MemError::NotMapped`].
    pub fn export(&self, page: PageId, handle: u32) -> Result<OwnedFd, MemError> {
        if page.0 >= self.placement.page_count() || handle >= self.placement.handles_per_page() {
            return Err(MemError::NotMapped { offset: 0, end: 0 });
        }
        let extent = self.placement.extent(page, handle);
        self.with_page(extent.offset, 1, Access::Read { unmapped: false }, |place| {
            // SAFETY: `with_page` holds the mapped page claimed meanwhile.
            unsafe { self.region.export(self.placement.slot(place.page, place.handle)) }
        })
    }

    fn locate(&self, offset: ByteOffset, len: u64) -> Result<Place, MemError> {
        let end = offset.0.saturating_add(len);
        let fits = |place: &Place| {
            place.within.checked_add(len).is_some_and(|within| within <= self.placement.handle_bytes().0)
        };
        self.placement.locate(offset).filter(fits).ok_or(MemError::NotMapped { offset: offset.0, end })
    }

    /// Runs `copy` while the page that holds the range is claimed, so that nobody changes it meanwhile.
    fn with_page<T>(
        &self,
        offset: ByteOffset,
        len: usize,
        access: Access,
        copy: impl FnOnce(Place) -> Result<T, MemError>,
    ) -> Result<T, MemError> {
        if self.birth.is_foreign() {
            return Err(MemError::Forked);
        }
        let place = self.locate(offset, len as u64)?;
        match self.claim_for(place.page, access) {
            Ok(()) => {}
            Err(UNMAPPED | STUCK) => {
                return Err(MemError::NotMapped { offset: offset.0, end: offset.0.saturating_add(len as u64) });
            }
            Err(_) => return Err(MemError::Busy { page: place.page }),
        }
        let outcome = copy(place);
        let state = &self.states[place.page.index()];
        let released = state.fetch_update(Ordering::Release, Ordering::Relaxed, |state| Some(Access::released(state)));
        debug_assert!(released.is_ok(), "every claim has an end");
        outcome
    }

    /// Claims a page for a copy; waits for the call that has it. The state that stood in the way otherwise.
    fn claim_for(&self, page: PageId, access: Access) -> Result<(), u8> {
        let state = &self.states[page.index()];
        let mut looks = 0;
        let mut deadline = None;
        loop {
            match state.fetch_update(Ordering::Acquire, Ordering::Acquire, |state| access.claimed(state)) {
                Ok(_) => return Ok(()),
                Err(without @ (UNMAPPED | STUCK)) => return Err(without),
                Err(_) if looks < EAGER_LOOKS => {
                    looks += 1;
                    thread::yield_now();
                }
                Err(other) => {
                    let now = Instant::now();
                    if now >= *deadline.get_or_insert(now + COPY_PATIENCE) {
                        return Err(other);
                    }
                    thread::sleep(LOOK_PAUSE);
                }
            }
        }
    }

    /// Makes all of `pages` Busy, or none, and says what they were. `wanted` tells which states will do.
    fn claim(&self, pages: &[PageId], wanted: impl Fn(u8) -> bool) -> Result<Vec<u8>, Refusal> {
        if self.birth.is_foreign() {
            return Err(Refusal::Forked);
        }
        let mut previous = Vec::with_capacity(pages.len());
        for (index, &page) in pages.iter().enumerate() {
            let outcome = match self.states.get(page.index()) {
                None => Err(Refusal::OutOfRange(page)),
                Some(state) => state
                    .fetch_update(Ordering::Acquire, Ordering::Acquire, |state| wanted(state).then_some(BUSY))
                    .map_err(|state| Refusal::State(page, state)),
            };
            match outcome {
                Ok(state) => previous.push(state),
                Err(refusal) => {
                    for (&page, state) in pages[..index].iter().zip(previous) {
                        self.set(page, state);
                    }
                    return Err(refusal);
                }
            }
        }
        Ok(previous)
    }

    fn map_claimed(&self, page: PageId) -> Result<(), MemError> {
        for handle in 0..self.placement.handles_per_page() {
            let slot = self.placement.slot(page, handle);
            // SAFETY: the page is Busy by this call and was Unmapped, so its slots have no memory and no other user.
            unsafe { self.region.map(slot, self.placement.extent(page, handle)) }?;
        }
        Ok(())
    }

    /// Undoes `pages[..=failed]`, frees the claims of the rest, and counts what could not be undone.
    fn roll_back(&self, pages: &[PageId], failed: usize) -> u32 {
        for &page in &pages[failed + 1..] {
            self.set(page, UNMAPPED);
        }
        pages[..=failed].iter().rev().map(|&page| u32::from(self.give_back(page).is_err())).sum()
    }

    /// Takes a Busy page's memory away: it becomes Unmapped, or Stuck when any handle stays.
    fn give_back(&self, page: PageId) -> Result<(), MemError> {
        let mut outcome = Ok(());
        // Backwards, as things are undone; on through failures, so that one stuck handle strands no others.
        for handle in (0..self.placement.handles_per_page()).rev() {
            let slot = self.placement.slot(page, handle);
            // SAFETY: the page is Busy by this call, so its slots have no other user; that nothing reads its bytes
            // any more is the caller's promise for mapped pages and true for pages that never became Mapped.
            let unmapped = unsafe { self.region.unmap(slot, self.placement.extent(page, handle)) };
            outcome = outcome.and(unmapped);
        }
        if outcome.is_err() {
            self.stuck.fetch_add(1, Ordering::Relaxed);
        }
        self.set(page, if outcome.is_ok() { UNMAPPED } else { STUCK });
        outcome
    }

    fn set(&self, page: PageId, state: u8) {
        self.states[page.index()].store(state, Ordering::Release);
    }

    fn last_page(&self) -> PageId {
        PageId(self.placement.page_count() - 1)
    }

    fn map_error(&self, refusal: Refusal) -> MapError {
        match refusal {
            Refusal::OutOfRange(page) => MapError::OutOfRange { page, last: self.last_page() },
            Refusal::State(page, MAPPED | WRITTEN..) => MapError::AlreadyMapped { page },
            Refusal::State(page, STUCK) => MapError::Stuck { page },
            Refusal::State(page, _) => MapError::Busy { page },
            Refusal::Forked => MapError::Forked,
        }
    }

    fn unmap_error(&self, refusal: Refusal) -> UnmapError {
        match refusal {
            Refusal::OutOfRange(page) => UnmapError::OutOfRange { page, last: self.last_page() },
            Refusal::State(page, UNMAPPED) => UnmapError::NotMapped { page },
            Refusal::State(page, _) => UnmapError::Busy { page },
            Refusal::Forked => UnmapError::Forked,
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.birth.is_foreign() {
            return;
        }
        let has_memory = |state: &mut AtomicU8| *state.get_mut() != UNMAPPED;
        let left: Vec<PageId> = (0..)
            .map(PageId)
            .zip(&mut self.states)
            .filter_map(|(page, state)| has_memory(state).then_some(page))
            .collect();
        if !left.is_empty() && self.backend.capabilities().needs_fence {
            // Unmapping under a running kernel would end the engine's context. Work that already failed is no reason to stay.
            let _ = self.backend.synchronise();
        }
        for page in left {
            // What cannot be given back here goes with the region, which keeps the address range for it.
            let _ = self.give_back(page);
        }
    }
}

/// Why a batch could not be claimed.
enum Refusal {
    OutOfRange(PageId),
    State(PageId, u8),
    Forked,
}

fn count(pages: &[PageId]) -> u32 {
    u32::try_from(pages.len()).expect("a batch that was claimed has no more pages than the reservation")
}

/// Refuses handle sizes that the back-end cannot make.
pub(crate) fn check_granular(backend: &dyn Backend, bytes: Bytes) -> Result<(), MemError> {
    let capabilities = backend.capabilities();
    if bytes.0 > 0 && bytes.is_multiple_of(capabilities.granularity) {
        return Ok(());
    }
    Err(MemError::PageSize { bytes, granularity: capabilities.granularity, backend: capabilities.name })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeBackend;

    fn one_page() -> Reservation {
        let placement = Placement::uniform(Bytes::kib(64), 1).unwrap();
        let reservation =
            Reservation::new(Arc::new(FakeBackend::default()), placement, RegionOptions::default()).unwrap();
        reservation.map_pages(&[PageId(0)]).unwrap();
        reservation
    }

    #[test]
    fn readers_share_a_page_and_a_writer_has_it_alone() {
        let read = Access::Read { unmapped: false };
        assert_eq!(read.claimed(MAPPED), Some(READ));
        assert_eq!(read.claimed(READ), Some(READ + 1));
        assert_eq!(read.claimed(u8::MAX), None, "no more can be counted");
        assert_eq!(Access::Write.claimed(MAPPED), Some(WRITTEN));
        for taken in [BUSY, WRITTEN, STUCK, UNMAPPED] {
            assert_eq!((read.claimed(taken), Access::Write.claimed(taken)), (None, None));
        }
        assert_eq!(Access::Write.claimed(READ + 3), None);
        assert_eq!(Access::Read { unmapped: true }.claimed(UNMAPPED), Some(BUSY));
        for (state, after) in
            [(BUSY, UNMAPPED), (WRITTEN, MAPPED), (READ, MAPPED), (READ + 1, READ), (u8::MAX, u8::MAX - 1)]
        {
            assert_eq!(Access::released(state), after);
        }
    }

    #[test]
    fn a_page_that_is_copied_is_mapped_and_can_be_read_but_not_taken() {
        let reservation = one_page();
        reservation.set(PageId(0), READ);
        assert_eq!(reservation.page_use(PageId(0)), Some(PageUse::Mapped));
        reservation.read(ByteOffset(0), &mut [0; 8]).unwrap();
        assert!(matches!(reservation.map_pages(&[PageId(0)]), Err(MapError::AlreadyMapped { .. })));
        assert!(matches!(reservation.unmap_pages(&[PageId(0)]), Err(UnmapError::Busy { .. })));
        reservation.set(PageId(0), MAPPED);
    }

    #[test]
    fn a_copy_waits_for_the_call_that_has_its_page() {
        let reservation = one_page();
        for taken in [BUSY, WRITTEN] {
            reservation.set(PageId(0), taken);
            let begun = AtomicU32::new(0);
            thread::scope(|scope| {
                let reader = scope.spawn(|| {
                    begun.fetch_add(1, Ordering::SeqCst);
                    reservation.read(ByteOffset(0), &mut [0; 8])
                });
                let writer = scope.spawn(|| {
                    begun.fetch_add(1, Ordering::SeqCst);
                    reservation.write(ByteOffset(8), &[1; 8])
                });
                while begun.load(Ordering::SeqCst) < 2 {
                    thread::yield_now();
                }
                // Both are about to look, and find it taken: that takes them less than this.
                let until = Instant::now() + Duration::from_millis(20);
                while Instant::now() < until {
                    thread::yield_now();
                }
                reservation.set(PageId(0), MAPPED);
                reader.join().unwrap().unwrap();
                writer.join().unwrap().unwrap();
            });
        }
    }

    #[test]
    fn a_page_that_stays_busy_is_a_transient_error_and_never_called_unmapped() {
        let reservation = one_page();
        reservation.set(PageId(0), BUSY);
        let error = reservation.read(ByteOffset(0), &mut [0; 8]).unwrap_err();
        assert!(matches!(error, MemError::Busy { page: PageId(0) }) && error.is_transient(), "{error}");
        reservation.set(PageId(0), MAPPED);
    }
}
