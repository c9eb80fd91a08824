//! Devices by the names that torch uses: `cuda:1`, `cuda`, `cpu`, and `auto` for a GPU where there is one.

use std::sync::Arc;

use pyo3::prelude::*;
use tidekv_cli::gpu::{Gpu, GpuReader};
use tidekv_core::units::Bytes;
use tidekv_mem::{Backend, BackendName, MemError, device_count as backend_devices, open};

use crate::dlpack;
use crate::error::Refused;

/// What a GPU's handles are multiples of.
const CUDA_GRANULARITY: Bytes = Bytes::mib(2);

/// A device that somebody named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceName {
    backend: BackendName,
    index: u32,
}

/// A device that is open.
#[derive(Clone, Debug)]
pub(crate) struct Device {
    pub(crate) backend: Arc<dyn Backend>,
    index: u32,
}

impl DeviceName {
    pub(crate) fn parse(text: &str) -> Result<Self, Refused> {
        let named = |backend| Ok(Self { backend, index: 0 });
        match text {
            "auto" => named(BackendName::Auto),
            "cpu" | "host" => named(BackendName::Host),
            "cuda" => named(BackendName::Cuda),
            _ => match text.strip_prefix("cuda:").and_then(|index| index.parse().ok()) {
                Some(index) => Ok(Self { backend: BackendName::Cuda, index }),
                None => Err(Refused::argument(format!("{text:?} is not a device: use cuda:N, cuda, cpu or auto"))),
            },
        }
    }

    pub(crate) fn open(self) -> Result<Device, Refused> {
        Ok(Device { backend: open(self.backend, self.index)?, index: self.index })
    }

    /// What pages will be multiples of there, without opening it.
    pub(crate) fn granularity(self) -> Result<Bytes, Refused> {
        let on_gpu = match self.backend {
            BackendName::Cuda => true,
            BackendName::Auto => cuda_devices()? > 0,
            _ => false,
        };
        if on_gpu {
            return Ok(CUDA_GRANULARITY);
        }
        Ok(open(BackendName::Host, 0)?.capabilities().granularity)
    }
}

impl Device {
    fn is_cuda(&self) -> bool {
        self.backend.capabilities().name == "cuda"
    }

    /// As torch names it.
    pub(crate) fn name(&self) -> String {
        if self.is_cuda() { format!("cuda:{}", self.index) } else { "cpu".to_owned() }
    }

    pub(crate) fn in_dlpack(&self) -> dlpack::Device {
        if self.is_cuda() {
            dlpack::Device::cuda(i32::try_from(self.index).unwrap_or(i32::MAX))
        } else {
            dlpack::Device::CPU
        }
    }
}

fn cuda_devices() -> Result<u32, Refused> {
    match backend_devices(BackendName::Cuda) {
        Err(MemError::Unavailable { .. }) => Ok(0),
        count => Ok(count?),
    }
}

/// GPUs that CUDA shows this process; 0 without a driver.
#[pyfunction]
pub(crate) fn device_count(py: Python<'_>) -> Result<u32, Refused> {
    py.detach(cuda_devices)
}

/// (free, total) bytes of a device. GPUs are asked through NVML: no context is made.
#[pyfunction]
#[pyo3(signature = (device = "auto"))]
pub(crate) fn device_memory(py: Python<'_>, device: &str) -> Result<(u64, u64), Refused> {
    let name = DeviceName::parse(device)?;
    py.detach(|| {
        let on_gpu = match name.backend {
            BackendName::Auto => cuda_devices()? > 0,
            backend => backend == BackendName::Cuda,
        };
        if on_gpu {
            return gpu_memory(name.index);
        }
        let memory = open(BackendName::Host, 0)?.memory()?;
        Ok((memory.free.0, memory.total.0))
    })
}

fn gpu_memory(index: u32) -> Result<(u64, u64), Refused> {
    let unavailable = |why: String| Refused::new("Unavailable", why);
    let report = GpuReader::open().and_then(|reader| reader.look()).map_err(|error| unavailable(error.to_string()))?;
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let gpu = nth_visible(&report.gpus, visible.as_deref(), index)
        .ok_or_else(|| unavailable(format!("there is no GPU {index} that this process can see")))?;
    let memory =
        gpu.memory.ok_or_else(|| unavailable(format!("the driver does not say how much memory {} has", gpu.name)))?;
    Ok((memory.free.0, memory.total.0))
}

/// CUDA counts the GPUs that its variable names, by number or by the beginning of a UUID.
fn nth_visible<'a>(gpus: &'a [Gpu], visible: Option<&str>, index: u32) -> Option<&'a Gpu> {
    let Some(visible) = visible else { return gpus.iter().find(|gpu| gpu.index == index) };
    let word = visible.split(',').nth(index as usize)?.trim();
    match word.parse::<u32>() {
        Ok(number) => gpus.iter().find(|gpu| gpu.index == number),
        Err(_) if word.is_empty() => None,
        Err(_) => gpus.iter().find(|gpu| gpu.uuid.starts_with(word)),
    }
}
