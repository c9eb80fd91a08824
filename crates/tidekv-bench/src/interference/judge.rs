//! From pairs of slices to ratios with intervals and one verdict. Pure.

use tidekv_cli::exit::Outcome;

use super::MapRate;
use super::measure::{Measured, RateSlices};
use super::neighbour::Rested;
use super::plan::{Plan, Tolerances};
use crate::compare::direction::Direction;
use crate::compare::judge::{Judged, Tolerance, Verdict, judge_pairs};
use crate::compare::ratios::worst;
use crate::overhead::report::all_of;
use crate::servers::drive::Answers;
use crate::statistics::Confidence;
use crate::stats::{Samples, to_f64};

/// A figure of a slice, which way is good, and how far it may move.
pub(super) struct Figure {
    pub(super) name: &'static str,
    direction: Direction,
    of: fn(&Answers) -> Option<f64>,
    tolerance: fn(Tolerances) -> Tolerance,
}

/// What is judged at every rate.
pub(super) const FIGURES: [Figure; 3] = [
    Figure {
        name: "itl_p50",
        direction: Direction::Lower,
        of: |slice| percentile(&slice.itl, 50),
        tolerance: |tolerances| tolerances.median,
    },
    Figure {
        name: "itl_p99",
        direction: Direction::Lower,
        of: |slice| percentile(&slice.itl, 99),
        tolerance: |tolerances| tolerances.tail,
    },
    Figure {
        name: "tokens_per_s",
        direction: Direction::Higher,
        of: Answers::tokens_per_s,
        tolerance: |tolerances| tolerances.tail,
    },
];

fn percentile(times: &Samples, percent: usize) -> Option<f64> {
    times.percentile(percent).map(to_f64)
}

/// One rate.
#[derive(Debug)]
pub(super) struct RateVerdict {
    pub(super) rate: MapRate,
    /// In the order of [`FIGURES`]; `None` for a figure that a side does not have.
    pub(super) figures: [Option<Judged>; FIGURES.len()],
    /// Quiet and mapping, all slices together.
    pub(super) sides: [Answers; 2],
    /// The median gap and the 99th percentile of each slice of both: what the ratios are made of.
    pub(super) slices: [[Samples; 2]; 2],
    pub(super) neighbour: Neighbour,
}

/// What the neighbour did at one rate, all slices together.
#[derive(Debug)]
pub(super) struct Neighbour {
    pub(super) pages_per_s: f64,
    pub(super) map: Samples,
    pub(super) unmap: Samples,
}

/// All rates, and what they come to.
#[derive(Debug)]
pub(super) struct Judgement {
    pub(super) rates: Vec<RateVerdict>,
    pub(super) failed: usize,
    pub(super) is_partial: bool,
    tolerances: Tolerances,
}

pub(super) fn judge(plan: &Plan, measured: &Measured) -> Judgement {
    let tolerances = plan.tolerances;
    let failed = measured.rates.iter().flat_map(|rate| rate.slices.iter().flatten()).map(|slice| slice.failed).sum();
    let rates = measured.rates.iter().map(|rate| of_rate(rate, tolerances)).collect();
    Judgement { rates, failed, is_partial: measured.is_partial, tolerances }
}

fn of_rate(seen: &RateSlices, tolerances: Tolerances) -> RateVerdict {
    let [quiet, mapping] = &seen.slices;
    let figures = FIGURES.map(|figure| {
        let of = |(a, b): (&Answers, &Answers)| Some(((figure.of)(a)?, (figure.of)(b)?));
        let pairs: Vec<(f64, f64)> = quiet.iter().zip(mapping).filter_map(of).collect();
        let tolerance = (figure.tolerance)(tolerances);
        (!pairs.is_empty()).then(|| judge_pairs(figure.direction, &pairs, tolerance, Confidence::USUAL))
    });
    let sides = [all_of(quiet), all_of(mapping)];
    let of = |slices: &[Answers], percent| slices.iter().filter_map(|slice| slice.itl.percentile(percent)).collect();
    let slices = [quiet, mapping].map(|slices| [50, 99].map(|percent| of(slices, percent)));
    RateVerdict { rate: seen.rate, figures, sides, slices, neighbour: Neighbour::of(&seen.rested) }
}

impl Neighbour {
    fn of(slices: &[Rested]) -> Self {
        let seconds: f64 = slices.iter().map(|slice| slice.seconds).sum();
        let pages: u64 = slices.iter().map(|slice| slice.pages).sum();
        Self {
            pages_per_s: to_f64(pages) / seconds.max(1e-9),
            map: slices.iter().flat_map(|slice| slice.map_ns.iter().copied()).collect(),
            unmap: slices.iter().flat_map(|slice| slice.unmap_ns.iter().copied()).collect(),
        }
    }
}

impl RateVerdict {
    /// The worst of its figures.
    pub(super) fn verdict(&self) -> Verdict {
        worst(&self.figures)
    }
}

impl Judgement {
    /// What the verdict is about: rates that somebody may have. `max` shows where the device's limit is, and is judged only
    /// where nothing else was asked for.
    fn deciding(&self) -> impl Iterator<Item = &RateVerdict> {
        let is_alone = self.rates.iter().all(|rate| rate.rate == MapRate::Max);
        self.rates.iter().filter(move |rate| is_alone || rate.rate != MapRate::Max)
    }

    fn rates_of(&self, verdict: Verdict) -> Vec<String> {
        self.deciding().filter(|rate| rate.verdict() == verdict).map(|rate| rate.rate.to_string()).collect()
    }

    /// One sentence for people and programs.
    pub(super) fn verdict(&self) -> String {
        let Tolerances { median, tail } = self.tolerances;
        let (worse, unsure) = (self.rates_of(Verdict::Worse), self.rates_of(Verdict::Underpowered));
        if self.failed > 0 {
            format!("{} requests failed: nothing is concluded", self.failed)
        } else if self.is_partial {
            "interrupted: nothing is concluded".to_owned()
        } else if !worse.is_empty() {
            format!("interference beyond {median} of the median or {tail} of the tail at {}", worse.join(", "))
        } else if !unsure.is_empty() {
            format!("underpowered at {}: too noisy to tell", unsure.join(", "))
        } else {
            format!("no interference beyond {median} of the median and {tail} of the tail")
        }
    }

    /// Whether there is none, beyond doubt.
    pub(super) fn outcome(&self) -> Outcome {
        let is_whole = self.failed == 0 && !self.is_partial;
        let is_clear = is_whole && self.deciding().all(|rate| rate.verdict() == Verdict::NoDifference);
        if is_clear { Outcome::Done } else { Outcome::Negative }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::plan::tests::plan;
    use super::*;
    use crate::random::Random;

    /// A slice whose gaps are 10 ms give or take a hundredth, and one in fifty `tail` times as long.
    fn slice(random: &mut Random, body: f64, tail: f64) -> Answers {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "ten milliseconds or so")]
        let gap = |at: u32| {
            (1e7 * body * if at.is_multiple_of(50) { tail } else { 1.0 } * (0.995 + random.unit() / 100.0)) as u64
        };
        let itl: Samples = (0..400).map(gap).collect();
        Answers { itl, completed: 8, output_tokens: 400, duration: Duration::from_secs(4), ..Answers::default() }
    }

    fn judged(pairs: usize, body: f64, tail: f64) -> Judgement {
        judge(&plan("").unwrap(), &measured(vec![slices(MapRate::Pages(100.0), pairs, body, tail)]))
    }

    fn measured(rates: Vec<RateSlices>) -> Measured {
        Measured { rates, is_partial: false }
    }

    fn slices(rate: MapRate, pairs: usize, body: f64, tail: f64) -> RateSlices {
        let mut random = Random::seeded(5);
        let quiet = (0..pairs).map(|_| slice(&mut random, 1.0, 1.5)).collect();
        let mapping = (0..pairs).map(|_| slice(&mut random, body, 1.5 * tail)).collect();
        let rested = Rested { pages: 50, seconds: 0.5, map_ns: vec![30_000; 50], unmap_ns: vec![20_000; 34] };
        RateSlices { rate, slices: [quiet, mapping], rested: vec![rested; pairs] }
    }

    #[test]
    fn equal_slices_show_none_and_slower_ones_do() {
        let none = judged(12, 1.0, 1.0);
        assert_eq!(none.verdict(), "no interference beyond 2 % of the median and 10 % of the tail");
        assert_eq!(none.outcome(), Outcome::Done);
        let slower = judged(12, 1.05, 1.0);
        assert_eq!(slower.verdict(), "interference beyond 2 % of the median or 10 % of the tail at 100/s");
        assert_eq!(slower.outcome(), Outcome::Negative);
    }

    #[test]
    fn a_longer_tail_is_interference_though_the_median_stays() {
        let judged = judged(12, 1.0, 1.5);
        let [median, tail, _] = judged.rates[0].figures.map(|figure| figure.unwrap().verdict);
        assert_eq!((median, tail), (Verdict::NoDifference, Verdict::Worse));
        assert_eq!(judged.outcome(), Outcome::Negative);
    }

    #[test]
    fn the_limit_of_the_device_is_reported_and_decides_only_where_it_is_alone() {
        let (fine, slow) = (slices(MapRate::Pages(100.0), 12, 1.0, 1.0), slices(MapRate::Max, 12, 1.05, 1.0));
        let both = judge(&plan("").unwrap(), &measured(vec![fine, slow]));
        assert_eq!((both.rates[1].verdict(), both.outcome()), (Verdict::Worse, Outcome::Done));
        assert!(both.verdict().starts_with("no interference"), "{}", both.verdict());
        let alone = judge(&plan("").unwrap(), &measured(vec![slices(MapRate::Max, 12, 1.05, 1.0)]));
        assert_eq!(alone.outcome(), Outcome::Negative);
        assert!(alone.verdict().ends_with("at max"), "{}", alone.verdict());
    }

    #[test]
    fn few_pairs_are_underpowered_and_not_a_pass() {
        let judged = judged(2, 1.0, 1.0);
        assert_eq!(judged.verdict(), "underpowered at 100/s: too noisy to tell");
        assert_eq!(judged.outcome(), Outcome::Negative);
    }

    #[test]
    fn a_failed_request_forbids_a_conclusion() {
        let mut judged = judged(12, 1.0, 1.0);
        judged.failed = 2;
        assert!(judged.verdict().starts_with("2 requests failed"));
        assert_eq!(judged.outcome(), Outcome::Negative);
    }

    #[test]
    fn an_interrupted_run_shows_what_it_has_and_concludes_nothing() {
        let rates = vec![slices(MapRate::Pages(100.0), 12, 1.0, 1.0)];
        let judged = judge(&plan("").unwrap(), &Measured { rates, is_partial: true });
        assert_eq!(judged.verdict(), "interrupted: nothing is concluded");
        assert_eq!((judged.outcome(), judged.rates[0].verdict()), (Outcome::Negative, Verdict::NoDifference));
    }

    #[test]
    fn what_the_neighbour_did_is_added_up() {
        let neighbour = &judged(3, 1.0, 1.0).rates[0].neighbour;
        assert!((neighbour.pages_per_s - 100.0).abs() < 1e-9);
        assert_eq!((neighbour.map.len(), neighbour.unmap.len()), (150, 102));
    }
}
