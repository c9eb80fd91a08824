//! Real processes for tests: this test binary, started again in a role, spoken to through pipes.
//!
//! ```text
//!   test                         worker
//!   Worker::start(dir, role) --> the test named `worker`, with the role in its environment
//!   hear()                   <-- say("...")          lines that begin with '@', amid what the test runner prints
//!   tell("...")              --> listen()
//!   kill(), stop(), resume()     real signals
//! ```
//!
//! Nothing sleeps: every step waits for what the other side says, and a side that is silent for a minute fails the test.

#![allow(dead_code, reason = "every test binary uses its own part")]

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use tidekv_core::units::{Bytes, GroupId};
use tidekv_shm::{DeviceName, EntrySpec, Ledger, PoolName, RuntimeDir};

const ROLE: &str = "TIDEKV_SHM_TEST_ROLE";
const DIR: &str = "TIDEKV_SHM_TEST_DIR";
/// Longer than anything takes on the slowest machine; only a failure reaches it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn folder() -> (tempfile::TempDir, RuntimeDir) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let dir = RuntimeDir::at(folder.path());
    (folder, dir)
}

pub(crate) fn soon() -> Instant {
    Instant::now() + PATIENCE
}

pub(crate) fn open(dir: &RuntimeDir) -> Ledger {
    Ledger::open(dir, &DeviceName::host()).expect("a ledger")
}

pub(crate) fn spec(name: &str) -> EntrySpec {
    EntrySpec::new(PoolName::new(name).expect("a name"), GroupId(0), Bytes::mib(2))
}

/// What the test `worker` of each binary is: nothing, unless this process is one.
pub(crate) fn role() -> Option<(String, RuntimeDir)> {
    let role = std::env::var(ROLE).ok()?;
    Some((role, RuntimeDir::at(std::env::var_os(DIR)?)))
}

pub(crate) fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "@{text}").and_then(|()| out.flush()).expect("the test listens");
}

/// The next line of the test; its end ends the worker.
pub(crate) fn listen() -> String {
    let mut line = String::new();
    match std::io::stdin().lock().read_line(&mut line) {
        Ok(count) if count > 0 => line.trim().to_owned(),
        _ => panic!("the test is gone"),
    }
}

/// What starts this binary in a role.
pub(crate) fn command(dir: &RuntimeDir, role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    command.args(["--exact", "worker", "--nocapture", "--test-threads=1"]).env(ROLE, role).env(DIR, dir.path());
    command
}

pub(crate) struct Worker {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Worker {
    pub(crate) fn start(dir: &RuntimeDir, role: &str) -> Self {
        Self::spawn(command(dir, role))
    }

    /// A Python program, or `None` (and a word about it) where there is no Python.
    pub(crate) fn python(program: &str, argument: &Path) -> Option<Self> {
        if Command::new("python3").arg("--version").output().is_err() {
            let _ = writeln!(std::io::stderr(), "SKIPPED: there is no python3 here");
            return None;
        }
        let mut command = Command::new("python3");
        command.args(["-c", program]).arg(argument);
        Some(Self::spawn(command))
    }

    fn spawn(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a process");
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, input, output }
    }

    pub(crate) fn tell(&mut self, text: &str) {
        writeln!(self.input.as_mut().expect("still open"), "{text}").expect("the worker listens");
    }

    /// The next thing the worker says.
    pub(crate) fn hear(&mut self) -> String {
        loop {
            if self.output.buffer().is_empty() {
                self.wait_for_output();
            }
            let mut line = String::new();
            let count = self.output.read_line(&mut line).expect("a pipe");
            assert!(count > 0, "the worker ended without the expected word");
            if let Some((_, text)) = line.split_once('@') {
                return text.trim().to_owned();
            }
        }
    }

    fn wait_for_output(&self) {
        let mut fds = [PollFd::new(self.output.get_ref(), PollFlags::IN)];
        let timeout = Timespec::try_from(PATIENCE).expect("a minute");
        assert_eq!(poll(&mut fds, Some(&timeout)), Ok(1), "the worker was silent for {PATIENCE:?}");
    }

    pub(crate) fn expect(&mut self, text: &str) {
        assert_eq!(self.hear(), text);
    }

    pub(crate) fn stop(&self) {
        kill_process(self.pid(), Signal::STOP).expect("it is ours");
    }

    pub(crate) fn resume(&self) {
        kill_process(self.pid(), Signal::CONT).expect("it is ours");
    }

    /// SIGKILL. When this returns the kernel has closed all its files.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("it is ours");
        self.child.wait().expect("it is ours");
    }

    /// SIGKILL, without waiting for anything.
    pub(crate) fn kill_unseen(&mut self) {
        self.child.kill().expect("it is ours");
    }

    /// Waits for its end; says whether it was content.
    pub(crate) fn finish(&mut self) -> bool {
        self.child.wait().expect("it is ours").success()
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Whether nobody has the other end of its output any more.
    pub(crate) fn output_is_closed(&mut self) -> bool {
        let fds = &mut [PollFd::from_borrowed_fd(self.output.get_ref().as_fd(), PollFlags::empty())];
        poll(fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).expect("a pipe");
        fds[0].revents().contains(PollFlags::HUP)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        // What it forked ends with this.
        drop(self.input.take());
    }
}
