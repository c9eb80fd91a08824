//! From pairs of slices to ratios with intervals and one verdict. Pure.

use tidekv_cli::exit::Outcome;

use super::measure::Measured;
use super::plan::{Cell, Plan};
use crate::compare::direction::Direction;
use crate::compare::judge::{Judged, Tolerance, Verdict, judge_pairs};
use crate::servers::drive::Answers;
use crate::statistics::Bootstrap;
use crate::stats::{Samples, to_f64};

/// A figure of a slice, and which way is good.
pub(crate) struct Figure {
    pub(crate) name: &'static str,
    direction: Direction,
    of: fn(&Answers) -> Option<f64>,
}

/// What is judged at every point.
pub(crate) const FIGURES: [Figure; 4] = [
    Figure { name: "throughput", direction: Direction::Higher, of: Answers::requests_per_s },
    Figure { name: "ttft_p50", direction: Direction::Lower, of: |slice| median(&slice.ttft) },
    Figure { name: "itl_p50", direction: Direction::Lower, of: |slice| median(&slice.itl) },
    Figure { name: "e2e_p50", direction: Direction::Lower, of: |slice| median(&slice.e2e) },
];

fn median(times: &Samples) -> Option<f64> {
    times.percentiles().map(|percentiles| to_f64(percentiles.p50))
}

/// B over A, in the order of [`FIGURES`]; `None` for a figure that a side does not have.
pub(crate) type Figures = [Option<Judged>; FIGURES.len()];

/// B over A at one point.
#[derive(Debug)]
pub(super) struct CellVerdict {
    pub(super) cell: Cell,
    pub(super) figures: Figures,
}

/// All points, and what they come to.
#[derive(Debug)]
pub(super) struct Judgement {
    pub(super) cells: Vec<CellVerdict>,
    pub(super) failed: usize,
    pub(super) tolerance: f64,
}

pub(super) fn judge(plan: &Plan, tolerance: Tolerance, measured: &Measured) -> Judgement {
    let judged = plan
        .cells()
        .into_iter()
        .zip(&measured.cells)
        .map(|(cell, [a, b])| CellVerdict { cell, figures: judge_slices(a, b, tolerance) });
    let failed = measured.cells.iter().flatten().flatten().map(|slice| slice.failed).sum();
    Judgement { cells: judged.collect(), failed, tolerance: tolerance.share() }
}

/// Slices of A and B that lie side by side in time, figure by figure.
pub(crate) fn judge_slices(a: &[Answers], b: &[Answers], tolerance: Tolerance) -> Figures {
    FIGURES.map(|figure| {
        let of = |(a, b): (&Answers, &Answers)| Some(((figure.of)(a)?, (figure.of)(b)?));
        let pairs: Vec<(f64, f64)> = a.iter().zip(b).filter_map(of).collect();
        // Without a pair there is nothing to say: answers of one token have no gaps.
        (!pairs.is_empty()).then(|| judge_pairs(figure.direction, &pairs, tolerance, &Bootstrap::default()))
    })
}

impl Judgement {
    fn any(&self, verdict: Verdict) -> bool {
        self.cells.iter().flat_map(|cell| cell.figures.iter().flatten()).any(|judged| judged.verdict == verdict)
    }

    /// One sentence for people and programs.
    pub(super) fn verdict(&self) -> String {
        let percent = (self.tolerance * 1e8).round() / 1e6;
        if self.failed > 0 {
            format!("{} requests failed: nothing is concluded", self.failed)
        } else if self.any(Verdict::Worse) {
            format!("overhead beyond {percent} %")
        } else if self.any(Verdict::Underpowered) {
            "underpowered: too noisy to tell".to_owned()
        } else {
            format!("no overhead beyond {percent} %")
        }
    }

    /// Whether there is none, beyond doubt.
    pub(super) fn outcome(&self) -> Outcome {
        let is_clear = self.failed == 0 && !self.any(Verdict::Worse) && !self.any(Verdict::Underpowered);
        if is_clear { Outcome::Done } else { Outcome::Negative }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::random::Random;

    /// A slice whose times are `factor` of 10 ms, give or take `noise`.
    fn slice(factor: f64, noise: f64, random: &mut Random) -> Answers {
        let times = |random: &mut Random| -> Samples {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "ten milliseconds or so")]
            let time = |_| (1e7 * factor * (1.0 + noise * (random.unit() - 0.5))) as u64;
            (0..9).map(time).collect()
        };
        let (ttft, itl, e2e) = (times(random), times(random), times(random));
        Answers { ttft, itl, e2e, completed: 9, duration: Duration::from_secs(1), ..Answers::default() }
    }

    fn judged(pairs: u32, elastic: f64, noise: f64) -> Judgement {
        let mut random = Random::seeded(3);
        let plan = Plan { pairs, rates: vec![8.0], saturated: 0, ..super::super::plan::tests::plan(true) };
        let mut side = |factor| (0..pairs).map(|_| slice(factor, noise, &mut random)).collect::<Vec<_>>();
        let measured = Measured { cells: vec![[side(1.0), side(elastic)]] };
        judge(&plan, "3%".parse().unwrap(), &measured)
    }

    #[test]
    fn equal_sides_have_no_overhead_and_slower_ones_do() {
        assert_eq!(judged(12, 1.0, 0.01).verdict(), "no overhead beyond 3 %");
        assert_eq!(judged(12, 1.0, 0.01).outcome(), Outcome::Done);
        assert_eq!(judged(12, 1.08, 0.01).verdict(), "overhead beyond 3 %");
        assert_eq!(judged(12, 1.08, 0.01).outcome(), Outcome::Negative);
    }

    #[test]
    fn a_wide_interval_and_few_pairs_are_underpowered_and_not_a_pass() {
        assert!(judged(12, 1.0, 0.9).verdict().starts_with("underpowered"));
        assert!(judged(4, 1.0, 0.01).verdict().starts_with("underpowered"));
        assert_eq!(judged(4, 1.0, 0.01).outcome(), Outcome::Negative);
    }

    #[test]
    fn less_than_none_is_no_overhead() {
        assert_eq!(judged(12, 0.8, 0.01).outcome(), Outcome::Done);
    }

    #[test]
    fn a_failed_request_forbids_a_conclusion() {
        let mut judgement = judged(12, 1.0, 0.01);
        judgement.failed = 1;
        assert_eq!(judgement.outcome(), Outcome::Negative);
        assert!(judgement.verdict().starts_with("1 requests failed"));
    }
}
