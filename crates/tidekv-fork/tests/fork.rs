//! Real forks: what a child still has of its parent's descriptors, and what its destructors do.

use std::io::pipe;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use rustix::fs::{Mode, OFlags, fstat, open, stat};
use rustix::process::{Pid, WaitOptions, waitpid};
use tidekv_fork::{Birth, ClosedInChild};

const OPENERS: usize = 8;

/// Runs `child` in a fork, which may only make system calls; says whether it answered yes.
fn in_fork(child: impl FnOnce() -> bool) -> bool {
    // SAFETY: this process has other threads, so the child keeps to system calls and atomics and never returns.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let code = if child() { 0 } else { 1 };
        // SAFETY: ends the child without running anything of the test's.
        unsafe { libc::_exit(code) };
    }
    let pid = Pid::from_raw(pid).expect("fork failed");
    let (_, status) = waitpid(Some(pid), WaitOptions::empty()).expect("our child").expect("it ended");
    status.exit_status() == Some(0)
}

fn is_open(fd: i32) -> bool {
    // SAFETY: asks for the flags of a number; nothing is read or written through it.
    unsafe { libc::fcntl(fd, libc::F_GETFD) != -1 }
}

#[test]
fn a_child_has_no_copy_and_knows_it() {
    let (_reader, writer) = pipe().unwrap();
    let held = ClosedInChild::new(OwnedFd::from(writer));
    let number = held.as_fd().as_raw_fd();
    let birth = Birth::here();
    assert!(is_open(number) && !held.is_foreign() && !birth.is_foreign());
    assert!(in_fork(|| !is_open(number) && held.is_foreign() && birth.is_foreign() && !Birth::here().is_foreign()));
    assert!(is_open(number) && !held.is_foreign(), "the parent's is untouched");
}

#[test]
fn a_child_does_not_close_a_number_that_is_someone_elses_by_then() {
    let (_reader, writer) = pipe().unwrap();
    let spare = rustix::io::dup(&writer).unwrap();
    let held = ClosedInChild::new(OwnedFd::from(writer));
    let number = held.as_fd().as_raw_fd();
    assert!(in_fork(move || {
        // SAFETY: makes the freed number a copy of a descriptor that is open.
        let reused = unsafe { libc::dup2(spare.as_raw_fd(), number) };
        drop(held);
        reused == number && is_open(number)
    }));
}

/// A file to open, and what tells its descriptors from all others.
struct Target {
    path: tempfile::TempPath,
    /// Inode numbers repeat across file systems, and those of pipes and sockets are on one of their own.
    identity: (u64, u64),
}

impl Target {
    fn new() -> Self {
        let path = tempfile::NamedTempFile::new().expect("a folder for files").into_temp_path();
        let stat = stat(&*path).expect("it was just made");
        Self { path, identity: (stat.st_dev, stat.st_ino) }
    }

    fn open(&self) -> rustix::io::Result<OwnedFd> {
        open(&*self.path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
    }

    /// Whether no descriptor of this process leads to the file.
    fn is_closed(&self) -> bool {
        let leads_there = |number: RawFd| {
            // SAFETY: the number may be closed, which `fstat` says; it is used for nothing else.
            let fd = unsafe { BorrowedFd::borrow_raw(number) };
            fstat(fd).is_ok_and(|stat| (stat.st_dev, stat.st_ino) == self.identity)
        };
        !(0..256).any(leads_there)
    }
}

/// Issue 22: the guard waited 100 ms at most, so a child had a copy of what took longer to open.
#[test]
fn a_fork_in_the_middle_of_a_slow_opening_leaves_no_copy() {
    let target = &Target::new();
    let ((opened, is_open), (fork_returned, fork)) = (mpsc::channel(), mpsc::channel::<()>());
    let open_slowly = move || {
        let file = target.open();
        opened.send(()).unwrap();
        // Until the fork is over, were it not to wait.
        let _ = fork.recv_timeout(Duration::from_secs(2));
        file
    };
    std::thread::scope(|scope| {
        let held = scope.spawn(|| ClosedInChild::open(open_slowly).unwrap());
        is_open.recv().unwrap();
        let has_no_copy = in_fork(|| target.is_closed());
        // Nobody listens any more.
        let _ = fork_returned.send(());
        assert!(has_no_copy, "the child has a copy of what was being opened");
        drop(held.join().unwrap());
    });
}

/// A signal's handler may fork in the middle of an opening. Nobody else could let it pass.
#[test]
fn a_thread_that_forks_while_it_opens_does_not_wait_for_itself() {
    let target = Target::new();
    let forked = ClosedInChild::open(|| {
        assert!(in_fork(|| true));
        target.open()
    });
    assert!(in_fork(|| target.is_closed()), "the next child has no copy");
    drop(forked);
}

/// `TIDEKV_FORKS` children beside eight threads that do nothing but open and close; see the specification.
#[test]
fn no_fork_falls_between_opening_and_registering() {
    let forks = std::env::var("TIDEKV_FORKS").map_or(100, |count| count.parse().expect("a number"));
    let target = Target::new();
    let stop = AtomicBool::new(false);
    let (opened, have_opened) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..OPENERS {
            scope.spawn(|| {
                drop(ClosedInChild::open(|| target.open()).unwrap());
                opened.send(()).unwrap();
                while !stop.load(Ordering::Relaxed) {
                    drop(ClosedInChild::open(|| target.open()).unwrap());
                }
            });
        }
        for _ in 0..OPENERS {
            have_opened.recv().unwrap();
        }
        let escaped = (0..forks).filter(|_| !in_fork(|| target.is_closed())).count();
        stop.store(true, Ordering::Relaxed);
        assert_eq!(escaped, 0, "of {forks} children had a copy");
    });
}

#[test]
fn a_child_is_told_to_end_when_the_thread_that_started_it_is_gone() {
    let start = || {
        let mut command = Command::new("sleep");
        tidekv_fork::end_with_parent(command.arg("1000"));
        command.spawn().expect("sleep is on every machine")
    };
    let mut child = std::thread::spawn(start).join().expect("it only starts a process");
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGTERM));
}
