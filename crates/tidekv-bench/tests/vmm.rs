//! `kvbench vmm` as a person runs it: the promised figures are there, and bad input gets one sentence and exit code 2.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn kvbench(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvbench"));
    command.arg("vmm").args(args).env_remove("KVCACHED_PAGE_SIZE_MB");
    command
}

fn run(args: &[&str]) -> Output {
    kvbench(args).output().unwrap()
}

/// A run that measures little: one small page size, one iteration.
fn small(backend: &str, more: &[&str]) -> Output {
    let base = ["--backend", backend, "--page-size", "64K", "--pages", "2", "--iters", "1"];
    run(&[&base[..], more].concat())
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn the_summary_has_what_is_promised() {
    for backend in ["host", "fake"] {
        let result = json(&small(backend, &["--json", "--layers", "2", "--threads", "2"]));
        assert_eq!(result["name"], "vmm");
        assert_eq!(result["args"]["backend"], backend);
        let summary = &result["summary"];
        for figure in ["map_ratio_to_raw", "unmap_ratio_to_raw"] {
            assert!(summary[figure].as_f64().unwrap() > 0.0, "{figure}");
        }
        for layout in ["slab", "per-layer", "interleaved"] {
            let layout = &summary["layouts"][layout];
            for figure in ["map_page_us_p50", "unmap_page_us_p50", "map_us_per_gib", "driver_calls_per_page", "init_ms"]
            {
                assert!(layout[figure].as_f64().unwrap() > 0.0, "{figure} of {layout}");
            }
        }
        assert!(summary["threads"]["all_pages_per_s"].as_f64().unwrap() > 0.0);
    }
}

/// Three calls to map and two to unmap, for each handle: 2 layers of K and V are 4 handles per-layer and 1 in slab.
#[test]
fn driver_calls_follow_the_handles() {
    let result = json(&small("fake", &["--json", "--layers", "2"]));
    let calls = |layout: &str| result["summary"]["layouts"][layout]["driver_calls_per_page"].as_f64().unwrap();
    assert_eq!([calls("slab"), calls("per-layer"), calls("interleaved")], [5.0, 20.0, 5.0]);
}

#[test]
fn kvcached_page_size_mb_is_the_chunk_of_every_layout() {
    let output = kvbench(&["--backend", "fake", "--page-size", "64K", "--iters", "1", "--num_layers", "4", "--json"])
        .env("KVCACHED_PAGE_SIZE_MB", "4")
        .output()
        .unwrap();
    let result = json(&output);
    for layout in ["slab", "per-layer", "interleaved"] {
        // 4 MiB, 4 layers, K and V.
        assert_eq!(result["summary"]["layouts"][layout]["page_bytes"].as_f64(), Some(f64::from(32 << 20)), "{layout}");
    }
}

#[test]
fn tables_show_what_a_page_id_costs() {
    let output = small("fake", &["--layers", "32"]);
    let text = String::from_utf8(output.stdout).unwrap();
    let slab = text.lines().find(|line| line.starts_with("| slab")).unwrap();
    assert!(slab.contains("20 MiB"), "{slab}");
    let per_layer = text.lines().find(|line| line.starts_with("| per-layer")).unwrap();
    assert!(per_layer.contains("128 MiB") && per_layer.contains("64"), "{per_layer}");
}

#[test]
fn bad_input_gets_one_sentence_and_exit_code_2() {
    let folder = tempfile::tempdir().unwrap();
    let kept = folder.path().join("kept.json");
    let kept = kept.to_str().unwrap();
    for (args, part) in [
        (&["--page-size", "0"][..], "give a positive multiple of 4 KiB"),
        (&["--page-size", "5000"], "give a positive multiple of 4 KiB"),
        (&["--page-size", "64K,x"], "has no number"),
        (&["--page-size", "16384P"], "too large"),
        (&["--page-size", "8191P"], "lower --pages"),
        (&["--layers", "0"], "--layers is 0: give 1 to"),
        (&["--layers", "4294967295"], "--layers is 4294967295: give 1 to"),
        (&["--pages", "0"], "--pages is 0"),
        (&["--threads", "0"], "--threads is 0"),
        (&["--iters", "0"], "--iters is 0"),
        (&["--layout", "slabs"], "use slab, per-layer or interleaved"),
    ] {
        let output = run(&[&["--backend", "fake", "--output", kept][..], args].concat());
        assert_refused(&output, part, args);
        assert!(!Path::new(kept).exists(), "{args:?} left a file");
    }
    assert_refused(&run(&["--backend", "gpu"]), "use host, cuda, fake or auto", &[]);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing half-written stays");
}

#[test]
fn a_page_size_variable_that_cannot_be_is_refused() {
    for (value, part) in [
        ("0", "positive whole number of MiB"),
        ("two", "positive whole number of MiB"),
        // 4,096 tokens of 8 heads of 128 bf16 elements are 8 MiB a block.
        ("2", "a block of 8 MiB does not fit into 2 MiB"),
    ] {
        let output = kvbench(&["--backend", "fake", "--block-size", "4096"])
            .env("KVCACHED_PAGE_SIZE_MB", value)
            .output()
            .unwrap();
        assert_refused(&output, part, &[value]);
    }
}

/// On a machine without a GPU the driver is what is missing; on one with a GPU it is device 77.
#[test]
fn a_device_that_is_not_there_is_refused() {
    let output = run(&["--backend", "cuda", "--device", "77", "--quick"]);
    let text = assert_refused(&output, "", &[]);
    assert!(text.contains("device 77 does not exist") || text.contains("the cuda back-end cannot be used"), "{text}");
}

fn assert_refused(output: &Output, part: &str, args: &[&str]) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(2), "{args:?}: {text}");
    assert!(output.stdout.is_empty(), "{args:?} wrote to stdout");
    let sentence = text.lines().find(|line| line.starts_with("error: ")).unwrap_or_else(|| panic!("{args:?}: {text}"));
    assert!(sentence.contains(part), "{args:?}: {sentence:?} lacks {part:?}");
    sentence.to_owned()
}
