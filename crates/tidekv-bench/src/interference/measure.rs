//! Slices, in the order of the plan.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use tidekv_core::units::Bytes;
use tidekv_mem::BackendName;

use super::MapRate;
use super::neighbour::{Order, Pace, Rested, Word};
use super::plan::Plan;
use crate::host::HostInfo;
use crate::lab::{Lab, PoolSpec};
use crate::load::{Api, Arrivals, Endpoint};
use crate::progress::Progress;
use crate::ranks::{OPEN_TIMEOUT, Ranks};
use crate::servers::drive::{Answers, drive, stream};
use crate::servers::kvserve::{Backend, KvServe, Memory};
use crate::servers::session::Session;
use crate::servers::sides::Arm;
use crate::servers::{Launch, Server};

/// How long a server may take to make its model.
const START_TIMEOUT: Duration = Duration::from_secs(600);
/// How long the neighbour may take for its first pages, and to give all of them back.
const MAP_TIMEOUT: Duration = Duration::from_secs(60);
/// The model's name for clients, and its pool's.
const NAME: &str = "model";

/// What was seen, rate by rate.
#[derive(Debug, Default)]
pub(super) struct Measured {
    pub(super) rates: Vec<RateSlices>,
    /// Whether somebody interrupted it.
    pub(super) is_partial: bool,
}

/// What was seen of one rate.
#[derive(Debug)]
pub(super) struct RateSlices {
    pub(super) rate: MapRate,
    /// Quiet and mapping, pair by pair.
    pub(super) slices: [Vec<Answers>; 2],
    /// What the neighbour did in each of the latter.
    pub(super) rested: Vec<Rested>,
}

pub(super) fn measure(plan: &Plan, session: &Session, progress: &Progress) -> anyhow::Result<(HostInfo, Measured)> {
    let memory = match plan.backend {
        Backend::Cpu => BackendName::Host,
        Backend::Cuda => BackendName::Cuda,
    };
    // Where there is no such device, this says so before a server does. It is closed again: a device is the server's and the neighbour's.
    let host = HostInfo::with_backend(tidekv_mem::open(memory, 0)?.capabilities());
    let mut measured = Measured::default();
    if let Some(mut stage) = session.unless_interrupted(Stage::set(plan, memory, session))? {
        for &rate in &plan.map_rates {
            measured.rates.extend(stage.rate(rate, progress)?);
        }
        // Whatever was interrupted ends without being asked.
        session.unless_interrupted(stage.neighbour.dismiss())?;
    }
    measured.is_partial = session.is_interrupted();
    Ok((host, measured))
}

/// A server that answers, and a neighbour that waits for orders.
struct Stage<'a> {
    plan: &'a Plan,
    session: &'a Session,
    neighbour: Ranks<Word>,
    endpoint: Endpoint,
    _server: Server,
    /// Behind both: they are gone when their folder goes.
    _lab: Lab,
}

impl<'a> Stage<'a> {
    fn set(plan: &'a Plan, memory: BackendName, session: &'a Session) -> anyhow::Result<Self> {
        let lab = Lab::new()?;
        let pages = plan.neighbour_pages();
        // Both share a ledger, and neither ever wants what the other has.
        let neighbours = plan.page_bytes * u64::from(pages);
        let budget = plan.kv_budget_bytes + neighbours;
        let mut kvserve = KvServe::new(&lab, &plan.model, NAME, Memory::Elastic, budget);
        kvserve.backend = plan.backend;
        let server = Server::start(&Launch::KvServe(kvserve), START_TIMEOUT, session)?;
        let endpoint = Endpoint::new(server.url().clone(), Api::Completions, NAME);
        let program = tidekv_cli::program::named_path().context("finding kvbench itself, to start the neighbour")?;
        let mut neighbour = Ranks::start(&program, "map-neighbour", 1)?;
        let mut spec = PoolSpec::new("kvbench_neighbour", lab.path(), Bytes(plan.page_bytes), pages);
        memory.name().clone_into(&mut spec.backend);
        (spec.budget_bytes, spec.floor_bytes) = (budget, neighbours);
        neighbour.ask(&[(0, Order::Open(spec))], OPEN_TIMEOUT, "opening its pool")?;
        let stage = Self { plan, session, neighbour, endpoint, _server: server, _lab: lab };
        // The first answers load kernels and capture graphs, and the pool grows to what all further ones need.
        stage.slice()?;
        Ok(stage)
    }

    /// All pairs of a rate, or those that were whole when somebody interrupted; `None` where there was none.
    fn rate(&mut self, rate: MapRate, progress: &Progress) -> anyhow::Result<Option<RateSlices>> {
        let mut seen = RateSlices { rate, slices: [Vec::new(), Vec::new()], rested: Vec::new() };
        for pair in 0..self.plan.pairs {
            let slices = self.pair(rate, Arm::order(pair as usize), progress);
            let Some(([quiet, mapping], rested)) = self.session.unless_interrupted(slices)? else { break };
            seen.slices[Arm::A.index()].push(quiet);
            seen.slices[Arm::B.index()].push(mapping);
            seen.rested.push(rested);
        }
        Ok((!seen.rested.is_empty()).then_some(seen))
    }

    /// Quiet and mapping, in this order or the other, and what the neighbour did.
    fn pair(&mut self, rate: MapRate, order: [Arm; 2], progress: &Progress) -> anyhow::Result<([Answers; 2], Rested)> {
        let (mut slices, mut rested) = ([Answers::default(), Answers::default()], None);
        for arm in order {
            progress.now(format!("{rate}, {}", if arm == Arm::A { "quiet" } else { "mapping" }));
            slices[arm.index()] = match arm {
                Arm::A => self.slice()?,
                Arm::B => {
                    self.map(rate)?;
                    let answers = self.slice();
                    // Told to rest whatever became of the slice.
                    rested = Some(self.rest()?);
                    answers?
                }
            };
            progress.step();
        }
        Ok((slices, rested.context("no slice of the pair had the neighbour mapping")?))
    }

    /// One answer for every stream, all at once. The prompts are those of every slice: the server's own memory stays as it is.
    fn slice(&self) -> anyhow::Result<Answers> {
        let streams = self.plan.streams as usize;
        let mut load = stream("load", self.endpoint.clone(), self.plan.lengths, streams, Arrivals::Immediately);
        load.max_concurrency = Some(streams);
        let driven = drive(self.session, vec![load], self.plan.seed)?;
        let answers = Answers::of(&driven, 0);
        ensure!(
            answers.completed > 0,
            "none of the {streams} requests was answered: {}",
            answers.first_failure.as_deref().unwrap_or("the server said nothing")
        );
        Ok(answers)
    }

    fn map(&mut self, rate: MapRate) -> anyhow::Result<()> {
        let plan = self.plan;
        let (batch, keep, touch) = (plan.map_batch, plan.pages, plan.touch);
        let pace = Pace { pages_per_s: rate.per_s(), batch, keep, touch };
        self.neighbour.ask(&[(0, Order::Map(pace))], MAP_TIMEOUT, "mapping").map(drop)
    }

    fn rest(&mut self) -> anyhow::Result<Rested> {
        match self.neighbour.ask(&[(0, Order::Rest)], MAP_TIMEOUT, "coming to rest")?.pop() {
            Some(Word::Rested(rested)) => Ok(rested),
            other => bail!("the neighbour was told to rest and said {other:?}"),
        }
    }
}
