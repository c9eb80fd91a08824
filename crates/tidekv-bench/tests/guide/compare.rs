//! Elastic beside static: every benchmark once, short, with real servers. What the figures are is not judged here: a busy
//! machine would decide. That they are there, whole and consistent, is.

use serde_json::Value;

use crate::support::KvBench;

/// The result of a run that ends with 0 or, where the machine is too noisy to tell, with 1.
fn result(subcommand: &str, args: &[&str]) -> Value {
    let output = KvBench::new(subcommand).args(args).args(&["--json"]).output();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(matches!(output.status.code(), Some(0 | 1)), "{subcommand} {args:?}: {stderr}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn number(value: &Value, path: &str) -> f64 {
    let found = value.pointer(path).and_then(Value::as_f64);
    found.unwrap_or_else(|| panic!("no number at {path}: {value:#}"))
}

#[test]
fn overhead_has_every_rate_with_its_intervals_and_a_verdict() {
    let args = ["--rates", "16,32", "--saturated", "4", "--pairs", "2", "--seconds", "2", "--warmup-requests", "8"];
    let result = result("overhead", &[&args[..], &["--profile", "short,fixed", "--kv-budget", "256M"]].concat());
    let summary = &result["summary"];
    let rates = summary["rates"].as_array().unwrap();
    assert_eq!(rates.iter().map(|rate| rate["rate"].to_string()).collect::<Vec<_>>(), ["16.0", "32.0", "\"inf\""]);
    for rate in rates {
        for figure in ["throughput", "ttft_p50", "itl_p50"] {
            let ratio = number(rate, &format!("/{figure}_ratio"));
            let (low, high) = (number(rate, &format!("/ci/{figure}/0")), number(rate, &format!("/ci/{figure}/1")));
            assert!(low > 0.0 && low <= ratio && ratio <= high, "{figure}: {low} {ratio} {high}");
        }
        for side in ["static", "elastic"] {
            assert!(number(rate, &format!("/{side}/e2e_p50_ms")) >= number(rate, &format!("/{side}/ttft_p50_ms")));
            assert!(number(rate, &format!("/{side}/kv_held_mean_bytes")) > 0.0);
        }
        let held = |side: &str| number(rate, &format!("/{side}/kv_held_peak_bytes"));
        assert!(held("elastic") < held("static"), "{rate:#}");
    }
    // Two pairs cannot show anything, and must not pretend to.
    assert!(summary["verdict"].as_str().unwrap().starts_with("underpowered"), "{}", summary["verdict"]);
    assert_eq!(number(summary, "/failed"), 0.0);
    let profiles: Vec<_> =
        summary["profiles"].as_array().unwrap().iter().map(|profile| profile["name"].clone()).collect();
    assert_eq!(profiles, ["short", "fixed"]);
}

#[test]
fn the_same_prompts_give_the_same_tokens_with_both_kinds_of_memory() {
    let result = result("accuracy", &["--num-prompts", "12", "--output-len", "24", "--kv-budget", "64M"]);
    assert_eq!(result["summary"]["verdict"], "identical");
    assert_eq!(number(&result, "/summary/text_match"), 1.0);
    assert_eq!(number(&result, "/summary/token_match"), 1.0);
    assert!(result["summary"]["self_match"].is_null(), "the first pass says it all");
}

#[test]
fn two_models_are_told_apart_by_their_answers() {
    let serve = |model: &str| {
        format!("{} kvserve {model} --port {{port}} --dir $KVCACHED_RUNTIME_DIR", env!("CARGO_BIN_EXE_kvbench"))
    };
    let dir = tempfile::tempdir().unwrap();
    let line = |model: &str| format!("KVCACHED_RUNTIME_DIR={}; {}", dir.path().display(), serve(model));
    let (a, b) = (line("synthetic:tiny:1"), line("synthetic:tiny:2"));
    let args = ["--a-cmd", &a, "--b-cmd", &b, "--num-prompts", "8", "--output-len", "16"];
    let result = result("accuracy", &args);
    assert_eq!(result["summary"]["verdict"], "differs");
    assert_eq!((number(&result, "/summary/self_match"), number(&result, "/summary/cross_match")), (1.0, 0.0));
    assert!(number(&result, "/summary/p_value") < 0.05);
}

#[test]
fn a_budget_for_one_static_model_serves_three_elastic_ones() {
    let args = ["--max-models", "3", "--pairs", "1", "--seconds", "1", "--kv-budget", "96M", "--model-kv", "64M"];
    let result = result("multi-model", &[&args[..], &["--profile", "short"]].concat());
    assert_eq!(number(&result, "/summary/models_static"), 1.0);
    assert_eq!(number(&result, "/summary/models_elastic"), 3.0);
    let profile = &result["summary"]["profiles"][0];
    assert!(number(profile, "/elastic/kv_held_peak_bytes") <= 96.0 * 1024.0 * 1024.0);
    assert!(number(profile, "/static/kv_held_peak_bytes") > 96.0 * 1024.0 * 1024.0, "three budgets");
}

#[test]
fn latency_benefit_reports_both_scenarios_model_by_model() {
    let short = [
        "--requests-per-peak",
        "12",
        "--input-len",
        "16",
        "--output-len",
        "16",
        "--repeats",
        "1",
        "--calibration",
        "0.3",
    ];
    let result = result("latency-benefit", &short);
    let summary = &result["summary"];
    for place in ["", "/simultaneous"] {
        for figure in
            ["ttft_mean_speedup", "ttft_p99_speedup", "models/model-3/ttft_mean_speedup", "elastic/ttft_mean_ms"]
        {
            assert!(number(summary, &format!("{place}/{figure}")) > 0.0);
        }
        assert_eq!(number(summary, &format!("{place}/failed")), 0.0);
        assert!((0.0..=1.0).contains(&number(summary, &format!("{place}/peak_need"))));
        assert!(number(summary, &format!("{place}/offered_over_compute")) <= 0.7);
    }
    assert!(summary["verdict"].as_str().unwrap().contains("simultaneous-peaks"));
}
