//! The arguments, the measuring loops and the figures of `kvbench alloc`, on pools small enough for a debug build.

use super::*;
use crate::compare::figures;
use clap::Parser;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: AllocArgs,
}

fn plan_of(flags: &[&str]) -> anyhow::Result<Plan> {
    let args = Cli::try_parse_from(["alloc"].iter().chain(flags))?.args;
    Plan::of(&args)
}

fn samples(values: &[u64]) -> Samples {
    values.iter().map(|pair_ns| pair_ns * u64::from(BATCH)).collect()
}

fn figures_of(measurements: &[Measurement]) -> Vec<(String, f64)> {
    let mut result = BenchResult::new("alloc", &serde_json::json!({}), HostInfo::default()).unwrap();
    report::fill(&mut result, measurements, &elastic::ElasticTimes::default());
    figures::of_summary(&result.summary).into_iter().map(|figure| (figure.path.join("."), figure.value)).collect()
}

#[test]
fn defaults_are_what_the_help_says() {
    let plan = plan_of(&[]).unwrap();
    assert_eq!((&plan.blocks[..], &plan.k[..]), (&[1000, 1_000_000][..], &[1, 16, 64, 256][..]));
    assert_eq!((plan.iters, plan.batch), (10_000, 64));
    assert_eq!(plan_of(&["--quick"]).unwrap().iters, 1000);
    assert_eq!(plan_of(&["--quick", "--iters", "7"]).unwrap().iters, 7);
}

#[test]
fn bad_values_are_refused_with_the_flag_named() {
    for (flags, named) in [
        (["--iters", "0"], "--iters"),
        (["--occupancy", "1"], "--occupancy"),
        (["--occupancy", "NaN"], "--occupancy"),
        (["--blocks", "0,10"], "--blocks"),
        (["--blocks-per-page", "0"], "--blocks-per-page"),
        (["--k", "0"], "--k"),
        (["--k", "1,1"], "--k"),
        (["--threads", "0"], "--threads"),
    ] {
        let error = plan_of(&flags).unwrap_err().to_string();
        assert!(error.contains(named), "{flags:?}: {error}");
    }
}

#[test]
fn rounds_take_as_many_samples_as_asked() {
    for iters in [1, 7, 10, 19, 10_000] {
        let plan = plan_of(&["--iters", &iters.to_string()]).unwrap();
        let taken: u32 = (0..plan.rounds()).map(|round| plan.samples_in_round(round)).sum();
        assert_eq!(taken, iters);
    }
}

fn measured(side: Side, blocks: u32, alloc_free: &[u64], replace: &[u64]) -> Measurement {
    Measurement { side, blocks, k: 16, alloc_free: samples(alloc_free), replace: samples(replace) }
}

#[test]
fn the_summary_has_the_worst_pool_each_pool_and_the_ratio() {
    let expected = [
        ("alloc_free_ns.k16.p50", 99.0),
        ("alloc_free_ns.k16.p99", 100.0),
        ("replace_ns.k16.p50", 200.0),
        ("replace_ns.k16.p99", 200.0),
        ("pools.1000.k16.p50", 90.0),
        ("pools.1000.k16.p99", 100.0),
        ("pools.1000.replace_k16.p50", 200.0),
        ("pools.1000.replace_k16.p99", 200.0),
        ("pools.5000.k16.p50", 99.0),
        ("pools.5000.k16.p99", 99.0),
        ("largest_over_smallest_pool.k16", 1.1),
    ];
    for (side, prefix) in [(Side::Pool, ""), (Side::Core, "core_")] {
        let small = measured(side, 1000, &[80, 90, 100], &[200]);
        let large = measured(side, 5000, &[90, 99, 99], &[]);
        let expected = expected.map(|(path, value)| (format!("{prefix}{path}"), value));
        assert_eq!(figures_of(&[small, large]), expected);
    }
}

#[test]
fn one_pool_has_no_ratio() {
    let only = measured(Side::Pool, 1000, &[80], &[]);
    assert!(figures_of(&[only]).iter().all(|(path, _)| !path.contains("over")));
}

#[test]
fn a_small_run_measures_everything_it_was_asked_for() {
    let plan = plan_of(&["--blocks", "100,200", "--k", "1,4", "--iters", "3", "--threads", "2"]).unwrap();
    let memory = Memory { backend: tidekv_mem::open(BackendName::Fake, 0).unwrap(), lab: Lab::new().unwrap() };
    let measurements = measure(&plan, &memory, &Progress::hidden()).unwrap();
    assert_eq!(measurements.len(), 8, "two pools, two k, two sides");
    for measurement in &measurements {
        assert_eq!((measurement.alloc_free.len(), measurement.replace.len()), (3, 3));
    }
    let elastic = elastic::measure(&plan, &memory, &Progress::hidden()).unwrap();
    assert_eq!(elastic.rates.iter().map(|rate| rate.threads).collect::<Vec<_>>(), [1, 2]);
    assert!(!elastic.available.is_empty() && !elastic.slow_path.is_empty());
    let tables = report::tables(&measurements, &elastic);
    assert!(tables.contains("| 200 blocks, k = 4 |"), "{tables}");
    assert!(tables.lines().all(|line| line.chars().count() <= 80), "{tables}");
}
