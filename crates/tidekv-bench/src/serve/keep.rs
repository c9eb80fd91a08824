//! What is kept of a run: the result with everything around the figures, and where it goes.

use std::env;
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde_json::{Value, json};

use super::args::KeepArgs;
use super::report::{self, Figures};
use super::timeline::Timeline;
use super::{BOTTLENECK, Bench, can_write};
use crate::load::{Arrivals, Run, Schedule, Stream};
use crate::output::Output;
use crate::result::{BenchResult, PendingFile};

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
        result.set_more("timeline", timeline.to_kept_json());
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
        let stream = |stream: &Stream| {
            let bounded = stream.data.len().filter(|_| stream.duration.is_none());
            json!({
                "name": stream.name, "url": stream.endpoint.url(), "model": stream.endpoint.model,
                // As asked for: how many a duration has room for depends on the seed.
                "requests": stream.requests.or(bounded), "data": stream.data.facts(),
                "duration_s": stream.duration.map(|it| it.as_secs_f64()), "start_s": stream.start.as_secs_f64(),
                "arrivals": stream.arrivals.to_string(), "max_concurrency": stream.max_concurrency,
                "api": stream.endpoint.api.name(), "max_tokens": stream.sampling.max_tokens,
                "temperature": stream.sampling.temperature, "top_p": stream.sampling.top_p,
                "ignore_eos": stream.sampling.ignore_eos, "extra_body": stream.sampling.extra_body,
            })
        };
        json!({
            "scenario": args.scenario, "seed": schedule.seed, "dataset_name": args.data.dataset_name,
            "unique_prompts": args.data.unique_prompts,
            "warmup_requests": args.warmup(), "cooldown_s": args.cooldown().as_secs_f64(), "repeat": args.measure.repeat,
            "goodput": args.measure.goodput, "request_timeout_s": args.measure.request_timeout.0.as_secs_f64(),
            "sample_every_s": args.measure.sample_every.0.as_secs_f64(), "probe_request_rate": args.traffic.probe_request_rate,
            "streams": self.scenario.streams.iter().map(stream).collect::<Vec<_>>(),
        })
    }

    /// Prints it and writes it wherever it shall be. What cannot be written in one place is in the others all the same.
    pub(super) fn emit(
        &self,
        result: &BenchResult,
        timeline: &Timeline,
        tables: &str,
        round: u32,
    ) -> anyhow::Result<()> {
        let keep = &self.args.keep;
        let of_round = |path: &Path| numbered(path, round, self.args.measure.repeat);
        let mut output = self.args.output.clone();
        let log = output.output.take_if(|_| keep.append_result);
        output.output = output.output.as_deref().map(of_round);
        let written = [
            Output::unchecked(output).emit(result, tables),
            log.map_or(Ok(()), |path| add_line(&path, result)),
            if keep.save_result { self.save(result, &of_round(&self.vllm_name(result))) } else { Ok(()) },
            keep.csv.as_deref().map_or(Ok(()), |path| write_csv(&of_round(path), timeline)),
        ];
        written.into_iter().collect()
    }

    fn save(&self, result: &BenchResult, path: &Path) -> anyhow::Result<()> {
        result.write(path).with_context(|| format!("cannot write {}", path.display()))
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

/// Makes sure, before anything is measured, that what is measured can be written. As with vLLM, the folder is made.
pub(super) fn check(keep: &KeepArgs) -> anyhow::Result<()> {
    keep.csv.iter().try_for_each(|path| can_write(path))?;
    if !keep.save_result {
        return Ok(());
    }
    let folder = keep.result_dir.clone().unwrap_or_default();
    if !folder.as_os_str().is_empty() {
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    match (&keep.result_filename, &keep.label) {
        (Some(name), _) => can_write(&folder.join(name)),
        (None, Some(label)) if label.contains('/') => {
            bail!("--label {label:?} begins the name of a file: leave the slash out, or give --result-filename")
        }
        (None, _) => can_write(&folder.join("kvbench.json")),
    }
}

/// Adds a line, whole or not at all: half of one would spoil the others.
fn add_line(path: &Path, result: &BenchResult) -> anyhow::Result<()> {
    let mut line = serde_json::to_vec(result)?;
    line.push(b'\n');
    let add = || -> io::Result<()> {
        let mut file = OpenOptions::new().append(true).create(true).open(path)?;
        let before = file.metadata()?;
        file.write_all(&line).inspect_err(|_| {
            if before.is_file() {
                // What it was; there is nothing better to be done on a full disk.
                let _ = file.set_len(before.len());
            }
        })
    };
    add().with_context(|| format!("cannot add to {}", path.display()))
}

fn write_csv(path: &Path, timeline: &Timeline) -> anyhow::Result<()> {
    let written = PendingFile::create(path).and_then(|file| file.commit(&timeline.to_csv()));
    written.with_context(|| format!("cannot write {}", path.display()))
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
