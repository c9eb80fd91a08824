//! Results of `vllm bench serve` and of SGLang's `bench_serving`: the same keys for the most part, and one name each.
//!
//! | figure               | vLLM, and so ours                | SGLang                          |
//! |----------------------|----------------------------------|---------------------------------|
//! | requests a second    | `request_throughput`             | the same                        |
//! | tokens a second      | `output_throughput`, `total_token_throughput` | `output_throughput`, `total_throughput` |
//! | of a metric          | `mean_ttft_ms`, `median_..`, `std_..`, `p99_..`; also tpot, itl, e2el | the same; `mean_e2e_latency_ms` for e2el |
//! | which is it          | `total_token_throughput`         | `total_throughput`, `mean_e2e_latency_ms` |
//!
//! `itl` is not quite the same thing in both (SGLang's native path spreads a chunk over its tokens); the reader of a
//! comparison is told which tools the two sides come from.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::{Run, Source, Tool};
use crate::host::HostInfo;
use crate::result::Series;
use crate::stats::Samples;

/// Without these a file is no result of a load generator.
const REQUIRED: [&str; 3] = ["request_throughput", "duration", "completed"];

/// Figures besides those of a metric. What counts and what describes is for `direction` to say.
const PLAIN: [&str; 11] = [
    "throughput",
    "request_throughput",
    "request_goodput",
    "input_throughput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    "duration",
    "completed",
    "failed",
];

/// Fields that say what was measured, not how it went.
const WORKLOAD: [&str; 15] = [
    "backend",
    "endpoint_type",
    "model_id",
    "tokenizer_id",
    "dataset_name",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "ramp_up_strategy",
    "random_input_len",
    "random_output_len",
    "random_range_ratio",
    "sharegpt_output_len",
    "label",
];

/// Lists of single measurements, in seconds, and what they are called in a result of ours.
const DETAILS: [(&str, &str); 4] = [("ttfts", "ttft"), ("itls", "itl"), ("latencies", "e2e"), ("e2els", "e2e")];

/// Whose result it is, if it is one.
pub(super) fn recognise(fields: &Map<String, Value>) -> Option<Tool> {
    if !REQUIRED.iter().all(|key| fields.get(*key).is_some_and(Value::is_number)) {
        return None;
    }
    let is_sglang = ["total_throughput", "mean_e2e_latency_ms"].iter().any(|key| fields.contains_key(*key));
    Some(if is_sglang { Tool::Sglang } else { Tool::Vllm })
}

/// The run in a file that was recognised.
pub(super) fn run(tool: Tool, mut fields: Map<String, Value>) -> Run {
    let serving = serving_figures(&fields);
    let samples = DETAILS.iter().filter_map(|(key, name)| Some(((*name).to_owned(), seconds(fields.get(*key)?)?)));
    let samples: BTreeMap<String, Series> = samples.collect();
    // Prompts, answers and single times are bulk that no table shows.
    for key in ["generated_texts", "errors", "input_lens", "output_lens", "itls", "ttfts", "latencies", "e2els"] {
        fields.shift_remove(key);
    }
    let args = WORKLOAD.iter().filter_map(|key| Some(((*key).to_owned(), fields.get(*key)?.clone()))).collect();
    let host = HostInfo { gpu: None, ..HostInfo::default() };
    let source = Source::default();
    Run { tool, name: "serve".to_owned(), args, host, samples, summary: Map::new(), serving, extra: fields, source }
}

/// The figures of a server under load among the fields of a file, in vLLM's names; none if it measured something else.
pub(super) fn serving_figures(fields: &Map<String, Value>) -> Map<String, Value> {
    if recognise(fields).is_none() {
        return Map::new();
    }
    // Where nothing was answered there are no latencies: what stands there is 0, which would be the best of all.
    let has_answers = fields.get("completed").and_then(Value::as_f64) != Some(0.0);
    let named = fields.iter().filter(|(_, value)| value.is_number()).filter_map(|(key, value)| {
        let name = match key.as_str() {
            "total_throughput" => "total_token_throughput".to_owned(),
            plain if PLAIN.contains(&plain) => plain.to_owned(),
            metric => metric_name(metric).filter(|_| has_answers)?,
        };
        Some((name, value.clone()))
    });
    named.collect()
}

/// `mean_ttft_ms` and its like; SGLang's `mean_e2e_latency_ms` by vLLM's name. `None` for anything else.
fn metric_name(key: &str) -> Option<String> {
    let (statistic, metric) = key.strip_suffix("_ms")?.split_once('_')?;
    let is_percentile = statistic.strip_prefix('p').is_some_and(|percent| percent.parse::<f64>().is_ok());
    let metric = match metric {
        "ttft" | "tpot" | "itl" | "e2el" => metric,
        "e2e_latency" => "e2el",
        _ => return None,
    };
    let is_statistic = is_percentile || matches!(statistic, "mean" | "median" | "std" | "max");
    is_statistic.then(|| format!("{statistic}_{metric}_ms"))
}

/// A list of times in seconds, or a list of such lists, as a series in nanoseconds. Zero is what vLLM writes for a
/// request that failed.
fn seconds(list: &Value) -> Option<Series> {
    let mut times = Samples::new();
    let mut push = |value: &Value| {
        let nanoseconds =
            value.as_f64().filter(|seconds| *seconds > 0.0 && *seconds < 1e9).map(|seconds| seconds * 1e9);
        nanoseconds.into_iter().for_each(|time| times.push(whole(time)));
    };
    for item in list.as_array()? {
        match item {
            Value::Array(inner) => inner.iter().for_each(&mut push),
            single => push(single),
        }
    }
    Series::of_times(&times)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked to be above 0 and far below 2^64")]
const fn whole(nanoseconds: f64) -> u64 {
    nanoseconds as u64
}
