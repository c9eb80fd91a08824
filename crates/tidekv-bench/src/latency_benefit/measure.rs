//! Both sides serve each scenario: the same requests, at the same times. Then, once, models that lack nothing.
//!
//! ```text
//!   repeat   1: [peaks apart: A B][peaks that meet: A B]   2: [B A][B A]   3: ...        A and B are up all the time
//!   last     [peaks apart][peaks that meet], every model with the whole budget           A and B are gone by then
//! ```
//!
//! Scenarios take turns within a repeat, so that a run whose time is over has as many repeats of each.

use std::time::{Duration, Instant};

use super::Plan;
use super::calibrate::{Calibration, START_TIMEOUT, kvserve};
use super::ledger::{LedgerLooks, LedgerWatch};
use super::scenario::{Peaks, Scenario};
use super::timing::{Fit, PAUSE, WARMUP_REQUESTS, has_time};
use crate::lab::Lab;
use crate::load::data::mixed;
use crate::load::{Api, Arrivals, Endpoint, Stream};
use crate::progress::Progress;
use crate::servers::Server;
use crate::servers::drive::{Answers, drive, stream};
use crate::servers::kvserve::Memory;
use crate::servers::memory::MemorySummary;
use crate::servers::session::Session;
use crate::servers::sides::Arm;
use crate::stats::to_f64;

const WARMUP_SEED: u64 = u64::MAX - 9;

/// Models of one side.
#[derive(Debug)]
struct Fleet {
    models: Vec<(Server, Endpoint)>,
    /// Behind the servers: they are gone when their folders go.
    labs: Vec<Lab>,
}

/// What memory a fleet's models have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A part of the budget each, held from the start.
    Static,
    /// All of it for whoever needs it.
    Elastic,
    /// All of it for each: what no sharing can be better than.
    Unlimited,
}

/// One scenario, served once by one side.
#[derive(Debug)]
pub(super) struct Served {
    /// Model by model.
    pub(super) models: Vec<Answers>,
    /// Of all models at the same moments.
    pub(super) memory: Option<MemorySummary>,
}

/// What a scenario showed.
#[derive(Debug, Default)]
pub(super) struct MeasuredScenario {
    /// For each side, repeat by repeat.
    pub(super) sides: [Vec<Served>; 2],
    /// With the requests of the last repeat.
    pub(super) unlimited: Option<Served>,
}

/// What a run showed.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) scenarios: Vec<MeasuredScenario>,
    /// Of the elastic models.
    pub(super) ledger: LedgerLooks,
}

/// What does not change from leg to leg.
pub(super) struct Measuring<'a> {
    pub(super) plan: &'a Plan,
    pub(super) calibration: &'a Calibration,
    pub(super) fit: Fit,
    /// When the run began.
    pub(super) started: Instant,
    pub(super) session: &'a Session,
    pub(super) progress: &'a Progress,
}

impl Measuring<'_> {
    /// Serves everything that the fit has, as long as there is time.
    pub(super) fn measure(&self) -> anyhow::Result<Measured> {
        let mut scenarios: Vec<MeasuredScenario> = self.plan.scenarios.iter().map(|_| Default::default()).collect();
        let begin = || Ok([self.start(Kind::Static)?, self.start(Kind::Elastic)?]);
        let Some(fleets) = self.session.unless_interrupted(begin())? else {
            return Ok(Measured { scenarios, ledger: LedgerLooks::default() });
        };
        let ledger = LedgerWatch::begin(&fleets[Arm::B.index()].labs[0].runtime_dir())?;
        // From a first repeat on it is known how long they take.
        let (mut longest_s, mut legs_s) = (0.0_f64, 0.0_f64);
        for repeat in 0..self.fit.repeats {
            let begun_s = self.elapsed_s();
            let reserved_s = if self.fit.unlimited { legs_s } else { 0.0 };
            if repeat > 0
                && !self.plan.repeats_fixed
                && !has_time(begun_s, longest_s, reserved_s, self.plan.time_limit_s)
            {
                break;
            }
            for (scenario, measured) in (0..).zip(&mut scenarios) {
                let pair = self.pair(scenario, repeat, &fleets);
                let Some(pair) = self.session.unless_interrupted(pair)? else { break };
                measured.sides.iter_mut().zip(pair).for_each(|(side, served)| side.push(served));
            }
            if self.session.is_interrupted() {
                break;
            }
            let took_s = self.elapsed_s() - begun_s;
            longest_s = longest_s.max(took_s);
            // One side's part of it, and the slower one's is the larger.
            legs_s = legs_s.max(took_s / 2.0);
        }
        let ledger = ledger.end();
        drop(fleets);
        let has_time = has_time(self.elapsed_s(), legs_s, 0.0, self.plan.time_limit_s);
        if self.fit.unlimited && (has_time || self.plan.repeats_fixed) && !self.session.is_interrupted() {
            // What both sides served is a result without it.
            self.session.unless_interrupted(self.serve_unlimited(&mut scenarios))?;
        }
        Ok(Measured { scenarios, ledger })
    }

    /// Both sides, one after the other: an interrupted one is neither's.
    fn pair(&self, scenario: usize, repeat: u32, fleets: &[Fleet; 2]) -> anyhow::Result<[Served; 2]> {
        let leg = |arm: Arm| {
            let name = if arm == Arm::A { "static" } else { "elastic" };
            self.leg(scenario, repeat, &fleets[arm.index()], name)
        };
        let order = Arm::order(repeat as usize);
        let (first, second) = (leg(order[0])?, leg(order[1])?);
        Ok(if order[0] == Arm::A { [first, second] } else { [second, first] })
    }

    /// Once, with models that lack nothing.
    fn serve_unlimited(&self, scenarios: &mut [MeasuredScenario]) -> anyhow::Result<()> {
        let fleet = self.start(Kind::Unlimited)?;
        for (scenario, measured) in (0..).zip(scenarios) {
            let last = u32::try_from(measured.sides[0].len()).unwrap_or(1).saturating_sub(1);
            measured.unlimited = Some(self.leg(scenario, last, &fleet, "without bounds")?);
        }
        Ok(())
    }

    fn elapsed_s(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    /// A scenario, served once. The same repeat is the same requests.
    fn leg(&self, scenario: usize, repeat: u32, fleet: &Fleet, side: &str) -> anyhow::Result<Served> {
        let (place, scenario) = (scenario as u64, &self.plan.scenarios[scenario]);
        self.progress.now(format!("s, {}, repeat {}, {side}", scenario.name, repeat + 1));
        let seed = mixed(self.plan.seed, mixed(place, u64::from(repeat)));
        let driven = drive(self.session, self.streams(scenario, fleet), seed)?;
        self.progress.at(self.started.elapsed().as_secs());
        let models = (0..scenario.models).map(|model| Answers::of(&driven, model)).collect();
        Ok(Served { models, memory: driven.memory_together() })
    }

    /// All models of a side, warm.
    fn start(&self, kind: Kind) -> anyhow::Result<Fleet> {
        self.progress.now("s, starting models");
        let (plan, budget_bytes) = (self.plan, self.calibration.budget_bytes);
        let part = budget_bytes / u64::try_from(plan.models.len()).unwrap_or(1).max(1);
        let memory = match kind {
            Kind::Static => Memory::Static(Some(part)),
            Kind::Elastic => Memory::Elastic,
            Kind::Unlimited => Memory::Static(Some(budget_bytes)),
        };
        let mut fleet = Fleet { models: Vec::new(), labs: Vec::new() };
        for n in 0..plan.models.len() {
            if n == 0 || kind == Kind::Unlimited {
                fleet.labs.push(Lab::new()?);
            }
            let launch = kvserve(plan, &fleet.labs[fleet.labs.len() - 1], n, memory, budget_bytes);
            let server = Server::start(&launch, START_TIMEOUT, self.session)?;
            let endpoint = Endpoint::new(server.url().clone(), Api::Completions, &plan.names[n]);
            fleet.models.push((server, endpoint));
        }
        self.warm(&fleet)?;
        Ok(fleet)
    }

    fn warm(&self, fleet: &Fleet) -> anyhow::Result<()> {
        let lengths = self.plan.scenarios[0].lengths();
        let of = |(n, (_, endpoint)): (usize, &(Server, Endpoint))| {
            let name = &self.plan.names[n];
            let mut stream = stream(name, endpoint.clone(), lengths, WARMUP_REQUESTS, Arrivals::Immediately);
            stream.max_concurrency = Some(1);
            stream
        };
        let streams = fleet.models.iter().enumerate().map(of).collect();
        drive(self.session, streams, mixed(self.plan.seed, WARMUP_SEED)).map(drop)
    }

    /// The requests of a scenario, model by model.
    fn streams(&self, scenario: &Scenario, fleet: &Fleet) -> Vec<Stream> {
        let rate = self.calibration.rate(scenario);
        let requests = self.fit.requests(scenario);
        let peak = Duration::from_secs_f64(to_f64(requests as u64) / rate);
        let of = |(n, (_, endpoint)): (u32, &(Server, Endpoint))| {
            let (start, rate) = match scenario.peaks {
                Peaks::Disjoint => (peak.mul_f64(1.0 + PAUSE) * n, rate),
                Peaks::Simultaneous => (Duration::ZERO, rate / to_f64(scenario.models as u64)),
            };
            let name = format!("model-{}", n + 1);
            let mut stream = stream(&name, endpoint.clone(), scenario.lengths(), requests, scenario.arrivals(rate));
            stream.start = start;
            stream
        };
        (0..).zip(&fleet.models).take(scenario.models).map(of).collect()
    }
}
