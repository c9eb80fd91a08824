//! Blocks that take turns within every batch: a strategy and the floor under it.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use tidekv_ipc::broadcast::StrategyEntry;

use super::Plan;
use super::batch;
use super::echo::{Echo, EchoListener};
use super::floor::{self, Floor};
use super::scheduler::{Kind, Orders, Scheduler};
use super::worker::{Open, Opened, socket_dir};
use crate::lab::Lab;
use crate::progress::Progress;
use crate::ranks::{OPEN_TIMEOUT, Ranks};
use crate::stats::Samples;

/// Name of the hidden subcommand.
const WORKER: &str = "tp-worker";

/// Iterations of a block. Short enough that a slow second of the machine meets both sides.
const BLOCK_MAX: u32 = 50;

/// Iterations at a cadence, which takes its time.
const CADENCE_ITERS_MAX: u32 = 1000;

/// Times of one strategy and of its floor.
#[derive(Debug, Default)]
pub(super) struct Times {
    pub(super) map: Samples,
    pub(super) unmap: Samples,
    /// Two echoes for each iteration.
    pub(super) floor: Samples,
}

impl Times {
    fn extend(&mut self, more: &Self) {
        self.map.extend(&more.map);
        self.unmap.extend(&more.unmap);
        self.floor.extend(&more.floor);
    }
}

/// One strategy.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) strategy: &'static StrategyEntry,
    pub(super) floor_in_words: &'static str,
    pub(super) back_to_back: Times,
    /// With a pause before every broadcast.
    pub(super) at_cadence: Option<Times>,
}

impl Measured {
    /// Adds what the next batch says about the same strategy.
    fn extend(&mut self, more: &Self) {
        self.back_to_back.extend(&more.back_to_back);
        if let (Some(times), Some(more)) = (&mut self.at_cadence, &more.at_cadence) {
            times.extend(more);
        }
    }
}

/// Iterations of one batch, for each strategy.
#[derive(Clone, Copy, Debug)]
struct Share {
    back_to_back: u32,
    at_cadence: u32,
}

fn shares(plan: &Plan) -> impl Iterator<Item = Share> {
    let at_cadence = batch::shares(plan.iters.min(CADENCE_ITERS_MAX), plan.batches);
    let both = batch::shares(plan.iters, plan.batches).zip(at_cadence);
    both.map(|(back_to_back, at_cadence)| Share { back_to_back, at_cadence })
}

/// Steps of the progress bar.
pub(super) fn steps(plan: &Plan) -> u64 {
    let blocks = |iters| 2 * blocks(iters).count() as u64;
    let of_batch = |share: Share| blocks(share.back_to_back) + plan.cadence_ns.map_or(0, |_| blocks(share.at_cadence));
    shares(plan).map(of_batch).sum::<u64>() * plan.strategies.len() as u64
}

pub(super) fn measure(plan: &Plan, program: &Path, progress: &Progress) -> anyhow::Result<Vec<Measured>> {
    let mut all: Vec<Measured> = Vec::new();
    for share in shares(plan) {
        let batch = batch::in_new_thread(|| measure_batch(plan, share, program, progress))?;
        if all.is_empty() {
            all = batch;
        } else {
            all.iter_mut().zip(&batch).for_each(|(measured, more)| measured.extend(more));
        }
    }
    Ok(all)
}

/// Every strategy, with workers that end with the batch. The kernel ends them with the thread that this is called in.
fn measure_batch(plan: &Plan, share: Share, program: &Path, progress: &Progress) -> anyhow::Result<Vec<Measured>> {
    let lab = Lab::new()?;
    let orders = Orders::new(plan);
    let sizes = orders.sizes()?;
    let listener = EchoListener::bind(lab.path(), sizes).context("opening the echoes' socket")?;
    let mut ranks: Ranks<Opened> = Ranks::start(program, WORKER, plan.tp_size)?;
    let open = |(rank, &device): (u32, &u32)| {
        let cache = (!plan.noop).then(|| plan.cache.clone());
        (rank as usize, Open { rank, device, cache, dir: lab.path().to_owned(), echo: sizes })
    };
    let opens: Vec<_> = (0..).zip(&plan.map.devices).map(open).collect();
    ranks.ask(&opens, OPEN_TIMEOUT, "while reserving its cache")?;
    let echoes = listener.accept(plan.tp_size).context("accepting the echoes")?;
    let mut stage = Stage { plan, share, lab: &lab, orders, echoes, progress };
    let mut all = Vec::new();
    for strategy in &plan.strategies {
        // A worker that is gone explains more than the socket that it closed.
        all.push(stage.strategy(strategy).map_err(|error| ranks.blame(error))?);
    }
    drop(stage);
    ranks.dismiss()?;
    Ok(all)
}

/// What all strategies have in common.
struct Stage<'a> {
    plan: &'a Plan,
    share: Share,
    lab: &'a Lab,
    orders: Orders,
    /// With a floor while that is being measured.
    echoes: Vec<Echo>,
    progress: &'a Progress,
}

impl Stage<'_> {
    fn strategy(&mut self, strategy: &'static StrategyEntry) -> anyhow::Result<Measured> {
        let plan = self.plan;
        let floor = floor::under(strategy, std::mem::take(&mut self.echoes))?;
        let floor_in_words = floor.in_words();
        let scheduler = Scheduler::connect(&mut self.orders, socket_dir(self.lab.path())?, plan.tp_size, strategy);
        let scheduler = scheduler.with_context(|| format!("the {} strategy", strategy.name))?;
        let mut turns = Turns { scheduler, floor, progress: self.progress };
        let back_to_back = turns.take(self.share.back_to_back, Pace::BackToBack)?;
        let at_cadence = match plan.cadence() {
            Some(period) => Some(turns.take(self.share.at_cadence, Pace::Every(period))?),
            None => None,
        };
        self.echoes = turns.floor.finish()?;
        Ok(Measured { strategy, floor_in_words, back_to_back, at_cadence })
    }
}

/// When a broadcast may begin.
#[derive(Clone, Copy, Debug)]
enum Pace {
    BackToBack,
    Every(Duration),
}

/// A strategy and its floor.
struct Turns<'a> {
    scheduler: Scheduler<'a>,
    floor: Box<dyn Floor>,
    progress: &'a Progress,
}

impl Turns<'_> {
    /// Floor, strategy, strategy, floor, floor, ...: each as long as the other and, over all, as early.
    fn take(&mut self, iters: u32, pace: Pace) -> anyhow::Result<Times> {
        let mut times = Times::default();
        for (number, block) in blocks(iters).enumerate() {
            let floor_first = number % 2 == 0;
            for is_floor in [floor_first, !floor_first] {
                self.progress.now(if is_floor { "bare echo" } else { self.scheduler.name() });
                if is_floor {
                    self.floor_block(block, pace, &mut times.floor)?;
                } else {
                    self.strategy_block(block, pace, &mut times)?;
                }
                self.progress.step();
            }
        }
        Ok(times)
    }

    fn floor_block(&mut self, iters: u32, pace: Pace, times: &mut Samples) -> anyhow::Result<()> {
        // Unmeasured: the workers' other thread was the last to run.
        self.floor.round()?;
        let mut clock = Clock::new(pace);
        for _ in 0..2 * iters {
            clock.wait();
            let started = Instant::now();
            self.floor.round()?;
            times.push_duration(started.elapsed());
        }
        Ok(())
    }

    fn strategy_block(&mut self, iters: u32, pace: Pace, times: &mut Times) -> anyhow::Result<()> {
        for kind in Kind::BOTH {
            self.scheduler.broadcast(kind)?;
        }
        let mut clock = Clock::new(pace);
        for _ in 0..iters {
            for (kind, samples) in Kind::BOTH.into_iter().zip([&mut times.map, &mut times.unmap]) {
                clock.wait();
                let started = Instant::now();
                self.scheduler.broadcast(kind)?;
                samples.push_duration(started.elapsed());
            }
        }
        Ok(())
    }
}

/// Beats of a cadence; what was missed is not caught up with.
struct Clock {
    pace: Pace,
    next: Instant,
}

impl Clock {
    fn new(pace: Pace) -> Self {
        Self { pace, next: Instant::now() }
    }

    fn wait(&mut self) {
        let Pace::Every(period) = self.pace else { return };
        self.next = (self.next + period).max(Instant::now());
        thread::sleep(self.next.saturating_duration_since(Instant::now()));
    }
}

/// Iterations of each block: at least two blocks where there are two iterations.
fn blocks(iters: u32) -> impl Iterator<Item = u32> {
    let longest = (iters / 2).clamp(1, BLOCK_MAX);
    (0..iters.div_ceil(longest)).map(move |block| longest.min(iters - block * longest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_come_in_pairs_and_miss_nothing() {
        assert_eq!(blocks(1).collect::<Vec<_>>(), [1]);
        assert_eq!(blocks(20).collect::<Vec<_>>(), [10, 10]);
        assert_eq!(blocks(21).collect::<Vec<_>>(), [10, 10, 1]);
        for iters in 1..500 {
            assert_eq!(blocks(iters).sum::<u32>(), iters);
            assert!(blocks(iters).all(|block| (1..=BLOCK_MAX).contains(&block)));
        }
    }
}
