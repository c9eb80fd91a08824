//! `kvbench attention`, `decode` and `interference` as a person runs them, without a GPU.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

mod support;

use std::fs;

use serde_json::Value;
use support::{KvBench, Running};

/// What makes a run short, whatever it then says of the machine. How many pairs and how large pages are is said beside it.
const SHORT: [&str; 10] =
    ["--streams", "2", "--input-len", "8", "--output-len", "16", "--pages", "4", "--kv-budget", "64M"];

fn figure(result: &Value, path: &str) -> f64 {
    let found = result.pointer(&format!("/summary/{path}")).and_then(Value::as_f64);
    found.unwrap_or_else(|| panic!("summary has no {path}: {}", result["summary"]))
}

#[test]
fn decode_steps_are_timed_beside_a_reading_of_the_weights() {
    let args = ["--model", "synthetic:tiny", "--batch", "1,3", "--context", "40", "--steps", "16"];
    let result = KvBench::new("decode").args(&args).json();
    for cell in 0..2 {
        for name in ["step_ms/p50", "step_ms/p99", "tokens_per_s", "weights_read_ms", "ratio_to_floor"] {
            assert!(figure(&result, &format!("cells/{cell}/{name}")) > 0.0, "{name}");
        }
    }
    assert_eq!(figure(&result, "cells/1/batch"), 3.0);
    assert!(figure(&result, "ratio_to_floor") > 0.0 && figure(&result, "weight_bytes") > 1e5);
    assert_eq!(result["samples"]["3x40.step"]["count"], 16);
    assert_eq!(result["samples"]["3x40.weights_read"]["count"], 2);
}

/// Both kinds of rates, with every page written; whether there is interference is no question for so short a run.
#[test]
fn a_model_answers_beside_a_neighbour_that_maps() {
    let output = KvBench::new("interference")
        .args(&SHORT)
        .args(&["--pairs", "2", "--page-size", "2M", "--map-rate", "50,max", "--touch", "--json"])
        .output();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(matches!(output.status.code(), Some(0 | 1)), "{stderr}");
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(figure(&result, "failed"), 0.0);
    for rate in 0..2 {
        for name in ["itl_p50_ratio", "itl_p99_ratio", "tokens_per_s_ratio", "mapped_pages_per_s", "map_us/p50"] {
            assert!(figure(&result, &format!("rates/{rate}/{name}")) > 0.0, "{name}");
        }
        for side in ["quiet", "mapping"] {
            assert!(figure(&result, &format!("rates/{rate}/{side}/itl_p99_ms")) > 0.0, "{side}");
        }
    }
    assert_eq!(
        (&result["summary"]["rates"][0]["map_rate"], &result["summary"]["rates"][1]["map_rate"]),
        (&50.0.into(), &"max".into())
    );
    assert_eq!(result["samples"]["max.quiet.itl_p99"]["count"], 2, "one for each slice: {}", result["samples"]);
}

#[test]
fn a_neighbour_without_room_is_an_error_that_says_so() {
    // A page that is no multiple of what the system gives memory in.
    KvBench::new("interference").args(&SHORT).args(&["--page-size", "1000"]).refused("1000 B is no multiple of");
}

/// Ctrl-C while slices are measured: server and neighbour end, and nothing stays behind but what was measured.
#[test]
fn an_interrupted_run_keeps_what_it_has_and_leaves_nothing_else() {
    let kept = tempfile::tempdir().unwrap();
    let file = kept.path().join("partial.json");
    let command = KvBench::new("interference").args(&SHORT).args(&["--pairs", "1000", "--page-size", "2M"]);
    let mut run = Running::start(command.args(&["--output", file.to_str().unwrap()]));
    // The server's guard and the neighbour.
    run.wait_for_children(2);
    run.interrupt();
    assert_eq!(run.code(), Some(130));
    assert_eq!(run.dir().read_dir().unwrap().count(), 0);
    let result: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(
        (&result["partial"], &result["summary"]["verdict"]),
        (&true.into(), &"interrupted: nothing is concluded".into())
    );
}

#[test]
fn without_a_gpu_one_sentence_says_what_is_missing() {
    for command in ["attention", "decode", "interference"] {
        let output = KvBench::new(command).args(&["--backend", "cuda", "--quick"]).without_gpus().output();
        let stderr = String::from_utf8(output.stderr).unwrap();
        let said: Vec<&str> =
            stderr.lines().filter(|line| !line.starts_with("warning: this is a debug build")).collect();
        assert_eq!((output.status.code(), output.stdout.len(), said.len()), (Some(2), 0, 1), "{command}: {stderr}");
        assert!(said[0].starts_with("error: ") && (said[0].contains("GPU") || said[0].contains("CUDA")), "{stderr}");
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    KvBench::new("attention").args(&["--batch", "0"]).refused("--batch has 0");
    KvBench::new("attention").args(&["--model", "some/folder"]).refused("knows those of synthetic models");
    KvBench::new("decode").args(&["--steps", "0"]).refused("--steps is 0");
    KvBench::new("decode").args(&["--model", "synthetic:huge"]).refused("synthetic:huge");
    KvBench::new("interference").args(&["--output-len", "1"]).refused("--output-len is 1");
}
