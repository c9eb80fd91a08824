//! Sizes and constants of a decoder-only transformer.

use tidekv_core::geometry::KvShape;

use super::rope::Rope;

/// Bytes of one element of K and V: 32-bit floats, as everything on the processor.
const KV_ELEMENT_BYTES: u32 = 4;

/// Everything about a model but its weights.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    /// Ids are below this.
    pub vocab: usize,
    /// Elements of a token's state between layers.
    pub hidden: usize,
    /// Elements in the middle of the feed-forward part.
    pub intermediate: usize,
    /// Layers.
    pub layers: usize,
    /// Heads of the queries.
    pub heads: usize,
    /// Heads of keys and values; divides `heads`.
    pub kv_heads: usize,
    /// Elements of one head; even.
    pub head_size: usize,
    /// Added to the mean square before its root is taken.
    pub norm_epsilon: f32,
    /// How positions turn queries and keys.
    pub rope: Rope,
    /// Longest sequence that the model was made for.
    pub context_tokens: u32,
}

impl ModelShape {
    /// Elements of all query heads of a token.
    pub fn query_size(&self) -> usize {
        self.heads * self.head_size
    }

    /// Elements of all key heads of a token, and of all value heads.
    pub fn kv_size(&self) -> usize {
        self.kv_heads * self.head_size
    }

    /// What a token costs in the KV cache, in 32-bit floats.
    pub fn kv_shape(&self, block_tokens: u32) -> KvShape {
        self.kv_shape_of(KV_ELEMENT_BYTES, block_tokens)
    }

    /// The same, in elements of so many bytes.
    #[expect(clippy::cast_possible_truncation, reason = "the reader refuses sizes above 2^24")]
    pub fn kv_shape_of(&self, element_bytes: u32, block_tokens: u32) -> KvShape {
        KvShape::heads(self.layers as u32, self.kv_heads as u32, self.head_size as u32, element_bytes, block_tokens)
    }
}
