//! The parent's side of one worker.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::mpsc::Sender;

use anyhow::{Context, ensure};
use rustix::process::Signal;

use super::message::{Order, Report, Word};
use crate::subprocess::Subprocess;

/// Names a worker of one crew; never used again after it ended.
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
    process: Subprocess,
    pub(super) latest: Option<Report>,
}

impl Member {
    pub(super) fn start(program: &Path, id: MemberId, ears: Sender<Heard>) -> anyhow::Result<Self> {
        let hear = move |word| ears.send(Heard { from: id, word }).is_ok();
        Ok(Self { process: Subprocess::start(program, "worker", hear)?, latest: None })
    }

    pub(super) fn pid(&self) -> u32 {
        self.process.pid()
    }

    pub(super) fn send(&mut self, order: &Order) -> anyhow::Result<()> {
        self.process.send(order)
    }

    pub(super) fn kill(&mut self) -> io::Result<()> {
        self.process.kill()
    }

    pub(super) fn stop(&self) -> anyhow::Result<()> {
        self.process.signal(Signal::STOP)
    }

    pub(super) fn resume(&self) -> anyhow::Result<()> {
        self.process.signal(Signal::CONT)
    }

    /// Closes the worker's input, which tells it to end.
    pub(super) fn hang_up(&mut self) {
        self.process.hang_up();
    }

    /// Takes the exit status of a worker whose output has ended.
    pub(super) fn reap(mut self) -> anyhow::Result<()> {
        let status = self.process.end()?.context("the worker closed its output and did not end")?;
        ensure!(status.success(), "the worker ended with {status}");
        Ok(())
    }
}
