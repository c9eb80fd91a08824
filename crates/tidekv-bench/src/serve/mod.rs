//! `kvbench serve`: how fast does a server answer, seen by somebody who sends when he means to?
//!
//! ```text
//!   flags or scenario ── spec ──> streams ── preflight ──> there? which model? what is it? who else is on the device?
//!                                    │
//!             warm-up (other prompts), then for each run:  plan(seed) ── Client::run ──> records ── report ──> result
//!                                                                      └ timeline: pools, GPUs, /metrics
//! ```
//!
//! The result has vLLM's keys at its top level, so that whatever reads vLLM's files reads these, and ours under `summary`:
//! latencies count there from when a request was meant to be sent (docs/kvbench-serve.md, docs/formats/result.md).

mod args;
mod attended;
mod cached;
mod configured;
mod keep;
pub mod mock_command;
pub mod preflight;
pub mod report;
mod seconds;
pub mod selftest;
pub mod spec;
pub mod timeline;
mod warmup;

use std::env;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::{Map, Value};
use tidekv_cli::exit::Outcome;

use crate::host::HostInfo;
use crate::interrupt::Interrupt;
use crate::load::{
    Client, Control, Dataset, Endpoint, Item, MetricsRequest, ProbePlan, Run, Sampling, Scenario, Schedule, Stream,
    plan,
};
use crate::output::warn;
use crate::progress::Progress;
use crate::result::PendingFile;
use attended::{StopOnDrop, attended};
use preflight::ServerFacts;
use report::{Figures, Wanted};
use spec::{BackendKind, Defaults, ScenarioFile};
use timeline::{Timeline, Watcher};

pub use args::ServeArgs;
pub use mock_command::{MockArgs, run_mock};

/// From deciding to begin to the first request.
const LEAD: Duration = Duration::from_millis(50);

/// Connections that are opened beforehand for a stream without a cap.
const WARM_CONNECTIONS: usize = 64;

/// Measures, prints and keeps the result.
pub fn run(args: &ServeArgs) -> anyhow::Result<Outcome> {
    if args.selftest {
        return selftest::run(&args.output);
    }
    let interrupt = Interrupt::catch().context("catching Ctrl-C")?;
    let Some(path) = &args.config else { return run_one(args, &interrupt) };
    let mut outcomes = Vec::new();
    for args in configured::runs(args, path)? {
        outcomes.push(run_one(&args, &interrupt)?);
        if interrupt.is_pressed() {
            break;
        }
    }
    Ok(configured::worst(&outcomes))
}

fn run_one(args: &ServeArgs, interrupt: &Interrupt) -> anyhow::Result<Outcome> {
    let bench = match Bench::prepare(args, interrupt) {
        Err(_) if interrupt.is_pressed() => return Ok(interrupt.outcome(Outcome::Done)),
        prepared => prepared?,
    };
    let is_ready = bench.check().and_then(|()| bench.warm_up());
    if !interrupt.is_pressed() {
        is_ready?;
    }
    let mut has_failures = false;
    for round in 0..args.measure.repeat {
        if round > 0 && !interrupt.wait(args.cooldown()) {
            break;
        }
        if interrupt.is_pressed() {
            break;
        }
        has_failures |= bench.measure(round)?;
    }
    Ok(interrupt.outcome(if has_failures { Outcome::Negative } else { Outcome::Done }))
}

/// Everything that is known before the first request.
struct Bench<'a> {
    args: &'a ServeArgs,
    interrupt: &'a Interrupt,
    client: Client,
    scenario: Scenario,
    /// Of the first stream.
    backend: BackendKind,
    seed: u64,
    wanted: Wanted,
    request: MetricsRequest,
    metadata: Vec<(String, String)>,
    servers: Vec<(String, Endpoint, ServerFacts)>,
    /// Servers that have a page of metrics, each once.
    watched: Vec<(String, Endpoint)>,
    environment: Map<String, Value>,
    warnings: Vec<String>,
    host: HostInfo,
}

impl<'a> Bench<'a> {
    fn prepare(args: &'a ServeArgs, interrupt: &'a Interrupt) -> anyhow::Result<Self> {
        let file = args.scenario.as_deref().map(ScenarioFile::read).transpose()?;
        let file_seed = file.as_ref().and_then(|file| file.seed);
        let specs = match file {
            Some(file) => file.streams,
            None => vec![args.stream()?],
        };
        let backend = specs.first().map_or(args.backend, |spec| spec.backend);
        let key = env::var("OPENAI_API_KEY").ok().filter(|key| !key.is_empty());
        let defaults = Defaults { requests: Some(args.default_prompts()), key: key.as_deref() };
        let mut streams = specs.iter().map(|spec| spec.stream(defaults)).collect::<anyhow::Result<Vec<Stream>>>()?;
        let wanted = wanted(args)?;
        let request = MetricsRequest { goodput: args.bounds()? };
        let metadata = args.metadata()?;
        metadata.iter().try_for_each(|(key, _)| preflight::check_metadata(key))?;
        ensure!(args.measure.repeat > 0, "--repeat is 0: measure at least once");
        let probe = args.traffic.probe_request_rate;
        ensure!(
            probe.is_none_or(|rate| rate > 0.0 && rate <= 1000.0),
            "--probe-request-rate: give 1000 a second at most"
        );
        keep::check(&args.keep)?;
        drop(args.output.open()?);

        let client = Client::new(args.measure.client_threads.unwrap_or_else(Client::default_threads))?;
        let mut servers = Vec::new();
        for stream in &mut streams {
            stream.keep_text = args.keep.save_detailed;
            let facts = preflight::inspect(&client, &mut stream.endpoint, args.measure.ready_timeout.0, interrupt)?;
            servers.push((stream.name.clone(), stream.endpoint.clone(), facts));
        }
        let mut watched: Vec<(String, Endpoint)> = Vec::new();
        for (name, endpoint, _) in &servers {
            if watched.iter().all(|(_, known)| known.base_url != endpoint.base_url) {
                watched.push((name.clone(), endpoint.clone()));
            }
        }
        let gpus = crate::host::gpus();
        let host = HostInfo::current().beside(gpus.as_ref());
        let mut environment = preflight::environment(&servers, gpus.as_ref());
        environment.extend(metadata.iter().map(|(key, value)| (key.clone(), value.clone().into())));
        let warnings = preflight::warnings(gpus.as_ref());
        let seed = args.measure.seed.or(file_seed).unwrap_or_else(preflight::default_seed);
        let scenario = Scenario { streams };
        // What cannot be planned is an error before the warm-up.
        drop(plan(&scenario, seed)?);
        Ok(Self {
            args,
            interrupt,
            client,
            scenario,
            backend,
            seed,
            wanted,
            request,
            metadata,
            servers,
            watched,
            environment,
            warnings,
            host,
        })
    }

    fn say(&self, sentence: &str) {
        if !self.args.output.quiet {
            warn(sentence);
        }
    }

    fn control(&self) -> Control {
        Control {
            cancel: self.interrupt.cancel().clone(),
            request_timeout: self.args.measure.request_timeout.0,
            ..Control::default()
        }
    }

    /// One request for each stream, whose refusal is an error now.
    fn check(&self) -> anyhow::Result<()> {
        self.warnings.iter().for_each(|warning| self.say(warning));
        for stream in &self.scenario.streams {
            let control = self.control();
            attended(&control, &Progress::hidden(), || preflight::try_once(&self.client, stream, &control))?;
        }
        Ok(())
    }

    fn warm_up(&self) -> anyhow::Result<()> {
        let requests = self.args.warmup();
        for stream in &self.scenario.streams {
            let most = stream.max_concurrency.unwrap_or(WARM_CONNECTIONS);
            self.client.warm(&stream.endpoint, most.min(stream.requests.unwrap_or(most)).min(WARM_CONNECTIONS * 4))?;
        }
        if requests == 0 || self.interrupt.is_pressed() {
            return Ok(());
        }
        let schedule = plan(&warmup::scenario(&self.scenario, requests, self.seed)?, self.seed)?;
        let control = self.control();
        let progress = self.progress(schedule.requests.len(), "warming up");
        let run = attended(&control, &progress, || self.client.run(&schedule, &control));
        let failed = run.records.iter().filter(|record| !record.is_complete() && !record.is_cancelled()).count();
        if failed > 0 {
            self.say(&format!("{failed} of {} warm-up requests failed", run.records.len()));
        }
        Ok(())
    }

    fn progress(&self, requests: usize, what: &'static str) -> Progress {
        let wanted = !self.args.output.json && !self.args.output.quiet;
        let progress = Progress::new(u64::try_from(requests).unwrap_or(u64::MAX), wanted);
        progress.now(what);
        progress
    }

    /// One run; says whether requests failed.
    fn measure(&self, round: u32) -> anyhow::Result<bool> {
        let seed = self.seed.wrapping_add(u64::from(round));
        let mut schedule = plan(&self.scenario, seed)?;
        if self.args.data.unique_prompts {
            schedule.salt_prompts(RandomState::new().hash_one(seed));
        }
        let progress = self.progress(schedule.requests.len(), "measuring");
        let started = jiff::Timestamp::now();
        let (run, timeline) = self.send(&schedule, &progress);
        drop(progress);
        let figures = Figures::of(&schedule, &run.records, &self.request);
        let result = self.result(&schedule, &run, &figures, &timeline, started)?;
        if !figures.total.kept_schedule() {
            self.say(BOTTLENECK);
        }
        if figures.total.failed > 0 {
            let first = run.records.iter().find_map(|record| record.failure.as_ref());
            let first = first.map_or_else(String::new, ToString::to_string);
            self.say(&format!("{} of {} requests failed; the first: {first}", figures.total.failed, run.records.len()));
        }
        if let Some(percent) = cached::percent_from_earlier_runs(&schedule, &run.records, &timeline) {
            self.say(&format!(
                "{percent} % of the prompts' tokens came from a prefix cache that an earlier run filled, so times are not those of \
                 new prompts: give --unique-prompts, another --seed, or start the server anew"
            ));
        }
        self.emit(&result, &timeline, &report::tables(&schedule, &figures, run.unsent), round)?;
        Ok(figures.total.failed > 0)
    }

    fn send(&self, schedule: &Schedule, progress: &Progress) -> (Run, Timeline) {
        let start = Instant::now() + LEAD;
        let probe = self.args.traffic.probe_request_rate.map(|per_s| ProbePlan {
            stream: Stream {
                sampling: Sampling { max_tokens: 1, ..Sampling::default() },
                ..Stream::new(
                    "probe",
                    self.scenario.streams[0].endpoint.clone(),
                    Dataset::Items(vec![Item::text("Hi")]),
                )
            },
            per_s,
        });
        let control = Control { start: Some(start), probe, ..self.control() };
        let watcher = Watcher::new(&self.client, &self.watched, self.args.measure.sample_every.0);
        let stop = crate::load::Cancel::new();
        let run = thread::scope(|scope| {
            scope.spawn(|| watcher.watch(start, &stop));
            // Told to stop also when the run panics: the scope waits for it.
            let _stop = StopOnDrop(&stop);
            attended(&control, progress, || self.client.run(schedule, &control))
        });
        (run, watcher.finish())
    }
}

/// What is said when the client could not keep up.
const BOTTLENECK: &str = "THE CLIENT WAS THE BOTTLENECK: requests were sent 2 ms late and more (send_lag_ms.p99), so latencies \
                          are partly its own; use a quieter machine, fewer streams, or --client-threads";

fn wanted(args: &ServeArgs) -> anyhow::Result<Wanted> {
    let metrics = args.measure.percentile_metrics.to_vec();
    for name in &metrics {
        ensure!(
            Wanted::METRICS.contains(&name.as_str()),
            "--percentile-metrics has {name:?}: known are {}",
            Wanted::METRICS.join(", ")
        );
    }
    let percentiles = args.measure.metric_percentiles.to_vec();
    for percent in &percentiles {
        ensure!((0.0..=100.0).contains(percent), "--metric-percentiles has {percent}: give numbers from 0 to 100");
    }
    Ok(Wanted { metrics, percentiles })
}

fn can_write(path: &Path) -> anyhow::Result<()> {
    drop(PendingFile::create(path).with_context(|| format!("cannot write {}", path.display()))?);
    Ok(())
}
