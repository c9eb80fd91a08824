//! JSON text out, and a sentence about JSON that will not come in.
//!
//! Objects are indented, one field a line, so that a kept run can be read and its history compared line by
//! line; arrays stay on one line, because ten thousand raw values are not for reading.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

use super::ResultError;

/// The text of any of our objects, ended by a newline.
pub(crate) fn render(value: &impl Serialize) -> Result<String, ResultError> {
    let not_json = |reason: String| ResultError::NotJson { reason, line: 0, column: 0 };
    let mut bytes = Vec::new();
    let mut serializer = Serializer::with_formatter(&mut bytes, FlatArrays(PrettyFormatter::new()));
    value.serialize(&mut serializer).map_err(|error| not_json(error.to_string()))?;
    bytes.push(b'\n');
    String::from_utf8(bytes).map_err(|error| not_json(error.to_string()))
}

/// serde_json's pretty printer for objects, its compact default for arrays.
struct FlatArrays(PrettyFormatter<'static>);

impl Formatter for FlatArrays {
    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_object(writer)
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_object(writer)
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.0.begin_object_key(writer, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_object_value(writer)
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_object_value(writer)
    }
}

/// What to tell the user of a file that does not parse.
pub(crate) fn explain(bytes: &[u8], error: &serde_json::Error) -> ResultError {
    let (line, column) = (error.line(), error.column());
    if let Some(token) = token_at(bytes, line, column).filter(|token| is_not_finite(token)) {
        return ResultError::NotFinite { place: format!("{token} at line {line}") };
    }
    let full = error.to_string();
    let position = format!(" at line {line} column {column}");
    let reason = if error.is_eof() && bytes.iter().all(u8::is_ascii_whitespace) {
        "the file is empty,"
    } else if error.is_eof() {
        "the text ends too early (was the file cut off?),"
    } else {
        full.strip_suffix(&position).unwrap_or(&full)
    };
    ResultError::NotJson { reason: reason.to_owned(), line, column }
}

/// The bare word or number around a position. Both counts start at 1, the column in bytes.
fn token_at(bytes: &[u8], line: usize, column: usize) -> Option<&str> {
    let line = bytes.split(|&byte| byte == b'\n').nth(line.checked_sub(1)?)?;
    let in_token = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.');
    let at = column.saturating_sub(1).min(line.len());
    // The reported column may be just past the token.
    let start = line[..at].iter().rposition(|byte| !in_token(byte)).map_or(0, |before| before + 1);
    let end = line[at..].iter().position(|byte| !in_token(byte)).map_or(line.len(), |after| at + after);
    std::str::from_utf8(&line[start..end]).ok()
}

/// Rust reads `NaN`, `inf`, `Infinity` (any case, any sign) and `1e999`, which is what other writers produce.
fn is_not_finite(token: &str) -> bool {
    token.parse::<f64>().is_ok_and(|number| !number.is_finite())
}
