//! What is kept of a run: the result with everything around the figures, and where it goes.

use std::env;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::{Value, json};

use super::report::{self, Figures};
use super::timeline::Timeline;
use super::{BOTTLENECK, Bench};
use crate::load::{Arrivals, Run, Schedule, Stream};
use crate::output::Output;
use crate::result::BenchResult;

impl Bench<'_> {
    /// The result of one run.
    pub(super) fn result(
        &self,
        schedule: &Schedule,
        run: &Run,
        figures: &Figures,
        timeline: &Timeline,
        started: jiff::Timestamp,
    ) -> anyhow::Result<BenchResult> {
        let mut result = BenchResult::new("serve", &self.args_json(schedule), self.host.clone())?;
        self.set_up_keys(&mut result, started);
        report::fill(&mut result, schedule, &run.records, figures, &self.wanted);
        if let [stream] = &schedule.streams[..] {
            report::ramp_keys(&mut result, stream, schedule, started);
        }
        if self.args.traffic.probe_request_rate.is_some() {
            report::probe_keys(&mut result, &run.probe);
        }
        if self.args.keep.save_detailed {
            report::detail(&mut result, &run.records);
        }
        let kv_modes: Vec<&String> = self.servers.iter().filter_map(|(_, _, facts)| facts.kv_mode.as_ref()).collect();
        if let Some(mode) = kv_modes.first().filter(|first| kv_modes.iter().all(|mode| mode == *first)) {
            result.set_more("kv_mode", mode.as_str());
        }
        // Whoever measures knows best.
        self.metadata.iter().for_each(|(key, value)| result.set_more(key, value.as_str()));
        let mut warnings = self.warnings.clone();
        if !figures.total.kept_schedule() {
            warnings.push(BOTTLENECK.to_owned());
        }
        result.set_more("client_was_bottleneck", !figures.total.kept_schedule());
        result.set_more("warnings", warnings);
        result.set_more("partial", run.is_partial());
        result.set_more("unsent", run.unsent);
        result.set_more("environment", self.environment.clone());
        result.set_more("command", command());
        result.set_more("timeline", timeline.to_json());
        Ok(result)
    }

    /// vLLM's keys about what was to be measured.
    fn set_up_keys(&self, result: &mut BenchResult, started: jiff::Timestamp) {
        let first = &self.scenario.streams[0];
        let backend = self.backend.name();
        let local = started.to_zoned(jiff::tz::TimeZone::system());
        result.set_more("date", local.strftime("%Y%m%d-%H%M%S").to_string());
        result.set_more("endpoint_type", backend);
        result.set_more("backend", backend);
        result.set_more("label", json!(self.args.keep.label));
        result.set_more("model_id", first.endpoint.model.as_str());
        result.set_more("tokenizer_id", self.args.tokenizer.as_deref().unwrap_or(&first.endpoint.model));
        result.set_more("num_prompts", json!(self.planned_requests()));
        result.set_more("request_rate", rate_of(&first.arrivals));
        result.set_more("burstiness", finite_or_word(first.arrivals.burstiness()));
        result.set_more("max_concurrency", json!(first.max_concurrency));
    }

    fn planned_requests(&self) -> Option<usize> {
        self.scenario.streams.iter().map(|stream| stream.requests.or(stream.data.len())).sum()
    }

    fn args_json(&self, schedule: &Schedule) -> Value {
        let args = self.args;
        let stream = |(index, stream): (usize, &Stream)| {
            json!({
                "name": stream.name, "url": stream.endpoint.url(), "model": stream.endpoint.model,
                "requests": schedule.requests.iter().filter(|request| request.stream == index).count(),
                "duration_s": stream.duration.map(|it| it.as_secs_f64()), "start_s": stream.start.as_secs_f64(),
                "arrivals": stream.arrivals.to_string(), "max_concurrency": stream.max_concurrency,
                "temperature": stream.sampling.temperature, "ignore_eos": stream.sampling.ignore_eos,
            })
        };
        json!({
            "scenario": args.scenario, "seed": schedule.seed, "dataset_name": args.data.dataset_name,
            "warmup_requests": args.warmup(), "cooldown_s": args.cooldown().as_secs_f64(), "repeat": args.measure.repeat,
            "goodput": args.measure.goodput, "request_timeout_s": args.measure.request_timeout.0.as_secs_f64(),
            "sample_every_s": args.measure.sample_every.0.as_secs_f64(), "probe_request_rate": args.traffic.probe_request_rate,
            "streams": schedule.streams.iter().enumerate().map(stream).collect::<Vec<_>>(),
        })
    }

    /// Writes and prints it.
    pub(super) fn emit(&self, result: &BenchResult, tables: &str, round: u32) -> anyhow::Result<()> {
        let mut output = self.args.output.clone();
        if self.args.keep.append_result {
            let path = output.output.take().context("--append-result needs --output")?;
            let mut line = serde_json::to_vec(result)?;
            line.push(b'\n');
            let file = OpenOptions::new().append(true).create(true).open(&path);
            file.and_then(|mut file| file.write_all(&line))
                .with_context(|| format!("cannot add to {}", path.display()))?;
        } else if let Some(path) = output.output.as_mut() {
            *path = numbered(path, round, self.args.measure.repeat);
        }
        if self.args.keep.save_result {
            let path = self.vllm_name(result);
            let path = numbered(&path, round, self.args.measure.repeat);
            result.write(&path).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Output::unchecked(output).emit(result, tables)
    }

    /// `{label}-{rate}qps[-concurrency{c}]-{model}-{date}.json`.
    fn vllm_name(&self, result: &BenchResult) -> PathBuf {
        let first = &self.scenario.streams[0];
        let label = self.args.keep.label.as_deref().unwrap_or(self.backend.name());
        let rate = match rate_of(&first.arrivals) {
            Value::String(word) => word,
            number => number.to_string(),
        };
        let concurrency = first.max_concurrency.map_or_else(String::new, |cap| format!("-concurrency{cap}"));
        let model = first.endpoint.model.rsplit('/').next().unwrap_or_default();
        let date = result.more.get("date").and_then(Value::as_str).unwrap_or_default();
        let name = format!("{label}-{rate}qps{concurrency}-{model}-{date}.json");
        let name = self.args.keep.result_filename.clone().unwrap_or(name);
        self.args.keep.result_dir.clone().unwrap_or_default().join(name)
    }
}

/// A number, or `inf`, as vLLM writes it.
fn rate_of(arrivals: &Arrivals) -> Value {
    match *arrivals {
        Arrivals::Rate { per_s, .. } => per_s.into(),
        _ => "inf".into(),
    }
}

fn finite_or_word(value: f64) -> Value {
    if value.is_finite() { value.into() } else { "inf".into() }
}

/// The command line, without what is secret in it.
fn command() -> Vec<String> {
    let mut is_secret = false;
    let word = |word: std::ffi::OsString| {
        let word = word.to_string_lossy().into_owned();
        if std::mem::replace(&mut is_secret, word == "--header") {
            return word.split_once('=').map_or_else(|| "***".to_owned(), |(name, _)| format!("{name}=***"));
        }
        match word.strip_prefix("--header=") {
            Some(header) => format!("--header={}=***", header.split('=').next().unwrap_or_default()),
            None => word,
        }
    };
    env::args_os().map(word).collect()
}

/// `a.json` is `a-2.json` for the second of several runs.
pub(super) fn numbered(path: &Path, round: u32, rounds: u32) -> PathBuf {
    if rounds == 1 {
        return path.to_owned();
    }
    let mut name = path.file_stem().unwrap_or_default().to_owned();
    name.push(format!("-{}", round + 1));
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_runs_have_several_files() {
        let name = |round, rounds| numbered(Path::new("out/a.b.json"), round, rounds).display().to_string();
        assert_eq!(
            (name(0, 1), name(0, 2), name(1, 2)),
            ("out/a.b.json".into(), "out/a.b-1.json".into(), "out/a.b-2.json".into())
        );
        assert_eq!(numbered(Path::new("a"), 1, 2), Path::new("a-2"));
    }
}
