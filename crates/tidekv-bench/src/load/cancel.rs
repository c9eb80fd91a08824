//! Stopping a run early: one switch that threads and tasks wait for.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// The last stretch of a wait is slept exactly; before it, a wait can be broken off.
const EXACT: Duration = Duration::from_millis(1);

/// A switch that is thrown once. Clones are the same switch.
#[derive(Clone, Debug)]
pub struct Cancel {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    tasks: watch::Sender<bool>,
    is_cancelled: Mutex<bool>,
    threads: Condvar,
}

impl Default for Cancel {
    fn default() -> Self {
        let inner =
            Inner { tasks: watch::Sender::new(false), is_cancelled: Mutex::new(false), threads: Condvar::new() };
        Self { inner: Arc::new(inner) }
    }
}

impl Cancel {
    /// A switch that is not thrown.
    pub fn new() -> Self {
        Self::default()
    }

    /// Throws it.
    pub fn cancel(&self) {
        *self.inner.is_cancelled.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.inner.threads.notify_all();
        self.inner.tasks.send_replace(true);
    }

    /// Whether it was thrown.
    pub fn is_cancelled(&self) -> bool {
        *self.inner.tasks.borrow()
    }

    /// Waits, on a thread, for a moment; `false` if the switch was thrown first.
    pub fn wait_until(&self, moment: Instant) -> bool {
        let mut is_cancelled = self.inner.is_cancelled.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if *is_cancelled {
                return false;
            }
            let left = moment.saturating_duration_since(Instant::now());
            if left <= EXACT {
                drop(is_cancelled);
                std::thread::sleep(left);
                return !self.is_cancelled();
            }
            let waited = self.inner.threads.wait_timeout(is_cancelled, left - EXACT);
            is_cancelled = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits, in a task, for the switch.
    pub(super) async fn cancelled(&self) {
        let mut thrown = self.inner.tasks.subscribe();
        // The sender lives as long as we do.
        let _ = thrown.wait_for(|&is_thrown| is_thrown).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_in_time_or_when_it_is_told_to() {
        let cancel = Cancel::new();
        let start = Instant::now();
        assert!(cancel.wait_until(start + Duration::from_millis(5)));
        assert!(start.elapsed() >= Duration::from_millis(5));
        let waiting = cancel.clone();
        let waiter = std::thread::spawn(move || waiting.wait_until(Instant::now() + Duration::from_secs(3600)));
        cancel.cancel();
        assert!(!waiter.join().unwrap() && cancel.is_cancelled());
        assert!(!cancel.wait_until(Instant::now()));
    }
}
