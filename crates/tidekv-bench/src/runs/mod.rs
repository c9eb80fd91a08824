//! Runs as `compare` and `report` read them: results of kvbench, and those of other load generators.
//!
//! ```text
//!   path ──collect──> bytes ──text──> JSON values ──> Run { tool, name, args, host, samples, summary, serving, .. }
//!   file, folder               one, or one a line       │
//!                                                       ├─ schema "tidekv.bench..."      ours, strictly: see `result`
//!                                                       ├─ request_throughput, ttft...   vLLM, SGLang: see `foreign`
//!                                                       └─ {"unit", "avg"} blocks        aiperf: see `aiperf`
//! ```
//!
//! Ours is read by the rules of its own format and refused where it breaks them. What others write is taken as it is:
//! whatever is not understood is left out, and the `NaN` that Python writes is no figure.

mod aiperf;
mod collect;
mod foreign;
mod text;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde_json::{Map, Value};

use crate::compare::figures::{self, Figure};
use crate::host::HostInfo;
use crate::result::{BenchResult, MAX_READ_BYTES, ResultError, SCHEMA, Series};

pub use collect::{expand, natural, read_all, read_file};

/// Whose result it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Tool {
    /// Ours.
    Kvbench,
    /// `vllm bench serve`, and whatever writes its keys.
    Vllm,
    /// SGLang's `bench_serving`.
    Sglang,
    /// NVIDIA's aiperf.
    Aiperf,
}

impl fmt::Display for Tool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Kvbench => "kvbench",
            Self::Vllm => "vLLM",
            Self::Sglang => "SGLang",
            Self::Aiperf => "aiperf",
        })
    }
}

/// One run of a benchmark.
#[derive(Clone, Debug)]
pub struct Run {
    /// Whose result it is.
    pub tool: Tool,
    /// The benchmark: a subcommand of kvbench, or `serve` for the load generators of others.
    pub name: String,
    /// What was measured.
    pub args: Map<String, Value>,
    /// Where and when. Empty where the file does not say.
    pub host: HostInfo,
    /// Raw measurements.
    pub samples: BTreeMap<String, Series>,
    /// Figures under `summary`; none in the files of others.
    pub summary: Map<String, Value>,
    /// Figures of a server under load, in the names of `vllm bench serve` whoever wrote them. Empty for anything else.
    pub serving: Map<String, Value>,
    /// Everything else that stands at the top of the file.
    pub extra: Map<String, Value>,
    /// The file, and the line of it where it has several runs.
    pub source: Source,
}

/// Where a run was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    /// The file.
    pub path: PathBuf,
    /// Which of its runs, counted from 1, where it has several.
    pub entry: Option<usize>,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        self.entry.map_or(Ok(()), |entry| write!(f, " (run {entry})"))
    }
}

impl Run {
    /// Ours, with what stands beside its fields.
    pub fn of_result(result: BenchResult, mut extra: Map<String, Value>) -> Self {
        for field in ["schema", "name", "args", "host", "samples", "summary"] {
            extra.shift_remove(field);
        }
        let serving = foreign::serving_figures(&extra);
        Self {
            tool: Tool::Kvbench,
            name: result.name,
            args: result.args,
            host: result.host,
            samples: result.samples,
            summary: result.summary,
            serving,
            extra,
            source: Source::default(),
        }
    }

    /// Every number that may be compared: those of a server under load first.
    pub fn figures(&self) -> Vec<Figure> {
        let mut all = figures::of_summary(&self.serving);
        all.extend(figures::of_summary(&self.summary));
        all
    }

    /// Whether it measured a server under load.
    pub fn is_serving(&self) -> bool {
        !self.serving.is_empty()
    }

    /// How the server kept its KV cache, where the file says.
    pub fn kv_mode(&self) -> Option<&str> {
        self.extra.get("kv_mode").or_else(|| self.args.get("kv_mode")).and_then(Value::as_str)
    }

    /// Completed requests in a second.
    pub fn throughput(&self) -> Option<f64> {
        self.number(&["throughput", "request_throughput"])
    }

    /// Median time to the first token, in milliseconds; none where nothing was answered, whatever stands there.
    pub fn ttft_p50_ms(&self) -> Option<f64> {
        self.number(&["ttft_p50", "median_ttft_ms"]).filter(|_| self.number(&["completed"]) != Some(0.0))
    }

    /// The first of these that is a number, of what stands at the top and then of the figures of a server.
    pub fn number(&self, names: &[&str]) -> Option<f64> {
        let find = |name: &&str| self.extra.get(*name).or_else(|| self.serving.get(*name)).and_then(Value::as_f64);
        names.iter().find_map(find)
    }

    /// When it was measured, as the file says.
    pub fn date(&self) -> &str {
        if self.host.date.is_empty() {
            self.extra.get("date").and_then(Value::as_str).unwrap_or_default()
        } else {
            &self.host.date
        }
    }
}

/// The runs of a file: one, or one after the other. At least one.
pub fn parse(bytes: &[u8]) -> Result<Vec<Run>, ResultError> {
    if u64::try_from(bytes.len()).is_ok_and(|len| len > MAX_READ_BYTES) {
        return Err(ResultError::TooLargeToRead);
    }
    let values = match text::values(bytes) {
        Ok(values) => values,
        // Ours never has a NaN, and says so; in what Python writes it is no figure.
        Err(error) => match text::values(&text::without_nan(bytes)) {
            Ok(values) if values.iter().all(is_foreign) => values,
            _ => return Err(error),
        },
    };
    let several = values.len() > 1;
    let mut runs = Vec::with_capacity(values.len());
    for (place, value) in values.into_iter().enumerate() {
        let mut run = parse_value(value)?;
        run.source.entry = several.then_some(place + 1);
        runs.push(run);
    }
    Ok(runs)
}

fn is_foreign(value: &Value) -> bool {
    value.as_object().is_some_and(|fields| !fields.contains_key("schema") && recognised(fields).is_some())
}

fn recognised(fields: &Map<String, Value>) -> Option<Tool> {
    foreign::recognise(fields).or_else(|| aiperf::is_one(fields).then_some(Tool::Aiperf))
}

fn parse_value(value: Value) -> Result<Run, ResultError> {
    let Value::Object(fields) = value else {
        return Err(ResultError::NotAnObject);
    };
    let is_ours =
        fields.get("schema").is_some_and(|schema| schema.as_str().is_none_or(|name| name.starts_with("tidekv")));
    match recognised(&fields).filter(|_| !is_ours) {
        Some(Tool::Aiperf) => Ok(aiperf::run(fields)),
        Some(tool) => Ok(foreign::run(tool, fields)),
        None => ours(fields),
    }
}

/// By the rules of our format, whose reader takes bytes.
fn ours(fields: Map<String, Value>) -> Result<Run, ResultError> {
    if !fields.contains_key("schema") {
        return Err(ResultError::MissingField { field: "schema" });
    }
    let bytes = serde_json::to_vec(&fields)
        .map_err(|error| ResultError::BadField { field: SCHEMA, reason: error.to_string() })?;
    Ok(Run::of_result(BenchResult::parse(&bytes)?, fields))
}

#[cfg(test)]
mod tests;
