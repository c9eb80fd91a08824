//! From rounds of slices to ratios with intervals and one verdict. Pure.
//!
//! ```text
//!   round 1   A B B A A B   median of all of B's slices / median of all of A's    1.004 ┐
//!   round 2   B A A B B A                                                        0.997 ├── middle and interval
//!   ...                                                                            ... ┘
//! ```
//!
//! Slices of a round take turns, so whatever the machine does meets both sides of it alike, and their requests are put together
//! before a median is taken: the median of forty requests is far sharper than the mean of ten medians of four.
//!
//! The unit of the interval is the round. Pairs of one round share two processes, with their addresses, their pages and their
//! places on the cores, and a few seconds of the machine; what is common to them must not count as often as there are pairs.
//!
//! There are some thirty intervals, and one in twenty leaves out what is true. So an overhead is *called* only where it holds for
//! all of them together (Holm: the smallest probability times their number, the next times one less, ...); one that would not
//! is underpowered. For *none* nothing is relaxed: every single interval has to be inside.

use tidekv_cli::exit::Outcome;

use super::measure::{Block, Measured, Pair};
use super::plan::{Cell, Plan};
use super::report::together;
use crate::compare::direction::Direction;
use crate::compare::judge::{Judged, Tolerance, Verdict, judge_pairs};
use crate::servers::drive::Answers;
use crate::statistics::{Confidence, hodges_lehmann};
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
    Figure { name: "itl_p50", direction: Direction::Lower, of: |slice| median(&slice.mean_itl) },
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
    pub(super) is_partial: bool,
}

pub(super) fn judge(plan: &Plan, tolerance: Tolerance, measured: &Measured) -> Judgement {
    let judged = plan
        .cells()
        .into_iter()
        .zip(&measured.cells)
        .map(|(cell, blocks)| CellVerdict { cell, figures: judge_blocks(blocks, tolerance) });
    let mut cells: Vec<CellVerdict> = judged.collect();
    hold_together(&mut cells);
    let failed = measured.cells.iter().flatten().flatten().flatten().map(|slice| slice.failed).sum();
    Judgement { cells, failed, tolerance: tolerance.share(), is_partial: measured.is_partial }
}

/// Takes back what would not be called worse if all figures were asked about at once.
fn hold_together(cells: &mut [CellVerdict]) {
    let mut all: Vec<&mut Judged> = cells.iter_mut().flat_map(|cell| cell.figures.iter_mut().flatten()).collect();
    all.sort_by(|one, other| one.p_value.total_cmp(&other.p_value));
    let count = all.len() as u64;
    let mut holds = true;
    for (place, judged) in (0..).zip(all) {
        holds &= judged.p_value * to_f64(count - place) <= Confidence::USUAL.risk();
        if judged.verdict == Verdict::Worse && !holds {
            judged.verdict = Verdict::Underpowered;
        }
    }
}

/// Blocks of slices, figure by figure.
pub(crate) fn judge_blocks(blocks: &[impl AsRef<[Pair]>], tolerance: Tolerance) -> Figures {
    FIGURES.map(|figure| {
        let ratios: Vec<(f64, f64)> = changes(&figure, blocks).map(|change| (1.0, change.exp())).collect();
        // Without a pair there is nothing to say: answers of one token have no gaps.
        (!ratios.is_empty()).then(|| judge_pairs(figure.direction, &ratios, tolerance, Confidence::USUAL))
    })
}

/// Half the width of the widest interval, as a part of the tolerance. `None` without blocks. With too few of them for an
/// interval, half of what they span.
pub(super) fn half_width(blocks: &[Block], tolerance: f64) -> Option<f64> {
    let width = |figure: &Figure| {
        let changes: Vec<f64> = changes(figure, blocks).collect();
        let interval = hodges_lehmann(&changes, Confidence::USUAL)?;
        Some((interval.high - interval.low) / 2.0 / tolerance)
    };
    FIGURES.iter().filter_map(width).reduce(f64::max)
}

/// The change from A to B in each block, as a logarithm: of all its slices together.
fn changes<'a>(figure: &'a Figure, blocks: &'a [impl AsRef<[Pair]>]) -> impl Iterator<Item = f64> + 'a {
    blocks.iter().filter_map(move |block| {
        let side = |side| (figure.of)(&together(block.as_ref(), side));
        Some((side(1)? / side(0)?).ln()).filter(|change| change.is_finite())
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
        } else if self.is_partial {
            "interrupted: nothing is concluded".to_owned()
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
        let is_clear =
            self.failed == 0 && !self.is_partial && !self.any(Verdict::Worse) && !self.any(Verdict::Underpowered);
        if is_clear { Outcome::Done } else { Outcome::Negative }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::plan::Design;
    use super::*;
    use crate::random::Random;

    /// A slice whose times are `factor` of 10 ms, give or take `noise`.
    fn slice(factor: f64, noise: f64, random: &mut Random) -> Answers {
        let times = |random: &mut Random| -> Samples {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "ten milliseconds or so")]
            let time = |_| (1e7 * factor * (1.0 + noise * (random.unit() - 0.5))) as u64;
            (0..9).map(time).collect()
        };
        let (ttft, mean_itl, e2e) = (times(random), times(random), times(random));
        Answers { ttft, mean_itl, e2e, completed: 9, duration: Duration::from_secs(1), ..Answers::default() }
    }

    fn judged(rounds: u32, elastic: f64, noise: f64) -> Judgement {
        let mut random = Random::seeded(3);
        let design = Design::Fixed { rounds, seconds: 1.0 };
        let plan = Plan { rates: vec![8.0], saturated: 0, ..super::super::plan::tests::plan(design) };
        let mut pair = |_| [1.0, elastic].map(|factor| slice(factor, noise, &mut random));
        let blocks = (0..rounds).map(|_| (0..3).map(&mut pair).collect()).collect();
        let measured = Measured { cells: vec![blocks], ..Measured::default() };
        judge(&plan, "3%".parse().unwrap(), &measured)
    }

    #[test]
    fn a_slow_start_of_one_round_counts_once() {
        // Seven rounds alike, and one in which B had a bad start for all its pairs.
        let mut random = Random::seeded(5);
        let mut round = |elastic: f64, pairs: usize| -> Block {
            (0..pairs).map(|_| [1.0, elastic].map(|factor| slice(factor, 0.01, &mut random))).collect()
        };
        let mut blocks: Vec<Block> = (0..7).map(|_| round(1.0, 2)).collect();
        blocks.push(round(1.3, 50));
        let judged = judge_blocks(&blocks, "3%".parse().unwrap());
        let ratio = judged[2].unwrap().ratio.unwrap();
        assert!((0.99..1.03).contains(&ratio.value), "{ratio:?}");
        assert_eq!(half_width(&blocks[..0], 0.03), None);
        assert!(half_width(&blocks[..7], 0.03).unwrap() < half_width(&blocks, 0.03).unwrap());
    }

    #[test]
    fn one_of_many_intervals_that_leaves_out_1_is_no_overhead_and_one_that_is_far_out_is() {
        let judged = |p_value| {
            let ratio = Some(crate::statistics::Estimate { value: 1.03, low: 1.005, high: 1.05 });
            Some(Judged { verdict: Verdict::Worse, ratio, difference: None, p_value, may_be_worse: true })
        };
        let calm = Some(Judged { verdict: Verdict::NoDifference, ..judged(0.5).unwrap() });
        let cell = Cell { profile: 0, point: super::super::plan::Point::Rate(8.0) };
        let verdicts = |p_value| {
            let mut cells: Vec<_> = (0..9).map(|_| CellVerdict { cell, figures: [calm; 4] }).collect();
            cells[4].figures[1] = judged(p_value);
            hold_together(&mut cells);
            cells[4].figures[1].unwrap().verdict
        };
        // Of 36, one may be at 0.05 / 36.
        assert_eq!((verdicts(0.02), verdicts(0.001)), (Verdict::Underpowered, Verdict::Worse));
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

    #[test]
    fn an_interrupted_run_concludes_nothing_however_little_it_has() {
        let plan = super::super::plan::tests::plan(Design::Fixed { rounds: 2, seconds: 1.0 });
        let nothing = Measured { cells: vec![Vec::new(); 3], is_partial: true, ..Measured::default() };
        let judgement = judge(&plan, "3%".parse().unwrap(), &nothing);
        assert_eq!(judgement.outcome(), Outcome::Negative);
        assert_eq!(judgement.verdict(), "interrupted: nothing is concluded");
    }
}
