//! The configuration as it is written: kvcached's keys, and a few of ours. Unknown ones are refused with the nearest that exists.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

/// The whole file.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    /// Variables for all instances, under any spelling of their names.
    #[serde(default)]
    pub(super) kvcached: Option<Pairs>,
    #[serde(default)]
    pub(super) router: Option<Router>,
    #[serde(default)]
    pub(super) sleep_manager: Option<SleepManager>,
    #[serde(default)]
    pub(super) slo_interval_seconds: Option<Spanned<f64>>,
    #[serde(default)]
    pub(super) launch_delay_seconds: Option<Spanned<f64>>,
    pub(super) instances: Vec<Instance>,
}

#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Router {
    pub(super) enable_router: Option<bool>,
    pub(super) router_port: Option<u16>,
    pub(super) router_host: Option<String>,
    /// Further names that it answers to, and sites whose pages may ask.
    #[serde(default)]
    pub(super) allowed_hosts: Vec<Spanned<String>>,
    #[serde(default)]
    pub(super) allowed_origins: Vec<Spanned<String>>,
    pub(super) request_timeout_seconds: Option<Spanned<f64>>,
    pub(super) stream_timeout_seconds: Option<Spanned<f64>>,
    pub(super) drain_seconds: Option<Spanned<f64>>,
    pub(super) max_concurrency: Option<Spanned<usize>>,
    pub(super) max_queue: Option<usize>,
    /// A size, as text.
    pub(super) body_budget: Option<Spanned<String>>,
}

#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SleepManager {
    pub(super) idle_threshold_seconds: Option<Spanned<f64>>,
    pub(super) check_interval_seconds: Option<Spanned<f64>>,
    pub(super) auto_sleep_enabled: Option<bool>,
    pub(super) wakeup_on_request: Option<bool>,
    pub(super) min_sleep_duration: Option<Spanned<f64>>,
    pub(super) level: Option<Spanned<u8>>,
}

#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Instance {
    pub(super) name: Option<Spanned<String>>,
    pub(super) model: Spanned<String>,
    pub(super) engine: Spanned<String>,
    pub(super) engine_args: Option<Spanned<Words>>,
    pub(super) args: Option<Spanned<Words>>,
    pub(super) engine_env: Option<Spanned<Pairs>>,
    pub(super) kvcached_env: Option<Spanned<Pairs>>,
    pub(super) using_venv: Option<bool>,
    pub(super) venv_path: Option<Spanned<String>>,
    /// The program and its arguments, where the engine is `command`.
    pub(super) command: Option<Spanned<Argv>>,
    pub(super) startup_timeout_seconds: Option<Spanned<f64>>,
    pub(super) max_concurrency: Option<Spanned<usize>>,
    pub(super) max_queue: Option<usize>,
    pub(super) slo: Option<Slo>,
    pub(super) pool: Option<Pool>,
}

#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Slo {
    pub(super) ttft_ms: Spanned<f64>,
}

/// The terms of the instance's pool, in the words of `kvctl limit` and `kvctl share`.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Pool {
    pub(super) limit: Option<Spanned<Scalar>>,
    pub(super) weight: Option<Spanned<u32>>,
    pub(super) priority: Option<i32>,
    pub(super) floor: Option<Spanned<Scalar>>,
    pub(super) ceiling: Option<Spanned<Scalar>>,
}

/// Arguments: a text, or a list of texts, each taken apart as a shell would. A list within the list is taken as it is.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Words(pub(super) Vec<String>);

/// A program and its arguments: a list as it is, or a text that is taken apart as a shell would.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Argv(pub(super) Vec<String>);

/// Variables: `[NAME=VALUE, ...]`, or `{NAME: VALUE, ...}`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Pairs(pub(super) Vec<(String, String)>);

/// Any scalar, as people would write it.
#[derive(Debug)]
pub(super) struct Scalar(pub(super) String);

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AnyScalar;
        impl Visitor<'_> for AnyScalar {
            type Value = Scalar;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, a number, true or false")
            }

            fn visit_bool<E>(self, value: bool) -> Result<Scalar, E> {
                Ok(Scalar(value.to_string()))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Scalar, E> {
                Ok(Scalar(value.to_string()))
            }

            fn visit_u64<E>(self, value: u64) -> Result<Scalar, E> {
                Ok(Scalar(value.to_string()))
            }

            fn visit_f64<E>(self, value: f64) -> Result<Scalar, E> {
                Ok(Scalar(value.to_string()))
            }

            fn visit_str<E>(self, value: &str) -> Result<Scalar, E> {
                Ok(Scalar(value.to_owned()))
            }
        }
        deserializer.deserialize_any(AnyScalar)
    }
}

/// A text or a list.
enum TextOrList {
    Text(String),
    List(Vec<String>),
}

impl<'de> Deserialize<'de> for TextOrList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = TextOrList;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text or a list of texts")
            }

            fn visit_str<E>(self, value: &str) -> Result<TextOrList, E> {
                Ok(TextOrList::Text(value.to_owned()))
            }

            fn visit_i64<E>(self, value: i64) -> Result<TextOrList, E> {
                Ok(TextOrList::Text(value.to_string()))
            }

            fn visit_u64<E>(self, value: u64) -> Result<TextOrList, E> {
                Ok(TextOrList::Text(value.to_string()))
            }

            fn visit_f64<E>(self, value: f64) -> Result<TextOrList, E> {
                Ok(TextOrList::Text(value.to_string()))
            }

            fn visit_bool<E>(self, value: bool) -> Result<TextOrList, E> {
                Ok(TextOrList::Text(value.to_string()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<TextOrList, A::Error> {
                let mut list = Vec::new();
                while let Some(Scalar(item)) = items.next_element()? {
                    list.push(item);
                }
                Ok(TextOrList::List(list))
            }
        }
        deserializer.deserialize_any(Either)
    }
}

impl<'de> Deserialize<'de> for Words {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Arguments;
        impl<'de> Visitor<'de> for Arguments {
            type Value = Words;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("arguments: a text, or a list of texts")
            }

            fn visit_unit<E>(self) -> Result<Words, E> {
                Ok(Words::default())
            }

            fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Words, E> {
                split(value).map(Words)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Words, A::Error> {
                let mut words = Vec::new();
                while let Some(item) = items.next_element()? {
                    match item {
                        TextOrList::Text(text) => words.extend(split(&text)?),
                        TextOrList::List(list) => words.extend(list),
                    }
                }
                Ok(Words(words))
            }
        }
        deserializer.deserialize_any(Arguments)
    }
}

impl<'de> Deserialize<'de> for Argv {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match TextOrList::deserialize(deserializer)? {
            TextOrList::Text(text) => split(&text).map(Argv),
            TextOrList::List(list) => Ok(Argv(list)),
        }
    }
}

/// Takes a text apart as a shell would. JSON is an argument as it stands.
fn split<E: serde::de::Error>(text: &str) -> Result<Vec<String>, E> {
    if text.starts_with(['{', '[']) {
        return Ok(vec![text.to_owned()]);
    }
    shell_words::split(text).map_err(|error| E::custom(format_args!("{text:?}: {error}")))
}

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Variables;
        impl<'de> Visitor<'de> for Variables {
            type Value = Pairs;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("variables: a list of NAME=VALUE, or a mapping")
            }

            fn visit_unit<E>(self) -> Result<Pairs, E> {
                Ok(Pairs::default())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Pairs, A::Error> {
                let mut pairs = Vec::new();
                while let Some(item) = items.next_element::<String>()? {
                    let pair = item.split_once('=').filter(|(name, _)| is_variable(name.trim()));
                    let (name, value) =
                        pair.ok_or_else(|| A::Error::custom(format_args!("expected NAME=VALUE, found {item:?}")))?;
                    pairs.push((name.trim().to_owned(), value.to_owned()));
                }
                Ok(Pairs(pairs))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut items: A) -> Result<Pairs, A::Error> {
                let mut pairs = Vec::new();
                while let Some((name, Scalar(value))) = items.next_entry::<String, Scalar>()? {
                    if !is_variable(&name) {
                        return Err(A::Error::custom(format_args!("{name:?} cannot be the name of a variable")));
                    }
                    pairs.push((name, value));
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_any(Variables)
    }
}

fn is_variable(name: &str) -> bool {
    let mut letters = name.chars();
    letters.next().is_some_and(|first| first.is_ascii_alphabetic() || first == '_')
        && letters.all(|letter| letter.is_ascii_alphanumeric() || letter == '_')
}
