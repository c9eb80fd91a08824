//! What sharing costs: all models of a side asked together, slice by slice, elastic on one budget beside static with one each.

use anyhow::ensure;

use super::fit::{Budget, Counted, Fleet, kvserve, start};
use super::{Kind, Plan};
use crate::compare::judge::Tolerance;
use crate::lab::Lab;
use crate::load::data::mixed;
use crate::load::{Arrivals, Endpoint};
use crate::overhead::judge::{Figures, judge_blocks};
use crate::overhead::measure::Pair;
use crate::progress::Progress;
use crate::servers::drive::{Answers, Lengths, drive, stream};
use crate::servers::session::Session;
use crate::servers::sides::Arm;

/// One profile: the slices of both sides, all models of a slice together, and what they come to.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) profile: &'static str,
    pub(super) pairs: Vec<Pair>,
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
    let begin = || Ok([fleet(Arm::A, Budget::Each)?, fleet(Arm::B, Budget::Shared)?]);
    let Some(fleets) = session.unless_interrupted(begin())? else { return Ok(Vec::new()) };
    for (arm, fleet) in Arm::BOTH.iter().zip(&fleets) {
        ensure!(fleet.len() == models, "a model of side {arm:?} did not start again: {:?}", fleet.refusal);
    }
    let mut measured = Vec::new();
    for (place, &(profile, lengths)) in (0..).zip(&plan.profiles) {
        let mut pairs: Vec<Pair> = Vec::new();
        // The first pair warms both sides up and is not kept.
        for pair in 0..=plan.pairs {
            progress.now(format!("{profile}, {models} models"));
            let seed = mixed(plan.seed, mixed(place, u64::from(pair)));
            let mut slices: [Option<Answers>; 2] = [None, None];
            for arm in Arm::order(pair as usize) {
                let measured = slice(plan, session, &fleets[arm.index()], lengths, seed);
                slices[arm.index()] = session.unless_interrupted(measured)?;
            }
            match slices {
                [Some(a), Some(b)] if pair > 0 => {
                    pairs.push(Pair { sides: [a, b], first: Arm::order(pair as usize)[0] });
                    progress.step();
                }
                _ => {}
            }
            if session.is_interrupted() {
                break;
            }
        }
        let figures = judge_blocks(&pairs.chunks(1).collect::<Vec<_>>(), tolerance);
        measured.push(Measured { profile, pairs, figures });
        if session.is_interrupted() {
            break;
        }
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
    for model in 0..models {
        let answers = Answers::of(&driven, model);
        longest = longest.max(answers.duration);
        all.extend(&answers);
    }
    // The models ran side by side: time is not added up, and memory is.
    all.duration = longest;
    all.memory = driven.memory_together();
    ensure!(all.completed > 0, "no model answered: {}", all.first_failure.unwrap_or_default());
    Ok(all)
}
