//! What clients send, checked: from bytes to a [`Job`], or a refusal that names the field.
//!
//! ```text
//!   bytes ── JSON object ── nothing in it that we cannot do ── typed fields ── in range ──> Job      fields: how they are read
//! ```
//!
//! A field that would change the answer and that we do not know how to honour is refused, unless it has the value that changes
//! nothing. Fields that only carry notes (`user`, `metadata`, ...) are ignored, as every server of this API does.

use std::borrow::Cow;
use std::fmt;

use axum::http::StatusCode;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, SeqAccess, Unexpected, Visitor};
use serde_json::value::RawValue;

use super::error::ApiError;
use super::fields::{AtMost, MAX_IDS, Plain, asks_nothing, survey, typed};
use crate::handle::Sampling;
use crate::tokenizer::{ChatMessage, ChatOptions, SamplingDefaults, Tokenizer};

/// Most stop strings of a request, and the most letters of one.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;
/// Most ids that a request may name to end a text: they are looked through for every token, and kept for every prompt.
const MAX_STOP_TOKENS: usize = 128;
/// Most letters of a salt, as in vLLM.
const MAX_SALT_LETTERS: usize = 128;
/// Most prompts of one request.
const MAX_PROMPTS: usize = 1024;
/// Most messages of a conversation: each costs a template's object, and a model several tokens.
const MAX_MESSAGES: usize = 1 << 14;
/// Most letters of the variables of a template, as JSON.
const MAX_VARIABLES_BYTES: usize = 64 << 10;
/// Most likeliest tokens to be named for each token.
const MAX_LOGPROBS: u64 = 20;
/// Tokens of a completion that does not say how many: OpenAI's default.
const COMPLETION_TOKENS: u64 = 16;

/// What is asked for, whatever the page.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Job {
    pub(super) model: Option<String>,
    pub(super) prompts: Prompts,
    pub(super) sampling: Sampling,
    /// `None` for as many as there is room for.
    pub(super) max_tokens: Option<u64>,
    pub(super) stops: Vec<String>,
    pub(super) stop_tokens: Vec<u32>,
    pub(super) ignore_eos: bool,
    pub(super) logprobs: Option<u8>,
    pub(super) cache_salt: Option<String>,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
}

/// What is to be continued.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Prompts {
    Texts(Vec<String>),
    Tokens(Vec<Vec<u32>>),
    Chat(Vec<ChatMessage>, ChatOptions),
}

/// `POST /v1/completions`.
pub(super) fn completion(body: &[u8], tokenizer: &Tokenizer) -> Result<Job, ApiError> {
    let survey = survey(body, refuse_unsupported)?;
    let own: CompletionFields = typed(&survey)?;
    let PromptField { prompts, count, ids } = own.prompt;
    if !matches!(prompts, Prompts::Tokens(_)) {
        refuse_special(own.add_special_tokens, true)?;
    }
    if !(1..=MAX_PROMPTS).contains(&count) {
        return Err(ApiError::invalid("prompt", format!("prompt has {count} entries: give 1 to {MAX_PROMPTS}")));
    }
    check_ids("prompt", ids)?;
    let mut job = job(typed(&survey)?, prompts, tokenizer.defaults())?;
    job.max_tokens = Some(job.max_tokens.unwrap_or(COMPLETION_TOKENS));
    job.logprobs = own.logprobs.map(|count| checked_logprobs("logprobs", count)).transpose()?;
    Ok(job)
}

/// `POST /v1/chat/completions`.
pub(super) fn chat(body: &[u8], tokenizer: &Tokenizer) -> Result<Job, ApiError> {
    let survey = survey(body, refuse_unsupported)?;
    let own: ChatFields = typed(&survey)?;
    refuse_special(own.add_special_tokens, tokenizer.adds_special_to_chats())?;
    let prompts = typed::<ConversationFields>(&survey)?.checked()?;
    let mut job = job(typed(&survey)?, prompts, tokenizer.defaults())?;
    job.max_tokens = match own.max_completion_tokens {
        Some(most) => Some(at_least_one("max_completion_tokens", most)?),
        None => job.max_tokens,
    };
    let top = own.top_logprobs.map(|count| checked_logprobs("top_logprobs", count)).transpose()?;
    job.logprobs = match (own.logprobs.unwrap_or(false), top) {
        (true, top) => Some(top.unwrap_or(0)),
        (false, None | Some(0)) => None,
        (false, Some(_)) => {
            return Err(ApiError::invalid("top_logprobs", "top_logprobs is given without \"logprobs\": true"));
        }
    };
    Ok(job)
}

/// `POST /tokenize`: a prompt, with its special tokens unless told otherwise, or a conversation.
pub(super) fn tokenize(body: &[u8], tokenizer: &Tokenizer) -> Result<(Option<String>, Prompts, bool), ApiError> {
    let survey = survey(body, refuse_unsupported)?;
    let own: TokenizeFields = typed(&survey)?;
    let prompts = match own.prompt {
        Some(text) => Prompts::Texts(vec![text]),
        None if survey.has_messages => {
            refuse_special(own.add_special_tokens, tokenizer.adds_special_to_chats())?;
            typed::<ConversationFields>(&survey)?.checked()?
        }
        None => return Err(ApiError::invalid("prompt", "there is nothing to tokenise: give prompt or messages")),
    };
    Ok((own.model, prompts, own.add_special_tokens.unwrap_or(true)))
}

/// `POST /detokenize`.
pub(super) fn detokenize(body: &[u8]) -> Result<(Option<String>, Vec<u32>), ApiError> {
    let own: DetokenizeFields = typed(&survey(body, |_, _| Ok(()))?)?;
    check_ids("tokens", own.tokens.count)?;
    Ok((own.model, own.tokens.items))
}

/// `POST /sleep` may say its level in the body, as a number or as kvcached's controller does: `{"level": "1"}`.
pub(super) fn sleep_level(body: &[u8]) -> Result<Option<u8>, ApiError> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Ok(None);
    }
    let fields: SleepFields = typed(&survey(body, |_, _| Ok(()))?)?;
    let level = match fields.level {
        None => return Ok(None),
        Some(Plain::Id(level)) => u8::try_from(level).ok(),
        Some(Plain::Text(text)) => text.trim().parse().ok(),
        Some(Plain::Ids(_) | Plain::Other) => None,
    };
    level.map(Some).ok_or_else(|| ApiError::invalid("level", "level is not a sleep level: give 1 or 2"))
}

#[derive(Deserialize)]
struct CompletionFields {
    prompt: PromptField,
    logprobs: Option<u64>,
    add_special_tokens: Option<bool>,
}

/// What is to be continued: as much of it as may be, and how much there is.
struct PromptField {
    prompts: Prompts,
    count: usize,
    /// In all prompts, where they are ids.
    ids: usize,
}

impl<'de> Deserialize<'de> for PromptField {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptVisitor)
    }
}

struct PromptVisitor;

impl<'de> Visitor<'de> for PromptVisitor {
    type Value = PromptField;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, a list of strings, a list of token ids, or a list of such lists")
    }

    fn visit_str<E>(self, text: &str) -> Result<PromptField, E> {
        Ok(PromptField { prompts: Prompts::Texts(vec![text.to_owned()]), count: 1, ids: 0 })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<PromptField, A::Error> {
        let mixed = || A::Error::invalid_type(Unexpected::Other("a list of something else"), &self);
        let (mut texts, mut lists, mut own, mut ids) = (Vec::new(), Vec::new(), Vec::new(), 0);
        // What there are too many of is only counted.
        while texts.len() + lists.len() <= MAX_PROMPTS && ids <= MAX_IDS {
            match seq.next_element()? {
                Some(Plain::Text(text)) if lists.is_empty() && own.is_empty() => texts.push(text),
                Some(Plain::Ids(list)) if texts.is_empty() && own.is_empty() => {
                    ids += list.count;
                    lists.push(list.items);
                }
                Some(Plain::Id(id)) if texts.is_empty() && lists.is_empty() => {
                    ids += 1;
                    own.push(id);
                }
                Some(_) => return Err(mixed()),
                None => break,
            }
        }
        let mut more = 0;
        while seq.next_element::<IgnoredAny>()?.is_some() {
            more += 1;
        }
        Ok(if !texts.is_empty() {
            PromptField { count: texts.len() + more, prompts: Prompts::Texts(texts), ids }
        } else if !lists.is_empty() {
            PromptField { count: lists.len() + more, prompts: Prompts::Tokens(lists), ids }
        } else {
            PromptField { count: 1, prompts: Prompts::Tokens(vec![own]), ids: ids + more }
        })
    }
}

#[derive(Deserialize)]
struct TokenizeFields {
    model: Option<String>,
    prompt: Option<String>,
    add_special_tokens: Option<bool>,
}

#[derive(Deserialize)]
struct DetokenizeFields {
    model: Option<String>,
    tokens: AtMost<u32, MAX_IDS>,
}

#[derive(Deserialize)]
struct ChatFields {
    max_completion_tokens: Option<u64>,
    logprobs: Option<bool>,
    top_logprobs: Option<u64>,
    add_special_tokens: Option<bool>,
}

#[derive(Deserialize)]
struct ConversationFields<'a> {
    #[serde(borrow)]
    messages: AtMost<MessageField<'a>, MAX_MESSAGES>,
    add_generation_prompt: Option<bool>,
    #[serde(borrow)]
    chat_template_kwargs: Option<&'a RawValue>,
}

impl ConversationFields<'_> {
    fn checked(self) -> Result<Prompts, ApiError> {
        let count = self.messages.count;
        if count == 0 {
            return Err(ApiError::invalid("messages", "messages is empty: give at least one message"));
        }
        if count > MAX_MESSAGES {
            let message = format!("messages has {count} messages: give at most {MAX_MESSAGES}");
            return Err(ApiError::invalid("messages", message));
        }
        let messages = self.messages.items.into_iter().enumerate();
        let messages = messages.map(|(at, message)| message.checked(at)).collect::<Result<Vec<_>, _>>()?;
        let options = ChatOptions {
            add_generation_prompt: self.add_generation_prompt.unwrap_or(true),
            variables: self.chat_template_kwargs.map(variables).transpose()?.unwrap_or_default(),
        };
        Ok(Prompts::Chat(messages, options))
    }
}

/// The variables of a template. Its language takes any value, so their length is bounded; their depth is by the reader of JSON.
fn variables(written: &RawValue) -> Result<serde_json::Map<String, serde_json::Value>, ApiError> {
    const NAME: &str = "chat_template_kwargs";
    let length = written.get().len();
    if length > MAX_VARIABLES_BYTES {
        let message = format!("{NAME} has {length} bytes: give at most {MAX_VARIABLES_BYTES}");
        return Err(ApiError::invalid(NAME, message));
    }
    serde_json::from_str(written.get()).map_err(|error| ApiError::invalid(NAME, format!("{NAME}: {error}")))
}

#[derive(Deserialize)]
struct MessageField<'a> {
    role: String,
    #[serde(default)]
    content: Option<ContentField>,
    name: Option<String>,
    #[serde(borrow)]
    tool_calls: Option<&'a RawValue>,
    #[serde(borrow)]
    function_call: Option<&'a RawValue>,
}

/// What was said, its parts together.
struct ContentField {
    text: String,
    /// The first part that is no text: where, and of what type.
    other: Option<(usize, String)>,
}

impl<'de> Deserialize<'de> for ContentField {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ContentVisitor)
    }
}

struct ContentVisitor;

impl<'de> Visitor<'de> for ContentVisitor {
    type Value = ContentField;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of parts {\"type\": \"text\", \"text\": ...}")
    }

    fn visit_str<E>(self, text: &str) -> Result<ContentField, E> {
        Ok(ContentField { text: text.to_owned(), other: None })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<ContentField, A::Error> {
        let (mut all, mut other, mut index) = (String::new(), None, 0);
        while let Some(PartField { kind, text }) = seq.next_element()? {
            match text {
                Some(text) if kind == "text" => {
                    if index > 0 {
                        all.push('\n');
                    }
                    all += &text;
                }
                _ if other.is_none() => other = Some((index, kind.into_owned())),
                _ => {}
            }
            index += 1;
        }
        Ok(ContentField { text: all, other })
    }
}

#[derive(Deserialize)]
struct PartField<'a> {
    #[serde(rename = "type", borrow)]
    kind: Cow<'a, str>,
    #[serde(borrow)]
    text: Option<Cow<'a, str>>,
}

impl MessageField<'_> {
    fn checked(self, at: usize) -> Result<ChatMessage, ApiError> {
        // A template would write them into the prompt.
        for (name, value) in [("tool_calls", self.tool_calls), ("function_call", self.function_call)] {
            if value.is_some_and(|value| !asks_nothing(value, &["[]", "{}"])) {
                return Err(unsupported(&format!("messages[{at}].{name}")));
            }
        }
        let content = match self.content {
            None => String::new(),
            Some(ContentField { text, other: None }) => text,
            Some(ContentField { other: Some((index, kind)), .. }) => {
                let place = format!("messages[{at}].content[{index}]");
                let message =
                    format!("{place} is of type {kind:?}: this server reads parts of type \"text\", with a text");
                return Err(ApiError::invalid(place, message));
            }
        };
        Ok(ChatMessage { role: self.role, content, name: self.name })
    }
}

#[derive(Deserialize)]
struct CommonFields {
    model: Option<String>,
    max_tokens: Option<u64>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    seed: Option<i64>,
    stop: Option<StopField>,
    stop_token_ids: Option<AtMost<u32, MAX_STOP_TOKENS>>,
    ignore_eos: Option<bool>,
    cache_salt: Option<String>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
}

/// As many stop strings as there may be and one more, so that too many are seen.
struct StopField(Vec<String>);

impl<'de> Deserialize<'de> for StopField {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(StopVisitor)
    }
}

struct StopVisitor;

impl<'de> Visitor<'de> for StopVisitor {
    type Value = StopField;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of strings")
    }

    fn visit_str<E>(self, text: &str) -> Result<StopField, E> {
        Ok(StopField(vec![text.to_owned()]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<StopField, A::Error> {
        let mut stops = Vec::new();
        while let Some(element) = seq.next_element()? {
            match element {
                Plain::Text(text) if stops.len() <= MAX_STOPS => stops.push(text),
                Plain::Text(_) => {}
                _ => return Err(A::Error::invalid_type(Unexpected::Other("a list of something else"), &self)),
            }
        }
        Ok(StopField(stops))
    }
}

#[derive(Default, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

#[derive(Deserialize)]
struct SleepFields {
    level: Option<Plain>,
}

/// More ids than a request may have are counted, not kept.
pub(super) fn check_ids(name: &'static str, count: usize) -> Result<(), ApiError> {
    if count > MAX_IDS {
        return Err(ApiError::invalid(
            name,
            format!("{name} has {count} token ids: give at most {MAX_IDS} in a request"),
        ));
    }
    Ok(())
}

fn job(fields: CommonFields, prompts: Prompts, defaults: SamplingDefaults) -> Result<Job, ApiError> {
    let stops = fields.stop.map(|StopField(stops)| stops).unwrap_or_default();
    if stops.len() > MAX_STOPS || stops.iter().any(|stop| stop.len() > MAX_STOP_BYTES) {
        let message = format!("stop takes at most {MAX_STOPS} strings of at most {MAX_STOP_BYTES} bytes");
        return Err(ApiError::invalid("stop", message));
    }
    let temperature = in_range("temperature", fields.temperature, 0.0, 2.0)?.unwrap_or(defaults.temperature);
    let top_p = in_range("top_p", fields.top_p, f64::from(f32::MIN_POSITIVE), 1.0)?.unwrap_or(defaults.top_p);
    let (stop_tokens, count) = fields.stop_token_ids.map(|ids| (ids.items, ids.count)).unwrap_or_default();
    if count > MAX_STOP_TOKENS {
        let message = format!("stop_token_ids has {count} ids: give at most {MAX_STOP_TOKENS}");
        return Err(ApiError::invalid("stop_token_ids", message));
    }
    Ok(Job {
        model: fields.model,
        prompts,
        // Any 64 bits are a seed.
        sampling: Sampling { temperature, top_p, seed: fields.seed.map(i64::cast_unsigned) },
        max_tokens: fields.max_tokens.map(|most| at_least_one("max_tokens", most)).transpose()?,
        stops,
        stop_tokens,
        ignore_eos: fields.ignore_eos.unwrap_or(false),
        logprobs: None,
        cache_salt: fields.cache_salt.map(checked_salt).transpose()?,
        stream: fields.stream.unwrap_or(false),
        include_usage: fields.stream_options.unwrap_or_default().include_usage.unwrap_or(false),
    })
}

fn in_range(name: &'static str, value: Option<f64>, least: f64, most: f64) -> Result<Option<f32>, ApiError> {
    match value {
        None => Ok(None),
        #[expect(clippy::cast_possible_truncation, reason = "a number of at most 2, to the precision it is used in")]
        Some(value) if (least..=most).contains(&value) => Ok(Some(value as f32)),
        Some(value) => {
            let range = if least > 0.0 { format!("above 0 and at most {most}") } else { format!("{least} to {most}") };
            Err(ApiError::invalid(name, format!("{name} is {value}: give a number {range}")))
        }
    }
}

fn at_least_one(name: &'static str, value: u64) -> Result<u64, ApiError> {
    if value == 0 {
        Err(ApiError::invalid(name, format!("{name} is 0: ask for at least one token")))
    } else {
        Ok(value)
    }
}

fn checked_logprobs(name: &'static str, count: u64) -> Result<u8, ApiError> {
    let checked = u8::try_from(count).ok().filter(|&count| u64::from(count) <= MAX_LOGPROBS);
    checked.ok_or_else(|| ApiError::invalid(name, format!("{name} is {count}: at most {MAX_LOGPROBS} are named")))
}

fn checked_salt(salt: String) -> Result<String, ApiError> {
    if salt.is_empty() || salt.chars().count() > MAX_SALT_LETTERS {
        let message = format!("cache_salt is empty or too long: give 1 to {MAX_SALT_LETTERS} letters, or leave it out");
        return Err(ApiError::invalid("cache_salt", message));
    }
    Ok(salt)
}

/// Fields that we cannot honour, with the values that ask for nothing.
const UNSUPPORTED: &[(&str, &[&str])] = &[
    ("n", &["1"]),
    ("best_of", &["1"]),
    ("echo", &["false"]),
    ("suffix", &["\"\""]),
    ("logit_bias", &["{}"]),
    ("allowed_token_ids", &[]),
    ("bad_words", &["[]"]),
    ("frequency_penalty", &["0", "0.0"]),
    ("presence_penalty", &["0", "0.0"]),
    ("repetition_penalty", &["1", "1.0"]),
    ("top_k", &["0", "-1"]),
    ("min_p", &["0", "0.0"]),
    ("min_tokens", &["0"]),
    ("use_beam_search", &["false"]),
    ("include_stop_str_in_output", &["false"]),
    ("skip_special_tokens", &["true"]),
    ("truncate_prompt_tokens", &[]),
    ("chat_template", &[]),
    ("documents", &["[]"]),
    ("continue_final_message", &["false"]),
    ("prompt_logprobs", &[]),
    ("tools", &["[]"]),
    ("tool_choice", &["\"none\""]),
    ("functions", &["[]"]),
    ("response_format", &["{\"type\":\"text\"}"]),
    ("modalities", &["[\"text\"]"]),
    ("audio", &[]),
    ("structured_outputs", &[]),
    ("guided_json", &[]),
    ("guided_regex", &[]),
    ("guided_choice", &[]),
    ("guided_grammar", &[]),
];

fn refuse_unsupported(name: &str, value: &RawValue) -> Result<(), ApiError> {
    let Some((_, neutral)) = UNSUPPORTED.iter().find(|(unsupported, _)| *unsupported == name) else { return Ok(()) };
    if asks_nothing(value, neutral) {
        return Ok(());
    }
    if name == "n" {
        let message = format!(
            "n is {value}: this server makes one answer for each prompt (n = 1); send the request several times"
        );
        return Err(ApiError::new(StatusCode::BAD_REQUEST, "unsupported_parameter", message).about(name));
    }
    Err(unsupported(name))
}

fn unsupported(name: &str) -> ApiError {
    let message = format!("{name} is not supported by this server: leave it out");
    ApiError::new(StatusCode::BAD_REQUEST, "unsupported_parameter", message).about(name)
}

/// Whether special tokens are added is the model's business; a request may say what is done anyway.
fn refuse_special(asked: Option<bool>, done: bool) -> Result<(), ApiError> {
    if asked.is_some_and(|asked| asked != done) { Err(unsupported("add_special_tokens")) } else { Ok(()) }
}
