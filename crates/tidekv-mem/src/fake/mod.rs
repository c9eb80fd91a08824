//! Memory that is only vectors: the whole contract without an operating system or a driver.
//!
//! For tests (with a small `total`, running out of memory is one call away) and for `kvbench --backend fake`, which
//! shows what our own bookkeeping costs. Addresses are invented; bytes are reached through
//! [`Reservation::read`](crate::Reservation::read) and `write`.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tidekv_core::geometry::{Extent, Placement};
use tidekv_core::units::{ByteOffset, Bytes};

use crate::meter::{Call, CallMeter};
use crate::reservation::check_granular;
use crate::{Backend, Capabilities, MemError, MemoryInfo, RawPages, Region, RegionOptions, UnmappedReads};

const GRANULARITY: Bytes = Bytes::kib(4);
const DEFAULT_TOTAL: Bytes = Bytes::gib(256);

/// See the [module](self).
#[derive(Debug)]
pub struct FakeBackend {
    capabilities: Capabilities,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    meter: CallMeter,
    total: u64,
    held: AtomicU64,
    next_base: AtomicU64,
    /// Until then there is no memory.
    refuses_until: Mutex<Option<Instant>>,
}

impl Default for FakeBackend {
    fn default() -> Self {
        Self::with_total(DEFAULT_TOTAL)
    }
}

impl FakeBackend {
    /// A device with this much memory.
    pub fn with_total(total: Bytes) -> Self {
        let capabilities = Capabilities {
            name: "fake",
            device: "fake memory".to_owned(),
            id: "fake".to_owned(),
            driver: None,
            granularity: GRANULARITY,
            host_accessible: false,
            needs_fence: false,
        };
        let shared = Shared {
            meter: CallMeter::default(),
            total: total.0,
            held: AtomicU64::new(0),
            next_base: AtomicU64::new(1 << 40),
            refuses_until: Mutex::default(),
        };
        Self { capabilities, shared: Arc::new(shared) }
    }

    /// Has no memory for anybody until then, as a device that others use: what was mapped before stays.
    pub fn refuse_until(&self, end: Instant) {
        *self.shared.refuses_until.lock().unwrap_or_else(PoisonError::into_inner) = Some(end);
    }
}

impl Backend for FakeBackend {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn memory(&self) -> Result<MemoryInfo, MemError> {
        Ok(MemoryInfo { total: Bytes(self.shared.total), free: Bytes(self.shared.total - self.held().0) })
    }

    fn held(&self) -> Bytes {
        Bytes(self.shared.held.load(Ordering::Relaxed))
    }

    fn meter(&self) -> &CallMeter {
        &self.shared.meter
    }

    fn open_region(&self, placement: &Placement, options: RegionOptions) -> Result<Box<dyn Region>, MemError> {
        self.shared.meter.announce(Call::Reserve)?;
        let slots = placement.page_count() as usize * placement.handles_per_page() as usize;
        let base = self.shared.next_base.fetch_add(placement.reservation_bytes().0, Ordering::Relaxed);
        Ok(Box::new(FakeRegion {
            shared: Arc::clone(&self.shared),
            placement: *placement,
            options,
            base,
            slots: (0..slots).map(|_| Mutex::new(Slot::default())).collect(),
        }))
    }

    fn raw_pages(&self, page_bytes: Bytes, pages: u32) -> Result<Box<dyn RawPages>, MemError> {
        check_granular(self, page_bytes)?;
        Ok(Box::new(FakeRaw { page_bytes, pages: (0..pages).map(|_| Slot::default()).collect() }))
    }
}

/// One handle: its memory, and how far it came.
#[derive(Debug, Default)]
struct Slot {
    memory: Option<FakeMemory>,
    mapped: bool,
    accessible: bool,
}

impl Slot {
    fn create(&mut self, bytes: Bytes) -> Result<(), MemError> {
        let len = usize::try_from(bytes.0).map_err(|_| MemError::OutOfMemory { wanted: bytes, free: None })?;
        self.memory = Some(FakeMemory { len, written: None });
        Ok(())
    }
}

/// Zeros until something is written: fake memory that is never touched costs nothing, however much of it there is.
#[derive(Debug)]
struct FakeMemory {
    len: usize,
    written: Option<Box<[u8]>>,
}

impl FakeMemory {
    fn read(&self, range: Range<usize>, into: &mut [u8]) {
        match &self.written {
            Some(bytes) => into.copy_from_slice(&bytes[range]),
            None => into.fill(0),
        }
    }

    fn write(&mut self, range: Range<usize>, from: &[u8]) {
        let bytes = self.written.get_or_insert_with(|| vec![0; self.len].into_boxed_slice());
        bytes[range].copy_from_slice(from);
    }
}

#[derive(Debug)]
struct FakeRegion {
    shared: Arc<Shared>,
    placement: Placement,
    options: RegionOptions,
    base: u64,
    slots: Box<[Mutex<Slot>]>,
}

impl FakeRegion {
    fn slot(&self, slot: usize) -> MutexGuard<'_, Slot> {
        // A panic while holding the lock is a failed test; the slot itself is still sound.
        self.slots[slot].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The slot and the range inside it that a copy is about.
    fn located(&self, offset: ByteOffset, len: usize) -> Result<(MutexGuard<'_, Slot>, Range<usize>), MemError> {
        let not_mapped = || MemError::NotMapped { offset: offset.0, end: offset.0 + len as u64 };
        let place = self.placement.locate(offset).ok_or_else(not_mapped)?;
        let start = usize::try_from(place.within).map_err(|_| not_mapped())?;
        Ok((self.slot(self.placement.slot(place.page, place.handle)), start..start + len))
    }
}

impl Region for FakeRegion {
    fn base(&self) -> u64 {
        self.base
    }

    unsafe fn map(&self, slot: usize, extent: Extent) -> Result<(), MemError> {
        let mut slot = self.slot(slot);
        self.shared.meter.announce(Call::Create)?;
        let refuses_until = *self.shared.refuses_until.lock().unwrap_or_else(PoisonError::into_inner);
        if refuses_until.is_some_and(|end| Instant::now() < end) {
            return Err(MemError::OutOfMemory { wanted: extent.bytes, free: Some(Bytes::ZERO) });
        }
        let take = |held: u64| held.checked_add(extent.bytes.0).filter(|&held| held <= self.shared.total);
        if let Err(held) = self.shared.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
            return Err(MemError::OutOfMemory { wanted: extent.bytes, free: Some(Bytes(self.shared.total - held)) });
        }
        if let Err(error) = slot.create(extent.bytes) {
            self.shared.held.fetch_sub(extent.bytes.0, Ordering::Relaxed);
            return Err(error);
        }
        self.shared.meter.announce(Call::Map)?;
        slot.mapped = true;
        self.shared.meter.announce(Call::SetAccess)?;
        slot.accessible = true;
        Ok(())
    }

    unsafe fn unmap(&self, slot: usize, extent: Extent) -> Result<(), MemError> {
        let mut slot = self.slot(slot);
        if slot.mapped {
            self.shared.meter.announce(Call::Unmap)?;
            (slot.mapped, slot.accessible) = (false, false);
        }
        if slot.memory.is_some() {
            self.shared.meter.announce(Call::Release)?;
            slot.memory = None;
            self.shared.held.fetch_sub(extent.bytes.0, Ordering::Relaxed);
        }
        Ok(())
    }

    unsafe fn read(&self, offset: ByteOffset, into: &mut [u8]) -> Result<(), MemError> {
        let (slot, range) = self.located(offset, into.len())?;
        match &slot.memory {
            Some(memory) if slot.accessible => memory.read(range, into),
            _ if self.options.unmapped_reads == UnmappedReads::Zeros => into.fill(0),
            _ => {
                return Err(MemError::NotMapped { offset: offset.0, end: offset.0 + into.len() as u64 });
            }
        }
        Ok(())
    }

    unsafe fn write(&self, offset: ByteOffset, from: &[u8]) -> Result<(), MemError> {
        let (mut slot, range) = self.located(offset, from.len())?;
        let accessible = slot.accessible;
        match &mut slot.memory {
            Some(memory) if accessible => memory.write(range, from),
            _ => {
                return Err(MemError::NotMapped { offset: offset.0, end: offset.0 + from.len() as u64 });
            }
        }
        Ok(())
    }

    unsafe fn export(&self, _slot: usize) -> Result<OwnedFd, MemError> {
        Err(MemError::Unsupported { option: "sharing fake memory with other processes" })
    }

    fn witness(&self) -> Option<Bytes> {
        let bytes = |slot: &Mutex<Slot>| {
            let slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
            slot.memory.as_ref().map_or(0, |memory| memory.len as u64)
        };
        Some(Bytes(self.slots.iter().map(bytes).sum()))
    }
}

impl Drop for FakeRegion {
    fn drop(&mut self) {
        let left = self.witness().map_or(0, |bytes| bytes.0);
        self.shared.held.fetch_sub(left, Ordering::Relaxed);
    }
}

#[derive(Debug)]
struct FakeRaw {
    page_bytes: Bytes,
    pages: Vec<Slot>,
}

impl RawPages for FakeRaw {
    fn create(&mut self, page: usize) -> Result<(), MemError> {
        self.pages[page].create(self.page_bytes)
    }

    fn map(&mut self, page: usize) -> Result<(), MemError> {
        self.pages[page].mapped = true;
        Ok(())
    }

    fn set_access(&mut self, page: usize) -> Result<(), MemError> {
        self.pages[page].accessible = true;
        Ok(())
    }

    fn unmap(&mut self, page: usize) -> Result<(), MemError> {
        (self.pages[page].mapped, self.pages[page].accessible) = (false, false);
        Ok(())
    }

    fn release(&mut self, page: usize) -> Result<(), MemError> {
        self.pages[page].memory = None;
        Ok(())
    }
}
