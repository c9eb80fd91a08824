//! How long a run takes, and how much of it fits into the time there is: pure arithmetic.
//!
//! ```text
//!   |- measured ---|- starts -|- repeat 1: A B, A B -|- repeat 2 -| ... |- without bounds -|
//!   0                                                                                      limit
//!                                static, peaks apart     ▄▄▄▄▄▄▄▄▄             a peak that waits for memory
//!                                elastic                 ▄▄▄▄                  takes need / share times as long
//! ```
//!
//! What does not fit goes in this order: requests of a peak, down to [`LEAST_PART`] of them; the run without bounds; repeats;
//! the rest of the requests. What somebody asked for by a flag stays as it is.

use super::scenario::{Peaks, Scenario};
use crate::stats::to_f64;

/// From one peak to the next, as a part of a peak.
pub(super) const PAUSE: f64 = 0.25;
/// Peaks shorter than this part of the scenario's are no longer the scenario, so something else goes first.
const LEAST_PART: f64 = 0.5;
/// What a plan leaves unused, for what it does not know: a part of the time left.
const SLACK: f64 = 0.08;
/// Answers that a fleet gives before it is measured, one after the other.
pub(super) const WARMUP_REQUESTS: usize = 2;

/// What measuring the machine said about time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// Requests a second that it computes when memory is no bound.
    pub(super) capacity_per_s: f64,
    /// From a server's start to its first answer.
    pub(super) start_s: f64,
    /// One answer, at the scenario's load.
    pub(super) answer_s: f64,
}

/// What somebody wants of a run; fixed is what a flag said.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) repeats: u32,
    pub(super) repeats_fixed: bool,
    pub(super) requests_fixed: bool,
}

/// What fits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Fit {
    /// Part of the requests of each scenario's peaks.
    pub(super) requests_part: f64,
    pub(super) repeats: u32,
    /// Whether there is a run in which every model has the whole budget.
    pub(super) unlimited: bool,
    /// From now on.
    pub(super) expected_s: f64,
}

/// Who serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Static,
    /// Elastic, and without bounds.
    Free,
}

impl Fit {
    /// The requests of a scenario's peak.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a part of a count, not negative")]
    pub(super) fn requests(&self, scenario: &Scenario) -> usize {
        ((to_f64(scenario.requests_per_peak as u64) * self.requests_part) as usize).max(1)
    }

    /// The most of `wanted` that takes no longer than `left_s`; at least one repeat of one request.
    pub(super) fn of(scenarios: &[Scenario], pace: Pace, wanted: Wanted, left_s: f64) -> Self {
        let usable_s = left_s * (1.0 - SLACK);
        let fewest = if wanted.repeats_fixed { wanted.repeats } else { 1 };
        let mut choices: Vec<(u32, bool)> = vec![(wanted.repeats, true)];
        choices.extend((fewest..=wanted.repeats).rev().map(|repeats| (repeats, false)));
        let fit = |&(repeats, unlimited): &(u32, bool)| {
            let cost_s = |part| cost_s(scenarios, pace, repeats, unlimited, part);
            // Straight lines: what a whole peak costs more than none is what a part of it costs in proportion.
            let (none_s, all_s) = (cost_s(0.0), cost_s(1.0));
            let possible = ((usable_s - none_s) / (all_s - none_s)).clamp(0.0, 1.0);
            let part = if wanted.requests_fixed { 1.0 } else { possible };
            (Self { requests_part: part, repeats, unlimited, expected_s: cost_s(part) }, possible)
        };
        let least = if wanted.requests_fixed { 1.0 } else { LEAST_PART };
        let fits = choices.iter().map(fit).find(|(_, possible)| *possible >= least);
        fits.unwrap_or_else(|| fit(&(fewest, false))).0
    }
}

/// Seconds of a run from the first server's start to the last answer.
fn cost_s(scenarios: &[Scenario], pace: Pace, repeats: u32, unlimited: bool, part: f64) -> f64 {
    let models = scenarios.iter().map(|scenario| scenario.models).max().unwrap_or(0);
    let fleets = if unlimited { 3.0 } else { 2.0 };
    // All models warm up at once, and share what computes.
    let fleet_s = to_f64(models as u64) * (pace.start_s + to_f64(WARMUP_REQUESTS as u64) * pace.answer_s);
    let repeat_s = |scenario| leg_s(scenario, pace, Side::Static, part) + leg_s(scenario, pace, Side::Free, part);
    let repeats_s: f64 = scenarios.iter().map(repeat_s).sum::<f64>() * f64::from(repeats);
    let without_bounds_s = || scenarios.iter().map(|scenario| leg_s(scenario, pace, Side::Free, part)).sum::<f64>();
    fleets * fleet_s + repeats_s + if unlimited { without_bounds_s() } else { 0.0 }
}

/// Seconds that a side takes to serve a scenario with `part` of its requests.
fn leg_s(scenario: &Scenario, pace: Pace, side: Side, part: f64) -> f64 {
    let rate = pace.capacity_per_s * scenario.offered;
    let peak_s = to_f64(scenario.requests_per_peak as u64) * part / rate;
    let models = to_f64(scenario.models as u64);
    // With a part of the memory that it needs a peak takes that many times as long, and where it runs into the next one
    // they are in each other's way.
    let shortage = (scenario.peak_need * models).max(1.0);
    let served_s = match (scenario.peaks, side) {
        (Peaks::Disjoint, Side::Free) => (models - 1.0) * (1.0 + PAUSE) * peak_s + peak_s,
        (Peaks::Disjoint, Side::Static) => models * peak_s * shortage,
        (Peaks::Simultaneous, _) => models * peak_s,
    };
    served_s + pace.answer_s
}

/// Whether one more repeat fits, when the longest so far took `longest_s` and `reserved_s` must be left behind it.
pub(super) fn has_time(elapsed_s: f64, longest_s: f64, reserved_s: f64, limit_s: f64) -> bool {
    elapsed_s + longest_s * (1.0 + SLACK) + reserved_s <= limit_s
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PACE: Pace = Pace { capacity_per_s: 10.0, start_s: 0.5, answer_s: 3.0 };
    const WANTED: Wanted = Wanted { repeats: 6, repeats_fixed: false, requests_fixed: false };

    fn shipped() -> Vec<Scenario> {
        Scenario::shipped().unwrap().to_vec()
    }

    #[test]
    fn everything_fits_into_enough_time() {
        let fit = Fit::of(&shipped(), PACE, WANTED, 1e6);
        assert_eq!((fit.requests_part, fit.repeats, fit.unlimited), (1.0, 6, true));
        assert_eq!(fit.requests(&shipped()[0]), shipped()[0].requests_per_peak);
    }

    #[test]
    fn requests_go_before_the_run_without_bounds_and_that_before_repeats() {
        let whole_s = Fit::of(&shipped(), PACE, WANTED, 1e6).expected_s;
        let at = |share: f64| Fit::of(&shipped(), PACE, WANTED, whole_s * share);
        let shorter = at(0.8);
        assert!(shorter.requests_part < 1.0 && shorter.repeats == 6 && shorter.unlimited, "{shorter:?}");
        let fewer = at(0.3);
        assert!(fewer.requests_part >= LEAST_PART && fewer.repeats < 6 && !fewer.unlimited, "{fewer:?}");
        let least = at(0.02);
        assert!(least.requests_part < LEAST_PART && least.repeats == 1, "{least:?}");
    }

    #[test]
    fn what_a_flag_says_stays() {
        let fixed = Wanted { repeats_fixed: true, requests_fixed: true, ..WANTED };
        let fit = Fit::of(&shipped(), PACE, fixed, 1.0);
        assert_eq!((fit.requests_part, fit.repeats, fit.unlimited), (1.0, 6, false));
        let requests = Wanted { requests_fixed: true, ..WANTED };
        let fit = Fit::of(&shipped(), PACE, requests, 300.0);
        assert!(fit.requests_part == 1.0 && fit.repeats < 6, "{fit:?}");
    }

    #[test]
    fn a_repeat_that_would_end_too_late_is_not_begun() {
        assert!(has_time(100.0, 50.0, 20.0, 200.0));
        assert!(!has_time(150.0, 50.0, 0.0, 200.0), "the next one may take a little longer");
        assert!(!has_time(100.0, 50.0, 60.0, 200.0));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// What is planned ends in time, unless not even a single repeat of next to nothing would.
        #[test]
        fn a_plan_ends_in_time(
            capacity_per_s in 0.5..500.0f64,
            start_s in 0.01..30.0f64,
            answer_s in 0.01..20.0f64,
            repeats in 1u32..20,
            left_s in 1.0..4000.0f64,
        ) {
            let (scenarios, pace) = (shipped(), Pace { capacity_per_s, start_s, answer_s });
            let fit = Fit::of(&scenarios, pace, Wanted { repeats, ..WANTED }, left_s);
            prop_assert!((1..=repeats).contains(&fit.repeats) && (0.0..=1.0).contains(&fit.requests_part));
            prop_assert!(scenarios.iter().all(|scenario| fit.requests(scenario) >= 1));
            let least_s = cost_s(&scenarios, pace, 1, false, 0.0);
            prop_assert!(fit.expected_s <= left_s.max(least_s + 1e-6), "{fit:?}");
            // More time never means less of a run.
            let more = Fit::of(&scenarios, pace, Wanted { repeats, ..WANTED }, left_s * 1.5);
            prop_assert!(more.repeats >= fit.repeats);
        }
    }
}
