//! Questions that may never be answered.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use super::Probe;

/// An answer on its way.
pub(super) struct Pending<T> {
    whom: &'static str,
    answer: Receiver<T>,
    limit: Duration,
    deadline: Instant,
}

impl<T: Send + 'static> Pending<T> {
    /// Asks in a thread of its own.
    pub(super) fn start(whom: &'static str, limit: Duration, ask: impl FnOnce() -> T + Send + 'static) -> Self {
        let (sender, answer) = mpsc::channel();
        // Nobody listens any more if this comes too late. A thread that cannot be made is one that does not answer.
        let _ = thread::Builder::new().spawn(move || sender.send(ask()));
        Self { whom, answer, limit, deadline: Instant::now() + limit }
    }

    /// The answer, or that there was none in time.
    pub(super) fn get(self) -> Probe<T> {
        let Self { whom, answer, limit, deadline } = self;
        answer.recv_timeout(deadline.saturating_duration_since(Instant::now())).map_err(|error| match error {
            RecvTimeoutError::Timeout => format!("{whom} did not answer within {} s", limit.as_secs_f32()),
            RecvTimeoutError::Disconnected => format!("{whom} could not be asked"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_and_their_absence() {
        let patience = Duration::from_secs(60);
        assert_eq!(Pending::start("it", patience, || 7).get(), Ok(7));
        let (held, never) = mpsc::channel::<()>();
        let hangs = Pending::start("it", Duration::from_millis(10), move || never.recv().is_ok());
        assert_eq!(hangs.get().unwrap_err(), "it did not answer within 0.01 s");
        drop(held);
        let ends = Pending::start("it", patience, || -> u32 { std::panic::resume_unwind(Box::new(())) });
        assert_eq!(ends.get().unwrap_err(), "it could not be asked");
    }
}
