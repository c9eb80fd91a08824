//! Why a model cannot be had. One sentence each: which file, what in it, what to do.

use std::io;
use std::path::PathBuf;

/// A model folder that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// More numbers than the processor should make.
    #[error("{name} is made on a GPU: choose the back-end cuda, or a smaller model such as synthetic:small")]
    NeedsGpu {
        /// Which model.
        name: String,
    },
    /// Not there, or not readable.
    #[error("{} cannot be read: a model folder has config.json and *.safetensors", path.display())]
    Read {
        /// Which file or folder.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A configuration that is not JSON, or lacks a field, or has one of the wrong type.
    #[error("{} is not a model's configuration", path.display())]
    Json {
        /// Which file.
        path: PathBuf,
        /// Where and why.
        #[source]
        source: serde_json::Error,
    },
    /// A kind of model, or an option of one, that is not computed here.
    #[error("{}: {field} is {value}, and only {known} can be computed", path.display())]
    Unsupported {
        /// Which file.
        path: PathBuf,
        /// Which field of it.
        field: &'static str,
        /// As written there.
        value: String,
        /// What would do.
        known: &'static str,
    },
    /// A number that makes no model.
    #[error("{}: {field} is {value}, which is not {wanted}", path.display())]
    OutOfRange {
        /// Which file.
        path: PathBuf,
        /// Which field of it.
        field: &'static str,
        /// As written there.
        value: u64,
        /// What it should be.
        wanted: &'static str,
    },
    /// No weights at all.
    #[error("{} has no *.safetensors: other formats are not read, convert the weights first", path.display())]
    NoWeights {
        /// Which folder.
        path: PathBuf,
    },
    /// A file that is cut off or is something else.
    #[error("{} is not a complete safetensors file ({what}): download it again", path.display())]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// The model needs a tensor that no file has.
    #[error("{} has no tensor {tensor}: the weights are incomplete, or of another kind of model", path.display())]
    MissingTensor {
        /// Which file or folder.
        path: PathBuf,
        /// Its name.
        tensor: String,
    },
    /// A tensor whose sizes are not those that the configuration demands.
    #[error("{}: tensor {tensor} has the shape {found:?}, and config.json makes it {wanted:?}", path.display())]
    Misshapen {
        /// Which file.
        path: PathBuf,
        /// Its name.
        tensor: String,
        /// Its sizes.
        found: Vec<usize>,
        /// What they should be.
        wanted: Vec<usize>,
    },
    /// A precision that is not read.
    #[error("{}: tensor {tensor} is stored as {found}, and only F32, F16 and BF16 are read", path.display())]
    Precision {
        /// Which file.
        path: PathBuf,
        /// Its name.
        tensor: String,
        /// As the file says.
        found: String,
    },
}
