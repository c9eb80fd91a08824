//! Driving the ranks through the iterations.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};

use super::worker::{Order, Word, now_ns};
use super::{Case, Plan, Range};
use crate::progress::Progress;
use crate::ranks::{OPEN_TIMEOUT, Ranks};
use crate::stats::Samples;

/// Name of the hidden subcommand.
const WORKER: &str = "map-worker";

/// How long a rank may take to map or to unmap. Thousands of handles on a slow driver take a while.
const MAP_TIMEOUT: Duration = Duration::from_secs(300);

/// How far ahead the moment is to begin with: orders must have arrived by then. Twice as much after a rank came late.
const NOTICE: Duration = Duration::from_millis(1);
const NOTICE_MAX: Duration = Duration::from_millis(64);

/// Attempts at one iteration before it counts although a rank came late.
const ATTEMPTS: u32 = 10;

/// Times of one case.
#[derive(Clone, Debug, Default)]
pub(super) struct CaseTimes {
    /// From the common moment to the end of the slowest rank.
    pub(super) wall: Samples,
    /// Of each rank that takes part, from its own beginning to its own end.
    pub(super) ranks: Vec<Samples>,
}

/// What was seen.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    /// In the order of [`Case::ALL`].
    pub(super) cases: [CaseTimes; 3],
    pub(super) late_starts: u64,
}

impl Measured {
    pub(super) fn of(&self, case: Case) -> &CaseTimes {
        &self.cases[case as usize]
    }
}

pub(super) fn measure(plan: &Plan, program: &Path, progress: &Progress) -> anyhow::Result<Measured> {
    let mut stage = Stage::open(plan, program)?;
    progress.now("one iteration unmeasured");
    // First uses of addresses cost page tables that later ones find in place.
    for case in Case::ALL {
        stage.iteration(case)?;
    }
    let mut measured = Measured { cases: Case::ALL.map(|_| CaseTimes::default()), late_starts: 0 };
    for iteration in 0..plan.iters {
        progress.now("single, serial, parallel");
        for case in Case::ALL {
            let turn = stage.iteration(case).with_context(|| format!("iteration {iteration}, {} case", case.name()))?;
            let times = &mut measured.cases[case as usize];
            times.wall.push(turn.wall_ns);
            times.ranks.resize(turn.ranks_ns.len(), Samples::new());
            times.ranks.iter_mut().zip(turn.ranks_ns).for_each(|(samples, time)| samples.push(time));
            measured.late_starts += u64::from(turn.late);
        }
        progress.step();
    }
    stage.ranks.dismiss()?;
    Ok(measured)
}

/// One iteration of one case.
struct Iteration {
    wall_ns: u64,
    ranks_ns: Vec<u64>,
    late: bool,
}

/// The ranks, all with their cache reserved.
struct Stage<'a> {
    plan: &'a Plan,
    ranks: Ranks<Word>,
    notice: Duration,
}

impl<'a> Stage<'a> {
    fn open(plan: &'a Plan, program: &Path) -> anyhow::Result<Self> {
        let mut ranks = Ranks::start(program, WORKER, plan.procs)?;
        let open = |(rank, &device): (usize, &u32)| (rank, Order::Open { cache: plan.cache.clone(), device });
        let orders: Vec<_> = plan.map.devices.iter().enumerate().map(open).collect();
        ranks.ask(&orders, OPEN_TIMEOUT, "while reserving its cache")?;
        Ok(Self { plan, ranks, notice: NOTICE })
    }

    /// Maps, again with more notice while a rank comes late, and unmaps.
    fn iteration(&mut self, case: Case) -> anyhow::Result<Iteration> {
        let ranges = self.plan.ranges_of(case);
        let mut attempt = 1;
        loop {
            let iteration = self.map(&ranges)?;
            let unmap: Vec<_> = orders(&ranges, |range| Order::Unmap { range });
            self.ranks.ask(&unmap, MAP_TIMEOUT, "while unmapping")?;
            if !iteration.late || attempt == ATTEMPTS {
                return Ok(iteration);
            }
            attempt += 1;
            self.notice = NOTICE_MAX.min(self.notice * 2);
        }
    }

    fn map(&mut self, ranges: &[Range]) -> anyhow::Result<Iteration> {
        let notice_ns = u64::try_from(self.notice.as_nanos()).unwrap_or(u64::MAX);
        let (at_ns, threads) = (now_ns() + notice_ns, self.plan.threads);
        let map: Vec<_> = orders(ranges, |range| Order::Map { range, threads, at_ns });
        let mut iteration = Iteration { wall_ns: 0, ranks_ns: Vec::new(), late: false };
        for word in self.ranks.ask(&map, MAP_TIMEOUT, "while mapping")? {
            let Word::Mapped { late, began_ns, ended_ns } = word else { bail!("a rank answered {word:?} to a map") };
            iteration.late |= late;
            iteration.wall_ns = iteration.wall_ns.max(ended_ns.saturating_sub(at_ns));
            iteration.ranks_ns.push(ended_ns.saturating_sub(began_ns));
        }
        Ok(iteration)
    }
}

/// One order for each range, to the rank of the same number.
fn orders(ranges: &[Range], order: impl Fn(Range) -> Order) -> Vec<(usize, Order)> {
    ranges.iter().enumerate().map(|(rank, &range)| (rank, order(range))).collect()
}
