//! Arrival processes against their definitions and against dull models.

use super::*;
use proptest::prelude::*;

const FOREVER: u64 = u64::MAX;

fn gaps_s(arrivals: &Arrivals, count: usize, seed: u64) -> Vec<f64> {
    let times = arrivals.times_ns(Course::Requests(count + 1), count + 1, FOREVER, seed);
    times.windows(2).map(|pair| (pair[1] - pair[0]) as f64 / 1e9).collect()
}

fn mean_and_cv(values: &[f64]) -> (f64, f64) {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / values.len() as f64;
    (mean, variance.sqrt() / mean)
}

#[test]
fn gaps_have_the_mean_and_the_spread_of_a_gamma() {
    for burstiness in [0.25, 0.5, 1.0, 4.0, 100.0] {
        let (mean, cv) = mean_and_cv(&gaps_s(&Arrivals::Rate { per_s: 10.0, burstiness }, 40_000, 5));
        assert!((mean - 0.1).abs() < 0.004, "{burstiness}: mean {mean}");
        assert!((cv * burstiness.sqrt() - 1.0).abs() < 0.05, "{burstiness}: spread {cv}");
    }
    let constant = gaps_s(&Arrivals::constant(8.0), 100, 5);
    assert!(constant.iter().all(|gap| (gap - 0.125).abs() < 1e-8));
}

#[test]
fn seeds_differ_and_repeat() {
    let times = |seed| Arrivals::poisson(100.0).times_ns(Course::Requests(50), 50, FOREVER, seed);
    assert_eq!(times(1), times(1));
    assert_ne!(times(1), times(2));
    assert_eq!(times(1)[0], 0, "the first goes at once");
}

#[test]
fn a_ramp_rises_from_its_start_to_its_end() {
    for strategy in [RampStrategy::Linear, RampStrategy::Exponential] {
        let ramp = Arrivals::Ramp { strategy, start_per_s: 1.0, end_per_s: 10.0, burstiness: f64::INFINITY };
        let gaps = gaps_s(&ramp, 99, 0);
        assert!(
            (gaps[0] - 1.0).abs() < 1e-6
                && (ramp.ramp_rate(Course::Requests(100), 99, 0.0).unwrap() - 10.0).abs() < 1e-9
        );
        assert!(gaps.windows(2).all(|pair| pair[1] < pair[0]), "{gaps:?}");
    }
}

/// So many requests that nobody said how many: the rate did not move at all.
#[test]
fn a_ramp_of_a_duration_rises_within_it() {
    for strategy in [RampStrategy::Linear, RampStrategy::Exponential] {
        let ramp = Arrivals::Ramp { strategy, start_per_s: 1.0, end_per_s: 50.0, burstiness: f64::INFINITY };
        let course = Course::Time(Duration::from_secs(60));
        let times = ramp.times_ns(course, usize::MAX, 60_000_000_000, 0);
        let within =
            |from: u64, to: u64| times.iter().filter(|&&at| (from..to).contains(&(at / 1_000_000_000))).count();
        let (first, last) = (within(0, 1), within(59, 60));
        assert!(first <= 2 && (48..=50).contains(&last), "{strategy:?}: {first} and {last}");
        // The integral of the rate: (1 + 50) / 2 * 60, or 60 * 49 / ln(50).
        let whole = if strategy == RampStrategy::Linear { 1530.0 } else { 751.5 };
        let share = crate::stats::to_f64(times.len() as u64) / whole;
        assert!((0.97..1.03).contains(&share), "{strategy:?}: {}", times.len());
    }
}

#[test]
fn a_square_wave_keeps_both_rates_and_its_phase() {
    let wave = |phase| Arrivals::SquareWave {
        low_per_s: 0.0,
        high_per_s: 10.0,
        period: Duration::from_secs(10),
        duty: 0.2,
        phase: Duration::from_secs(phase),
        burstiness: f64::INFINITY,
    };
    const S: u64 = 1_000_000_000;
    let times = |phase| wave(phase).times_ns(Course::Requests(60), 60, FOREVER, 0);
    // 2 s of 10 a second, then 8 s of silence. A request may fall on the edge itself.
    let is_high = |at_ns: &u64| at_ns % (10 * S) <= 2 * S;
    let from_the_edge = times(0);
    assert_eq!(from_the_edge.iter().filter(|&&at_ns| at_ns < 2 * S - S / 20).count(), 20);
    assert!(from_the_edge.iter().all(is_high), "{from_the_edge:?}");
    let from_the_middle: Vec<u64> = times(5).iter().map(|at_ns| at_ns + 5 * S).collect();
    assert_eq!(from_the_middle[0], 10 * S, "a wave that begins in silence waits for its edge");
    assert!(from_the_middle.iter().all(is_high), "{from_the_middle:?}");
}

#[test]
fn what_cannot_be_is_refused() {
    let wave = |duty, period_s| Arrivals::SquareWave {
        low_per_s: 1.0,
        high_per_s: 2.0,
        period: Duration::from_secs(period_s),
        duty,
        phase: Duration::ZERO,
        burstiness: 1.0,
    };
    for bad in [
        Arrivals::poisson(0.0),
        Arrivals::poisson(-1.0),
        Arrivals::poisson(f64::NAN),
        Arrivals::poisson(f64::INFINITY),
        Arrivals::Rate { per_s: 1.0, burstiness: 0.0 },
        Arrivals::Trace { speed: 0.0 },
        wave(0.0, 1),
        wave(1.0, 1),
        wave(0.5, 0),
    ] {
        assert!(bad.check().is_err(), "{bad:?}");
    }
    assert!(wave(0.5, 1).check().is_ok() && Arrivals::constant(1e6).check().is_ok());
}

proptest! {
    #[test]
    fn times_rise_and_stay_before_the_end(
        per_s in 0.1..1000.0f64, low in 0.0..50.0f64, burstiness in 0.2..10.0f64, period_ms in 1..5000u64,
        duty in 0.05..0.95f64, phase_ms in 0..5000u64, end_ms in 1..20_000u64, seed: u64,
    ) {
        let wave = Arrivals::SquareWave {
            low_per_s: low,
            high_per_s: per_s,
            period: Duration::from_millis(period_ms),
            duty,
            phase: Duration::from_millis(phase_ms),
            burstiness,
        };
        for arrivals in [wave, Arrivals::Rate { per_s, burstiness }] {
            let times = arrivals.times_ns(Course::Requests(300), 300, end_ms * 1_000_000, seed);
            prop_assert!(times.windows(2).all(|pair| pair[0] <= pair[1]));
            prop_assert!(times.iter().all(|&time| time < end_ms * 1_000_000));
        }
    }

    /// The dull model: count in tiny steps. Requests are compared and not times: where they are rare, a little of one is a
    /// lot of the other.
    #[test]
    fn a_wave_of_equal_gaps_is_the_integral_of_its_rate(low in 0.0..20.0f64, high in 1.0..50.0f64, duty in 0.1..0.9f64) {
        let wave = Wave { low, high, period: 1.0, duty };
        let after = wave.after(0.3, 7.0);
        let (mut at, mut sum) = (0.3, 0.0);
        while at < after {
            sum += 1e-4 * if at % 1.0 < duty { high } else { low };
            at += 1e-4;
        }
        prop_assert!((sum - 7.0).abs() < 0.03, "{} requests until {}", sum, after);
    }
}
