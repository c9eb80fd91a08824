//! Memory and servers on the time axis of the requests: pools, GPUs, `/metrics`, ten times a second.
//!
//! ```text
//!   t_s                              0.0    0.1    0.2        seconds since the first intended send
//!   pool.<name>.in_use_bytes           0   2 MB  14 MB        as kvtop reads them
//!   pool.<name>.mapped_bytes        4 MB   4 MB  16 MB
//!   nvml.0.memory_used_bytes         ..                       memory.used, memory.free, utilization.gpu
//!   server.<stream>.<metric>         ..                       gauges and counters of engines that we know
//! ```
//!
//! A column that begins later has `None` before; a long run is looked at half as often each time its table is full.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use tidekv_cli::gpu::GpuReader;
use tidekv_cli::scene::Scene;
use tidekv_shm::RuntimeDir;

use crate::load::{Cancel, Client, Endpoint};

/// Rows that are kept.
const MAX_ROWS: usize = 2000;
/// Columns that are kept: pools and servers may be many, and a result is bounded.
const MAX_COLUMNS: usize = 64;
/// Most bytes of a result that are the timeline's: rows of requests and raw latencies want theirs.
const MAX_KEPT_BYTES: usize = 320 << 10;
/// A server that is slower than this has no figure for that row.
const PAGE_TIMEOUT: Duration = Duration::from_secs(1);

/// What engines say about themselves that belongs beside latency.
const METRICS: [&str; 16] = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_hits_total",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:token_usage",
    "sglang:cache_hit_rate",
    "kvcached_kv_cache_pool_used_bytes",
    "kvcached_kv_cache_pool_prealloc_bytes",
    "kvcached_kv_cache_pool_mapped_bytes",
    "kvcached_kv_cache_pool_limit_bytes",
    "kvcached_kv_cache_pool_allocated_blocks",
    "kvcached_kv_cache_pool_cached_blocks",
];

/// Columns over time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// Seconds since the first intended send.
    pub t_s: Vec<f64>,
    /// As many values each.
    pub columns: BTreeMap<String, Vec<Option<f64>>>,
}

impl Timeline {
    fn add(&mut self, t_s: f64, row: Vec<(String, f64)>) {
        let before = self.t_s.len();
        self.t_s.push(t_s);
        for (name, value) in row {
            if self.columns.len() < MAX_COLUMNS || self.columns.contains_key(&name) {
                let column = self.columns.entry(name).or_default();
                column.resize(before, None);
                column.push(Some(value));
            }
        }
        for column in self.columns.values_mut() {
            column.resize(before + 1, None);
        }
    }

    /// Every other row goes.
    fn halve(&mut self) {
        fn every_other<T>(values: &mut Vec<T>) {
            let mut index = 0;
            values.retain(|_| {
                index += 1;
                index % 2 == 1
            });
        }
        every_other(&mut self.t_s);
        self.columns.values_mut().for_each(every_other);
    }

    /// As it stands in a result: with as many rows, evenly spread, as there is room for.
    pub fn to_kept_json(&self) -> Value {
        let mut kept = self.clone();
        loop {
            let json = kept.to_json();
            if json.to_string().len() <= MAX_KEPT_BYTES || kept.t_s.len() < 2 {
                return json;
            }
            kept.halve();
        }
    }

    fn to_json(&self) -> Value {
        let columns: Map<String, Value> =
            self.columns.iter().map(|(name, column)| (name.clone(), json!(column))).collect();
        json!({"t_s": self.t_s, "columns": columns})
    }

    /// As it stands in a file of `--csv`.
    pub fn to_csv(&self) -> Vec<u8> {
        let mut text = Vec::new();
        let quoted = |name: &String| format!(",\"{}\"", name.replace('"', "\"\""));
        let header: String = self.columns.keys().map(quoted).collect();
        // Writing to memory does not fail.
        let _ = writeln!(text, "t_s{header}");
        for (row, t_s) in self.t_s.iter().enumerate() {
            let cells: String = self
                .columns
                .values()
                .map(|column| column[row].map_or_else(|| ",".to_owned(), |value| format!(",{value}")))
                .collect();
            let _ = writeln!(text, "{t_s:.3}{cells}");
        }
        text
    }
}

/// Somebody who looks on while requests are sent.
#[derive(Debug)]
pub struct Watcher<'a> {
    client: &'a Client,
    servers: &'a [(String, Endpoint)],
    dir: RuntimeDir,
    gpus: Option<GpuReader>,
    every: Duration,
    timeline: Mutex<Timeline>,
}

impl<'a> Watcher<'a> {
    /// Looks at the pools of this user, the GPUs of this machine, and these servers.
    pub fn new(client: &'a Client, servers: &'a [(String, Endpoint)], every: Duration) -> Self {
        let gpus = GpuReader::open().ok();
        let every = every.max(Duration::from_millis(1));
        Self { client, servers, dir: RuntimeDir::from_env(), gpus, every, timeline: Mutex::default() }
    }

    /// Looks from `start` on until it is told to stop.
    pub fn watch(&self, start: Instant, stop: &Cancel) {
        let mut every = self.every;
        let mut next = start;
        while stop.wait_until(next) {
            let t_s = start.elapsed().as_secs_f64();
            let row = self.look();
            let mut timeline = self.timeline.lock().unwrap_or_else(PoisonError::into_inner);
            timeline.add(t_s, row);
            if timeline.t_s.len() >= MAX_ROWS {
                timeline.halve();
                every *= 2;
            }
            drop(timeline);
            // A look that took longer than the gap makes the next one later, not two at once.
            next = (next + every).max(Instant::now());
        }
    }

    /// What was seen.
    pub fn finish(self) -> Timeline {
        self.timeline.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn look(&self) -> Vec<(String, f64)> {
        let mut row = Vec::new();
        // What cannot be read now is missing in this row.
        for pool in Scene::look(&self.dir).map(|scene| scene.pools).unwrap_or_default() {
            let (used, idle) = (figure(pool.used()), figure(pool.prealloc()));
            row.push((format!("pool.{}.in_use_bytes", pool.name), used));
            row.push((format!("pool.{}.mapped_bytes", pool.name), used + idle));
        }
        for gpu in self.gpus.iter().flat_map(GpuReader::usage) {
            let name = |what: &str| format!("nvml.{}.{what}", gpu.index);
            for (what, value) in [
                ("memory_used_bytes", gpu.memory.map(|memory| memory.used().0)),
                ("memory_free_bytes", gpu.memory.map(|memory| memory.free.0)),
                ("utilization_percent", gpu.utilization_percent.map(u64::from)),
            ] {
                value.into_iter().for_each(|value| row.push((name(what), crate::stats::to_f64(value))));
            }
        }
        for (stream, endpoint) in self.servers {
            if let Ok((200, page)) = self.client.page(endpoint, "/metrics", PAGE_TIMEOUT) {
                let known = known_metrics(&String::from_utf8_lossy(&page));
                row.extend(known.into_iter().map(|(name, value)| (format!("server.{stream}.{name}"), value)));
            }
        }
        row
    }
}

fn figure(bytes: i64) -> f64 {
    crate::stats::to_f64(u64::try_from(bytes).unwrap_or(0))
}

/// The metrics that we know, summed over their labels, on a page in Prometheus' text format.
fn known_metrics(page: &str) -> Vec<(&'static str, f64)> {
    let mut found: Vec<(&'static str, f64)> = Vec::new();
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let name_end = line.find(['{', ' ']).unwrap_or(line.len());
        let Some(&known) = METRICS.iter().find(|&&known| known == &line[..name_end]) else { continue };
        let rest = match line[name_end..].rfind('}') {
            Some(brace) => &line[name_end + brace + 1..],
            None => &line[name_end..],
        };
        let value = rest.split_whitespace().next().and_then(|value| value.parse::<f64>().ok());
        let Some(value) = value.filter(|value| value.is_finite()) else { continue };
        match found.iter_mut().find(|(name, _)| *name == known) {
            Some((_, sum)) => *sum += value,
            None => found.push((known, value)),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn metrics_as_servers_write_them() {
        let page = "# HELP vllm:num_requests_running x\nvllm:num_requests_running{a=\"}\",b=\"c d\"} 3\n\
                    vllm:num_requests_running{a=\"2\"} 4.5 1700000000\nvllm:unknown 7\nsglang:token_usage 0.25\n\
                    vllm:kv_cache_usage_perc NaN\n";
        assert_eq!(known_metrics(page), [("vllm:num_requests_running", 7.5), ("sglang:token_usage", 0.25)]);
    }

    #[test]
    fn columns_that_begin_later_are_filled() {
        let mut timeline = Timeline::default();
        timeline.add(0.0, vec![("a".to_owned(), 1.0)]);
        timeline.add(0.1, vec![("b".to_owned(), 2.0)]);
        timeline.add(0.2, vec![("a".to_owned(), 3.0), ("b".to_owned(), 4.0)]);
        assert_eq!(timeline.columns["a"], [Some(1.0), None, Some(3.0)]);
        assert_eq!(timeline.columns["b"], [None, Some(2.0), Some(4.0)]);
        let csv = String::from_utf8(timeline.to_csv()).unwrap();
        assert_eq!(csv, "t_s,\"a\",\"b\"\n0.000,1,\n0.100,,2\n0.200,3,4\n");
        assert_eq!(timeline.to_json()["columns"]["a"], json!([1.0, null, 3.0]));
        timeline.halve();
        assert_eq!((timeline.t_s.clone(), timeline.columns["a"].clone()), (vec![0.0, 0.2], vec![Some(1.0), Some(3.0)]));
    }

    /// Eight GPUs and a few pools over three minutes were more than a result may have, and the whole of it was lost.
    #[test]
    fn a_wide_timeline_leaves_room_for_the_rest_of_the_result() {
        let mut timeline = Timeline::default();
        for row in 0..MAX_ROWS {
            let value = |column| (format!("nvml.{column}.memory_used_bytes"), 123_456_789_012.0 + row as f64);
            timeline.add(row as f64 / 10.0, (0..MAX_COLUMNS).map(value).collect());
        }
        let kept = timeline.to_kept_json();
        let rows = kept["t_s"].as_array().unwrap().len();
        assert!(kept.to_string().len() <= MAX_KEPT_BYTES && rows >= 100, "{rows} rows");
        assert!(kept["columns"].as_object().unwrap().values().all(|column| column.as_array().unwrap().len() == rows));
        assert_eq!(timeline.t_s.len(), MAX_ROWS, "the file of --csv has all of them");
    }

    proptest! {
        #[test]
        fn no_page_panics(page: String) {
            let _ = known_metrics(&page);
        }
    }
}
