//! cuBLAS, found at run time: the products of many rows.
//!
//! Five functions of its oldest, most stable interface, looked up by name, with every result a value: versions 12 and 13 have them
//! with the same signatures. Products are `out[row] = in[row] * weight`, where the weight lies as `[outputs, inputs]`; cuBLAS counts
//! columns first, so it sees `weight^T` and `in` as they are.

use std::ffi::{CStr, c_int, c_void};
use std::path::PathBuf;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::CUstream;
use libloading::Library;
use tidekv_batch::cuda::gpu::Gpu;
use tidekv_core::units::Bytes;
use tidekv_mem::cuda::DeviceMemory;

use crate::compute::ComputeError;

/// Newest first.
const NAMES: [&str; 3] = ["libcublas.so.13", "libcublas.so.12", "libcublas.so"];
/// Looked into behind the loader's own folders and those that `CUDA_HOME` and `CUDA_PATH` name.
const FOLDERS: [&str; 2] = ["/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu"];
/// What NVIDIA recommends for Hopper; ours so that captured products keep it.
const WORKSPACE: Bytes = Bytes::mib(32);

const OP_N: c_int = 0;
const OP_T: c_int = 1;
const R_32F: c_int = 0;
const R_16BF: c_int = 14;
const COMPUTE_32F: c_int = 68;
const GEMM_DEFAULT: c_int = -1;

type Handle = *mut c_void;
type Create = unsafe extern "C" fn(*mut Handle) -> c_int;
type Destroy = unsafe extern "C" fn(Handle) -> c_int;
type SetStream = unsafe extern "C" fn(Handle, CUstream) -> c_int;
type SetWorkspace = unsafe extern "C" fn(Handle, *mut c_void, usize) -> c_int;
type GemmEx = unsafe extern "C" fn(
    Handle,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    *const c_void,
    *const c_void,
    c_int,
    c_int,
    *const c_void,
    c_int,
    c_int,
    *const c_void,
    *mut c_void,
    c_int,
    c_int,
    c_int,
    c_int,
) -> c_int;

/// What an array's elements are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    Bf16,
    F32,
}

impl Element {
    fn code(self) -> c_int {
        match self {
            Self::Bf16 => R_16BF,
            Self::F32 => R_32F,
        }
    }
}

/// A product: `out[rows, outputs] = in[rows, inputs] * weight[outputs, inputs]^T`, added to what is there or not.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    pub(super) input: u64,
    pub(super) weight: u64,
    /// Of `input` and `weight`.
    pub(super) element: Element,
    pub(super) out: u64,
    pub(super) out_element: Element,
    pub(super) rows: u32,
    pub(super) inputs: u32,
    pub(super) outputs: u32,
    pub(super) add: bool,
}

/// A handle of the library, and the memory that it works in.
#[derive(Debug)]
pub(super) struct Cublas {
    handle: Handle,
    destroy: Destroy,
    set_stream: SetStream,
    set_workspace: SetWorkspace,
    gemm: GemmEx,
    workspace: DeviceMemory,
    gpu: Arc<Gpu>,
    /// The functions above are in it.
    _library: Library,
}

// SAFETY: a handle may be used by any thread, one at a time: all its uses go through `&mut self`.
unsafe impl Send for Cublas {}

impl Cublas {
    /// Loads the library and opens a handle on the device.
    pub(super) fn open(gpu: &Arc<Gpu>) -> Result<Self, ComputeError> {
        let library = load()?;
        let _entered = gpu.enter()?;
        // SAFETY: of every symbol below, the signature is that of cublas_api.h, in versions 12 and 13 alike.
        let create: Create = unsafe { find(&library, c"cublasCreate_v2") }?;
        // SAFETY: as above.
        let destroy: Destroy = unsafe { find(&library, c"cublasDestroy_v2") }?;
        // SAFETY: as above.
        let set_stream: SetStream = unsafe { find(&library, c"cublasSetStream_v2") }?;
        // SAFETY: as above.
        let set_workspace: SetWorkspace = unsafe { find(&library, c"cublasSetWorkspace_v2") }?;
        // SAFETY: as above.
        let gemm: GemmEx = unsafe { find(&library, c"cublasGemmEx") }?;
        let workspace = DeviceMemory::zeroed(&gpu.device, WORKSPACE)?;
        let mut handle = ptr::null_mut();
        // SAFETY: a place to write to; the device's primary context, which the library uses too, is current.
        check("cublasCreate_v2", unsafe { create(&raw mut handle) })?;
        let gpu = Arc::clone(gpu);
        Ok(Self { handle, destroy, set_stream, set_workspace, gemm, workspace, gpu, _library: library })
    }

    /// All further products go on this stream. The context is current.
    ///
    /// # Safety
    /// `stream` is a stream of the device's primary context and lives until the next call or the end of this value.
    pub(super) unsafe fn use_stream(&mut self, stream: CUstream) -> Result<(), ComputeError> {
        // SAFETY: a living handle; the stream is the caller's promise.
        check("cublasSetStream_v2", unsafe { (self.set_stream)(self.handle, stream) })?;
        let bytes = usize::try_from(WORKSPACE.0).expect("it was allocated");
        let workspace = ptr::with_exposed_provenance_mut(usize::try_from(self.workspace.address()).expect("64 bits"));
        // Setting a stream gives the handle back to the library's own workspace.
        // SAFETY: a living handle, and memory of the device that lives as long as it.
        check("cublasSetWorkspace_v2", unsafe { (self.set_workspace)(self.handle, workspace, bytes) })
    }

    /// Puts a product on the stream. The context is current.
    ///
    /// # Safety
    /// The three arrays are on the device, as large as the product says, until it is over, and used by nothing that is not ordered
    /// with it; `out` overlaps neither of the others.
    pub(super) unsafe fn multiply(&mut self, product: &Product) -> Result<(), ComputeError> {
        let Product { input, weight, element, out, out_element, rows, inputs, outputs, add } = *product;
        let (alpha, beta) = (1f32, if add { 1f32 } else { 0f32 });
        let size = |count: u32| c_int::try_from(count).expect("sizes of models are below 2^24");
        let pointer = |address: u64| ptr::with_exposed_provenance::<c_void>(usize::try_from(address).expect("64 bits"));
        // SAFETY: a living handle; two floats to read; arrays by the caller's promise, whose rows follow each other without gaps, as
        // the strides say.
        let code = unsafe {
            (self.gemm)(
                self.handle,
                OP_T,
                OP_N,
                size(outputs),
                size(rows),
                size(inputs),
                (&raw const alpha).cast(),
                pointer(weight),
                element.code(),
                size(inputs),
                pointer(input),
                element.code(),
                size(inputs),
                (&raw const beta).cast(),
                pointer(out).cast_mut(),
                out_element.code(),
                size(outputs),
                COMPUTE_32F,
                GEMM_DEFAULT,
            )
        };
        check("cublasGemmEx", code)
    }
}

impl Drop for Cublas {
    fn drop(&mut self) {
        if let Ok(_entered) = self.gpu.enter() {
            // SAFETY: created once and destroyed once.
            unsafe { (self.destroy)(self.handle) };
        }
    }
}

fn check(function: &'static str, code: c_int) -> Result<(), ComputeError> {
    if code == 0 { Ok(()) } else { Err(ComputeError::Cublas { function, code }) }
}

/// The library, from wherever the loader or a CUDA toolkit has it.
fn load() -> Result<Library, ComputeError> {
    let variables = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os);
    let folders = variables.map(|home| PathBuf::from(home).join("lib64")).chain(FOLDERS.map(PathBuf::from));
    let in_folders: Vec<PathBuf> = folders.flat_map(|folder| NAMES.map(|name| folder.join(name))).collect();
    for place in NAMES.map(PathBuf::from).iter().chain(&in_folders) {
        // SAFETY: loading cuBLAS runs its constructors, which is what a user of a GPU asks for.
        if let Ok(library) = unsafe { Library::new(place) } {
            return Ok(library);
        }
    }
    Err(ComputeError::NoCublas {
        tried: format!("{}, also in CUDA_HOME/lib64, {}", NAMES.join(", "), FOLDERS.join(", ")),
    })
}

/// # Safety
/// `T` is the type of the function with this name.
unsafe fn find<T: Copy>(library: &Library, name: &'static CStr) -> Result<T, ComputeError> {
    let bytes: &[u8] = name.to_bytes_with_nul();
    // SAFETY: the caller's promise.
    let symbol = unsafe { library.get::<T>(bytes) };
    let missing = |_| ComputeError::NoCublas { tried: format!("a library without {}", name.to_string_lossy()) };
    symbol.map(|symbol| *symbol).map_err(missing)
}
