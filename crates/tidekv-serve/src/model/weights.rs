//! The numbers of a model, as plain memory that any compute back-end can take over, or as what will become such memory.
//!
//! Everything is generic in its matrices: a [`Matrix`] has all its numbers, a [`Draw`](super::Draw) says how they are made, on
//! whichever device wants them.

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
pub struct Linear<M = Matrix> {
    /// `[in, out]`.
    pub weight: M,
    /// `[out]`, where the model has one.
    pub bias: Option<Vec<f32>>,
}

/// Where a token's first state comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum Embedding<M = Matrix> {
    /// `[vocab, hidden]`: row `id`.
    Own(M),
    /// Column `id` of the head: the model has one matrix for both.
    Tied,
}

/// One layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer<M = Matrix> {
    /// `[hidden]`: the norm before attention.
    pub attention_norm: Vec<f32>,
    /// Queries, keys and values side by side: `[hidden, query + 2 kv]`.
    pub qkv: Linear<M>,
    /// `[head_size]`: the norm of each query head (Qwen3).
    pub query_norm: Option<Vec<f32>>,
    /// `[head_size]`: the norm of each key head (Qwen3).
    pub key_norm: Option<Vec<f32>>,
    /// `[query, hidden]`.
    pub output: Linear<M>,
    /// `[hidden]`: the norm before the feed-forward part.
    pub feed_norm: Vec<f32>,
    /// Gate and up side by side: `[hidden, 2 intermediate]`.
    pub gate_up: Linear<M>,
    /// `[intermediate, hidden]`.
    pub down: Linear<M>,
}

/// All of a model's numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Weights<M = Matrix> {
    /// Ids to states.
    pub embedding: Embedding<M>,
    /// In the order in which they are computed.
    pub layers: Vec<Layer<M>>,
    /// `[hidden]`: the norm before the head.
    pub norm: Vec<f32>,
    /// States to logits: `[hidden, vocab]`.
    pub head: Linear<M>,
}

impl<M> Weights<M> {
    /// The same with every matrix changed by `change`.
    pub fn map<N>(self, mut change: impl FnMut(M) -> N) -> Weights<N> {
        let embedding = match self.embedding {
            Embedding::Own(matrix) => Embedding::Own(change(matrix)),
            Embedding::Tied => Embedding::Tied,
        };
        let layers = self.layers.into_iter().map(|layer| layer.map(&mut change)).collect();
        Weights { embedding, layers, norm: self.norm, head: self.head.map(change) }
    }
}

impl<M> Layer<M> {
    fn map<N>(self, mut change: impl FnMut(M) -> N) -> Layer<N> {
        Layer {
            attention_norm: self.attention_norm,
            qkv: self.qkv.map(&mut change),
            query_norm: self.query_norm,
            key_norm: self.key_norm,
            output: self.output.map(&mut change),
            feed_norm: self.feed_norm,
            gate_up: self.gate_up.map(&mut change),
            down: self.down.map(change),
        }
    }
}

impl<M> Linear<M> {
    fn map<N>(self, change: impl FnOnce(M) -> N) -> Linear<N> {
        Linear { weight: change(self.weight), bias: self.bias }
    }
}
