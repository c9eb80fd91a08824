//! Models made at start from a seed: nothing to download, the same on every machine.
//!
//! Weights come from integers (SplitMix64) by exact operations alone (a power of two, a product, a square root), so no
//! library's idea of a logarithm shows in them. They know nothing, but they compute like any other model: every logit
//! depends on the whole context.
//!
//! The vocabulary is that of the byte tokenizer: ids 0 to 255 are bytes, then come the special ones. So that answers can
//! be read on a terminal, the head speaks of printable ASCII loudly, of other bytes hardly at all, and of the special tokens, the
//! end of text included, never: a synthetic model goes on until `max_tokens`.

use super::Model;
use super::rope::{Rope, RopeScaling};
use super::shape::ModelShape;
use super::weights::{Embedding, Layer, Linear, Matrix, Weights};
use crate::config::{ModelSource, SyntheticSize};

/// Begins a text.
pub const SYNTHETIC_BOS: u32 = 256;
/// Ends a text.
pub const SYNTHETIC_EOS: u32 = 257;
/// 256 bytes, begin, end, and the two marks of a chat.
pub const SYNTHETIC_VOCAB: usize = 260;

/// What is added to a special token's logit: at any temperature it is not taken.
const SILENCE: f32 = -100.0;
/// How loud the head speaks of what a terminal cannot show.
const WHISPER: f32 = 0.01;

pub(super) fn make(size: SyntheticSize, seed: u64) -> Model {
    let shape = shape(size);
    // The size is part of the seed: a small model is not a tiny one with more layers behind it.
    let mut random = Random { state: seed.wrapping_mul(2).wrapping_add(u64::from(size == SyntheticSize::Small)) };
    let embedding = Embedding::Own(random.matrix(shape.vocab, shape.hidden, 1.0));
    let layers = (0..shape.layers).map(|_| random.layer(&shape)).collect();
    let mut head = random.linear(shape.hidden, shape.vocab, 4.0);
    for row in head.weight.data.chunks_exact_mut(shape.vocab) {
        for (id, weight) in row.iter_mut().enumerate() {
            if !(0x20..0x7f).contains(&id) {
                *weight *= WHISPER;
            }
        }
    }
    head.bias = Some((0..shape.vocab).map(|id| if id < 256 { 0.0 } else { SILENCE }).collect());
    Model {
        name: ModelSource::Synthetic { size, seed }.to_string(),
        eos: vec![SYNTHETIC_EOS],
        weights: Weights { embedding, layers, norm: vec![1.0; shape.hidden], head },
        shape,
    }
}

fn shape(size: SyntheticSize) -> ModelShape {
    let (hidden, intermediate, layers, heads, kv_heads, head_size) = match size {
        SyntheticSize::Tiny => (64, 192, 4, 4, 2, 16),
        SyntheticSize::Small => (320, 1280, 8, 10, 5, 32),
    };
    ModelShape {
        vocab: SYNTHETIC_VOCAB,
        hidden,
        intermediate,
        layers,
        heads,
        kv_heads,
        head_size,
        norm_epsilon: 1e-6,
        rope: Rope { theta: 10_000.0, scaling: RopeScaling::None },
        context_tokens: 32_768,
    }
}

/// SplitMix64.
struct Random {
    state: u64,
}

impl Random {
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
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
    fn matrix(&mut self, rows: usize, columns: usize, deviation: f32) -> Matrix {
        let reach = deviation * 3f32.sqrt();
        Matrix { rows, columns, data: (0..rows * columns).map(|_| self.unit() * reach).collect() }
    }

    /// Outputs as large as inputs, times `gain`.
    #[expect(clippy::cast_precision_loss, reason = "sizes are small")]
    fn linear(&mut self, inputs: usize, outputs: usize, gain: f32) -> Linear {
        Linear { weight: self.matrix(inputs, outputs, gain / (inputs as f32).sqrt()), bias: None }
    }

    fn layer(&mut self, shape: &ModelShape) -> Layer {
        Layer {
            attention_norm: vec![1.0; shape.hidden],
            // Twice as large: attention then prefers some tokens to others.
            qkv: self.linear(shape.hidden, shape.query_size() + 2 * shape.kv_size(), 2.0),
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
        let [zero, again, one] = [0, 0, 1].map(|seed| make(SyntheticSize::Tiny, seed));
        assert_eq!(zero.weights, again.weights);
        assert_ne!(zero.weights, one.weights);
        assert_eq!(one.name, "synthetic:tiny:1");
    }

    /// The first numbers of a seed, written down: they must be the same on every machine and in every version.
    #[test]
    fn weights_are_the_same_everywhere() {
        let model = make(SyntheticSize::Tiny, 0);
        let Embedding::Own(embedding) = &model.weights.embedding else { panic!("synthetic models have their own") };
        let bits: Vec<u32> = embedding.data[..3].iter().map(|weight| weight.to_bits()).collect();
        assert_eq!(bits, [1_068_103_233, 3_195_200_256, 3_218_209_612]);
        let fold = |hash: u64, weight: &f32| hash.rotate_left(5) ^ u64::from(weight.to_bits());
        assert_eq!(model.weights.head.weight.data.iter().fold(0, fold), 8_147_806_407_273_054_524);
    }
}
