//! The scheduler's side: the two orders of an iteration, and a broadcaster to send them with.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use tidekv_core::units::{PageId, Step};
use tidekv_ipc::broadcast::{Broadcaster, Channel, Ranks as To, StrategyEntry};
use tidekv_ipc::frame::{encode_answer, encode_order};
use tidekv_ipc::message::{Answer, Balance, Deed, Heading, RefusalKind, Verdict};
use tidekv_ipc::{LaneError, SocketDir, ipc_timeout_from_env};

use super::Plan;
use super::echo::Sizes;
use super::worker::GROUP;

/// How long a worker may take to be free for the next scheduler.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
const CONNECT_POLL: Duration = Duration::from_millis(1);

/// How long a broadcast may take where KVCACHED_IPC_TIMEOUT sets no bound.
const UNBOUNDED: Duration = Duration::from_secs(3600);

/// Half of an iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Map,
    Unmap,
}

impl Kind {
    pub(super) const BOTH: [Self; 2] = [Self::Map, Self::Unmap];
}

/// What is ordered, the same in every iteration.
#[derive(Debug)]
pub(super) struct Orders {
    map: Deed,
    unmap: Deed,
    /// The last operation. It counts on from one strategy to the next: they are one scheduler that connects anew.
    epoch: u64,
}

impl Orders {
    pub(super) fn new(plan: &Plan) -> Self {
        let pages: Vec<PageId> = (0..plan.pages_per_iter).map(|page| PageId(plan.base_page + page)).collect();
        // With a step that is over there is nothing to wait for; without one, all work of the device.
        let after = (!plan.async_sched).then_some(Step(0));
        let map = Deed::Map { pages: pages.clone(), ahead: false };
        Self { map, unmap: Deed::Unmap { pages, after }, epoch: 0 }
    }

    /// Bytes of the map order and of its answer.
    pub(super) fn sizes(&self) -> anyhow::Result<Sizes> {
        let (mut order, mut answer) = (Vec::new(), Vec::new());
        encode_order(&mut order, 1, Heading::default(), &self.map, Channel::Socket)?;
        let (balance, verdict) = (Balance::default(), Verdict::Done);
        let done = Answer { sequence: 1, epoch: 1, instance: 1, balance, verdict };
        encode_answer(&mut answer, &done)?;
        Ok(Sizes { order: order.len(), answer: answer.len() })
    }
}

/// A broadcaster with all its workers.
#[derive(Debug)]
pub(super) struct Scheduler<'a> {
    strategy: &'static StrategyEntry,
    broadcaster: Broadcaster,
    orders: &'a mut Orders,
    timeout: Duration,
}

impl<'a> Scheduler<'a> {
    pub(super) fn connect(
        orders: &'a mut Orders,
        dir: SocketDir,
        workers: u32,
        strategy: &'static StrategyEntry,
    ) -> anyhow::Result<Self> {
        let timeout = ipc_timeout_from_env();
        let mut broadcaster = Broadcaster::new(dir, 0, workers, strategy, timeout);
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        loop {
            let answers = broadcaster.connect(deadline).into_iter().enumerate();
            let Some((rank, error)) = answers.filter_map(|(rank, answer)| Some((rank, answer.err()?))).next() else {
                break;
            };
            // A worker needs a moment to see that the scheduler before us is gone.
            let is_busy = matches!(&error, LaneError::Refused(refusal) if refusal.kind == RefusalKind::Busy);
            if !is_busy || Instant::now() >= deadline {
                return Err(anyhow!(error).context(format!("connecting to rank {rank}")));
            }
            thread::sleep(CONNECT_POLL);
        }
        Ok(Self { strategy, broadcaster, orders, timeout: timeout.unwrap_or(UNBOUNDED) })
    }

    pub(super) fn name(&self) -> &'static str {
        self.strategy.name
    }

    /// Maps or unmaps on all workers.
    pub(super) fn broadcast(&mut self, kind: Kind) -> anyhow::Result<()> {
        let settled = self.orders.epoch;
        self.orders.epoch += 1;
        let heading = Heading { epoch: self.orders.epoch, settled, group: GROUP, ..Heading::default() };
        let deed = match kind {
            Kind::Map => &self.orders.map,
            Kind::Unmap => &self.orders.unmap,
        };
        let deadline = Instant::now() + self.timeout;
        for answer in self.broadcaster.send(To::All, heading, deed, deadline) {
            match &answer.outcome {
                Ok(Answer { verdict: Verdict::Done, .. }) => {}
                outcome => bail!(explain(answer.rank, kind, outcome)),
            }
        }
        Ok(())
    }
}

fn explain(rank: u32, kind: Kind, outcome: &Result<Answer, LaneError>) -> String {
    let what = match kind {
        Kind::Map => "mapping",
        Kind::Unmap => "unmapping",
    };
    match outcome {
        Ok(Answer { verdict: Verdict::Refused(refusal), .. }) => format!("{what} on rank {rank}: {}", refusal.reason),
        Ok(answer) => format!("{what} on rank {rank}: it answered {:?}", answer.verdict),
        Err(error) => format!("{what} on rank {rank}: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_echo_is_as_long_as_the_frames() {
        let map = Deed::Map { pages: vec![PageId(50), PageId(51)], ahead: false };
        let orders = Orders { unmap: map.clone(), map, epoch: 0 };
        assert_eq!(orders.sizes().unwrap(), Sizes { order: 64 + 2 * 4, answer: 64 });
    }
}
