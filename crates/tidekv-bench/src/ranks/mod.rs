//! One process for each tensor-parallel rank: what `kvbench map-parallel` and `kvbench tp-ipc` measure with.
//!
//! ```text
//!    parent ── order to one or all ──> rank 0 ── Reservation ── device 0
//!           <── one word of each ────  rank 1 ── Reservation ── device 1        (or rank modulo devices)
//! ```
//!
//! | file      | it                                                                            |
//! |-----------|-------------------------------------------------------------------------------|
//! | `mod`     | starts the processes, and tells which of them ended or does not answer        |
//! | `cache`   | the KV cache that every rank reserves: its flags, its words, its address space |
//! | `devices` | which rank works on which device                                              |
//!
//! Every rank is asked and answers once before anything else happens, so a dead one is noticed at the next question and
//! a stopped one at its deadline; either ends the run with an error that names the rank.

pub(crate) mod cache;
pub(crate) mod devices;

use std::io;
use std::path::Path;
use std::process::ExitStatus;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::subprocess::{Subprocess, follow_the_parent, say};
use tidekv_cli::exit::Outcome;

/// How long a rank may take to open its device and to reserve its cache. A driver's first context can take seconds.
pub(crate) const OPEN_TIMEOUT: Duration = Duration::from_secs(120);

/// How long a rank that is ending may take to have ended.
const BLAME_TIMEOUT: Duration = Duration::from_millis(500);

/// What a rank says: its answer, or why there is none and never will be.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line<W> {
    Answer(W),
    Failed(String),
}

/// The processes of all ranks. Dropping it ends them.
#[derive(Debug)]
pub(crate) struct Ranks<W> {
    processes: Vec<Subprocess>,
    heard: Receiver<(usize, Option<Line<W>>)>,
}

impl<W: DeserializeOwned + Send + 'static> Ranks<W> {
    /// Starts `count` processes of `program subcommand`.
    pub(crate) fn start(program: &Path, subcommand: &str, count: u32) -> anyhow::Result<Self> {
        let (ears, heard) = mpsc::channel();
        let mut processes = Vec::new();
        for rank in 0..count as usize {
            let ears = ears.clone();
            let process = Subprocess::start(program, subcommand, move |line| ears.send((rank, line)).is_ok());
            processes.push(process.with_context(|| format!("starting rank {rank}"))?);
        }
        Ok(Self { processes, heard })
    }

    /// Orders each of these ranks something and waits until all have answered: in the order of `orders`.
    pub(crate) fn ask<O: Serialize>(
        &mut self,
        orders: &[(usize, O)],
        timeout: Duration,
        what: &str,
    ) -> anyhow::Result<Vec<W>> {
        for (rank, order) in orders {
            // A rank that is gone has closed its input; how it ended is worth more than that.
            if self.processes[*rank].send(order).is_err() {
                self.explain_end(*rank, what)?;
            }
        }
        let deadline = Instant::now() + timeout;
        let mut answers: Vec<Option<W>> = orders.iter().map(|_| None).collect();
        while answers.iter().any(Option::is_none) {
            let Ok((rank, line)) = self.heard.recv_timeout(deadline.saturating_duration_since(Instant::now())) else {
                let silent = orders.iter().zip(&answers).filter(|(_, answer)| answer.is_none());
                let silent: Vec<String> = silent.map(|((rank, _), _)| self.name(*rank)).collect();
                bail!("{} did not answer within {timeout:?} {what}", silent.join(", "));
            };
            match line {
                Some(Line::Answer(word)) => {
                    let place = orders.iter().position(|(asked, _)| *asked == rank);
                    let place = place.with_context(|| format!("{} spoke unasked {what}", self.name(rank)))?;
                    answers[place] = Some(word);
                }
                Some(Line::Failed(reason)) => bail!("{} {what}: {reason}", self.name(rank)),
                None => self.explain_end(rank, what)?,
            }
        }
        Ok(answers.into_iter().flatten().collect())
    }

    /// The process of a rank.
    pub(crate) fn pid(&self, rank: usize) -> u32 {
        self.processes[rank].pid()
    }

    /// The end of a rank that caused `error`, where one has ended; else the error itself.
    pub(crate) fn blame(&mut self, error: anyhow::Error) -> anyhow::Error {
        // Its socket closes before its output does.
        match self.heard.recv_timeout(BLAME_TIMEOUT) {
            Ok((rank, Some(Line::Failed(reason)))) => error.context(format!("{}: {reason}", self.name(rank))),
            Ok((rank, None)) => {
                let how = ended(self.processes[rank].end());
                error.context(format!("{} {how}", self.name(rank)))
            }
            Ok((_, Some(Line::Answer(_)))) | Err(_) => error,
        }
    }

    /// Lets all of them end, and waits until they have.
    pub(crate) fn dismiss(mut self) -> anyhow::Result<()> {
        self.processes.iter_mut().for_each(Subprocess::hang_up);
        for rank in 0..self.processes.len() {
            let status = self.processes[rank].end()?;
            let name = self.name(rank);
            let status = status.with_context(|| format!("{name} was told to end and did not"))?;
            ensure!(status.success(), "{name} ended with {status}");
        }
        Ok(())
    }

    fn explain_end(&mut self, rank: usize, what: &str) -> anyhow::Result<()> {
        // What it said last is worth more than how it ended.
        let said = self.heard.try_iter().find_map(|(from, line)| match line {
            Some(Line::Failed(reason)) if from == rank => Some(reason),
            _ => None,
        });
        if let Some(reason) = said {
            bail!("{} {what}: {reason}", self.name(rank));
        }
        let how = ended(self.processes[rank].end());
        bail!("{} {how} {what}", self.name(rank))
    }

    fn name(&self, rank: usize) -> String {
        format!("rank {rank} (process {})", self.pid(rank))
    }
}

fn ended(status: io::Result<Option<ExitStatus>>) -> String {
    match status {
        Ok(Some(status)) => format!("ended ({status})"),
        Ok(None) => "closed its output".to_owned(),
        Err(error) => format!("cannot be waited for ({error})"),
    }
}

/// The life of a rank's process: `work` until it is over, and its failure as its last word.
pub(crate) fn serve(work: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<Outcome> {
    follow_the_parent()?;
    if let Err(error) = work() {
        say(&Line::<()>::Failed(format!("{error:#}")))?;
    }
    Ok(Outcome::Done)
}

/// In a rank's process: the answer to the order at hand.
pub(crate) fn answer(word: &impl Serialize) -> anyhow::Result<()> {
    say(&Line::Answer(word))
}
