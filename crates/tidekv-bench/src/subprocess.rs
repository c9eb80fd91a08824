//! A process of this very binary, spoken to in lines of JSON: what worker processes of every benchmark have in common.
//!
//! ```text
//!    parent ── send: one JSON object a line ──> stdin   kvbench <hidden subcommand>      orders()
//!           <── one JSON object a line ─────── stdout                                    say()
//! ```
//!
//! A worker reads orders until its standard input closes and then ends, so none outlives its parent, however the parent
//! ends. The kernel sees to those that are too busy to read: [`follow_the_parent`].

use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// How long a process may take from the end of its output to its own.
const END_TIMEOUT: Duration = Duration::from_secs(5);
const END_POLL: Duration = Duration::from_millis(1);

/// The parent's side of one worker. Dropping it ends the worker.
#[derive(Debug)]
pub(crate) struct Subprocess {
    child: Child,
    stdin: Option<ChildStdin>,
}

impl Subprocess {
    /// Starts `program subcommand`. A thread of its own gives every word to `hear`, and `None` once the output is over
    /// or not to be understood; `hear` answers whether it wants more.
    pub(crate) fn start<W: DeserializeOwned>(
        program: &Path,
        subcommand: &str,
        mut hear: impl FnMut(Option<W>) -> bool + Send + 'static,
    ) -> anyhow::Result<Self> {
        let mut child = Command::new(program)
            .arg(subcommand)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("running {}", program.display()))?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().context("the worker has no output")?;
        thread::Builder::new().name(format!("worker-{}", child.id())).spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let word = serde_json::from_str(&line).ok();
                let is_over = word.is_none();
                if !hear(word) || is_over {
                    return;
                }
            }
            hear(None);
        })?;
        Ok(Self { child, stdin })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn send(&mut self, order: &impl Serialize) -> anyhow::Result<()> {
        let stdin = self.stdin.as_mut().context("it was told to end")?;
        Ok(write_line(stdin, order)?)
    }

    pub(crate) fn kill(&mut self) -> io::Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    pub(crate) fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw).context("no such process")?;
        Ok(kill_process(pid, signal)?)
    }

    /// Closes the worker's input, which tells it to end.
    pub(crate) fn hang_up(&mut self) {
        self.stdin = None;
    }

    /// How a worker whose output is over ended; `None` if it has not.
    pub(crate) fn end(&mut self) -> io::Result<Option<ExitStatus>> {
        let deadline = Instant::now() + END_TIMEOUT;
        loop {
            match self.child.try_wait()? {
                None if Instant::now() < deadline => thread::sleep(END_POLL),
                status => return Ok(status),
            }
        }
    }
}

impl Drop for Subprocess {
    fn drop(&mut self) {
        // Of a worker that has been waited for, both answer at once. A stopped one dies of SIGKILL too.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In a worker: what the parent orders, until it has no more orders, is gone, or says what is no order.
pub(crate) fn orders<O: DeserializeOwned>() -> impl Iterator<Item = O> {
    io::stdin().lines().map_while(|line| serde_json::from_str(&line.ok()?).ok())
}

/// In a worker: one word to the parent.
pub(crate) fn say(word: &impl Serialize) -> anyhow::Result<()> {
    Ok(write_line(&mut io::stdout().lock(), word)?)
}

/// In a worker: asks the kernel to end this process when the thread that started it does.
pub(crate) fn follow_the_parent() -> anyhow::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).context("asking to end with the parent")
}

fn write_line(to: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_string(value)?;
    line.push('\n');
    to.write_all(line.as_bytes())?;
    to.flush()
}
