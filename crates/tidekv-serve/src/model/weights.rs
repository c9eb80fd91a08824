//! The numbers of a model, as plain memory that any compute back-end can take over.

/// A matrix, `[rows, columns]`, row after row.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    /// How many rows.
    pub rows: usize,
    /// Elements of each.
    pub columns: usize,
    /// All of them.
    pub data: Vec<f32>,
}

/// `out = in * weight + bias`: the weight is `[in, out]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Linear {
    /// `[in, out]`.
    pub weight: Matrix,
    /// `[out]`, where the model has one.
    pub bias: Option<Vec<f32>>,
}

/// Where a token's first state comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum Embedding {
    /// `[vocab, hidden]`: row `id`.
    Own(Matrix),
    /// Column `id` of the head: the model has one matrix for both.
    Tied,
}

/// One layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// `[hidden]`: the norm before attention.
    pub attention_norm: Vec<f32>,
    /// Queries, keys and values side by side: `[hidden, query + 2 kv]`.
    pub qkv: Linear,
    /// `[head_size]`: the norm of each query head (Qwen3).
    pub query_norm: Option<Vec<f32>>,
    /// `[head_size]`: the norm of each key head (Qwen3).
    pub key_norm: Option<Vec<f32>>,
    /// `[query, hidden]`.
    pub output: Linear,
    /// `[hidden]`: the norm before the feed-forward part.
    pub feed_norm: Vec<f32>,
    /// Gate and up side by side: `[hidden, 2 intermediate]`.
    pub gate_up: Linear,
    /// `[intermediate, hidden]`.
    pub down: Linear,
}

/// All of a model's numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Weights {
    /// Ids to states.
    pub embedding: Embedding,
    /// In the order in which they are computed.
    pub layers: Vec<Layer>,
    /// `[hidden]`: the norm before the head.
    pub norm: Vec<f32>,
    /// States to logits: `[hidden, vocab]`.
    pub head: Linear,
}
