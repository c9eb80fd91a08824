//! A bell: any thread may ring it, one thread waits for it next to other descriptors.
//!
//! ```text
//!   ring()    silent -> rung: one write to an eventfd          already rung: one atomic swap, no system call
//!   answer()  rung -> silent, before the answering thread looks at what there is to do
//! ```
//!
//! A ring that comes while the thread is at work is heard at its next wait, so none is lost.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};
use tidekv_fork::ClosedInChild;

#[derive(Debug)]
pub(crate) struct Bell {
    fd: ClosedInChild,
    rung: AtomicBool,
}

impl Bell {
    pub(crate) fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { fd: ClosedInChild::new(fd), rung: AtomicBool::new(false) })
    }

    /// Wakes the waiter, unless that was done already and it has not answered yet.
    pub(crate) fn ring(&self) {
        if !self.rung.swap(true, Ordering::AcqRel) {
            // The only failure of a write of 1 is a full counter, and then the bell rings anyway.
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }

    /// Whether somebody rang since the last answer. Makes the bell silent.
    pub(crate) fn answer(&self) -> bool {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.fd, &mut count);
        self.rung.swap(false, Ordering::AcqRel)
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn is_ringing(bell: &Bell) -> bool {
        let mut fds = [PollFd::new(bell, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
    }

    #[test]
    fn rings_are_heard_once_and_never_lost() {
        let bell = Bell::new().unwrap();
        assert!(!is_ringing(&bell) && !bell.answer());
        bell.ring();
        bell.ring();
        assert!(is_ringing(&bell) && bell.answer());
        assert!(!is_ringing(&bell) && !bell.answer());
        bell.ring();
        assert!(is_ringing(&bell) && bell.answer());
    }
}
