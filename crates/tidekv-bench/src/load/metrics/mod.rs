//! From records to figures, by the definitions of `vllm bench serve`. Pure.
//!
//! | figure | definition |
//! |--------|------------|
//! | TTFT | first event with a choice, whose text may be empty, minus the moment of sending |
//! | E2EL | last event with a choice (of a chat: last event) minus the moment of sending |
//! | TPOT | (E2EL - TTFT) / (output tokens - 1), one for each request with more than one |
//! | ITL | every gap between two events with a choice, of all requests together |
//! | duration | from the first intended time to the end of the last request |
//! | goodput | requests a second that meet all of the bounds; TPOT counts as 0 with one token |
//!
//! Percentiles are numpy's (linear between ranks), the deviation is of the population. All of this is of complete requests;
//! failed ones are counted and have no latency. TTFT and E2EL exist twice: from the moment of sending, as others report them,
//! and from the intended moment, which is what a user waits when a cap or a slow client holds a request back.

mod distribution;
mod window;

use crate::stats::to_f64;

pub use distribution::Distribution;
pub use window::Steady;

use super::record::Record;

/// A client that sends later than this has not kept its schedule.
pub const LATEST_SEND_NS: u64 = 2_000_000;

const NS_PER_S: f64 = 1e9;
const NS_PER_MS: f64 = 1e6;

/// What is asked of the figures.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MetricsRequest {
    /// What a good request keeps to; `None` counts none.
    pub goodput: Option<Bounds>,
}

/// Bounds in milliseconds. What is `None` does not matter.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bounds {
    /// Time to the first token.
    pub ttft_ms: Option<f64>,
    /// Time per token after it.
    pub tpot_ms: Option<f64>,
    /// Time to the last.
    pub e2el_ms: Option<f64>,
}

/// The figures of some requests.
#[derive(Clone, Debug, PartialEq)]
pub struct Metrics {
    /// Seconds from the first intended time to the end of the last request.
    pub duration_s: f64,
    /// Requests with a whole answer.
    pub completed: usize,
    /// Requests without one.
    pub failed: usize,
    /// Requests that were under way when the run was interrupted.
    pub cancelled: usize,
    /// Of complete requests.
    pub total_input_tokens: u64,
    /// Of complete requests.
    pub total_output_tokens: u64,
    /// Found in a prefix cache, where the server says.
    pub total_cached_tokens: Option<u64>,
    /// Complete requests a second.
    pub request_throughput: f64,
    /// Good ones, if it was asked what is good.
    pub request_goodput: Option<f64>,
    /// Tokens of answers a second.
    pub output_throughput: f64,
    /// Tokens of prompts and answers a second.
    pub total_token_throughput: f64,
    /// Most tokens in one second.
    pub max_output_tokens_per_s: f64,
    /// Most requests in one second.
    pub max_concurrent_requests: usize,
    /// From sending.
    pub ttft: Distribution,
    /// One for each request with more than one token.
    pub tpot: Distribution,
    /// Every gap.
    pub itl: Distribution,
    /// From sending.
    pub e2el: Distribution,
    /// From the intended time.
    pub ttft_intended: Distribution,
    /// From the intended time.
    pub e2el_intended: Distribution,
    /// From being allowed to go to being sent: the client's own delay. Of all requests.
    pub send_lag: Distribution,
    /// From the intended time to being allowed to go: what the cap held back. Of all requests.
    pub cap_wait: Distribution,
    /// Connections that were opened while times were taken.
    pub connects: u64,
    /// Requests that were sent again, because a server closed a kept connection as they went.
    pub resends: u64,
    /// The part of the run in which as many requests as usual were under way.
    pub steady: Option<Steady>,
}

/// The figures of `records`, which may be of several streams.
pub fn metrics<'a>(records: impl IntoIterator<Item = &'a Record>, request: &MetricsRequest) -> Metrics {
    let all: Vec<&Record> = records.into_iter().collect();
    let complete: Vec<&Record> = all.iter().copied().filter(|record| record.is_complete()).collect();
    let cancelled = all.iter().filter(|record| record.is_cancelled()).count();
    let first_ns = all.iter().map(|record| record.intended_ns).min().unwrap_or(0);
    let last_ns = all.iter().map(|record| record.done_ns).max().unwrap_or(first_ns);
    let duration_s = to_f64(last_ns - first_ns) / NS_PER_S;
    let per_s = |count: f64| if duration_s > 0.0 { count / duration_s } else { 0.0 };
    let sum = |count: fn(&Record) -> u64| complete.iter().map(|record| count(record)).sum::<u64>();
    let (input, output) = (sum(Record::input_tokens), sum(Record::output_tokens));
    let times: Vec<Times> = complete.iter().filter_map(|record| Times::of(record)).collect();
    let good = |bounds: &Bounds| count_f64(times.iter().filter(|times| times.are_good(bounds)).count());
    let cached = complete.iter().filter_map(|record| record.usage?.cached_tokens).reduce(|a, b| a + b);
    Metrics {
        duration_s,
        completed: complete.len(),
        failed: all.len() - complete.len() - cancelled,
        cancelled,
        total_input_tokens: input,
        total_output_tokens: output,
        total_cached_tokens: cached,
        request_throughput: per_s(count_f64(complete.len())),
        request_goodput: request.goodput.as_ref().map(|bounds| per_s(good(bounds))),
        output_throughput: per_s(to_f64(output)),
        total_token_throughput: per_s(to_f64(input + output)),
        max_output_tokens_per_s: window::most_tokens_per_s(&complete),
        max_concurrent_requests: window::most_concurrent(&complete),
        ttft: times.iter().map(|times| times.ttft_ns).collect(),
        tpot: times.iter().filter_map(|times| times.tpot_ns).collect(),
        itl: complete.iter().flat_map(|record| record.gaps_ns()).collect(),
        e2el: times.iter().map(|times| times.e2el_ns).collect(),
        ttft_intended: times.iter().map(|times| times.ttft_ns + times.held_ns).collect(),
        e2el_intended: times.iter().map(|times| times.e2el_ns + times.held_ns).collect(),
        send_lag: all.iter().map(|record| record.sent_ns.saturating_sub(record.released_ns)).collect(),
        cap_wait: all.iter().map(|record| record.released_ns.saturating_sub(record.intended_ns)).collect(),
        connects: all.iter().map(|record| u64::from(record.connects)).sum(),
        resends: all.iter().map(|record| u64::from(record.resends)).sum(),
        steady: window::steady(&all),
    }
}

impl Metrics {
    /// Whether requests went when they were to go. Where not, latencies may be the client's own.
    pub fn kept_schedule(&self) -> bool {
        self.send_lag.percentile_ms(99.0).is_none_or(|lag_ms| lag_ms * NS_PER_MS < to_f64(LATEST_SEND_NS))
    }
}

/// Latencies of a complete request.
struct Times {
    ttft_ns: u64,
    e2el_ns: u64,
    tpot_ns: Option<u64>,
    /// From the intended time to sending.
    held_ns: u64,
}

impl Times {
    fn of(record: &Record) -> Option<Self> {
        let since_sent = |at_ns: u64| at_ns.saturating_sub(record.sent_ns);
        let (ttft_ns, e2el_ns) = (since_sent(record.first_token_ns()?), since_sent(record.last_token_ns()?));
        let more = record.output_tokens().saturating_sub(1);
        let tpot_ns = (more > 0).then(|| e2el_ns.saturating_sub(ttft_ns) / more);
        Some(Self { ttft_ns, e2el_ns, tpot_ns, held_ns: record.sent_ns.saturating_sub(record.intended_ns) })
    }

    fn are_good(&self, bounds: &Bounds) -> bool {
        let within = |time_ns: u64, bound: Option<f64>| bound.is_none_or(|ms| to_f64(time_ns) / NS_PER_MS <= ms);
        within(self.ttft_ns, bounds.ttft_ms)
            && within(self.tpot_ns.unwrap_or(0), bounds.tpot_ms)
            && within(self.e2el_ns, bounds.e2el_ms)
    }
}

/// A number of requests as a figure.
fn count_f64(count: usize) -> f64 {
    to_f64(u64::try_from(count).unwrap_or(u64::MAX))
}

#[cfg(test)]
pub(crate) mod tests;
