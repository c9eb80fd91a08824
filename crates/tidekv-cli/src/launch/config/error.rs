//! What is wrong with a configuration, and where: `FILE:LINE:COLUMN: key: what was expected`.

use std::fmt;
use std::path::PathBuf;

use serde_saphyr::{Error, Location};

use crate::text::nearest;

/// A configuration that cannot be used. Nothing was started.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ConfigError {
    pub(crate) path: PathBuf,
    /// Line and column from 1 on; none where it is about the file as a whole.
    pub(crate) place: Option<(u64, u64)>,
    /// The key that it is about.
    pub(crate) key: Option<String>,
    pub(crate) problem: String,
}

impl std::error::Error for ConfigError {}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        if let Some((line, column)) = self.place {
            write!(f, ":{line}:{column}")?;
        }
        match &self.key {
            Some(key) => write!(f, ": {key}: {}", self.problem),
            None => write!(f, ": {}", self.problem),
        }
    }
}

/// A problem before it is known in which file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Problem {
    pub(super) place: Option<(u64, u64)>,
    pub(super) key: Option<String>,
    pub(super) text: String,
}

impl Problem {
    pub(super) fn at(location: Location, key: &str, text: impl Into<String>) -> Self {
        Self { place: place(location), key: Some(key.to_owned()), text: text.into() }
    }

    /// What the parser says, in our words where it is something that people often get wrong.
    pub(super) fn of_parser(error: &Error, text: &str) -> Self {
        let at = error.location().and_then(place);
        let key = at.and_then(|(line, _)| key_of_line(text, line));
        match error.without_snippet() {
            Error::SerdeUnknownField { field, expected, .. } => {
                let names = expected.join(", ");
                let text = match nearest(field, expected.iter().copied()) {
                    Some(meant) => format!("there is no such key: did you mean {meant}? (known here: {names})"),
                    None => format!("there is no such key: known here are {names}"),
                };
                Self { place: at, key: Some(field.clone()), text }
            }
            Error::SerdeUnknownVariant { variant, expected, .. } => {
                let names = expected.join(", ");
                let meant = nearest(variant, expected.iter().copied());
                let meant = meant.map(|meant| format!(": did you mean {meant}?")).unwrap_or_default();
                Self { place: at, key, text: format!("{variant:?} is none of {names}{meant}") }
            }
            Error::SerdeMissingField { field, .. } => {
                Self { place: at, key: Some((*field).to_owned()), text: "is required and not there".to_owned() }
            }
            Error::SerdeInvalidType { unexpected, expected, .. }
            | Error::SerdeInvalidValue { unexpected, expected, .. } => {
                Self { place: at, key, text: format!("expected {expected}, found {unexpected}") }
            }
            Error::InvalidScalar { ty, .. } => Self { place: at, key, text: format!("expected {ty}") },
            other => {
                let text = other.to_string();
                // The parser says the place in words too, in its last line or at the end of its only one.
                let text = text.lines().next().unwrap_or_default();
                let text = text.split(" at line ").next().unwrap_or(text).to_owned();
                Self { place: at, key, text }
            }
        }
    }
}

fn place(location: Location) -> Option<(u64, u64)> {
    (location != Location::UNKNOWN).then(|| (location.line(), location.column()))
}

/// The key that stands in a line: what is before its colon.
fn key_of_line(text: &str, line: u64) -> Option<String> {
    let index = usize::try_from(line).ok()?.checked_sub(1)?;
    let (key, _) = text.lines().nth(index)?.split_once(':')?;
    let key = key.trim().trim_start_matches("- ").trim().trim_matches(['"', '\'']);
    (!key.is_empty() && !key.starts_with('#')).then(|| key.to_owned())
}
