//! The result of a benchmark run: one JSON object, the same for every benchmark. This page is its
//! specification; `docs/formats/result.md` is the same for readers in other languages.
//!
//! ```text
//!   {
//!     "schema":  "tidekv.bench.v1",      a reader refuses any other value
//!     "name":    "alloc",                the subcommand; only equal names can be compared
//!     "args":    { "k": [1, 16] },       what was measured: the arguments after validation, defaults filled in
//!     "host":    { "cpu": ... },         where and when: see [`HostInfo`]
//!     "samples": { "map.2M": { ... } },  what the clock said: see [`Series`]
//!     "summary": { "map_us": {           the figures: numbers, possibly nested; their names say unit and
//!                    "p50": 31.2 } },    direction, see [`compare::direction`](crate::compare::direction)
//!     "ttft_p50": 31.2, ...              what some benchmarks have besides, for readers of other formats
//!   }
//! ```
//!
//! - Numbers are finite. A figure that could not be measured is left out, never `null`; a reader refuses
//!   `NaN`, `Infinity`, numbers beyond 64-bit floating point, and `null` under `summary`.
//! - A written result is at most [`MAX_KEPT_BYTES`], so that runs can be kept in a repository, unless it was asked to hold every
//!   answer (`generated_texts`) or every request (`pairs`). When raw values would take more, every series is thinned evenly to the same number of values and says so. Percentiles
//!   are always those of all samples, taken before thinning.
//! - A reader takes files of at most [`MAX_READ_BYTES`], needs `schema`, `name` and `summary`, takes the other
//!   fields as empty where they are missing, and ignores fields it does not know. So fields can be added
//!   under the same schema; removing or redefining one takes a new one.
//! - A result file appears under its name whole or not at all: it is written beside it and renamed.

mod file;
mod json;
mod series;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::host::HostInfo;
use crate::stats::Samples;

pub use file::PendingFile;
pub(crate) use json::{explain, render};
pub use series::Series;

/// The value of `schema` in every result that this version writes and reads.
pub const SCHEMA: &str = "tidekv.bench.v1";

/// The largest file that is read. A result is far smaller; this bounds what a wrong path can cost.
pub const MAX_READ_BYTES: u64 = 64 << 20;

/// The largest result that is written.
pub const MAX_KEPT_BYTES: usize = 1 << 20;

/// Fields of which one says that somebody asked for every detail.
const DETAILED: [&str; 2] = ["generated_texts", "pairs"];

/// What every result has.
pub(crate) const FIELDS: [&str; 6] = ["schema", "name", "args", "host", "samples", "summary"];

/// What a benchmark measured. See the module page for the format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BenchResult {
    schema: String,
    /// Name of the benchmark: its subcommand.
    pub name: String,
    /// The validated arguments.
    pub args: Map<String, Value>,
    /// The machine and the build.
    pub host: HostInfo,
    /// Raw measurements by name.
    pub samples: BTreeMap<String, Series>,
    /// The figures that are reported and compared.
    pub summary: Map<String, Value>,
    /// What else stands at the top: names that readers of other formats look for. `null` is allowed here.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

impl BenchResult {
    /// A result without measurements. `args` is anything that serialises to a JSON object.
    pub fn new(name: &str, args: &impl Serialize, host: HostInfo) -> Result<Self, ResultError> {
        let args = serde_json::to_value(args).map_err(|error| bad_field("args", &error))?;
        let Value::Object(args) = args else {
            return Err(bad_field("args", &"it is not an object"));
        };
        let (schema, name) = (SCHEMA.to_owned(), name.to_owned());
        Ok(Self { schema, name, args, host, samples: BTreeMap::new(), summary: Map::new(), more: Map::new() })
    }

    /// Keeps the times of one operation. Without a single sample there is nothing to keep.
    pub fn add_times(&mut self, series_name: impl Into<String>, times: &Samples) {
        if let Some(series) = Series::of_times(times) {
            self.samples.insert(series_name.into(), series);
        }
    }

    /// Sets one figure of the summary. Dots in `path` open objects: `alloc_free_ns.k16.p50`. A number that is
    /// not finite is accepted here and refused, by its path, when the result is written.
    ///
    /// # Panics
    ///
    /// If a part of `path` is already a figure, which is a mistake in the benchmark.
    pub fn set_figure(&mut self, path: &str, value: f64) {
        self.set(path, Value::from(value));
    }

    /// Sets a word of the summary, such as what was chosen. Nobody compares it.
    ///
    /// # Panics
    ///
    /// As [`set_figure`](Self::set_figure).
    pub fn set_text(&mut self, path: &str, text: &str) {
        self.set(path, Value::from(text));
    }

    /// Sets the two ends of an interval, as a list of two numbers.
    ///
    /// # Panics
    ///
    /// As [`set_figure`](Self::set_figure).
    pub fn set_interval(&mut self, path: &str, low: f64, high: f64) {
        self.set(path, Value::from(vec![low, high]));
    }

    fn set(&mut self, path: &str, value: Value) {
        let (parents, leaf) = path.rsplit_once('.').map_or((None, path), |(parents, leaf)| (Some(parents), leaf));
        let mut object = &mut self.summary;
        for key in parents.into_iter().flat_map(|parents| parents.split('.')) {
            let child = object.entry(key).or_insert_with(|| Value::Object(Map::new()));
            object = child.as_object_mut().unwrap_or_else(|| panic!("{key} of summary.{path} is a figure already"));
        }
        object.insert(leaf.to_owned(), value);
    }

    /// Sets a field beside those that every result has.
    ///
    /// # Panics
    ///
    /// If every result has it already, which is a mistake in the benchmark.
    pub fn set_more(&mut self, key: &str, value: impl Into<Value>) {
        assert!(!FIELDS.contains(&key), "{key} is a field of every result");
        self.more.insert(key.to_owned(), value.into());
    }

    /// Marks a result of which a part is missing because somebody interrupted the benchmark.
    pub fn set_partial(&mut self, is_partial: bool) {
        if is_partial {
            self.set_more("partial", true);
        }
    }

    /// The JSON text, ended by a newline and within [`MAX_KEPT_BYTES`].
    pub fn to_json(&self) -> Result<String, ResultError> {
        check_numbers("summary", &Value::Object(self.summary.clone()))?;
        let whole = json::render(self)?;
        if whole.len() <= self.max_bytes() {
            return Ok(whole);
        }
        // `fits` is always a number of values that was rendered and found small enough.
        let mut best = None;
        let (mut fits, mut too_many) = (0, self.longest_series());
        while fits < too_many {
            let middle = fits + (too_many - fits) / 2;
            let text = json::render(&self.thinned(middle))?;
            if text.len() <= self.max_bytes() {
                best = Some(text);
                fits = middle + 1;
            } else {
                too_many = middle;
            }
        }
        best.ok_or(ResultError::TooLargeToKeep { bytes: whole.len() })
    }

    /// Writes the JSON text to `path`: whole or not at all.
    pub fn write(&self, path: &Path) -> Result<(), ResultError> {
        let text = self.to_json()?;
        let written = PendingFile::create(path).and_then(|file| file.commit(text.as_bytes()));
        written.map_err(|source| ResultError::Write { source })
    }

    /// Reads a result file.
    pub fn read(path: &Path) -> Result<Self, ResultError> {
        let not_read = |source| ResultError::Read { source };
        let mut bytes = Vec::new();
        let file = File::open(path).map_err(not_read)?;
        file.take(MAX_READ_BYTES + 1).read_to_end(&mut bytes).map_err(not_read)?;
        Self::parse(&bytes)
    }

    /// Reads the bytes of a result file.
    pub fn parse(bytes: &[u8]) -> Result<Self, ResultError> {
        if u64::try_from(bytes.len()).is_ok_and(|len| len > MAX_READ_BYTES) {
            return Err(ResultError::TooLargeToRead);
        }
        let value: Value = serde_json::from_slice(bytes).map_err(|error| json::explain(bytes, &error))?;
        let Value::Object(mut fields) = value else {
            return Err(ResultError::NotAnObject);
        };
        let schema: String = required(&mut fields, "schema")?;
        if schema != SCHEMA {
            return Err(ResultError::WrongSchema { found: schema });
        }
        let result = Self {
            schema,
            name: required(&mut fields, "name")?,
            args: optional(&mut fields, "args")?,
            host: optional(&mut fields, "host")?,
            samples: optional(&mut fields, "samples")?,
            summary: required(&mut fields, "summary")?,
            more: fields,
        };
        check_numbers("summary", &Value::Object(result.summary.clone()))?;
        Ok(result)
    }

    fn longest_series(&self) -> usize {
        self.samples.values().map(|series| series.values.len()).max().unwrap_or(0)
    }

    fn thinned(&self, max_values: usize) -> Self {
        let thin = |(name, series): (&String, &Series)| (name.clone(), series.thinned(max_values));
        Self {
            schema: self.schema.clone(),
            name: self.name.clone(),
            args: self.args.clone(),
            host: self.host.clone(),
            samples: self.samples.iter().map(thin).collect(),
            summary: self.summary.clone(),
            more: self.more.clone(),
        }
    }

    /// Whoever asks for every answer gets it; such a file is read again, and not kept in a repository.
    fn max_bytes(&self) -> usize {
        let is_detailed = DETAILED.iter().any(|&key| self.more.contains_key(key));
        if is_detailed { usize::try_from(MAX_READ_BYTES).unwrap_or(usize::MAX) } else { MAX_KEPT_BYTES }
    }
}

/// Why a result cannot be read or written. The path is the caller's to add: it knows which of two files it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResultError {
    /// The file cannot be opened or read.
    #[error("the file cannot be read")]
    Read {
        /// What the operating system says.
        #[source]
        source: io::Error,
    },
    /// More than [`MAX_READ_BYTES`].
    #[error("the file is larger than {} MiB and so is not a kvbench result", MAX_READ_BYTES >> 20)]
    TooLargeToRead,
    /// Not JSON, or only the beginning of it.
    #[error("not JSON: {reason} at line {line} column {column}")]
    NotJson {
        /// What is wrong there.
        reason: String,
        /// Counted from 1.
        line: usize,
        /// Counted from 1.
        column: usize,
    },
    /// JSON, but an array or a bare value.
    #[error("not a kvbench result: the file holds JSON but no object")]
    NotAnObject,
    /// Another program's file, or one of another version.
    #[error("schema is {found:?}, and this kvbench reads {SCHEMA:?} only")]
    WrongSchema {
        /// The schema of the file.
        found: String,
    },
    /// A field that no result can do without.
    #[error("not a kvbench result: field `{field}` is missing")]
    MissingField {
        /// Its name.
        field: &'static str,
    },
    /// A field of the wrong shape.
    #[error("field `{field}` is not as it should be: {reason}")]
    BadField {
        /// Its name.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// `NaN`, infinity, or the `null` that some writers put in their place.
    #[error("{place} is not a finite number: a figure that was not measured must be left out")]
    NotFinite {
        /// Path of the figure, or the token and where it stands.
        place: String,
    },
    /// Without any raw value the result is still larger than [`MAX_KEPT_BYTES`].
    #[error("the result has {bytes} bytes and cannot be thinned to the {MAX_KEPT_BYTES} bytes of a kept run")]
    TooLargeToKeep {
        /// Its size before thinning.
        bytes: usize,
    },
    /// The file cannot be created or written. Nothing is left under its name.
    #[error("the result cannot be written")]
    Write {
        /// What the operating system says.
        #[source]
        source: io::Error,
    },
}

fn bad_field(field: &'static str, reason: &dyn ToString) -> ResultError {
    ResultError::BadField { field, reason: reason.to_string() }
}

fn required<T: DeserializeOwned>(fields: &mut Map<String, Value>, field: &'static str) -> Result<T, ResultError> {
    let value = fields.remove(field).ok_or(ResultError::MissingField { field })?;
    serde_json::from_value(value).map_err(|error| bad_field(field, &error))
}

fn optional<T: DeserializeOwned + Default>(
    fields: &mut Map<String, Value>,
    field: &'static str,
) -> Result<T, ResultError> {
    if fields.contains_key(field) { required(fields, field) } else { Ok(T::default()) }
}

/// JSON has no NaN: serialisers write `null` for it. So a `null` among figures is a number that was lost.
fn check_numbers(path: &str, value: &Value) -> Result<(), ResultError> {
    match value {
        Value::Null => Err(ResultError::NotFinite { place: path.to_owned() }),
        Value::Array(items) => {
            items.iter().enumerate().try_for_each(|(i, item)| check_numbers(&format!("{path}.{i}"), item))
        }
        Value::Object(fields) => {
            fields.iter().try_for_each(|(key, field)| check_numbers(&format!("{path}.{key}"), field))
        }
        Value::Bool(_) | Value::Number(_) | Value::String(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests;
