//! One device's primary context, and making it current on whichever thread is asking.
//!
//! Driver calls act on the calling thread's current context, and our callers are engine threads, background threads and
//! broadcast workers whose current context is not ours to change. So each operation enters the context and leaves the
//! thread as it found it; entering a context that is current already costs one query.

use std::marker::PhantomData;
use std::ptr;

use cudarc::driver::sys::{CUcontext, CUdevice};

use super::driver::{Driver, call};
use crate::MemError;
use tidekv_fork::Birth;

#[derive(Debug)]
pub(super) struct Context {
    pub(super) driver: &'static Driver,
    pub(super) device: CUdevice,
    raw: CUcontext,
    birth: Birth,
}

// SAFETY: a context handle may be used from any thread; the driver locks inside.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Shares the device's primary context, the one that PyTorch and the CUDA runtime use.
    pub(super) fn retain(driver: &'static Driver, device: CUdevice) -> Result<Self, MemError> {
        let mut raw = ptr::null_mut();
        // SAFETY: a place to write to, and a device that the driver named.
        unsafe { call!(driver, context_retain(&raw mut raw, device)) }?;
        Ok(Self { driver, device, raw, birth: Birth::here() })
    }

    /// Makes the context current on this thread until the guard is dropped.
    pub(super) fn enter(&self) -> Result<Entered, MemError> {
        if self.birth.is_foreign() {
            return Err(MemError::Forked);
        }
        let mut current = ptr::null_mut();
        // SAFETY: a place to write to.
        unsafe { call!(self.driver, context_current(&raw mut current)) }?;
        let pushed = current != self.raw;
        if pushed {
            // SAFETY: the context is retained as long as `self` lives.
            unsafe { call!(self.driver, context_push(self.raw)) }?;
        }
        Ok(Entered { driver: self.driver, pushed, this_thread: PhantomData })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if !self.birth.is_foreign() {
            // SAFETY: pairs with the retain. A failure at process exit (driver already gone) harms nobody.
            unsafe { (self.driver.context_release)(self.device) };
        }
    }
}

/// The thread's context is a device's until this is dropped. Driver calls that need a context are methods of this (see
/// `memory.rs`). Whoever keeps it keeps the device too.
#[derive(Debug)]
pub struct Entered {
    pub(super) driver: &'static Driver,
    pushed: bool,
    /// Current contexts belong to threads: not `Send`, not `Sync`.
    this_thread: PhantomData<*const ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = ptr::null_mut();
            // SAFETY: a place to write to; pairs with the push on this same thread, since `Entered` cannot leave it.
            unsafe { (self.driver.context_pop)(&raw mut popped) };
        }
    }
}
