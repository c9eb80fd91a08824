//! How a body is read: in passes that keep what they look for and skip the rest, so that what a client sends beside it costs nothing.
//!
//! ```text
//!   body ── survey ──> whole JSON? an object? an unsupported field? which others are there
//!        └─ typed ───> the fields of one struct; lists keep the most that is of use and count the rest
//! ```
//!
//! No pass makes a `serde_json::Value` of anything that a client may make long, nor do untagged enums, which keep a copy of all they
//! choose from. What is skipped is skipped without recursion, however deep it is.

use std::fmt;
use std::marker::PhantomData;

use axum::http::StatusCode;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

use super::error::ApiError;

/// Most token ids of a request, in all of its prompts.
pub(super) const MAX_IDS: usize = 1 << 20;
/// A value that asks for nothing is shorter, however it is written.
const MAX_NEUTRAL_BYTES: usize = 256;

/// What is in a body, before anything of it is taken.
pub(super) struct Survey<'a> {
    pub(super) text: &'a str,
    pub(super) has_messages: bool,
}

/// Whether a body is a JSON object without a field that `check` refuses.
pub(super) fn survey(body: &[u8], check: fn(&str, &RawValue) -> Result<(), ApiError>) -> Result<Survey<'_>, ApiError> {
    let wrong = |what: String| ApiError::new(StatusCode::BAD_REQUEST, "invalid_json", what);
    let text = std::str::from_utf8(body).map_err(|error| wrong(format!("the body is not JSON: {error}")))?;
    if !text.trim_start().starts_with('{') {
        return Err(match serde_json::from_str::<IgnoredAny>(text) {
            Ok(_) => wrong("the body is JSON, but not an object: send {\"model\": ..., ...}".to_owned()),
            Err(error) => wrong(format!("the body is not JSON: {error}")),
        });
    }
    let mut fields = Fields { check, has_messages: false, refused: None };
    let mut json = serde_json::Deserializer::from_str(text);
    let read = json.deserialize_map(&mut fields).and_then(|()| json.end());
    read.map_err(|error| wrong(format!("the body is not JSON: {error}")))?;
    match fields.refused {
        Some(refusal) => Err(refusal),
        None => Ok(Survey { text, has_messages: fields.has_messages }),
    }
}

struct Fields {
    check: fn(&str, &RawValue) -> Result<(), ApiError>,
    has_messages: bool,
    refused: Option<ApiError>,
}

impl<'de> Visitor<'de> for &mut Fields {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(Name(name)) = map.next_key()? {
            self.has_messages |= name == "messages";
            let value: &RawValue = map.next_value()?;
            if let (None, Err(refusal)) = (&self.refused, (self.check)(&name, value)) {
                self.refused = Some(refusal);
            }
        }
        Ok(())
    }
}

/// The name of a field; one with escapes in it is none of ours.
#[derive(serde::Deserialize)]
struct Name<'a>(#[serde(borrow)] std::borrow::Cow<'a, str>);

/// The fields of a struct, or a refusal that names the one that is wrong.
pub(super) fn typed<'a, T: Deserialize<'a>>(survey: &Survey<'a>) -> Result<T, ApiError> {
    // Most bodies are right: where a mistake stands is found out in a second reading.
    if let Ok(read) = serde_json::from_str(survey.text) {
        return Ok(read);
    }
    let mut json = serde_json::Deserializer::from_str(survey.text);
    serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        let what = sentence(&error.into_inner());
        match path.as_str() {
            // A field that is missing at the top: the message names it.
            "." => ApiError::invalid(quoted(&what).unwrap_or_default(), what),
            _ => ApiError::invalid(path.clone(), format!("{path}: {what}")),
        }
    })
}

/// What is wrong, without the place in the text: the field is named.
fn sentence(error: &serde_json::Error) -> String {
    let what = error.to_string();
    what.rsplit_once(" at line ").map_or_else(|| what.clone(), |(what, _)| what.to_owned())
}

/// The name in a message such as "missing field `prompt`".
fn quoted(message: &str) -> Option<String> {
    message.split('`').nth(1).map(str::to_owned)
}

/// Whether a value is one of those that ask for nothing.
pub(super) fn asks_nothing(value: &RawValue, neutral: &[&str]) -> bool {
    let written = value.get();
    if written == "null" || neutral.contains(&written) {
        return true;
    }
    // The same with spaces in it.
    written.len() <= MAX_NEUTRAL_BYTES
        && serde_json::from_str::<Value>(written).is_ok_and(|value| neutral.contains(&value.to_string().as_str()))
}

/// The first `MAX` of a list, and how many there are.
#[derive(Debug)]
pub(super) struct AtMost<T, const MAX: usize> {
    pub(super) items: Vec<T>,
    pub(super) count: usize,
}

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for AtMost<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(AtMostVisitor(PhantomData))
    }
}

struct AtMostVisitor<T, const MAX: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for AtMostVisitor<T, MAX> {
    type Value = AtMost<T, MAX>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut items = Vec::new();
        while items.len() < MAX {
            match seq.next_element()? {
                Some(item) => items.push(item),
                None => return Ok(AtMost { count: items.len(), items }),
            }
        }
        let mut count = items.len();
        while seq.next_element::<IgnoredAny>()?.is_some() {
            count += 1;
        }
        Ok(AtMost { items, count })
    }
}

/// A value of which nothing is kept but what prompts, stop strings and levels are made of.
#[derive(Debug)]
pub(super) enum Plain {
    Text(String),
    Id(u32),
    Ids(AtMost<u32, MAX_IDS>),
    Other,
}

impl<'de> Deserialize<'de> for Plain {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PlainVisitor { is_inner: false })
    }
}

/// An id, or anything else.
struct InnerId(Option<u32>);

impl<'de> Deserialize<'de> for InnerId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match deserializer.deserialize_any(PlainVisitor { is_inner: true })? {
            Plain::Id(id) => Ok(Self(Some(id))),
            _ => Ok(Self(None)),
        }
    }
}

struct PlainVisitor {
    /// Inside of a list of ids: neither texts nor lists are kept.
    is_inner: bool,
}

impl<'de> Visitor<'de> for PlainVisitor {
    type Value = Plain;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Plain, E> {
        Ok(Plain::Other)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Plain, E> {
        Ok(Plain::Other)
    }

    fn visit_u64<E>(self, value: u64) -> Result<Plain, E> {
        Ok(u32::try_from(value).map_or(Plain::Other, Plain::Id))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Plain, E> {
        Ok(Plain::Other)
    }

    fn visit_unit<E>(self) -> Result<Plain, E> {
        Ok(Plain::Other)
    }

    fn visit_str<E>(self, value: &str) -> Result<Plain, E> {
        Ok(if self.is_inner { Plain::Other } else { Plain::Text(value.to_owned()) })
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Plain, A::Error> {
        IgnoredAny.visit_map(map)?;
        Ok(Plain::Other)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Plain, A::Error> {
        let (mut items, mut count, mut are_ids) = (Vec::new(), 0, !self.is_inner);
        while are_ids && count < MAX_IDS {
            match seq.next_element()? {
                Some(InnerId(Some(id))) => items.push(id),
                Some(InnerId(None)) => are_ids = false,
                None => return Ok(Plain::Ids(AtMost { items, count })),
            }
            count += 1;
        }
        while seq.next_element::<IgnoredAny>()?.is_some() {
            count += 1;
        }
        Ok(if are_ids { Plain::Ids(AtMost { items, count }) } else { Plain::Other })
    }
}
