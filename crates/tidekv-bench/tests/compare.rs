//! `kvbench compare` as its users run it: the real binary, real files, real pipes.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

fn kvbench() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvbench"));
    command.env_remove("NO_COLOR");
    command
}

/// A folder of result files, gone at the end of the test.
struct Files(TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, text).unwrap();
        path
    }

    /// A result of `alloc` whose time is `ns` and whose rate is the inverse of it.
    fn result(&self, name: &str, ns: f64) -> PathBuf {
        let summary = json!({"alloc_free_ns": {"k16": {"p50": ns}}, "blocks_per_s": 1e9 / ns, "pages": 1e3 * ns});
        self.benchmark(name, "alloc", &summary)
    }

    fn benchmark(&self, name: &str, benchmark: &str, summary: &Value) -> PathBuf {
        let result = json!({"schema": "tidekv.bench.v1", "name": benchmark, "args": {}, "host": {}, "samples": {},
                            "summary": summary});
        self.write(name, &result.to_string())
    }
}

fn compare(a: &Path, b: &Path, flags: &[&str]) -> Output {
    kvbench().arg("compare").args([a, b]).args(flags).output().unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().expect("not ended by a signal")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Exit code 2, nothing on stdout and one line `error: ...` on stderr, which is returned.
fn the_error(output: &Output) -> String {
    let stderr = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(code(output), 2, "{stderr}");
    assert_eq!(stdout(output), "");
    assert!(stderr.starts_with("error: ") && stderr.trim_end().lines().count() == 1, "{stderr}");
    stderr
}

#[test]
fn a_result_holds_against_itself() {
    let files = Files::new();
    let a = files.result("a.json", 100.0);
    let output = compare(&a, &a, &["--fail-above", "0"]);
    assert_eq!(code(&output), 0);
    assert!(stdout(&output).contains("| alloc_free_ns.k16.p50 |"), "{}", stdout(&output));
    assert!(output.stderr.is_empty());
}

#[test]
fn slower_past_the_threshold_is_a_no() {
    let files = Files::new();
    let (a, b) = (files.result("a.json", 100.0), files.result("b.json", 120.0));
    for threshold in ["10%", "10 %", "0.1"] {
        let output = compare(&a, &b, &["--fail-above", threshold]);
        assert_eq!(code(&output), 1, "{threshold}");
        assert!(stdout(&output).contains("FAILED: 2 worse by more than 10 %"), "{}", stdout(&output));
    }
    assert_eq!(code(&compare(&a, &b, &["--fail_above=25%"])), 0);
    assert_eq!(code(&compare(&a, &b, &[])), 0, "without a threshold it only reports");
}

#[test]
fn faster_is_a_yes() {
    let files = Files::new();
    let (a, b) = (files.result("a.json", 100.0), files.result("b.json", 80.0));
    let output = compare(&a, &b, &["--fail-above", "10%"]);
    assert_eq!(code(&output), 0);
    assert!(stdout(&output).contains("2 better, 0 worse"), "{}", stdout(&output));
}

#[test]
fn a_figure_gone_from_b_is_a_no() {
    let files = Files::new();
    let a = files.benchmark("a.json", "alloc", &json!({"map_us": 1, "unmap_us": 1}));
    let b = files.benchmark("b.json", "alloc", &json!({"map_us": 1}));
    let output = compare(&a, &b, &["--fail-above", "10%"]);
    assert_eq!(code(&output), 1);
    assert!(stdout(&output).contains("missing in B: unmap_us"), "{}", stdout(&output));
    assert_eq!(code(&compare(&b, &a, &["--fail-above", "10%"])), 0);
}

#[test]
fn another_benchmark_is_an_error_that_names_both() {
    let files = Files::new();
    let a = files.benchmark("a.json", "alloc", &json!({"x_ns": 1}));
    let b = files.benchmark("b.json", "vmm", &json!({"x_ns": 1}));
    let error = the_error(&compare(&a, &b, &[]));
    for part in ["a.json", "b.json", "`alloc`", "`vmm`"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn files_that_are_no_results_are_errors_that_name_the_file() {
    let files = Files::new();
    let good = files.result("good.json", 100.0);
    let whole = fs::read_to_string(&good).unwrap();
    for (name, text, reason) in [
        ("truncated.json", &whole[..whole.len() / 2], "too early"),
        ("empty.json", "", "empty"),
        ("other.json", r#"{"request_throughput": 3}"#, "`schema` is missing"),
        ("newer.json", r#"{"schema": "tidekv.bench.v2"}"#, "tidekv.bench.v2"),
        ("nan.json", &whole.replace("100.0", "NaN"), "NaN"),
    ] {
        let bad = files.write(name, text);
        for output in [compare(&bad, &good, &[]), compare(&good, &bad, &["--json"])] {
            let error = the_error(&output);
            assert!(error.contains(name) && error.contains(reason), "{error}");
        }
    }
    let missing = files.0.path().join("missing.json");
    assert!(the_error(&compare(&good, &missing, &[])).contains("missing.json"));
    assert!(the_error(&compare(&good, files.0.path(), &[])).contains("one is a folder and the other is not"));
}

#[test]
fn the_json_output_is_one_object() {
    let files = Files::new();
    let (a, b) = (files.result("a.json", 100.0), files.result("b.json", 120.0));
    let output = compare(&a, &b, &["--json", "--fail-above", "10%"]);
    assert_eq!(code(&output), 1);
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(value["failed"], json!(true));
    assert_eq!(value["figures"][0]["path"], json!("alloc_free_ns.k16.p50"));
    assert_eq!(value["figures"][0]["verdict"], json!("worse"));
    assert_eq!(value["figures"].as_array().unwrap().len(), 3);
}

#[test]
fn different_machines_are_pointed_out_on_stderr() {
    let files = Files::new();
    let result = |cores| {
        json!({"schema": "tidekv.bench.v1", "name": "x", "host": {"cores": cores}, "summary": {"x_ns": 1}}).to_string()
    };
    let (a, b) = (files.write("a.json", &result(2)), files.write("b.json", &result(64)));
    let output = compare(&a, &b, &[]);
    assert_eq!(code(&output), 0);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.starts_with("warning: ") && stderr.contains("cores 2 and 64"), "{stderr}");
}

#[test]
fn a_reader_that_went_away_is_no_error() {
    let files = Files::new();
    let a = files.result("a.json", 100.0);
    for arguments in [vec!["compare", a.to_str().unwrap(), a.to_str().unwrap()], vec!["--help"], vec!["--version"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        // Closed before the child starts: its very first write meets a broken pipe.
        drop(reader);
        let output = kvbench().args(&arguments).stdout(writer).stderr(Stdio::piped()).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{arguments:?}");
        assert_eq!(code(&output), 0, "{arguments:?}");
    }
}

#[test]
fn a_wrong_command_line_is_an_error() {
    for arguments in [&["compare"][..], &["nothing"], &["compare", "a", "b", "--fail-above", "much"]] {
        let output = kvbench().args(arguments).output().unwrap();
        assert_eq!(code(&output), 2, "{arguments:?}");
        assert!(output.stderr.starts_with(b"error: "), "{arguments:?}");
    }
}

/// A result of a load generator, in vLLM's keys.
fn load(throughput: f64, ttft_ms: f64) -> Value {
    json!({"date": "20260801-101112", "backend": "vllm", "model_id": "m", "num_prompts": 100, "request_rate": 8.0,
           "duration": 10.0, "completed": 100, "failed": 0, "request_throughput": throughput,
           "output_throughput": 64.0 * throughput, "total_token_throughput": 128.0 * throughput,
           "mean_ttft_ms": ttft_ms * 1.1, "median_ttft_ms": ttft_ms, "p99_ttft_ms": ttft_ms * 2.0})
}

#[test]
fn a_comparison_of_servers_starts_with_throughput_and_ttft() {
    let files = Files::new();
    let a = files.write("a.json", &load(10.0, 100.0).to_string());
    let b = files.write("b.json", &load(9.942, 100.31).to_string());
    let output = compare(&a, &b, &[]);
    assert_eq!(code(&output), 0);
    assert!(
        stdout(&output).starts_with("Throughput: 99.42%\nTTFT: 100.31%\n\nserve: B over A\n"),
        "{}",
        stdout(&output)
    );
    let value: Value = serde_json::from_slice(&compare(&a, &b, &["--json"]).stdout).unwrap();
    assert_eq!(value["headline"]["throughput"].as_f64().map(|ratio| (ratio * 1e4).round()), Some(9942.0));
}

#[test]
fn files_of_vllm_sglang_and_ours_are_read_beside_each_other() {
    let files = Files::new();
    let vllm = files.write("vllm.json", &load(10.0, 100.0).to_string());
    let mut theirs = load(11.0, 90.0);
    let fields = theirs.as_object_mut().unwrap();
    fields.remove("total_token_throughput");
    fields.insert("total_throughput".into(), json!(1408.0));
    fields.insert("mean_e2e_latency_ms".into(), json!(400.0));
    // A NaN is what Python writes where nothing was measured.
    let sglang = files.write("sglang.jsonl", &(theirs.to_string().replace("1408.0", "NaN") + "\n"));
    let mut own = load(12.0, 80.0);
    for (key, value) in [
        ("schema", json!("tidekv.bench.v1")),
        ("name", json!("serve")),
        ("summary", json!({"send_lag_ms": {"p99": 0.5}})),
        ("kv_mode", json!("elastic")),
        ("ttft_p50", json!(80.0)),
        ("something_new", json!({"x": [1]})),
    ] {
        own[key] = value;
    }
    let ours = files.write("ours.json", &own.to_string());
    for (a, b, throughput, ttft) in [
        (&vllm, &sglang, "110.00%", "90.00%"),
        (&vllm, &ours, "120.00%", "80.00%"),
        (&sglang, &ours, "109.09%", "88.89%"),
    ] {
        let output = compare(a, b, &[]);
        assert_eq!(code(&output), 0, "{}", String::from_utf8_lossy(&output.stderr));
        let text = stdout(&output);
        assert!(text.starts_with(&format!("Throughput: {throughput}\nTTFT: {ttft}\n")), "{text}");
        assert!(text.contains("| median_ttft_ms "), "{text}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("different tools"));
    }
    let same_mode = compare(&ours, &ours, &[]);
    assert!(String::from_utf8_lossy(&same_mode.stderr).contains("both sides ran with kv_mode \"elastic\""));
}

#[test]
fn several_runs_a_side_by_files_by_folders_and_by_lines() {
    let files = Files::new();
    let (a, b): (Vec<PathBuf>, Vec<PathBuf>) = (0..5)
        .map(|i| {
            let wobble = f64::from(i) * 0.2;
            (
                files.write(&format!("a{i}.json"), &load(10.0, 100.0 + wobble).to_string()),
                files.write(&format!("b{i}.json"), &load(10.0, 110.0 + wobble).to_string()),
            )
        })
        .unzip();
    let verdict = |output: &Output| {
        assert_eq!(code(output), 1, "{}", String::from_utf8_lossy(&output.stderr));
        let value: Value = serde_json::from_slice(&output.stdout).unwrap();
        let figures = value["figures"].as_array().unwrap();
        let of = |path: &str| figures.iter().find(|figure| figure["path"] == path).unwrap().clone();
        assert_eq!(value["runs"], json!([5, 5]));
        assert_eq!(of("request_throughput")["verdict"], "no_difference");
        assert!(of("median_ttft_ms")["interval"]["low"].as_f64().unwrap() > 1.08);
        of("median_ttft_ms")["verdict"].clone()
    };
    let flags = ["compare", "--json", "--fail-above", "3%"];
    let by_files = kvbench().args(flags).args(&a).arg("--").args(&b).output().unwrap();
    assert_eq!(verdict(&by_files), "worse");

    let folder = |name: &str, runs: &[PathBuf]| {
        let folder = files.0.path().join(name);
        fs::create_dir(&folder).unwrap();
        for run in runs {
            fs::copy(run, folder.join(run.file_name().unwrap())).unwrap();
        }
        folder
    };
    let (a_folder, b_folder) = (folder("a", &a), folder("b", &b));
    assert_eq!(verdict(&kvbench().args(flags).args([&a_folder, &b_folder]).output().unwrap()), "worse");

    let lines = |runs: &[PathBuf]| runs.iter().map(|run| fs::read_to_string(run).unwrap() + "\n").collect::<String>();
    let (a_lines, b_lines) = (files.write("a.jsonl", &lines(&a)), files.write("b.jsonl", &lines(&b)));
    assert_eq!(verdict(&kvbench().args(flags).args([&a_lines, &b_lines]).output().unwrap()), "worse");

    // Three runs a side show nothing, which is no pass; and nothing fails that was not asked to.
    let few =
        |flags: &[&str]| kvbench().arg("compare").args(flags).args(&a[..3]).arg("--").args(&a[2..]).output().unwrap();
    let text = stdout(&few(&["--fail-above", "3%"]));
    assert!(text.contains("underpowered") && text.contains("FAILED: "), "{text}");
    assert_eq!((code(&few(&["--fail-above", "3%"])), code(&few(&[]))), (1, 0));
}

#[test]
fn a_sweep_is_compared_rate_by_rate() {
    let files = Files::new();
    let sweep = |name: &str, ttft: f64| {
        let line = |rate: f64| {
            let mut run = load(rate, ttft);
            run["request_rate"] = json!(rate);
            run.to_string() + "\n"
        };
        files.write(name, &[4.0, 8.0, 16.0].map(line).concat())
    };
    let output = compare(&sweep("a.jsonl", 100.0), &sweep("b.jsonl", 130.0), &["--fail-above", "10%"]);
    assert_eq!(code(&output), 1);
    for rate in ["4.0", "8.0", "16.0"] {
        assert!(stdout(&output).contains(&format!("=== serve, request_rate {rate} ===")), "{}", stdout(&output));
    }
}

#[test]
fn sides_with_nothing_in_common_are_an_error() {
    let files = Files::new();
    let (a, b) = (files.write("a.json", &load(10.0, 100.0).to_string()), files.result("b.json", 100.0));
    let output = kvbench().arg("compare").args([&a, &a]).arg("--").args([&b, &b]).output().unwrap();
    assert!(the_error(&output).contains("nothing in common"));
    assert!(the_error(&kvbench().arg("compare").args([&a, &a, &a]).output().unwrap()).contains("-- between them"));
    let odd = kvbench().args(["compare", "--paired"]).args([&a, &a]).arg("--").arg(&a).output().unwrap();
    assert!(the_error(&odd).contains("2 and 1"));
}
