//! `kvbench tp-ipc` as a person runs it: the lines that people know, the figures, the refusals, and what happens to
//! workers that die.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

mod support;

use serde_json::Value;
use support::{KvBench, Running};

/// Small enough for a debug build.
const SMALL: [&str; 6] = ["--tp-size", "2", "--num-layers", "4", "--backend", "fake"];

/// Every strategy that is registered, with the file it is in.
const STRATEGIES: [(&str, &str); 4] =
    [("seq", "seq.rs"), ("thread", "thread.rs"), ("async", "async_.rs"), ("ring", "ring.rs")];

fn small(more: &[&str]) -> KvBench {
    KvBench::new("tp-ipc").args(&SMALL).args(&["--iters", "4"]).args(more)
}

/// A run that ends when it is made to.
fn endless(strategy: &str) -> Running {
    let args = ["--iters", "1000000", "--map-impl", strategy];
    Running::start(KvBench::new("tp-ipc").args(&SMALL).args(&args))
}

fn figure(summary: &Value, path: &str) -> f64 {
    summary.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("{path} is missing in {summary}"))
}

#[test]
fn the_summary_is_the_one_that_people_know() {
    for (strategy, file) in STRATEGIES {
        let text = small(&["--map-impl", strategy, "--pages-per-iter", "2"]).stdout();
        let lines: Vec<&str> = text.lines().collect();
        let head = [
            "=== IPC Benchmark Summary ===".to_owned(),
            format!("Broadcast impl       : {strategy} ({file})"),
            "TP size                 : 2".to_owned(),
            "Iterations              : 4".to_owned(),
            "Pages Per Iteration     : 2".to_owned(),
            String::new(),
            "+---------------+-----------+------------+".to_owned(),
            "| Metric        |  Map (ms) | Unmap (ms) |".to_owned(),
            "|---------------|-----------|------------|".to_owned(),
        ];
        assert_eq!(lines[..head.len()], head);
        let mut rows = lines[head.len()..].iter();
        let mut row = |name: &str| -> [f64; 2] {
            let line = rows.next().unwrap();
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            assert_eq!((cells[1], line.len()), (name, 42), "{line}");
            [cells[2], cells[3]].map(|cell| {
                assert!(cell.split_once('.').unwrap().1.len() >= 3, "{line}");
                cell.parse().unwrap()
            })
        };
        let [mean, p95, max, min] = ["mean", "p95", "max", "min"].map(&mut row);
        let [p50, p99] = ["p50", "p99"].map(&mut row);
        for side in [0, 1] {
            assert!(min[side] > 0.0 && min[side] <= p50[side] && p50[side] <= p95[side], "{text}");
            assert!(p95[side] <= p99[side] && p99[side] <= max[side] && mean[side] <= max[side], "{text}");
        }
        assert_eq!(rows.next(), Some(&"|---------------|-----------|------------|"));
        let per_page = rows.next().unwrap();
        assert!(per_page.starts_with("| per-page mean | "), "{per_page}");
        let cell: f64 = per_page.split('|').nth(2).unwrap().trim().parse().unwrap();
        assert!((cell - mean[0] / 2.0).abs() < 0.0002, "{cell} is not half of {}", mean[0]);
        assert_eq!(rows.next(), Some(&"+---------------+-----------+------------+"));
        assert!(text.contains("\nBare echo               : "), "{text}");
        assert!(text.contains("\nOne every 1.00 ms       : map "), "{text}");
    }
}

#[test]
fn verbose_prints_every_iteration() {
    let text = small(&["-v"]).stdout();
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("[iter ")).collect();
    assert_eq!(lines.len(), 4, "{text}");
    assert!(lines[3].starts_with("[iter 03] map=") && lines[3].contains(" ms  unmap=") && lines[3].ends_with(" ms"));
    assert_eq!(small(&["--verbose", "--all-impls"]).stdout().matches("[iter 00] map=").count(), STRATEGIES.len());
}

#[test]
fn one_strategy_is_the_summary() {
    for (backend, noop) in [("host", false), ("fake", false), ("fake", true)] {
        let mut args = vec!["--tp_size", "2", "--num_layers", "4", "--iters", "3", "--map_impl", "ring"];
        args.extend(["--backend", backend]);
        args.extend(noop.then_some("--noop"));
        let result = KvBench::new("tp-ipc").args(&args).json();
        assert_eq!(result["name"], "tp-ipc");
        assert_eq!((&result["args"]["backend"], &result["args"]["noop"]), (&backend.into(), &noop.into()));
        assert_eq!((&result["args"]["async_sched"], &result["args"]["base_page"]), (&false.into(), &50.into()));
        assert_eq!(result["args"]["devices"], serde_json::json!([0, 0]));
        assert!(result["args"]["device_warning"].as_str().unwrap().contains("2 ranks and 1 device"));
        let summary = &result["summary"];
        assert_eq!(summary["impl"], "ring");
        for within in ["", "/cadence"] {
            for path in ["map_us/p50", "map_us/p99", "unmap_us/p50", "unmap_us/p99", "floor_us/p50", "ratio_to_floor"] {
                assert!(figure(summary, &format!("{within}/{path}")) > 0.0);
            }
        }
        assert_eq!(figure(summary, "/cadence/period_ms"), 1.0);
        for (series, count) in [("map", 3), ("unmap", 3), ("floor", 6), ("cadence.map", 3), ("cadence.floor", 6)] {
            assert_eq!(result["samples"][series]["values"].as_array().map(Vec::len), Some(count), "{series}");
        }
    }
}

#[test]
fn all_strategies_are_an_object_each() {
    let result = small(&["--all-impls", "--noop", "--cadence", "0s"]).json();
    let impls = result["summary"]["impls"].as_object().unwrap();
    assert_eq!(impls.keys().collect::<Vec<_>>(), STRATEGIES.map(|(name, _)| name));
    for (name, figures) in impls {
        assert_eq!(figures["impl"], name.as_str());
        assert!(figure(figures, "/ratio_to_floor") > 0.0 && figures.get("cadence").is_none(), "{figures}");
        assert!(result["samples"][format!("{name}.map")]["values"].is_array());
    }
    assert!(result["summary"].get("impl").is_none());
}

#[test]
fn long_runs_of_the_message_alone_are_in_batches() {
    let args = ["--iters", "250", "--cadence", "100us", "--map-impl", "ring"];
    for (more, batches) in [(&["--noop"][..], 2), (&[], 1)] {
        let result = KvBench::new("tp-ipc").args(&SMALL).args(&args).args(more).json();
        assert_eq!(result["args"]["batches"], batches);
        for (series, count) in [("map", 250), ("floor", 500), ("cadence.unmap", 250), ("cadence.floor", 500)] {
            assert_eq!(result["samples"][series]["count"], count, "{series} of {batches}");
        }
    }
    let text = KvBench::new("tp-ipc").args(&SMALL).args(&args).args(&["--noop"]).stdout();
    assert!(text.contains("\nNew workers             : 2 times\n"), "{text}");
}

#[test]
fn every_batch_has_workers_of_its_own() {
    let args = ["--noop", "--iters", "100000", "--cadence", "0s"];
    let run = Running::start(KvBench::new("tp-ipc").args(&SMALL).args(&args));
    let first = run.wait_for_children(2);
    first.iter().copied().for_each(support::wait_for_end);
    run.wait_for_another_child(&first);
}

#[test]
fn flags_of_kvcached_are_recorded() {
    let result = small(&["--async_sched", "--not_contiguous", "--block-size", "32", "--page-size-mb", "4"]).json();
    let args = &result["args"];
    assert_eq!((&args["async_sched"], &args["layout"]), (&true.into(), &"per-layer".into()));
    assert_eq!((&args["block_size"], &args["page_size_bytes"]), (&32.into(), &(4 << 20).into()));
    let help = KvBench::new("tp-ipc").args(&["--help"]).stdout();
    for part in
        ["--async-sched\n", "waits for all work of its device", "--block-size <N>\n", "how many blocks a page has"]
    {
        assert!(help.contains(part), "{help} lacks {part:?}");
    }
}

#[test]
fn fewer_devices_than_workers_are_one_warning() {
    let warnings = |more: &[&str]| {
        let output = small(more).output();
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap().lines().filter(|line| line.contains("ranks and 1 device")).count()
    };
    assert_eq!([warnings(&[]), warnings(&["--all-impls"]), warnings(&["--device-map", "same"])], [1, 1, 0]);
}

#[test]
fn bad_input_is_one_sentence_and_nothing_is_started() {
    // 256 GiB of fake memory: / 32 layers / 2 / 2 MiB = 2048 pages.
    let model = ["--page-size-mb", "2", "--backend", "fake"];
    for (args, part) in [
        (&["--tp-size", "2", "--map-impl", "smoke"][..], "seq, thread, async, ring"),
        (&["--tp-size", "2", "--map-impl", "smoke"], "docs/adding-a-strategy.md"),
        (&["--tp-size", "2", "--pages-per-iter", "1999"], "the largest valid value behind --base-page 50 is 1998"),
        (&["--tp-size", "2", "--pages-per-iter", "1999"], "(page ids are 0 to 2047)"),
        (&["--tp-size", "2", "--base-page", "2048"], "the last page id is 2047"),
        (&["--tp-size", "0"], "--tp-size is 0"),
        (&["--tp-size", "65"], "--tp-size is 65"),
        (&["--tp-size", "2", "--pages-per-iter", "0"], "--pages-per-iter is 0"),
        (&["--tp-size", "2", "--iters", "0"], "--iters is 0"),
        (&["--tp-size", "2", "--cadence", "2s"], "--cadence is 2s"),
        (&["--tp-size", "2", "--cadence=-1ms"], "--cadence"),
        (&["--tp-size", "2", "--all-impls", "--map-impl", "seq"], "cannot be used with"),
        (&["--noop"], "--tp-size"),
    ] {
        KvBench::new("tp-ipc").args(&model).args(args).refused(part);
    }
    // Of a small model there are pages enough, but one order has room for 16,000 of them.
    let many = ["--tp-size", "1", "--num-layers", "1", "--pages-per-iter", "16001", "--noop"];
    KvBench::new("tp-ipc").args(&many).args(&model).refused("one order has at most 16000 pages");
}

#[test]
fn a_worker_that_dies_ends_the_run_with_its_name() {
    for (strategy, _) in STRATEGIES {
        let mut run = endless(strategy);
        let workers = run.wait_for_children(2);
        support::kill(workers[1]);
        let stderr = run.fails();
        let sentence = format!("(process {}) ended (signal: 9 (SIGKILL))", workers[1]);
        assert!(stderr.contains("error: rank ") && stderr.contains(&sentence), "{strategy}: {stderr}");
        support::wait_for_end(workers[0]);
    }
}

#[test]
fn no_worker_outlives_the_scheduler() {
    let mut run = endless("ring");
    let workers = run.wait_for_children(2);
    run.kill();
    workers.into_iter().for_each(support::wait_for_end);
}
