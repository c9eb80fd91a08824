//! One range of device addresses and the handles behind it.
//!
//! A slot's handle is kept in one word (0 for none) and whether it is mapped in another, so that giving back can go on
//! from wherever it stopped: unmap if mapped, release if held.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

use cudarc::driver::sys::CUdeviceptr;
use tidekv_core::geometry::{Extent, Placement};
use tidekv_core::units::{ByteOffset, Bytes, PageId};

use super::Shared;
use super::context::Entered;
use super::memory::Handle;
use crate::meter::Call;
use crate::{MemError, Region, RegionOptions, UnmappedReads};

/// What is behind a slot's addresses.
const NOTHING: u8 = 0;
const ZEROS: u8 = 1;
const PAGE: u8 = 2;

#[derive(Debug)]
pub(super) struct CudaRegion {
    base: CUdeviceptr,
    bytes: Bytes,
    handle_bytes: Bytes,
    placement: Placement,
    slots: Box<[Slot]>,
    /// The page of zeros that stands behind every slot without memory, where that was asked for.
    zeros: Option<Handle>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Slot {
    /// The driver's handle; 0 for none (the driver's handles are pointers and never 0).
    handle: AtomicU64,
    behind: AtomicU8,
}

impl CudaRegion {
    pub(super) fn new(shared: Arc<Shared>, placement: &Placement, options: RegionOptions) -> Result<Self, MemError> {
        let bytes = placement.reservation_bytes();
        let base = shared.context.enter()?.reserve(bytes, shared.granularity)?;
        let slots = placement.page_count() as usize * placement.handles_per_page() as usize;
        let mut region = Self {
            base,
            bytes,
            handle_bytes: placement.handle_bytes(),
            placement: *placement,
            slots: (0..slots).map(|_| Slot::default()).collect(),
            zeros: None,
            shared,
        };
        if options.unmapped_reads == UnmappedReads::Zeros {
            region.fill_with_zeros()?;
        }
        Ok(region)
    }

    /// Puts one shared, read-only page of zeros behind every slot. On failure the region's drop undoes it.
    fn fill_with_zeros(&mut self) -> Result<(), MemError> {
        let shared = Arc::clone(&self.shared);
        let entered = shared.context.enter()?;
        let zeros = shared.handles.take(&entered, &shared.recipe, self.handle_bytes, &shared.meter)?;
        self.zeros = Some(zeros);
        for page in (0..self.placement.page_count()).map(PageId) {
            for handle in 0..self.placement.handles_per_page() {
                let slot = &self.slots[self.placement.slot(page, handle)];
                let extent = self.placement.extent(page, handle);
                let first = page == PageId(0) && handle == 0;
                if first {
                    entered.map(self.at(extent.offset), extent.bytes, zeros)?;
                    slot.behind.store(ZEROS, Relaxed);
                    entered.set_access(&shared.recipe, self.at(extent.offset), extent.bytes)?;
                    // SAFETY: just mapped writable, and nobody knows the address yet.
                    unsafe { entered.fill_zero(self.at(extent.offset), extent.bytes) }?;
                    entered.synchronise()?;
                    // SAFETY: the fill is over and nobody else used the address.
                    unsafe { entered.unmap(self.at(extent.offset), extent.bytes) }?;
                    slot.behind.store(NOTHING, Relaxed);
                }
                self.show_zeros(&entered, slot, extent)?;
            }
        }
        Ok(())
    }

    fn show_zeros(&self, entered: &Entered, slot: &Slot, extent: Extent) -> Result<(), MemError> {
        let Some(zeros) = self.zeros else { return Ok(()) };
        entered.map(self.at(extent.offset), extent.bytes, zeros)?;
        slot.behind.store(ZEROS, Relaxed);
        entered.set_read_only(&self.shared.recipe, self.at(extent.offset), extent.bytes)
    }

    fn at(&self, offset: ByteOffset) -> CUdeviceptr {
        self.base + offset.0
    }

    /// # Safety
    /// As [`Region::unmap`].
    unsafe fn hide(&self, entered: &Entered, slot: &Slot, extent: Extent) -> Result<(), MemError> {
        // SAFETY: nothing uses the slot's bytes, by the trait's contract.
        unsafe { entered.unmap(self.at(extent.offset), extent.bytes) }?;
        slot.behind.store(NOTHING, Relaxed);
        Ok(())
    }
}

impl Region for CudaRegion {
    fn base(&self) -> u64 {
        self.base
    }

    unsafe fn map(&self, slot: usize, extent: Extent) -> Result<(), MemError> {
        let Shared { handles, meter, recipe, context, .. } = &*self.shared;
        let slot = &self.slots[slot];
        let entered = context.enter()?;
        let handle = handles.take(&entered, recipe, extent.bytes, meter)?;
        slot.handle.store(handle, Relaxed);
        meter.announce(Call::Map)?;
        if slot.behind.load(Relaxed) == ZEROS {
            // SAFETY: the slot has no page, so nothing but stray reads of zeros used it; engines that read unmapped ids
            // are told to map between steps.
            unsafe { self.hide(&entered, slot, extent) }?;
        }
        entered.map(self.at(extent.offset), extent.bytes, handle)?;
        slot.behind.store(PAGE, Relaxed);
        meter.announce(Call::SetAccess)?;
        entered.set_access(recipe, self.at(extent.offset), extent.bytes)
    }

    unsafe fn unmap(&self, slot: usize, extent: Extent) -> Result<(), MemError> {
        let Shared { handles, meter, context, .. } = &*self.shared;
        let slot = &self.slots[slot];
        let entered = context.enter()?;
        if slot.behind.load(Relaxed) == PAGE {
            meter.announce(Call::Unmap)?;
            // SAFETY: the trait's contract.
            unsafe { self.hide(&entered, slot, extent) }?;
        }
        let handle = slot.handle.load(Relaxed);
        if handle != 0 {
            handles.give(&entered, handle, extent.bytes, meter)?;
            slot.handle.store(0, Relaxed);
        }
        if slot.behind.load(Relaxed) == NOTHING {
            self.show_zeros(&entered, slot, extent)?;
        }
        Ok(())
    }

    unsafe fn read(&self, offset: ByteOffset, into: &mut [u8]) -> Result<(), MemError> {
        // SAFETY: the trait's contract.
        unsafe { self.shared.context.enter()?.copy_out(self.at(offset), into) }
    }

    unsafe fn write(&self, offset: ByteOffset, from: &[u8]) -> Result<(), MemError> {
        // SAFETY: the trait's contract.
        unsafe { self.shared.context.enter()?.copy_in(self.at(offset), from) }
    }

    unsafe fn export(&self, slot: usize) -> Result<OwnedFd, MemError> {
        if !self.shared.options.shareable {
            return Err(MemError::Unsupported { option: "exporting a page of a back-end opened without `shareable`" });
        }
        self.shared.context.enter()?.export(self.slots[slot].handle.load(Relaxed))
    }

    fn witness(&self) -> Option<Bytes> {
        None
    }
}

impl Drop for CudaRegion {
    fn drop(&mut self) {
        let shared = Arc::clone(&self.shared);
        // In a forked child the memory is the parent's: there is nothing to do, and `enter` says so.
        let Ok(entered) = shared.context.enter() else { return };
        let mut clean = true;
        for page in (0..self.placement.page_count()).map(PageId) {
            for handle in 0..self.placement.handles_per_page() {
                let slot = &self.slots[self.placement.slot(page, handle)];
                let extent = self.placement.extent(page, handle);
                if slot.behind.load(Relaxed) != NOTHING {
                    // SAFETY: with the region go all users of its addresses.
                    clean &= unsafe { self.hide(&entered, slot, extent) }.is_ok();
                }
                let held = slot.handle.load(Relaxed);
                if held != 0 {
                    // What the driver will not take back stays counted in `held`.
                    let _ = shared.handles.give(&entered, held, extent.bytes, &shared.meter);
                }
            }
        }
        if let Some(zeros) = self.zeros {
            let _ = shared.handles.give(&entered, zeros, self.handle_bytes, &shared.meter);
        }
        if clean {
            // Addresses that cannot be freed stay taken; they cost nothing else.
            let _ = entered.free_addresses(self.base, self.bytes);
        }
    }
}
