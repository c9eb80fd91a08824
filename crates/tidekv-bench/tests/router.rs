//! `kvbench router` as a person runs it.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

mod support;

use std::path::Path;

use support::{KvBench, Running, wait_for_end};

/// kvctl is a program of another crate: it is beside kvbench where both were built, and these tests build kvbench alone.
fn kvctl() -> Option<std::path::PathBuf> {
    let beside = Path::new(env!("CARGO_BIN_EXE_kvbench")).parent().unwrap().join("kvctl");
    beside.is_file().then_some(beside)
}

#[test]
fn both_ways_are_measured_and_streams_are_held() {
    let Some(kvctl) = kvctl() else {
        eprintln!("SKIPPED: both_ways_are_measured_and_streams_are_held: kvctl was not built");
        return;
    };
    let args = ["--rounds", "1", "--round", "300ms", "--rate", "50", "--streams", "100", "--kvctl"];
    let result = KvBench::new("router").args(&args).args(&[kvctl.to_str().unwrap()]).json();
    let figure = |path: &str| result.pointer(&format!("/summary/{path}")).and_then(serde_json::Value::as_f64);
    assert_eq!(figure("streams_held"), Some(100.0));
    for name in ["added_ttft_ms", "direct_ttft_ms", "routed_ttft_ms"] {
        for percent in ["p50", "p99"] {
            assert!(figure(&format!("{name}/{percent}")).is_some(), "{name}.{percent} in {result}");
        }
    }
    assert_eq!(result["samples"]["direct_ttft"]["count"], 15);
}

#[test]
fn a_killed_benchmark_takes_its_router_with_it() {
    let Some(kvctl) = kvctl() else {
        eprintln!("SKIPPED: a_killed_benchmark_takes_its_router_with_it: kvctl was not built");
        return;
    };
    let args = ["--rounds", "1", "--round", "60s", "--kvctl", kvctl.to_str().unwrap()];
    let mut run = Running::start(KvBench::new("router").args(&args));
    let children = run.wait_for_children(1);
    run.kill();
    children.into_iter().for_each(wait_for_end);
}

#[test]
fn what_makes_no_sense_is_refused() {
    KvBench::new("router").args(&["--rate", "0"]).refused("--rate is 0");
    KvBench::new("router").args(&["--round", "1ms"]).refused("--round is too short");
    KvBench::new("router").args(&["--kvctl", "/no/such"]).refused("running /no/such");
}
