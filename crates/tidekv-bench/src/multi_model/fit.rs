//! How many fit: servers are started on one budget until one is refused, and all that are up must answer.

use anyhow::{Context as _, bail};

use super::{Kind, Plan};
use crate::lab::Lab;
use crate::load::data::mixed;
use crate::load::{Api, Arrivals, BaseUrl, Endpoint};
use crate::progress::Progress;
use crate::servers::drive::{Answers, drive, stream};
use crate::servers::kvserve::{KvServe, Memory};
use crate::servers::session::Session;
use crate::servers::sides::{Arm, served_model};
use crate::servers::{Launch, Server, ServerError};

/// Requests that each model must answer to count.
const PROOF_REQUESTS: usize = 8;
const PROOF_SEED: u64 = u64::MAX - 1;

/// Models that are up, and why there are no more.
#[derive(Debug)]
pub(super) struct Fleet {
    models: Vec<(Server, Endpoint)>,
    /// What the next one said; `None` where nobody asked for a next one.
    pub(super) refusal: Option<String>,
    /// Behind the servers: they are gone when their folders go.
    labs: Vec<Lab>,
}

/// Whose budget a model gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Budget {
    /// All share one.
    Shared,
    /// Each has one to itself.
    Each,
}

impl Fleet {
    pub(super) fn endpoints(&self) -> Vec<Endpoint> {
        self.models.iter().map(|(_, endpoint)| endpoint.clone()).collect()
    }

    pub(super) fn len(&self) -> usize {
        self.models.len()
    }
}

/// One side's count.
#[derive(Clone, Debug)]
pub(super) struct Counted {
    pub(super) serving: usize,
    pub(super) refusal: Option<String>,
}

/// Counts both sides, A first. The servers of A are gone before those of B start.
pub(super) fn count(plan: &Plan, session: &Session, progress: &Progress) -> anyhow::Result<[Counted; 2]> {
    let mut counted = Vec::new();
    for arm in Arm::BOTH {
        progress.now(format!("starting models of side {arm:?}"));
        let fleet = match &plan.kind {
            Kind::Urls(urls) => reach(plan, session, &urls[arm.index()])?,
            Kind::Commands(_) | Kind::KvServe => {
                start(plan, session, plan.max_models, Budget::Shared, |lab, n| launch(plan, arm, lab, n))?
            }
        };
        if fleet.len() == 0 {
            bail!("not even one model of side {arm:?} could be started: {}", fleet.refusal.unwrap_or_default());
        }
        counted.push(Counted { serving: serving(plan, session, &fleet)?, refusal: fleet.refusal });
        progress.step();
    }
    counted.try_into().ok().context("two sides")
}

/// How the n-th model of a side comes up, on the budget of `lab`.
fn launch(plan: &Plan, arm: Arm, lab: &Lab, n: usize) -> Launch {
    match &plan.kind {
        Kind::Commands(lines) => {
            let line = lines[arm.index()].replace("{n}", &n.to_string());
            Launch::Command { line, url: None, variables: plan.variables.clone() }
        }
        Kind::KvServe | Kind::Urls(_) => kvserve(plan, arm, lab, n),
    }
}

/// The n-th kvserve of a side, on the budget of `lab`.
pub(super) fn kvserve(plan: &Plan, arm: Arm, lab: &Lab, n: usize) -> Launch {
    let memory = match arm {
        Arm::A => Memory::Static(Some(plan.model_kv_bytes)),
        Arm::B => Memory::Elastic,
    };
    let mut kvserve = KvServe::new(lab, &plan.model(n), &format!("model-{n}"), memory, plan.kv_budget_bytes);
    kvserve.backend = plan.backend;
    kvserve.variables.clone_from(&plan.variables);
    Launch::KvServe(kvserve)
}

/// Starts models until one is refused or there are `most`.
pub(super) fn start(
    plan: &Plan,
    session: &Session,
    most: usize,
    budget: Budget,
    launch: impl Fn(&Lab, usize) -> Launch,
) -> anyhow::Result<Fleet> {
    let mut fleet = Fleet { models: Vec::new(), refusal: None, labs: vec![Lab::new()?] };
    for n in 1..=most {
        if budget == Budget::Each && n > 1 {
            fleet.labs.push(Lab::new()?);
        }
        let launch = launch(fleet.labs.last().context("a folder")?, n);
        match Server::start(&launch, plan.start_timeout, session) {
            Ok(server) => {
                let model = match &launch {
                    Launch::KvServe(kvserve) => kvserve.name.clone(),
                    Launch::Command { .. } | Launch::Url(_) => served_model(session, server.url())?,
                };
                let endpoint = Endpoint::new(server.url().clone(), Api::Completions, model);
                fleet.models.push((server, endpoint));
            }
            Err(error) if session.is_interrupted() => return Err(error.into()),
            Err(error) => {
                fleet.refusal = Some(match error {
                    ServerError::Ended { tail, .. } => tail,
                    other => other.to_string(),
                });
                break;
            }
        }
    }
    Ok(fleet)
}

/// Servers that are there.
fn reach(plan: &Plan, session: &Session, urls: &[BaseUrl]) -> anyhow::Result<Fleet> {
    let mut fleet = Fleet { models: Vec::new(), refusal: None, labs: Vec::new() };
    for url in urls {
        let server = Server::start(&Launch::Url(url.clone()), plan.start_timeout, session)?;
        let endpoint = Endpoint::new(url.clone(), Api::Completions, served_model(session, url)?);
        fleet.models.push((server, endpoint));
    }
    Ok(fleet)
}

/// How many of them answer everything while all of them are asked.
fn serving(plan: &Plan, session: &Session, fleet: &Fleet) -> anyhow::Result<usize> {
    let (_, lengths) = plan.profiles.first().context("a profile is needed")?;
    let of = |(n, endpoint): (usize, Endpoint)| {
        stream(&format!("model-{}", n + 1), endpoint, *lengths, PROOF_REQUESTS, Arrivals::poisson(plan.rate))
    };
    let streams: Vec<_> = fleet.endpoints().into_iter().enumerate().map(of).collect();
    let models = streams.len();
    let driven = drive(session, streams, mixed(plan.seed, PROOF_SEED))?;
    Ok((0..models).filter(|&model| Answers::of(&driven, model).completed == PROOF_REQUESTS).count())
}
