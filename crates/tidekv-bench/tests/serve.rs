//! `kvbench serve` as its users run it, against a mock in this process: result keys, refusals, interruption.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

mod support;

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use support::{KvBench, end_of};
use tidekv_bench::load::mock::{Ending, Mock, Script, Step, Timing};
use tidekv_bench::result::BenchResult;

fn mock() -> Mock {
    let timing = Timing { first: Duration::from_millis(2), gap: Duration::from_millis(1), ..Timing::IMMEDIATE };
    Mock::start(move |request| timing.script(request)).unwrap()
}

/// A short run against it.
fn serve(mock: &Mock, flags: &[&str]) -> Output {
    serve_at(&mock.base_url().to_string(), flags).output().unwrap()
}

fn serve_at(base_url: &str, flags: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvbench"));
    let short = ["--request-rate", "200", "--random-input-len", "16", "--random-output-len", "4"];
    command.args(["serve", "--quick", "--base-url", base_url, "--warmup-requests", "2"]).args(short).args(flags);
    if !flags.contains(&"--num-prompts") {
        command.args(["--num-prompts", "20"]);
    }
    for variable in ["PYTHONHASHSEED", "CUDA_LAUNCH_BLOCKING", "OPENAI_API_KEY"] {
        command.env_remove(variable);
    }
    // No pools but its own: there are none.
    command.env("KVCACHED_RUNTIME_DIR", env!("CARGO_TARGET_TMPDIR"));
    command
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn object(output: &Output) -> Value {
    assert!(output.status.success(), "{}", text(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// What `vllm bench serve` writes, as its readers know it.
const VLLM_KEYS: [&str; 33] = [
    "date",
    "endpoint_type",
    "backend",
    "label",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    "rtfx",
    "mean_ttft_ms",
    "median_ttft_ms",
    "std_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "std_tpot_ms",
    "p99_tpot_ms",
    "mean_itl_ms",
    "p99_itl_ms",
    "std_itl_ms",
];

#[test]
fn the_result_has_vllms_keys_and_ours_and_is_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.json");
    let flags = ["--json", "--output", path.to_str().unwrap(), "--metadata", "torch=2.9.0", "--goodput", "ttft:10000"];
    let output = serve(&mock(), &flags);
    let result = object(&output);
    assert_eq!(output.stdout, fs::read(&path).unwrap(), "the object on stdout is the object in the file");
    for key in VLLM_KEYS {
        assert!(result.get(key).is_some(), "{key} is missing");
    }
    assert_eq!(
        (&result["completed"], &result["failed"], &result["total_output_tokens"]),
        (&json!(20), &json!(0), &json!(80))
    );
    assert_eq!(
        (&result["model_id"], &result["request_rate"], &result["torch"]),
        (&json!("mock"), &json!(200.0), &json!("2.9.0"))
    );
    assert_eq!(
        (&result["name"], &result["partial"], &result["kv_mode"]),
        (&json!("serve"), &json!(false), &json!("mock"))
    );
    for key in ["throughput", "ttft_p50", "itl_p50", "e2e_p50", "request_goodput", "mean_ttft_ms"] {
        assert!(result[key].as_f64().is_some_and(|value| value > 0.0), "{key}: {}", result[key]);
    }
    for figure in
        ["/send_lag_ms/p99", "/ttft_ms/p50", "/from_send/ttft_ms/p50", "/itl_ms/p99", "/e2e_ms/p99", "/cap_wait_ms/p50"]
    {
        assert!(result["summary"].pointer(figure).is_some_and(Value::is_number), "{figure}");
    }
    assert_eq!(result["requests"]["ttft_ms"].as_array().unwrap().len(), 20);
    assert_eq!(result["schedule"]["intended_ms"].as_array().unwrap().len(), 20);
    assert_eq!(result["environment"]["torch"], "2.9.0");
    assert!(
        result["timeline"]["columns"].get("server.main.vllm:num_requests_running").is_some(),
        "{}",
        result["timeline"]
    );
    let read = BenchResult::read(&path).unwrap();
    assert_eq!((read.name.as_str(), read.samples["ttft"].percentiles.count), ("serve", 20));
    let path = path.to_str().unwrap();
    let same = Command::new(env!("CARGO_BIN_EXE_kvbench")).args(["compare", path, path]).output().unwrap();
    assert_eq!(same.status.code(), Some(0), "{}", text(&same));
}

/// The lines of kvcached's guide, as they stand there.
#[test]
fn the_guides_comparison_reads_two_results() {
    let folder = tempfile::tempdir().unwrap();
    let mock = mock();
    for name in ["baseline.json", "kvcached.json"] {
        let path = folder.path().join(name);
        let output = serve(&mock, &["--quiet", "--output", path.to_str().unwrap()]);
        assert!(output.status.success(), "{}", text(&output));
    }
    let script = "\
import json

baseline = json.load(open('baseline.json'))
kvcached = json.load(open('kvcached.json'))

print(f\"Throughput: {kvcached['throughput'] / baseline['throughput']:.2%}\")
print(f\"TTFT: {kvcached['ttft_p50'] / baseline['ttft_p50']:.2%}\")
";
    let output = Command::new("python3").args(["-c", script]).current_dir(folder.path()).output().unwrap();
    let printed = String::from_utf8(output.stdout.clone()).unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert!(
        printed.starts_with("Throughput: ") && printed.contains("\nTTFT: ") && printed.matches('%').count() == 2,
        "{printed}"
    );
}

#[test]
fn every_request_in_detail_on_request() {
    let mock = Mock::start(|request| match request.prompt_tokens {
        // Warm-up and the first request of all have other prompts.
        _ if request.ordinal == 5 => Script::error(500, "no"),
        _ => Script::new(vec![Step::Wait(Duration::from_millis(1)), Step::Tokens { text: "a b".to_owned(), count: 2 }]),
    })
    .unwrap();
    let output = serve(&mock, &["--json", "--save-detailed", "--num-prompts", "10"]);
    assert_eq!(output.status.code(), Some(1), "a run with failed requests has a negative answer: {}", text(&output));
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    for key in ["input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"] {
        assert_eq!(result[key].as_array().unwrap().len(), 10, "{key}");
    }
    let errors: Vec<&str> = result["errors"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert_eq!(errors.iter().filter(|error| error.contains("HTTP 500: no")).count(), 1, "{errors:?}");
    assert_eq!(errors.iter().filter(|error| error.is_empty()).count(), 9);
    let failed = errors.iter().position(|error| !error.is_empty()).unwrap();
    assert_eq!((&result["ttfts"][failed], &result["output_lens"][failed]), (&json!(0.0), &json!(0)));
    assert!(text(&output).contains("1 of 10 requests failed"), "{}", text(&output));
}

#[test]
fn a_seed_is_a_schedule() {
    let mock = mock();
    let digest = |flags: &[&str], variable: Option<&str>| {
        let mut command = serve_at(&mock.base_url().to_string(), &[&["--json"], flags].concat());
        variable.map(|seed| command.env("PYTHONHASHSEED", seed));
        let result = object(&command.output().unwrap());
        (result["schedule"]["seed"].as_u64().unwrap(), result["schedule"]["digest"].as_str().unwrap().to_owned())
    };
    let zero = digest(&[], None);
    assert_eq!(zero.0, 0);
    assert_eq!(digest(&["--seed", "42"], None), digest(&[], Some("42")));
    assert_ne!(digest(&["--seed", "42"], None).1, zero.1);
    assert_eq!(digest(&[], Some("random")), zero);
}

#[test]
fn what_makes_a_result_worth_less_is_said() {
    let mock = mock();
    let mut command = serve_at(&mock.base_url().to_string(), &["--json"]);
    let output = command.env("CUDA_LAUNCH_BLOCKING", "1").output().unwrap();
    let result = object(&output);
    assert_eq!(result["environment"]["CUDA_LAUNCH_BLOCKING"], "1");
    assert!(result["warnings"][0].as_str().unwrap().contains("CUDA_LAUNCH_BLOCKING"), "{}", result["warnings"]);
    assert!(text(&output).contains("warning: CUDA_LAUNCH_BLOCKING is set"));
}

#[test]
fn tables_for_people_csv_for_plots_and_lines_for_logs() {
    let folder = tempfile::tempdir().unwrap();
    let (csv, log) = (folder.path().join("axis.csv"), folder.path().join("log.jsonl"));
    let mock = mock();
    for _ in 0..2 {
        let flags = ["--csv", csv.to_str().unwrap(), "--output", log.to_str().unwrap(), "--append-result"];
        let output = serve(&mock, &flags);
        let table = String::from_utf8(output.stdout.clone()).unwrap();
        assert!(output.status.success(), "{}", text(&output));
        assert!(table.contains("| TTFT ") && table.contains("20 completed, 0 failed"), "{table}");
    }
    let axis = fs::read_to_string(&csv).unwrap();
    assert!(axis.starts_with("t_s,") && axis.lines().count() >= 2, "{axis}");
    let lines = fs::read_to_string(&log).unwrap();
    assert_eq!(lines.lines().count(), 2);
    assert!(lines.lines().all(|line| BenchResult::parse(line.as_bytes()).is_ok()));
}

#[test]
fn a_result_under_vllms_name_has_its_folder_made_and_is_checked_before_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let made = folder.path().join("out/static");
    let mock = mock();
    let output = serve(&mock, &["--save-result", "--result-dir", made.to_str().unwrap(), "--label", "a"]);
    assert!(output.status.success(), "{}", text(&output));
    let names: Vec<_> = fs::read_dir(&made).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(names.len() == 1 && names[0].to_str().unwrap().starts_with("a-200.0qps-"), "{names:?}");

    let before = mock.arrived();
    for flags in [&["--label", "a/b"][..], &["--result-dir", "/dev/null/x"], &["--result-filename", "no/such/x.json"]] {
        let output = serve(&mock, &[&["--save-result"], flags].concat());
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {}", text(&output));
    }
    assert_eq!(mock.arrived(), before, "nobody was asked anything");
}

/// A file that cannot be written cost the table and all other files of a finished run.
#[test]
fn one_file_that_cannot_be_written_costs_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let kept = folder.path().join("kept.json");
    // Full when it is written to, and not before.
    let flags = ["--csv", "/dev/full", "--output", kept.to_str().unwrap()];
    let output = serve(&mock(), &flags);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output));
    assert!(text(&output).contains("cannot write /dev/full"), "{}", text(&output));
    assert!(String::from_utf8(output.stdout).unwrap().contains("20 completed, 0 failed"));
    assert!(BenchResult::read(&kept).is_ok());
    let appended = serve(&mock(), &["--append-result", "--output", "/dev/full"]);
    assert_eq!(appended.status.code(), Some(2), "{}", text(&appended));
    assert!(String::from_utf8(appended.stdout).unwrap().contains("20 completed, 0 failed"));
}

/// Runs of other lengths were taken for repeats of each other.
#[test]
fn a_result_says_what_was_asked() {
    let mock = mock();
    let asked = |flags: &[&str]| object(&serve(&mock, &[&["--json"], flags].concat()))["args"]["streams"][0].clone();
    let plain = asked(&[]);
    assert_eq!((&plain["data"]["input_tokens"], &plain["data"]["output_tokens"]), (&json!(16), &json!(4)));
    for flags in [
        &["--random-range-ratio", "0.5"][..],
        &["--random-prefix-len", "8"],
        &["--backend", "openai-chat"],
        &["--top-p", "0.5"],
        &["--duration", "100ms"],
    ] {
        assert_ne!(asked(flags), plain, "{flags:?}");
    }
    assert_eq!(asked(&["--seed", "7"]), plain, "another seed is a repeat");
    let prompts = tempfile::NamedTempFile::new().unwrap();
    let custom = |text: &str| {
        fs::write(prompts.path(), text).unwrap();
        asked(&["--dataset-name", "custom", "--dataset-path", prompts.path().to_str().unwrap()])
    };
    let lines = "{\"prompt\": \"a\", \"output_tokens\": 3}\n";
    assert_eq!(custom(lines), custom(lines));
    assert_ne!(custom(lines), custom(&lines.replace('3', "4")));
}

#[test]
fn several_runs_are_several_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.json");
    let output = serve(&mock(), &["--quiet", "--repeat", "2", "--cooldown", "1ms", "--output", path.to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output));
    let seed = |name: &str| BenchResult::read(&folder.path().join(name)).unwrap().args["seed"].clone();
    assert_eq!((seed("a-1.json"), seed("a-2.json")), (json!(0), json!(1)));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
}

fn scenario(folder: &Path, text: &str) -> String {
    let path = folder.join("scenario.yaml");
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

fn run_scenario(path: &str, flags: &[&str]) -> Output {
    let common = ["serve", "--quick", "--warmup-requests", "1", "--scenario", path];
    Command::new(env!("CARGO_BIN_EXE_kvbench")).args(common).args(flags).env("NO_COLOR", "1").output().unwrap()
}

#[test]
fn several_models_at_several_servers_from_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let (chat, batch) = (mock(), mock());
    let path = scenario(
        folder.path(),
        &format!(
            "seed: 5\nstreams:\n  - name: chat\n    base_url: {}\n    backend: openai-chat\n    requests: 15\n    \
             arrivals: {{rate: 200, burstiness: .inf}}\n    dataset: {{name: random, input_len: 8, output_len: 3}}\n  \
             - name: llama-3.1\n    base_url: {}\n    backend: sglang\n    duration: 200ms\n    start: 0.02\n    \
             arrivals: {{square: {{low: 10, high: 100, period: 100ms, duty: 0.5}}}}\n    \
             dataset: {{name: prefix_repetition, prefix_len: 4, suffix_len: 4, output_len: 2}}\n",
            chat.base_url(),
            batch.base_url()
        ),
    );
    let result = object(&run_scenario(&path, &["--json"]));
    let (chat, batch) = (&result["streams"]["chat"], &result["streams"]["llama-3.1"]);
    assert_eq!((&chat["completed"], &chat["total_output_tokens"]), (&json!(15), &json!(45)));
    let batched = batch["completed"].as_u64().unwrap();
    assert!(batched >= 2, "{batch}");
    assert_eq!(result["completed"], json!(15 + batched));
    assert_eq!((&result["schedule"]["seed"], &batch["failed"]), (&json!(5), &json!(0)));
    assert!(result["summary"]["streams"]["llama-3_1"]["ttft_ms"]["p50"].is_number());
    let models: Vec<&str> = result["requests"]["model"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert!(models.contains(&"chat") && models.contains(&"llama-3.1"));
}

#[test]
fn bad_yaml_names_line_and_key() {
    let folder = tempfile::tempdir().unwrap();
    for (text, parts) in [
        ("streams:\n  - name: a\n    base_url: x\n    arival: {rate: 3}\n", &["line 4", "`arival`", "`arrivals`"][..]),
        ("streams:\n  - name: a\n    base_url: x\n    requests: many\n", &["line 4"]),
        ("streams:\n  - name: a\n    base_url: [x\n", &["line "]),
        ("streams: []\n", &["no stream"]),
        ("streams:\n  - base_url: x\n", &["name"]),
    ] {
        let output = run_scenario(&scenario(folder.path(), text), &[]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{text}: {said}");
        assert!(parts.iter().all(|part| said.contains(part)) && said.contains("scenario.yaml"), "{text}: {said}");
    }
}

#[test]
fn what_cannot_be_measured_is_an_error_before_the_run() {
    let gone = mock().base_url().to_string();
    KvBench::new("serve").args(&["--base-url", &gone, "--quick"]).refused("is the server running there?");
    KvBench::new("serve").args(&["--base-url", "https://a"]).refused("plain HTTP");
    KvBench::new("serve").args(&["--metric-percentiles", "101"]).refused("--metric-percentiles");
    KvBench::new("serve").args(&["--percentile-metrics", "ttft,latency"]).refused("latency");
    KvBench::new("serve").args(&["--dataset-name", "sharegpt"]).refused("--dataset-path");
    KvBench::new("serve")
        .args(&["--dataset-name", "custom", "--dataset-path", "/nonexistent/x"])
        .refused("/nonexistent/x");
    KvBench::new("serve").args(&["--metadata", "summary=x"]).refused("summary");
    for flag in [["--num-prompts", "5"], ["--request-rate", "8"], ["--duration", "1s"], ["--backend", "vllm"]] {
        KvBench::new("serve").args(&["--scenario", "x.yaml"]).args(&flag).refused(flag[0]);
    }

    let refusing = Mock::start(|_| Script::error(404, "no such model")).unwrap();
    let url = refusing.base_url().to_string();
    KvBench::new("serve").args(&["--base-url", &url, "--quick"]).refused("HTTP 404: no such model");
    assert_eq!(refusing.arrived(), 1, "one request was enough to know");
}

#[test]
fn ctrl_c_writes_what_was_measured() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("partial.json");
    // After the first, two of warm-up and six that are measured, nobody is answered any more.
    let mock = Mock::start(|request| match request.ordinal {
        0..9 => Script::new(vec![Step::Tokens { text: "a".to_owned(), count: 1 }]),
        _ => Script { ending: Ending::Stall, ..Script::new(vec![Step::Tokens { text: "a".to_owned(), count: 1 }]) },
    })
    .unwrap();
    let flags = ["--json", "--num-prompts", "1000", "--max-concurrency", "4", "--output", path.to_str().unwrap()];
    let mut command = serve_at(&mock.base_url().to_string(), &flags);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    while mock.arrived() < 13 {
        assert!(child.try_wait().unwrap().is_none(), "it ended too early");
        thread::yield_now();
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(end_of(&mut child).code(), Some(130));
    let result: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    assert_eq!((&result["partial"], &result["completed"], &result["failed"]), (&json!(true), &json!(6), &json!(0)));
    assert_eq!((&result["summary"]["cancelled"], &result["unsent"]), (&json!(4.0), &json!(990)));
    assert!(BenchResult::read(&path).is_ok());
}

#[test]
fn the_selftest_says_what_the_client_can_do() {
    let output = Command::new(env!("CARGO_BIN_EXE_kvbench"))
        .args(["serve", "--selftest", "--quick", "--json"])
        .output()
        .unwrap();
    // Whether this machine is quiet enough is not for a test to say.
    assert!(matches!(output.status.code(), Some(0 | 1)), "{}", text(&output));
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    for figure in ["/send_lag_ms/p99", "/timer_error_us/p50", "/requests_per_s", "/chunks_per_s"] {
        assert!(result["summary"].pointer(figure).and_then(Value::as_f64).is_some_and(|value| value > 0.0), "{figure}");
    }
}

#[test]
fn a_trace_in_mooncakes_form_is_replayed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.jsonl");
    let line = |ms: u64, ids: &str| {
        format!("{{\"timestamp\": {ms}, \"input_length\": 520, \"output_length\": 2, \"hash_ids\": {ids}}}\n")
    };
    fs::write(&path, [line(0, "[1, 2]"), line(1000, "[1, 3]"), line(3000, "[4, 5]")].concat()).unwrap();
    let mock = mock();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvbench"));
    command.args(["serve", "--quick", "--json", "--warmup-requests", "0", "--base-url", &mock.base_url().to_string()]);
    command.args(["--dataset-name", "mooncake", "--trace-speed", "100", "--dataset-path", path.to_str().unwrap()]);
    let result = object(&command.output().unwrap());
    assert_eq!(result["schedule"]["intended_ms"], json!([0.0, 10.0, 30.0]));
    assert_eq!((&result["total_input_tokens"], &result["total_output_tokens"]), (&json!(1560), &json!(6)));
    let prompts: Vec<Vec<u32>> =
        mock.log()[1..].iter().map(|entry| serde_json::from_str(&entry.prompt).unwrap()).collect();
    assert_eq!(prompts[0][..512], prompts[1][..512], "equal blocks are equal tokens");
    assert_ne!(prompts[0][512..], prompts[1][512..]);
}

/// A real server: it has a prefix cache, and says what it found there.
struct KvServe {
    child: std::process::Child,
    url: String,
    dir: tempfile::TempDir,
}

impl KvServe {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvbench"));
        command.args(["kvserve", "synthetic:tiny", "--backend", "cpu", "--threads", "1", "--port", "0"]);
        command.env("KVCACHED_RUNTIME_DIR", dir.path()).env("KVCACHED_HOST_BUDGET", "64M");
        command.env_remove("KVCACHED_MAX_CACHED_TOKENS").env_remove("KVCACHED_IPC_NAME");
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
        let url = lines.map_while(Result::ok).find_map(|line| Some(line.strip_prefix("listening on ")?.to_owned()));
        Self { child, url: url.unwrap(), dir }
    }

    /// A result and what was said, of six prompts of 128 tokens, one after another.
    fn measure(&self, flags: &[&str]) -> (Value, String) {
        let prompts = ["--num-prompts", "6", "--seed", "7", "--random-input-len", "128", "--random-output-len", "2"];
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvbench"));
        command.args(["serve", "--quick", "--json", "--base-url", &self.url, "--max-concurrency", "1"]);
        command.args(prompts).args(flags).env("KVCACHED_RUNTIME_DIR", self.dir.path()).env_remove("OPENAI_API_KEY");
        let output = command.output().unwrap();
        (object(&output), text(&output))
    }
}

impl Drop for KvServe {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_run_that_measures_an_earlier_ones_prefix_cache_says_so() {
    const WARNING: &str = "came from a prefix cache that an earlier run filled";
    let server = KvServe::start();
    let (first, said) = server.measure(&[]);
    assert!(!said.contains(WARNING), "{said}");
    let (again, said) = server.measure(&[]);
    assert!(said.contains(WARNING) && said.contains("--unique-prompts"), "{said}");
    assert_eq!(again["schedule"]["digest"], first["schedule"]["digest"], "the same seed gives the same prompts");
    for _ in 0..2 {
        let (unique, said) = server.measure(&["--unique-prompts"]);
        assert!(!said.contains(WARNING), "{said}");
        assert_ne!(unique["schedule"]["digest"], first["schedule"]["digest"]);
        assert_eq!(unique["schedule"]["intended_ms"], first["schedule"]["intended_ms"]);
        assert_eq!(unique["total_input_tokens"], first["total_input_tokens"]);
    }
}

#[test]
fn the_concurrency_is_said_as_it_was_asked_for() {
    let mock = mock();
    let said = |flags: &[&str]| String::from_utf8(serve(&mock, flags).stdout).unwrap();
    let text = said(&["--max-concurrency", "4", "--num-prompts", "100"]);
    assert!(text.contains("tokens/s; at most 4 at a time, as asked"), "{text}");
    let text = said(&[]);
    assert!(text.contains(" within one second") && !text.contains("as asked"), "{text}");
}
