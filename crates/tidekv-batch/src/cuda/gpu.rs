//! The device as steps use it, ours and those of the crates above: driver functions for kernels, streams, events and graphs, every
//! result a value.
//!
//! The driver is loaded by `tidekv-mem`; this is the table of what a step asks of it beyond memory, and owners for what the driver
//! hands out. An owner keeps the device, so the context outlives it; it gives its handle back when dropped, silently, because
//! a driver that is already gone has nothing to give back to.

use std::ffi::{CStr, c_char, c_float, c_int, c_uint, c_ulonglong, c_void};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUmodule, CUstream};
use tidekv_mem::cuda::{CudaDevice, Entered};
use tidekv_mem::{MemError, driver_functions};

driver_functions! {
    /// What this crate asks of the driver.
    pub(super) struct Functions, names symbol {
        module_load = "cuModuleLoadData"(*mut CUmodule, *const c_void);
        module_unload = "cuModuleUnload"(CUmodule);
        module_function = "cuModuleGetFunction"(*mut CUfunction, CUmodule, *const c_char);
        function_get = "cuFuncGetAttribute"(*mut c_int, c_int, CUfunction);
        function_set = "cuFuncSetAttribute"(CUfunction, c_int, c_int);
        launch = "cuLaunchKernel"(CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void, *mut *mut c_void);
        copy_in = "cuMemcpyHtoDAsync_v2"(CUdeviceptr, *const c_void, usize, CUstream);
        copy_out = "cuMemcpyDtoHAsync_v2"(*mut c_void, CUdeviceptr, usize, CUstream);
        copy_within = "cuMemcpyDtoDAsync_v2"(CUdeviceptr, CUdeviceptr, usize, CUstream);
        stream_create = "cuStreamCreate"(*mut CUstream, c_uint);
        stream_destroy = "cuStreamDestroy_v2"(CUstream);
        stream_synchronize = "cuStreamSynchronize"(CUstream);
        stream_wait = "cuStreamWaitEvent"(CUstream, CUevent, c_uint);
        stream_capturing = "cuStreamIsCapturing"(CUstream, *mut c_int);
        capture_begin = "cuStreamBeginCapture_v2"(CUstream, c_int);
        capture_end = "cuStreamEndCapture"(CUstream, *mut CUgraph);
        event_create = "cuEventCreate"(*mut CUevent, c_uint);
        event_destroy = "cuEventDestroy_v2"(CUevent);
        event_record = "cuEventRecord"(CUevent, CUstream);
        event_query = "cuEventQuery"(CUevent);
        event_synchronize = "cuEventSynchronize"(CUevent);
        event_elapsed = "cuEventElapsedTime"(*mut c_float, CUevent, CUevent);
        graph_instantiate = "cuGraphInstantiateWithFlags"(*mut CUgraphExec, CUgraph, c_ulonglong);
        graph_launch = "cuGraphLaunch"(CUgraphExec, CUstream);
        graph_destroy = "cuGraphDestroy"(CUgraph);
        graph_exec_destroy = "cuGraphExecDestroy"(CUgraphExec);
    }
}

/// `CUDA_ERROR_NOT_READY`: an answer, not a failure.
const NOT_READY: c_int = 600;
/// `CU_STREAM_NON_BLOCKING`: work on the default stream is nothing to wait for.
const NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`: cheaper to record.
const WITHOUT_TIME: c_uint = 2;
/// `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`: what other threads do meanwhile is their own affair.
const CAPTURE_THREAD_LOCAL: c_int = 1;
/// `CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK`.
const MAX_THREADS: c_int = 0;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
const MAX_DYNAMIC_SHARED: c_int = 8;

/// Calls a driver function and turns its result into a value.
macro_rules! call {
    ($gpu:expr, $field:ident($($argument:expr),*)) => {{
        let code = ($gpu.functions.$field)($($argument),*);
        $gpu.device.check(symbol::$field, code)
    }};
}

/// A device and the functions of its driver.
#[derive(Debug)]
pub struct Gpu {
    /// The device itself, for memory.
    pub device: CudaDevice,
    functions: Functions,
}

impl Gpu {
    /// Opens device `number` and finds the functions.
    ///
    /// # Errors
    /// [`MemError::Unavailable`] without a driver that has them, [`MemError::NoSuchDevice`].
    pub fn open(number: u32) -> Result<Arc<Self>, MemError> {
        let device = CudaDevice::open(number)?;
        let functions = device.functions()?;
        Ok(Arc::new(Self { device, functions }))
    }

    /// Makes the context current on this thread until the guard is dropped.
    ///
    /// # Errors
    /// As [`CudaDevice::enter`].
    pub fn enter(&self) -> Result<Entered, MemError> {
        self.device.enter()
    }
}

/// A loaded module of kernels.
#[derive(Debug)]
pub struct Module {
    raw: CUmodule,
    gpu: Arc<Gpu>,
}

// SAFETY: a module's handle may be used from any thread; the driver locks inside.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Has the driver compile PTX for the device.
    ///
    /// # Errors
    /// What the driver says of the PTX.
    pub fn load(gpu: &Arc<Gpu>, ptx: &CStr) -> Result<Arc<Self>, MemError> {
        let _entered = gpu.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: a place to write to, and text that ends in NUL.
        unsafe { call!(gpu, module_load(&raw mut raw, ptx.as_ptr().cast())) }?;
        Ok(Arc::new(Self { raw, gpu: Arc::clone(gpu) }))
    }

    /// The kernel of this name.
    ///
    /// # Errors
    /// What the driver says, also of a name that is not there.
    pub fn kernel(self: &Arc<Self>, name: &CStr) -> Result<Kernel, MemError> {
        let _entered = self.gpu.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: a place to write to, a module that lives as long as `self`, and text that ends in NUL.
        unsafe { call!(self.gpu, module_function(&raw mut raw, self.raw, name.as_ptr())) }?;
        let mut threads = 0;
        // Drivers load kernels when they are first asked about, which must not be while a stream is being captured.
        // SAFETY: a place to write to, and a function of a living module.
        unsafe { call!(self.gpu, function_get(&raw mut threads, MAX_THREADS, raw)) }?;
        Ok(Kernel { raw, module: Arc::clone(self) })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Ok(_entered) = self.gpu.enter() {
            // SAFETY: loaded by `load`, unloaded once; kernels keep the module alive.
            unsafe { (self.gpu.functions.module_unload)(self.raw) };
        }
    }
}

/// How many threads: blocks in up to three dimensions, threads of a block in one.
#[derive(Clone, Copy, Debug)]
pub struct Grid {
    /// Blocks in each dimension.
    pub blocks: [u32; 3],
    /// Threads of each.
    pub threads: u32,
    /// Shared memory of each, beyond what the kernel declares.
    pub shared_bytes: u32,
}

impl Grid {
    /// So many blocks in a line.
    pub const fn line(blocks: u32, threads: u32) -> Self {
        Self { blocks: [blocks, 1, 1], threads, shared_bytes: 0 }
    }
}

/// A kernel of a module.
#[derive(Clone, Debug)]
pub struct Kernel {
    raw: CUfunction,
    module: Arc<Module>,
}

// SAFETY: as for the module, which it keeps.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Lets launches ask for more shared memory than every device gives without asking.
    ///
    /// # Errors
    /// More than the device has.
    pub fn allow_shared(&self, bytes: u32) -> Result<(), MemError> {
        let bytes = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        // SAFETY: a function of a living module; the driver refuses more than the device has.
        unsafe { call!(self.module.gpu, function_set(self.raw, MAX_DYNAMIC_SHARED, bytes)) }
    }

    /// Puts a launch on the stream. The context is current.
    ///
    /// # Safety
    /// `arguments` point at values of the kernel's parameter types, in order, and the memory that those name is valid until the
    /// launch is over and used by nothing that is not ordered with it.
    ///
    /// # Errors
    /// What the driver says.
    pub unsafe fn launch<const N: usize>(
        &self,
        grid: Grid,
        stream: CUstream,
        arguments: [*const c_void; N],
    ) -> Result<(), MemError> {
        let mut arguments = arguments.map(<*const c_void>::cast_mut);
        let Grid { blocks: [x, y, z], threads, shared_bytes } = grid;
        let none = ptr::null_mut();
        // SAFETY: a function of a living module; the driver copies the arguments before it returns, and they are as it
        // demands by the caller's promise.
        unsafe {
            call!(
                self.module.gpu,
                launch(self.raw, x, y, z, threads, 1, 1, shared_bytes, stream, arguments.as_mut_ptr(), none)
            )
        }
    }
}

/// A stream: ours, or one that its owner keeps alive.
#[derive(Debug)]
pub struct Stream {
    raw: CUstream,
    owned: bool,
    gpu: Arc<Gpu>,
}

// SAFETY: a stream's handle may be used from any thread; the driver locks inside.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream that does not wait for the default one.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, MemError> {
        let _entered = gpu.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: a place to write to.
        unsafe { call!(gpu, stream_create(&raw mut raw, NON_BLOCKING)) }?;
        Ok(Self { raw, owned: true, gpu: Arc::clone(gpu) })
    }

    /// Somebody else's stream.
    ///
    /// # Safety
    /// `raw` is a stream of the device's primary context (null for its default stream) that outlives this value.
    pub unsafe fn borrowed(gpu: &Arc<Gpu>, raw: CUstream) -> Self {
        Self { raw, owned: false, gpu: Arc::clone(gpu) }
    }

    /// As the driver knows it.
    pub fn raw(&self) -> CUstream {
        self.raw
    }

    /// Waits until everything on it is done.
    ///
    /// # Errors
    /// What the driver says, also of kernels that failed.
    pub fn synchronise(&self) -> Result<(), MemError> {
        let _entered = self.gpu.enter()?;
        // SAFETY: a living stream, by construction.
        unsafe { call!(self.gpu, stream_synchronize(self.raw)) }
    }

    /// Work put on this stream from now on runs after `event`.
    ///
    /// # Errors
    /// What the driver says.
    pub fn wait(&self, event: &Event) -> Result<(), MemError> {
        let _entered = self.gpu.enter()?;
        // SAFETY: a living stream and a living event.
        unsafe { call!(self.gpu, stream_wait(self.raw, event.raw, 0)) }
    }

    /// Whether what is put on this stream becomes part of a graph instead of running.
    ///
    /// # Errors
    /// What the driver says.
    pub fn is_capturing(&self) -> Result<bool, MemError> {
        let mut status = 0;
        // SAFETY: a living stream and a place to write to.
        unsafe { call!(self.gpu, stream_capturing(self.raw, &raw mut status)) }?;
        Ok(status != 0)
    }

    /// Copies from page-locked memory without waiting. The context is current.
    ///
    /// # Safety
    /// `bytes` bytes at both addresses are valid until the copy is over, and nothing that is not ordered with it uses them.
    ///
    /// # Errors
    /// What the driver says.
    pub unsafe fn copy_in(&self, to: u64, from: *const u8, bytes: usize) -> Result<(), MemError> {
        // SAFETY: the caller's promise.
        unsafe { call!(self.gpu, copy_in(to, from.cast(), bytes, self.raw)) }
    }

    /// The other way round. The context is current.
    ///
    /// # Safety
    /// As [`copy_in`](Self::copy_in).
    ///
    /// # Errors
    /// What the driver says.
    pub unsafe fn copy_out(&self, to: *mut u8, from: u64, bytes: usize) -> Result<(), MemError> {
        // SAFETY: the caller's promise.
        unsafe { call!(self.gpu, copy_out(to.cast(), from, bytes, self.raw)) }
    }

    /// Copies from one place of the device to another without waiting. The context is current.
    ///
    /// # Safety
    /// As [`copy_in`](Self::copy_in); the two places do not overlap.
    ///
    /// # Errors
    /// What the driver says.
    pub unsafe fn copy_within(&self, to: u64, from: u64, bytes: usize) -> Result<(), MemError> {
        // SAFETY: the caller's promise.
        unsafe { call!(self.gpu, copy_within(to, from, bytes, self.raw)) }
    }

    /// A graph of what `enqueue` puts on this stream.
    ///
    /// # Errors
    /// What `enqueue` answers, and what the driver says.
    ///
    /// # Panics
    /// If the driver says that it captured something and gives nothing.
    pub fn capture<E: From<MemError>>(&self, enqueue: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        let _entered = self.gpu.enter()?;
        // SAFETY: a living stream; capturing is ended below, whatever happens in between.
        unsafe { call!(self.gpu, capture_begin(self.raw, CAPTURE_THREAD_LOCAL)) }?;
        let enqueued = enqueue();
        let mut graph = ptr::null_mut();
        // SAFETY: pairs with the begin on the same thread, and a place to write to.
        let ended = unsafe { call!(self.gpu, capture_end(self.raw, &raw mut graph)) };
        let template = (!graph.is_null()).then_some(Template { raw: graph, gpu: &self.gpu });
        enqueued?;
        ended?;
        let template = template.expect("a capture that succeeded made a graph");
        let mut raw = ptr::null_mut();
        // SAFETY: a place to write to and a living graph.
        unsafe { call!(self.gpu, graph_instantiate(&raw mut raw, template.raw, 0)) }?;
        Ok(Graph { raw, gpu: Arc::clone(&self.gpu) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let (true, Ok(_entered)) = (self.owned, self.gpu.enter()) {
            // SAFETY: created by `new` and destroyed once; work on it runs on.
            unsafe { (self.gpu.functions.stream_destroy)(self.raw) };
        }
    }
}

/// What was captured, before it can be launched.
struct Template<'a> {
    raw: CUgraph,
    gpu: &'a Gpu,
}

impl Drop for Template<'_> {
    fn drop(&mut self) {
        // SAFETY: made by a capture and destroyed once, in the context that the capture entered.
        unsafe { (self.gpu.functions.graph_destroy)(self.raw) };
    }
}

/// Launches that were captured, ready to be repeated with one call.
#[derive(Debug)]
pub struct Graph {
    raw: CUgraphExec,
    gpu: Arc<Gpu>,
}

// SAFETY: launched through `&mut self` alone, as the driver demands of one graph; any thread will do.
unsafe impl Send for Graph {}
// SAFETY: shared references offer nothing.
unsafe impl Sync for Graph {}

impl Graph {
    /// Puts the graph on the stream. The context is current.
    ///
    /// # Safety
    /// As [`Kernel::launch`], for everything that was captured.
    ///
    /// # Errors
    /// What the driver says.
    pub unsafe fn launch(&mut self, stream: &Stream) -> Result<(), MemError> {
        // SAFETY: a living graph and a living stream; the rest is the caller's promise.
        unsafe { call!(self.gpu, graph_launch(self.raw, stream.raw)) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(_entered) = self.gpu.enter() {
            // SAFETY: instantiated once and destroyed once; launches under way run on.
            unsafe { (self.gpu.functions.graph_exec_destroy)(self.raw) };
        }
    }
}

/// A point in a stream's work.
#[derive(Debug)]
pub struct Event {
    raw: CUevent,
    gpu: Arc<Gpu>,
}

// SAFETY: an event's handle may be used from any thread; the driver locks inside.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event that only tells before from after.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, MemError> {
        Self::with_flags(gpu, WITHOUT_TIME)
    }

    /// An event that knows when it was.
    ///
    /// # Errors
    /// What the driver says.
    pub fn with_time(gpu: &Arc<Gpu>) -> Result<Self, MemError> {
        Self::with_flags(gpu, 0)
    }

    fn with_flags(gpu: &Arc<Gpu>, flags: c_uint) -> Result<Self, MemError> {
        let _entered = gpu.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: a place to write to.
        unsafe { call!(gpu, event_create(&raw mut raw, flags)) }?;
        Ok(Self { raw, gpu: Arc::clone(gpu) })
    }

    /// From now on the event is the end of what is on the stream. The context is current.
    ///
    /// # Errors
    /// What the driver says.
    pub fn record(&self, stream: &Stream) -> Result<(), MemError> {
        // SAFETY: a living event and a living stream of one context.
        unsafe { call!(self.gpu, event_record(self.raw, stream.raw)) }
    }

    /// Whether the device has come so far.
    ///
    /// # Errors
    /// What the driver says.
    pub fn is_over(&self) -> Result<bool, MemError> {
        let _entered = self.gpu.enter()?;
        // SAFETY: a living event.
        let code = unsafe { (self.gpu.functions.event_query)(self.raw) };
        if code == NOT_READY {
            return Ok(false);
        }
        self.gpu.device.check(symbol::event_query, code).map(|()| true)
    }

    /// Waits until it is over; at once if it was never recorded.
    ///
    /// # Errors
    /// What the driver says, also of kernels that failed.
    pub fn wait(&self) -> Result<(), MemError> {
        let _entered = self.gpu.enter()?;
        // SAFETY: a living event.
        unsafe { call!(self.gpu, event_synchronize(self.raw)) }
    }

    /// Microseconds of the device from `start` to this event; both are over and know their time.
    ///
    /// # Errors
    /// What the driver says.
    pub fn micros_since(&self, start: &Self) -> Result<f64, MemError> {
        let mut millis = 0.0;
        // SAFETY: a place to write to and two living events.
        unsafe { call!(self.gpu, event_elapsed(&raw mut millis, start.raw, self.raw)) }?;
        Ok(f64::from(millis) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_entered) = self.gpu.enter() {
            // SAFETY: created once and destroyed once; a record under way runs on.
            unsafe { (self.gpu.functions.event_destroy)(self.raw) };
        }
    }
}
