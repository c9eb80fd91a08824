//! The flags: those of `vllm bench serve` by their names, and ours.

use std::num::NonZero;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Args;
use serde_json::Map;

use super::spec::{
    ArrivalsSpec, BackendKind, DatasetName, DatasetSpec, RampKind, RampSpec, Seconds, SquareSpec, StreamSpec,
};
use crate::list::List;
use crate::load::metrics::Bounds;
use crate::output::OutputArgs;

/// The stream of a run that has no scenario.
pub(super) const MAIN: &str = "main";

const DEFAULT_PROMPTS: usize = 1000;
const QUICK_PROMPTS: usize = 50;
const DEFAULT_WARMUP: usize = 100;
const QUICK_WARMUP: usize = 5;
const DEFAULT_COOLDOWN: Duration = Duration::from_secs(10);
const QUICK_COOLDOWN: Duration = Duration::from_millis(200);

/// What a scenario's file says of each of its streams: beside it these flags would be given in vain.
const SAID_BY_A_SCENARIO: [&str; 15] = [
    "base_url",
    "host",
    "port",
    "model",
    "backend",
    "endpoint",
    "header",
    "request_rate",
    "burstiness",
    "ramp_up_strategy",
    "square_wave",
    "duration",
    "max_concurrency",
    // All flags about prompts.
    "DataArgs",
    "selftest",
];

/// Arguments of `kvbench serve`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct ServeArgs {
    /// The server, such as http://127.0.0.1:8000
    #[arg(long, value_name = "URL", conflicts_with_all = ["host", "port"])]
    pub base_url: Option<String>,

    /// The server's host [default: 127.0.0.1]
    #[arg(long, value_name = "NAME")]
    pub host: Option<String>,

    /// The server's port [default: 8000]
    #[arg(long, value_name = "N")]
    pub port: Option<u16>,

    /// What is spoken
    #[arg(long, value_enum, value_name = "NAME", default_value_t, alias = "endpoint-type")]
    pub backend: BackendKind,

    /// Another path than the usual one of the backend
    #[arg(long, value_name = "PATH")]
    pub endpoint: Option<String>,

    /// The model as the server calls it [default: the first of its /v1/models]
    #[arg(long, value_name = "NAME", alias = "served-model-name")]
    pub model: Option<String>,

    /// Recorded as tokenizer_id; prompts are made of token numbers and need none
    #[arg(long, value_name = "NAME")]
    pub tokenizer: Option<String>,

    /// A header of every request; a key is also taken from OPENAI_API_KEY
    #[arg(long, value_name = "NAME=VALUE")]
    pub header: Vec<String>,

    /// Several streams to several servers, instead of all flags about one
    #[arg(long, value_name = "FILE.yaml", conflicts_with_all = SAID_BY_A_SCENARIO)]
    pub scenario: Option<PathBuf>,

    /// Models, rates, number and lengths of requests from the file of kvcached's guide: one run for each model and rate
    #[arg(long, value_name = "FILE.yaml", conflicts_with = "scenario")]
    pub config: Option<PathBuf>,

    /// Measure the client itself against a mock engine, and nothing else
    #[arg(long, conflicts_with_all = ["scenario", "base_url", "host", "port"])]
    pub selftest: bool,

    /// What is asked.
    #[command(flatten)]
    pub data: DataArgs,

    /// When.
    #[command(flatten)]
    pub traffic: TrafficArgs,

    /// How it is measured.
    #[command(flatten)]
    pub measure: MeasureArgs,

    /// Where it goes.
    #[command(flatten)]
    pub keep: KeepArgs,

    /// Where the result goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// What is asked.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Prompts")]
pub struct DataArgs {
    /// Where prompts come from
    #[arg(long, value_enum, value_name = "NAME", default_value_t)]
    pub dataset_name: DatasetName,

    /// The file of sharegpt, custom or timed_trace (mooncake)
    #[arg(long, value_name = "FILE")]
    pub dataset_path: Option<PathBuf>,

    /// Requests [default: 1000, with --quick 50; of a trace all]
    #[arg(long, value_name = "N")]
    pub num_prompts: Option<usize>,

    /// Make prompts of this run unlike those of any earlier one, so that no cache has them; times and lengths stay those of the seed
    #[arg(long)]
    pub unique_prompts: bool,

    /// random: tokens of a prompt
    #[arg(long, value_name = "N", alias = "input-len")]
    pub random_input_len: Option<u32>,

    /// random: tokens of an answer
    #[arg(long, value_name = "N", alias = "output-len")]
    pub random_output_len: Option<u32>,

    /// random: lengths are drawn from length * (1 - R) to length * (1 + R)
    #[arg(long, value_name = "R")]
    pub random_range_ratio: Option<f64>,

    /// random: tokens that all prompts begin with
    #[arg(long, value_name = "N")]
    pub random_prefix_len: Option<u32>,

    /// prefix_repetition: how many prefixes there are [default: 10]
    #[arg(long, value_name = "N")]
    pub prefix_repetition_num_prefixes: Option<u32>,

    /// prefix_repetition: tokens of a prefix [default: 256]
    #[arg(long, value_name = "N")]
    pub prefix_repetition_prefix_len: Option<u32>,

    /// prefix_repetition: tokens behind it [default: 256]
    #[arg(long, value_name = "N")]
    pub prefix_repetition_suffix_len: Option<u32>,

    /// prefix_repetition: tokens of an answer [default: 128]
    #[arg(long, value_name = "N")]
    pub prefix_repetition_output_len: Option<u32>,

    /// sharegpt: tokens of an answer [default: as long as the one in the file]
    #[arg(long, value_name = "N")]
    pub sharegpt_output_len: Option<u32>,

    /// custom: tokens of an answer [default: as the line says, or 256]
    #[arg(long, value_name = "N")]
    pub custom_output_len: Option<u32>,

    /// timed_trace: tokens of one block of hash_ids [default: 512, as Mooncake's are]
    #[arg(long, value_name = "N")]
    pub timed_trace_chunk_hash_size: Option<u32>,

    /// timed_trace: seconds of one unit of time [default: 0.001, as Mooncake's are]
    #[arg(long, value_name = "X")]
    pub timed_trace_sec_multiplier: Option<f64>,

    /// timed_trace: so many times as fast as it was
    #[arg(long, value_name = "X")]
    pub trace_speed: Option<f64>,

    /// Send made prompts as words instead of token numbers
    #[arg(long)]
    pub prompts_as_text: bool,

    /// Token numbers of made prompts [default: 10,240: those from 10 to 249]
    #[arg(long, value_name = "FIRST,COUNT")]
    pub vocabulary: Option<String>,

    /// Answers go on to their full length [default: for made prompts]
    #[arg(long)]
    pub ignore_eos: bool,

    /// Sampling temperature; pinned, because answers of two runs should be alike
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub temperature: f64,

    /// Nucleus sampling, left to the server by default
    #[arg(long, value_name = "X")]
    pub top_p: Option<f64>,

    /// Further fields of every request, as a JSON object
    #[arg(long, value_name = "JSON")]
    pub extra_body: Option<String>,
}

/// When.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Traffic")]
pub struct TrafficArgs {
    /// Requests a second; inf sends all at once
    #[arg(long, value_name = "R", default_value_t = f64::INFINITY)]
    pub request_rate: f64,

    /// Shape of the gaps: 1 is Poisson, below it comes in bursts, inf is a metronome
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    pub burstiness: f64,

    /// Let the rate rise from --ramp-up-start-rps to --ramp-up-end-rps: over --num-prompts, or without those over --duration
    #[arg(long, value_enum, value_name = "HOW", requires_all = ["ramp_up_start_rps", "ramp_up_end_rps"])]
    pub ramp_up_strategy: Option<RampKind>,

    /// The rate at the beginning
    #[arg(long, value_name = "R")]
    pub ramp_up_start_rps: Option<f64>,

    /// The rate at the end
    #[arg(long, value_name = "R")]
    pub ramp_up_end_rps: Option<f64>,

    /// Two rates in turn: LOW,HIGH,PERIOD and perhaps the share of it that is high, such as 2,20,30s,0.25
    #[arg(long, value_name = "WAVE", conflicts_with = "ramp_up_strategy")]
    pub square_wave: Option<String>,

    /// Send for so long [default: until all are sent]
    #[arg(long, value_name = "TIME")]
    pub duration: Option<Seconds>,

    /// Requests under way at a time; one too many waits, and its time counts
    #[arg(long, value_name = "N")]
    pub max_concurrency: Option<usize>,

    /// Beside the others, one-token requests at this rate: what a neighbour feels
    #[arg(long, value_name = "R")]
    pub probe_request_rate: Option<f64>,
}

/// How it is measured.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Measurement")]
pub struct MeasureArgs {
    /// Requests before the measured ones, with prompts of their own [default: 100, with --quick 5]
    #[arg(long, value_name = "N", alias = "num-warmups")]
    pub warmup_requests: Option<usize>,

    /// Wait between runs [default: 10s, with --quick 0.2s]
    #[arg(long, value_name = "TIME")]
    pub cooldown: Option<Seconds>,

    /// Measure so often, with seeds that follow one another; a result for each
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub repeat: u32,

    /// What prompts and times are drawn from [default: PYTHONHASHSEED if it is a number, else 0]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,

    /// Distributions at the top level of the result
    #[arg(long, value_name = "NAME,...", default_value = "ttft,tpot,itl")]
    pub percentile_metrics: List<String>,

    /// Their percentiles
    #[arg(long, value_name = "P,...", default_value = "99")]
    pub metric_percentiles: List<f64>,

    /// A good request keeps to all of these, in ms: ttft:200 tpot:50 e2el:5000
    #[arg(long, value_name = "NAME:MS", num_args = 1..)]
    pub goodput: Vec<String>,

    /// A request that takes longer has failed
    #[arg(long, value_name = "TIME", default_value = "600s")]
    pub request_timeout: Seconds,

    /// Wait so long for the server to be there
    #[arg(long, value_name = "TIME", default_value = "0s", alias = "ready-check-timeout-sec")]
    pub ready_timeout: Seconds,

    /// Threads that read answers [default: 1, more on a large machine]
    #[arg(long, value_name = "N")]
    pub client_threads: Option<NonZero<usize>>,

    /// Look at pools, GPUs and the server's /metrics so often [default: 100ms]
    #[arg(long, value_name = "TIME", default_value = "100ms")]
    pub sample_every: Seconds,
}

/// What is kept.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Result")]
pub struct KeepArgs {
    /// Keep every request in the result: lengths, times, texts, errors
    #[arg(long)]
    pub save_detailed: bool,

    /// Add the result to FILE of --output as one line instead of replacing it
    #[arg(long, requires = "output")]
    pub append_result: bool,

    /// Write the result under the name that vLLM would give it
    #[arg(long)]
    pub save_result: bool,

    /// The folder for that
    #[arg(long, value_name = "DIR", requires = "save_result")]
    pub result_dir: Option<PathBuf>,

    /// Another name for that
    #[arg(long, value_name = "NAME", requires = "save_result")]
    pub result_filename: Option<String>,

    /// A word for this run, which begins the name of its file
    #[arg(long, value_name = "WORD")]
    pub label: Option<String>,

    /// Something to remember, at the top level of the result: torch=2.9.0 kvcached=0.1.4
    #[arg(long, value_name = "KEY=VALUE", num_args = 1..)]
    pub metadata: Vec<String>,

    /// Write pools, GPUs and the server's metrics over time to FILE
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,

    /// Accepted for vLLM's sake: there is no bar where nobody looks
    #[arg(long, hide = true)]
    pub disable_tqdm: bool,
}

const EXAMPLES: &str = "\
Examples:
  kvbench serve --base-url http://127.0.0.1:8000 --request-rate 8 --num-prompts 500
  kvbench serve --port 8000 --backend openai-chat --dataset-name sharegpt --dataset-path sharegpt.json --request-rate 4
  kvbench serve --port 8000 --max-concurrency 32 --num-prompts 1000              # closed loop
  kvbench serve --port 8000 --dataset-name mooncake --dataset-path conversation_trace.jsonl --trace-speed 10
  kvbench serve --port 8000 --square-wave 2,20,30s --duration 3m --goodput ttft:200 tpot:50
  kvbench serve --scenario two-models.yaml --output run.json --csv run.csv
  kvbench serve --selftest                                                       # how fast is the client itself?
  kvbench mock --port 8000 &                                                     # a server to try it with

Exit status: 0 done, 1 done and requests failed, 2 error, 130 interrupted (what was measured is written).";

impl ServeArgs {
    /// The stream of the flags.
    pub(super) fn stream(&self) -> anyhow::Result<StreamSpec> {
        let base_url = match &self.base_url {
            Some(url) => url.clone(),
            None => {
                let host = self.host.as_deref().unwrap_or("127.0.0.1");
                let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
                format!("http://{host}:{}", self.port.unwrap_or(8000))
            }
        };
        let mut headers = Map::new();
        for header in &self.header {
            let (name, value) = pair("--header", header)?;
            headers.insert(name.to_owned(), value.into());
        }
        let data = &self.data;
        Ok(StreamSpec {
            name: MAIN.to_owned(),
            base_url,
            backend: self.backend,
            endpoint: self.endpoint.clone(),
            model: self.model.clone(),
            headers,
            dataset: self.dataset()?,
            arrivals: self.arrivals()?,
            requests: data.num_prompts,
            duration: self.traffic.duration,
            start: None,
            max_concurrency: self.traffic.max_concurrency,
            max_tokens: None,
            temperature: Some(data.temperature),
            top_p: data.top_p,
            ignore_eos: data.ignore_eos.then_some(true),
            extra_body: match &data.extra_body {
                None => Map::new(),
                Some(text) => serde_json::from_str(text).context("--extra-body is no JSON object")?,
            },
        })
    }

    fn dataset(&self) -> anyhow::Result<DatasetSpec> {
        let data = &self.data;
        let common = DatasetSpec {
            name: data.dataset_name,
            path: data.dataset_path.clone(),
            as_text: data.prompts_as_text,
            vocabulary: data.vocabulary.as_deref().map(vocabulary).transpose()?,
            ..DatasetSpec::default()
        };
        Ok(match data.dataset_name {
            DatasetName::Random => DatasetSpec {
                input_len: data.random_input_len,
                output_len: data.random_output_len,
                range_ratio: data.random_range_ratio,
                prefix_len: data.random_prefix_len,
                ..common
            },
            DatasetName::PrefixRepetition => DatasetSpec {
                num_prefixes: data.prefix_repetition_num_prefixes,
                prefix_len: data.prefix_repetition_prefix_len,
                suffix_len: data.prefix_repetition_suffix_len,
                output_len: data.prefix_repetition_output_len.or(data.random_output_len),
                ..common
            },
            DatasetName::Sharegpt => DatasetSpec { output_len: data.sharegpt_output_len, ..common },
            DatasetName::Custom => DatasetSpec { output_len: data.custom_output_len, ..common },
            DatasetName::TimedTrace => DatasetSpec {
                block_len: data.timed_trace_chunk_hash_size,
                sec_multiplier: data.timed_trace_sec_multiplier,
                ..common
            },
        })
    }

    fn arrivals(&self) -> anyhow::Result<ArrivalsSpec> {
        let traffic = &self.traffic;
        let ramp = match (traffic.ramp_up_strategy, traffic.ramp_up_start_rps, traffic.ramp_up_end_rps) {
            (Some(strategy), Some(start), Some(end)) => Some(RampSpec { strategy, start, end }),
            (None, None, None) => None,
            _ => bail!("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy"),
        };
        let is_shaped = ramp.is_some() || traffic.square_wave.is_some();
        let rate = traffic.request_rate;
        ensure!(rate > 0.0, "--request-rate is {rate}: give requests a second, or inf");
        ensure!(
            !is_shaped || rate.is_infinite(),
            "--request-rate does not go with a ramp or a wave, which have their own"
        );
        Ok(ArrivalsSpec {
            rate: (rate.is_finite()).then_some(rate),
            burstiness: Some(traffic.burstiness),
            ramp,
            square: traffic.square_wave.as_deref().map(square).transpose()?,
            speed: self.data.trace_speed,
        })
    }

    pub(super) fn default_prompts(&self) -> usize {
        if self.output.quick { QUICK_PROMPTS } else { DEFAULT_PROMPTS }
    }

    pub(super) fn warmup(&self) -> usize {
        self.measure.warmup_requests.unwrap_or(if self.output.quick { QUICK_WARMUP } else { DEFAULT_WARMUP })
    }

    pub(super) fn cooldown(&self) -> Duration {
        let default = if self.output.quick { QUICK_COOLDOWN } else { DEFAULT_COOLDOWN };
        self.measure.cooldown.map_or(default, |it| it.0)
    }

    pub(super) fn bounds(&self) -> anyhow::Result<Option<Bounds>> {
        let mut bounds = Bounds::default();
        for word in &self.measure.goodput {
            let (name, ms) = word.split_once(':').with_context(|| format!("--goodput {word:?}: write NAME:MS"))?;
            let ms: f64 = ms.parse().with_context(|| format!("--goodput {word:?}: {ms:?} is no number"))?;
            ensure!(ms >= 0.0, "--goodput {word:?}: a time is not below 0");
            match name {
                "ttft" => bounds.ttft_ms = Some(ms),
                "tpot" => bounds.tpot_ms = Some(ms),
                "e2el" => bounds.e2el_ms = Some(ms),
                _ => bail!("--goodput {word:?}: known are ttft, tpot and e2el"),
            }
        }
        Ok((!self.measure.goodput.is_empty()).then_some(bounds))
    }

    pub(super) fn metadata(&self) -> anyhow::Result<Vec<(String, String)>> {
        let owned = |text: &String| pair("--metadata", text).map(|(key, value)| (key.to_owned(), value.to_owned()));
        self.keep.metadata.iter().map(owned).collect()
    }
}

fn pair<'a>(flag: &str, text: &'a str) -> anyhow::Result<(&'a str, &'a str)> {
    let (key, value) = text.split_once('=').with_context(|| format!("{flag} {text:?}: write NAME=VALUE"))?;
    ensure!(!key.is_empty(), "{flag} {text:?}: the name is missing");
    Ok((key, value))
}

fn vocabulary(text: &str) -> anyhow::Result<(u32, u32)> {
    let numbers =
        text.split_once(',').and_then(|(first, count)| Some((first.trim().parse().ok()?, count.trim().parse().ok()?)));
    numbers.with_context(|| format!("--vocabulary {text:?}: write FIRST,COUNT, such as 10,240"))
}

fn square(text: &str) -> anyhow::Result<SquareSpec> {
    let help = || format!("--square-wave {text:?}: write LOW,HIGH,PERIOD[,SHARE], such as 2,20,30s,0.25");
    let parts: Vec<&str> = text.split(',').map(str::trim).collect();
    let (low, high, period, duty) = match parts[..] {
        [low, high, period] => (low, high, period, "0.5"),
        [low, high, period, duty] => (low, high, period, duty),
        _ => bail!(help()),
    };
    let number = |text: &str| text.parse::<f64>().with_context(help);
    let period = period.parse().map_err(anyhow::Error::msg).with_context(help)?;
    Ok(SquareSpec { low: number(low)?, high: number(high)?, period, duty: number(duty)?, phase: Seconds::default() })
}

#[cfg(test)]
mod tests;
