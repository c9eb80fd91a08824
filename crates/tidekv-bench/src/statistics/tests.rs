//! Whether intervals keep their promise: thousands of comparisons of runs that were made up, from a fixed sequence.

use super::simulation::Machine;
use super::*;

/// Share of comparisons whose interval holds the ratio 1.05 that is true.
fn coverage(runs: usize, make: fn(&mut Machine, usize, f64, f64) -> Vec<f64>) -> f64 {
    let mut machine = Machine::new(7);
    let bootstrap = Bootstrap { draws: 300, ..Bootstrap::default() };
    let comparisons = 1000;
    let held = (0..comparisons).filter(|_| {
        let a = make(&mut machine, runs, 200.0, 0.02);
        let b = make(&mut machine, runs, 210.0, 0.02);
        let estimate = bootstrap.ratio(&a, &b).unwrap();
        estimate.low <= 1.05 && 1.05 <= estimate.high
    });
    held.count() as f64 / f64::from(comparisons)
}

#[test]
fn an_interval_of_95_percent_holds_the_truth_in_about_95_of_100_comparisons() {
    for runs in [5, 8, 12] {
        for make in [Machine::quiet, Machine::with_hiccups] {
            let share = coverage(runs, make);
            assert!((0.93..=0.995).contains(&share), "{runs} runs a side: {share}");
        }
    }
}

#[test]
fn the_rank_test_errs_no_more_often_than_it_says() {
    let mut machine = Machine::new(11);
    for (runs, exact) in [(4, 2.0 / 70.0), (5, 8.0 / 252.0), (10, 0.0433)] {
        let wrong = (0..2000).filter(|_| {
            let (a, b) = (machine.with_hiccups(runs, 1.0, 0.02), machine.with_hiccups(runs, 1.0, 0.02));
            mann_whitney(&a, &b) <= 0.05
        });
        let share = wrong.count() as f64 / 2000.0;
        // Four standard errors around the level that counting the orders gives.
        assert!((share - exact).abs() < 4.0 * (exact / 2000.0f64).sqrt(), "{runs} runs a side: {share}");
    }
}

#[test]
fn what_power_promises_is_found_four_times_in_five() {
    let mut machine = Machine::new(13);
    let runs = runs_for(0.05, 0.03, Confidence::USUAL).unwrap();
    let bootstrap = Bootstrap { draws: 300, ..Bootstrap::default() };
    let found = (0..500).filter(|_| {
        let (a, b) = (machine.quiet(runs, 100.0, 0.03), machine.quiet(runs, 105.0, 0.03));
        bootstrap.ratio(&a, &b).unwrap().is_above(1.0)
    });
    let share = found.count() as f64 / 500.0;
    assert!((0.72..0.95).contains(&share), "{runs} runs a side: {share}");
}
