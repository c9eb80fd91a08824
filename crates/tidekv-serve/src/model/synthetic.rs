//! Models made at start from a seed: nothing to download, the same on every machine.
//!
//! Weights come from integers (SplitMix64) by exact operations alone (a power of two, a product, a square root), so no
//! library's idea of a logarithm shows in them. They know nothing, but they compute like any other model: every logit
//! depends on the whole context.
//!
//! Number `n` of a model is a function of the seed and of `n` alone, so a [`Draw`] can make its numbers anywhere and in any order:
//! models of the size and shape of public ones are made on the GPU that computes them, in the precision that it computes in.
//!
//! The vocabulary is that of the byte tokenizer: ids 0 to 255 are bytes, then come the special ones. So that answers can
//! be read on a terminal, the head speaks of printable ASCII alone. Of other bytes, half a character each, and of the special tokens,
//! the end of text included, it never speaks: a synthetic model goes on until `max_tokens`. Models with a public shape have its
//! vocabulary, and speak of the same bytes.

use std::ops::Range;

use super::Model;
use super::error::ModelError;
use super::rope::{Rope, RopeScaling};
use super::shape::ModelShape;
use super::weights::{Embedding, Layer, Linear, Matrix, Weights};
use crate::config::{ModelSource, SyntheticSize};

/// Tokens of an answer whose length nobody asked for. Answers of these models never end, and the whole context would take minutes.
pub const SYNTHETIC_ANSWER: u32 = 64;

/// Begins a text.
pub const SYNTHETIC_BOS: u32 = 256;
/// Ends a text.
pub const SYNTHETIC_EOS: u32 = 257;
/// 256 bytes, begin, end, and the two marks of a chat.
pub const SYNTHETIC_VOCAB: usize = 260;

/// What is added to the logit of what is not printable: at any temperature it is not taken.
const SILENCE: f32 = -100.0;
/// How large the head's weights for what a terminal cannot show are. Silent or not, the weights of a seed stay what they are.
const WHISPER: f32 = 0.01;
/// What it can show.
const PRINTABLE: Range<u32> = 0x20..0x7f;

/// A matrix before its numbers are made: number `index` of the model's sequence becomes element `index - first`, row after row.
#[derive(Clone, Debug, PartialEq)]
pub struct Draw {
    /// How many rows.
    pub rows: usize,
    /// Elements of each.
    pub columns: usize,
    /// Where the numbers before its first one leave the generator.
    pub state: u64,
    /// Elements are from `-reach` to `reach`.
    pub reach: f32,
    /// Columns that are as large as that.
    pub loud: Range<u32>,
    /// How much larger (or smaller) all others are.
    pub whisper: f32,
}

impl Draw {
    /// The numbers.
    fn matrix(self) -> Matrix {
        let Self { rows, columns, state, reach, loud, whisper } = self;
        let mut random = Random { state };
        let element = |index: usize| {
            let value = random.unit() * reach;
            let is_loud = u32::try_from(index % columns).is_ok_and(|column| loud.contains(&column));
            if is_loud { value } else { value * whisper }
        };
        Matrix { rows, columns, data: (0..rows * columns).map(element).collect() }
    }
}

/// A model for the processor.
pub(super) fn make(size: SyntheticSize, seed: u64) -> Result<Model, ModelError> {
    let Model { name, shape, eos, weights } = sketch(size, seed);
    if !size.fits_the_processor() {
        return Err(ModelError::NeedsGpu { name });
    }
    Ok(Model { name, shape, eos, weights: weights.map(Draw::matrix) })
}

pub(super) fn sketch(size: SyntheticSize, seed: u64) -> Model<Draw> {
    let shape = shape(size);
    // The size is part of the seed: a small model is not a tiny one with more layers behind it.
    let variant = match size {
        SyntheticSize::Tiny => 0,
        SyntheticSize::Small => 1,
        SyntheticSize::Qwen05b => 0x5159_0000,
        SyntheticSize::Llama1b => 0x1100_0000,
        SyntheticSize::Llama8b => 0x1800_0000,
    };
    let mut random = Random { state: seed.wrapping_mul(2).wrapping_add(variant) };
    // As the public models have it.
    let is_tied = matches!(size, SyntheticSize::Qwen05b | SyntheticSize::Llama1b);
    let embedding = match is_tied {
        true => Embedding::Tied,
        false => Embedding::Own(random.draw(shape.vocab, shape.hidden, 1.0)),
    };
    let has_biases = size == SyntheticSize::Qwen05b;
    let layers = (0..shape.layers).map(|_| random.layer(&shape, has_biases)).collect();
    let mut head = random.linear(shape.hidden, shape.vocab, 4.0);
    if !is_tied {
        head.weight.loud = PRINTABLE;
        head.weight.whisper = WHISPER;
    }
    let bias = |id: u32| if PRINTABLE.contains(&id) { 0.0 } else { SILENCE };
    head.bias = Some((0..).take(shape.vocab).map(bias).collect());
    Model {
        name: ModelSource::Synthetic { size, seed }.to_string(),
        eos: vec![SYNTHETIC_EOS],
        weights: Weights { embedding, layers, norm: vec![1.0; shape.hidden], head },
        shape,
    }
}

fn shape(size: SyntheticSize) -> ModelShape {
    let plain = Rope { theta: 10_000.0, scaling: RopeScaling::None };
    let llama3 = |factor| Rope {
        theta: 500_000.0,
        scaling: RopeScaling::Llama3 {
            factor,
            low_frequency_factor: 1.0,
            high_frequency_factor: 4.0,
            original_context: 8192.0,
        },
    };
    let qwen2 = Rope { theta: 1_000_000.0, scaling: RopeScaling::None };
    let (vocab, hidden, intermediate, layers, heads, kv_heads, head_size, norm_epsilon, rope, context_tokens) =
        match size {
            SyntheticSize::Tiny => (SYNTHETIC_VOCAB, 64, 192, 4, 4, 2, 16, 1e-6, plain, 32_768),
            SyntheticSize::Small => (SYNTHETIC_VOCAB, 320, 1280, 8, 10, 5, 32, 1e-6, plain, 32_768),
            SyntheticSize::Qwen05b => (151_936, 896, 4864, 24, 14, 2, 64, 1e-6, qwen2, 32_768),
            SyntheticSize::Llama1b => (128_256, 2048, 8192, 16, 32, 8, 64, 1e-5, llama3(32.0), 131_072),
            SyntheticSize::Llama8b => (128_256, 4096, 14_336, 32, 32, 8, 128, 1e-5, llama3(8.0), 131_072),
        };
    ModelShape { vocab, hidden, intermediate, layers, heads, kv_heads, head_size, norm_epsilon, rope, context_tokens }
}

/// What one number adds to the generator's state.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64.
struct Random {
    state: u64,
}

impl Random {
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GAMMA);
        let mixed = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Evenly from -1 to 1, in steps of 2^-23.
    #[expect(clippy::cast_precision_loss, reason = "24 bits fit a 32-bit float exactly")]
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Elements with the standard deviation `deviation`.
    fn draw(&mut self, rows: usize, columns: usize, deviation: f32) -> Draw {
        let state = self.state;
        // As if they had been made.
        self.state = state.wrapping_add((rows as u64 * columns as u64).wrapping_mul(GAMMA));
        Draw { rows, columns, state, reach: deviation * 3f32.sqrt(), loud: 0..u32::MAX, whisper: 1.0 }
    }

    /// Outputs as large as inputs, times `gain`.
    #[expect(clippy::cast_precision_loss, reason = "sizes are small")]
    fn linear(&mut self, inputs: usize, outputs: usize, gain: f32) -> Linear<Draw> {
        Linear { weight: self.draw(inputs, outputs, gain / (inputs as f32).sqrt()), bias: None }
    }

    fn layer(&mut self, shape: &ModelShape, has_biases: bool) -> Layer<Draw> {
        let qkv_size = shape.query_size() + 2 * shape.kv_size();
        // Twice as large: attention then prefers some tokens to others.
        let mut qkv = self.linear(shape.hidden, qkv_size, 2.0);
        qkv.bias = has_biases.then(|| vec![0.0; qkv_size]);
        Layer {
            attention_norm: vec![1.0; shape.hidden],
            qkv,
            query_norm: None,
            key_norm: None,
            output: self.linear(shape.query_size(), shape.hidden, 1.0),
            feed_norm: vec![1.0; shape.hidden],
            gate_up: self.linear(shape.hidden, 2 * shape.intermediate, 1.0),
            down: self.linear(shape.intermediate, shape.hidden, 1.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_model() {
        let [zero, again, one] = [0, 0, 1].map(|seed| make(SyntheticSize::Tiny, seed).unwrap());
        assert_eq!(zero.weights, again.weights);
        assert_ne!(zero.weights, one.weights);
        assert_eq!(one.name, "synthetic:tiny:1");
    }

    /// The first numbers of a seed, written down: they must be the same on every machine and in every version.
    #[test]
    fn weights_are_the_same_everywhere() {
        let model = make(SyntheticSize::Tiny, 0).unwrap();
        let Embedding::Own(embedding) = &model.weights.embedding else { panic!("synthetic models have their own") };
        let bits: Vec<u32> = embedding.data[..3].iter().map(|weight| weight.to_bits()).collect();
        assert_eq!(bits, [1_068_103_233, 3_195_200_256, 3_218_209_612]);
        let fold = |hash: u64, weight: &f32| hash.rotate_left(5) ^ u64::from(weight.to_bits());
        assert_eq!(model.weights.head.weight.data.iter().fold(0, fold), 8_147_806_407_273_054_524);
    }

    /// Millions of parameters of the public models, as their cards count them; norms and biases do not show.
    #[test]
    fn public_shapes_have_as_many_weights_as_the_public_models() {
        for (size, millions) in
            [(SyntheticSize::Qwen05b, 494), (SyntheticSize::Llama1b, 1236), (SyntheticSize::Llama8b, 8030)]
        {
            let model = sketch(size, 0);
            let mut weights = 0;
            model.weights.map(|draw| weights += draw.rows * draw.columns);
            assert_eq!((weights + 500_000) / 1_000_000, millions, "{}", model.name);
            assert!(make(size, 0).unwrap_err().to_string().contains("is made on a GPU"));
        }
    }
}
