//! Who gets how much of the next round. Pure.
//!
//! ```text
//!   rate         1/s     2/s     4/s    ...
//!   interval   ├─────┤  ├───┤   ├─┤          first: low rates a little more than the others
//!   target      ├─┤      ├─┤    ├─┤          from the third round on: time in proportion to how noisy a rate is
//!   next round  ██████   ███    (done)       from the sixth, with intervals: to what is missing to the target
//! ```
//!
//! An interval half as wide takes four times the time.
//!
//! All that counts here is how **wide** intervals are. Where they lie decides nothing, neither who is measured longer nor when
//! it is enough: whoever stops because an interval happens to lie well finds what he is looking for more often than it is there.

use crate::statistics::{Confidence, enough_pairs};
use crate::stats::to_f64;

/// An interval is narrow enough at this part of the tolerance on either side: there are some thirty of them, and each has to
/// lie inside with room for where its middle happens to be.
const TARGET: f64 = 0.4;

/// What is known of a cell so far.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Known {
    /// Its part of a round as long as there are no intervals.
    pub(super) weight: f64,
    /// Seconds of one pair of slices.
    pub(super) pair_s: f64,
    /// Seconds it has had.
    pub(super) spent_s: f64,
    /// How many rounds it was part of.
    pub(super) rounds: usize,
    /// Half the width of its widest interval as a part of the tolerance; with few rounds half of what they span.
    pub(super) half_width: Option<f64>,
}

/// From so many rounds on what they span says something about how noisy they are.
const ROUNDS_TO_SPAN: usize = 3;
/// As long as nobody has an interval, everybody has at least this part of what would be his if all had the same.
const LEAST: f64 = 0.3;

impl Known {
    /// Seconds that it takes in all, at this noise, until all its intervals are narrow enough.
    fn needed_s(&self) -> Option<f64> {
        let over = self.half_width.filter(|_| self.rounds >= ROUNDS_TO_SPAN)? / TARGET;
        Some(self.spent_s * over * over)
    }

    fn has_interval(&self) -> bool {
        enough_pairs(self.rounds, Confidence::USUAL.risk())
    }
}

/// Seconds of the shortest round: a pair of slices for everybody who wants one.
pub(super) fn least_s(cells: &[Known]) -> f64 {
    let wanting = cells.iter().zip(wanted(cells)).filter(|(_, wanted)| *wanted > 0.0);
    wanting.map(|(cell, _)| cell.pair_s).sum()
}

/// Servers are started anew where that takes no more than this part of the time since they were.
const RESTART_PART: f64 = 0.1;
/// Rounds with a start each are better than more rounds that share one, but not fewer than these.
const FEWEST_ROUNDS: f64 = 8.0;

/// Whether to start servers anew that took so long to start and were started so long ago.
pub(super) fn is_worth_a_start(start_s: f64, since_start_s: f64) -> bool {
    start_s <= RESTART_PART * since_start_s
}

/// What of a round starts in rounds to come may take.
pub(super) fn for_starts_s(start_s: f64, round_s: f64) -> f64 {
    start_s.min(RESTART_PART * round_s)
}

/// Of how many rounds a run of so many seconds is: of as many as it can start servers for, where these are enough.
pub(super) fn rounds_with_starts(planned: usize, all_s: f64, start_s: f64) -> usize {
    let affordable = RESTART_PART * all_s / start_s;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count; what does not fit is many")]
    if affordable >= FEWEST_ROUNDS { planned.min(affordable as usize) } else { planned }
}

/// Into how many rounds the time that is left is divided: fewer than were planned where they would be too short for it.
pub(super) fn rounds_within(left_s: f64, planned: usize, least_s: f64) -> usize {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count; what does not fit is many")]
    let most = if least_s > 0.0 { (left_s / least_s) as usize } else { usize::MAX };
    planned.min(most)
}

/// Pairs of slices for each cell in a round of so many seconds. None for anybody: it is enough.
pub(super) fn pairs(cells: &[Known], seconds: f64) -> Vec<usize> {
    let wanted = wanted(cells);
    let all: f64 = wanted.iter().sum();
    let of = |(cell, wanted): (&Known, &f64)| {
        if *wanted > 0.0 { super::plan::whole(seconds * wanted / all / cell.pair_s) } else { 0 }
    };
    cells.iter().zip(&wanted).map(of).collect()
}

/// In proportion to what shall everybody have time.
fn wanted(cells: &[Known]) -> Vec<f64> {
    let Some(needed) = cells.iter().map(Known::needed_s).collect::<Option<Vec<f64>>>() else {
        return cells.iter().map(|cell| cell.weight).collect();
    };
    if cells.iter().all(Known::has_interval) {
        return cells.iter().zip(needed).map(|(cell, needed)| (needed - cell.spent_s).max(0.0)).collect();
    }
    let equal = needed.iter().sum::<f64>() / to_f64(cells.len() as u64);
    needed.iter().map(|needed| needed.max(LEAST * equal)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::direction::Direction;
    use crate::compare::judge::{Judged, Tolerance, Verdict, judge_changes};
    use crate::statistics::Changes;
    use crate::statistics::simulation::Machine;

    fn known(rounds: usize, half_width: Option<f64>, spent_s: f64) -> Known {
        Known { weight: 1.0, pair_s: 1.0, spent_s, rounds, half_width }
    }

    #[test]
    fn first_by_weight_then_by_noise_then_by_what_is_missing() {
        let cells = [Known { weight: 2.0, ..known(1, Some(9.0), 1.0) }, known(1, Some(1.0), 1.0)];
        assert_eq!(pairs(&cells, 30.0), [20, 10], "what one round spans says nothing");
        // Twice as noisy is four times the time; whoever seems to have no noise is not left out.
        let cells = [known(3, Some(0.8), 10.0), known(3, Some(0.4), 10.0), known(3, Some(0.0), 10.0)];
        assert_eq!(pairs(&cells, 55.0), [40, 10, 5]);
        // Twice the target takes four times the time, of which one was spent; the third is narrow enough.
        let cells = [known(6, Some(0.8), 10.0), known(6, Some(0.8), 20.0), known(6, Some(0.39), 20.0)];
        assert_eq!(pairs(&cells, 30.0), [10, 20, 0]);
        let done = [known(6, Some(0.1), 10.0), known(8, Some(0.4), 10.0)];
        assert_eq!(pairs(&done, 30.0), [0, 0]);
        assert_eq!(pairs(&[known(6, Some(2.0), 1.0)], 0.1), [1], "whoever is measured at all gets a pair");
    }

    #[test]
    fn rounds_are_as_many_as_there_is_time_for() {
        let cells =
            [Known { pair_s: 4.0, ..known(6, Some(0.8), 10.0) }, Known { pair_s: 2.0, ..known(6, Some(0.1), 10.0) }];
        assert_eq!(least_s(&cells), 4.0, "who has enough takes no time");
        assert_eq!(least_s(&cells.map(|cell| Known { rounds: 0, ..cell })), 6.0);
        assert_eq!(rounds_within(100.0, 24, 4.0), 24);
        assert_eq!(rounds_within(20.0, 24, 4.0), 5);
        assert_eq!(rounds_within(3.0, 24, 4.0), 0);
        assert_eq!(rounds_within(3.0, 24, 0.0), 24, "until a pair was measured nobody knows");
    }

    #[test]
    fn there_are_as_many_rounds_as_servers_can_be_started_for_if_these_are_enough() {
        assert_eq!([0.0, 0.5, 2.0].map(|start_s| rounds_with_starts(24, 540.0, start_s)), [24, 24, 24]);
        assert_eq!([4.0, 6.0].map(|start_s| rounds_with_starts(24, 540.0, start_s)), [13, 9]);
        assert_eq!(rounds_with_starts(24, 540.0, 7.0), 24, "rounds share a start");
        assert_eq!(rounds_with_starts(6, 540.0, 4.0), 6);
        assert!(is_worth_a_start(4.0, 540.0 / 13.0), "each of the thirteen has its own");
        assert!(!is_worth_a_start(10.0, 4.0 * 22.0) && is_worth_a_start(10.0, 5.0 * 22.0), "every fifth of the others");
        assert_eq!((for_starts_s(10.0, 22.0), for_starts_s(1.0, 22.0)), (2.2, 1.0));
    }

    /// A whole run of two cells, one of them noisy: rounds of pairs, allocated by width, until enough or out of time.
    fn run(machine: &mut Machine, truth: f64, noise: [f64; 2]) -> [Judged; 2] {
        const ROUNDS: usize = 10;
        const ROUND_S: f64 = 14.0;
        let mut rounds: [Changes; 2] = Default::default();
        let mut spent_s = [0.0; 2];
        for _ in 0..ROUNDS {
            let known = [0, 1].map(|cell| {
                let interval = rounds[cell].median(Confidence::USUAL);
                let half_width = interval.map(|ends| (ends.high - ends.low) / 2.0 / Tolerance::OF_RUNS.share());
                known(rounds[cell].count(), half_width, spent_s[cell])
            });
            let pairs = pairs(&known, ROUND_S);
            if pairs == [0, 0] {
                break;
            }
            for cell in [0, 1].into_iter().filter(|&cell| pairs[cell] > 0) {
                // What a start of the servers brings for all pairs of a round, and what each of them has.
                let start = 0.002 * machine.normal();
                let change = |_| truth + start + noise[cell] * (machine.uniform().ln() - machine.uniform().ln());
                rounds[cell].groups.push((0..pairs[cell]).map(change).collect());
                spent_s[cell] += to_f64(pairs[cell] as u64);
            }
        }
        let judge = |rounds: Changes| {
            judge_changes(Direction::Lower, &rounds, Tolerance::OF_RUNS, Confidence::USUAL).expect("there are rounds")
        };
        rounds.map(judge)
    }

    #[test]
    fn equal_sides_are_called_different_no_more_often_than_a_fixed_design_would() {
        let mut machine = Machine::new(31);
        let runs = 1500;
        let mut outside = 0;
        let mut different = 0;
        for _ in 0..runs {
            for judged in run(&mut machine, 0.0, [0.01, 0.04]) {
                let ratio = judged.ratio.unwrap();
                outside += usize::from(ratio.is_above(1.0) || ratio.is_below(1.0));
                different += usize::from(matches!(judged.verdict, Verdict::Worse | Verdict::Better));
            }
        }
        let share = |count: usize| count as f64 / f64::from(2 * runs);
        // 5 %, steps of the ranks and what stopping by width costs; one standard error is 0.4 %.
        assert!(share(outside) < 0.065, "{}", share(outside));
        assert!(share(different) <= share(outside));
    }

    #[test]
    fn a_true_difference_beyond_the_tolerance_is_never_called_none_and_noise_is_spread_evenly() {
        let mut machine = Machine::new(37);
        let runs: Vec<[Judged; 2]> = (0..200).map(|_| run(&mut machine, 0.05, [0.01, 0.03])).collect();
        assert!(runs.iter().flatten().all(|judged| judged.verdict != Verdict::NoDifference));
        assert!(runs.iter().flatten().filter(|judged| judged.verdict == Verdict::Worse).count() > 380);
        // Three times the noise is an interval three times as wide where both get the same time.
        let width = |cell: usize| {
            let of = |judged: &[Judged; 2]| judged[cell].ratio.map(|ratio| (ratio.high / ratio.low).ln()).unwrap();
            runs.iter().map(of).sum::<f64>()
        };
        assert!(width(1) < 2.2 * width(0), "{} and {}", width(0), width(1));
    }
}
