//! What sharing costs: all models of a side asked together, slice by slice, elastic on one budget beside static with one each.

use anyhow::ensure;

use super::fit::{Budget, Counted, Fleet, kvserve, start};
use super::{Kind, Plan};
use crate::compare::judge::Tolerance;
use crate::lab::Lab;
use crate::load::data::mixed;
use crate::load::{Arrivals, Endpoint};
use crate::overhead::judge::{Figures, judge_slices};
use crate::progress::Progress;
use crate::servers::drive::{Answers, Lengths, drive, stream};
use crate::servers::memory::MemorySummary;
use crate::servers::session::Session;
use crate::servers::sides::Arm;

/// One profile: the slices of both sides, all models of a slice together, and what they come to.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) profile: &'static str,
    pub(super) slices: [Vec<Answers>; 2],
    pub(super) figures: Figures,
}

/// Measures every profile with as many models as fit. Nothing with commands and URLs: their sides are never up together.
pub(super) fn measure(
    plan: &Plan,
    session: &Session,
    counted: &[Counted; 2],
    tolerance: Tolerance,
    progress: &Progress,
) -> anyhow::Result<Vec<Measured>> {
    if plan.seconds == 0.0 || !matches!(plan.kind, Kind::KvServe) {
        return Ok(Vec::new());
    }
    let models = counted[Arm::B.index()].serving.max(1);
    let fleet = |arm, budget| start(plan, session, models, budget, |lab: &Lab, n| kvserve(plan, arm, lab, n));
    let fleets = [fleet(Arm::A, Budget::Each)?, fleet(Arm::B, Budget::Shared)?];
    for (arm, fleet) in Arm::BOTH.iter().zip(&fleets) {
        ensure!(fleet.len() == models, "a model of side {arm:?} did not start again: {:?}", fleet.refusal);
    }
    let mut measured = Vec::new();
    for (place, &(profile, lengths)) in (0..).zip(&plan.profiles) {
        let mut slices = [Vec::new(), Vec::new()];
        // The first pair warms both sides up and is not kept.
        for pair in 0..=plan.pairs {
            progress.now(format!("{profile}, {models} models"));
            for arm in Arm::order(pair as usize) {
                let seed = mixed(plan.seed, mixed(place, u64::from(pair)));
                let slice = slice(plan, session, &fleets[arm.index()], lengths, seed)?;
                if pair > 0 {
                    slices[arm.index()].push(slice);
                }
            }
            if pair > 0 {
                progress.step();
            }
        }
        let figures = judge_slices(&slices[0], &slices[1], tolerance);
        measured.push(Measured { profile, slices, figures });
    }
    Ok(measured)
}

/// All models of a side for a while.
fn slice(plan: &Plan, session: &Session, fleet: &Fleet, lengths: Lengths, seed: u64) -> anyhow::Result<Answers> {
    let seconds = plan.seconds / (2.0 * f64::from(plan.pairs));
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "rounded and clamped")]
    let requests = (plan.rate * seconds).round().clamp(1.0, 1e6) as usize;
    let of = |(n, endpoint): (usize, Endpoint)| {
        stream(&format!("model-{}", n + 1), endpoint, lengths, requests, Arrivals::poisson(plan.rate))
    };
    let streams: Vec<_> = fleet.endpoints().into_iter().enumerate().map(of).collect();
    let models = streams.len();
    let driven = drive(session, streams, seed)?;
    let mut all = Answers::default();
    let mut longest = std::time::Duration::ZERO;
    let mut memory = Vec::new();
    for model in 0..models {
        let answers = Answers::of(&driven, model);
        longest = longest.max(answers.duration);
        memory.extend(answers.memory);
        all.extend(&answers);
    }
    // The models ran side by side: time is not added up, and memory is.
    all.duration = longest;
    all.memory = (memory.len() == models).then(|| MemorySummary::sum(&memory));
    ensure!(all.completed > 0, "no model answered: {}", all.first_failure.unwrap_or_default());
    Ok(all)
}
