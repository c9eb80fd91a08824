//! What the NVIDIA driver says of its GPUs, asked through NVML.
//!
//! ```text
//!   libnvidia-ml.so.1   loaded when it is asked, never linked: this program starts where there is no driver
//!      │
//!   GpuReader ── look() ──> GpuReport { driver, gpus: [Gpu { memory, users, MIG parts, ... }], broken }
//! ```
//!
//! NVML talks to the driver without a CUDA context, which would cost each device hundreds of MiB as long as somebody
//! looks. What a driver or a device does not say is `None`; a device that does not answer at all is named in `broken`
//! beside the others.
//!
//! Process numbers are the driver's: seen from inside a container they may belong to nobody, or to somebody else.

use std::fs;

use nvml_wrapper::enum_wrappers::device::ComputeMode as NvmlComputeMode;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use nvml_wrapper::{Device, Nvml, cuda_driver_version_major, cuda_driver_version_minor};
use serde::Serialize;
use tidekv_core::units::Bytes;

/// Where the library is looked for: as the driver installs it, as some containers and development packages have it, and
/// under Windows.
const LIBRARIES: [&str; 3] = ["libnvidia-ml.so.1", "libnvidia-ml.so", "/usr/lib/wsl/lib/libnvidia-ml.so.1"];

/// Why nothing can be said about GPUs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// There is no library to ask, or no driver behind it.
    #[error("no NVIDIA driver ({why})")]
    NoDriver {
        /// What is missing.
        why: String,
    },
    /// The library is of another version than the driver in the kernel.
    #[error("the NVIDIA library and the driver in the kernel are of different versions")]
    Mismatch,
    /// The operating system keeps this process from the devices.
    #[error("this process may not use the NVIDIA driver: {why}")]
    NotPermitted {
        /// In the driver's words.
        why: String,
    },
    /// Anything else.
    #[error("the NVIDIA driver does not work: {why}")]
    Broken {
        /// In the driver's words.
        why: String,
    },
}

/// All GPUs at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuReport {
    /// The driver's version, such as `580.95.05`.
    pub driver: Option<String>,
    /// The newest CUDA that it can serve, such as `13.0`.
    pub cuda: Option<String>,
    /// Those that answered.
    pub gpus: Vec<Gpu>,
    /// Those that did not.
    pub broken: Vec<BrokenGpu>,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Its number, as `nvidia-smi -i` takes it.
    pub index: u32,
    /// What it is sold as.
    pub name: String,
    /// `GPU-...`: by this its ledger is named.
    pub uuid: String,
    /// What it has and what is left.
    pub memory: Option<GpuMemory>,
    /// Who may use it.
    pub compute_mode: Option<ComputeMode>,
    /// Whether the driver keeps it ready while nobody uses it.
    pub persistence: Option<bool>,
    /// How it is divided; `None` for a GPU that cannot be.
    pub mig: Option<Mig>,
    /// Processes that use it, by process number.
    pub users: Option<Vec<GpuUser>>,
}

/// What a GPU is doing at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuUsage {
    /// Its number.
    pub index: u32,
    /// What it has and what is left.
    pub memory: Option<GpuMemory>,
    /// Share of the latest moments in which a kernel ran.
    pub utilization_percent: Option<u32>,
}

/// A GPU that did not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrokenGpu {
    /// Its number.
    pub index: u32,
    /// What the driver says.
    pub why: String,
}

/// Memory of a GPU or of a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuMemory {
    /// All of it.
    pub total: Bytes,
    /// What nobody uses.
    pub free: Bytes,
}

impl GpuMemory {
    /// What is not free: the driver's own part included.
    pub fn used(self) -> Bytes {
        self.total.saturating_sub(self.free)
    }
}

/// Who may use a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ComputeMode {
    /// Any number of processes.
    Default,
    /// One process at a time.
    ExclusiveProcess,
    /// Nobody.
    Prohibited,
}

/// A GPU that can be divided into parts with memory of their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mig {
    /// Whether it is divided now.
    pub enabled: bool,
    /// Whether it will be after its next reset.
    pub pending: bool,
    /// The parts.
    pub parts: Vec<MigPart>,
}

/// A part of a divided GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigPart {
    /// `MIG-...`.
    pub uuid: String,
    /// What it has and what is left.
    pub memory: Option<GpuMemory>,
}

/// A process that uses a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuUser {
    /// Its number.
    pub pid: u32,
    /// The program's name, if there is a process of that number here.
    pub name: Option<String>,
    /// What it holds, if the driver says.
    pub memory: Option<Bytes>,
}

/// A connection to the driver.
#[derive(Debug)]
pub struct GpuReader {
    nvml: Nvml,
}

impl GpuReader {
    /// Loads the library and connects to the driver. May take seconds per GPU where the driver keeps none ready.
    pub fn open() -> Result<Self, GpuError> {
        let mut first_error = None;
        for library in LIBRARIES {
            match Nvml::builder().lib_path(library.as_ref()).init() {
                Ok(nvml) => return Ok(Self { nvml }),
                // A library that cannot be loaded: another of its names may lead to one that can.
                Err(error @ NvmlError::LibloadingError(_)) => first_error = first_error.or(Some(refusal(&error))),
                Err(error) => return Err(refusal(&error)),
            }
        }
        Err(first_error.unwrap_or_else(|| GpuError::NoDriver { why: "no library to ask".to_owned() }))
    }

    /// What each GPU is doing now: little enough to be asked ten times a second. One that does not answer is left out.
    pub fn usage(&self) -> Vec<GpuUsage> {
        let count = self.nvml.device_count().unwrap_or(0);
        let devices = (0..count).filter_map(|index| Some((index, self.nvml.device_by_index(index).ok()?)));
        let usage = |(index, device): (u32, Device<'_>)| GpuUsage {
            index,
            memory: memory_of(&device),
            utilization_percent: device.utilization_rates().ok().map(|rates| rates.gpu),
        };
        devices.map(usage).collect()
    }

    /// Asks for everything.
    pub fn look(&self) -> Result<GpuReport, GpuError> {
        let count = self.nvml.device_count().map_err(|error| refusal(&error))?;
        let cuda = self.nvml.sys_cuda_driver_version().ok();
        let mut report = GpuReport {
            driver: self.nvml.sys_driver_version().ok(),
            cuda: cuda.map(|it| format!("{}.{}", cuda_driver_version_major(it), cuda_driver_version_minor(it))),
            ..GpuReport::default()
        };
        for index in 0..count {
            match self.nvml.device_by_index(index).and_then(|device| look_at(index, &device)) {
                Ok(gpu) => report.gpus.push(gpu),
                Err(error) => report.broken.push(BrokenGpu { index, why: error.to_string() }),
            }
        }
        Ok(report)
    }
}

fn look_at(index: u32, device: &Device<'_>) -> Result<Gpu, NvmlError> {
    // A device that is lost fails here already; one that knows its name and number is shown with whatever else it says.
    let (name, uuid) = (device.name()?, device.uuid()?);
    let mig = look_at_parts(device);
    let handles = mig.iter().flat_map(|(_, parts)| parts.iter());
    let users = users_of([device].into_iter().chain(handles));
    Ok(Gpu {
        index,
        name,
        uuid,
        memory: memory_of(device),
        compute_mode: device.compute_mode().ok().map(compute_mode),
        persistence: device.is_in_persistent_mode().ok(),
        mig: mig.map(|((enabled, pending), parts)| Mig { enabled, pending, parts: parts.iter().map(part).collect() }),
        users,
    })
}

/// Whether a GPU is divided and will be, and a handle for each of its parts.
type Divided<'nvml> = ((bool, bool), Vec<Device<'nvml>>);

fn look_at_parts<'nvml>(device: &Device<'nvml>) -> Option<Divided<'nvml>> {
    let mode = device.mig_mode().ok()?;
    let enabled = mode.current != 0;
    // The most that there can be; places without a part answer "not found".
    let places = if enabled { device.mig_device_count().unwrap_or(0) } else { 0 };
    let parts = (0..places).filter_map(|place| device.mig_device_by_index(place).ok()).collect();
    Some(((enabled, mode.pending != 0), parts))
}

fn part(device: &Device<'_>) -> MigPart {
    MigPart { uuid: device.uuid().unwrap_or_default(), memory: memory_of(device) }
}

fn memory_of(device: &Device<'_>) -> Option<GpuMemory> {
    let memory = device.memory_info().ok()?;
    Some(GpuMemory { total: Bytes(memory.total), free: Bytes(memory.free) })
}

/// Everybody on these devices, each once: who computes and draws is in both of the driver's lists.
fn users_of<'a, 'nvml: 'a>(devices: impl Iterator<Item = &'a Device<'nvml>>) -> Option<Vec<GpuUser>> {
    let mut found: Option<Vec<ProcessInfo>> = None;
    for device in devices {
        let lists = [device.running_compute_processes(), device.running_graphics_processes()];
        for processes in lists.into_iter().flatten() {
            found.get_or_insert_default().extend(processes);
        }
    }
    found.map(merge)
}

fn merge(mut processes: Vec<ProcessInfo>) -> Vec<GpuUser> {
    let memory = |process: &ProcessInfo| match process.used_gpu_memory {
        UsedGpuMemory::Used(bytes) => Some(Bytes(bytes)),
        UsedGpuMemory::Unavailable => None,
    };
    // The largest figure first, so that it is the one that stays.
    processes.sort_by_key(|process| (process.pid, std::cmp::Reverse(memory(process))));
    processes.dedup_by_key(|process| process.pid);
    let user =
        |process: &ProcessInfo| GpuUser { pid: process.pid, name: process_name(process.pid), memory: memory(process) };
    processes.iter().map(user).collect()
}

/// What the kernel calls a process: at most 15 bytes, and unlike its command line never waited for.
fn process_name(pid: u32) -> Option<String> {
    let name = fs::read(format!("/proc/{pid}/comm")).ok()?;
    Some(String::from_utf8_lossy(&name).trim_end().to_owned())
}

fn compute_mode(mode: NvmlComputeMode) -> ComputeMode {
    match mode {
        NvmlComputeMode::Default => ComputeMode::Default,
        NvmlComputeMode::ExclusiveProcess | NvmlComputeMode::ExclusiveThread => ComputeMode::ExclusiveProcess,
        NvmlComputeMode::Prohibited => ComputeMode::Prohibited,
    }
}

fn refusal(error: &NvmlError) -> GpuError {
    let why = error.to_string();
    match error {
        NvmlError::LibloadingError(source) => {
            let text = source.to_string();
            // The loader has no codes, only sentences. A library that is there and broken is another matter.
            if text.contains("No such file") {
                GpuError::NoDriver { why: format!("{} is not installed", LIBRARIES[0]) }
            } else {
                GpuError::Broken { why: text }
            }
        }
        NvmlError::DriverNotLoaded => GpuError::NoDriver { why: "it is not loaded".to_owned() },
        NvmlError::LibRmVersionMismatch => GpuError::Mismatch,
        NvmlError::NoPermission | NvmlError::OperatingSystem => GpuError::NotPermitted { why },
        _ => GpuError::Broken { why },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32, used_gpu_memory: UsedGpuMemory) -> ProcessInfo {
        ProcessInfo { pid, used_gpu_memory, gpu_instance_id: None, compute_instance_id: None }
    }

    #[test]
    fn a_process_in_several_lists_is_one_user() {
        let own = std::process::id();
        let users = merge(vec![
            process(u32::MAX, UsedGpuMemory::Unavailable),
            process(own, UsedGpuMemory::Unavailable),
            process(own, UsedGpuMemory::Used(5 << 20)),
        ]);
        assert_eq!(users.len(), 2, "{users:?}");
        assert_eq!((users[0].pid, users[0].memory), (own, Some(Bytes::mib(5))));
        assert!(users[0].name.as_ref().is_some_and(|name| !name.is_empty() && !name.contains('\n')), "{users:?}");
        assert_eq!(users[1], GpuUser { pid: u32::MAX, name: None, memory: None });
    }

    #[test]
    fn every_refusal_says_what_kind_it_is() {
        assert!(matches!(refusal(&NvmlError::DriverNotLoaded), GpuError::NoDriver { .. }));
        assert_eq!(refusal(&NvmlError::LibRmVersionMismatch), GpuError::Mismatch);
        assert!(matches!(refusal(&NvmlError::NoPermission), GpuError::NotPermitted { .. }));
        assert!(matches!(refusal(&NvmlError::GpuLost), GpuError::Broken { .. }));
    }

    /// On a machine with GPUs this looks at them; on others it must say in one sentence that there are none.
    #[test]
    fn this_machine_answers() {
        match GpuReader::open().and_then(|reader| reader.look()) {
            Ok(report) => {
                assert!(report.driver.is_some(), "{report:?}");
                for gpu in &report.gpus {
                    assert!(gpu.uuid.starts_with("GPU-"), "{gpu:?}");
                    assert!(gpu.memory.is_none_or(|memory| memory.free <= memory.total), "{gpu:?}");
                }
            }
            Err(error) => assert!(error.to_string().lines().count() == 1, "{error}"),
        }
    }
}
