//! Requests in rounds: by how much B differs from A where every request of B has its request of A, and those of a round have
//! something in common.
//!
//! ```text
//!   changes of the requests      round 1 │ ·  ··│··  ·        scores, added up   +1
//!   around a candidate θ         round 2 │  · ··│ ·                              -1
//!                                round 3 │    · │· ·    ·                        +2      signed ranks of the rounds:
//!                                               θ                                        is θ too low, too high, or neither?
//!   score of a change                   -1 ───╱─── +1
//!                                      from θ - reach to θ + reach
//! ```
//!
//! Which changes are larger than θ says most of what there is to know, and a request that took five times as long because
//! the machine was elsewhere counts no more than any other. So scores are signs, but for those next to θ, which count in
//! proportion: a median, smoothed where it would jump from one request to the next.
//!
//! How near that is, is half of the usual deviation, or [`Changes::in_proportion`] where that is more: a median leaves out what
//! few requests have, and where these few make up for what the many have, it must not.
//!
//! The sum of a round is one sample, however many requests it has, and is as likely above zero as below where θ is true. That
//! is all that Wilcoxon's signed ranks need, so the interval of all θ that they do not refuse has its confidence whatever
//! the noise is, and whatever requests of a round have in common.

use super::bootstrap::{Confidence, Estimate};
use super::signed_rank::{averages_outside, signed_rank};
use super::spread::median;

/// What is nearer to a candidate than this part of the usual deviation counts in proportion.
const SMOOTHED: f64 = 0.5;
/// From a median absolute deviation to a standard one, where noise is normal.
const NORMAL: f64 = 1.4826;
/// Halvings of the range in which an end of the interval lies: to a billionth of it.
const HALVINGS: u32 = 30;

/// From A to B, as logarithms.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Changes {
    /// Those of a group are one sample.
    pub groups: Vec<Vec<f64>>,
    /// Changes that are nearer to a candidate count in proportion to how far they are from it, and not by their side alone.
    /// Infinite: all do, and groups of one are compared as [`hodges_lehmann`](super::hodges_lehmann) compares pairs.
    pub in_proportion: f64,
}

impl Changes {
    /// The smoothed median of all changes and the interval around it. With fewer groups than any interval of this confidence
    /// needs ([`enough_pairs`](super::enough_pairs)) it spans all that the groups leave possible. `None` without changes, or
    /// where one is no number.
    pub fn median(&self, confidence: Confidence) -> Option<Estimate> {
        let groups = Groups::of(self)?;
        let outside = averages_outside(groups.groups.len(), confidence.risk() / 2.0);
        let (low, high) =
            (groups.smallest(|sides| sides.not_above > outside), groups.smallest(|sides| sides.not_below <= outside));
        let value = groups.smallest(|sides| sides.not_above >= sides.not_below);
        let high = high.max(low);
        Some(Estimate { value: value.clamp(low, high), low, high })
    }

    /// The probability, two-sided, that sides which do not differ are as far apart as these changes are. 1 without changes.
    pub fn test(&self) -> f64 {
        Groups::of(self).map_or(1.0, |groups| signed_rank(&groups.scores(0.0)))
    }

    /// Groups that have something to say.
    pub fn count(&self) -> usize {
        self.groups.iter().filter(|group| !group.is_empty()).count()
    }
}

struct Groups<'a> {
    groups: Vec<&'a [f64]>,
    /// Half of where scores are in proportion.
    reach: f64,
    /// All candidates lie between the two.
    range: (f64, f64),
}

/// How many of the means of two groups' scores say that a candidate is not too low, and that it is not too high.
struct Sides {
    not_above: usize,
    not_below: usize,
}

impl<'a> Groups<'a> {
    fn of(changes: &'a Changes) -> Option<Self> {
        let groups: Vec<&[f64]> = changes.groups.iter().map(Vec::as_slice).filter(|group| !group.is_empty()).collect();
        let all: Vec<f64> = groups.concat();
        let middle = median(&all).filter(|_| all.iter().all(|change| change.is_finite()))?;
        let deviations: Vec<f64> = all.iter().map(|change| (change - middle).abs()).collect();
        let least = all.iter().copied().fold(f64::INFINITY, f64::min);
        let most = all.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        // No further than from one end to the other: all are in reach then.
        let reach = (SMOOTHED * NORMAL * median(&deviations)?).max(changes.in_proportion.min(most - least));
        Some(Self { groups, reach, range: (least - reach, most + reach) })
    }

    fn scores(&self, candidate: f64) -> Vec<f64> {
        let score = |change: &f64| {
            let distance = change - candidate;
            // Also where nothing deviates, and the reach is none.
            if distance == 0.0 { 0.0 } else { (distance / self.reach).clamp(-1.0, 1.0) }
        };
        self.groups.iter().map(|group| group.iter().map(score).sum()).collect()
    }

    fn sides(&self, candidate: f64) -> Sides {
        let scores = self.scores(candidate);
        let mut sides = Sides { not_above: 0, not_below: 0 };
        for (place, one) in scores.iter().enumerate() {
            for other in &scores[place..] {
                sides.not_above += usize::from(one + other <= 0.0);
                sides.not_below += usize::from(one + other >= 0.0);
            }
        }
        sides
    }

    /// The smallest candidate for which it holds; it does for all above one for which it does, since scores only fall.
    fn smallest(&self, holds: impl Fn(Sides) -> bool) -> f64 {
        let (mut no, mut yes) = self.range;
        for _ in 0..HALVINGS {
            let half = f64::midpoint(no, yes);
            if holds(self.sides(half)) { yes = half } else { no = half }
        }
        yes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::statistics::simulation::Machine;
    use crate::statistics::{enough_pairs, hodges_lehmann};

    fn of(groups: &[Vec<f64>]) -> Changes {
        Changes { groups: groups.to_vec(), in_proportion: 0.0 }
    }

    fn usual(groups: &[Vec<f64>]) -> Estimate {
        of(groups).median(Confidence::USUAL).unwrap()
    }

    /// What a request has: mostly little, now and then a hiccup of either side.
    fn request(machine: &mut Machine) -> f64 {
        let side = |machine: &mut Machine| {
            let hiccup = if machine.uniform() < 0.15 { 0.4 * machine.uniform() } else { 0.0 };
            0.04 * machine.normal() + hiccup
        };
        side(machine) - side(machine)
    }

    fn rounds(machine: &mut Machine, count: usize, requests: usize, common: f64, truth: f64) -> Vec<Vec<f64>> {
        let round = |_| {
            let start = common * machine.normal();
            (0..requests).map(|_| truth + start + request(machine)).collect()
        };
        (0..count).map(round).collect()
    }

    #[test]
    fn nothing_has_no_median_and_what_never_differs_has_no_width() {
        assert_eq!(of(&[]).median(Confidence::USUAL), None);
        assert_eq!(of(&[vec![], vec![]]).median(Confidence::USUAL), None);
        assert_eq!(of(&[vec![f64::NAN]]).median(Confidence::USUAL), None);
        assert_eq!(of(&[]).test(), 1.0);
        let same = usual(&vec![vec![0.25; 4]; 8]);
        assert!((same.low - 0.25).abs() < 1e-6 && (same.high - 0.25).abs() < 1e-6, "{same:?}");
        assert!(of(&vec![vec![0.25; 4]; 8]).test() < 0.01);
        assert_eq!(of(&vec![vec![0.0; 4]; 8]).test(), 1.0);
    }

    #[test]
    fn an_interval_of_95_percent_holds_the_truth_in_95_of_100_cases_whatever_rounds_have_in_common() {
        for (count, requests, common) in [(6, 20, 0.0), (10, 4, 0.0), (10, 12, 0.03), (24, 5, 0.02), (24, 1, 0.0)] {
            let mut machine = Machine::new(41);
            let held = (0..1000).filter(|_| {
                let estimate = usual(&rounds(&mut machine, count, requests, common, 0.02));
                estimate.low <= 0.02 && 0.02 <= estimate.high
            });
            let share = held.count() as f64 / 1000.0;
            // One standard error is 0.7 %; few rounds have steps, 6 of them 96.9 %.
            assert!((0.93..=0.995).contains(&share), "{count} rounds of {requests}, {common}: {share}");
        }
    }

    /// As time goes to those who need it, rounds have a few requests or many.
    #[test]
    fn it_is_sharper_than_the_medians_of_rounds() {
        let mut machine = Machine::new(43);
        let (mut ours, mut medians) = (0.0, 0.0);
        for _ in 0..200 {
            let mut groups = rounds(&mut machine, 10, 2, 0.0, 0.0);
            groups.extend(rounds(&mut machine, 10, 12, 0.0, 0.0));
            let of_rounds: Vec<f64> = groups.iter().map(|group| median(group).unwrap()).collect();
            let width = |estimate: Estimate| estimate.high - estimate.low;
            ours += width(usual(&groups));
            medians += width(hodges_lehmann(&of_rounds, Confidence::USUAL).unwrap());
        }
        assert!(ours < 0.9 * medians, "{ours} and {medians}");
    }

    /// Fifty requests of one bad start are one bad start.
    #[test]
    fn a_large_group_is_one_sample() {
        let mut machine = Machine::new(47);
        let mut groups = rounds(&mut machine, 12, 5, 0.0, 0.0);
        groups.push(vec![0.3; 50]);
        let estimate = usual(&groups);
        assert!(estimate.low < 0.0 && estimate.value < 0.03, "{estimate:?}");
    }

    #[test]
    fn few_that_make_up_for_many_are_heard_where_they_are_in_proportion() {
        // One in ten is nine hundredths less, the others one hundredth more.
        let groups = vec![[vec![0.01; 9], vec![-0.09]].concat(); 8];
        let of = |in_proportion: f64| {
            Changes { groups: groups.clone(), in_proportion }.median(Confidence::USUAL).unwrap().value
        };
        assert!((of(0.0) - 0.01).abs() < 1e-6 && (of(0.04) - 0.0056).abs() < 1e-3, "{} {}", of(0.0), of(0.04));
        assert!(of(0.1).abs() < 1e-6 && of(f64::INFINITY).abs() < 1e-6, "{} {}", of(0.1), of(f64::INFINITY));
    }

    proptest! {
        #[test]
        fn groups_of_one_in_proportion_are_pairs(changes in prop::collection::vec(-1000..1000i32, 1..14)) {
            let changes: Vec<f64> = changes.into_iter().map(|change| f64::from(change) / 7.0).collect();
            let groups = changes.iter().map(|&change| vec![change]).collect();
            let ours = Changes { groups, in_proportion: f64::INFINITY };
            let estimate = ours.median(Confidence::USUAL).unwrap();
            let pairs = hodges_lehmann(&changes, Confidence::USUAL).unwrap();
            prop_assert!((estimate.low - pairs.low).abs() < 1e-3, "{estimate:?} and {pairs:?}");
            prop_assert!((estimate.high - pairs.high).abs() < 1e-3, "{estimate:?} and {pairs:?}");
            prop_assert!((ours.test() - signed_rank(&changes)).abs() < 1e-9);
        }

        /// The interval leaves out zero exactly where the test finds a difference, and follows whatever is done to the changes.
        #[test]
        fn interval_and_test_agree(
            groups in prop::collection::vec(prop::collection::vec(-1000..1000i32, 1..6), 1..14),
            shift in -50..50i32,
        ) {
            let groups: Vec<Vec<f64>> =
                groups.iter().map(|group| group.iter().map(|&change| f64::from(change) / 7.0).collect()).collect();
            let estimate = usual(&groups);
            prop_assert!(estimate.low <= estimate.value && estimate.value <= estimate.high);
            let p_value = of(&groups).test();
            if enough_pairs(groups.len(), 0.05) && (estimate.low > 1e-3 || estimate.high < -1e-3) {
                prop_assert!(p_value <= 0.05, "{estimate:?} and {p_value}");
            }
            if estimate.low < -1e-3 && estimate.high > 1e-3 {
                prop_assert!(p_value > 0.05, "{estimate:?} and {p_value}");
            }
            let moved: Vec<Vec<f64>> =
                groups.iter().map(|group| group.iter().map(|change| change + f64::from(shift)).collect()).collect();
            prop_assert!((usual(&moved).low - estimate.low - f64::from(shift)).abs() < 1e-3);
            let mirrored: Vec<Vec<f64>> =
                groups.iter().map(|group| group.iter().map(|change| -change).collect()).collect();
            prop_assert!((usual(&mirrored).high + estimate.low).abs() < 1e-3);
        }
    }
}
