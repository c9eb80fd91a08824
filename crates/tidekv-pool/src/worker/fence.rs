//! How a worker knows that its own device is done with a page.
//!
//! The scheduler says after which step an unmap may run. Rank 0 having answered that step proves nothing about rank 3's
//! device, so each worker asks its own: an engine that records an event behind every step waits for that event; without
//! one the whole device is synchronised, on the worker's thread.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use tidekv_core::units::Step;
use tidekv_mem::{Backend, MemError};

/// Waits for the worker's device. Given by the engine in the worker's process; called on the worker's thread alone.
pub trait DeviceFence: Send + fmt::Debug {
    /// Waits until the device has finished `step` and all before it, or, without one, all that was submitted to it.
    /// `Step(0)` is over before anything ran.
    ///
    /// # Errors
    /// [`FenceError::TimedOut`] at the deadline: the scheduler keeps the pages and asks again.
    fn wait(&mut self, step: Option<Step>, deadline: Instant) -> Result<(), FenceError>;
}

/// The device is not known to be done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FenceError {
    /// Not before the deadline.
    #[error("the device had not finished in time")]
    TimedOut,
    /// The driver reports that work of the device failed.
    #[error("the device could not be waited for")]
    Device(#[from] MemError),
}

/// Without events: one synchronise of the whole device.
#[derive(Debug)]
pub(super) struct Synchronise(pub(super) Arc<dyn Backend>);

impl DeviceFence for Synchronise {
    fn wait(&mut self, step: Option<Step>, _deadline: Instant) -> Result<(), FenceError> {
        if step == Some(Step(0)) || !self.0.capabilities().needs_fence {
            return Ok(());
        }
        Ok(self.0.synchronise()?)
    }
}
