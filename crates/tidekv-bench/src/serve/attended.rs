//! A run under way, and the bar that is drawn meanwhile.

use std::panic::resume_unwind;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use crate::load::{Cancel, Control};
use crate::progress::Progress;

/// How often the bar is drawn.
const DRAW_EVERY: Duration = Duration::from_millis(100);

/// Does `work` on a thread of its own and draws the bar meanwhile.
pub(super) fn attended<T: Send>(control: &Control, progress: &Progress, work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let (ended, end) = mpsc::channel::<()>();
        let worker = scope.spawn(move || {
            // Dropped at the end, also of a panic.
            let _ended = ended;
            work()
        });
        while end.recv_timeout(DRAW_EVERY) == Err(RecvTimeoutError::Timeout) {
            progress.at(control.counters.finished.load(Ordering::Relaxed));
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
