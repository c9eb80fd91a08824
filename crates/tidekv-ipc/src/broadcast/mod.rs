//! The scheduler's side: the same order to all ranks, and everybody's answer.
//!
//! ```text
//!   Broadcaster::send(order)                 Strategy::exchange                    Lane
//!     encodes it once        -- lanes -->      who first, on which thread   -->      send, receive, what is late
//!     one answer per rank    <-- lanes --      until all answered or the deadline
//! ```
//!
//! | file | what |
//! | --- | --- |
//! | `lane` | one rank's connection, and everything that can happen on it |
//! | `registry` | the strategies by name; a new one is one file and one line there: `docs/adding-a-strategy.md` |
//! | `seq.rs` `thread.rs` `async_.rs` `ring.rs` | the strategies |
//!
//! A broadcast allocates nothing once its buffers have grown, and ends at its deadline whatever the workers do.

mod lane;
mod registry;

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tidekv_fork::Birth;

use crate::address::SocketDir;
use crate::error::LaneError;
use crate::frame::encode_order;
use crate::message::{Answer, Deed, Heading, PAGES_MAX};
use crate::peer::{AskUid, kernel_uid};
use lane::Route;

pub use crate::frame::Channel;
pub use lane::Lane;
pub use registry::{STRATEGIES, StrategyEntry, UnknownStrategy, strategy};

/// How long a poll waits at most while workers are greeted.
const GREETING_SLICE: Duration = Duration::from_secs(1);

/// In which order, on which thread and by which means orders are sent and answers awaited.
pub trait Strategy: Send + std::fmt::Debug {
    /// What the lanes' frames travel on.
    fn channel(&self) -> Channel {
        Channel::Socket
    }

    /// A worker was connected. An error closes the lane again.
    fn opened(&mut self, lane: &Lane) -> Result<(), LaneError> {
        let _ = lane;
        Ok(())
    }

    /// A lane that was opened is about to be closed.
    fn closing(&mut self, lane: &Lane) {
        let _ = lane;
    }

    /// Every lane has an order: send it and receive the answer, all before the deadline. A lane that is still waiting
    /// afterwards has timed out. Lanes may be moved away while this runs, and must all be back at its end, in any order.
    fn exchange(&mut self, lanes: &mut Vec<Lane>, deadline: Instant);
}

/// Whom an order is for.
#[derive(Clone, Copy, Debug)]
pub enum Ranks<'a> {
    /// Every rank.
    All,
    /// These.
    Some(&'a [u32]),
}

/// What became of an order on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankAnswer {
    /// Which rank.
    pub rank: u32,
    /// Its answer (which may be a refusal), or why there is none.
    pub outcome: Result<Answer, LaneError>,
}

/// One scheduler's lanes to all workers of a stage.
#[derive(Debug)]
pub struct Broadcaster {
    dir: SocketDir,
    stage: u32,
    timeout: Option<Duration>,
    strategy: Box<dyn Strategy>,
    /// By rank.
    lanes: Vec<Option<Lane>>,
    sequence: u64,
    birth: Birth,
    ask_uid: AskUid,
    // Buffers that are used again and again.
    frame: Vec<u8>,
    active: Vec<Lane>,
    answers: Vec<RankAnswer>,
}

impl Broadcaster {
    /// No connection yet. A send waits until its deadline, but never longer than `timeout`.
    pub fn new(dir: SocketDir, stage: u32, ranks: u32, strategy: &StrategyEntry, timeout: Option<Duration>) -> Self {
        Self {
            dir,
            stage,
            timeout,
            strategy: (strategy.make)(),
            lanes: (0..ranks).map(|_| None).collect(),
            sequence: 0,
            birth: Birth::here(),
            ask_uid: kernel_uid,
            frame: Vec::new(),
            active: Vec::new(),
            answers: Vec::new(),
        }
    }

    /// Connects all lanes that are not, and greets their workers; one result for each rank, in rank order, with the
    /// worker's instance. It does not wait for workers that have not started: those are `NoWorker` at once.
    pub fn connect(&mut self, deadline: Instant) -> Vec<Result<u64, LaneError>> {
        if self.birth.is_foreign() {
            return self.lanes.iter().map(|_| Err(LaneError::Forked)).collect();
        }
        let deadline = self.bounded(deadline);
        let mut greeted = Vec::new();
        let mut results: Vec<Result<u64, LaneError>> = Vec::new();
        for rank in 0..self.ranks() {
            results.push(match self.instance(rank) {
                Some(instance) => Ok(instance),
                None => match self.open(rank) {
                    Ok(lane) => {
                        greeted.push(lane);
                        Err(LaneError::NotConnected)
                    }
                    Err(error) => Err(error),
                },
            });
        }
        await_greetings(&mut greeted, deadline);
        for mut lane in greeted {
            let rank = lane.rank() as usize;
            results[rank] = lane.finish_greeting().and_then(|instance| {
                self.strategy.opened(&lane)?;
                self.lanes[rank] = Some(lane);
                Ok(instance)
            });
        }
        results
    }

    fn open(&mut self, rank: u32) -> Result<Lane, LaneError> {
        self.sequence += 1;
        let route = Route {
            dir: &self.dir,
            stage: self.stage,
            rank,
            channel: self.strategy.channel(),
            parties: self.ranks().saturating_add(1),
            ask_uid: self.ask_uid,
        };
        Lane::open(&route, self.sequence)
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> u32 {
        u32::try_from(self.lanes.len()).expect("it was made from a u32")
    }

    /// Whether a rank has a connection, as far as we know.
    pub fn is_connected(&self, rank: u32) -> bool {
        self.instance(rank).is_some()
    }

    /// Which start of the worker a rank is connected to.
    pub fn instance(&self, rank: u32) -> Option<u64> {
        self.lanes.get(rank as usize)?.as_ref().map(Lane::instance)
    }

    /// Sends an order to these ranks and collects their answers until the deadline, in rank order. The slice is valid
    /// until the next call.
    pub fn send(&mut self, to: Ranks<'_>, heading: Heading, deed: &Deed, deadline: Instant) -> &[RankAnswer] {
        self.address(to);
        self.sequence += 1;
        if self.birth.is_foreign() {
            return self.refuse_all(&LaneError::Forked);
        }
        if let Err(error) = encode_order(&mut self.frame, self.sequence, heading, deed, Channel::Socket) {
            return self.refuse_all(&LaneError::TooManyPages { pages: error.pages, max: PAGES_MAX });
        }
        self.load();
        let deadline = self.bounded(deadline);
        self.strategy.exchange(&mut self.active, deadline);
        self.unload();
        &self.answers
    }

    /// Lets a connection go. The worker gives back what was ordered through it.
    pub fn disconnect(&mut self, rank: u32) {
        if let Some(lane) = self.lanes.get_mut(rank as usize).and_then(Option::take)
            && !self.birth.is_foreign()
        {
            self.strategy.closing(&lane);
        }
    }

    /// Makes room for one answer from each rank that is meant, sorted.
    fn address(&mut self, to: Ranks<'_>) {
        self.answers.clear();
        let blank = |rank| RankAnswer { rank, outcome: Err(LaneError::NotConnected) };
        match to {
            Ranks::All => self.answers.extend((0..self.ranks()).map(blank)),
            Ranks::Some(ranks) => {
                self.answers.extend(ranks.iter().copied().map(blank));
                self.answers.sort_by_key(|answer| answer.rank);
                self.answers.dedup_by_key(|answer| answer.rank);
            }
        }
    }

    fn refuse_all(&mut self, error: &LaneError) -> &[RankAnswer] {
        self.answers.iter_mut().for_each(|answer| answer.outcome = Err(error.clone()));
        &self.answers
    }

    /// Gives the order to every lane that is meant and connected.
    fn load(&mut self) {
        let now = Instant::now();
        for answer in &mut self.answers {
            if let Some(mut lane) = self.lanes.get_mut(answer.rank as usize).and_then(Option::take) {
                lane.load(&self.frame, self.sequence, now);
                self.active.push(lane);
                // Stays if the strategy loses the lane.
                answer.outcome = Err(LaneError::Closed);
            }
        }
    }

    /// Takes the answers, and lets go of lanes that are of no use any more.
    fn unload(&mut self) {
        for mut lane in self.active.drain(..) {
            let outcome = lane.take_outcome();
            let is_over = outcome.as_ref().is_err_and(LaneError::is_fatal);
            let rank = lane.rank();
            if let Ok(at) = self.answers.binary_search_by_key(&rank, |answer| answer.rank) {
                self.answers[at].outcome = outcome;
            }
            if is_over {
                self.strategy.closing(&lane);
            } else {
                self.lanes[rank as usize] = Some(lane);
            }
        }
    }

    fn bounded(&self, deadline: Instant) -> Instant {
        let latest = self.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        latest.map_or(deadline, |latest| latest.min(deadline))
    }

    /// Another answer than the kernel's to who is on the other side.
    #[cfg(test)]
    pub(crate) fn set_ask_uid(&mut self, ask_uid: AskUid) {
        self.ask_uid = ask_uid;
    }
}

/// Waits for all at once: a worker that is stopped costs the others nothing.
fn await_greetings(lanes: &mut [Lane], deadline: Instant) {
    loop {
        lanes.iter_mut().for_each(|lane| {
            lane.try_receive();
        });
        let left = deadline.saturating_duration_since(Instant::now());
        let waiting = lanes.iter().filter(|lane| lane.is_waiting());
        let mut fds: Vec<PollFd<'_>> = waiting.map(|lane| PollFd::new(lane, PollFlags::IN)).collect();
        if fds.is_empty() || left.is_zero() {
            return;
        }
        let wait = Timespec::try_from(left.min(GREETING_SLICE)).expect("a second fits");
        // An interrupted or refused poll is followed by another look at the lanes and at the clock.
        let _ = poll(&mut fds, Some(&wait));
    }
}
