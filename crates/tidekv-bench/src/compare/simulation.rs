//! Whether verdicts are right as often as they say: comparisons of made-up runs whose truth is known, from a fixed
//! sequence, through the very function that judges real ones.

use super::direction::Direction;
use super::judge::{Tolerance, Verdict, judge_pairs, judge_runs};
use crate::statistics::simulation::Machine;
use crate::statistics::{Bootstrap, Confidence};

const COMPARISONS: usize = 300;

/// Fewer draws: the ends of an interval are a little less sharp, and a comparison takes a tenth of the time.
fn fast() -> Bootstrap {
    Bootstrap { draws: 250, ..Bootstrap::default() }
}

/// How often each verdict is given for B that truly takes `factor` times as long as A.
struct Tally {
    better: f64,
    worse: f64,
    no_difference: f64,
    underpowered: f64,
}

fn tally(runs: usize, factor: f64, noise: f64, hiccups: bool) -> Tally {
    let mut machine = Machine::new(17);
    let mut make = |truth| {
        if hiccups { machine.with_hiccups(runs, truth, noise) } else { machine.quiet(runs, truth, noise) }
    };
    let mut verdicts = Vec::with_capacity(COMPARISONS);
    for _ in 0..COMPARISONS {
        let (a, b) = (make(100.0), make(100.0 * factor));
        verdicts.push(judge_runs(Direction::Lower, &a, &b, Tolerance::OF_RUNS, &fast()).verdict);
    }
    shares(&verdicts)
}

fn shares(verdicts: &[Verdict]) -> Tally {
    let share = |wanted| verdicts.iter().filter(|verdict| **verdict == wanted).count() as f64 / verdicts.len() as f64;
    Tally {
        better: share(Verdict::Better),
        worse: share(Verdict::Worse),
        no_difference: share(Verdict::NoDifference),
        underpowered: share(Verdict::Underpowered),
    }
}

#[test]
fn a_true_difference_of_5_percent_is_found() {
    for (runs, noise) in [(5, 0.01), (10, 0.02), (20, 0.03)] {
        let slower = tally(runs, 1.05, noise, false);
        assert!(slower.worse > 0.9, "{runs} runs with noise {noise}: found in {}", slower.worse);
        assert_eq!(slower.better, 0.0);
        let faster = tally(runs, 1.0 / 1.05, noise, false);
        assert!(faster.better > 0.9 && faster.worse == 0.0, "{runs} runs: found in {}", faster.better);
    }
    let with_hiccups = tally(20, 1.05, 0.02, true);
    assert!(with_hiccups.worse > 0.9, "a hiccup in every tenth run: found in {}", with_hiccups.worse);
}

#[test]
fn equal_sides_have_no_difference() {
    for (runs, noise) in [(5, 0.008), (10, 0.01), (20, 0.015)] {
        let equal = tally(runs, 1.0, noise, false);
        assert!(equal.no_difference > 0.9, "{runs} runs with noise {noise}: {}", equal.no_difference);
    }
}

#[test]
fn few_or_noisy_runs_are_underpowered() {
    for runs in [2, 3] {
        let few = tally(runs, 1.05, 0.001, false);
        assert_eq!(few.underpowered, 1.0, "{runs} runs a side cannot show anything at 95 %");
    }
    let noisy = tally(5, 1.0, 0.10, false);
    assert!(noisy.underpowered > 0.93, "an interval wider than the tolerance is no pass: {}", noisy.underpowered);
    assert!(noisy.no_difference < 0.05, "{}", noisy.no_difference);
}

#[test]
fn no_more_than_1_in_20_comparisons_of_equal_sides_sees_a_difference() {
    for runs in [4, 5, 8, 12] {
        for (noise, hiccups) in [(0.02, false), (0.02, true), (0.10, false)] {
            let equal = tally(runs, 1.0, noise, hiccups);
            let wrong = equal.better + equal.worse;
            // 300 comparisons: one standard error is 1.3 %.
            assert!(wrong < 0.05 + 2.0 * 0.0126, "{runs} runs, noise {noise}, hiccups {hiccups}: {wrong}");
        }
    }
}

#[test]
fn a_difference_as_large_as_the_tolerance_is_rarely_called_none() {
    // Truth is exactly at the tolerance: "no difference" would be wrong, and may happen in 1 of 40.
    for runs in [5, 10] {
        let at_the_edge = tally(runs, 1.03, 0.01, false);
        assert!(at_the_edge.no_difference < 0.06, "{runs} runs: {}", at_the_edge.no_difference);
    }
}

#[test]
fn pairs_err_as_rarely() {
    let mut machine = Machine::new(19);
    let mut judge = |factor: f64| {
        // Drift that is far larger than the difference, and common to both of a pair.
        let hours = machine.quiet(10, 100.0, 0.3);
        let noise = machine.quiet(20, 1.0, 0.01);
        let pair = |i: usize| (hours[i].abs() * noise[2 * i], hours[i].abs() * noise[2 * i + 1] * factor);
        let pairs: Vec<(f64, f64)> = (0..10).map(pair).collect();
        judge_pairs(Direction::Lower, &pairs, Tolerance::OF_RUNS, Confidence::USUAL).verdict
    };
    let equal = shares(&(0..COMPARISONS).map(|_| judge(1.0)).collect::<Vec<_>>());
    assert!(equal.better + equal.worse < 0.05 && equal.no_difference > 0.9, "{}", equal.no_difference);
    let slower = shares(&(0..COMPARISONS).map(|_| judge(1.05)).collect::<Vec<_>>());
    assert!(slower.worse > 0.9, "{}", slower.worse);
}
