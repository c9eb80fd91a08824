//! `kvbench alloc` as its users run it, small enough for a debug build.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

use std::fs;
use std::process::{Command, Output};

use serde_json::Value;

fn kvbench(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvbench")).args(arguments).output().unwrap()
}

fn alloc(flags: &[&str]) -> Output {
    let small = ["alloc", "--blocks", "100,200", "--k", "1,16", "--iters", "20", "--threads", "1,2"];
    kvbench(&[&small, flags].concat())
}

#[test]
fn the_object_on_stdout_is_the_object_in_the_file_and_compares_with_itself() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("alloc.json");
    let path = path.to_str().unwrap();
    let output = alloc(&["--json", "--output", path]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.stdout, fs::read(path).unwrap());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no partial file is left");

    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&result["name"], &result["args"]["batch"]), (&Value::from("alloc"), &Value::from(64)));
    assert_eq!(result["samples"]["blocks200.k16.alloc_free_batch"]["values"].as_array().unwrap().len(), 20);
    for figure in [
        "/alloc_free_ns/k16/p50",
        "/pools/100/k1/p99",
        "/largest_over_smallest_pool/k16",
        "/core_alloc_free_ns/k16/p50",
        "/core_largest_over_smallest_pool/k16",
        "/available_ns/p50",
        "/threads2_over_1",
        "/slow_path_us/p50",
    ] {
        let value = result["summary"].pointer(figure).and_then(Value::as_f64);
        assert!(value.is_some_and(|value| value > 0.0), "{figure}: {value:?}");
    }

    assert_eq!(kvbench(&["compare", path, path, "--fail-above", "0"]).status.code(), Some(0));
}

#[test]
fn a_table_for_people_and_nothing_when_quiet() {
    let table = alloc(&[]);
    assert_eq!(table.status.code(), Some(0));
    assert!(String::from_utf8(table.stdout).unwrap().contains("| 200 blocks, k = 16 |"));
    let quiet = alloc(&["--quiet"]);
    assert_eq!((quiet.status.code(), quiet.stdout.len(), quiet.stderr.len()), (Some(0), 0, 0));
}

#[test]
fn bad_input_is_one_sentence_and_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("alloc.json");
    for flags in [&["--occupancy", "1.5"][..], &["--occupancy", "0.99"], &["--blocks-per-page", "0"]] {
        let output = alloc(&[flags, &["--quiet", "--output", path.to_str().unwrap()]].concat());
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{stderr}");
        assert!(stderr.starts_with("error: ") && stderr.lines().count() == 1, "{stderr}");
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}
