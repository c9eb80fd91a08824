//! From a run to its result and its tables.
//!
//! ```text
//!   top level   vLLM's keys, verbatim; throughput, ttft_p50, itl_p50, e2e_p50; environment, timeline, requests, schedule
//!   summary     ours: latencies from the intended time, the same from sending, the client's own delay
//!   samples     ttft, tpot, itl, e2e, send_lag, as the clock said
//! ```
//!
//! With several streams the top level is of all of them together, and `streams` has the same keys for each.

use serde_json::{Map, Value, json};

use crate::load::metrics::Distribution;
use crate::load::{Arrivals, Metrics, MetricsRequest, Record, Schedule, Stream, metrics};
use crate::result::BenchResult;
use crate::table::{Table, format_figure};

/// Rows of `requests`: enough for a plot, few enough for a file.
const MAX_REQUEST_ROWS: usize = 4000;

/// What of the distributions stands at the top level.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Of `ttft`, `tpot`, `itl`, `e2el`.
    pub metrics: Vec<String>,
    /// From 0 to 100.
    pub percentiles: Vec<f64>,
}

impl Wanted {
    /// The names that there are.
    pub const METRICS: [&'static str; 4] = ["ttft", "tpot", "itl", "e2el"];
}

/// All figures of a run.
#[derive(Debug)]
pub struct Figures {
    /// Of all streams together.
    pub total: Metrics,
    /// Of each, in their order.
    pub streams: Vec<(String, Metrics)>,
}

impl Figures {
    /// The figures of some records.
    pub fn of(schedule: &Schedule, records: &[Record], request: &MetricsRequest) -> Self {
        let of_stream = |(index, stream): (usize, &Stream)| {
            let own = records.iter().filter(|record| record.stream == index);
            (stream.name.clone(), metrics(own, request))
        };
        let streams = schedule.streams.iter().enumerate().map(of_stream).collect();
        Self { total: metrics(records, request), streams }
    }
}

/// vLLM's result keys for some figures, in vLLM's order.
pub fn vllm_keys(figures: &Metrics, wanted: &Wanted) -> Map<String, Value> {
    let mut keys = Map::new();
    let mut set = |key: &str, value: Value| drop(keys.insert(key.to_owned(), value));
    set("duration", figures.duration_s.into());
    set("completed", figures.completed.into());
    set("failed", figures.failed.into());
    set("total_input_tokens", figures.total_input_tokens.into());
    set("total_output_tokens", figures.total_output_tokens.into());
    set("request_throughput", figures.request_throughput.into());
    set("request_goodput", json!(figures.request_goodput));
    set("output_throughput", figures.output_throughput.into());
    set("total_token_throughput", figures.total_token_throughput.into());
    set("max_output_tokens_per_s", figures.max_output_tokens_per_s.into());
    set("max_concurrent_requests", figures.max_concurrent_requests.into());
    // Of audio, which nobody sent.
    set("rtfx", 0.0.into());
    for name in &wanted.metrics {
        let times = match name.as_str() {
            "ttft" => &figures.ttft,
            "tpot" => &figures.tpot,
            "itl" => &figures.itl,
            _ => &figures.e2el,
        };
        // Where there is no time at all, vLLM's readers find 0.
        let figure = |value: Option<f64>| value.unwrap_or(0.0).into();
        set(&format!("mean_{name}_ms"), figure(times.mean_ms()));
        set(&format!("median_{name}_ms"), figure(times.median_ms()));
        set(&format!("std_{name}_ms"), figure(times.std_ms()));
        for &percent in &wanted.percentiles {
            set(&format!("p{percent}_{name}_ms"), figure(times.percentile_ms(percent)));
        }
    }
    keys
}

/// Puts everything about the requests into a result.
pub fn fill(result: &mut BenchResult, schedule: &Schedule, records: &[Record], figures: &Figures, wanted: &Wanted) {
    let total = &figures.total;
    result.more.extend(vllm_keys(total, wanted));
    result.set_more("throughput", total.request_throughput);
    for (key, times) in [("ttft_p50", &total.ttft_intended), ("itl_p50", &total.itl), ("e2e_p50", &total.e2el_intended)]
    {
        times.median_ms().into_iter().for_each(|median| result.set_more(key, median));
    }
    if figures.streams.len() > 1 {
        let each = figures.streams.iter().map(|(name, figures)| (name.clone(), vllm_keys(figures, wanted).into()));
        result.set_more("streams", Value::Object(each.collect()));
    }
    result.set_more("kept_schedule", total.kept_schedule());
    summarise(result, "", total);
    if figures.streams.len() > 1 {
        for (name, figures) in &figures.streams {
            // A dot would open an object.
            summarise(result, &format!("streams.{}.", name.replace('.', "_")), figures);
        }
    }
    for (name, times) in [
        ("ttft", &total.ttft_intended),
        ("tpot", &total.tpot),
        ("itl", &total.itl),
        ("e2e", &total.e2el_intended),
        ("send_lag", &total.send_lag),
    ] {
        result.add_times(name, &times.samples());
    }
    result.set_more("schedule", schedule_json(schedule));
    result.set_more("requests", requests_json(schedule, records));
}

fn summarise(result: &mut BenchResult, prefix: &str, figures: &Metrics) {
    let mut set = |name: &str, value: Option<f64>| {
        value.into_iter().for_each(|value| result.set_figure(&format!("{prefix}{name}"), value));
    };
    set("request_throughput", Some(figures.request_throughput));
    set("output_throughput", Some(figures.output_throughput));
    set("total_token_throughput", Some(figures.total_token_throughput));
    set("goodput", figures.request_goodput);
    let count = |count: usize| Some(crate::stats::to_f64(u64::try_from(count).unwrap_or(u64::MAX)));
    set("completed", count(figures.completed));
    set("errors", count(figures.failed));
    if figures.cancelled > 0 {
        set("cancelled", count(figures.cancelled));
    }
    set("duration_seconds", Some(figures.duration_s));
    set("connects", Some(crate::stats::to_f64(figures.connects)));
    set("resends", Some(crate::stats::to_f64(figures.resends)));
    for (name, times) in [
        ("ttft_ms", &figures.ttft_intended),
        ("tpot_ms", &figures.tpot),
        ("itl_ms", &figures.itl),
        ("e2e_ms", &figures.e2el_intended),
        ("from_send.ttft_ms", &figures.ttft),
        ("from_send.e2e_ms", &figures.e2el),
        ("send_lag_ms", &figures.send_lag),
        ("cap_wait_ms", &figures.cap_wait),
    ] {
        set(&format!("{name}.mean"), times.mean_ms());
        for (percentile, percent) in [("p50", 50.0), ("p90", 90.0), ("p99", 99.0)] {
            set(&format!("{name}.{percentile}"), times.percentile_ms(percent));
        }
        set(&format!("{name}.max"), times.max_ms());
    }
    if let Some(steady) = figures.steady {
        set("steady.start_at", Some(steady.start_s));
        set("steady.length", Some(steady.duration_s));
        set("steady.concurrency", count(steady.concurrency));
        set("steady.request_throughput", Some(steady.request_throughput));
        set("steady.output_throughput", Some(steady.output_throughput));
    }
}

/// The schedule: its seed and digest, which say whether two runs sent the same, and the times as far as they fit.
fn schedule_json(schedule: &Schedule) -> Value {
    let kept = every(schedule.requests.len(), MAX_REQUEST_ROWS);
    let times: Vec<f64> = kept.map(|index| ms(schedule.requests[index].at_ns)).collect();
    json!({"seed": schedule.seed, "digest": schedule.digest(), "requests": schedule.requests.len(), "intended_ms": times})
}

/// One row for each request as far as they fit, in columns. `null` where it failed.
fn requests_json(schedule: &Schedule, records: &[Record]) -> Value {
    let rows: Vec<&Record> = every(records.len(), MAX_REQUEST_ROWS).map(|index| &records[index]).collect();
    let column = |cell: &dyn Fn(&Record) -> Value| Value::Array(rows.iter().map(|record| cell(record)).collect());
    let latency = |record: &Record, end_ns: Option<u64>| {
        let end_ns = end_ns.filter(|_| record.is_complete());
        json!(end_ns.map(|end_ns| ms(end_ns.saturating_sub(record.intended_ns))))
    };
    json!({
        "model": column(&|record| schedule.streams[record.stream].name.as_str().into()),
        "intended_s": column(&|record| (ms(record.intended_ns) / 1e3).into()),
        "sent_s": column(&|record| (ms(record.sent_ns) / 1e3).into()),
        "ttft_ms": column(&|record| latency(record, record.first_token_ns())),
        "itl_ms": column(&|record| json!(mean_gap_ms(record))),
        "e2e_ms": column(&|record| latency(record, record.last_token_ns())),
        "output_tokens": column(&|record| record.output_tokens().into()),
    })
}

fn mean_gap_ms(record: &Record) -> Option<f64> {
    let gaps: Distribution = record.gaps_ns().into_iter().collect();
    gaps.mean_ms().filter(|_| record.is_complete()).map(rounded)
}

/// So many of `0..count` at even distances.
fn every(count: usize, most: usize) -> impl Iterator<Item = usize> {
    let rows = count.min(most);
    (0..rows).map(move |row| row * count / rows)
}

/// Milliseconds to the microsecond: a plot has no finer dots, and a file is smaller.
fn ms(ns: u64) -> f64 {
    rounded(crate::stats::to_f64(ns) / 1e6)
}

fn rounded(ms: f64) -> f64 {
    (ms * 1e3).round() / 1e3
}

/// vLLM's keys of `--save-detailed`: one entry for each request, times in seconds.
pub fn detail(result: &mut BenchResult, records: &[Record]) {
    let seconds = |ns: u64| crate::stats::to_f64(ns) / 1e9;
    let column = |cell: &dyn Fn(&Record) -> Value| Value::Array(records.iter().map(cell).collect());
    let if_complete =
        |record: &Record, value: Value, otherwise: Value| if record.is_complete() { value } else { otherwise };
    let since_sent =
        |record: &Record, at_ns: Option<u64>| at_ns.map_or(0.0, |at_ns| seconds(at_ns.saturating_sub(record.sent_ns)));
    result.set_more("input_lens", column(&|record| record.input_tokens().into()));
    result.set_more("output_lens", column(&|record| if_complete(record, record.output_tokens().into(), 0.into())));
    result.set_more(
        "ttfts",
        column(&|record| if_complete(record, since_sent(record, record.first_token_ns()).into(), 0.0.into())),
    );
    let gaps = |record: &Record| record.gaps_ns().into_iter().map(seconds).collect::<Vec<_>>();
    result.set_more("itls", column(&|record| if_complete(record, json!(gaps(record)), json!([]))));
    result.set_more(
        "latencies",
        column(&|record| if_complete(record, since_sent(record, record.last_token_ns()).into(), 0.0.into())),
    );
    result.set_more("start_times", column(&|record| seconds(record.sent_ns).into()));
    result.set_more("generated_texts", column(&|record| record.text.as_deref().unwrap_or_default().into()));
    result.set_more(
        "errors",
        column(&|record| record.failure.as_ref().map_or_else(String::new, ToString::to_string).into()),
    );
}

/// vLLM's keys of `--probe-request-rate`.
pub fn probe_keys(result: &mut BenchResult, records: &[Record]) {
    let figures = metrics(records, &MetricsRequest::default());
    result.set_more("probe_completed", figures.completed);
    result.set_more("probe_failed", figures.failed);
    for (key, value) in [
        ("probe_median_e2el_ms", figures.e2el.median_ms()),
        ("probe_p99_e2el_ms", figures.e2el.percentile_ms(99.0)),
        ("probe_max_e2el_ms", figures.e2el.max_ms()),
    ] {
        result.set_more(key, value.unwrap_or(0.0));
    }
    for (name, percent) in [("p50", 50.0), ("p99", 99.0), ("max", 100.0)] {
        figures
            .e2el
            .percentile_ms(percent)
            .into_iter()
            .for_each(|ms| result.set_figure(&format!("probe.e2e_ms.{name}"), ms));
    }
}

/// vLLM's keys of a ramp: when the rate came to another whole number.
pub fn ramp_keys(result: &mut BenchResult, stream: &Stream, schedule: &Schedule, started: jiff::Timestamp) {
    let Arrivals::Ramp { strategy, start_per_s, end_per_s, .. } = stream.arrivals else { return };
    let strategy = match strategy {
        crate::load::RampStrategy::Linear => "linear",
        crate::load::RampStrategy::Exponential => "exponential",
    };
    result.set_more("ramp_up_strategy", strategy);
    result.set_more("ramp_up_start_rps", start_per_s);
    result.set_more("ramp_up_end_rps", end_per_s);
    let course = stream.course(schedule.requests.len());
    let start_s = stream.start.as_secs_f64();
    let mut events: Vec<Value> = Vec::new();
    let mut latest = None;
    for (index, request) in schedule.requests.iter().enumerate() {
        let at_s = crate::stats::to_f64(request.at_ns) / 1e9 - start_s;
        let rate = stream.arrivals.ramp_rate(course, index, at_s).map(f64::trunc);
        if rate != latest {
            latest = rate;
            let at = i64::try_from(request.at_ns).map(jiff::SignedDuration::from_nanos).unwrap_or_default();
            let time = started.checked_add(at).unwrap_or(started);
            events.push(json!({"rps": rate, "timestamp": time.to_string()}));
        }
    }
    result.set_more("rps_change_events", events);
}

/// Tables for people.
pub fn tables(schedule: &Schedule, figures: &Figures, unsent: usize) -> String {
    let mut text = String::new();
    let asked = |stream: &Stream| stream.max_concurrency;
    for (stream, (name, figures)) in schedule.streams.iter().zip(&figures.streams) {
        text += &stream_table(name, figures, asked(stream));
        text.push('\n');
    }
    if figures.streams.len() > 1 {
        text += &stream_table("all streams", &figures.total, schedule.streams.iter().map(asked).sum());
        text.push('\n');
    }
    let lag = &figures.total.send_lag;
    if let (Some(p50), Some(p99)) = (lag.median_ms(), lag.percentile_ms(99.0)) {
        text += &format!(
            "client: sent {} ms late at the median, {} ms at p99; {} connections opened meanwhile\n",
            format_figure(p50),
            format_figure(p99),
            figures.total.connects
        );
    }
    if unsent > 0 || figures.total.cancelled > 0 {
        text += &format!(
            "interrupted: {} requests were not sent, {} had no end yet; the figures are of the others\n",
            unsent, figures.total.cancelled
        );
    }
    text
}

fn stream_table(name: &str, figures: &Metrics, asked: Option<usize>) -> String {
    let mut table = Table::new(&[name, "mean", "p50", "p90", "p99", "max"]);
    for (row, times) in [
        ("TTFT", &figures.ttft_intended),
        ("TTFT from sending", &figures.ttft),
        ("TPOT", &figures.tpot),
        ("ITL", &figures.itl),
        ("E2E", &figures.e2el_intended),
        ("E2E from sending", &figures.e2el),
    ] {
        let percentiles = [50.0, 90.0, 99.0].map(|percent| times.percentile_ms(percent));
        let cells = [times.mean_ms(), percentiles[0], percentiles[1], percentiles[2], times.max_ms()];
        let cell = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |ms| crate::table::format_ns(ms * 1e6));
        table.row(&[&[row.to_owned()][..], &cells.map(cell)[..]].concat());
    }
    let concurrency = match asked {
        Some(most) => format!("at most {most} at a time, as asked"),
        // vLLM's figure counts by whole seconds: also requests that came one after another.
        None => format!("up to {} within one second", figures.max_concurrent_requests),
    };
    let goodput = figures.request_goodput.map_or_else(String::new, |it| format!(" ({} good)", format_figure(it)));
    format!(
        "{}{} completed, {} failed in {} s: {} requests/s{goodput}, {} output tokens/s, {} tokens/s; {concurrency}\n",
        table.render(),
        figures.completed,
        figures.failed,
        format_figure(figures.duration_s),
        format_figure(figures.request_throughput),
        format_figure(figures.output_throughput),
        format_figure(figures.total_token_throughput),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn rows_are_spread_evenly_and_no_more_than_wanted(count in 0..500usize, most in 1..100usize) {
            let kept: Vec<usize> = every(count, most).collect();
            prop_assert_eq!(kept.len(), count.min(most));
            prop_assert!(kept.iter().all(|&index| index < count));
            prop_assert!(kept.windows(2).all(|pair| pair[0] < pair[1]));
        }
    }

    #[test]
    fn percentiles_keep_their_spelling() {
        let wanted = Wanted { metrics: vec!["ttft".to_owned()], percentiles: vec![99.0, 99.9] };
        let keys = vllm_keys(&metrics(&[], &MetricsRequest::default()), &wanted);
        assert!(keys.contains_key("p99_ttft_ms") && keys.contains_key("p99.9_ttft_ms"), "{keys:?}");
    }
}
