//! Real forks: what a child still has of its parent's descriptors, and what its destructors do.

use std::io::pipe;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{Mode, OFlags, fstat, open, stat};
use rustix::process::{Pid, WaitOptions, waitpid};
use tidekv_fork::{Birth, ClosedInChild};

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

/// How many descriptors of this process lead to a file.
fn count_open(inode: u64) -> usize {
    let leads_there = |number: &RawFd| {
        // SAFETY: the number may be closed, which `fstat` says; it is used for nothing else.
        let fd = unsafe { BorrowedFd::borrow_raw(*number) };
        fstat(fd).is_ok_and(|stat| stat.st_ino == inode)
    };
    (0..256).filter(leads_there).count()
}

#[test]
fn no_fork_falls_between_opening_and_registering() {
    let file = tempfile::NamedTempFile::new().unwrap().into_temp_path();
    let inode = stat(&*file).unwrap().st_ino;
    let open_it = |path: &Path| open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    let (stop, opened) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                drop(ClosedInChild::open(|| open_it(&file)).unwrap());
                opened.store(true, Ordering::Relaxed);
            }
        });
        while !opened.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        let escaped = (0..300).filter(|_| !in_fork(|| count_open(inode) == 0)).count();
        stop.store(true, Ordering::Relaxed);
        assert_eq!(escaped, 0, "of 300 children had a copy");
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
