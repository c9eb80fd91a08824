//! `kvbench report` as its users run it.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::json;

fn report(args: &[&Path]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvbench")).arg("report").args(args).output().unwrap()
}

fn result(name: &str) -> String {
    json!({"schema": "tidekv.bench.v1", "name": name, "args": {}, "host": {"cpu": "a cpu"}, "samples": {},
           "summary": {"map_us": {"p50": 31.2}}})
    .to_string()
}

#[test]
fn a_folder_becomes_a_page_and_a_bundle() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("vmm.json"), result("vmm")).unwrap();
    fs::write(folder.path().join("notes.json"), "{}").unwrap();
    let bundle = folder.path().join("all.tar.gz");
    let output = report(&[folder.path(), Path::new("--bundle"), &bundle]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let page = folder.path().join("report.html");
    let printed = String::from_utf8(output.stdout).unwrap();
    assert_eq!(printed, format!("{}\n{}\n", page.display(), bundle.display()));
    assert!(String::from_utf8_lossy(&output.stderr).contains("notes.json is left out"));
    let page = fs::read_to_string(page).unwrap();
    assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n") && page.contains("map_us.p50"));
    assert!(fs::read(&bundle).unwrap().starts_with(&[0x1f, 0x8b]), "gzip");
    // What was made by a report is no result, and does not get in the way of the next one.
    assert_eq!(report(&[folder.path()]).status.code(), Some(0));
}

#[test]
fn what_cannot_be_done_is_one_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    for (args, part) in [(vec![folder.path()], "has no results"), (vec![missing.as_path()], "missing")] {
        let output = report(&args);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{stderr}");
        assert!(stderr.lines().last().unwrap().starts_with("error: ") && stderr.contains(part), "{stderr}");
    }
    fs::write(folder.path().join("a.json"), result("vmm")).unwrap();
    let nowhere = folder.path().join("no/such/report.html");
    let output = report(&[folder.path(), Path::new("--output"), &nowhere]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot write"));
}

#[test]
fn every_kept_run_of_this_repository_has_a_page() {
    let runs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benchmarks/runs");
    let target = tempfile::tempdir().unwrap();
    let page = target.path().join("all.html");
    let output = report(&[&runs, Path::new("--output"), &page]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let text = fs::read_to_string(page).unwrap();
    for benchmark in ["vmm", "alloc", "tp-ipc", "prepare-batch", "shm-transfer"] {
        assert!(text.contains(&format!("id=\"benchmark-{benchmark}\"")), "{benchmark}");
    }
    assert!(text.contains("<svg") && !text.contains("NaN") && !text.contains("<script"));
}
