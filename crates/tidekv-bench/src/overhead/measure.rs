//! Slices, in the order of the plan.

use anyhow::{Context as _, ensure};

use super::plan::{Cell, Plan, Point, Turn};
use crate::load::data::mixed;
use crate::load::{Arrivals, Endpoint, Stream};
use crate::progress::Progress;
use crate::servers::drive::{Answers, drive, stream};
use crate::servers::session::Session;
use crate::servers::sides::{Arm, Arms, Sides};

/// Warm-up requests and slices draw from different seeds: a prompt that a server has seen is not asked again.
const WARMUP_SEED: u64 = u64::MAX;

/// What was seen: for each cell the slices of each side, pair by pair.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) cells: Vec<[Vec<Answers>; 2]>,
}

pub(super) fn measure(plan: &Plan, sides: &Sides, session: &Session, progress: &Progress) -> anyhow::Result<Measured> {
    let cells = plan.cells();
    let mut measured = Measured { cells: cells.iter().map(|_| Default::default()).collect() };
    let mut run = Run { plan, session, arms: sides.arms(session), per_s: [None, None] };
    for turn in plan.turns() {
        let cell = cells[turn.cell];
        progress.now(describe(plan, cell, turn.arm));
        let answers = run.slice(turn, cell)?;
        ensure!(
            answers.completed > 0,
            "none of the {} requests to side {:?} was answered: {}",
            answers.failed,
            turn.arm,
            answers.first_failure.as_deref().unwrap_or("it said nothing")
        );
        measured.cells[turn.cell][turn.arm.index()].push(answers);
        progress.step();
    }
    Ok(measured)
}

fn describe(plan: &Plan, cell: Cell, arm: Arm) -> String {
    let point = match cell.point {
        Point::Rate(rate) => format!("{rate} requests/s"),
        Point::Saturated(_) => "saturated".to_owned(),
    };
    format!("{}, {point}, {}", plan.profiles[cell.profile].name, plan.names[arm.index()])
}

struct Run<'a> {
    plan: &'a Plan,
    session: &'a Session,
    arms: Arms<'a>,
    /// What each side's warm-up managed, requests a second; `None` until it had one.
    per_s: [Option<f64>; 2],
}

impl Run<'_> {
    fn slice(&mut self, turn: Turn, cell: Cell) -> anyhow::Result<Answers> {
        if self.plan.both_up {
            // Both are there and warm before either is measured.
            for arm in Arm::BOTH {
                self.warm(arm)?;
            }
        } else if !self.arms.is_up(turn.arm) {
            self.per_s[turn.arm.index()] = None;
        }
        self.warm(turn.arm)?;
        let endpoint = self.arms.endpoint(turn.arm)?;
        let per_s = match cell.point {
            Point::Rate(rate) => rate,
            // Of the slower side, so that neither has more than its slice.
            Point::Saturated(_) => self.per_s.iter().flatten().copied().reduce(f64::min).context("nobody is warm")?,
        };
        let requests = self.plan.requests(cell.point, per_s);
        let stream = self.stream(cell, endpoint, requests);
        // The same for both sides of a pair.
        let place = word(turn.cell) ^ word(turn.pair).rotate_left(32);
        let driven = drive(self.session, vec![stream], mixed(self.plan.seed, place))?;
        Ok(Answers::of(&driven, 0))
    }

    fn stream(&self, cell: Cell, endpoint: Endpoint, requests: usize) -> Stream {
        let lengths = self.plan.profiles[cell.profile].lengths;
        match cell.point {
            Point::Rate(rate) => stream("load", endpoint, lengths, requests, Arrivals::poisson(rate)),
            Point::Saturated(under_way) => {
                let mut stream = stream("load", endpoint, lengths, requests, Arrivals::Immediately);
                stream.max_concurrency = Some(under_way as usize);
                stream
            }
        }
    }

    /// Requests that nobody measures, once for every start of a server.
    fn warm(&mut self, arm: Arm) -> anyhow::Result<()> {
        if self.per_s[arm.index()].is_some() {
            return Ok(());
        }
        let endpoint = self.arms.endpoint(arm)?;
        let cell = Cell { profile: 0, point: Point::Saturated(self.plan.saturated.max(1)) };
        let requests = self.plan.warmup_requests.max(1) as usize;
        let stream = self.stream(cell, endpoint, requests);
        let driven = drive(self.session, vec![stream], mixed(self.plan.seed, WARMUP_SEED))?;
        let answers = Answers::of(&driven, 0);
        let what = || answers.first_failure.clone().unwrap_or_default();
        let per_s = answers.requests_per_s().with_context(|| format!("warming side {arm:?} up: {}", what()))?;
        self.per_s[arm.index()] = Some(per_s);
        Ok(())
    }
}

fn word(index: usize) -> u64 {
    u64::try_from(index).unwrap_or(u64::MAX)
}
