//! `profile_export_aiperf.json` of aiperf (and genai-perf): one block of statistics for each metric.
//!
//! ```text
//!   "time_to_first_token": {"unit": "ms", "avg": 41.2, "p50": 39.0, "p99": 88.1, "std": 9.7, ...}
//! ```
//!
//! Its `inter_token_latency` is one number for each request, without the first token: what vLLM calls TPOT. Its
//! `inter_chunk_latency` is every single gap: vLLM's ITL. The names below are vLLM's.

use serde_json::{Map, Value, json};

use super::{Run, Source, Tool};
use crate::host::HostInfo;

/// Metrics that are distributions of times, by our names.
const TIMES: [(&str, &str); 4] = [
    ("time_to_first_token", "ttft"),
    ("inter_token_latency", "tpot"),
    ("inter_chunk_latency", "itl"),
    ("request_latency", "e2el"),
];

/// Metrics that are one number.
const NUMBERS: [(&str, &str); 6] = [
    ("request_throughput", "request_throughput"),
    ("goodput", "request_goodput"),
    ("output_token_throughput", "output_throughput"),
    ("total_token_throughput", "total_token_throughput"),
    ("request_count", "completed"),
    ("error_request_count", "failed"),
];

/// What aiperf calls a statistic, and vLLM.
const STATISTICS: [(&str, &str); 8] = [
    ("avg", "mean"),
    ("p50", "median"),
    ("std", "std"),
    ("p25", "p25"),
    ("p75", "p75"),
    ("p90", "p90"),
    ("p95", "p95"),
    ("p99", "p99"),
];

/// Whether the fields are those of such a file.
pub(super) fn is_one(fields: &Map<String, Value>) -> bool {
    let throughput = fields.get("request_throughput").and_then(Value::as_object);
    throughput.is_some_and(|block| block.contains_key("unit") && block.get("avg").is_some_and(Value::is_number))
}

/// The run in it.
pub(super) fn run(fields: Map<String, Value>) -> Run {
    let mut serving = Map::new();
    for (theirs, ours) in NUMBERS {
        if let Some(number) = fields.get(theirs).and_then(|block| block.get("avg")).filter(|number| number.is_number())
        {
            serving.insert(ours.to_owned(), number.clone());
        }
    }
    for (theirs, ours) in TIMES {
        let Some(block) = fields.get(theirs).and_then(Value::as_object) else {
            continue;
        };
        let Some(milliseconds) = unit_ms(block.get("unit")) else {
            continue;
        };
        for (statistic, name) in STATISTICS {
            if let Some(value) = block.get(statistic).and_then(Value::as_f64) {
                serving.insert(format!("{name}_{ours}_ms"), json!(value * milliseconds));
            }
        }
    }
    let args = fields.get("input_config").and_then(Value::as_object).cloned().unwrap_or_default();
    let named = |(key, value): (String, Value)| (!value.is_object()).then_some((key, value));
    Run {
        tool: Tool::Aiperf,
        name: "serve".to_owned(),
        args,
        host: HostInfo::default(),
        samples: std::collections::BTreeMap::new(),
        summary: Map::new(),
        serving,
        extra: fields.into_iter().filter_map(named).collect(),
        source: Source::default(),
    }
}

/// How many milliseconds a unit has.
fn unit_ms(unit: Option<&Value>) -> Option<f64> {
    match unit?.as_str()? {
        "ms" => Some(1.0),
        "us" => Some(1e-3),
        "ns" => Some(1e-6),
        "s" | "sec" | "seconds" => Some(1e3),
        _ => None,
    }
}
