//! Memory of an NVIDIA GPU through the driver's virtual-memory calls.
//!
//! ```text
//!   cuMemAddressReserve   once         [ -- | page 1 | -- | page 3 | ... ]     addresses that never move
//!                                              |             |
//!   cuMemCreate           per handle        handle        handle               physical memory
//!   cuMemMap + SetAccess  per handle        behind its addresses, readable and writable by the device
//!   cuMemUnmap + Release  per handle        away again
//! ```
//!
//! The driver is loaded when the back-end is opened: the same program runs on machines without one, where
//! [`CudaBackend::open`] answers [`MemError::Unavailable`]. The driver does not wait for running kernels when it unmaps:
//! whoever unmaps must know that the device is done with the page ([`Capabilities::needs_fence`]).

mod context;
mod device;
mod driver;
mod handles;
mod memory;
mod raw;
mod region;

use std::ffi::{CStr, c_int};
use std::fs;
use std::sync::Arc;

use cudarc::driver::sys::{CUdevice_attribute as Attribute, CUuuid};
use tidekv_core::geometry::Placement;
use tidekv_core::units::Bytes;

use crate::meter::{Call, CallMeter};
use crate::reservation::check_granular;
use crate::{Backend, Capabilities, MemError, MemoryInfo, RawPages, Region, RegionOptions};
pub use context::Entered;
pub use device::{CudaDevice, DeviceMemory, PinnedMemory};
pub use driver::{Code, FunctionTable};

use context::Context;
use driver::{Driver, call, unavailable};
use handles::Handles;
use memory::Recipe;

/// `CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`, newer than the headers we bind to. Older drivers
/// do not know it and answer with an error, which counts as "no".
const HOST_NUMA_PAGES_SUPPORTED: c_int = 141;

/// Where the bytes behind the device's addresses are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CudaMemory {
    /// The GPU's own memory.
    #[default]
    Device,
    /// Memory of the machine, on this NUMA node, in the same address range: slower, but there is more of it.
    HostNuma(u32),
}

/// Choices for one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaOptions {
    /// Number of the device, as CUDA counts them (after `CUDA_VISIBLE_DEVICES`).
    pub device: u32,
    /// Where pages come from.
    pub memory: CudaMemory,
    /// Handles of unmapped pages to keep for the next map, in bytes. They still hold memory that nobody else can use,
    /// so the default is none: idle pages of the pool are the better cache.
    pub handle_cache: Bytes,
    /// Pages that network cards can reach directly.
    pub gpu_direct_rdma: bool,
    /// Pages that can be exported to other processes as file descriptors.
    pub shareable: bool,
}

/// See the [module](self).
#[derive(Debug)]
pub struct CudaBackend {
    capabilities: Capabilities,
    shared: Arc<Shared>,
}

/// What the back-end and its regions have in common; regions may outlive the back-end.
#[derive(Debug)]
struct Shared {
    handles: Handles,
    meter: CallMeter,
    recipe: Recipe,
    options: CudaOptions,
    granularity: Bytes,
    context: Context,
}

impl CudaBackend {
    /// Opens a device and shares its primary context.
    ///
    /// # Errors
    /// [`MemError::Unavailable`] without a driver that can do this, [`MemError::NoSuchDevice`], and
    /// [`MemError::Unsupported`] for an option that the device lacks.
    pub fn open(options: CudaOptions) -> Result<Self, MemError> {
        let driver = Driver::load()?;
        let device = find_device(driver, options.device)?;
        check_device(driver, device, &options)?;
        let context = Context::retain(driver, device)?;
        let recipe = Recipe::new(device, &options);
        let granularity = context.enter()?.granularity(&recipe)?;
        let capabilities = Capabilities {
            name: "cuda",
            device: device_name(driver, device)?,
            id: device_uuid(driver, device)?,
            driver: Some(driver_version(driver)),
            granularity,
            host_accessible: false,
            needs_fence: true,
        };
        let handles = Handles::new(options.handle_cache);
        let shared = Shared { handles, meter: CallMeter::default(), recipe, options, granularity, context };
        Ok(Self { capabilities, shared: Arc::new(shared) })
    }
}

impl Backend for CudaBackend {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn memory(&self) -> Result<MemoryInfo, MemError> {
        if let CudaMemory::HostNuma(_) = self.shared.options.memory {
            return crate::host::system_memory::read();
        }
        let (free, total) = self.shared.context.enter()?.mem_info()?;
        Ok(MemoryInfo { total, free })
    }

    fn held(&self) -> Bytes {
        self.shared.handles.held()
    }

    fn trim_cache(&self) -> Result<Bytes, MemError> {
        self.shared.handles.trim(&self.shared.context.enter()?, &self.shared.meter)
    }

    fn synchronise(&self) -> Result<(), MemError> {
        self.shared.context.enter()?.synchronise()
    }

    fn meter(&self) -> &CallMeter {
        &self.shared.meter
    }

    fn open_region(&self, placement: &Placement, options: RegionOptions) -> Result<Box<dyn Region>, MemError> {
        self.shared.meter.announce(Call::Reserve)?;
        Ok(Box::new(region::CudaRegion::new(Arc::clone(&self.shared), placement, options)?))
    }

    fn raw_pages(&self, page_bytes: Bytes, pages: u32) -> Result<Box<dyn RawPages>, MemError> {
        check_granular(self, page_bytes)?;
        Ok(Box::new(raw::CudaRaw::new(Arc::clone(&self.shared), page_bytes, pages)?))
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // Cached handles hold memory; what the driver will not take back now goes with the process.
        let _ = self.trim_cache();
    }
}

/// GPUs that this process may use (after `CUDA_VISIBLE_DEVICES`), without opening any of them.
pub(crate) fn device_count() -> Result<u32, MemError> {
    count_devices(Driver::load()?)
}

fn count_devices(driver: &Driver) -> Result<u32, MemError> {
    let mut count = 0;
    // SAFETY: a place to write to.
    unsafe { call!(driver, device_count(&raw mut count)) }?;
    Ok(u32::try_from(count).unwrap_or(0))
}

fn find_device(driver: &Driver, number: u32) -> Result<c_int, MemError> {
    let count = count_devices(driver)?;
    let ordinal = c_int::try_from(number).ok().filter(|_| number < count);
    let ordinal = ordinal.ok_or(MemError::NoSuchDevice { device: number, count })?;
    let mut device = 0;
    // SAFETY: a place to write to, and a number below the count.
    unsafe { call!(driver, device_get(&raw mut device, ordinal)) }?;
    Ok(device)
}

fn check_device(driver: &Driver, device: c_int, options: &CudaOptions) -> Result<(), MemError> {
    let has = |attribute| {
        let mut value = 0;
        // SAFETY: a place to write to; a driver that does not know the attribute answers with an error.
        let answer = unsafe { call!(driver, device_attribute(&raw mut value, attribute, device)) };
        answer.is_ok() && value != 0
    };
    if !has(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED as c_int) {
        return Err(unavailable("this GPU has no virtual memory management: use the host back-end".to_owned()));
    }
    let wishes = [
        (
            options.gpu_direct_rdma,
            Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED as c_int,
            "direct access by network cards (GPUDirect RDMA)",
        ),
        (
            options.shareable,
            Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED as c_int,
            "sharing pages as file descriptors",
        ),
        (options.memory != CudaMemory::Device, HOST_NUMA_PAGES_SUPPORTED, "pages in host memory"),
    ];
    match wishes.into_iter().find(|&(wished, attribute, _)| wished && !has(attribute)) {
        Some((_, _, option)) => Err(MemError::Unsupported { option }),
        None => Ok(()),
    }
}

fn device_name(driver: &Driver, device: c_int) -> Result<String, MemError> {
    let mut name = [0; 256];
    // SAFETY: a place of 256 bytes to write to; the driver ends what it writes with NUL.
    unsafe { call!(driver, device_name(name.as_mut_ptr(), 255, device)) }?;
    // SAFETY: zeroed before, and at most 255 bytes were written: there is a NUL.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) };
    Ok(name.to_string_lossy().into_owned())
}

/// As `nvidia-smi -L` writes it.
fn device_uuid(driver: &Driver, device: c_int) -> Result<String, MemError> {
    let mut uuid = CUuuid { bytes: [0; 16] };
    // SAFETY: a place of 16 bytes to write to.
    unsafe { call!(driver, device_uuid(&raw mut uuid, device)) }?;
    let hex: String = uuid.bytes.iter().map(|byte| format!("{:02x}", byte.cast_unsigned())).collect();
    Ok(format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]))
}

/// `580.95.05 (CUDA 13.0)`: the kernel module's version where it can be read, and the driver API's.
fn driver_version(driver: &Driver) -> String {
    let mut version = 0;
    // SAFETY: a place to write to; a failure leaves the 0.
    let _ = unsafe { call!(driver, driver_version(&raw mut version)) };
    let api = format!("CUDA {}.{}", version / 1000, version % 1000 / 10);
    let module = fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let looks_like_version =
        |word: &&str| word.split('.').count() >= 2 && word.split('.').all(|part| part.parse::<u32>().is_ok());
    match module.lines().next().unwrap_or_default().split_whitespace().find(looks_like_version) {
        Some(module) => format!("{module} ({api})"),
        None => api,
    }
}
