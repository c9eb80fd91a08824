//! What it makes to be asked first. Pure.
//!
//! ```text
//!   changes from A to B, as they are               without what it makes to be first
//!
//!   A first     ··:·.                                        ··:·.
//!   B first              .·:··                               .·:··
//!               ─────────┼─────────                ─────────┼─────────
//! ```
//!
//! Whoever is asked first comes to a machine that had nothing to do since the last pair (its cores may sleep, its caches may be
//! cold); who comes second does not. On an H200 that is 3 % of the time to first token at 1 to 4 requests a second. A and B
//! are first in turns, so it moves no median, but it makes two heaps of what would be one, and a median of two heaps is far
//! less sharp. What separates them is the same in all rounds and says nothing about A and B: half of it is taken from either.
//!
//! It is looked for only in rounds that have both. Where servers make room for each other a round has one, and what one round
//! differs from the next by belongs to the interval.

use crate::servers::sides::Arm;
use crate::statistics::median;

/// From A to B, as a logarithm, and whose slice came first.
pub(super) type Change = (f64, Arm);

/// The changes of each round, without what it makes to be first.
pub(super) fn without_order(rounds: &[Vec<Change>]) -> Vec<Vec<f64>> {
    let half = half_of_order(rounds).unwrap_or(0.0);
    let value = |&(change, first): &Change| match first {
        Arm::A => change - half,
        Arm::B => change + half,
    };
    rounds.iter().map(|round| round.iter().map(value).collect()).collect()
}

/// Half of how far the heaps are apart.
fn half_of_order(rounds: &[Vec<Change>]) -> Option<f64> {
    let mut heaps: [Vec<f64>; 2] = Default::default();
    for round in rounds.iter().filter(|round| Arm::BOTH.iter().all(|arm| round.iter().any(|(_, first)| first == arm))) {
        // A round's own place is not the matter.
        let middle = median(&round.iter().map(|&(change, _)| change).collect::<Vec<f64>>())?;
        round.iter().for_each(|&(change, first)| heaps[first.index()].push(change - middle));
    }
    let [a_first, b_first] = heaps;
    Some((median(&a_first)? - median(&b_first)?) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statistics::simulation::Machine;
    use crate::statistics::{Changes, Confidence, Estimate};

    /// Rounds of so many pairs in turns, the truth 0.01, and so much for whoever is first.
    fn rounds(machine: &mut Machine, count: usize, pairs: usize, order: f64) -> Vec<Vec<Change>> {
        let round = |round: usize| {
            let start = 0.005 * machine.normal();
            let change = |pair: usize| {
                let first = Arm::order(round + pair)[0];
                let order = if first == Arm::A { order } else { -order };
                (0.01 + start + order + 0.02 * machine.normal(), first)
            };
            (0..pairs).map(change).collect()
        };
        (0..count).map(round).collect()
    }

    fn estimate(groups: Vec<Vec<f64>>) -> Estimate {
        Changes { groups, in_proportion: 0.0 }.median(Confidence::USUAL).unwrap()
    }

    fn as_they_are(rounds: &[Vec<Change>]) -> Vec<Vec<f64>> {
        rounds.iter().map(|round| round.iter().map(|&(change, _)| change).collect()).collect()
    }

    #[test]
    fn the_truth_stays_where_it_was_and_intervals_are_narrower() {
        // Also where rounds have an odd number of pairs, and where there is nothing to take out.
        for (count, pairs, order, narrower) in
            [(24, 7, 0.03, 0.85), (24, 4, 0.06, 0.7), (10, 3, 0.03, 0.9), (24, 6, 0.0, 1.02)]
        {
            let mut machine = Machine::new(53);
            let (mut held, mut ours, mut theirs) = (0, 0.0, 0.0);
            for _ in 0..400 {
                let rounds = rounds(&mut machine, count, pairs, order);
                let (without, with) = (estimate(without_order(&rounds)), estimate(as_they_are(&rounds)));
                held += usize::from(without.low <= 0.01 && 0.01 <= without.high);
                ours += without.high - without.low;
                theirs += with.high - with.low;
            }
            // One standard error is 1.1 %.
            assert!((370..=398).contains(&held), "{count} rounds of {pairs}, {order}: {held} of 400");
            assert!(ours < narrower * theirs, "{count} rounds of {pairs}, {order}: {}", ours / theirs);
        }
    }

    #[test]
    fn rounds_of_one_order_stay_as_they_are() {
        let mut machine = Machine::new(59);
        let rounds = rounds(&mut machine, 10, 1, 0.05);
        assert_eq!(without_order(&rounds), as_they_are(&rounds));
        assert_eq!(without_order(&[]), Vec::<Vec<f64>>::new());
    }

    #[test]
    fn half_of_the_distance_is_taken_from_either() {
        let round = vec![(0.05, Arm::A), (-0.01, Arm::B), (0.05, Arm::A), (-0.01, Arm::B)];
        let close = |value: f64| (value - 0.02).abs() < 1e-12;
        assert!(without_order(&[round]).concat().into_iter().all(close));
    }
}
