//! `--config bench-config.yaml`: the file of kvcached's benchmarking guide.
//!
//! ```yaml
//! models:                                      # all optional
//!   - {name: llama-7b, path: meta-llama/Llama-2-7b-hf, port: 8001}
//! benchmark:
//!   request_rates: [1, 2, 4, 8, 16, 32]
//!   num_requests: 1000
//!   input_len: 512
//!   output_len: 128
//! kvcached:
//!   gpu_utilization: 0.95                      # KVCACHED_GPU_UTILIZATION
//!   page_size_mb: 2                            # KVCACHED_PAGE_SIZE_MB; without it the pool chooses
//! ```
//!
//! Under `kvcached:` the name of any variable, in any case and with or without `kvcached_` before it, is that variable; servers
//! are started with it. A name that nobody reads is an error: it would change nothing, and nobody would notice. What the
//! command line says goes before what the file says.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use tidekv_cli::command::known_variables;
use tidekv_cli::text::nearest;

use crate::yaml::{self, YamlError};

/// What the file says, with the guide's defaults for what it does not.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BenchConfig {
    /// What is served.
    pub models: Vec<ModelEntry>,
    /// What is asked of it.
    pub benchmark: BenchmarkEntry,
    kvcached: BTreeMap<String, Scalar>,
}

/// One model.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelEntry {
    /// Its name for people and clients.
    pub name: String,
    /// `synthetic:tiny`, a folder, or an id.
    pub path: String,
    /// Where it listens; any free port without it.
    #[serde(default)]
    pub port: u16,
}

/// The load.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BenchmarkEntry {
    /// Requests a second, one measurement each.
    pub request_rates: Vec<f64>,
    /// Requests of a measurement.
    pub num_requests: u32,
    /// Tokens of a prompt.
    pub input_len: u32,
    /// Tokens of an answer.
    pub output_len: u32,
}

impl Default for BenchmarkEntry {
    fn default() -> Self {
        let request_rates = vec![1.0, 2.0, 4.0, 8.0, 16.0, 32.0];
        Self { request_rates, num_requests: 1000, input_len: 512, output_len: 128 }
    }
}

/// A value as people write it: text, a number, true or false.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
enum Scalar {
    Truth(bool),
    Whole(i64),
    Number(f64),
    Text(String),
}

impl Scalar {
    fn text(&self) -> String {
        match self {
            Self::Truth(value) => value.to_string(),
            Self::Whole(value) => value.to_string(),
            Self::Number(value) => value.to_string(),
            Self::Text(value) => value.clone(),
        }
    }
}

/// A file that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// It cannot be read.
    #[error("{} cannot be read", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It is not what it should be.
    #[error("{}: {source}", path.display())]
    Yaml {
        /// Which.
        path: PathBuf,
        /// Where and why.
        #[source]
        source: YamlError,
    },
    /// The same variable twice, in two spellings.
    #[error("{}: kvcached.{key} sets {variable} a second time: keep one of them", path.display())]
    Twice {
        /// Which file.
        path: PathBuf,
        /// The second spelling.
        key: String,
        /// What both mean.
        variable: String,
    },
    /// A name that no variable has.
    #[error("{}: kvcached.{key} is not a name: use letters, digits and underscores", path.display())]
    BadKey {
        /// Which file.
        path: PathBuf,
        /// As written.
        key: String,
    },
    /// A name that is well formed, and nobody reads.
    #[error("{}: kvcached.{key}: nobody reads {variable}{}", path.display(), did_you_mean(variable))]
    UnknownVariable {
        /// Which file.
        path: PathBuf,
        /// As written.
        key: String,
        /// The variable that it would be.
        variable: String,
    },
    /// A number that makes no sense.
    #[error("{}: benchmark.{key} {reason}", path.display())]
    BadValue {
        /// Which file.
        path: PathBuf,
        /// Which.
        key: &'static str,
        /// What it should be.
        reason: &'static str,
    },
}

impl BenchConfig {
    /// Reads the file.
    ///
    /// # Errors
    /// [`ConfigError`], with the line and the key of what is wrong.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let read = std::fs::read_to_string(path);
        let text = read.map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Self::parse(&text, path)
    }

    fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let yaml = |source| ConfigError::Yaml { path: path.to_owned(), source };
        let config: Self = yaml::parse(text).map_err(yaml)?;
        config.check(path)?;
        Ok(config)
    }

    fn check(&self, path: &Path) -> Result<(), ConfigError> {
        let bad = |key, reason| Err(ConfigError::BadValue { path: path.to_owned(), key, reason });
        let benchmark = &self.benchmark;
        if benchmark.request_rates.is_empty()
            || !benchmark.request_rates.iter().all(|rate| rate.is_finite() && *rate > 0.0)
        {
            return bad("request_rates", "is not a list of numbers above 0, such as [1, 2, 4]");
        }
        for (key, value) in [
            ("num_requests", benchmark.num_requests),
            ("input_len", benchmark.input_len),
            ("output_len", benchmark.output_len),
        ] {
            if value == 0 {
                return bad(key, "is 0: give at least 1");
            }
        }
        let mut seen = BTreeMap::new();
        for key in self.kvcached.keys() {
            let variable =
                variable_of(key).ok_or_else(|| ConfigError::BadKey { path: path.to_owned(), key: key.clone() })?;
            if !known_variables().any(|known| known == variable) {
                return Err(ConfigError::UnknownVariable { path: path.to_owned(), key: key.clone(), variable });
            }
            if seen.insert(variable.clone(), key).is_some() {
                return Err(ConfigError::Twice { path: path.to_owned(), key: key.clone(), variable });
            }
        }
        Ok(())
    }

    /// The variables of `kvcached:`, by their names in the environment.
    pub fn variables(&self) -> Vec<(String, String)> {
        self.kvcached.iter().filter_map(|(key, value)| Some((variable_of(key)?, value.text()))).collect()
    }

    /// The part of a budget that pools may hold: `gpu_utilization`, 0.95 without it. Servers on the processor have no
    /// device to take a part of, so their budget is multiplied by it.
    pub fn utilization(&self) -> f64 {
        const DEFAULT: f64 = 0.95;
        let variables = self.variables();
        let given = variables.iter().find(|(name, _)| name == "KVCACHED_GPU_UTILIZATION");
        given.and_then(|(_, value)| value.parse().ok()).filter(|part| (0.0..=1.0).contains(part)).unwrap_or(DEFAULT)
    }
}

/// `: did you mean ...?`, or nothing.
fn did_you_mean(variable: &str) -> String {
    nearest(variable, known_variables()).map(|meant| format!(": did you mean {meant}?")).unwrap_or_default()
}

/// `gpu_utilization`, `KVCACHED_GPU_UTILIZATION` and everything between them is `KVCACHED_GPU_UTILIZATION`.
fn variable_of(key: &str) -> Option<String> {
    let upper = key.trim().to_ascii_uppercase().replace('-', "_");
    let is_word = !upper.is_empty() && upper.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let is_whole = upper.starts_with("KVCACHED_") || upper == "ENABLE_KVCACHED";
    is_word.then(|| if is_whole { upper } else { format!("KVCACHED_{upper}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the guide prints it.
    const GUIDE: &str = "\
# bench-config.yaml
models:
  - name: llama-7b
    path: synthetic:tiny:1
    port: 8001

  - name: qwen-7b
    path: synthetic:tiny:2
    port: 8002

benchmark:
  request_rates: [1, 2, 4, 8, 16, 32]
  num_requests: 1000
  input_len: 512
  output_len: 128

kvcached:
  gpu_utilization: 0.95
  page_size_mb: 2
";

    fn parsed(text: &str) -> Result<BenchConfig, String> {
        BenchConfig::parse(text, Path::new("x.yaml")).map_err(|error| error.to_string())
    }

    #[test]
    fn the_file_of_the_guide_and_an_empty_one_mean_the_same_load() {
        let config = parsed(GUIDE).unwrap();
        assert_eq!(config.benchmark, BenchmarkEntry::default());
        assert_eq!(parsed("{}").unwrap().benchmark, BenchmarkEntry::default());
        let models: Vec<_> = config.models.iter().map(|model| (model.name.as_str(), model.port)).collect();
        assert_eq!(models, [("llama-7b", 8001), ("qwen-7b", 8002)]);
        let variables = config.variables();
        let pairs: Vec<_> = variables.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!(pairs, [("KVCACHED_GPU_UTILIZATION", "0.95"), ("KVCACHED_PAGE_SIZE_MB", "2")]);
    }

    #[test]
    fn every_spelling_of_a_variable() {
        for key in [
            "gpu_utilization",
            "GPU_UTILIZATION",
            "kvcached_gpu_utilization",
            "KVCACHED_GPU_UTILIZATION",
            "gpu-utilization",
        ] {
            let config = parsed(&format!("kvcached: {{{key}: 0.5}}")).unwrap();
            assert_eq!(config.variables(), [("KVCACHED_GPU_UTILIZATION".to_owned(), "0.5".to_owned())], "{key}");
            assert_eq!(config.utilization(), 0.5);
        }
        let both = parsed("kvcached: {gpu_utilization: 0.5, KVCACHED_GPU_UTILIZATION: 0.6}").unwrap_err();
        assert!(both.contains("a second time"), "{both}");
        assert_eq!(parsed("kvcached: {page_prealloc_enabled: true}").unwrap().variables()[0].1, "true");
        assert_eq!(parsed("{}").unwrap().utilization(), 0.95);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, part) in [
            ("benchmark: {request_rates: []}", "request_rates"),
            ("benchmark: {request_rates: [0]}", "above 0"),
            ("benchmark: {output_len: 0}", "output_len"),
            ("benchmark: {outputlen: 5}", "outputlen"),
            ("models: [{name: a}]", "path"),
            ("kvcached: {a b: 1}", "is not a name"),
            ("kvcached: {gpu_utilisation: 0.9}", "did you mean KVCACHED_GPU_UTILIZATION?"),
            ("kvcached: {KVCACHED_PAGESIZE_MB: 2}", "did you mean KVCACHED_PAGE_SIZE_MB?"),
            ("kvcached: {colour_of_the_rack: red}", "nobody reads KVCACHED_COLOUR_OF_THE_RACK"),
        ] {
            let error = parsed(text).unwrap_err();
            assert!(error.starts_with("x.yaml") && error.contains(part), "{text}: {error}");
        }
    }
}
