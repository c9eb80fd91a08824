//! What the benchmark asks of a GPU, and where one is opened.

use tidekv_mem::BackendName;

use super::Plan;
use super::cell::{Cell, CellError, Measured};
use super::cuda::CudaSide;
use crate::host::HostInfo;

/// The GPU's side. It fills `measured.gpu`, and adds to `measured.verified_steps` what it compared with
/// [`reference::verify`](super::reference::verify).
pub(super) trait DeviceSide {
    /// Measures the operations of `plan` in one cell, and what brings the CPU's steps to the device.
    fn measure(&mut self, plan: &Plan, cell: Cell, measured: &mut Measured) -> Result<(), CellError>;

    /// This machine, with the card and its driver.
    fn host(&self) -> HostInfo;

    /// The floors seen while measuring.
    fn floors(&mut self) -> Floors;
}

/// An empty kernel until it is over, in microseconds: the least that anything on the device takes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Floors {
    /// Launched.
    pub(super) launch_us: Option<f64>,
    /// As a captured graph.
    pub(super) graph_us: Option<f64>,
}

/// The device of that number, or why steps cannot be prepared on it.
pub(super) fn open(device: u32) -> Result<Box<dyn DeviceSide>, String> {
    match tidekv_mem::open(BackendName::Cuda, device) {
        Err(error) => Err(error.to_string()),
        Ok(backend) => Ok(Box::new(CudaSide::new(device, HostInfo::with_backend(backend.capabilities())))),
    }
}
