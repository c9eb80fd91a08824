//! Rounds of slices: servers started, warmed, asked in turns, stopped.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::allocate::{self, Known};
use super::judge::half_width;
use super::plan::{Cell, Design, Plan, Point, Slice, Speed};
use crate::load::data::mixed;
use crate::load::{Arrivals, Endpoint, Stream};
use crate::progress::Progress;
use crate::random::Random;
use crate::servers::drive::{Answers, Pace, drive_at, stream};
use crate::servers::session::Session;
use crate::servers::sides::{Arm, Arms, Sides};
use crate::stats::to_f64;

/// Warm-up requests and slices draw from different seeds: a prompt that a server has seen is not asked again.
const WARMUP_SEED: u64 = u64::MAX;
/// Answers one by one, to see how long one takes.
const LONE_ANSWERS: usize = 5;
/// So many slices in a row without an answer, and nothing more is asked. At low rates a slice is one request.
const MOST_SILENT: u32 = 3;
/// From deciding to send to the first request.
const LEAD: Duration = Duration::from_millis(10);

/// Slices of A and B that lie side by side in time.
#[derive(Clone, Debug)]
pub(crate) struct Pair {
    /// That of A and that of B.
    pub(crate) sides: [Answers; 2],
    /// Whose comes first.
    pub(crate) first: Arm,
}

/// The pairs of a cell in one round: one sample.
pub(crate) type Block = Vec<Pair>;

/// What was seen: for each cell its blocks, one for each round that it was part of.
#[derive(Debug, Default)]
pub(super) struct Measured {
    pub(super) cells: Vec<Vec<Block>>,
    /// How often servers were started; not those that were there already.
    pub(super) starts: u32,
    /// From the first start to the last answer.
    pub(super) elapsed: Duration,
    /// Whether somebody interrupted it.
    pub(super) is_partial: bool,
}

pub(super) fn measure(plan: &Plan, sides: &Sides, session: &Session, progress: &Progress) -> anyhow::Result<Measured> {
    let cells = plan.cells();
    let known = |cell: &Cell| Known {
        weight: Plan::weight(cell.point),
        pair_s: 0.0,
        spent_s: 0.0,
        rounds: 0,
        half_width: None,
    };
    let mut run = Run {
        plan,
        session,
        arms: sides.arms(session),
        speeds: vec![None; plan.profiles.len()],
        known: cells.iter().map(known).collect(),
        measured: Measured { cells: vec![Vec::new(); cells.len()], ..Measured::default() },
        cells,
        begun: Instant::now(),
        rounds: plan.design.rounds() as usize,
        warmed: 0,
        start_s: 0.0,
        started: Instant::now(),
        next_slice: Instant::now(),
        silent: [0; 2],
    };
    let mut round = 0;
    while round < run.rounds {
        let outcome = run.round(round, progress);
        match session.unless_interrupted(outcome)? {
            Some(true) => progress.step(),
            Some(false) | None => break,
        }
        round += 1;
    }
    run.measured.elapsed = run.begun.elapsed();
    run.measured.is_partial = session.is_interrupted();
    Ok(run.measured)
}

struct Run<'a> {
    plan: &'a Plan,
    session: &'a Session,
    cells: Vec<Cell>,
    arms: Arms<'a>,
    /// By profile, from the first warm-up on.
    speeds: Vec<Option<Speed>>,
    known: Vec<Known>,
    measured: Measured,
    begun: Instant,
    /// How many there will be, if there is time.
    rounds: usize,
    /// How often a server was warmed up.
    warmed: u32,
    /// What starting and warming both servers took the last time.
    start_s: f64,
    /// When that began.
    started: Instant,
    /// When the next slice may begin.
    next_slice: Instant,
    /// For each side how many slices in a row had no answer.
    silent: [u32; 2],
}

impl Run<'_> {
    /// One round; `false` where there is nothing left to do, or no time.
    fn round(&mut self, round: usize, progress: &Progress) -> anyhow::Result<bool> {
        if self.round_s(round).is_none() {
            return Ok(false);
        }
        progress.now("starting");
        if self.plan.both_up {
            if self.is_start_due() {
                self.started = Instant::now();
                self.arms.stop();
            }
            Arm::BOTH.iter().try_for_each(|&arm| self.warm(arm))?;
        } else {
            // Whoever was asked last in the round before is asked first in this one.
            self.warm(Arm::order(round)[0])?;
        }
        let pairs = match self.plan.design {
            Design::Fixed { .. } => self.fixed_pairs()?,
            // What is left after this start, less what starts in the rounds to come may take.
            Design::Within { minutes, .. } => {
                self.estimate_pairs()?;
                if round == 0 && self.arms.can_restart() {
                    self.rounds = allocate::rounds_with_starts(self.rounds, minutes * 60.0, self.start_s);
                    progress.expect(word(self.rounds));
                }
                let round_s = self.round_s(round).unwrap_or(0.0);
                let start_s = if self.arms.can_restart() { self.start_s } else { 0.0 };
                allocate::pairs(&self.known, round_s - allocate::for_starts_s(start_s, round_s))
            }
        };
        if pairs.iter().all(|&pairs| pairs == 0) {
            return Ok(false);
        }
        if self.plan.both_up {
            self.taking_turns(round, &pairs, progress)?;
        } else {
            self.one_by_one(round, &pairs, progress)?;
        }
        for (known, blocks) in self.known.iter_mut().zip(&self.measured.cells) {
            known.rounds = blocks.len();
            known.half_width = half_width(blocks, self.plan.tolerance);
        }
        Ok(true)
    }

    /// Whether servers that are up are to be started anew.
    fn is_start_due(&self) -> bool {
        let are_up = self.plan.both_up && Arm::BOTH.iter().all(|&arm| self.arms.is_up(arm));
        let since_start_s = self.started.elapsed().as_secs_f64();
        are_up && self.arms.can_restart() && allocate::is_worth_a_start(self.start_s, since_start_s)
    }

    /// Seconds of a round: what is left, divided among those to come. `None` where there is no time for another.
    fn round_s(&self, round: usize) -> Option<f64> {
        match self.plan.design {
            Design::Fixed { rounds, seconds } => {
                let weights: f64 = self.known.iter().map(|known| known.weight).sum();
                Some(seconds * weights / f64::from(rounds))
            }
            Design::Within { minutes, .. } => {
                let start_s = if self.is_start_due() { self.start_s } else { 0.0 };
                let left_s = minutes * 60.0 - self.begun.elapsed().as_secs_f64() - start_s;
                let planned = self.rounds.saturating_sub(round).max(1);
                let rounds = allocate::rounds_within(left_s, planned, allocate::least_s(&self.known));
                // The first one is measured however little time there is.
                let rounds = rounds.max(usize::from(round == 0));
                (rounds > 0).then(|| left_s.max(0.0) / to_f64(word(rounds)))
            }
        }
    }

    /// Until a pair was measured, how long it takes follows from its slices.
    fn estimate_pairs(&mut self) -> anyhow::Result<()> {
        for place in 0..self.cells.len() {
            if self.known[place].pair_s == 0.0 {
                self.known[place].pair_s = 2.0 * self.slice(place)?.seconds;
            }
        }
        Ok(())
    }

    fn fixed_pairs(&self) -> anyhow::Result<Vec<usize>> {
        let rounds = self.plan.design.rounds();
        let of = |place: usize| {
            let slice = self.slice(place)?;
            let pairs = match self.plan.num_requests {
                Some(requests) => f64::from(requests.div_ceil(rounds)) / to_f64(slice.requests as u64),
                None => self.most_slice_s(place) / slice.seconds,
            };
            Ok(super::plan::whole(pairs))
        };
        (0..self.cells.len()).map(of).collect()
    }

    /// What a side has for a cell in a round, where that is fixed.
    fn most_slice_s(&self, place: usize) -> f64 {
        match self.plan.design {
            Design::Fixed { rounds, seconds } if self.plan.num_requests.is_none() => {
                seconds * self.known[place].weight / (2.0 * f64::from(rounds))
            }
            Design::Fixed { .. } | Design::Within { .. } => f64::INFINITY,
        }
    }

    /// The slices of a cell.
    fn slice(&self, place: usize) -> anyhow::Result<Slice> {
        let cell = self.cells[place];
        let speed = self.speeds[cell.profile].context("nobody is warm")?;
        Ok(self.plan.slice(cell.point, speed, self.most_slice_s(place)))
    }

    /// Both are up: A B B A at every point. Points begin at another place in every round, so that none is always first.
    fn taking_turns(&mut self, round: usize, pairs: &[usize], progress: &Progress) -> anyhow::Result<()> {
        for step in 0..self.cells.len() {
            let place = (step + round) % self.cells.len();
            if pairs[place] == 0 {
                continue;
            }
            let begun = Instant::now();
            let mut block = Block::new();
            for pair in 0..pairs[place] {
                let mut slices: [Option<Answers>; 2] = [None, None];
                let mut first_due = None;
                for arm in Arm::order(round + pair) {
                    progress.now(self.describe(place));
                    let (answers, due) = self.measure(place, arm, round, pair)?;
                    slices[arm.index()] = Some(answers);
                    first_due.get_or_insert(due);
                }
                // The other side's slice follows at once, while the machine is as it was, and the next pair when the first
                // side is due again: with one request in a slice each side is asked at its rate, the machine at twice that.
                self.next_slice = first_due.unwrap_or(self.next_slice);
                if let [Some(a), Some(b)] = slices {
                    block.push(Pair { sides: [a, b], first: Arm::order(round + pair)[0] });
                }
            }
            let seconds = begun.elapsed().as_secs_f64();
            self.known[place].spent_s += seconds;
            self.known[place].pair_s = seconds / to_f64(pairs[place] as u64);
            self.measured.cells[place].push(block);
        }
        Ok(())
    }

    /// One is up at a time, and measures every point before it makes room.
    fn one_by_one(&mut self, round: usize, pairs: &[usize], progress: &Progress) -> anyhow::Result<()> {
        let mut sides: [Vec<Vec<Answers>>; 2] = Default::default();
        'asking: for arm in Arm::order(round) {
            self.warm(arm)?;
            for (place, &pairs) in pairs.iter().enumerate() {
                progress.now(self.describe(place));
                let slice = |pair| {
                    let (answers, due) = self.measure(place, arm, round, pair)?;
                    self.next_slice = due;
                    Ok(answers)
                };
                let slices: anyhow::Result<_> = (0..pairs).map(slice).collect();
                let Some(slices) = self.session.unless_interrupted(slices)? else { break 'asking };
                sides[arm.index()].push(slices);
            }
        }
        // Where somebody interrupted, of the points that both have measured.
        let [a, b] = sides;
        for ((cell, a), b) in self.measured.cells.iter_mut().zip(a).zip(b) {
            let pair = |(a, b)| Pair { sides: [a, b], first: Arm::order(round)[0] };
            cell.push(a.into_iter().zip(b).map(pair).collect());
        }
        Ok(())
    }

    fn describe(&self, place: usize) -> String {
        let cell = self.cells[place];
        let point = match cell.point {
            Point::Rate(rate) => format!("{rate} requests/s"),
            Point::Saturated(_) => "saturated".to_owned(),
        };
        format!("{}, {point}", self.plan.profiles[cell.profile].name)
    }

    /// A slice of one side, and when that side is due again; the same requests for both sides of a pair.
    fn measure(&mut self, place: usize, arm: Arm, round: usize, pair: usize) -> anyhow::Result<(Answers, Instant)> {
        let (cell, slice) = (self.cells[place], self.slice(place)?);
        let endpoint = self.arms.endpoint(arm)?;
        let seed = mixed(mixed(self.plan.seed, word(place)), word(round) ^ word(pair).rotate_left(32));
        let start = self.next_slice.max(Instant::now() + LEAD);
        // Looking at memory takes time from whoever serves: one pair of a round is enough to see it.
        let pace = Pace { start: Some(start), is_watched: pair == 0 };
        let stream = self.stream(cell, endpoint, slice.requests);
        let driven = drive_at(self.session, vec![stream], seed, pace)?;
        let mut answers = Answers::of(&driven, 0);
        // One request that fails is counted, and forbids a conclusion. A server that is gone answers nothing any more.
        let silent = &mut self.silent[arm.index()];
        *silent = if answers.completed > 0 { 0 } else { *silent + 1 };
        ensure!(
            *silent < MOST_SILENT,
            "side {arm:?} answers nothing any more, {silent} times in a row: {}",
            answers.first_failure.as_deref().unwrap_or("it said nothing")
        );
        let mut due = start;
        if let Point::Rate(rate) = cell.point {
            // From the last request to the next one of the same side is a gap of the same kind.
            let last_gap = Duration::from_secs_f64(-Random::seeded(mixed(seed, 1)).unit().ln() / rate);
            let last_sent = driven.records.iter().map(|record| record.intended_ns).max().unwrap_or(0);
            let last_sent = Duration::from_nanos(last_sent);
            due = start + last_sent + last_gap;
            answers.duration = answers.duration.max(last_sent + last_gap);
        }
        Ok((answers, due))
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

    /// Requests that nobody measures, once for every start of a server; the first time they show how fast it is.
    fn warm(&mut self, arm: Arm) -> anyhow::Result<()> {
        if self.arms.is_up(arm) {
            return Ok(());
        }
        let begun = Instant::now();
        let endpoint = self.arms.endpoint(arm)?;
        self.warmed += 1;
        self.measured.starts += u32::from(self.arms.can_restart());
        for profile in 0..self.plan.profiles.len() {
            let asked = |under_way: u32, requests: usize, what: u64| {
                let cell = Cell { profile, point: Point::Saturated(under_way) };
                let stream = self.stream(cell, endpoint.clone(), requests);
                let seed = mixed(mixed(self.plan.seed, WARMUP_SEED - what), word(profile));
                let pace = Pace { start: None, is_watched: false };
                anyhow::Ok(Answers::of(&drive_at(self.session, vec![stream], seed, pace)?, 0))
            };
            let together = asked(self.plan.saturated.max(1), self.plan.warmup_requests.max(1) as usize, 0)?;
            let what = || format!("warming side {arm:?} up: {}", together.first_failure.clone().unwrap_or_default());
            let per_s = together.requests_per_s().with_context(what)?;
            let alone = asked(1, LONE_ANSWERS, 1)?;
            let alone_s = alone.e2e.percentile(50).map_or(0.0, |ns| to_f64(ns) / 1e9);
            // That of the first start: slices stay as they are. Of the slower side, so that neither has more than its slice.
            if self.warmed <= 2 {
                let speed = self.speeds[profile].get_or_insert(Speed { per_s, alone_s });
                *speed = Speed { per_s: speed.per_s.min(per_s), alone_s: speed.alone_s.max(alone_s) };
            }
        }
        let seconds = begun.elapsed().as_secs_f64();
        self.start_s = if arm == Arm::A { seconds } else { self.start_s + seconds };
        Ok(())
    }
}

fn word(index: usize) -> u64 {
    u64::try_from(index).unwrap_or(u64::MAX)
}
