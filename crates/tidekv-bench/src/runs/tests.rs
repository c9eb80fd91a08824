//! Files as other tools write them, and what is made of them.

use serde_json::json;

use super::*;

/// The keys of `vllm bench serve --save-detailed`, with values of a made-up run.
fn vllm() -> Value {
    json!({
        "date": "20260801-101112", "endpoint_type": "openai", "backend": "vllm", "label": null, "model_id": "m",
        "tokenizer_id": "m", "num_prompts": 3, "request_rate": "inf", "burstiness": 1.0, "max_concurrency": null,
        "duration": 2.0, "completed": 3, "failed": 0, "total_input_tokens": 30, "total_output_tokens": 12,
        "request_throughput": 1.5, "request_goodput": null, "output_throughput": 6.0, "total_token_throughput": 21.0,
        "mean_ttft_ms": 20.0, "median_ttft_ms": 19.0, "std_ttft_ms": 2.0, "p99_ttft_ms": 25.0, "p99.9_ttft_ms": 26.0,
        "mean_tpot_ms": 5.0, "median_tpot_ms": 5.0, "std_tpot_ms": 0.5, "p99_tpot_ms": 6.0,
        "mean_itl_ms": 5.0, "median_itl_ms": 5.0, "std_itl_ms": 0.5, "p99_itl_ms": 6.0,
        "ttfts": [0.019, 0.0, 0.025], "itls": [[0.005, 0.006], [], [0.004]], "generated_texts": ["a", "b", "c"],
        "errors": ["", "", ""], "input_lens": [10, 10, 10], "output_lens": [4, 4, 4],
    })
}

fn sglang() -> Value {
    json!({
        "backend": "sglang", "dataset_name": "random", "request_rate": 4.0, "max_concurrency": 16,
        "duration": 10.0, "completed": 40, "total_input_tokens": 400, "total_output_tokens": 160,
        "total_output_tokens_retokenized": 158, "request_throughput": 4.0, "input_throughput": 40.0,
        "output_throughput": 16.0, "total_throughput": 56.0, "concurrency": 3.3,
        "mean_e2e_latency_ms": 100.0, "median_e2e_latency_ms": 95.0, "p99_e2e_latency_ms": 180.0,
        "mean_ttft_ms": 20.0, "median_ttft_ms": 18.0, "std_ttft_ms": 3.0, "p99_ttft_ms": 30.0,
        "mean_itl_ms": 4.0, "max_itl_ms": 9.0, "accept_length": null, "server_info": {"version": "0.5"},
    })
}

fn one(value: &Value) -> Run {
    let mut runs = parse(value.to_string().as_bytes()).unwrap();
    assert_eq!(runs.len(), 1);
    runs.remove(0)
}

fn figure(run: &Run, name: &str) -> Option<f64> {
    run.figures().into_iter().find(|figure| figure.path == [name]).map(|figure| figure.value)
}

#[test]
fn a_file_of_vllm() {
    let run = one(&vllm());
    assert_eq!((run.tool, run.name.as_str()), (Tool::Vllm, "serve"));
    assert_eq!((run.throughput(), run.ttft_p50_ms()), (Some(1.5), Some(19.0)));
    assert_eq!(figure(&run, "p99.9_ttft_ms"), Some(26.0));
    assert_eq!(figure(&run, "request_goodput"), None, "null is no figure");
    assert_eq!(run.args["request_rate"], json!("inf"));
    assert_eq!(run.samples["ttft"].values, [19_000_000, 25_000_000], "0 is a request that failed");
    assert_eq!(run.samples["itl"].percentiles.count, 3);
    assert!(!run.extra.contains_key("generated_texts"));
}

/// A server that answers nobody has latencies of 0 in such a file, and was better than any other.
#[test]
fn a_run_without_answers_has_no_latencies() {
    let mut dead = vllm();
    dead["completed"] = json!(0);
    for name in ["median_ttft_ms", "mean_tpot_ms", "p99_itl_ms"] {
        dead[name] = json!(0.0);
    }
    let run = one(&dead);
    assert_eq!((figure(&run, "median_ttft_ms"), figure(&run, "p99_itl_ms"), run.ttft_p50_ms()), (None, None, None));
    assert_eq!(figure(&run, "completed"), Some(0.0));
}

#[test]
fn a_file_of_sglang_has_the_names_of_vllm() {
    let run = one(&sglang());
    assert_eq!(run.tool, Tool::Sglang);
    for (name, value) in [
        ("total_token_throughput", 56.0),
        ("mean_e2el_ms", 100.0),
        ("p99_e2el_ms", 180.0),
        ("median_ttft_ms", 18.0),
        ("max_itl_ms", 9.0),
    ] {
        assert_eq!(figure(&run, name), Some(value), "{name}");
    }
}

#[test]
fn a_file_of_aiperf() {
    let file = json!({
        "schema_version": "1.1", "request_throughput": {"unit": "requests/sec", "avg": 2.5},
        "request_count": {"unit": "requests", "avg": 10.0},
        "time_to_first_token": {"unit": "ms", "avg": 41.0, "p50": 39.0, "p99": 88.0, "std": 9.0, "count": 10},
        "inter_token_latency": {"unit": "ms", "avg": 7.0},
        "request_latency": {"unit": "s", "avg": 0.5},
        "input_config": {"loadgen": {"concurrency": 4}},
    });
    let run = one(&file);
    assert_eq!((run.tool, run.throughput(), run.ttft_p50_ms()), (Tool::Aiperf, Some(2.5), Some(39.0)));
    assert_eq!((figure(&run, "mean_tpot_ms"), figure(&run, "mean_e2el_ms")), (Some(7.0), Some(500.0)));
}

#[test]
fn ours_has_its_own_figures_and_those_of_vllm() {
    let mut file = vllm();
    let fields = file.as_object_mut().unwrap();
    fields.retain(|_, value| !value.is_null());
    for (key, value) in [
        ("schema", json!("tidekv.bench.v1")),
        ("name", json!("serve")),
        ("args", json!({"request_rate": 4})),
        ("summary", json!({"send_lag_ms": {"p99": 0.4}})),
        ("throughput", json!(1.5)),
        ("ttft_p50", json!(19.0)),
        ("kv_mode", json!("elastic")),
    ] {
        fields.insert(key.to_owned(), value);
    }
    let run = one(&file);
    assert_eq!((run.tool, run.kv_mode()), (Tool::Kvbench, Some("elastic")));
    let paths: Vec<String> = run.figures().into_iter().map(|figure| figure.path.join(".")).collect();
    assert!(paths.contains(&"median_ttft_ms".to_owned()) && paths.contains(&"send_lag_ms.p99".to_owned()), "{paths:?}");
}

#[test]
fn several_runs_in_one_file() {
    let text = format!("{}\n{}\n", sglang(), sglang());
    let runs = parse(text.as_bytes()).unwrap();
    let entries: Vec<Option<usize>> = runs.iter().map(|run| run.source.entry).collect();
    assert_eq!(entries, [Some(1), Some(2)]);
}

#[test]
fn nan_is_no_figure_of_others_and_an_error_in_ours() {
    let theirs = vllm().to_string().replace("\"std_tpot_ms\":0.5", "\"std_tpot_ms\":NaN");
    let run = parse(theirs.as_bytes()).unwrap().remove(0);
    assert_eq!((figure(&run, "std_tpot_ms"), figure(&run, "mean_tpot_ms")), (None, Some(5.0)));
    let ours = r#"{"schema": "tidekv.bench.v1", "name": "x", "summary": {"x_us": NaN}}"#;
    assert!(parse(ours.as_bytes()).unwrap_err().to_string().contains("NaN"));
}

#[test]
fn what_is_nobodys_result_says_what_it_lacks() {
    for (text, reason) in [
        ("[1]", "no object"),
        ("{}", "`schema` is missing"),
        (r#"{"request_throughput": 3}"#, "`schema` is missing"),
        (r#"{"schema": "tidekv.bench.v9"}"#, "tidekv.bench.v9"),
        (r#"{"schema": 3}"#, "schema"),
        ("{\"a\": 1", "too early"),
        ("", "empty"),
    ] {
        let error = parse(text.as_bytes()).unwrap_err().to_string();
        assert!(error.contains(reason), "{text}: {error}");
    }
}
