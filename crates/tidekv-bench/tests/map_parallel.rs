//! `kvbench map-parallel` as a person runs it: the lines that people know, the figures, the refusals, and what happens
//! to processes that die.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

mod support;

use serde_json::Value;
use support::{KvBench, Running};

/// Small enough for a debug build: 8 pages of 2 MiB (4 layers of K and V, 256 KiB each).
const SMALL: [&str; 6] = ["--pages-total", "8", "--num-layers", "4", "--backend", "fake"];

fn small(more: &[&str]) -> KvBench {
    KvBench::new("map-parallel").args(&SMALL).args(&["--iters", "3"]).args(more)
}

/// A run that ends when it is made to.
fn endless() -> Running {
    Running::start(KvBench::new("map-parallel").args(&SMALL).args(&["--procs", "2", "--iters", "1000000"]))
}

fn figure(summary: &Value, path: &str) -> f64 {
    summary.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("{path} is missing in {summary}"))
}

#[test]
fn the_blocks_come_in_order_and_the_speedup_behind_them() {
    let text = small(&["--procs", "4"]).stdout();
    let lines: Vec<&str> = text.lines().collect();
    let block = |title: &str, processes: &str, total: &str, per_process: &str| {
        let at = lines.iter().position(|line| *line == title).unwrap_or_else(|| panic!("no {title} in:\n{text}"));
        assert_eq!(lines[at + 1], format!("Processes           : {processes}"));
        assert_eq!(lines[at + 2], "Iterations          : 3");
        assert_eq!(lines[at + 3], format!("Pages total / iter  : {total}"));
        assert_eq!(lines[at + 4], format!("Pages per proc / iter: {per_process}"));
        assert_eq!(lines[at + 5], "");
        assert_eq!(lines[at + 6], "+-----------------+-------------+");
        assert_eq!(lines[at + 7], "| Metric          | ms          |");
        assert_eq!(lines[at + 8], "+-----------------+-------------+");
        for (line, name) in lines[at + 9..].iter().zip(["mean wall", "p95 wall", "max wall", "min wall"]) {
            let (start, rest) = line.split_at(20);
            assert_eq!(start, format!("| {name:<15} | "));
            let value = rest.strip_suffix(" |").unwrap().trim();
            assert_eq!(value.split_once('.').unwrap().1.len(), 3, "{line}");
            assert!(value.parse::<f64>().unwrap() > 0.0, "{line}");
        }
        assert_eq!(lines[at + 13], "+-----------------+-------------+");
        at
    };
    let single = block("========== Single Process case (1 proc maps N/P pages) ==========", "1", "2", "2");
    let serial = block("========== Serial case (1 proc maps N pages) ==========", "1", "8", "8");
    let parallel = block("========== Parallel case (4 procs map N/P each) ==========", "4", "8", "2");
    let speedup = lines.iter().position(|line| line.starts_with("Speedup (parallel vs serial): mean x")).unwrap();
    assert!(single < serial && serial < parallel && parallel < speedup, "{text}");
    assert!(lines[speedup].ends_with("   (ideal being approximately 4.00 if perfect overlap)"), "{}", lines[speedup]);
    assert!(lines[speedup + 1..].iter().any(|line| line.starts_with("Pages per second    : single ")), "{text}");
}

#[test]
fn the_result_has_every_iteration_of_every_rank() {
    for backend in ["host", "fake"] {
        let args = ["--pages_total", "5", "--num_layers", "4", "--iters", "3", "--procs", "2", "--threads", "2"];
        let result = KvBench::new("map-parallel").args(&args).args(&["--backend", backend]).json();
        assert_eq!(result["name"], "map-parallel");
        let args = &result["args"];
        assert_eq!((&args["backend"], &args["layout"], &args["threads"]), (&backend.into(), &"slab".into(), &2.into()));
        assert_eq!(args["devices"], serde_json::json!([0, 0]));
        assert!(args["device_warning"].as_str().unwrap().contains("2 ranks and 1 device"), "{args}");
        for series in
            ["single.wall", "single.rank0", "serial.wall", "parallel.wall", "parallel.rank0", "parallel.rank1"]
        {
            assert_eq!(result["samples"][series]["values"].as_array().map(Vec::len), Some(3), "{series}");
        }
        let summary = &result["summary"];
        for case in ["single", "serial", "parallel"] {
            for path in ["wall_ms/mean", "wall_ms/p50", "wall_ms/p95", "wall_ms/max", "wall_ms/min", "pages_per_s"] {
                assert!(figure(summary, &format!("/{case}/{path}")) > 0.0);
            }
            assert!(
                figure(summary, &format!("/{case}/wall_ms/max")) >= figure(summary, &format!("/{case}/wall_ms/min"))
            );
        }
        let means = figure(summary, "/serial/wall_ms/mean") / figure(summary, "/parallel/wall_ms/mean");
        assert!((figure(summary, "/speedup_parallel_over_serial") / means - 1.0).abs() < 1e-9);
        assert_eq!(figure(summary, "/ideal_speedup"), 2.0);
    }
}

/// The slowest rank decides: no rank's own time is longer than the wall of its iteration.
#[test]
fn the_wall_is_that_of_the_slowest_rank() {
    let result = small(&["--procs", "3"]).json();
    let values = |series: &str| -> Vec<u64> {
        let values = result["samples"][series]["values"].as_array().unwrap();
        values.iter().map(|value| value.as_u64().unwrap()).collect()
    };
    let wall = values("parallel.wall");
    for rank in 0..3 {
        let own = values(&format!("parallel.rank{rank}"));
        assert!(own.iter().zip(&wall).all(|(own, wall)| own <= wall), "rank {rank}: {own:?} of {wall:?}");
    }
}

#[test]
fn pages_that_do_not_come_out_even_go_to_the_first_ranks() {
    let text = small(&["--procs", "3", "-v"]).stdout();
    assert!(text.contains("Pages per proc / iter: 2 (ranks 0 to 1 map 3)\n"), "{text}");
    assert_eq!(text.lines().filter(|line| line.starts_with("[iter ")).count(), 9, "{text}");
    let last = text.lines().rfind(|line| line.starts_with("[iter 02] wall ")).unwrap();
    assert!(last.contains("(rank 0 ") && last.contains(", rank 1 ") && last.contains(", rank 2 "), "{last}");
}

#[test]
fn fewer_devices_than_ranks_are_one_warning() {
    let warnings = |more: &[&str]| {
        let output = small(more).output();
        assert!(output.status.success());
        let stderr = String::from_utf8(output.stderr).unwrap();
        stderr.lines().filter(|line| line.contains("ranks and 1 device")).count()
    };
    assert_eq!(warnings(&["--procs", "2"]), 1);
    assert_eq!(warnings(&["--procs", "2", "--device-mode", "per-rank"]), 1);
    assert_eq!(warnings(&["--procs", "2", "--device-mode", "same"]), 0);
    assert_eq!(warnings(&["--procs", "2", "--quiet"]), 0);
    assert_eq!(warnings(&["--procs", "1"]), 0);
}

#[test]
fn bad_input_is_one_sentence_and_nothing_is_started() {
    // 256 GiB of fake memory: / 32 layers / 2 / 2 MiB = 2048 pages.
    let model = ["--page-size-mb", "2", "--backend", "fake"];
    for (args, part) in [
        (&["--pages-total", "2049"][..], "the largest valid value is 2048"),
        (&["--pages-total", "2049"], "memory / layers / 2 / page size = 256 GiB / 32 / 2 / 2 MiB = 2048 pages"),
        (&["--pages-total", "9", "--base-page", "2040"], "the largest valid value behind --base-page 2040 is 8"),
        (&["--pages-total", "1", "--base-page", "2048"], "the last page id is 2047"),
        (&["--pages-total", "4294967295", "--base-page", "1"], "the largest valid value behind --base-page 1 is 2047"),
        (&["--pages-total", "3", "--procs", "4"], "one page for each of 4 processes"),
        (&["--pages-total", "0"], "--pages-total is 0"),
        (&["--pages-total", "1", "--procs", "0"], "--procs is 0"),
        (&["--pages-total", "1", "--iters", "0"], "--iters is 0"),
        (&["--pages-total", "1", "--threads", "0"], "--threads is 0"),
        (&["--pages-total", "1", "--num-layers", "0"], "--num-layers is 0"),
        (&["--pages-total", "1", "--layout", "flat"], "use slab, per-layer or interleaved"),
        (&["--pages-total", "1", "--layout", "slab", "--not-contiguous"], "cannot be used with"),
        (&["--pages-total", "1", "--device-mode", "some"], "per-rank"),
        (&["--procs", "2"], "--pages-total"),
    ] {
        KvBench::new("map-parallel").args(&model).args(args).refused(part);
    }
    KvBench::new("map-parallel").args(&["--pages-total", "1", "--page-size-mb", "x"]).refused("--page-size-mb");
}

#[test]
fn not_contiguous_is_the_per_layer_layout() {
    let result = small(&["--not-contiguous", "--page-size-mb", "2"]).json();
    assert_eq!(result["args"]["layout"], "per-layer");
    assert_eq!(figure(&result["summary"], "/handles_per_page"), 8.0);
}

#[test]
fn a_process_that_dies_ends_the_run_with_its_name() {
    let mut run = endless();
    let ranks = run.wait_for_children(2);
    support::kill(ranks[1]);
    let stderr = run.fails();
    let sentence = format!("(process {}) ended (signal: 9 (SIGKILL))", ranks[1]);
    assert!(stderr.contains("error: ") && stderr.contains("rank ") && stderr.contains(&sentence), "{stderr}");
    support::wait_for_end(ranks[0]);
}

#[test]
fn no_process_outlives_the_parent() {
    let mut run = endless();
    let ranks = run.wait_for_children(2);
    run.kill();
    ranks.into_iter().for_each(support::wait_for_end);
}
