//! How the engine learns that it should evict: a callback, or a request that it polls.
//!
//! ```text
//!   background thread                 engine
//!   -----------------                 ------
//!   demand(pages) ----> request ----> requested()       a value with a revision: read it whenever convenient
//!                  \--> eventfd ----> fd()              readable while a request is new: for event loops
//!                   \-> callback                        called on the background thread, no lock held
//! ```
//!
//! A request is a *state*, not an order: it says what the pool owes at the moment. It shrinks as the engine frees
//! blocks, and becomes nothing when the neighbour's demand is met otherwise, so nobody evicts for a reason that is gone.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};
use tidekv_core::units::Bytes;
use tidekv_fork::ClosedInChild;

/// What the pool asks its engine to free, by evicting cached prefixes or preempting requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReclaimRequest {
    /// Memory to free; zero for nothing.
    pub bytes: Bytes,
    /// The same in whole pages.
    pub pages: u32,
    /// The part of `pages` that is owed even if running requests must make room. The rest is asked for only because the
    /// engine said that it could evict as much ([`set_evictable`](crate::KvPool::set_evictable)).
    pub firm_pages: u32,
    /// Grows with every change of the request.
    pub revision: u64,
}

type Callback = Box<dyn Fn(ReclaimRequest) + Send>;

/// The request of the moment and the ways to hear of it.
pub(crate) struct Mailbox {
    request: Mutex<ReclaimRequest>,
    callback: Mutex<Option<Callback>>,
    /// A callback that has not heard of the request of the moment.
    unheard: AtomicBool,
    fd: ClosedInChild,
}

impl Mailbox {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            request: Mutex::default(),
            callback: Mutex::default(),
            unheard: AtomicBool::new(false),
            fd: ClosedInChild::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?),
        })
    }

    pub(crate) fn on_request(&self, callback: Callback) {
        *lock(&self.callback) = Some(callback);
        self.unheard.store(true, Ordering::Release);
    }

    /// The request of the moment. Makes the descriptor silent until the next one.
    pub(crate) fn requested(&self) -> ReclaimRequest {
        let request = *lock(&self.request);
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.fd, &mut count);
        request
    }

    /// The request of the moment, for snapshots: the descriptor stays as it is.
    pub(crate) fn peek(&self) -> ReclaimRequest {
        *lock(&self.request)
    }

    /// Says what is owed now, how much of that is firm, and what of the last request was still `outstanding`. A change that
    /// asks for something is announced, and so is the same number once more after the engine had freed some; says whether
    /// there was one.
    pub(crate) fn demand(&self, pages: u32, firm_pages: u32, outstanding: u32, page_bytes: Bytes) -> bool {
        let unheard = self.unheard.swap(false, Ordering::AcqRel);
        let request = {
            let mut request = lock(&self.request);
            if request.pages == pages && request.firm_pages == firm_pages && outstanding == pages && !unheard {
                return false;
            }
            let bytes = Bytes(page_bytes.0 * u64::from(pages));
            *request = ReclaimRequest { bytes, pages, firm_pages, revision: request.revision + 1 };
            *request
        };
        if pages == 0 {
            return false;
        }
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        self.call(request);
        true
    }

    /// Only the background thread calls, so a callback that is out of its place is the one running.
    fn call(&self, request: ReclaimRequest) {
        let Some(callback) = lock(&self.callback).take() else { return };
        if catch_unwind(AssertUnwindSafe(|| callback(request))).is_err() {
            tracing::error!(?request, "the reclaim callback panicked; it will be called again");
        }
        // Unless the callback put another in its place.
        lock(&self.callback).get_or_insert(callback);
    }
}

impl AsFd for Mailbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl fmt::Debug for Mailbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailbox").field("request", &self.request).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Plain values: a panic elsewhere cannot leave them half written.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const PAGE: Bytes = Bytes::mib(2);

    #[test]
    fn a_request_is_announced_when_it_changes() {
        let mailbox = Mailbox::new().unwrap();
        let (sender, calls) = mpsc::channel();
        mailbox.on_request(Box::new(move |request| sender.send(request).unwrap()));
        assert_eq!(mailbox.requested(), ReclaimRequest::default());

        assert!(mailbox.demand(3, 3, 0, PAGE));
        assert!(!mailbox.demand(3, 3, 3, PAGE), "no change, no call");
        assert!(mailbox.demand(3, 3, 1, PAGE), "two were freed, and two more are owed");
        assert!(mailbox.demand(1, 1, 1, PAGE));
        assert!(!mailbox.demand(0, 0, 0, PAGE), "nothing left to ask for");
        let calls: Vec<_> = calls.try_iter().collect();
        let request = |pages, revision| ReclaimRequest {
            bytes: Bytes(PAGE.0 * u64::from(pages)),
            pages,
            firm_pages: pages,
            revision,
        };
        assert_eq!(calls, [request(3, 1), request(3, 2), request(1, 3)]);
        assert_eq!(mailbox.requested(), request(0, 4));
    }

    #[test]
    fn a_request_that_becomes_firm_is_announced() {
        let mailbox = Mailbox::new().unwrap();
        assert!(mailbox.demand(3, 0, 0, PAGE));
        assert!(!mailbox.demand(3, 0, 3, PAGE));
        assert!(mailbox.demand(3, 3, 3, PAGE), "nothing was left to evict, and the neighbour is below its share");
        assert_eq!(mailbox.requested().firm_pages, 3);
    }

    #[test]
    fn a_callback_that_panics_is_called_again() {
        let mailbox = Mailbox::new().unwrap();
        let (sender, calls) = mpsc::channel();
        mailbox.on_request(Box::new(move |request| {
            sender.send(request.pages).unwrap();
            assert_ne!(request.pages, 1, "one page is the panic of this test");
        }));
        mailbox.demand(1, 1, 0, PAGE);
        mailbox.demand(2, 2, 1, PAGE);
        assert_eq!(calls.try_iter().collect::<Vec<_>>(), [1, 2]);
    }
}
