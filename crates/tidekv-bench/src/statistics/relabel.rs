//! Whether runs of two sides are less alike than runs of one, by naming the runs anew.
//!
//! ```text
//!         A1  A2  B1  B2
//!    A1       w   x   x       w  alike within a side         x  alike across
//!    A2           x   x
//!    B1               w       if the sides are one, any other half of the runs might as well have been called A:
//!    B2                       how many of these ways are as much alike within as the real one?
//! ```
//!
//! Exact, whatever the items of a run have in common: a run counts once. Four runs of a side are the fewest that can
//! prove anything at 95 %: there are 35 ways to halve eight.

use serde::Serialize;

use super::bootstrap::Confidence;
use super::spread::whole;

/// Most runs of a side: sixteen are halved in 6,435 ways.
pub const MOST_RUNS: usize = 8;

/// What naming anew says.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Relabelled {
    /// Share of items that are alike in two runs of one side.
    pub within: f64,
    /// Share of items that are alike in a run of A and one of B.
    pub across: f64,
    /// Probability that sides which are one look so different, exact.
    pub p_value: f64,
    /// The least `within - across` that these runs would have proved; `None` if they could prove nothing.
    pub seen_from: Option<f64>,
}

impl Relabelled {
    /// How much more alike runs of one side are, as a share of the items; not above 0 for sides that are one.
    pub fn excess(&self) -> f64 {
        self.within - self.across
    }
}

/// `alike(i, j)` says how many of `items` are alike in runs `i < j`; the first `runs` of them are A's, as many more B's.
/// `None` with less than two runs of a side, more than [`MOST_RUNS`], or no items.
pub fn relabel(
    runs: usize,
    items: usize,
    confidence: Confidence,
    alike: impl Fn(usize, usize) -> usize,
) -> Option<Relabelled> {
    if !(2..=MOST_RUNS).contains(&runs) || items == 0 {
        return None;
    }
    let all = 2 * runs;
    let pairs: Vec<(usize, usize, usize)> =
        (0..all).flat_map(|i| (i + 1..all).map(move |j| (i, j))).map(|(i, j)| (i, j, alike(i, j))).collect();
    // A way is the set of runs that are called A, with the first among them: the others are the same with names swapped.
    let within = |way: u32| -> usize {
        let is_a = |run: usize| way >> run & 1 == 1;
        pairs.iter().filter(|(i, j, _)| is_a(*i) == is_a(*j)).map(|(_, _, alike)| alike).sum()
    };
    let real = (1u32 << runs) - 1;
    let ways = (0..1u32 << all).filter(|way| way & 1 == 1 && way.count_ones() as usize == runs);
    let mut others: Vec<usize> = ways.filter(|&way| way != real).map(within).collect();
    others.sort_unstable_by(|one, other| other.cmp(one));
    let (ours, total) = (within(real), pairs.iter().map(|(_, _, alike)| alike).sum::<usize>());
    let share_within = |sum: usize| whole(sum) / whole(runs * (runs - 1) * items);
    let share_across = |sum: usize| (whole(total) - whole(sum)) / whole(runs * runs * items);
    let as_alike = others.iter().take_while(|&&other| other >= ours).count() + 1;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a part of some thousand ways")]
    let may_be_as_alike = (confidence.risk() * whole(others.len() + 1)) as usize;
    let beaten = may_be_as_alike.checked_sub(1).map(|last| others[last] + 1);
    Some(Relabelled {
        within: share_within(ours),
        across: share_across(ours),
        p_value: whole(as_alike) / whole(others.len() + 1),
        seen_from: beaten.map(|sum| share_within(sum) - share_across(sum)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statistics::simulation::Machine;

    /// How many items two runs have alike, from what each run says of each item.
    fn judged(runs: &[Vec<u32>]) -> Option<Relabelled> {
        let alike = |i: usize, j: usize| runs[i].iter().zip(&runs[j]).filter(|(one, other)| one == other).count();
        relabel(runs.len() / 2, runs[0].len(), Confidence::USUAL, alike)
    }

    #[test]
    fn sides_that_always_differ_are_told_apart_and_equal_ones_are_not() {
        let (one, other) = (vec![1; 10], vec![2; 10]);
        let runs: Vec<_> = (0..8).map(|run| if run < 4 { one.clone() } else { other.clone() }).collect();
        let apart = judged(&runs).unwrap();
        assert_eq!((apart.within, apart.across, apart.p_value), (1.0, 0.0, 1.0 / 35.0));
        let same = judged(&vec![one; 8]).unwrap();
        assert_eq!((same.excess(), same.p_value), (0.0, 1.0));
    }

    #[test]
    fn one_item_that_always_differs_is_enough_where_nothing_else_does() {
        let runs: Vec<Vec<u32>> =
            (0..8).map(|run| (0..50).map(|item| u32::from(item == 0 && run >= 4)).collect()).collect();
        let judged = judged(&runs).unwrap();
        assert!(judged.p_value < 0.05 && (judged.excess() - 0.02).abs() < 1e-12, "{judged:?}");
        assert!(judged.seen_from.unwrap() <= judged.excess(), "{judged:?}");
    }

    #[test]
    fn three_runs_of_a_side_prove_nothing() {
        let runs: Vec<Vec<u32>> = (0..6).map(|run| vec![u32::from(run >= 3); 10]).collect();
        let judged = judged(&runs).unwrap();
        assert_eq!((judged.p_value, judged.seen_from), (0.1, None));
    }

    #[test]
    fn what_cannot_be_halved_is_no_answer() {
        let nothing = |_: usize, _: usize| 0;
        assert_eq!(relabel(1, 5, Confidence::USUAL, nothing), None);
        assert_eq!(relabel(4, 0, Confidence::USUAL, nothing), None);
        assert_eq!(relabel(MOST_RUNS + 1, 5, Confidence::USUAL, nothing), None);
        assert!(relabel(MOST_RUNS, 5, Confidence::USUAL, nothing).is_some());
    }

    /// Runs in one of two moods, in which half of the items come out otherwise together: what schedules do on a GPU.
    /// `changed` items are always others with B.
    fn moody(machine: &mut Machine, changed: usize) -> Relabelled {
        let run = |machine: &mut Machine, is_b: bool| -> Vec<u32> {
            let mood = u32::from(machine.uniform() < 0.5);
            let item = |item: usize, machine: &mut Machine| {
                let own = u32::from(machine.uniform() < 0.1);
                own + 2 * mood * u32::from(item.is_multiple_of(2)) + 4 * u32::from(is_b && item < changed)
            };
            (0..64).map(|at| item(at, machine)).collect()
        };
        let runs: Vec<_> = (0..8).map(|at| run(machine, at >= 4)).collect();
        judged(&runs).unwrap()
    }

    #[test]
    fn what_runs_have_in_common_is_not_taken_for_a_difference() {
        let mut machine = Machine::new(11);
        let wrong = (0..2000).filter(|_| moody(&mut machine, 0).p_value <= 0.05).count();
        assert!(wrong <= 100, "{wrong} of 2000 at 5 %");
        let found = (0..200).filter(|_| moody(&mut machine, 32).p_value <= 0.05).count();
        assert!(found >= 150, "half of the items differ, and {found} of 200 saw it");
    }
}
