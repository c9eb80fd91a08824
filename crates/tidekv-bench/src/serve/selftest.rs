//! `kvbench serve --selftest`: how fast is the client itself, on this machine, now?
//!
//! ```text
//!   timer     sleeps until a moment, many times: how late they end
//!   lag       500 requests a second to a mock that answers at once: how late they go        must: p99 below 2 ms
//!   ceiling   as many as go, one answer of one token after the other: requests a second
//!   chunks    long answers in small events: events a second
//! ```
//!
//! The mock is a process of its own, so that the client is measured as it is used: beside a server that wants the processor too.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::{Value, json};
use tidekv_cli::exit::Outcome;

use crate::host::HostInfo;
use crate::load::metrics::LATEST_SEND_NS;
use crate::load::{
    Api, Arrivals, BaseUrl, Cancel, Client, Control, Dataset, Endpoint, FinestTimer, Item, Metrics, MetricsRequest,
    Sampling, Scenario, Stream, metrics, mock, plan,
};
use crate::output::{OutputArgs, warn};
use crate::progress::Progress;
use crate::result::BenchResult;
use crate::stats::{Samples, to_f64};
use crate::table::{Table, format_figure, latency_table};

/// Requests a second that the client must be able to send in time.
const RATE: f64 = 500.0;

/// Requests under way while the ceiling is sought.
const CONCURRENCY: usize = 32;

/// Events of a long answer.
const LONG_ANSWER: u32 = 256;

/// How much is measured.
struct Amount {
    sleeps: u32,
    paced: Duration,
    requests: usize,
    long_answers: usize,
}

impl Amount {
    fn of(quick: bool) -> Self {
        let part = if quick { 10 } else { 1 };
        Self {
            sleeps: 1000 / part,
            paced: Duration::from_secs(20) / part,
            requests: 20_000 / part as usize,
            long_answers: 2000 / part as usize,
        }
    }
}

/// Measures, prints and keeps the result.
pub fn run(output: &OutputArgs) -> anyhow::Result<Outcome> {
    let amount = Amount::of(output.quick);
    let out = output.open()?;
    let mut result = BenchResult::new("serve-selftest", &args_json(&amount), HostInfo::current())?;
    let progress = out.progress(4);
    let server = MockProcess::start()?;
    let client = Client::new(Client::default_threads())?;
    let bench = Selftest { client, endpoint: Endpoint::new(server.base_url.clone(), Api::Completions, mock::MODEL) };
    bench.client.warm(&bench.endpoint, CONCURRENCY)?;

    let timer = step(&progress, "timer", || timer_errors(amount.sleeps));
    let paced = step(&progress, "500 requests a second", || bench.paced(amount.paced))?;
    let ceiling = step(&progress, "as many as go", || bench.closed_loop(amount.requests, 1))?;
    let chunks = step(&progress, "events", || bench.closed_loop(amount.long_answers, LONG_ANSWER))?;
    drop(progress);

    let kept = paced.kept_schedule();
    let chunks_per_s = to_f64(chunks.total_output_tokens) / chunks.duration_s.max(f64::MIN_POSITIVE);
    fill(&mut result, &timer, &paced, &ceiling, chunks_per_s);
    out.emit(&result, &tables(&timer, &paced, &ceiling, chunks_per_s))?;
    if !kept && !output.quiet {
        let lag_ms = paced.send_lag.percentile_ms(99.0).unwrap_or(0.0);
        warn(&format!(
            "the client did not keep its schedule: p99 of the send lag is {} ms at {RATE} requests/s, and should be below {} ms; \
             this machine is too busy or too small for it",
            format_figure(lag_ms),
            LATEST_SEND_NS / 1_000_000
        ));
    }
    let failed = paced.failed + ceiling.failed + chunks.failed;
    Ok(if kept && failed == 0 { Outcome::Done } else { Outcome::Negative })
}

fn step<T>(progress: &Progress, what: &'static str, work: impl FnOnce() -> T) -> T {
    progress.now(what);
    let outcome = work();
    progress.step();
    outcome
}

fn args_json(amount: &Amount) -> Value {
    json!({"rate_per_s": RATE, "paced_s": amount.paced.as_secs_f64(), "sleeps": amount.sleeps, "requests": amount.requests,
           "long_answers": amount.long_answers, "events_per_answer": LONG_ANSWER, "concurrency": CONCURRENCY})
}

/// How late a sleep ends.
fn timer_errors(sleeps: u32) -> Samples {
    let _finest = FinestTimer::take();
    let never = Cancel::new();
    let mut late = Samples::with_capacity(usize::try_from(sleeps).unwrap_or(0));
    for n in 0..sleeps {
        let moment = Instant::now() + Duration::from_micros(200 + u64::from(n % 7) * 100);
        never.wait_until(moment);
        late.push_duration(Instant::now().saturating_duration_since(moment));
    }
    late
}

struct Selftest {
    client: Client,
    endpoint: Endpoint,
}

impl Selftest {
    fn stream(&self, max_tokens: u32) -> Stream {
        Stream {
            sampling: Sampling { max_tokens, ..Sampling::default() },
            ..Stream::new("selftest", self.endpoint.clone(), Dataset::Items(vec![Item::text("Hello")]))
        }
    }

    fn paced(&self, length: Duration) -> anyhow::Result<Metrics> {
        let arrivals = Arrivals::poisson(RATE);
        self.measure(Stream { duration: Some(length), arrivals, ..self.stream(1) })
    }

    fn closed_loop(&self, requests: usize, max_tokens: u32) -> anyhow::Result<Metrics> {
        let max_concurrency = Some(CONCURRENCY);
        self.measure(Stream { requests: Some(requests), max_concurrency, ..self.stream(max_tokens) })
    }

    fn measure(&self, stream: Stream) -> anyhow::Result<Metrics> {
        let schedule = plan(&Scenario { streams: vec![stream] }, 0)?;
        let run = self.client.run(&schedule, &Control::default());
        Ok(metrics(&run.records, &MetricsRequest::default()))
    }
}

fn fill(result: &mut BenchResult, timer: &Samples, paced: &Metrics, ceiling: &Metrics, chunks_per_s: f64) {
    result.add_times("timer_error", timer);
    result.add_times("send_lag", &paced.send_lag.samples());
    if let Some(times) = timer.percentiles() {
        result.set_figure("timer_error_us.p50", to_f64(times.p50) / 1e3);
        result.set_figure("timer_error_us.p99", to_f64(times.p99) / 1e3);
    }
    for (name, percent) in [("p50", 50.0), ("p99", 99.0), ("max", 100.0)] {
        let lag = paced.send_lag.percentile_ms(percent);
        lag.into_iter().for_each(|lag| result.set_figure(&format!("send_lag_ms.{name}"), lag));
    }
    result.set_figure("sent_per_s", paced.request_throughput);
    result.set_figure("requests_per_s", ceiling.request_throughput);
    result.set_figure("chunks_per_s", chunks_per_s);
    result.set_figure("kept_schedule", if paced.kept_schedule() { 1.0 } else { 0.0 });
}

fn tables(timer: &Samples, paced: &Metrics, ceiling: &Metrics, chunks_per_s: f64) -> String {
    let lag = paced.send_lag.samples();
    let rows = [("a sleep ends late by", timer), ("a request goes late by", &lag)];
    let rows = rows.into_iter().filter_map(|(name, times)| Some((name, times.percentiles()?)));
    let mut ceilings = Table::new(&["ceiling", "per second"]);
    ceilings.row(&["requests".to_owned(), format_figure(ceiling.request_throughput)]);
    ceilings.row(&["events of answers".to_owned(), format_figure(chunks_per_s)]);
    format!("{}\n{}", latency_table(rows).render(), ceilings.render())
}

/// A mock in a process of its own, ended with us.
#[derive(Debug)]
struct MockProcess {
    child: Child,
    base_url: BaseUrl,
}

impl MockProcess {
    fn start() -> anyhow::Result<Self> {
        let program = tidekv_cli::program::named_path().context("finding kvbench itself, to start a mock engine")?;
        let mut child = Command::new(program)
            .args(["mock", "--port", "0", "--ttft", "0s", "--itl", "0s", "--json", "--with-parent"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting a mock engine")?;
        let mut line = String::new();
        let read = child.stdout.take().map(|stdout| BufReader::new(stdout).read_line(&mut line));
        let base_url = read.transpose().ok().and_then(|_| {
            let word: Value = serde_json::from_str(&line).ok()?;
            word["base_url"].as_str()?.parse().ok()
        });
        let Some(base_url) = base_url else {
            let _ = child.kill();
            let _ = child.wait();
            anyhow::bail!("the mock engine did not start: it said {line:?}");
        };
        Ok(Self { child, base_url })
    }
}

impl Drop for MockProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
