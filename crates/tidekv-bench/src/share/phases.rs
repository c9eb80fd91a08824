//! Driving the workers through the phases, and judging what they hold.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use tidekv_core::units::Bytes;

use super::Plan;
use super::fair::{self, Claim};
use crate::crew::memory_files::MemoryFiles;
use crate::crew::{Crew, MemberId, Order, Word};
use crate::lab::{Lab, PoolSpec};
use crate::progress::Progress;
use crate::stats::{Samples, to_f64};

/// How long a worker may take to open its pool.
const OPEN_TIMEOUT: Duration = Duration::from_secs(20);

/// The part of a phase in which shares are judged.
const JUDGED: Duration = Duration::from_secs(1);

/// How often shares are looked at while they are judged: as often as workers report.
const JUDGE_PERIOD: Duration = Duration::from_millis(50);

/// How often the memory files are added up.
const WITNESS_PERIOD: Duration = Duration::from_millis(10);

/// A share counts as reached at so many percent of it.
const SHARE_PERCENT: u32 = 95;

/// What was seen.
#[derive(Debug, Default)]
pub(super) struct Measured {
    /// One for each phase: the mean of its last second.
    pub(super) errors: Vec<f64>,
    /// From wanting more to the floor.
    pub(super) grants: Samples,
    /// From wanting more to the share.
    pub(super) shares: Samples,
    /// The most beyond the budget, and how often it was looked for; `None` without memory files.
    pub(super) over_budget: Option<Bytes>,
    pub(super) moments: u64,
    pub(super) exhausted: u64,
    pub(super) reclaims: u64,
    /// What each worker held in the last judged second, in pages, beside its fair share.
    pub(super) last: Vec<(f64, u32)>,
}

pub(super) fn measure(plan: &Plan, lab: &Lab, program: &Path, progress: &Progress) -> anyhow::Result<Measured> {
    let mut contest = Contest::start(plan, lab, program)?;
    for targets in plan.phases() {
        progress.now(format!("wanted pages: {targets:?}"));
        contest.phase(&targets).with_context(|| format!("while the workers want {targets:?} pages"))?;
        progress.step();
    }
    contest.finish()
}

/// The workers, and what was seen of them so far.
struct Contest<'a> {
    plan: &'a Plan,
    crew: Crew,
    workers: Vec<MemberId>,
    files: MemoryFiles,
    targets: Vec<u32>,
    next_witness: Instant,
    outcome: Measured,
}

impl<'a> Contest<'a> {
    fn start(plan: &'a Plan, lab: &Lab, program: &Path) -> anyhow::Result<Self> {
        let mut crew = Crew::new(program);
        let mut workers = Vec::new();
        for (worker, &weight) in plan.weights.iter().enumerate() {
            let name = format!("kvcached_share_{worker}");
            let mut spec = PoolSpec::new(name, lab.path(), Bytes(plan.page_bytes), plan.budget_pages);
            plan.backend.clone_into(&mut spec.backend);
            spec.weight = weight;
            spec.floor_bytes = u64::from(plan.floor(worker)) * plan.page_bytes;
            workers.push(crew.launch(spec)?);
        }
        crew.wait_open(&workers, OPEN_TIMEOUT)?;
        let files = MemoryFiles::of(workers.iter().filter_map(|&worker| crew.pid(worker)))?;
        let over_budget = (!files.is_empty()).then_some(Bytes::ZERO);
        let (targets, outcome) = (vec![0; workers.len()], Measured { over_budget, ..Measured::default() });
        Ok(Self { plan, crew, workers, files, targets, next_witness: Instant::now(), outcome })
    }

    fn phase(&mut self, targets: &[u32]) -> anyhow::Result<()> {
        let floors: Vec<u32> = (0..targets.len()).map(|worker| self.plan.floor(worker)).collect();
        let claim =
            |worker: usize| Claim { weight: self.plan.weights[worker], floor: floors[worker], target: targets[worker] };
        let fair = fair::shares(self.plan.budget_pages, &(0..targets.len()).map(claim).collect::<Vec<_>>());
        let starting = self.outcome.errors.is_empty();
        let end = Instant::now() + self.plan.phase();
        for (worker, &target) in targets.iter().enumerate() {
            let before = self.held_pages(worker);
            // Only what a worker has yet to get is worth timing, and only a worker that comes back: at the start all
            // of them set up at once.
            let almost = fair[worker] * SHARE_PERCENT / 100;
            let mut marks = vec![floors[worker].min(target), almost];
            marks.retain(|&mark| !starting && target > self.targets[worker] && f64::from(mark) > before);
            marks.sort_unstable();
            self.crew.send(self.workers[worker], &Order::Want { blocks: target, marks })?;
        }
        self.targets = targets.to_vec();
        self.watch(end.checked_sub(JUDGED).unwrap_or(end), &floors)?;

        let mut judged = Vec::new();
        let mut held = vec![0.0; targets.len()];
        while Instant::now() < end {
            self.watch(end.min(Instant::now() + JUDGE_PERIOD), &floors)?;
            judged.push(self.error(&fair));
            held.iter_mut().enumerate().for_each(|(worker, sum)| *sum += self.held_pages(worker));
        }
        let samples = to_f64(judged.len() as u64).max(1.0);
        self.outcome.errors.push(judged.iter().sum::<f64>() / samples);
        self.outcome.last = held.into_iter().map(|sum| sum / samples).zip(fair).collect();
        Ok(())
    }

    /// Listens and adds up memory files until `end`.
    fn watch(&mut self, end: Instant, floors: &[u32]) -> anyhow::Result<()> {
        while Instant::now() < end {
            if Instant::now() >= self.next_witness {
                self.witness();
                self.next_witness = Instant::now() + WITNESS_PERIOD;
            }
            if let Some((from, Word::Reached { mark, us })) = self.crew.hear(end.min(self.next_witness))? {
                let is_floor = self.workers.iter().position(|&id| id == from).is_some_and(|w| floors[w] == mark);
                let times = if is_floor { &mut self.outcome.grants } else { &mut self.outcome.shares };
                times.push_duration(Duration::from_micros(us));
            }
        }
        Ok(())
    }

    fn witness(&mut self) {
        let Some(over_budget) = self.outcome.over_budget.as_mut() else { return };
        if let Some(total) = self.files.total() {
            let budget = Bytes(self.plan.page_bytes * u64::from(self.plan.budget_pages));
            *over_budget = (*over_budget).max(total.saturating_sub(budget));
            self.outcome.moments += 1;
        }
    }

    /// The worst of the workers that should hold something.
    fn error(&self, fair: &[u32]) -> f64 {
        let error = |(worker, &fair): (usize, &u32)| {
            (fair > 0).then(|| (self.held_pages(worker) - f64::from(fair)).abs() / f64::from(fair))
        };
        fair.iter().enumerate().filter_map(error).fold(0.0, f64::max)
    }

    /// What a worker reported last.
    fn held_pages(&self, worker: usize) -> f64 {
        let report = self.crew.latest(self.workers[worker]);
        report.map_or(0.0, |report| to_f64(report.held_bytes) / to_f64(self.plan.page_bytes))
    }

    fn finish(mut self) -> anyhow::Result<Measured> {
        for report in self.workers.iter().filter_map(|&worker| self.crew.latest(worker)) {
            self.outcome.exhausted += report.exhausted;
            self.outcome.reclaims += report.reclaims;
        }
        self.crew.dismiss_all()?;
        Ok(self.outcome)
    }
}
