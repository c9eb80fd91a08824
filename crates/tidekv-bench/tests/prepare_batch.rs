//! `kvbench prepare-batch` as its users run it, small enough for a debug build.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

mod support;

use std::fs;

use serde_json::Value;
use support::KvBench;

fn prepare_batch(flags: &[&str]) -> KvBench {
    KvBench::new("prepare-batch").args(&["--backend", "cpu", "--iterations", "3"]).args(flags)
}

#[test]
fn the_quick_test_passes_and_says_so() {
    let text = prepare_batch(&["--quick"]).stdout();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "=".repeat(80));
    assert_eq!(lines[1], "KV Cache Management Benchmark: CPU vs GPU");
    assert_eq!(lines[2], "=".repeat(80));
    assert_eq!(
        lines[3].trim_end(),
        "Batch Size   Seq Len   CPU Update (ms) GPU Update (ms) Speedup   CPU Pack (ms) GPU Pack (ms) Speedup"
    );
    assert_eq!(lines[4], "-".repeat(80));
    let row: Vec<&str> = lines[5].split_whitespace().collect();
    assert_eq!((row[0], row[1], row[3], row[4]), ("4", "64", "no", "GPU"));
    assert!(row[2].parse::<f64>().unwrap() > 0.0, "times below a microsecond keep their digits: {}", row[2]);
    assert!(text.contains("The GPU columns are empty: --backend has no cuda\n"));
    assert!(lines.last().unwrap().starts_with("PASS: "), "{text}");
}

#[test]
fn the_object_has_every_cell_and_compares_with_itself() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("results.json");
    let path = path.to_str().unwrap();
    let flags = ["--batch-sizes", "2", "8", "--seq-lens", "20,33", "--block-size", "4", "--verify", "--output", path];
    let result = prepare_batch(&flags).json();
    assert_eq!(result, serde_json::from_slice::<Value>(&fs::read(path).unwrap()).unwrap());
    assert_eq!(result["name"], "prepare-batch");
    let summary = &result["summary"];
    let cells = summary["cells"].as_array().unwrap();
    let sizes: Vec<_> = cells.iter().map(|cell| (cell["batch"].as_u64(), cell["seq"].as_u64())).collect();
    assert_eq!(sizes, [(2, 20), (2, 33), (8, 20), (8, 33)].map(|(batch, seq)| (Some(batch), Some(seq))));
    assert!(cells.iter().all(|cell| cell["cpu_step_us"].as_f64().unwrap() > 0.0 && cell.get("gpu_step_us").is_none()));
    for op in ["update", "pack", "step", "prefill", "mixed", "free"] {
        for figure in ["mean", "p50", "p10", "p90"] {
            let value = summary.pointer(&format!("/ops/8x33/{op}_us/{figure}")).and_then(Value::as_f64);
            assert!(value.is_some_and(|value| value > 0.0), "{op} {figure}: {value:?}");
        }
    }
    assert!(summary["seq_growth"].as_f64().unwrap() > 0.0);
    assert!(summary["verified_steps"].as_u64().unwrap() > 4 * 5);
    assert_eq!(summary["gpu_absent"], "--backend has no cuda");
    let same = KvBench::new("compare").args(&[path, path, "--fail-above", "0"]).output();
    assert_eq!(same.status.code(), Some(0));
}

#[test]
fn a_cell_that_does_not_fit_says_what_to_reduce_and_the_others_run() {
    // A million sequences of a million tokens: more entries than a table can have, whatever the memory.
    let output = prepare_batch(&["--batch-sizes", "1048576", "2", "--seq-lens", "1048576", "--ops", "update"]).output();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    let row = |batch: &str| text.lines().find(|line| line.starts_with(&format!("{batch:<13}1048576"))).unwrap();
    assert!(row("1048576").ends_with("reduce --batch-sizes or --seq-lens"), "{text}");
    assert!(row("2").split_whitespace().nth(2).unwrap().parse::<f64>().unwrap() > 0.0, "{text}");
    assert!(String::from_utf8(output.stderr).unwrap().contains("warning: batch 1048576"));
}

#[test]
fn bad_input_is_one_sentence() {
    prepare_batch(&["--block-size", "24"]).refused("--block-size is 24");
    prepare_batch(&["--batch-sizes", "16", "16"]).refused("--batch-sizes has 16 twice");
    prepare_batch(&["--ops", "fly"]).refused("not an operation");
}
