//! Several real processes with a pool each, driven by one parent: what `kvbench share` and the tests of sharing
//! are made of.
//!
//! ```text
//!    parent ── orders: one JSON object a line ──> stdin  worker 1 ── KvPool ──┐
//!           <── words: one JSON object a line ── stdout                       │
//!           ── orders ─────────────────────────> stdin  worker 2 ── KvPool ──┤── ledger (shared file)
//!           <── words ───────────────────────── stdout                       │
//!           ── reads /proc/<pid>/fd ──> memory files: what each of them really holds
//! ```
//!
//! A worker is this very binary, started with the hidden subcommand `worker`. It ends when its standard input
//! closes, so no worker outlives its parent, however the parent ends. Words of all workers arrive in one
//! queue; whoever waits for one names a deadline.
//!
//! | file           | it                                                                     |
//! |----------------|------------------------------------------------------------------------|
//! | `message`      | orders and words                                                       |
//! | `member`       | the parent's side of one worker: start, stop, resume, kill             |
//! | `worker`       | the worker's side: its orders, one after the other                     |
//! | `holding`      | a worker's pool, and the thread that makes it as large as it should be |
//! | `memory_files` | what processes hold, counted by the kernel and not by us               |

pub(crate) mod holding;
mod member;
pub mod memory_files;
mod message;
mod worker;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

pub use member::MemberId;
use member::{Heard, Member};
pub use message::{Order, Refusal, Report, Word};
pub use worker::{WorkerArgs, run};

use crate::lab::PoolSpec;

/// How long a worker may take to end after it was told to.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Workers of one parent. Dropping it ends all of them.
#[derive(Debug)]
pub struct Crew {
    program: PathBuf,
    members: BTreeMap<MemberId, Member>,
    next_id: u32,
    heard: Receiver<Heard>,
    ears: Sender<Heard>,
}

impl Crew {
    /// No workers yet; `program` is the kvbench binary.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        let (ears, heard) = mpsc::channel();
        Self { program: program.into(), members: BTreeMap::new(), next_id: 0, heard, ears }
    }

    /// Starts a worker and tells it to open its pool, without waiting for either.
    pub fn launch(&mut self, spec: PoolSpec) -> anyhow::Result<MemberId> {
        let id = MemberId(self.next_id);
        self.next_id += 1;
        let member = Member::start(&self.program, id, self.ears.clone()).context("starting a worker")?;
        self.members.insert(id, member);
        self.send(id, &Order::Open(spec))?;
        Ok(id)
    }

    /// Starts a worker and waits until its pool is open.
    pub fn start(&mut self, spec: PoolSpec, timeout: Duration) -> anyhow::Result<MemberId> {
        let id = self.launch(spec)?;
        self.wait_open(&[id], timeout)?;
        Ok(id)
    }

    /// Waits until the pools of launched workers are open.
    pub fn wait_open(&mut self, ids: &[MemberId], timeout: Duration) -> anyhow::Result<()> {
        let opened = |word: &Word| matches!(word, Word::Opened).then_some(());
        self.wait_for_each(ids, timeout, "to open their pools", opened).map(drop)
    }

    /// Sends one order.
    pub fn send(&mut self, id: MemberId, order: &Order) -> anyhow::Result<()> {
        self.member(id)?.send(order).with_context(|| format!("talking to worker {id}"))
    }

    /// The next word of any worker, or `None` at the deadline. A worker's failure is an error of the caller's.
    pub fn hear(&mut self, deadline: Instant) -> anyhow::Result<Option<(MemberId, Word)>> {
        loop {
            let heard = match self.heard.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(heard) => heard,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return Ok(None),
            };
            // What a worker said before it was killed may still be in the queue: nobody asks for it any more.
            let Some(member) = self.members.get_mut(&heard.from) else { continue };
            match heard.word {
                Some(Word::Failed { reason }) => bail!("worker {}: {reason}", heard.from),
                Some(word) => {
                    if let Word::Report(report) = &word {
                        member.latest = Some(report.clone());
                    }
                    return Ok(Some((heard.from, word)));
                }
                None => bail!("worker {} ended unasked", heard.from),
            }
        }
    }

    /// Waits for a word of one worker; what else arrives meanwhile is taken note of (reports) and dropped.
    pub fn wait_for<T>(
        &mut self,
        id: MemberId,
        timeout: Duration,
        what: &str,
        mut pick: impl FnMut(&Word) -> Option<T>,
    ) -> anyhow::Result<T> {
        let deadline = Instant::now() + timeout;
        while let Some((from, word)) = self.hear(deadline)? {
            if from == id
                && let Some(found) = pick(&word)
            {
                return Ok(found);
            }
        }
        bail!("worker {id} did not come {what} within {timeout:?}")
    }

    /// Waits for a word of each of these workers, whoever speaks first.
    pub fn wait_for_each<T>(
        &mut self,
        ids: &[MemberId],
        timeout: Duration,
        what: &str,
        mut pick: impl FnMut(&Word) -> Option<T>,
    ) -> anyhow::Result<Vec<T>> {
        let deadline = Instant::now() + timeout;
        let mut found: BTreeMap<MemberId, T> = BTreeMap::new();
        while found.len() < ids.len() {
            let Some((from, word)) = self.hear(deadline)? else {
                bail!("{} of {} workers did not come {what} within {timeout:?}", ids.len() - found.len(), ids.len());
            };
            if ids.contains(&from)
                && let Some(picked) = pick(&word)
            {
                found.insert(from, picked);
            }
        }
        Ok(ids.iter().filter_map(|id| found.remove(id)).collect())
    }

    /// Listens until `deadline`, keeping reports.
    pub fn listen_until(&mut self, deadline: Instant) -> anyhow::Result<()> {
        while self.hear(deadline)?.is_some() {}
        Ok(())
    }

    /// What a worker reported last.
    pub fn latest(&self, id: MemberId) -> Option<&Report> {
        self.members.get(&id)?.latest.as_ref()
    }

    /// Its process.
    pub fn pid(&self, id: MemberId) -> Option<u32> {
        self.members.get(&id).map(Member::pid)
    }

    /// Every worker that has not ended.
    pub fn ids(&self) -> Vec<MemberId> {
        self.members.keys().copied().collect()
    }

    /// Ends a worker in the middle of whatever it does (SIGKILL), and waits until the process is gone.
    pub fn kill(&mut self, id: MemberId) -> anyhow::Result<()> {
        let mut member = self.members.remove(&id).with_context(|| format!("worker {id} has ended"))?;
        member.kill().with_context(|| format!("killing worker {id}"))
    }

    /// Stops a worker where it is (SIGSTOP); see [`resume`](Self::resume).
    pub fn stop(&mut self, id: MemberId) -> anyhow::Result<()> {
        self.member(id)?.stop().with_context(|| format!("stopping worker {id}"))
    }

    /// Lets a stopped worker go on (SIGCONT).
    pub fn resume(&mut self, id: MemberId) -> anyhow::Result<()> {
        self.member(id)?.resume().with_context(|| format!("resuming worker {id}"))
    }

    /// Lets one worker close its pool and end.
    pub fn dismiss(&mut self, id: MemberId) -> anyhow::Result<()> {
        let mut member = self.members.remove(&id).with_context(|| format!("worker {id} has ended"))?;
        member.hang_up();
        let deadline = Instant::now() + LEAVE_TIMEOUT;
        loop {
            match self.heard.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Heard { from, word: None }) if from == id => return member.reap(),
                Ok(Heard { from, word: Some(Word::Failed { reason }) }) if from == id => bail!("worker {id}: {reason}"),
                Ok(_) => {}
                Err(_) => bail!("worker {id} did not end within {LEAVE_TIMEOUT:?}"),
            }
        }
    }

    /// Lets every worker close its pool and end.
    pub fn dismiss_all(&mut self) -> anyhow::Result<()> {
        self.ids().into_iter().try_for_each(|id| self.dismiss(id))
    }

    fn member(&mut self, id: MemberId) -> anyhow::Result<&mut Member> {
        self.members.get_mut(&id).with_context(|| format!("worker {id} has ended"))
    }
}
