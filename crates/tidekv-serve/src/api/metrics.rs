//! `/metrics`: Prometheus' text format, with vLLM's names where the meaning is vLLM's and `kvcached_kv_cache_pool_*` for the pool.
//!
//! Every line carries `model_name` and `kv_mode`, so that two runs beside each other can be told apart.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::handle::{EngineStats, FinishReason};

/// Upper bounds in seconds of everything that is timed; one more bucket has no bound.
const BOUNDS: [f64; 18] =
    [0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

/// What the API counts itself; the engine counts the rest.
#[derive(Debug, Default)]
pub(super) struct Metrics {
    first_token: Histogram,
    between_tokens: Histogram,
    whole: Histogram,
    stopped: AtomicU64,
    length: AtomicU64,
    /// Nobody waited for the end.
    aborted: AtomicU64,
    failed: AtomicU64,
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Finished(FinishReason),
    Failed,
}

#[derive(Debug, Default)]
struct Histogram {
    buckets: [AtomicU64; BOUNDS.len() + 1],
    sum_micros: AtomicU64,
}

impl Histogram {
    fn record(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let bucket = BOUNDS.iter().position(|&bound| seconds <= bound).unwrap_or(BOUNDS.len());
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.sum_micros.fetch_add(micros, Ordering::Relaxed);
    }
}

/// Times one answer. One that is dropped before its end was aborted.
#[derive(Debug)]
pub(super) struct Timer {
    metrics: Arc<Metrics>,
    start: Instant,
    latest: Option<Instant>,
    is_over: bool,
}

impl Timer {
    pub(super) fn start(metrics: Arc<Metrics>) -> Self {
        Self { metrics, start: Instant::now(), latest: None, is_over: false }
    }

    pub(super) fn token(&mut self) {
        let now = Instant::now();
        match self.latest {
            None => self.metrics.first_token.record(now - self.start),
            Some(latest) => self.metrics.between_tokens.record(now - latest),
        }
        self.latest = Some(now);
    }

    pub(super) fn end(&mut self, ending: Ending) {
        if std::mem::replace(&mut self.is_over, true) {
            return;
        }
        let counter = match ending {
            Ending::Finished(FinishReason::Stop) => &self.metrics.stopped,
            Ending::Finished(FinishReason::Length) => &self.metrics.length,
            Ending::Finished(FinishReason::Cancelled) => &self.metrics.aborted,
            Ending::Failed => &self.metrics.failed,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        if matches!(ending, Ending::Finished(FinishReason::Stop | FinishReason::Length)) {
            self.metrics.whole.record(self.start.elapsed());
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.end(Ending::Finished(FinishReason::Cancelled));
    }
}

impl Metrics {
    /// The page.
    pub(super) fn page(&self, model: &str, stats: &EngineStats, is_sleeping: bool) -> String {
        let labels = format!("model_name=\"{}\",kv_mode=\"{}\"", escaped(model), stats.kv_mode.name());
        let mut page = Page { text: String::new(), labels };
        page.engine(stats, is_sleeping);
        page.pool(stats);
        page.requests(self);
        page.process();
        page.text
    }
}

struct Page {
    text: String,
    labels: String,
}

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn line(&mut self, name: &str, more: &str, value: impl std::fmt::Display) {
        let _ = writeln!(self.text, "{name}{{{}{more}}} {value}", self.labels);
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl std::fmt::Display) {
        self.head(name, "gauge", help);
        self.line(name, "", value);
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.head(name, "counter", help);
        self.line(name, "", value);
    }

    fn engine(&mut self, stats: &EngineStats, is_sleeping: bool) {
        self.gauge("vllm:num_requests_running", "Requests with a place in the batch.", stats.running);
        self.gauge("vllm:num_requests_waiting", "Requests that wait for a place.", stats.waiting);
        let busy = stats.blocks_used.saturating_sub(stats.blocks_cached);
        #[expect(clippy::cast_precision_loss, reason = "a part between 0 and 1, for a plot")]
        let part = if stats.blocks_total == 0 { 0.0 } else { busy as f64 / stats.blocks_total as f64 };
        self.gauge("vllm:kv_cache_usage_perc", "Part of the blocks under the limit that requests hold, 0 to 1.", part);
        self.gauge("vllm:engine_sleep_state", "1 while the model sleeps.", u8::from(is_sleeping));
        self.counter("vllm:prompt_tokens_total", "Prompt tokens of accepted requests.", stats.prompt_tokens);
        self.counter("vllm:generation_tokens_total", "Tokens made.", stats.generated_tokens);
        self.counter(
            "vllm:prefix_cache_queries_total",
            "Prompt tokens looked up among cached prefixes.",
            stats.prefix_queried_tokens,
        );
        self.counter("vllm:prefix_cache_hits_total", "Prompt tokens found there.", stats.prefix_hit_tokens);
        self.counter(
            "vllm:num_preemptions_total",
            "Requests that gave their blocks back and were computed again.",
            stats.preemptions,
        );
        self.counter("kvserve_steps_total", "Steps computed.", stats.steps);
    }

    fn pool(&mut self, stats: &EngineStats) {
        let unlabelled = self.labels.len();
        let _ = write!(self.labels, ",pool_name=\"{}\"", escaped(&stats.pool));
        let memory = stats.memory;
        for (name, help, value) in [
            ("allocated_blocks", "Blocks that requests and cached prefixes hold.", stats.blocks_used),
            ("cached_blocks", "Blocks that only cached prefixes hold.", stats.blocks_cached),
            ("total_blocks", "Blocks that fit under the limit.", stats.blocks_total),
            ("needed_bytes", "Memory that running requests need.", memory.needed.0),
            (
                "cached_bytes",
                "Memory of cached prefixes that no request uses; a neighbour that waits may have it.",
                memory.cached.0,
            ),
            ("idle_bytes", "Memory that is mapped with nothing in it.", memory.idle.0),
            ("mapped_bytes", "Memory held: needed, cached and idle.", memory.held().0),
            ("used_bytes", "kvcached's word: memory of pages with blocks in use, needed and cached.", memory.used().0),
            ("prealloc_bytes", "kvcached's word: idle.", memory.idle.0),
            ("limit_bytes", "The limit in force.", stats.limit_bytes.0),
            ("page_bytes", "Memory of one page, the least that is mapped.", stats.page_bytes.0),
            ("page_tokens", "Tokens that fit into one page.", stats.page_tokens),
        ] {
            self.gauge(&format!("kvcached_kv_cache_pool_{name}"), help, value);
        }
        self.labels.truncate(unlabelled);
    }

    fn requests(&mut self, metrics: &Metrics) {
        let name = "vllm:request_success_total";
        self.head(name, "counter", "Requests by how they ended.");
        for (reason, counter) in [
            ("stop", &metrics.stopped),
            ("length", &metrics.length),
            ("abort", &metrics.aborted),
            ("error", &metrics.failed),
        ] {
            self.line(name, &format!(",finished_reason=\"{reason}\""), counter.load(Ordering::Relaxed));
        }
        self.histogram(
            "vllm:time_to_first_token_seconds",
            "From accepting a request to its first token.",
            &metrics.first_token,
        );
        self.histogram("vllm:inter_token_latency_seconds", "Between two tokens of a request.", &metrics.between_tokens);
        self.histogram("vllm:e2e_request_latency_seconds", "From accepting a request to its end.", &metrics.whole);
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.head(name, "histogram", help);
        let mut count = 0;
        let buckets = histogram.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed));
        let bounds = BOUNDS.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
        for (bound, bucket) in bounds.zip(buckets) {
            count += bucket;
            self.line(&format!("{name}_bucket"), &format!(",le=\"{bound}\""), count);
        }
        let sum = Duration::from_micros(histogram.sum_micros.load(Ordering::Relaxed)).as_secs_f64();
        self.line(&format!("{name}_sum"), "", sum);
        self.line(&format!("{name}_count"), "", count);
    }

    fn process(&mut self) {
        if let Some(bytes) = resident_bytes() {
            self.gauge(
                "process_resident_memory_bytes",
                "Memory of the server, the pool's mapped pages included.",
                bytes,
            );
        }
    }
}

/// The kernel's own count.
fn resident_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = text.split_whitespace().nth(1)?.parse().ok()?;
    pages.checked_mul(u64::try_from(rustix::param::page_size()).ok()?)
}

/// As label values are written.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_answer_is_aborted_and_an_ended_one_is_counted_once() {
        let metrics = Arc::new(Metrics::default());
        let mut ended = Timer::start(Arc::clone(&metrics));
        ended.token();
        ended.token();
        ended.end(Ending::Finished(FinishReason::Length));
        drop(ended);
        drop(Timer::start(Arc::clone(&metrics)));
        let counts =
            [&metrics.length, &metrics.aborted, &metrics.stopped].map(|counter| counter.load(Ordering::Relaxed));
        assert_eq!(counts, [1, 1, 0]);
        let timed =
            |histogram: &Histogram| histogram.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).sum::<u64>();
        assert_eq!([timed(&metrics.first_token), timed(&metrics.between_tokens), timed(&metrics.whole)], [1, 1, 1]);
    }

    #[test]
    fn a_histogram_counts_upwards_to_its_total() {
        let histogram = Histogram::default();
        for millis in [0, 1, 3, 70_000] {
            histogram.record(Duration::from_millis(millis));
        }
        let mut page = Page { text: String::new(), labels: "a=\"b\"".to_owned() };
        page.histogram("t", "Time.", &histogram);
        for line in [
            "t_bucket{a=\"b\",le=\"0.001\"} 2",
            "t_bucket{a=\"b\",le=\"60\"} 3",
            "t_bucket{a=\"b\",le=\"+Inf\"} 4",
            "t_count{a=\"b\"} 4",
        ] {
            assert!(page.text.lines().any(|found| found == line), "{line}\n{}", page.text);
        }
    }

    #[test]
    fn label_values_cannot_break_out() {
        assert_eq!(escaped("a\"b\\c\nd"), "a\\\"b\\\\c\\nd");
    }
}
