//! What is computed: a decoder-only transformer's shape and its weights, from a folder or made at start.
//!
//! ```text
//!   folder      config.json ──> shape ─┐
//!               *.safetensors ─> tensors ─> Model { shape, weights: f32 }  ──> compute
//!   synthetic   size, seed ────────────┘
//!                       └─ sketch ─────> Model<Draw>                       ──> compute::cuda, which makes the numbers itself
//! ```
//!
//! One shape covers Llama, Qwen2 and Qwen3: they differ in biases and in a norm over each head, which are data here, not
//! code paths. Whatever precision a file has, weights are 32-bit floats from here on.
//!
//! Every matrix lies with its inputs as rows (`[in, out]`, the transpose of the files): the product of a few rows with
//! it then reads the weights in the order in which they lie.

mod config_json;
mod error;
mod folder;
mod rope;
mod shape;
mod synthetic;
mod tensors;
mod weights;

pub use error::ModelError;
pub use rope::{Rope, RopeScaling};
pub use shape::ModelShape;
pub use synthetic::{Draw, SYNTHETIC_ANSWER, SYNTHETIC_BOS, SYNTHETIC_EOS, SYNTHETIC_VOCAB};
pub use weights::{Embedding, Layer, Linear, Matrix, Weights};

use crate::config::{ModelSource, SyntheticSize};

/// A model, ready to compute with.
#[derive(Clone, Debug)]
pub struct Model<M = Matrix> {
    /// As `/v1/models` calls it.
    pub name: String,
    /// Sizes and constants.
    pub shape: ModelShape,
    /// Ids that end a text.
    pub eos: Vec<u32>,
    /// The numbers.
    pub weights: Weights<M>,
}

impl Model {
    /// Reads or makes a model.
    ///
    /// # Errors
    /// [`ModelError`] names the file, and in it the field or the tensor, that is missing or not as it should be.
    pub fn load(source: &ModelSource) -> Result<Self, ModelError> {
        match source {
            ModelSource::Folder(path) => folder::load(path),
            ModelSource::Synthetic { size, seed } => synthetic::make(*size, *seed),
        }
    }
}

impl Model<Draw> {
    /// A synthetic model before its numbers are made.
    pub fn sketch(size: SyntheticSize, seed: u64) -> Self {
        synthetic::sketch(size, seed)
    }
}
