//! The parent's side of one worker.

use std::fmt;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::Sender;
use std::thread;

use anyhow::{Context, ensure};
use rustix::process::{Pid, Signal, kill_process};

use super::message::{Order, Report, Word};

/// Names a worker of one fleet; never used again after it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub(super) u32);

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A line of a worker, or the end of its output.
#[derive(Debug)]
pub(super) struct Heard {
    pub(super) from: MemberId,
    pub(super) word: Option<Word>,
}

/// One running worker.
#[derive(Debug)]
pub(super) struct Member {
    child: Child,
    stdin: Option<ChildStdin>,
    pub(super) latest: Option<Report>,
}

impl Member {
    pub(super) fn start(program: &Path, id: MemberId, ears: Sender<Heard>) -> anyhow::Result<Self> {
        let mut child = Command::new(program)
            .arg("worker")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("running {}", program.display()))?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().context("the worker has no output")?;
        thread::Builder::new().name(format!("worker-{id}")).spawn(move || {
            // A line that is no word ends the conversation, as the end of the output does.
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let word = serde_json::from_str(&line).ok();
                if word.is_none() || ears.send(Heard { from: id, word }).is_err() {
                    break;
                }
            }
            let _ = ears.send(Heard { from: id, word: None });
        })?;
        Ok(Self { child, stdin, latest: None })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn send(&mut self, order: &Order) -> anyhow::Result<()> {
        let mut line = serde_json::to_string(order)?;
        line.push('\n');
        let stdin = self.stdin.as_mut().context("it was told to end")?;
        Ok(stdin.write_all(line.as_bytes()).and_then(|()| stdin.flush())?)
    }

    pub(super) fn kill(&mut self) -> io::Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    pub(super) fn stop(&self) -> anyhow::Result<()> {
        self.signal(Signal::STOP)
    }

    pub(super) fn resume(&self) -> anyhow::Result<()> {
        self.signal(Signal::CONT)
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw).context("no such process")?;
        Ok(kill_process(pid, signal)?)
    }

    /// Closes the worker's input, which tells it to end.
    pub(super) fn hang_up(&mut self) {
        self.stdin = None;
    }

    /// Takes the exit status of a worker whose output has ended.
    pub(super) fn reap(mut self) -> anyhow::Result<()> {
        let status = self.child.wait()?;
        ensure!(status.success(), "the worker ended with {status}");
        Ok(())
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // Of a worker that has been waited for, both answer at once. A stopped one dies of SIGKILL too.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
