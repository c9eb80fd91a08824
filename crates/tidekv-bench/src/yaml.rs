//! YAML that people write: what is wrong is said with its line, its key, and the key that was probably meant.
//!
//! ```text
//!   line 4, column 5: unknown key `arival`; did you mean `arrivals`?
//! ```
//!
//! Types that are read this way say `deny_unknown_fields`: a key that nobody reads is a mistake that nobody sees.

use std::fmt;

use serde::de::DeserializeOwned;
use tidekv_cli::text::nearest;

/// Larger than any scenario; bounds what a wrong path costs.
pub const MAX_BYTES: u64 = 4 << 20;

/// Why a text is not what it should be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct YamlError {
    /// Where, both counted from 1; absent where the parser does not know.
    pub place: Option<(u64, u64)>,
    /// What is wrong.
    pub reason: String,
    /// The key or word that is not known, if that is it.
    pub unknown_key: Option<String>,
    /// The key that was probably meant.
    pub meant: Option<String>,
}

impl fmt::Display for YamlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((line, column)) = self.place {
            write!(f, "line {line}, column {column}: ")?;
        }
        f.write_str(&self.reason)?;
        self.meant.iter().try_for_each(|meant| write!(f, "; did you mean `{meant}`?"))
    }
}

/// Reads a text.
pub fn parse<T: DeserializeOwned>(text: &str) -> Result<T, YamlError> {
    serde_saphyr::from_str(text).map_err(|error| explain(&error))
}

fn explain(error: &serde_saphyr::Error) -> YamlError {
    let place = error.location().map(|location| (location.line(), location.column()));
    let error = error.without_snippet();
    let (kind, written, known) = match error {
        serde_saphyr::Error::SerdeUnknownField { field, expected, .. } => ("key", field, expected),
        serde_saphyr::Error::SerdeUnknownVariant { variant, expected, .. } => ("word", variant, expected),
        other => return YamlError { place, reason: reason_of(other), unknown_key: None, meant: None },
    };
    let meant = nearest(written, known.iter().copied()).map(str::to_owned);
    let reason = match &meant {
        Some(_) => format!("unknown {kind} `{written}`"),
        None => format!("unknown {kind} `{written}`: known are {}", known.join(", ")),
    };
    YamlError { place, reason, unknown_key: Some(written.clone()), meant }
}

/// The parser's sentence without the place, which stands before ours already.
fn reason_of(error: &serde_saphyr::Error) -> String {
    let said = error.to_string();
    let said = said.lines().next().unwrap_or_default();
    match said.rsplit_once(" at line ") {
        Some((reason, place)) if place.starts_with(|letter: char| letter.is_ascii_digit()) => reason.to_owned(),
        _ => said.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct File {
        #[expect(dead_code, reason = "read and not looked at")]
        streams: Vec<Stream>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "read and not looked at")]
    struct Stream {
        name: String,
        rate: Option<f64>,
    }

    fn error(text: &str) -> YamlError {
        parse::<File>(text).unwrap_err()
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line_and_what_was_meant() {
        let error = error("streams:\n  - name: a\n    raet: 4\n");
        assert_eq!(error.place.map(|(line, _)| line), Some(3), "{error}");
        assert_eq!((error.unknown_key.as_deref(), error.meant.as_deref()), (Some("raet"), Some("rate")));
        assert!(error.to_string().ends_with("unknown key `raet`; did you mean `rate`?"), "{error}");
    }

    #[test]
    fn a_value_of_the_wrong_kind_has_its_line() {
        let error = error("streams:\n  - name: a\n    rate: fast\n");
        assert_eq!(error.place.map(|(line, _)| line), Some(3), "{error}");
        assert!(!error.to_string().contains('\n'), "{error}");
    }

    #[test]
    fn a_missing_key_is_named() {
        let error = error("streams:\n  - rate: 1\n");
        assert!(error.to_string().contains("name"), "{error}");
    }

    #[test]
    fn broken_text_has_its_line() {
        let error = error("streams:\n  - name: [a\n");
        assert!(error.place.is_some(), "{error}");
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "[a-z:\\[\\]{}&*!|>%@`\"'\n\t -]{0,60}") {
            let _ = parse::<File>(&text);
        }
    }
}
