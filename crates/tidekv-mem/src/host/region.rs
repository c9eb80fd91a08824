//! One address range over one memory file.

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use tidekv_core::geometry::{Extent, Placement};
use tidekv_core::units::{ByteOffset, Bytes};

use super::{HostOptions, HugePages, Shared, memfd_flags};
use crate::meter::Call;
use crate::{MemError, Region, RegionOptions, UnmappedReads};
use tidekv_fork::{Birth, ClosedInChild};

/// The slot's bytes are taken from the budget and may be committed in the memory file.
const COMMITTED: u8 = 1;
/// The slot's addresses lead to the memory file.
const MAPPED: u8 = 2;

#[derive(Debug)]
pub(super) struct HostRegion {
    space: AddressSpace,
    file: ClosedInChild,
    /// How far each slot came: bits [`COMMITTED`] and [`MAPPED`]. One user at a time, by the trait's contract.
    slots: Box<[AtomicU8]>,
    handle_bytes: Bytes,
    shared: Arc<Shared>,
}

impl HostRegion {
    pub(super) fn new(shared: Arc<Shared>, placement: &Placement, options: RegionOptions) -> Result<Self, MemError> {
        let file = memory_file(shared.options, placement.reservation_bytes())?;
        let space = AddressSpace::new(placement.reservation_bytes(), options.unmapped_reads)?;
        let slots = placement.page_count() as usize * placement.handles_per_page() as usize;
        Ok(Self {
            space,
            file,
            slots: (0..slots).map(|_| AtomicU8::new(0)).collect(),
            handle_bytes: placement.handle_bytes(),
            shared,
        })
    }
}

impl Region for HostRegion {
    fn base(&self) -> u64 {
        self.space.base.addr() as u64
    }

    unsafe fn map(&self, slot: usize, extent: Extent) -> Result<(), MemError> {
        let Shared { meter, budget, options } = &*self.shared;
        let state = &self.slots[slot];
        meter.announce(Call::Create)?;
        budget.take(extent.bytes)?;
        // From here on `unmap` returns the bytes, even if committing them fails midway.
        state.store(COMMITTED, Relaxed);
        if !options.lazy {
            commit(self.file.as_fd(), extent)?;
        }
        meter.announce(Call::Map)?;
        // SAFETY: the extent is this slot's part of the address range, which nothing else uses.
        unsafe { self.space.attach(extent, self.file.as_fd()) }?;
        state.store(COMMITTED | MAPPED, Relaxed);
        meter.announce(Call::SetAccess)?;
        // SAFETY: the extent lies in our range and was just mapped.
        unsafe { self.space.keep_from_children(extent) }?;
        if options.huge_pages == HugePages::Transparent {
            // SAFETY: as above. A kernel that will not is no error: huge pages are a wish here.
            let _ = unsafe { madvise(self.space.at(extent.offset), as_len(extent.bytes), Advice::LinuxHugepage) };
        }
        Ok(())
    }

    unsafe fn unmap(&self, slot: usize, extent: Extent) -> Result<(), MemError> {
        let Shared { meter, budget, .. } = &*self.shared;
        let state = &self.slots[slot];
        if state.load(Relaxed) & MAPPED != 0 {
            meter.announce(Call::Unmap)?;
            // SAFETY: the extent is this slot's part of the range, and its bytes have no user any more.
            unsafe { self.space.detach(extent) }?;
            state.store(COMMITTED, Relaxed);
        }
        if state.load(Relaxed) & COMMITTED != 0 {
            meter.announce(Call::Release)?;
            punch(self.file.as_fd(), extent)?;
            state.store(0, Relaxed);
            budget.give(extent.bytes);
        }
        Ok(())
    }

    unsafe fn read(&self, offset: ByteOffset, into: &mut [u8]) -> Result<(), MemError> {
        // SAFETY: the range is mapped and readable for the length of the call, by the trait's contract; `into` is
        // ordinary memory and cannot overlap a reservation.
        unsafe { ptr::copy_nonoverlapping(self.space.at(offset).cast::<u8>(), into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    unsafe fn write(&self, offset: ByteOffset, from: &[u8]) -> Result<(), MemError> {
        // SAFETY: as in `read`; nothing else touches the range meanwhile, by the trait's contract.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), self.space.at(offset).cast::<u8>(), from.len()) };
        Ok(())
    }

    unsafe fn export(&self, _slot: usize) -> Result<OwnedFd, MemError> {
        // The whole memory file: the slot's bytes are at the slot's offset.
        self.file.as_fd().try_clone_to_owned().map_err(|source| MemError::System {
            call: "dup",
            doing: "sharing the memory file",
            source,
        })
    }

    fn witness(&self) -> Option<Bytes> {
        let stat = rustix::fs::fstat(self.file.as_fd()).ok()?;
        u64::try_from(stat.st_blocks).ok().map(|blocks| Bytes(blocks * 512))
    }
}

impl Drop for HostRegion {
    fn drop(&mut self) {
        // The memory goes with the file's last descriptor and mapping; what stuck in a slot goes with them.
        let stuck = self.slots.iter().filter(|slot| slot.load(Relaxed) & COMMITTED != 0).count();
        self.shared.budget.give(Bytes(self.handle_bytes.0 * stuck as u64));
    }
}

/// A range of addresses that belongs to us until it is dropped.
#[derive(Debug)]
pub(super) struct AddressSpace {
    base: *mut c_void,
    len: Bytes,
    unmapped_reads: UnmappedReads,
    birth: Birth,
}

// SAFETY: the pointer is an address, not a borrow: the range belongs to this value alone, and every access through it is
// by a method whose contract keeps concurrent users apart.
unsafe impl Send for AddressSpace {}
// SAFETY: as above.
unsafe impl Sync for AddressSpace {}

impl AddressSpace {
    pub(super) fn new(len: Bytes, unmapped_reads: UnmappedReads) -> Result<Self, MemError> {
        // SAFETY: a fresh mapping where the kernel likes; it replaces nothing.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), as_len(len), protection(unmapped_reads), empty_flags()) }
            .map_err(|errno| {
            MemError::system("mmap", "reserving address space (is a limit on virtual memory set? see ulimit -v)", errno)
        })?;
        let space = Self { base, len, unmapped_reads, birth: Birth::here() };
        // SAFETY: the extent is the whole range, which is mapped.
        unsafe { space.keep_from_children(Extent { offset: ByteOffset(0), bytes: len }) }?;
        Ok(space)
    }

    pub(super) fn at(&self, offset: ByteOffset) -> *mut c_void {
        debug_assert!(offset.0 <= self.len.0);
        self.base.wrapping_byte_add(as_len(Bytes(offset.0)))
    }

    /// Puts the file's bytes at the same offset behind the extent's addresses.
    ///
    /// # Safety
    /// The extent lies in this range, on page boundaries, and nothing uses its addresses.
    pub(super) unsafe fn attach(&self, extent: Extent, file: BorrowedFd<'_>) -> Result<(), MemError> {
        // SAFETY: MAP_FIXED replaces what the range had at these addresses, which nothing uses.
        let mapped = unsafe {
            mmap(
                self.at(extent.offset),
                as_len(extent.bytes),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::FIXED,
                file,
                extent.offset.0,
            )
        };
        mapped.map(drop).map_err(map_refused)
    }

    /// Makes the extent's addresses as they were when the range was new.
    ///
    /// # Safety
    /// As [`attach`](Self::attach).
    pub(super) unsafe fn detach(&self, extent: Extent) -> Result<(), MemError> {
        let flags = empty_flags() | MapFlags::FIXED;
        // SAFETY: as in `attach`.
        unsafe { mmap_anonymous(self.at(extent.offset), as_len(extent.bytes), protection(self.unmapped_reads), flags) }
            .map_err(map_refused)?;
        // SAFETY: the extent was just mapped.
        unsafe { self.keep_from_children(extent) }
    }

    /// Forked children do not get these addresses. MAP_FIXED forgets this, so it follows each one.
    ///
    /// # Safety
    /// The extent lies in this range.
    pub(super) unsafe fn keep_from_children(&self, extent: Extent) -> Result<(), MemError> {
        // SAFETY: the range is ours, and the advice changes what a fork copies, nothing else.
        unsafe { madvise(self.at(extent.offset), as_len(extent.bytes), Advice::LinuxDontFork) }
            .map_err(|errno| MemError::system("madvise", "keeping pages from forked children", errno))
    }
}

impl Drop for AddressSpace {
    fn drop(&mut self) {
        if self.birth.is_foreign() {
            // In a forked child these addresses were never mapped, or are someone else's by now.
            return;
        }
        // SAFETY: the range is ours, and with this value goes the last user. A failure leaves addresses taken, nothing else.
        let _ = unsafe { munmap(self.base, as_len(self.len)) };
    }
}

/// A memory file with room for every page, all holes.
pub(super) fn memory_file(options: HostOptions, bytes: Bytes) -> Result<ClosedInChild, MemError> {
    let file = ClosedInChild::open(|| rustix::fs::memfd_create("tidekv", memfd_flags(options)))
        .map_err(|errno| MemError::system("memfd_create", "making the memory file", errno))?;
    rustix::fs::ftruncate(&file, bytes.0)
        .map_err(|errno| MemError::system("ftruncate", "sizing the memory file", errno))?;
    Ok(file)
}

pub(super) fn commit(file: BorrowedFd<'_>, extent: Extent) -> Result<(), MemError> {
    change_file(file, FallocateFlags::empty(), extent).map_err(|errno| match errno {
        Errno::NOMEM | Errno::NOSPC => MemError::OutOfMemory { wanted: extent.bytes, free: None },
        other => MemError::system("fallocate", "committing memory", other),
    })
}

pub(super) fn punch(file: BorrowedFd<'_>, extent: Extent) -> Result<(), MemError> {
    change_file(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, extent)
        .map_err(|errno| MemError::system("fallocate", "giving memory back", errno))
}

fn change_file(file: BorrowedFd<'_>, flags: FallocateFlags, extent: Extent) -> Result<(), Errno> {
    // A signal undoes an unfinished commit; the next try starts over, so this ends once signals pause.
    rustix::io::retry_on_intr(|| fallocate(file, flags, extent.offset.0, extent.bytes.0))
}

/// Addresses without a page: inaccessible, or the kernel's own page of zeros.
fn protection(unmapped_reads: UnmappedReads) -> ProtFlags {
    match unmapped_reads {
        UnmappedReads::Fault => ProtFlags::empty(),
        UnmappedReads::Zeros => ProtFlags::READ,
    }
}

fn empty_flags() -> MapFlags {
    MapFlags::PRIVATE | MapFlags::NORESERVE
}

fn map_refused(errno: Errno) -> MemError {
    let doing = match errno {
        Errno::NOMEM => "placing a page (does the process have too many mappings? raise vm.max_map_count)",
        _ => "placing a page",
    };
    MemError::system("mmap", doing, errno)
}

fn as_len(bytes: Bytes) -> usize {
    usize::try_from(bytes.0).expect("a placement is below 2^46 bytes, and we build for 64-bit machines")
}
