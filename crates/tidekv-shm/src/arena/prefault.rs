//! A thread that touches pages before anybody needs them.
//!
//! The first touch of a page costs a fault: 0.3 us in a row of them, 2 us alone, and that hundreds of times for a block of
//! 1 MiB, while allocating it costs nanoseconds. `MADV_POPULATE_WRITE` takes the faults of a chunk in one call and changes
//! no byte. Page tables are each process's own, so each attachment that wants it has its thread.

use std::sync::{Arc, PoisonError};
#[cfg(not(all(test, loom)))]
use std::sync::{Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

use rustix::io::Errno;
use rustix::mm::Advice;

#[cfg(all(test, loom))]
use loom::sync::{Condvar, Mutex, MutexGuard};

use super::attachment::Attachment;

/// What is populated at once: little enough that ending does not take long.
const CHUNK: usize = 4 << 20;

/// Tells the thread that there are more segments, or that it shall end. `model.rs` checks with loom that it hears of it.
#[derive(Debug, Default)]
pub(super) struct Wake {
    state: Mutex<State>,
    bell: Condvar,
}

#[derive(Debug, Default)]
struct State {
    stop: bool,
    /// Segments that are populated.
    done: u32,
}

impl Wake {
    /// There are more segments. Under the lock: between the thread's look at their number and its sleep nobody else has it,
    /// so a ring comes before the look or wakes from the sleep.
    pub(super) fn ring(&self) {
        let _state = self.lock();
        self.bell.notify_all();
    }

    /// Waits for a segment that is not populated; `None` when it is time to end.
    pub(super) fn next(&self, mapped: impl Fn() -> u32) -> Option<u32> {
        let mut state = self.lock();
        while !state.stop && state.done >= mapped() {
            state = self.bell.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.stop { None } else { Some(state.done) }
    }

    /// Nobody waits any more.
    pub(super) fn stop(&self) {
        self.lock().stop = true;
        self.ring();
    }

    /// Segments that a thread has populated.
    pub(super) fn done(&self) -> u32 {
        self.lock().done
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends its thread when it is dropped.
#[derive(Debug)]
pub(super) struct Prefaulter {
    attachment: Arc<Attachment>,
    thread: Option<JoinHandle<()>>,
}

impl Prefaulter {
    /// `None` if there can be no thread: pages are then touched by whoever uses them.
    pub(super) fn start(attachment: &Arc<Attachment>) -> Option<Self> {
        let theirs = Arc::clone(attachment);
        let builder = std::thread::Builder::new().name("tidekv-prefault".to_owned());
        let thread = builder.spawn(move || work(&theirs)).ok()?;
        Some(Self { attachment: Arc::clone(attachment), thread: Some(thread) })
    }
}

impl Drop for Prefaulter {
    fn drop(&mut self) {
        let thread = self.thread.take();
        if self.attachment.is_foreign() {
            // There is no such thread in a forked child.
            std::mem::forget(thread);
            return;
        }
        self.attachment.wake.stop();
        if let Some(thread) = thread {
            // It does not panic; if it did, its work was an optimisation.
            let _ = thread.join();
        }
    }
}

fn work(attachment: &Attachment) {
    let wake = &attachment.wake;
    while let Some(segment) = wake.next(|| attachment.mapped()) {
        if !populate(attachment, segment, || wake.lock().stop) {
            return;
        }
        wake.lock().done = segment + 1;
    }
}

/// Populates a segment and its tables. `false` if it was told to stop, or if the kernel cannot do it.
pub(super) fn populate(attachment: &Attachment, segment: u32, stop: impl Fn() -> bool) -> bool {
    let geometry = attachment.head.geometry;
    if attachment.tables.populate(segment).is_err() {
        return false;
    }
    let bytes = 1_usize << geometry.segment_shift;
    let start = (segment as usize) << geometry.segment_shift;
    for at in (0..bytes).step_by(CHUNK) {
        loop {
            if stop() {
                return false;
            }
            match attachment.window.advise(start + at, CHUNK.min(bytes - at), Advice::LinuxPopulateWrite) {
                Ok(()) => break,
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(_) => return false,
            }
        }
    }
    true
}
