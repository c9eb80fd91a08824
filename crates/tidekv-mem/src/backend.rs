//! The contract of a back-end: one trait for where memory comes from, one for an address range it can appear in.
//!
//! What differs between back-ends is data ([`Capabilities`]), not code paths. The conformance suite in
//! `tests/conformance.rs` runs against all of them.

use std::fmt;
use std::os::fd::OwnedFd;

use tidekv_core::geometry::{Extent, Placement};
use tidekv_core::units::{ByteOffset, Bytes};

use crate::meter::CallMeter;
use crate::{MemError, RawPages};

/// What a back-end is like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// `host`, `cuda` or `fake`.
    pub name: &'static str,
    /// The device in words, for tables and results.
    pub device: String,
    /// Names the device in files that processes share: `host`, `fake`, or the UUID of the GPU (or MIG slice), which is the
    /// same in every process whatever `CUDA_VISIBLE_DEVICES` says.
    pub id: String,
    /// Version of the driver below, where there is one.
    pub driver: Option<String>,
    /// What a handle's size must be a multiple of.
    pub granularity: Bytes,
    /// The CPU can use the addresses directly.
    pub host_accessible: bool,
    /// A device may still be reading a page that was freed: unmap only behind a fence.
    pub needs_fence: bool,
}

/// Memory of the device (or the machine) as a whole, other users included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// All of it that we could ever get.
    pub total: Bytes,
    /// What is not taken by anyone.
    pub free: Bytes,
}

/// What happens on a read of an address that has no page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnmappedReads {
    /// The access faults: a stray read is found where it happens.
    #[default]
    Fault,
    /// Zeros are read and a write still faults: for engines that read unmapped ids and mask the result. On CUDA this
    /// costs one mapping per handle at start-up and two more driver calls per map and unmap.
    Zeros,
}

/// Choices for one address range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionOptions {
    /// Behaviour of addresses without a page.
    pub unmapped_reads: UnmappedReads,
}

/// Where memory comes from.
pub trait Backend: Send + Sync + fmt::Debug {
    /// What it is like.
    fn capabilities(&self) -> &Capabilities;

    /// Free and total memory, now.
    ///
    /// # Errors
    /// When the system below does not say.
    fn memory(&self) -> Result<MemoryInfo, MemError>;

    /// Physical memory taken by this back-end and not yet given back, cached handles included.
    fn held(&self) -> Bytes;

    /// Gives back what is kept for reuse only, and says how much that was.
    ///
    /// # Errors
    /// When the driver refuses; what was given back until then stays given back.
    fn trim_cache(&self) -> Result<Bytes, MemError> {
        Ok(Bytes::ZERO)
    }

    /// Waits until the device has finished everything that was submitted to it, in any stream.
    ///
    /// # Errors
    /// When the driver reports that earlier work failed.
    fn synchronise(&self) -> Result<(), MemError> {
        Ok(())
    }

    /// The calls made so far.
    fn meter(&self) -> &CallMeter;

    /// Takes address space for a placement. No physical memory is taken.
    ///
    /// # Errors
    /// A handle size off the granularity, or address space that cannot be had.
    fn open_region(&self, placement: &Placement, options: RegionOptions) -> Result<Box<dyn Region>, MemError>;

    /// The bare calls this back-end is built on, for benchmarks to compare with.
    ///
    /// # Errors
    /// As [`open_region`](Self::open_region).
    fn raw_pages(&self, page_bytes: Bytes, pages: u32) -> Result<Box<dyn RawPages>, MemError>;
}

/// One address range with room for the handles of a placement. Its addresses stay the same for its whole life.
///
/// Dropping it gives back everything, in the process that made it; in a forked child dropping does nothing.
pub trait Region: Send + Sync + fmt::Debug {
    /// Address of byte 0.
    fn base(&self) -> u64;

    /// Puts memory behind one handle's bytes. When this fails, the slot may be half done:
    /// the caller then calls [`unmap`](Self::unmap) on it.
    ///
    /// # Errors
    /// The system below refused; memory running out is [`MemError::OutOfMemory`].
    ///
    /// # Safety
    /// `extent` is that of `slot` in the placement this region was opened for, the slot has no memory, and no other
    /// call uses the slot at the same time.
    unsafe fn map(&self, slot: usize, extent: Extent) -> Result<(), MemError>;

    /// Takes the memory behind one handle's bytes away and gives it back. Goes on from wherever an earlier `map` or
    /// `unmap` of the slot stopped, and does nothing on a slot without memory.
    ///
    /// # Errors
    /// The system below refused; the slot keeps what could not be given back, and the call may be repeated.
    ///
    /// # Safety
    /// `extent` is that of `slot`, no other call uses the slot at the same time, and nothing reads or writes its
    /// bytes any more.
    unsafe fn unmap(&self, slot: usize, extent: Extent) -> Result<(), MemError>;

    /// Copies bytes out.
    ///
    /// # Errors
    /// The system below refused.
    ///
    /// # Safety
    /// The range lies inside one handle's bytes, which are mapped and stay so during the call.
    unsafe fn read(&self, offset: ByteOffset, into: &mut [u8]) -> Result<(), MemError>;

    /// Copies bytes in.
    ///
    /// # Errors
    /// The system below refused.
    ///
    /// # Safety
    /// As [`read`](Self::read), and nothing else reads or writes the range during the call.
    unsafe fn write(&self, offset: ByteOffset, from: &[u8]) -> Result<(), MemError>;

    /// A descriptor through which another process can map the slot's memory.
    ///
    /// # Errors
    /// [`MemError::Unsupported`] where the back-end was not opened for sharing.
    ///
    /// # Safety
    /// The slot is mapped and stays so during the call.
    unsafe fn export(&self, slot: usize) -> Result<OwnedFd, MemError>;

    /// Memory behind this region as an independent witness counts it (the kernel's count of the memory file, say);
    /// `None` where there is no such witness.
    fn witness(&self) -> Option<Bytes>;
}
