//! Ctrl-C while a run is under way: heard by whoever draws the bar, and passed on to the run.

use std::io;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::load::{Cancel, Control};
use crate::progress::Progress;

/// How often somebody looks whether Ctrl-C was pressed, and draws the bar.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Does `work` on a thread of its own and meanwhile draws the bar and listens for Ctrl-C.
pub(super) fn attended<T: Send>(
    interrupt: &Interrupt,
    control: &Control,
    progress: &Progress,
    work: impl FnOnce() -> T + Send,
) -> T {
    thread::scope(|scope| {
        let (ended, end) = mpsc::channel::<()>();
        let worker = scope.spawn(move || {
            // Dropped at the end, also of a panic.
            let _ended = ended;
            work()
        });
        while end.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout) {
            progress.at(control.counters.finished.load(Ordering::Relaxed));
            if interrupt.is_pressed() {
                control.cancel.cancel();
            }
        }
        worker.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

/// Throws a switch when it goes, however it goes.
pub(super) struct StopOnDrop<'a>(pub(super) &'a Cancel);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Ctrl-C, once: what was measured is written. The second time it does what it always does.
pub(super) struct Interrupt {
    pressed: Arc<AtomicBool>,
}

impl Interrupt {
    pub(super) fn catch() -> io::Result<Self> {
        let pressed = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // In this order, so that the first time finds the flag down.
            flag::register_conditional_default(signal, Arc::clone(&pressed))?;
            flag::register(signal, Arc::clone(&pressed))?;
        }
        Ok(Self { pressed })
    }

    pub(super) fn is_pressed(&self) -> bool {
        self.pressed.load(Ordering::SeqCst)
    }

    /// Waits; `false` if it was pressed first.
    pub(super) fn wait(&self, time: Duration) -> bool {
        let end = Instant::now() + time;
        while !self.is_pressed() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            thread::sleep(left.min(LOOK_EVERY));
        }
        false
    }
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        // A handler cannot be taken away again; the one that stays does what the system would do.
        self.pressed.store(true, Ordering::SeqCst);
    }
}
