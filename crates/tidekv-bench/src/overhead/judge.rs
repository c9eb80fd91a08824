//! From rounds of slices to ratios with intervals and one verdict. Pure.
//!
//! ```text
//!   round 1   A     3.1  3.0  7.9 ms    the same requests, sent at the same moments of their slices
//!             B     3.1  3.1  8.0
//!             B/A  1.00 1.03 1.01 ┐
//!   round 2        0.99 1.00 1.02 ├──   median of all requests; interval of the rounds
//!   ...                       ... ┘
//! ```
//!
//! A request that comes while another is served takes twice as long as one that comes alone, with A as with B, and chance says
//! how many of each there are. The median of all times lies somewhere between the two and says little; how long *this*
//! request took with B, as a part of how long it took with A, says all. So each is compared with itself.
//!
//! **Where in a step of the server a request comes.** It waits for the step under way, and that is part of its time to first
//! token. Both servers are asked at the same moments, so both are at the same place of a step, and the slower one a little
//! behind, the more the longer it is busy:
//!
//! ```text
//!   A  ├────┼────┼────┼────┼────┼────┤
//!   B  ├─────┼─────┼─────┼─────┼─────┤      its steps a little longer
//!          ↑    ↑                           most requests wait a little longer with B, by up to some percent of their TTFT;
//!        longer a step less                 few come just in time for the step before, and wait almost a whole step less
//! ```
//!
//! In the mean the two make up for each other, in a median they do not: it would find some percent of TTFT where steps differ
//! by a thousandth (seen in a simulation: 3.7 % where it is 0.2 %). So where more than one request is under way, changes of up
//! to two steps count in proportion ([`Changes::in_proportion`]), and only what is beyond counts by its side.
//!
//! The unit of the interval is the round. Requests of one round share two processes, with their addresses, their pages and their
//! places on the cores, and a few seconds of the machine; what is common to them must not count as often as there are requests
//! ([`Changes`]).
//!
//! There are some thirty intervals, and one in twenty leaves out what is true. So an overhead is *called* only where it holds for
//! all of them together (Holm: the smallest probability times their number, the next times one less, ...); one that would not
//! is underpowered. For *none* nothing is relaxed: every single interval has to be inside.

use tidekv_cli::exit::Outcome;

use super::measure::{Block, Measured, Pair};
use super::order;
use super::plan::{Cell, Plan};
use super::report::together;
use crate::compare::direction::Direction;
use crate::compare::judge::{Judged, Tolerance, Verdict, judge_changes};
use crate::servers::drive::Answers;
use crate::statistics::{Changes, Confidence};
use crate::stats::{Samples, to_f64};

/// A figure of some slices.
pub(crate) struct Figure {
    pub(crate) name: &'static str,
    direction: Direction,
    kind: Kind,
}

enum Kind {
    /// Of all slices of a round together.
    Throughput,
    /// Of each answer, on its own.
    Gap,
    /// Of each request from its send on, so that it depends on the step that is under way then.
    SinceSend(fn(&Answers) -> &Samples),
}

/// What is judged at every point.
pub(crate) const FIGURES: [Figure; 4] = [
    Figure { name: "throughput", direction: Direction::Higher, kind: Kind::Throughput },
    Figure { name: "ttft_p50", direction: Direction::Lower, kind: Kind::SinceSend(|slice| &slice.ttft) },
    Figure { name: "itl_p50", direction: Direction::Lower, kind: Kind::Gap },
    Figure { name: "e2e_p50", direction: Direction::Lower, kind: Kind::SinceSend(|slice| &slice.e2e) },
];

/// A request may wait for one step more or less, and one step may have another's prompt in it.
const STEPS: f64 = 2.0;

impl Figure {
    fn judge(&self, blocks: &[impl AsRef<[Pair]>], tolerance: Tolerance) -> Option<Judged> {
        judge_changes(self.direction, &self.changes(blocks), tolerance, Confidence::USUAL)
    }

    /// From A to B, block by block.
    fn changes(&self, blocks: &[impl AsRef<[Pair]>]) -> Changes {
        match self.kind {
            Kind::Throughput => Changes { groups: throughput_changes(blocks), in_proportion: f64::INFINITY },
            Kind::Gap => Changes { groups: time_changes(gaps, blocks), in_proportion: 0.0 },
            Kind::SinceSend(of) => Changes { groups: time_changes(of, blocks), in_proportion: some_steps(of, blocks) },
        }
    }
}

fn gaps(slice: &Answers) -> &Samples {
    &slice.mean_itl
}

/// One in each block.
fn throughput_changes(blocks: &[impl AsRef<[Pair]>]) -> Vec<Vec<f64>> {
    let of_block = |block: &_| {
        let per_s = |side| together(AsRef::<[Pair]>::as_ref(block), side).requests_per_s();
        Some(vec![(per_s(1)? / per_s(0)?).ln()]).filter(|change| change[0].is_finite())
    };
    blocks.iter().filter_map(of_block).collect()
}

/// One for each request, without what it makes to be asked first. None of a pair of slices where a request was not answered:
/// whose time is whose is not known then, and nothing will be concluded anyway.
fn time_changes(of: fn(&Answers) -> &Samples, blocks: &[impl AsRef<[Pair]>]) -> Vec<Vec<f64>> {
    let of_pair = |pair: &Pair| -> Vec<order::Change> {
        let [a, b] = pair.sides.each_ref().map(|side| of(side).values_ns());
        let change = |(&a, &b): (&u64, &u64)| ((to_f64(b.max(1)) / to_f64(a.max(1))).ln(), pair.first);
        if a.len() == b.len() { a.iter().zip(b).map(change).collect() } else { Vec::new() }
    };
    let of_block = |block: &_| AsRef::<[Pair]>::as_ref(block).iter().flat_map(of_pair).collect();
    let rounds = blocks.iter().map(of_block).filter(|changes: &Vec<order::Change>| !changes.is_empty());
    order::without_order(&rounds.collect::<Vec<_>>())
}

/// How much longer a time is with [`STEPS`] more, as a logarithm. A step is a gap between tokens, and all is as A has it.
/// Nothing where requests mostly come alone: there is no step to wait for then.
fn some_steps(of: fn(&Answers) -> &Samples, blocks: &[impl AsRef<[Pair]>]) -> f64 {
    let all = together(blocks.iter().flat_map(AsRef::as_ref), 0);
    let busy_ns: f64 = all.e2e.values_ns().iter().copied().map(to_f64).sum();
    if busy_ns < all.duration.as_secs_f64() * 1e9 {
        return 0.0;
    }
    let median = |times: &Samples| times.percentile(50).map(to_f64);
    let steps = |(step, time): (f64, f64)| (STEPS * step / time.max(1.0)).ln_1p();
    median(gaps(&all)).zip(median(of(&all))).map_or(0.0, steps)
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
    let failed = measured.cells.iter().flatten().flatten().flat_map(|pair| &pair.sides).map(|slice| slice.failed).sum();
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

/// Blocks of slices, figure by figure. `None` where there is nothing to say: answers of one token have no gaps.
pub(crate) fn judge_blocks(blocks: &[impl AsRef<[Pair]>], tolerance: Tolerance) -> Figures {
    FIGURES.map(|figure| figure.judge(blocks, tolerance))
}

/// Half the width of the widest interval, as a part of the tolerance. `None` without blocks. With too few of them for an
/// interval, half of what they span.
pub(super) fn half_width(blocks: &[Block], tolerance: f64) -> Option<f64> {
    let width = |figure: &Figure| {
        let interval = figure.changes(blocks).median(Confidence::USUAL)?;
        Some((interval.high - interval.low) / 2.0 / tolerance)
    };
    FIGURES.iter().filter_map(width).reduce(f64::max)
}

impl Judgement {
    fn any(&self, verdict: Verdict) -> bool {
        self.cells.iter().flat_map(|cell| cell.figures.iter().flatten()).any(|judged| judged.verdict == verdict)
    }

    /// Whether the whole interval of a figure that is worse lies outside of what is allowed.
    fn is_beyond(&self) -> bool {
        let nearest = |judged: &Judged| judged.ratio.map(|ratio| (ratio.low - 1.0).max(1.0 - ratio.high));
        let worse = self.cells.iter().flat_map(|cell| cell.figures.iter().flatten());
        let mut worse = worse.filter(|judged| judged.verdict == Verdict::Worse);
        worse.any(|judged| nearest(judged).is_some_and(|change| change > self.tolerance))
    }

    /// One sentence for people and programs.
    pub(super) fn verdict(&self) -> String {
        let percent = (self.tolerance * 1e8).round() / 1e6;
        if self.failed > 0 {
            format!("{} requests failed: nothing is concluded", self.failed)
        } else if self.is_partial {
            "interrupted: nothing is concluded".to_owned()
        } else if self.any(Verdict::Worse) {
            let how_much = if self.is_beyond() { "beyond" } else { "that may be beyond" };
            format!("overhead {how_much} {percent} %")
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
    use crate::servers::sides::Arm;

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

    fn pair(sides: [Answers; 2]) -> Pair {
        Pair { sides, first: Arm::A }
    }

    fn judged(rounds: u32, elastic: f64, noise: f64) -> Judgement {
        let mut random = Random::seeded(3);
        let design = Design::Fixed { rounds, seconds: 1.0 };
        let plan = Plan { rates: vec![8.0], saturated: 0, ..super::super::plan::tests::plan(design) };
        let mut pair = |_| pair([1.0, elastic].map(|factor| slice(factor, noise, &mut random)));
        let blocks = (0..rounds).map(|_| (0..3).map(&mut pair).collect()).collect();
        let measured = Measured { cells: vec![blocks], ..Measured::default() };
        judge(&plan, "3%".parse().unwrap(), &measured)
    }

    #[test]
    fn a_slow_start_of_one_round_counts_once() {
        // Seven rounds alike, and one in which B had a bad start for all its pairs.
        let mut random = Random::seeded(5);
        let mut round = |elastic: f64, pairs: usize| -> Block {
            (0..pairs).map(|_| pair([1.0, elastic].map(|factor| slice(factor, 0.01, &mut random)))).collect()
        };
        let mut blocks: Vec<Block> = (0..7).map(|_| round(1.0, 2)).collect();
        blocks.push(round(1.3, 50));
        let judged = judge_blocks(&blocks, "3%".parse().unwrap());
        let ratio = judged[2].unwrap().ratio.unwrap();
        assert!((0.99..1.03).contains(&ratio.value), "{ratio:?}");
        assert_eq!(half_width(&blocks[..0], 0.03), None);
        assert!(half_width(&blocks[..7], 0.03).unwrap() < half_width(&blocks, 0.03).unwrap());
    }

    /// Chance decides how many requests meet another and take twice as long, and the median of all lies between the two kinds.
    #[test]
    fn each_request_is_compared_with_itself() {
        let mut random = Random::seeded(7);
        let mut round = |_| -> Block {
            let alone: Vec<f64> = (0..9).map(|_| if random.unit() < 0.5 { 1.0 } else { 2.0 }).collect();
            let mut slice = |factor: f64| {
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "some ten milliseconds")]
                let time = |alone: &f64| (1e7 * alone * factor * (1.0 + 0.01 * (random.unit() - 0.5))) as u64;
                let times: Samples = alone.iter().map(time).collect();
                Answers { ttft: times, completed: 9, duration: Duration::from_secs(1), ..Answers::default() }
            };
            vec![pair([slice(1.0), slice(1.01)])]
        };
        let mut blocks: Vec<Block> = (0..12).map(&mut round).collect();
        let of = |blocks: &[Block]| judge_blocks(blocks, "3%".parse().unwrap())[1].unwrap().ratio.unwrap();
        let ratio = of(&blocks);
        assert!(ratio.low > 1.007 && ratio.high < 1.013, "{ratio:?}");
        // Where a side has not answered all, nobody knows whose time is whose.
        blocks[3][0].sides[1].ttft = Samples::new();
        blocks.push(vec![pair([slice(1.0, 0.0, &mut Random::seeded(1)), Answers::default()])]);
        assert!(of(&blocks).is_within(1.007, 1.013), "{:?}", of(&blocks));
    }

    /// Two servers that are busy all the time, the second with steps that are 0.2 % longer: so is the time to first token, in the
    /// mean and in the median of each. Most requests wait longer than that, few of them a whole step less.
    #[test]
    fn where_in_a_step_a_request_comes_makes_no_difference() {
        let mut random = Random::seeded(11);
        let mut round = |_| -> Block {
            let sent: Vec<f64> = (0..80).map(|_| random.unit()).collect();
            let slice = |slower: f64| {
                let step = 0.005 * slower;
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "some ten milliseconds")]
                let ns = |seconds: f64| (1e9 * seconds) as u64;
                let ttft = |sent: &f64| ns((sent / step).ceil() * step - sent + 1.5 * step);
                let ttft = sent.iter().map(ttft).collect();
                let mean_itl = sent.iter().map(|_| ns(step)).collect();
                let e2e = sent.iter().map(|_| ns(0.1)).collect();
                Answers { ttft, mean_itl, e2e, completed: 80, duration: Duration::from_secs(1), ..Answers::default() }
            };
            vec![pair([slice(1.0), slice(1.002)])]
        };
        let blocks: Vec<Block> = (0..24).map(&mut round).collect();
        let changes = FIGURES[1].changes(&blocks);
        let ratio = changes.median(Confidence::USUAL).unwrap().exp();
        assert!(ratio.is_within(0.985, 1.015) && (ratio.value - 1.002).abs() < 0.005, "{ratio:?}");
        let by_sides = Changes { in_proportion: 0.0, ..changes };
        assert!(by_sides.median(Confidence::USUAL).unwrap().exp().low > 1.05, "what a median would have found");
        // Who comes alone waits for no step.
        let mut alone = blocks;
        alone.iter_mut().flatten().flat_map(|pair| &mut pair.sides).for_each(|side| side.duration *= 9);
        assert_eq!(FIGURES[1].changes(&alone).in_proportion, 0.0);
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
        // Slower beyond doubt, and by 2 or by 4 %, who knows.
        assert_eq!(judged(12, 1.03, 0.1).verdict(), "overhead that may be beyond 3 %");
        assert_eq!(judged(12, 1.03, 0.1).outcome(), Outcome::Negative);
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
