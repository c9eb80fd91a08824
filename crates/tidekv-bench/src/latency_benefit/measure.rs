//! Both sides serve each scenario: the same requests, at the same times.

use std::time::Duration;

use super::Plan;
use super::calibrate::{Calibration, START_TIMEOUT, kvserve};
use super::scenario::{Peaks, Scenario};
use crate::lab::Lab;
use crate::load::data::mixed;
use crate::load::{Api, Arrivals, Endpoint, Stream};
use crate::progress::Progress;
use crate::servers::Server;
use crate::servers::drive::{Answers, drive, stream};
use crate::servers::kvserve::Memory;
use crate::servers::session::Session;
use crate::servers::sides::Arm;
use crate::stats::to_f64;

/// From one peak to the next, as a part of a peak.
const PAUSE: f64 = 0.25;
const WARMUP_REQUESTS: usize = 8;
const WARMUP_SEED: u64 = u64::MAX - 9;

/// Models of one side on one budget.
#[derive(Debug)]
struct Fleet {
    models: Vec<(Server, Endpoint)>,
    /// Behind the servers: they are gone when their folder goes.
    _lab: Lab,
}

/// What a scenario showed: for each side, for each repeat, for each model.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) sides: [Vec<Vec<Answers>>; 2],
}

/// Serves every scenario in turn.
pub(super) fn measure(
    plan: &Plan,
    calibration: &Calibration,
    session: &Session,
    progress: &Progress,
) -> anyhow::Result<Vec<Measured>> {
    let fleets = [start(plan, calibration, session, Arm::A)?, start(plan, calibration, session, Arm::B)?];
    for fleet in &fleets {
        warm(plan, session, fleet)?;
    }
    let mut measured = Vec::new();
    for (place, scenario) in (0..).zip(&plan.scenarios) {
        let mut sides = [Vec::new(), Vec::new()];
        for repeat in 0..plan.repeats {
            for arm in Arm::order(repeat as usize) {
                progress.now(format!("{}, {}", scenario.name, if arm == Arm::A { "static" } else { "elastic" }));
                let streams = streams(scenario, calibration, &fleets[arm.index()]);
                let seed = mixed(plan.seed, mixed(place, u64::from(repeat)));
                let driven = drive(session, streams, seed)?;
                sides[arm.index()].push((0..scenario.models).map(|model| Answers::of(&driven, model)).collect());
                progress.step();
            }
        }
        measured.push(Measured { sides });
    }
    Ok(measured)
}

/// All models of a side: a part of the budget each, held from the start, or all of it for whoever needs it.
fn start(plan: &Plan, calibration: &Calibration, session: &Session, arm: Arm) -> anyhow::Result<Fleet> {
    let lab = Lab::new()?;
    let part = calibration.budget_bytes / u64::try_from(plan.models.len()).unwrap_or(1).max(1);
    let memory = match arm {
        Arm::A => Memory::Static(Some(part)),
        Arm::B => Memory::Elastic,
    };
    let mut models = Vec::new();
    for n in 0..plan.models.len() {
        let launch = kvserve(plan, &lab, n, memory, calibration.budget_bytes);
        let server = Server::start(&launch, START_TIMEOUT, session)?;
        let endpoint = Endpoint::new(server.url().clone(), Api::Completions, &plan.names[n]);
        models.push((server, endpoint));
    }
    Ok(Fleet { models, _lab: lab })
}

fn warm(plan: &Plan, session: &Session, fleet: &Fleet) -> anyhow::Result<()> {
    let scenario = &plan.scenarios[0];
    let of = |(n, (_, endpoint)): (usize, &(Server, Endpoint))| {
        let mut stream =
            stream(&plan.names[n], endpoint.clone(), scenario.lengths(), WARMUP_REQUESTS, Arrivals::Immediately);
        stream.max_concurrency = Some(1);
        stream
    };
    drive(session, fleet.models.iter().enumerate().map(of).collect(), mixed(plan.seed, WARMUP_SEED)).map(drop)
}

/// The requests of a scenario, model by model.
fn streams(scenario: &Scenario, calibration: &Calibration, fleet: &Fleet) -> Vec<Stream> {
    let rate = calibration.rate(scenario);
    let peak = Duration::from_secs_f64(to_f64(scenario.requests_per_peak as u64) / rate);
    let of = |(n, (_, endpoint)): (u32, &(Server, Endpoint))| {
        let (start, rate) = match scenario.peaks {
            Peaks::Disjoint => (peak.mul_f64(1.0 + PAUSE) * n, rate),
            Peaks::Simultaneous => (Duration::ZERO, rate / to_f64(scenario.models as u64)),
        };
        let name = format!("model-{}", n + 1);
        let requests = scenario.requests_per_peak;
        let mut stream = stream(&name, endpoint.clone(), scenario.lengths(), requests, Arrivals::poisson(rate));
        stream.start = start;
        stream
    };
    (0..).zip(&fleet.models).take(scenario.models).map(of).collect()
}
