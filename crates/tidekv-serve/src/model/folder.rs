//! A model folder, as on the Hugging Face hub: names of tensors to places in [`Weights`].

use std::path::Path;

use super::Model;
use super::config_json::{self, ModelConfig};
use super::error::ModelError;
use super::tensors::Tensors;
use super::weights::{Embedding, Layer, Linear, Matrix, Weights};

const EMBEDDING: &str = "model.embed_tokens";
const HEAD: &str = "lm_head";

pub(super) fn load(folder: &Path) -> Result<Model, ModelError> {
    let config = config_json::read(folder)?;
    let tensors = Tensors::open(folder)?;
    let reader = Reader { tensors, config };
    let weights = reader.weights()?;
    let name = folder.file_name().map_or_else(|| folder.display().to_string(), |name| name.to_string_lossy().into());
    let ModelConfig { shape, eos, .. } = reader.config;
    Ok(Model { name, shape, eos, weights })
}

struct Reader {
    tensors: Tensors,
    config: ModelConfig,
}

impl Reader {
    fn weights(&self) -> Result<Weights, ModelError> {
        let shape = &self.config.shape;
        let (vocab, hidden) = (shape.vocab, shape.hidden);
        // Files of tied models may have the head as a second copy or not at all; one that says it has its own must.
        let (embedding, head) = if self.config.is_tied {
            (Embedding::Tied, self.linear(&[(EMBEDDING, vocab)], hidden, false)?)
        } else {
            let data = self.tensors.matrix(&format!("{EMBEDDING}.weight"), vocab, hidden)?;
            let own = Embedding::Own(Matrix { rows: vocab, columns: hidden, data });
            (own, self.linear(&[(HEAD, vocab)], hidden, false)?)
        };
        let layers = (0..shape.layers).map(|layer| self.layer(layer)).collect::<Result<_, _>>()?;
        Ok(Weights { embedding, layers, norm: self.tensors.vector("model.norm.weight", hidden)?, head })
    }

    fn layer(&self, layer: usize) -> Result<Layer, ModelError> {
        let (shape, biases) = (&self.config.shape, self.config.biases);
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let vector = |part: &str, size| self.tensors.vector(&name(part), size);
        let head_norm = |part| self.config.has_head_norms.then(|| vector(part, shape.head_size)).transpose();
        let linear = |parts: &[(&str, usize)], inputs, has_bias| {
            let named: Vec<_> = parts.iter().map(|&(part, outputs)| (name(part), outputs)).collect();
            let borrowed: Vec<_> = named.iter().map(|(part, outputs)| (part.as_str(), *outputs)).collect();
            self.linear(&borrowed, inputs, has_bias)
        };
        let (query, kv) = (shape.query_size(), shape.kv_size());
        Ok(Layer {
            attention_norm: vector("input_layernorm.weight", shape.hidden)?,
            qkv: linear(
                &[("self_attn.q_proj", query), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)],
                shape.hidden,
                biases.qkv,
            )?,
            query_norm: head_norm("self_attn.q_norm.weight")?,
            key_norm: head_norm("self_attn.k_norm.weight")?,
            output: linear(&[("self_attn.o_proj", shape.hidden)], query, biases.output)?,
            feed_norm: vector("post_attention_layernorm.weight", shape.hidden)?,
            gate_up: linear(
                &[("mlp.gate_proj", shape.intermediate), ("mlp.up_proj", shape.intermediate)],
                shape.hidden,
                biases.feed,
            )?,
            down: linear(&[("mlp.down_proj", shape.hidden)], shape.intermediate, biases.feed)?,
        })
    }

    /// Products that read the same input, side by side as one.
    fn linear(&self, parts: &[(&str, usize)], inputs: usize, has_bias: bool) -> Result<Linear, ModelError> {
        let columns = parts.iter().map(|&(_, outputs)| outputs).sum();
        let mut weight = Matrix { rows: inputs, columns, data: vec![0.0; inputs * columns] };
        let mut bias = Vec::new();
        let mut at = 0;
        for &(name, outputs) in parts {
            let tensor = format!("{name}.weight");
            self.tensors.turned_into(&tensor, (outputs, inputs), &mut weight.data, columns, at)?;
            if has_bias {
                bias.extend(self.tensors.vector(&format!("{name}.bias"), outputs)?);
            }
            at += outputs;
        }
        Ok(Linear { weight, bias: has_bias.then_some(bias) })
    }
}
