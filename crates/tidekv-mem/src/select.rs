//! Choosing a back-end by name, once, at start-up.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::cuda::{self, CudaBackend, CudaOptions};
use crate::fake::FakeBackend;
use crate::host::{HostBackend, HostOptions};
use crate::{Backend, MemError};

/// A back-end as people name it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendName {
    /// CUDA where there is a usable device, else host memory.
    #[default]
    Auto,
    /// Plain memory of the machine.
    Host,
    /// Memory of an NVIDIA GPU.
    Cuda,
    /// Vectors in this process: for tests and for measuring our own bookkeeping.
    Fake,
}

impl BackendName {
    /// Every name.
    pub const ALL: [Self; 4] = [Self::Auto, Self::Host, Self::Cuda, Self::Fake];

    /// The name on command lines.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Host => "host",
            Self::Cuda => "cuda",
            Self::Fake => "fake",
        }
    }
}

impl fmt::Display for BackendName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for BackendName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|name| name.name() == text)
            .ok_or_else(|| format!("{text:?} is not a back-end: use host, cuda, fake or auto"))
    }
}

/// Opens a back-end with its default options; `device` counts for CUDA alone.
///
/// # Errors
/// [`MemError::Unavailable`] or [`MemError::NoSuchDevice`] for `cuda` without a usable device. `auto` never fails over a
/// missing GPU, but does over a `device` number that the GPUs present do not reach.
pub fn open(name: BackendName, device: u32) -> Result<Arc<dyn Backend>, MemError> {
    let cuda = || CudaBackend::open(CudaOptions { device, ..CudaOptions::default() });
    Ok(match name {
        BackendName::Host => Arc::new(HostBackend::open(HostOptions::default())?),
        BackendName::Cuda => Arc::new(cuda()?),
        BackendName::Fake => Arc::new(FakeBackend::default()),
        BackendName::Auto => match cuda() {
            Ok(backend) => Arc::new(backend),
            Err(MemError::Unavailable { .. }) => Arc::new(HostBackend::open(HostOptions::default())?),
            Err(MemError::NoSuchDevice { count: 0, .. }) => Arc::new(HostBackend::open(HostOptions::default())?),
            Err(other) => return Err(other),
        },
    })
}

/// How many devices a back-end has: GPUs for CUDA, one for memory of the machine and for fake memory.
///
/// # Errors
/// [`MemError::Unavailable`] for `cuda` without a driver. `auto` counts host memory then.
pub fn device_count(name: BackendName) -> Result<u32, MemError> {
    match name {
        BackendName::Host | BackendName::Fake => Ok(1),
        BackendName::Cuda => cuda::device_count(),
        BackendName::Auto => match cuda::device_count() {
            Ok(0) | Err(MemError::Unavailable { .. }) => Ok(1),
            count => count,
        },
    }
}
