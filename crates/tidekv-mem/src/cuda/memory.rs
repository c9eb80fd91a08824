//! Handles, addresses and access: the driver's virtual-memory calls as safe-to-read Rust.

use std::ffi::c_int;
use std::os::fd::{FromRawFd, OwnedFd};

use cudarc::driver::sys::{self, CUdeviceptr, CUmemAccessDesc, CUmemAllocationProp, CUmemGenericAllocationHandle};
use tidekv_core::units::Bytes;

use super::context::Entered;
use super::driver::call;
use super::{CudaMemory, CudaOptions};
use crate::MemError;

/// One page table of the device covers this much address space (measured on an H200, `docs/decisions/0004`): the first
/// mapping in a window costs 15 us more, the last unmapping 7 us, and a page across two windows pays twice.
const PAGE_TABLE_WINDOW: Bytes = Bytes::mib(512);

/// Physical memory as the driver names it.
pub(super) type Handle = CUmemGenericAllocationHandle;

/// What every handle of a back-end is made with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recipe {
    prop: CUmemAllocationProp,
    access: CUmemAccessDesc,
    access_read_only: CUmemAccessDesc,
}

// SAFETY: the one pointer in `prop` (Windows handle attributes) is always null.
unsafe impl Send for Recipe {}
// SAFETY: as above.
unsafe impl Sync for Recipe {}

impl Recipe {
    pub(super) fn new(device: c_int, options: &CudaOptions) -> Self {
        let on_device = sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device };
        let location = match options.memory {
            CudaMemory::Device => on_device,
            CudaMemory::HostNuma(node) => sys::CUmemLocation {
                type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA,
                id: c_int::try_from(node).unwrap_or(c_int::MAX),
            },
        };
        let handle_types = match options.shareable {
            true => sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            false => sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        };
        let prop = CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: handle_types,
            location,
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: options.gpu_direct_rdma.into(),
                usage: 0,
                reserved: [0; 4],
            },
        };
        let access = |flags| CUmemAccessDesc { location: on_device, flags };
        Self {
            prop,
            access: access(sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE),
            access_read_only: access(sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ),
        }
    }
}

impl Entered {
    pub(super) fn granularity(&self, recipe: &Recipe) -> Result<Bytes, MemError> {
        let mut bytes = 0;
        let flags = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: a place to write to and a whole description to read.
        unsafe { call!(self.driver, granularity(&raw mut bytes, &raw const recipe.prop, flags)) }?;
        Ok(Bytes(bytes as u64))
    }

    /// Free and total memory of the device.
    pub(super) fn mem_info(&self) -> Result<(Bytes, Bytes), MemError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: two places to write to.
        unsafe { call!(self.driver, mem_info(&raw mut free, &raw mut total)) }?;
        Ok((Bytes(free as u64), Bytes(total as u64)))
    }

    /// Takes addresses, aligned so that pages whose size divides a window of the device's page tables never lie in two.
    pub(super) fn reserve(&self, bytes: Bytes, granularity: Bytes) -> Result<CUdeviceptr, MemError> {
        let alignment = Bytes(bytes.0.next_power_of_two().clamp(granularity.0, PAGE_TABLE_WINDOW.0.max(granularity.0)));
        let mut base = 0;
        // SAFETY: a place to write to; a fixed address of 0 lets the driver choose.
        unsafe { call!(self.driver, address_reserve(&raw mut base, as_len(bytes), as_len(alignment), 0, 0), bytes) }?;
        Ok(base)
    }

    pub(super) fn free_addresses(&self, base: CUdeviceptr, bytes: Bytes) -> Result<(), MemError> {
        // SAFETY: the driver refuses ranges that it did not give out or that still have mappings.
        unsafe { call!(self.driver, address_free(base, as_len(bytes))) }
    }

    pub(super) fn create(&self, recipe: &Recipe, bytes: Bytes) -> Result<Handle, MemError> {
        let mut handle = 0;
        // SAFETY: a place to write to and a whole description to read.
        unsafe { call!(self.driver, create(&raw mut handle, as_len(bytes), &raw const recipe.prop, 0), bytes) }?;
        Ok(handle)
    }

    pub(super) fn release(&self, handle: Handle) -> Result<(), MemError> {
        // SAFETY: the handle came from `create` and is released once: callers forget it on success.
        unsafe { call!(self.driver, release(handle)) }
    }

    pub(super) fn map(&self, at: CUdeviceptr, bytes: Bytes, handle: Handle) -> Result<(), MemError> {
        // SAFETY: the driver refuses ranges outside a reservation and ranges that are mapped already.
        unsafe { call!(self.driver, map(at, as_len(bytes), 0, handle, 0), bytes) }
    }

    pub(super) fn set_access(&self, recipe: &Recipe, at: CUdeviceptr, bytes: Bytes) -> Result<(), MemError> {
        // SAFETY: one whole description to read; the driver refuses ranges that are not mapped.
        unsafe { call!(self.driver, set_access(at, as_len(bytes), &raw const recipe.access, 1), bytes) }
    }

    pub(super) fn set_read_only(&self, recipe: &Recipe, at: CUdeviceptr, bytes: Bytes) -> Result<(), MemError> {
        // SAFETY: as in `set_access`.
        unsafe { call!(self.driver, set_access(at, as_len(bytes), &raw const recipe.access_read_only, 1), bytes) }
    }

    /// # Safety
    /// No work on the device uses these addresses any more: the driver does not wait for it.
    pub(super) unsafe fn unmap(&self, at: CUdeviceptr, bytes: Bytes) -> Result<(), MemError> {
        // SAFETY: the caller's promise; the driver refuses ranges that are not mapped.
        unsafe { call!(self.driver, unmap(at, as_len(bytes))) }
    }

    /// # Safety
    /// `at..at+len` is mapped for the length of the call and nothing else uses it.
    pub(super) unsafe fn copy_in(&self, at: CUdeviceptr, from: &[u8]) -> Result<(), MemError> {
        // SAFETY: the source is a live slice; the target is the caller's promise.
        unsafe { call!(self.driver, copy_in(at, from.as_ptr().cast(), from.len())) }
    }

    /// # Safety
    /// `at..at+len` is mapped for the length of the call.
    pub(super) unsafe fn copy_out(&self, at: CUdeviceptr, into: &mut [u8]) -> Result<(), MemError> {
        // SAFETY: the target is a live slice; the source is the caller's promise.
        unsafe { call!(self.driver, copy_out(into.as_mut_ptr().cast(), at, into.len())) }
    }

    /// # Safety
    /// `at..at+bytes` is mapped for the length of the call and nothing else uses it.
    pub(super) unsafe fn fill_zero(&self, at: CUdeviceptr, bytes: Bytes) -> Result<(), MemError> {
        // SAFETY: the caller's promise.
        unsafe { call!(self.driver, set_u8(at, 0, as_len(bytes))) }
    }

    pub(super) fn export(&self, handle: Handle) -> Result<OwnedFd, MemError> {
        let mut fd: c_int = -1;
        let kind = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        // SAFETY: for this kind the driver writes one int, which is what there is room for.
        unsafe { call!(self.driver, export((&raw mut fd).cast(), handle, kind, 0)) }?;
        // SAFETY: the driver made this descriptor for us and keeps no other owner of it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    pub(super) fn synchronise(&self) -> Result<(), MemError> {
        // SAFETY: no arguments; waits for the context's work.
        unsafe { call!(self.driver, context_synchronize()) }
    }
}

pub(super) fn as_len(bytes: Bytes) -> usize {
    usize::try_from(bytes.0).expect("a placement is below 2^46 bytes, and we build for 64-bit machines")
}
