//! Everything an engine is told when it starts, and how people write it.
//!
//! | written                                  | type           |                                                      |
//! |------------------------------------------|----------------|------------------------------------------------------|
//! | `synthetic:tiny`, `synthetic:llama-8b:7` | [`ModelSource`]| weights made at start from a seed, nothing to download |
//! | any other text                           | [`ModelSource`]| a folder with `config.json` and `*.safetensors`       |
//! | `elastic`, `static`, `static:2G`         | [`KvMode`]     | where KV memory comes from                            |
//! | `cpu`, `cuda`, `cuda:f32`, `auto`        | [`ComputeChoice`] | what computes                                      |

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use tidekv_core::geometry::ChunkChoice;
use tidekv_core::size::SizeError;
use tidekv_core::units::Bytes;
use tidekv_pool::ReservePolicy;
use tidekv_shm::{PoolName, RuntimeDir};

/// How to start an engine: one value, no globals, so that two engines fit into one process.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Which weights.
    pub model: ModelSource,
    /// Where KV memory comes from.
    pub kv: KvChoice,
    /// What all pools of the device may hold together; for [`KvMode::Static`] also the most that may be mapped at start.
    pub kv_budget: KvBudget,
    /// The pool's name, as `kvctl list` shows it. When a living pool has it already, a number is added.
    pub pool_name: PoolName,
    /// Folder of segments and ledgers.
    pub runtime_dir: RuntimeDir,
    /// What computes.
    pub compute: ComputeChoice,
    /// Most sequences in one step.
    pub max_batch_rows: u32,
    /// Most tokens in one step: longer prompts are computed in several.
    pub max_step_tokens: u32,
    /// Most requests that wait for a place in a step; further ones are refused.
    pub max_waiting: u32,
    /// Most tokens kept for prompts that begin alike: [`tidekv_pool::max_cached_tokens`]. `None` for as many as memory allows, 0 for none.
    pub max_cached_tokens: Option<u64>,
    /// Longest sequence; `None` for what the model was made for.
    pub context_tokens: Option<u32>,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// How much memory comes and goes at once (`KVCACHED_PAGE_SIZE_MB`).
    pub chunk: ChunkChoice,
    /// Idle pages that an elastic pool keeps (`KVCACHED_MIN_RESERVED_PAGES` and its neighbours).
    pub reserve: ReservePolicy,
    /// Threads that compute; `None` for as many as this process may run on.
    pub threads: Option<usize>,
}

/// Where a model's weights come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    /// `config.json`, `*.safetensors` and `tokenizer.json`, as on the Hugging Face hub.
    Folder(PathBuf),
    /// Weights made at start: the same on every machine for the same seed.
    Synthetic {
        /// How large.
        size: SyntheticSize,
        /// Other seeds are other models.
        seed: u64,
    },
}

/// Sizes of synthetic models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyntheticSize {
    /// A few hundred thousand weights: thousands of tokens a second on a laptop.
    Tiny,
    /// Some ten million weights: enough work for a step to be measured.
    Small,
    /// The shape of Qwen2.5 0.5B.
    Qwen05b,
    /// The shape of Llama 3.2 1B.
    Llama1b,
    /// The shape of Llama 3.1 8B.
    Llama8b,
}

impl SyntheticSize {
    /// From the smallest.
    pub const ALL: [Self; 5] = [Self::Tiny, Self::Small, Self::Qwen05b, Self::Llama1b, Self::Llama8b];

    /// Whether the processor makes and computes it in reasonable time.
    pub fn fits_the_processor(self) -> bool {
        matches!(self, Self::Tiny | Self::Small)
    }

    /// As people write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tiny => "tiny",
            Self::Small => "small",
            Self::Qwen05b => "qwen-0.5b",
            Self::Llama1b => "llama-1b",
            Self::Llama8b => "llama-8b",
        }
    }
}

/// Where KV memory comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvMode {
    /// Mapped when tokens need it and given back when they do not.
    Elastic,
    /// All of it mapped at start and held: what engines do without an elastic pool.
    Static(Bytes),
}

impl KvMode {
    /// The label of logs, metrics and results: `elastic` or `static`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Elastic => "elastic",
            Self::Static(_) => "static",
        }
    }
}

/// What all pools of a device may hold together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KvBudget {
    /// So much.
    Given(Bytes),
    /// What the device's pools have, whoever decided that; nobody is told another.
    Derived {
        /// The part of the device that weights, pools and all others may fill together; above 0 and at most 1. `None` for the default.
        utilization: Option<f64>,
        /// What was given for the processor alone (`KVCACHED_HOST_BUDGET`).
        host: Option<Bytes>,
    },
}

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ComputeChoice {
    /// The processor.
    Cpu,
    /// The first GPU (`CUDA_VISIBLE_DEVICES` says which that is).
    Cuda(Precision),
    /// The GPU if there is one that can compute, else the processor.
    #[default]
    Auto,
}

/// What weights, K and V are on a GPU. Sums are 32-bit floats always.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Precision {
    /// 16 bits, as models are published and served.
    #[default]
    Bf16,
    /// 32 bits, as on the processor: to compare with it.
    F32,
}

impl Precision {
    /// Bytes of an element.
    pub fn bytes(self) -> u32 {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

/// A text that names no model, mode or device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseError {
    /// Begins with `synthetic:` and does not go on as it should.
    #[error(
        "{text:?} is not a synthetic model: write synthetic:tiny, small, qwen-0.5b, llama-1b or llama-8b, with :SEED (a whole number) if you like"
    )]
    Synthetic {
        /// As written.
        text: String,
    },
    /// No model at all.
    #[error("a model has a name: write synthetic:tiny, a folder, or a Hugging Face id")]
    EmptyModel,
    /// Neither elastic nor static.
    #[error("{text:?} is not a KV mode: write elastic, static or static:SIZE")]
    KvMode {
        /// As written.
        text: String,
    },
    /// `static:` and no size.
    #[error("static: needs a size")]
    StaticSize(#[from] SizeError),
    /// Nothing that computes.
    #[error("{text:?} is not a back-end: write cpu, cuda or auto (or cuda:f32)")]
    Compute {
        /// As written.
        text: String,
    },
}

impl FromStr for ModelSource {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let Some(rest) = text.strip_prefix("synthetic:") else {
            return if text.is_empty() { Err(ParseError::EmptyModel) } else { Ok(Self::Folder(text.into())) };
        };
        let wrong = || ParseError::Synthetic { text: text.to_owned() };
        let (size, seed) = match rest.split_once(':') {
            Some((size, seed)) => (size, seed.parse().map_err(|_| wrong())?),
            None => (rest, 0),
        };
        let size = SyntheticSize::ALL.into_iter().find(|known| known.name() == size).ok_or_else(wrong)?;
        Ok(Self::Synthetic { size, seed })
    }
}

impl fmt::Display for ModelSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder(path) => write!(f, "{}", path.display()),
            Self::Synthetic { size, seed: 0 } => write!(f, "synthetic:{}", size.name()),
            Self::Synthetic { size, seed } => write!(f, "synthetic:{}:{seed}", size.name()),
        }
    }
}

impl FromStr for ComputeChoice {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        match text {
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(Precision::Bf16)),
            "cuda:f32" => Ok(Self::Cuda(Precision::F32)),
            "auto" => Ok(Self::Auto),
            _ => Err(ParseError::Compute { text: text.to_owned() }),
        }
    }
}

/// `--kv` as written: `static` alone means the whole budget, which is known only when the engine starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvChoice {
    /// [`KvMode::Elastic`].
    Elastic,
    /// [`KvMode::Static`] of this size, or of the whole budget.
    Static(Option<Bytes>),
}

impl KvChoice {
    /// The mode, once the budget is known.
    pub fn within(self, budget: Bytes) -> KvMode {
        match self {
            Self::Elastic => KvMode::Elastic,
            Self::Static(size) => KvMode::Static(size.unwrap_or(budget)),
        }
    }
}

impl From<KvMode> for KvChoice {
    fn from(mode: KvMode) -> Self {
        match mode {
            KvMode::Elastic => Self::Elastic,
            KvMode::Static(size) => Self::Static(Some(size)),
        }
    }
}

impl FromStr for KvChoice {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        match text.split_once(':') {
            None if text == "elastic" => Ok(Self::Elastic),
            None if text == "static" => Ok(Self::Static(None)),
            Some(("static", size)) => Ok(Self::Static(Some(size.parse()?))),
            _ => Err(ParseError::KvMode { text: text.to_owned() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_as_people_write_them() {
        let synthetic = |size, seed| Ok(ModelSource::Synthetic { size, seed });
        assert_eq!("synthetic:tiny".parse(), synthetic(SyntheticSize::Tiny, 0));
        assert_eq!("synthetic:small:7".parse(), synthetic(SyntheticSize::Small, 7));
        assert_eq!("synthetic:qwen-0.5b:1".parse(), synthetic(SyntheticSize::Qwen05b, 1));
        assert_eq!("models/llama".parse(), Ok(ModelSource::Folder("models/llama".into())));
        for wrong in ["synthetic:", "synthetic:huge", "synthetic:tiny:", "synthetic:tiny:x", "synthetic:tiny:1:2"] {
            assert_eq!(wrong.parse::<ModelSource>(), Err(ParseError::Synthetic { text: wrong.to_owned() }));
        }
        assert_eq!("".parse::<ModelSource>(), Err(ParseError::EmptyModel));
        for text in ["synthetic:tiny", "synthetic:small:7", "synthetic:llama-8b", "models/llama"] {
            assert_eq!(text.parse::<ModelSource>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn modes_as_people_write_them() {
        let budget = Bytes::gib(1);
        let mode = |text: &str| text.parse::<KvChoice>().map(|choice| choice.within(budget));
        assert_eq!(mode("elastic"), Ok(KvMode::Elastic));
        assert_eq!(mode("static"), Ok(KvMode::Static(budget)));
        assert_eq!(mode("static:256M"), Ok(KvMode::Static(Bytes::mib(256))));
        assert!(matches!(mode("static:much"), Err(ParseError::StaticSize(_))));
        assert!(matches!(mode("elastic:1G"), Err(ParseError::KvMode { .. })));
        assert!(matches!(mode("Static"), Err(ParseError::KvMode { .. })));
    }
}
