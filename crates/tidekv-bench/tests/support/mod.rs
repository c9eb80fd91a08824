//! Running `kvbench` as a person does, and looking at the processes that it starts.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::fs;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process, pidfd_open, waitid};
use serde_json::Value;
use tempfile::TempDir;

/// For whatever should take no time at all.
const PATIENCE: Duration = Duration::from_secs(60);

/// A command line.
#[derive(Debug)]
pub(crate) struct KvBench(Command);

impl KvBench {
    pub(crate) fn new(subcommand: &str) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvbench"));
        command.arg(subcommand).env_remove("KVCACHED_PAGE_SIZE_MB").env_remove("KVCACHED_IPC_TIMEOUT");
        command.env_remove("KVCACHED_RUNTIME_DIR");
        Self(command)
    }

    pub(crate) fn args(mut self, args: &[&str]) -> Self {
        self.0.args(args);
        self
    }

    /// The same in an environment that lacks a variable.
    pub(crate) fn without(mut self, variable: &str) -> Self {
        self.0.env_remove(variable);
        self
    }

    /// The same on a machine whose GPUs, if there are any, are not for it.
    pub(crate) fn without_gpus(mut self) -> Self {
        self.0.env("CUDA_VISIBLE_DEVICES", "");
        self
    }

    pub(crate) fn output(mut self) -> Output {
        self.0.output().unwrap()
    }

    /// What a run that succeeds prints.
    pub(crate) fn stdout(self) -> String {
        let output = self.output();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// The result object of a run that succeeds.
    pub(crate) fn json(self) -> Value {
        serde_json::from_str(&self.args(&["--json"]).stdout()).unwrap()
    }

    /// Exit code 2, nothing on stdout, and a sentence with `part` in it.
    pub(crate) fn refused(self, part: &str) {
        let line = format!("{:?}", self.0);
        let output = self.output();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{line}: {stderr}");
        assert!(stderr.contains("error: ") && stderr.contains(part), "{line}: {stderr} lacks {part:?}");
    }
}

/// A run under way, with a folder for whatever it leaves when it is killed. Ended by whoever drops it, which waits for
/// what it started as well: that may still be at work in the folder.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    /// What it had started when it was killed.
    orphans: Vec<u32>,
    dir: TempDir,
}

impl Running {
    pub(crate) fn start(mut command: KvBench) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let command = command.0.env("KVCACHED_RUNTIME_DIR", dir.path());
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        Self { child, orphans: Vec::new(), dir }
    }

    /// The processes that it started, once there are `count`.
    pub(crate) fn wait_for_children(&self, count: usize) -> Vec<u32> {
        let mut children = Vec::new();
        wait_until("processes to start", || {
            children = self.children().collect();
            children.len() >= count
        });
        children
    }

    /// Waits until there is a process besides those that have been seen.
    pub(crate) fn wait_for_another_child(&self, seen: &[u32]) {
        wait_until("another process to start", || self.children().any(|pid| !seen.contains(&pid)));
    }

    fn children(&self) -> impl Iterator<Item = u32> {
        children_of(self.child.id())
    }

    /// Waits for a run that fails, and answers what it says about that.
    pub(crate) fn fails(&mut self) -> String {
        assert_eq!(self.code(), Some(2));
        std::io::read_to_string(self.child.stderr.take().unwrap()).unwrap()
    }

    /// Waits for its end, and answers how it ended.
    pub(crate) fn code(&mut self) -> Option<i32> {
        end_of(&mut self.child).code()
    }

    /// The folder of whatever it leaves.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// As Ctrl-C does.
    pub(crate) fn interrupt(&self) {
        kill_process(pid_of(self.child.id()), Signal::INT).unwrap();
    }

    /// Ends the run without a chance to clean up.
    pub(crate) fn kill(&mut self) {
        self.stop();
        self.orphans.extend(descendants_of(self.child.id()));
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// From here on it starts nothing: a process that came after the list of them was made would be waited for by nobody.
    fn stop(&self) {
        let child = pid_of(self.child.id());
        let stopped = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        // One that has ended, and one that was waited for, starts nothing either.
        if kill_process(child, Signal::STOP).is_ok() {
            let _ = waitid(WaitId::Pid(child), stopped);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The number of one that was waited for may be anybody's.
        if matches!(self.child.try_wait(), Ok(None)) {
            self.stop();
            self.orphans.extend(descendants_of(self.child.id()));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        for &pid in &self.orphans {
            has_ended(pid, PATIENCE);
        }
    }
}

/// The processes that another one started, and those that they did.
fn descendants_of(parent: u32) -> Vec<u32> {
    let children: Vec<u32> = children_of(parent).collect();
    let further: Vec<u32> = children.iter().copied().flat_map(descendants_of).collect();
    children.into_iter().chain(further).collect()
}

pub(crate) fn kill(pid: u32) {
    kill_process(pid_of(pid), Signal::KILL).unwrap();
}

/// The processes that another one started.
pub(crate) fn children_of(parent: u32) -> impl Iterator<Item = u32> {
    processes().filter(move |&pid| parent_of(pid) == Some(parent))
}

fn processes() -> impl Iterator<Item = u32> {
    fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok())
}

fn parent_of(pid: u32) -> Option<u32> {
    stat(pid)?.get(1)?.parse().ok()
}

/// The fields of a process's `stat` behind its name: state, parent, ...
fn stat(pid: u32) -> Option<Vec<String>> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = text.rsplit_once(") ")?;
    Some(fields.split_whitespace().map(str::to_owned).collect())
}

/// How a process that should end did so; one that does not is killed and fails the test.
pub(crate) fn end_of(child: &mut Child) -> ExitStatus {
    if !has_ended(child.id(), PATIENCE) {
        child.kill().unwrap();
        child.wait().unwrap();
        panic!("process {} did not end within {PATIENCE:?}", child.id());
    }
    child.wait().unwrap()
}

/// Waits for the end of any process.
pub(crate) fn wait_for_end(pid: u32) {
    assert!(has_ended(pid, PATIENCE), "process {pid} did not end within {PATIENCE:?}");
}

/// Whether a process ends in time.
fn has_ended(pid: u32, within: Duration) -> bool {
    let process = match pidfd_open(pid_of(pid), PidfdFlags::empty()) {
        Ok(process) => process,
        Err(Errno::SRCH) => return true,
        Err(error) => panic!("pidfd_open of {pid}: {error}"),
    };
    // Readable once the process has ended.
    let timeout = Timespec::try_from(within).unwrap();
    poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&timeout)).unwrap() == 1
}

pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "waited {PATIENCE:?} for {what}");
        thread::yield_now();
    }
}

fn pid_of(pid: u32) -> Pid {
    Pid::from_raw(i32::try_from(pid).unwrap()).unwrap()
}
