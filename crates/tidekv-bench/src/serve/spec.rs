//! What a stream is to be, as a person says it: in flags, or in a scenario file. Both become the same [`StreamSpec`].
//!
//! ```yaml
//! seed: 7
//! streams:
//!   - name: chat
//!     base_url: http://127.0.0.1:8001
//!     model: llama                       # asked of the server where it is left out
//!     requests: 500                      # or duration: 60s, or both
//!     arrivals: {rate: 8, burstiness: 1}
//!     dataset: {name: random, input_len: 512, output_len: 128}
//!   - name: batch
//!     base_url: http://127.0.0.1:8002
//!     duration: 60s
//!     start: 5s
//!     arrivals: {square: {low: 0, high: 20, period: 20s, duty: 0.25}}
//!     dataset: {name: sharegpt, path: sharegpt.json}
//! ```

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use clap::ValueEnum;
use hyper::header::{HeaderName, HeaderValue};
use serde_json::{Map, Value};

pub use super::seconds::Seconds;
use crate::load::data::{Form, PrefixData, RandomData, TraceForm, Vocabulary, jsonl, sharegpt, timed_trace};
use crate::load::{Api, Arrivals, BaseUrl, Dataset, Endpoint, Item, RampStrategy, Sampling, Stream};
use crate::yaml;

/// The largest file of prompts that is read.
const MAX_DATA_BYTES: u64 = 4 << 30;

/// A scenario file.
#[derive(Clone, Debug, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScenarioFile {
    /// What everything is drawn from; `--seed` goes before it.
    pub seed: Option<u64>,
    /// The streams.
    pub streams: Vec<StreamSpec>,
}

impl ScenarioFile {
    /// Reads a file.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let name = path.display();
        let text = read(path, yaml::MAX_BYTES)?;
        let file: Self = yaml::parse(&text).with_context(|| format!("{name} is no scenario"))?;
        ensure!(!file.streams.is_empty(), "{name} has no stream: give at least one under `streams`");
        Ok(file)
    }
}

/// One stream.
#[derive(Clone, Debug, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamSpec {
    /// What results call it.
    pub name: String,
    /// The server.
    pub base_url: String,
    /// The dialect.
    #[serde(default)]
    pub backend: BackendKind,
    /// Another path than the usual one.
    pub endpoint: Option<String>,
    /// As the server calls it; its first one where this is left out.
    pub model: Option<String>,
    /// More headers, such as a key.
    #[serde(default)]
    pub headers: Map<String, Value>,
    /// What is asked.
    #[serde(default)]
    pub dataset: DatasetSpec,
    /// When.
    #[serde(default)]
    pub arrivals: ArrivalsSpec,
    /// How many.
    pub requests: Option<usize>,
    /// How long.
    pub duration: Option<Seconds>,
    /// From when on.
    pub start: Option<Seconds>,
    /// How many at a time.
    pub max_concurrency: Option<usize>,
    /// Longest answer where the data do not say.
    pub max_tokens: Option<u32>,
    /// 0 where it is left out.
    pub temperature: Option<f64>,
    /// Left to the server where it is left out.
    pub top_p: Option<f64>,
    /// Whether answers go on to their full length; yes for made prompts.
    pub ignore_eos: Option<bool>,
    /// Further fields of requests.
    #[serde(default)]
    pub extra_body: Map<String, Value>,
}

/// A server's dialect, by the names that `vllm bench serve` has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BackendKind {
    /// OpenAI's completions
    #[default]
    Openai,
    /// OpenAI's chats
    OpenaiChat,
    /// The same as openai
    Vllm,
    /// SGLang's own /generate
    Sglang,
}

impl BackendKind {
    /// The word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Openai => "openai",
            Self::OpenaiChat => "openai-chat",
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
        }
    }

    const fn api(self) -> Api {
        match self {
            Self::Openai | Self::Vllm => Api::Completions,
            Self::OpenaiChat => Api::Chat,
            Self::Sglang => Api::SglangGenerate,
        }
    }
}

/// Where prompts come from, by the names that `vllm bench serve` has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum DatasetName {
    /// Random tokens
    #[default]
    Random,
    /// Conversations of ShareGPT
    Sharegpt,
    /// Lines of {"prompt", "output_tokens"}
    Custom,
    /// Random tokens behind a few prefixes
    #[value(alias = "prefix-repetition")]
    PrefixRepetition,
    /// A trace in Mooncake's form, at its own times
    #[value(aliases = ["mooncake", "timed-trace"])]
    #[serde(alias = "mooncake")]
    TimedTrace,
}

/// What is asked.
#[derive(Clone, Debug, Default, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DatasetSpec {
    /// Which kind.
    pub name: DatasetName,
    /// The file, where it takes one.
    pub path: Option<PathBuf>,
    /// Tokens of a prompt.
    pub input_len: Option<u32>,
    /// Tokens of an answer.
    pub output_len: Option<u32>,
    /// How far lengths spread.
    pub range_ratio: Option<f64>,
    /// Tokens that prompts have in common.
    pub prefix_len: Option<u32>,
    /// Tokens behind a prefix.
    pub suffix_len: Option<u32>,
    /// How many prefixes there are.
    pub num_prefixes: Option<u32>,
    /// Whether made prompts are sent as words instead of token numbers.
    pub as_text: bool,
    /// Token numbers that are drawn from: `first,count`.
    pub vocabulary: Option<(u32, u32)>,
    /// Tokens of a block of a trace.
    pub block_len: Option<u32>,
    /// Seconds of one unit of a trace's time.
    pub sec_multiplier: Option<f64>,
}

/// When.
#[derive(Clone, Debug, Default, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ArrivalsSpec {
    /// Requests a second; `.inf` or nothing at all sends at once.
    pub rate: Option<f64>,
    /// 1 is Poisson, `.inf` equal gaps.
    pub burstiness: Option<f64>,
    /// From one rate to another.
    pub ramp: Option<RampSpec>,
    /// Two rates in turn.
    pub square: Option<SquareSpec>,
    /// How many times as fast as it was a trace is replayed.
    pub speed: Option<f64>,
}

/// From one rate to another.
#[derive(Clone, Copy, Debug, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RampSpec {
    /// How it rises.
    #[serde(default)]
    pub strategy: RampKind,
    /// At the first request.
    pub start: f64,
    /// At the last.
    pub end: f64,
}

/// How a ramp rises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RampKind {
    /// By the same amount with every request
    #[default]
    Linear,
    /// By the same factor with every request
    Exponential,
}

impl RampKind {
    /// The word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Linear => "linear",
            Self::Exponential => "exponential",
        }
    }
}

/// Two rates in turn.
#[derive(Clone, Copy, Debug, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SquareSpec {
    /// The lower rate.
    #[serde(default)]
    pub low: f64,
    /// The higher one.
    pub high: f64,
    /// Both together.
    pub period: Seconds,
    /// Share of the period that is high.
    #[serde(default = "half")]
    pub duty: f64,
    /// Where in the period it begins.
    #[serde(default)]
    pub phase: Seconds,
}

fn half() -> f64 {
    0.5
}

/// What is filled in from outside.
#[derive(Clone, Copy, Debug, Default)]
pub struct Defaults<'a> {
    /// Requests of a stream that says neither number nor duration.
    pub requests: Option<usize>,
    /// A key for all servers.
    pub key: Option<&'a str>,
}

impl StreamSpec {
    /// The stream. Its model is empty where it has to be asked for.
    pub fn stream(&self, defaults: Defaults<'_>) -> anyhow::Result<Stream> {
        self.build(defaults).with_context(|| format!("stream {:?}", self.name))
    }

    fn build(&self, defaults: Defaults<'_>) -> anyhow::Result<Stream> {
        ensure!(!self.name.is_empty(), "a stream needs a name");
        let endpoint = self.endpoint(defaults.key)?;
        let is_trace = self.dataset.name == DatasetName::TimedTrace;
        let requests = match (self.requests, &self.duration) {
            (None, None) if !is_trace => defaults.requests,
            (requests, _) => requests,
        };
        let is_made = matches!(self.dataset.name, DatasetName::Random | DatasetName::PrefixRepetition) || is_trace;
        let sampling = Sampling {
            max_tokens: self.max_tokens.or(self.dataset.output_len).unwrap_or(256),
            temperature: Some(self.temperature.unwrap_or(0.0)),
            top_p: self.top_p,
            ignore_eos: self.ignore_eos.unwrap_or(is_made),
            extra_body: self.extra_body.clone(),
        };
        Ok(Stream {
            requests,
            duration: self.duration.map(|it| it.0),
            arrivals: self.arrivals(is_trace)?,
            start: self.start.unwrap_or_default().0,
            max_concurrency: self.max_concurrency,
            sampling,
            ..Stream::new(&self.name, endpoint.clone(), self.dataset.load(endpoint.api)?)
        })
    }

    fn endpoint(&self, key: Option<&str>) -> anyhow::Result<Endpoint> {
        let base_url: BaseUrl = self.base_url.parse()?;
        let mut endpoint = Endpoint::new(base_url, self.backend.api(), self.model.clone().unwrap_or_default());
        if let Some(path) = &self.endpoint {
            ensure!(path.starts_with('/'), "the path {path:?} does not begin with a slash");
            endpoint.path.clone_from(path);
        }
        if let Some(key) = key {
            endpoint = endpoint.with_key(key)?;
        }
        for (name, value) in &self.headers {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let name: HeaderName = name.parse().with_context(|| format!("{name:?} is no name of a header"))?;
            let mut value: HeaderValue =
                text.parse().with_context(|| format!("the value of header {name} cannot be sent"))?;
            value.set_sensitive(true);
            endpoint.headers.retain(|(known, _)| *known != name);
            endpoint.headers.push((name, value));
        }
        Ok(endpoint)
    }

    fn arrivals(&self, is_trace: bool) -> anyhow::Result<Arrivals> {
        let spec = &self.arrivals;
        let burstiness = spec.burstiness.unwrap_or(1.0);
        let given = [spec.rate.is_some(), spec.ramp.is_some(), spec.square.is_some(), spec.speed.is_some()];
        ensure!(given.iter().filter(|&&is_given| is_given).count() <= 1, "give one of rate, ramp, square and speed");
        Ok(match (spec.rate, spec.ramp, spec.square, spec.speed) {
            (_, _, _, Some(speed)) if is_trace => Arrivals::Trace { speed },
            (_, _, _, Some(_)) => bail!("speed is for traces: give a rate"),
            (None, None, None, None) if is_trace => Arrivals::Trace { speed: 1.0 },
            (Some(per_s), ..) if per_s.is_finite() => Arrivals::Rate { per_s, burstiness },
            (_, Some(ramp), ..) => Arrivals::Ramp {
                strategy: match ramp.strategy {
                    RampKind::Linear => RampStrategy::Linear,
                    RampKind::Exponential => RampStrategy::Exponential,
                },
                start_per_s: ramp.start,
                end_per_s: ramp.end,
                burstiness,
            },
            (_, _, Some(square), _) => Arrivals::SquareWave {
                low_per_s: square.low,
                high_per_s: square.high,
                period: square.period.0,
                duty: square.duty,
                phase: square.phase.0,
                burstiness,
            },
            _ => Arrivals::Immediately,
        })
    }
}

/// vLLM's defaults.
const INPUT_LEN: u32 = 1024;
const OUTPUT_LEN: u32 = 128;
const PREFIX_LEN: u32 = 256;
const NUM_PREFIXES: u32 = 10;

impl DatasetSpec {
    fn load(&self, api: Api) -> anyhow::Result<Dataset> {
        let form = if self.as_text || !api.takes_tokens() { Form::Words } else { Form::Tokens };
        let vocabulary = match self.vocabulary {
            None => Vocabulary::default(),
            Some((first, count)) => {
                ensure!(
                    count > 0 && first.checked_add(count).is_some(),
                    "a vocabulary of {count} tokens from {first} on"
                );
                Vocabulary { first, count }
            }
        };
        let range_ratio = self.range_ratio.unwrap_or(0.0);
        ensure!((0.0..1.0).contains(&range_ratio), "the range ratio is {range_ratio}: give a share from 0 to below 1");
        let output_tokens = self.output_len.unwrap_or(OUTPUT_LEN);
        Ok(match self.name {
            DatasetName::Random => Dataset::Random(RandomData {
                input_tokens: self.input_len.unwrap_or(INPUT_LEN),
                output_tokens,
                range_ratio,
                prefix_tokens: self.prefix_len.unwrap_or(0),
                form,
                vocabulary,
            }),
            DatasetName::PrefixRepetition => Dataset::PrefixRepetition(PrefixData {
                prefixes: self.num_prefixes.unwrap_or(NUM_PREFIXES).max(1),
                prefix_tokens: self.prefix_len.unwrap_or(PREFIX_LEN),
                suffix_tokens: self.suffix_len.unwrap_or(PREFIX_LEN),
                output_tokens,
                form,
                vocabulary,
            }),
            DatasetName::Sharegpt => Dataset::Shuffled(self.items(|text| Ok(sharegpt(text, self.output_len)?))?),
            DatasetName::Custom => {
                let with_length = |item: Item| Item { output_tokens: self.output_len.or(item.output_tokens), ..item };
                Dataset::Items(self.items(|text| Ok(jsonl(text)?.into_iter().map(with_length).collect()))?)
            }
            DatasetName::TimedTrace => {
                let mooncake = TraceForm::mooncake(form, vocabulary);
                let trace = TraceForm {
                    block_tokens: self.block_len.unwrap_or(mooncake.block_tokens),
                    seconds_per_unit: self.sec_multiplier.unwrap_or(mooncake.seconds_per_unit),
                    ..mooncake
                };
                ensure!(trace.block_tokens > 0, "a block of a trace has 0 tokens");
                Dataset::Items(self.items(|text| Ok(timed_trace(text, trace)?))?)
            }
        })
    }

    fn items(&self, read_items: impl Fn(&str) -> anyhow::Result<Vec<Item>>) -> anyhow::Result<Vec<Item>> {
        let path =
            self.path.as_ref().context("this dataset needs a file: give --dataset-path, or `path` in a scenario")?;
        read_items(&read(path, MAX_DATA_BYTES)?).with_context(|| format!("{} cannot be used", path.display()))
    }
}

/// A text file of no more than so many bytes.
fn read(path: &Path, most: u64) -> anyhow::Result<String> {
    let name = path.display();
    let size = fs::metadata(path).with_context(|| format!("{name} cannot be read"))?.len();
    ensure!(size <= most, "{name} has {size} bytes, and at most {most} are read");
    fs::read_to_string(path).with_context(|| format!("{name} cannot be read"))
}
