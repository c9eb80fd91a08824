//! A device for crates that run work on it: its context, functions of the driver, and plain memory.
//!
//! ```text
//!   CudaDevice ──enter──> Entered          the context is current on this thread until it is dropped
//!       |  \───functions──> a table        what else the caller asks of the driver, found by name
//!       |
//!       |── DeviceMemory                   zeroed bytes of the card, one address for life: block tables, outputs
//!       └── PinnedMemory                   zeroed bytes of the host at an address that the card reads too
//! ```
//!
//! What a pool maps page by page comes from [`CudaBackend`](super::CudaBackend); this is for the small state beside it
//! that is allocated once and never moves.

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use tidekv_core::units::Bytes;

use super::context::{Context, Entered};
use super::driver::{self, Code, Driver, FunctionTable, call};
use super::memory::as_len;
use super::{device_name, find_device};
use crate::MemError;

/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`: page-locked for every context, and mapped for the device.
const PINNED_AND_MAPPED: u32 = 1 | 2;

/// One GPU and its primary context, shared by everything that holds a clone.
#[derive(Clone, Debug)]
pub struct CudaDevice {
    number: u32,
    context: Arc<Context>,
}

impl CudaDevice {
    /// Opens device `number` and shares its primary context, the one that PyTorch and the CUDA runtime use.
    ///
    /// # Errors
    /// [`MemError::Unavailable`] without a driver that can do this, [`MemError::NoSuchDevice`].
    pub fn open(number: u32) -> Result<Self, MemError> {
        let driver = Driver::load()?;
        let device = find_device(driver, number)?;
        Ok(Self { number, context: Arc::new(Context::retain(driver, device)?) })
    }

    /// As CUDA counts them, after `CUDA_VISIBLE_DEVICES`.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// What the driver calls the card.
    ///
    /// # Errors
    /// What the driver says.
    pub fn name(&self) -> Result<String, MemError> {
        device_name(self.context.driver, self.context.device)
    }

    /// Makes the context current on this thread until the guard is dropped. One query where it is current already.
    ///
    /// # Errors
    /// [`MemError::Forked`] in a child of the process that opened the device.
    pub fn enter(&self) -> Result<Entered, MemError> {
        self.context.enter()
    }

    /// Finds every function of a table that [`driver_functions!`](crate::driver_functions) made.
    ///
    /// # Errors
    /// [`MemError::Unavailable`], naming the function that this driver lacks.
    pub fn functions<T: FunctionTable>(&self) -> Result<T, MemError> {
        // A device exists only where the driver was loaded, as `find` demands.
        T::look_up(&driver::find)
    }

    /// Turns what a function of such a table returned into a value.
    ///
    /// # Errors
    /// [`MemError::OutOfMemory`] or [`MemError::Driver`], with the driver's own words.
    #[inline]
    pub fn check(&self, function: &'static str, code: Code) -> Result<(), MemError> {
        if code == 0 { Ok(()) } else { self.context.driver.check(function, code, Bytes::ZERO) }
    }
}

/// Bytes of the card's memory, zero at first. Given back when dropped; whoever drops it knows that no work uses it any more.
#[derive(Debug)]
pub struct DeviceMemory {
    address: CUdeviceptr,
    bytes: Bytes,
    device: CudaDevice,
}

impl DeviceMemory {
    /// Takes `bytes` (at least one) and clears them, complete when this returns.
    ///
    /// # Errors
    /// [`MemError::OutOfMemory`], and what else the driver says.
    pub fn zeroed(device: &CudaDevice, bytes: Bytes) -> Result<Self, MemError> {
        let entered = device.enter()?;
        let bytes = bytes.max(Bytes(1));
        let mut address = 0;
        // SAFETY: a place to write to.
        unsafe { call!(entered.driver, alloc(&raw mut address, as_len(bytes)), bytes) }?;
        let memory = Self { address, bytes, device: device.clone() };
        // SAFETY: just allocated, and nobody knows the address yet.
        unsafe { entered.fill_zero(address, bytes) }?;
        // Streams that do not wait for the default one must find zeros.
        entered.synchronise()?;
        Ok(memory)
    }

    /// Where it is, for kernels.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How much.
    pub fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// Copies what begins `offset` bytes into this memory to the host; complete when it returns.
    ///
    /// # Safety
    /// No work on the device is writing these bytes: the caller has waited for it.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If that is not all inside this memory.
    pub unsafe fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), MemError> {
        let inside = offset.checked_add(into.len() as u64).is_some_and(|end| end <= self.bytes.0);
        assert!(inside, "{} bytes from {offset} on, of {}", into.len(), self.bytes);
        // SAFETY: inside the allocation, which lives as long as `self`; the rest is the caller's promise.
        unsafe { self.device.enter()?.copy_out(self.address + offset, into) }
    }

    /// Copies from the host to what begins `offset` bytes into this memory; complete when it returns.
    ///
    /// # Safety
    /// No work on the device is using these bytes: the caller has waited for it.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If that is not all inside this memory.
    pub unsafe fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), MemError> {
        let inside = offset.checked_add(from.len() as u64).is_some_and(|end| end <= self.bytes.0);
        assert!(inside, "{} bytes from {offset} on, of {}", from.len(), self.bytes);
        let entered = self.device.enter()?;
        // SAFETY: inside the allocation, which lives as long as `self`; the rest is the caller's promise.
        unsafe { entered.copy_in(self.address + offset, from) }?;
        // The driver returns when it has read `from`; the bytes may still be on their way, and streams that do not wait for the default
        // one would not wait for them.
        entered.synchronise()
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // In a forked child the memory is the parent's, and `enter` says so.
        if let Ok(entered) = self.device.enter() {
            // SAFETY: allocated by `zeroed` and freed once. A failure (driver already gone) harms nobody.
            unsafe { (entered.driver.free)(self.address) };
        }
    }
}

/// Page-locked bytes of the host that the device reads at an address of its own. Zero at first.
#[derive(Debug)]
pub struct PinnedMemory {
    host: NonNull<u8>,
    address: CUdeviceptr,
    bytes: usize,
    device: CudaDevice,
}

// SAFETY: plain memory with one owner; the pointer is not tied to a thread.
unsafe impl Send for PinnedMemory {}
// SAFETY: shared references give out no way to write.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// Takes `bytes` (at least one) and clears them.
    ///
    /// # Errors
    /// [`MemError::OutOfMemory`], and what else the driver says.
    pub fn zeroed(device: &CudaDevice, bytes: usize) -> Result<Self, MemError> {
        let entered = device.enter()?;
        let bytes = bytes.max(1);
        let mut host: *mut c_void = ptr::null_mut();
        // SAFETY: a place to write to.
        unsafe { call!(entered.driver, host_alloc(&raw mut host, bytes, PINNED_AND_MAPPED), Bytes(bytes as u64)) }?;
        let host = NonNull::new(host.cast::<u8>()).expect("the driver succeeded, so there is an address");
        let mut memory = Self { host, address: 0, bytes, device: device.clone() };
        // SAFETY: a place to write to, and memory that was mapped for the device.
        unsafe { call!(entered.driver, host_address(&raw mut memory.address, host.as_ptr().cast(), 0)) }?;
        // SAFETY: `bytes` bytes, just allocated.
        unsafe { ptr::write_bytes(host.as_ptr(), 0, bytes) };
        Ok(memory)
    }

    /// Where kernels read it.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Where the host writes it: `len()` bytes, aligned to a page.
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.host
    }

    /// How many bytes.
    #[allow(clippy::len_without_is_empty, reason = "it never is")]
    pub fn len(&self) -> usize {
        self.bytes
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if let Ok(entered) = self.device.enter() {
            // SAFETY: allocated by `zeroed` and freed once; see `DeviceMemory`.
            unsafe { (entered.driver.host_free)(self.host.as_ptr().cast()) };
        }
    }
}
