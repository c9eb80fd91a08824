//! What this machine can do: requests a second when memory is no bound, and the memory in use at a share of that.

use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::Plan;
use super::scenario::Scenario;
use super::timing::Pace;
use crate::lab::Lab;
use crate::load::data::mixed;
use crate::load::{Api, Arrivals, Endpoint};
use crate::progress::Progress;
use crate::servers::drive::{Answers, Driven, drive, stream};
use crate::servers::kvserve::{Backend, KvServe, Memory};
use crate::servers::memory::{KvPage, KvUse};
use crate::servers::session::Session;
use crate::servers::{Launch, Server};
use crate::stats::to_f64;

/// More than any peak needs: of small models on the processor, and of real ones on a GPU.
const BUDGET: u64 = 1 << 30;
const BUDGET_ON_GPU: u64 = 24 << 30;
/// Requests under way that keep any machine busy; what more of them bring is little.
const BUSY: usize = 48;
/// A part of the budget is a whole number of these: little beside what a request needs, or peaks would need less of the
/// budget than they should.
const ROUND_BYTES: u64 = 128 << 10;
const METRICS_TIMEOUT: Duration = Duration::from_secs(5);
const SEED: u64 = u64::MAX - 2;
/// On the processor pages of synthetic models are small enough for budgets of a few MiB.
const CHUNK: &str = "16K";
/// How long kvserve may take to start; a folder of weights takes a while.
pub(super) const START_TIMEOUT: Duration = Duration::from_secs(600);

/// See the [module](self).
#[derive(Clone, Debug)]
pub(super) struct Calibration {
    /// Requests a second.
    pub(super) capacity_per_s: f64,
    /// In use at the first scenario's share of that.
    pub(super) in_use_bytes: f64,
    /// What all models may hold together.
    pub(super) budget_bytes: u64,
    /// From a server's start to its first answer.
    pub(super) start_s: f64,
    /// One answer at the first scenario's share of what the machine computes.
    pub(super) answer_s: f64,
}

impl Calibration {
    pub(super) fn pace(&self) -> Pace {
        Pace { capacity_per_s: self.capacity_per_s, start_s: self.start_s, answer_s: self.answer_s }
    }

    /// Requests a second of a scenario's peak.
    pub(super) fn rate(&self, scenario: &Scenario) -> f64 {
        self.capacity_per_s * scenario.offered
    }
}

/// A server of model `n`, counted from 0.
pub(super) fn kvserve(plan: &Plan, lab: &Lab, n: usize, memory: Memory, budget_bytes: u64) -> Launch {
    let mut kvserve = KvServe::new(lab, &plan.models[n], &plan.names[n], memory, budget_bytes);
    kvserve.backend = plan.backend;
    kvserve.variables.clone_from(&plan.variables);
    let sets_page = |(name, _): &(String, String)| name == "KVCACHED_PAGE_SIZE_MB";
    if plan.backend == Backend::Cpu && plan.models[n].starts_with("synthetic:") && !plan.variables.iter().any(sets_page)
    {
        kvserve.flags = ["--kv-chunk", CHUNK].map(Into::into).to_vec();
    }
    Launch::KvServe(kvserve)
}

pub(super) fn calibrate(plan: &Plan, session: &Session, progress: &Progress) -> anyhow::Result<Calibration> {
    progress.now("s, measuring the machine");
    let scenario = &plan.scenarios[0];
    let lab = Lab::new()?;
    let most = if plan.backend == Backend::Cpu { BUDGET } else { BUDGET_ON_GPU };
    let starting = Instant::now();
    let server = Server::start(&kvserve(plan, &lab, 0, Memory::Elastic, most), START_TIMEOUT, session)?;
    let start_s = starting.elapsed().as_secs_f64();
    let endpoint = Endpoint::new(server.url().clone(), Api::Completions, &plan.names[0]);
    let run = |requests: usize, arrivals: Option<f64>, nth: u64| {
        let way = arrivals.map_or(Arrivals::Immediately, |per_s| scenario.arrivals(per_s));
        let mut stream = stream("calibration", endpoint.clone(), scenario.lengths(), requests, way);
        stream.max_concurrency = arrivals.is_none().then_some(BUSY);
        drive(session, vec![stream], mixed(plan.seed, SEED - nth))
    };
    let per_s = |driven: &Driven| {
        let answers = Answers::of(driven, 0);
        let why = answers.first_failure.clone().unwrap_or_default();
        answers.requests_per_s().with_context(|| format!("measuring the machine: {why}"))
    };
    // The first look warms up and says how many requests the second takes.
    let first = per_s(&run(BUSY, None, 0)?)?;
    let capacity_per_s = per_s(&run(requests_in(first, plan, BUSY), None, 1)?)?;
    let offered_per_s = capacity_per_s * scenario.offered;
    let driven = run(requests_in(offered_per_s, plan, 1), Some(offered_per_s), 2)?;
    // Nothing was in use whenever somebody looked: a load so small fits into the smallest budget.
    let in_use_bytes = height(&driven.memory.of(0)).unwrap_or(0.0);
    let answer_s = Answers::of(&driven, 0).e2e.percentiles().map_or(0.0, |e2e| e2e.avg / 1e9);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a part of a u64, not negative")]
    let budget_bytes = match plan.kv_budget_bytes {
        Some(bytes) => (to_f64(bytes) * plan.utilization) as u64,
        None => {
            let needed_bytes = in_use_bytes / scenario.peak_need * plan.utilization;
            budget(needed_bytes, least_share(plan, session, &server)?, plan.models.len())
        }
    };
    Ok(Calibration { capacity_per_s, in_use_bytes, budget_bytes, start_s, answer_s })
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "rounded and clamped")]
fn requests_in(per_s: f64, plan: &Plan, least: usize) -> usize {
    let requests = (per_s * plan.calibration().as_secs_f64()).round().clamp(1.0, 1e6) as usize;
    requests.max(least)
}

/// What is in use at the height of a load: nine looks of ten are below it, once it has built up.
fn height(looks: &[KvUse]) -> Option<f64> {
    let built_up: Vec<f64> = looks[looks.len() / 3..].iter().map(|look| look.used).collect();
    crate::statistics::quantile(&built_up, 0.9).filter(|&bytes| bytes > 0.0)
}

/// What a model must have to serve anybody: a request of the longest scenario, in whole pages.
fn least_share(plan: &Plan, session: &Session, server: &Server) -> anyhow::Result<f64> {
    let tokens = plan.scenarios.iter().map(|scenario| scenario.input_len.saturating_add(scenario.output_len)).max();
    let metrics = session.pages(std::slice::from_ref(server.url()), "/metrics", METRICS_TIMEOUT).pop().flatten();
    let page = metrics.as_deref().and_then(KvPage::of_metrics);
    let page = page.context("the server does not say how large a page of its memory is: give --kv-budget")?;
    Ok(page.bytes_of(tokens.unwrap_or(0)))
}

/// A budget of at least `bytes` whose even parts are at least `least_share`.
fn budget(bytes: f64, least_share: f64, models: usize) -> u64 {
    let models = u64::try_from(models).unwrap_or(1).max(1);
    let share = (bytes / to_f64(models)).max(least_share);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "bytes in use: not negative, far below 2^53"
    )]
    let units = (share / to_f64(ROUND_BYTES)).ceil() as u64;
    models * ROUND_BYTES * units.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_enough_and_divides() {
        assert_eq!(budget(1000.0 * 1024.0, 0.0, 3), (3 * 384) << 10);
        assert_eq!(budget(1.0, 0.0, 3), (3 * 128) << 10);
    }

    /// Looks saw next to nothing in use, a share was less than a page, and the models could not even start.
    #[test]
    fn a_load_too_small_to_be_seen_has_room_for_a_request_of_each_model() {
        let page_bytes = 160.0 * 1024.0;
        assert_eq!(budget(0.0, page_bytes, 3), (3 * 256) << 10);
        assert_eq!(budget(2e6, page_bytes, 2), budget(2e6, 0.0, 2));
    }

    #[test]
    fn the_height_is_of_what_has_built_up() {
        let look = |used| KvUse { used, held: 0.0 };
        let mut looks = vec![look(0.0); 10];
        looks.extend([look(100.0); 20]);
        assert_eq!(height(&looks), Some(100.0));
        assert_eq!(height(&[look(0.0)]), None);
        assert_eq!(height(&[]), None);
    }
}
