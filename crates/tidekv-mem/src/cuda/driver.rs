//! The CUDA driver's functions, found at run time, with every result a value.
//!
//! `cudarc` loads the library and supplies the types. We look the functions up ourselves for two reasons: a driver that
//! lacks one is then an ordinary [`MemError::Unavailable`] instead of a panic at the first call, and results are plain
//! integers, so that a code which this year's headers do not know is an error with a number and not undefined behaviour.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdeviceptr, CUmemAccessDesc, CUmemAllocationProp, CUmemGenericAllocationHandle,
};
use tidekv_core::units::Bytes;

use crate::MemError;

/// A CUresult as the driver returns it.
pub type Code = c_int;

const SUCCESS: Code = 0;
const ERROR_OUT_OF_MEMORY: Code = 2;
const ERROR_NO_DEVICE: Code = 100;

/// A table of driver functions, each found by its symbol when the table is made.
///
/// Other crates make tables of their own for what they ask of the driver (streams, kernels, graphs), and look it up with
/// [`CudaDevice::functions`](crate::cuda::CudaDevice::functions).
#[macro_export]
macro_rules! driver_functions {
    ($(#[$meta:meta])* $vis:vis struct $table:ident, names $names:ident {
        $($field:ident = $symbol:literal ( $($argument:ty),* );)*
    }) => {
        $(#[$meta])*
        #[derive(Debug)]
        $vis struct $table {
            $($vis $field: unsafe extern "C" fn($($argument),*) -> $crate::cuda::Code,)*
        }

        // SAFETY: each symbol is the driver's function of this name, whose C signature these types spell.
        unsafe impl $crate::cuda::FunctionTable for $table {
            fn look_up(find: &dyn Fn(&'static str) -> Result<*const (), $crate::MemError>) -> Result<Self, $crate::MemError> {
                Ok(Self {
                    $($field: {
                        let address = find($symbol)?;
                        // SAFETY: a function of the driver, which is never unloaded; its signature as above.
                        unsafe {
                            std::mem::transmute::<*const (), unsafe extern "C" fn($($argument),*) -> $crate::cuda::Code>(address)
                        }
                    },)*
                })
            }
        }

        /// The functions' own names, for error texts.
        #[allow(non_upper_case_globals, dead_code, reason = "named like the fields they belong to; a few are never checked")]
        $vis mod $names {
            $(pub(crate) const $field: &str = $symbol;)*
        }
    };
}

/// A table made by [`driver_functions!`](crate::driver_functions).
///
/// # Safety
/// Every function of the table has the C signature of the driver's function with its symbol.
pub unsafe trait FunctionTable: Sized {
    /// Finds every function, or fails with what `find` says of the first one that this driver lacks.
    ///
    /// # Errors
    /// What `find` answers.
    fn look_up(find: &dyn Fn(&'static str) -> Result<*const (), MemError>) -> Result<Self, MemError>;
}

driver_functions! {
    /// The driver, once loaded.
    pub(super) struct Driver, names symbol {
        init = "cuInit"(c_uint);
        driver_version = "cuDriverGetVersion"(*mut c_int);
        error_name = "cuGetErrorName"(Code, *mut *const c_char);
        error_text = "cuGetErrorString"(Code, *mut *const c_char);
        device_count = "cuDeviceGetCount"(*mut c_int);
        device_get = "cuDeviceGet"(*mut CUdevice, c_int);
        device_name = "cuDeviceGetName"(*mut c_char, c_int, CUdevice);
        device_uuid = "cuDeviceGetUuid_v2"(*mut sys::CUuuid, CUdevice);
        device_attribute = "cuDeviceGetAttribute"(*mut c_int, c_int, CUdevice);
        context_retain = "cuDevicePrimaryCtxRetain"(*mut CUcontext, CUdevice);
        context_release = "cuDevicePrimaryCtxRelease_v2"(CUdevice);
        context_current = "cuCtxGetCurrent"(*mut CUcontext);
        context_push = "cuCtxPushCurrent_v2"(CUcontext);
        context_pop = "cuCtxPopCurrent_v2"(*mut CUcontext);
        context_synchronize = "cuCtxSynchronize"();
        mem_info = "cuMemGetInfo_v2"(*mut usize, *mut usize);
        granularity = "cuMemGetAllocationGranularity"(*mut usize, *const CUmemAllocationProp, sys::CUmemAllocationGranularity_flags);
        address_reserve = "cuMemAddressReserve"(*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
        address_free = "cuMemAddressFree"(CUdeviceptr, usize);
        create = "cuMemCreate"(*mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, c_ulonglong);
        release = "cuMemRelease"(CUmemGenericAllocationHandle);
        map = "cuMemMap"(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
        unmap = "cuMemUnmap"(CUdeviceptr, usize);
        set_access = "cuMemSetAccess"(CUdeviceptr, usize, *const CUmemAccessDesc, usize);
        export = "cuMemExportToShareableHandle"(*mut c_void, CUmemGenericAllocationHandle, sys::CUmemAllocationHandleType, c_ulonglong);
        copy_in = "cuMemcpyHtoD_v2"(CUdeviceptr, *const c_void, usize);
        copy_out = "cuMemcpyDtoH_v2"(*mut c_void, CUdeviceptr, usize);
        set_u8 = "cuMemsetD8_v2"(CUdeviceptr, u8, usize);
        alloc = "cuMemAlloc_v2"(*mut CUdeviceptr, usize);
        free = "cuMemFree_v2"(CUdeviceptr);
        host_alloc = "cuMemHostAlloc"(*mut *mut c_void, usize, c_uint);
        host_free = "cuMemFreeHost"(*mut c_void);
        host_address = "cuMemHostGetDevicePointer_v2"(*mut CUdeviceptr, *mut c_void, c_uint);
    }
}

/// The address of a function of the library that cudarc loaded, which is there: see [`Driver::load`].
pub(super) fn find(symbol: &'static str) -> Result<*const (), MemError> {
    // SAFETY: present, as above, so this does not panic; it is never unloaded.
    let library = unsafe { sys::culib() };
    // SAFETY: only the address is taken, whatever the signature.
    let found = unsafe { library.get::<*const ()>(symbol.as_bytes()) };
    found.map(|address| *address).map_err(|_| {
        unavailable(format!("the driver is too old, it has no {symbol}: update it to series 550 or later"))
    })
}

impl Driver {
    /// The driver, loaded and initialised once per process.
    pub(super) fn load() -> Result<&'static Self, MemError> {
        static DRIVER: OnceLock<Driver> = OnceLock::new();
        if let Some(driver) = DRIVER.get() {
            return Ok(driver);
        }
        // SAFETY: loading libcuda runs its constructors, which is what a user of CUDA asks for.
        if !unsafe { sys::is_culib_present() } {
            return Err(unavailable(
                "no CUDA driver was found (libcuda.so.1): install the NVIDIA driver, or use the host back-end"
                    .to_owned(),
            ));
        }
        let driver = Self::look_up(&find)?;
        // SAFETY: cuInit takes no pointers and may be called at any time, by any thread, repeatedly.
        let code = unsafe { (driver.init)(0) };
        if code == ERROR_NO_DEVICE {
            return Err(MemError::NoSuchDevice { device: 0, count: 0 });
        }
        if code != SUCCESS {
            let (name, meaning) = driver.describe(code);
            return Err(unavailable(format!(
                "the driver does not start: {name} ({code}): {meaning}; look at nvidia-smi and dmesg"
            )));
        }
        Ok(DRIVER.get_or_init(|| driver))
    }

    /// Turns a result into a value. `wanted` is what a refusal for lack of memory was about.
    pub(super) fn check(&self, function: &'static str, code: Code, wanted: Bytes) -> Result<(), MemError> {
        match code {
            SUCCESS => Ok(()),
            ERROR_OUT_OF_MEMORY => Err(MemError::OutOfMemory { wanted, free: self.free_bytes() }),
            code => {
                let (name, meaning) = self.describe(code);
                Err(MemError::Driver { function, code, name, meaning })
            }
        }
    }

    /// Free memory of the current context's device, for error texts.
    fn free_bytes(&self) -> Option<Bytes> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: two places to write to; without a current context the driver answers with an error.
        let code = unsafe { (self.mem_info)(&raw mut free, &raw mut total) };
        (code == SUCCESS).then_some(Bytes(free as u64))
    }

    fn describe(&self, code: Code) -> (String, String) {
        let text = |function: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
            let mut text = std::ptr::null();
            // SAFETY: a place to write to; the driver answers unknown codes with null.
            let answer = unsafe { function(code, &raw mut text) };
            if answer != SUCCESS || text.is_null() {
                return "a code this driver has no name for".to_owned();
            }
            // SAFETY: the driver's texts are constants that end in NUL.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        (text(self.error_name), text(self.error_text))
    }
}

pub(super) fn unavailable(reason: String) -> MemError {
    MemError::Unavailable { backend: "cuda", reason }
}

/// Calls a driver function and turns its result into a value.
macro_rules! call {
    ($driver:expr, $field:ident($($argument:expr),*)) => {
        $crate::cuda::driver::call!($driver, $field($($argument),*), tidekv_core::units::Bytes::ZERO)
    };
    ($driver:expr, $field:ident($($argument:expr),*), $wanted:expr) => {{
        let code = ($driver.$field)($($argument),*);
        $driver.check($crate::cuda::driver::symbol::$field, code, $wanted)
    }};
}
pub(super) use call;
