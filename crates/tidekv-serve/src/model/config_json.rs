//! `config.json` of Llama, Qwen2 and Qwen3, and `generation_config.json` as far as it says how a text ends.
//!
//! | kind    | biases                       | norm of each head | size of a head when unsaid |
//! |---------|------------------------------|-------------------|----------------------------|
//! | `llama` | `attention_bias`, `mlp_bias` | no                | `hidden_size / heads`      |
//! | `qwen2` | queries, keys and values     | no                | `hidden_size / heads`      |
//! | `qwen3` | `attention_bias`             | yes               | 128                        |
//!
//! Fields that would change the result and are not computed (sliding windows, quantised weights, other ways to stretch
//! positions) are refused by name rather than ignored.

use std::path::Path;

use serde::Deserialize;

use super::error::ModelError;
use super::rope::{Rope, RopeScaling};
use super::shape::ModelShape;

/// No dimension of a model is larger: what is above is a damaged file.
const MOST: u64 = 1 << 24;

/// What `config.json` says.
#[derive(Debug)]
pub(super) struct ModelConfig {
    pub(super) shape: ModelShape,
    pub(super) biases: Biases,
    pub(super) has_head_norms: bool,
    pub(super) is_tied: bool,
    pub(super) eos: Vec<u32>,
}

/// Which products add a bias.
#[derive(Clone, Copy, Debug)]
pub(super) struct Biases {
    pub(super) qkv: bool,
    pub(super) output: bool,
    pub(super) feed: bool,
}

#[derive(Deserialize)]
struct Raw {
    model_type: String,
    vocab_size: u64,
    hidden_size: u64,
    intermediate_size: u64,
    num_hidden_layers: u64,
    num_attention_heads: u64,
    num_key_value_heads: Option<u64>,
    head_dim: Option<u64>,
    max_position_embeddings: u64,
    #[serde(default = "default_epsilon")]
    rms_norm_eps: f32,
    rope_theta: Option<f32>,
    rope_scaling: Option<RawRope>,
    /// Where newer versions write `rope_theta` and `rope_scaling`.
    rope_parameters: Option<RawRope>,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default)]
    use_sliding_window: bool,
    hidden_act: Option<String>,
    quantization_config: Option<serde_json::Value>,
    eos_token_id: Option<OneOrMany>,
}

#[derive(Deserialize)]
struct RawRope {
    rope_type: Option<String>,
    /// The older name of the same; some files have both.
    #[serde(rename = "type")]
    old_type: Option<String>,
    rope_theta: Option<f32>,
    factor: Option<f32>,
    low_freq_factor: Option<f32>,
    high_freq_factor: Option<f32>,
    original_max_position_embeddings: Option<f32>,
    partial_rotary_factor: Option<f32>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

impl OneOrMany {
    fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

#[derive(Deserialize)]
struct RawGeneration {
    eos_token_id: Option<OneOrMany>,
}

fn default_epsilon() -> f32 {
    1e-6
}

/// Reads `config.json` of a folder, and the ids that end a text from `generation_config.json` where that names some.
pub(super) fn read(folder: &Path) -> Result<ModelConfig, ModelError> {
    let path = folder.join("config.json");
    let mut config = parse(&path, &read_text(&path)?)?;
    let path = folder.join("generation_config.json");
    if path.exists() {
        let generation: RawGeneration = from_json(&path, &read_text(&path)?)?;
        if let Some(eos) = generation.eos_token_id {
            config.eos = eos.into_vec();
        }
    }
    Ok(config)
}

fn read_text(path: &Path) -> Result<String, ModelError> {
    std::fs::read_to_string(path).map_err(|source| ModelError::Read { path: path.to_owned(), source })
}

fn from_json<'a, T: Deserialize<'a>>(path: &Path, text: &'a str) -> Result<T, ModelError> {
    serde_json::from_str(text).map_err(|source| ModelError::Json { path: path.to_owned(), source })
}

fn parse(path: &Path, text: &str) -> Result<ModelConfig, ModelError> {
    let raw: Raw = from_json(path, text)?;
    let refuse =
        |field, value: String, known| Err(ModelError::Unsupported { path: path.to_owned(), field, value, known });
    let (biases, has_head_norms, default_head_size) = match raw.model_type.as_str() {
        "llama" => {
            let biases = Biases { qkv: raw.attention_bias, output: raw.attention_bias, feed: raw.mlp_bias };
            (biases, false, None)
        }
        "qwen2" => (Biases { qkv: true, output: false, feed: false }, false, None),
        "qwen3" => (Biases { qkv: raw.attention_bias, output: raw.attention_bias, feed: false }, true, Some(128)),
        _ => return refuse("model_type", raw.model_type, "llama, qwen2 and qwen3"),
    };
    if raw.use_sliding_window {
        return refuse("use_sliding_window", "true".to_owned(), "attention to the whole context");
    }
    if let Some(act) = raw.hidden_act.filter(|act| act != "silu") {
        return refuse("hidden_act", act, "silu");
    }
    if let Some(quantization) = raw.quantization_config.filter(|value| !value.is_null()) {
        return refuse("quantization_config", quantization.to_string(), "weights as F32, F16 or BF16");
    }
    let within = |field, value: u64| match usize::try_from(value) {
        Ok(size) if (1..=MOST).contains(&value) => Ok(size),
        _ => Err(ModelError::OutOfRange { path: path.to_owned(), field, value, wanted: "from 1 to 2^24" }),
    };
    let (hidden, heads) =
        (within("hidden_size", raw.hidden_size)?, within("num_attention_heads", raw.num_attention_heads)?);
    let kv_heads = within("num_key_value_heads", raw.num_key_value_heads.unwrap_or(raw.num_attention_heads))?;
    if !heads.is_multiple_of(kv_heads) {
        let wanted = "a divisor of num_attention_heads";
        let value = kv_heads as u64;
        return Err(ModelError::OutOfRange { path: path.to_owned(), field: "num_key_value_heads", value, wanted });
    }
    let head_size = raw.head_dim.or(default_head_size).unwrap_or(raw.hidden_size / raw.num_attention_heads);
    let head_size = within("head_dim", head_size)?;
    if !head_size.is_multiple_of(2) {
        let (value, wanted) = (head_size as u64, "even");
        return Err(ModelError::OutOfRange { path: path.to_owned(), field: "head_dim", value, wanted });
    }
    let context = within("max_position_embeddings", raw.max_position_embeddings)?;
    Ok(ModelConfig {
        shape: ModelShape {
            vocab: within("vocab_size", raw.vocab_size)?,
            hidden,
            intermediate: within("intermediate_size", raw.intermediate_size)?,
            layers: within("num_hidden_layers", raw.num_hidden_layers)?,
            heads,
            kv_heads,
            head_size,
            norm_epsilon: raw.rms_norm_eps,
            rope: rope(path, raw.rope_theta, raw.rope_parameters.or(raw.rope_scaling))?,
            context_tokens: u32::try_from(context).expect("at most 2^24"),
        },
        biases,
        has_head_norms,
        is_tied: raw.tie_word_embeddings,
        eos: raw.eos_token_id.map(OneOrMany::into_vec).unwrap_or_default(),
    })
}

fn rope(path: &Path, theta: Option<f32>, raw: Option<RawRope>) -> Result<Rope, ModelError> {
    const KINDS: &str = "default, linear and llama3 with their factors";
    let inner_theta = raw.as_ref().and_then(|raw| raw.rope_theta);
    let theta = inner_theta.or(theta).unwrap_or(10_000.0);
    let Some(raw) = raw else { return Ok(Rope { theta, scaling: RopeScaling::None }) };
    let refuse = |field, value| Err(ModelError::Unsupported { path: path.to_owned(), field, value, known: KINDS });
    if let Some(part) = raw.partial_rotary_factor.filter(|&part| part != 1.0) {
        return refuse("partial_rotary_factor", part.to_string());
    }
    let kind = raw.rope_type.as_deref().or(raw.old_type.as_deref()).unwrap_or("default");
    let llama3 = (raw.low_freq_factor, raw.high_freq_factor, raw.original_max_position_embeddings);
    let scaling = match (kind, raw.factor, llama3) {
        ("default", ..) => RopeScaling::None,
        ("linear", Some(factor), _) => RopeScaling::Linear { factor },
        ("llama3", Some(factor), (Some(low), Some(high), Some(original_context))) => {
            RopeScaling::Llama3 { factor, low_frequency_factor: low, high_frequency_factor: high, original_context }
        }
        _ => return refuse("rope_scaling", kind.to_owned()),
    };
    Ok(Rope { theta, scaling })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn llama() -> Value {
        json!({
            "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 2048, "hidden_act": "silu", "rope_theta": 500_000.0, "eos_token_id": [2, 3],
        })
    }

    fn with(mut config: Value, fields: Value) -> Result<ModelConfig, ModelError> {
        for (name, value) in fields.as_object().unwrap() {
            config[name] = value.clone();
        }
        parse(Path::new("m/config.json"), &config.to_string())
    }

    #[test]
    fn three_kinds_are_one_shape() {
        let llama_config = with(llama(), json!({})).unwrap();
        assert_eq!((llama_config.shape.head_size, llama_config.shape.rope.theta), (16, 500_000.0));
        assert_eq!(llama_config.eos, [2, 3]);
        assert!(!llama_config.biases.qkv && !llama_config.has_head_norms);
        let qwen2 = with(llama(), json!({"model_type": "qwen2", "eos_token_id": 7})).unwrap();
        assert!(qwen2.biases.qkv && !qwen2.biases.output && qwen2.eos == [7]);
        let qwen3 = with(llama(), json!({"model_type": "qwen3"})).unwrap();
        assert!(qwen3.has_head_norms && qwen3.shape.head_size == 128);
    }

    #[test]
    fn positions_may_be_stretched_in_the_old_place_and_in_the_new() {
        let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                            "original_max_position_embeddings": 8192});
        let old = with(llama(), json!({"rope_scaling": llama3})).unwrap().shape.rope;
        let mut parameters = llama3;
        parameters["rope_theta"] = json!(500_000.0);
        let new = with(llama(), json!({"rope_parameters": parameters, "rope_theta": null})).unwrap().shape.rope;
        assert_eq!(old, new);
        assert!(matches!(old.scaling, RopeScaling::Llama3 { original_context: 8192.0, .. }));
        let older = with(llama(), json!({"rope_scaling": {"type": "linear", "factor": 2.0}})).unwrap();
        assert_eq!(older.shape.rope.scaling, RopeScaling::Linear { factor: 2.0 });
        let both = json!({"rope_scaling": {"type": "dynamic", "rope_type": "linear", "factor": 2.0}});
        assert_eq!(with(llama(), both).unwrap().shape.rope, older.shape.rope, "the newer name counts");
    }

    #[test]
    fn what_is_not_computed_is_named() {
        for (fields, named) in [
            (json!({"model_type": "mamba"}), "model_type is mamba"),
            (json!({"use_sliding_window": true}), "use_sliding_window"),
            (json!({"hidden_act": "gelu"}), "hidden_act is gelu"),
            (json!({"quantization_config": {"bits": 4}}), "quantization_config"),
            (json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}), "rope_scaling is yarn"),
            (json!({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}), "rope_scaling is llama3"),
            (json!({"num_key_value_heads": 3}), "num_key_value_heads is 3"),
            (json!({"num_hidden_layers": 0}), "num_hidden_layers is 0"),
            (json!({"vocab_size": 1u64 << 40}), "vocab_size"),
            (json!({"head_dim": 15}), "head_dim is 15"),
            (json!({"num_attention_heads": 0}), "num_attention_heads is 0"),
        ] {
            let error = with(llama(), fields).unwrap_err().to_string();
            assert!(error.starts_with("m/config.json: ") && error.contains(named), "{error}");
        }
        let error = parse(Path::new("m/config.json"), "{\"model_type\": \"llama\"}").unwrap_err();
        assert!(matches!(error, ModelError::Json { .. }), "{error}");
    }
}
