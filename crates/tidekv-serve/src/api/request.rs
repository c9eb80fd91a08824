//! What clients send, checked: from bytes to a [`Job`], or a refusal that names the field.
//!
//! ```text
//!   bytes ── JSON object ── nothing in it that we cannot do ── typed fields ── in range ──> Job
//! ```
//!
//! A field that would change the answer and that we do not know how to honour is refused, unless it has the value that changes
//! nothing. Fields that only carry notes (`user`, `metadata`, ...) are ignored, as every server of this API does.

use axum::http::StatusCode;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::error::ApiError;
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
    let fields = object(body)?;
    refuse_unsupported(&fields)?;
    let own: CompletionFields = typed(&fields)?;
    let prompts = match own.prompt {
        PromptField::Text(text) => Prompts::Texts(vec![text]),
        PromptField::Texts(texts) => Prompts::Texts(texts),
        PromptField::Tokens(tokens) => Prompts::Tokens(vec![tokens]),
        PromptField::ManyTokens(several) => Prompts::Tokens(several),
    };
    if !matches!(prompts, Prompts::Tokens(_)) {
        refuse_special(own.add_special_tokens, true)?;
    }
    let count = match &prompts {
        Prompts::Texts(texts) => texts.len(),
        Prompts::Tokens(several) => several.len(),
        Prompts::Chat(..) => 1,
    };
    if !(1..=MAX_PROMPTS).contains(&count) {
        return Err(ApiError::invalid("prompt", format!("prompt has {count} entries: give 1 to {MAX_PROMPTS}")));
    }
    let mut job = job(typed(&fields)?, prompts, tokenizer.defaults())?;
    job.max_tokens = Some(job.max_tokens.unwrap_or(COMPLETION_TOKENS));
    job.logprobs = own.logprobs.map(|count| checked_logprobs("logprobs", count)).transpose()?;
    Ok(job)
}

/// `POST /v1/chat/completions`.
pub(super) fn chat(body: &[u8], tokenizer: &Tokenizer) -> Result<Job, ApiError> {
    let fields = object(body)?;
    refuse_unsupported(&fields)?;
    let own: ChatFields = typed(&fields)?;
    refuse_special(own.add_special_tokens, tokenizer.adds_special_to_chats())?;
    let prompts = typed::<ConversationFields>(&fields)?.checked()?;
    let mut job = job(typed(&fields)?, prompts, tokenizer.defaults())?;
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
    let fields = object(body)?;
    refuse_unsupported(&fields)?;
    let own: TokenizeFields = typed(&fields)?;
    let prompts = match own.prompt {
        Some(text) => Prompts::Texts(vec![text]),
        None if fields.contains_key("messages") => {
            refuse_special(own.add_special_tokens, tokenizer.adds_special_to_chats())?;
            typed::<ConversationFields>(&fields)?.checked()?
        }
        None => return Err(ApiError::invalid("prompt", "there is nothing to tokenise: give prompt or messages")),
    };
    Ok((own.model, prompts, own.add_special_tokens.unwrap_or(true)))
}

/// `POST /detokenize`.
pub(super) fn detokenize(body: &[u8]) -> Result<(Option<String>, Vec<u32>), ApiError> {
    let own: DetokenizeFields = typed(&object(body)?)?;
    Ok((own.model, own.tokens))
}

/// `POST /sleep` may say its level in the body, as a number or as kvcached's controller does: `{"level": "1"}`.
pub(super) fn sleep_level(body: &[u8]) -> Result<Option<u8>, ApiError> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Ok(None);
    }
    let fields: SleepFields = typed(&object(body)?)?;
    let level = match fields.level {
        None => return Ok(None),
        Some(LevelField::Number(level)) => u8::try_from(level).ok(),
        Some(LevelField::Text(text)) => text.trim().parse().ok(),
    };
    level.map(Some).ok_or_else(|| ApiError::invalid("level", "level is not a sleep level: give 1 or 2"))
}

#[derive(Deserialize)]
struct CompletionFields {
    prompt: PromptField,
    logprobs: Option<u64>,
    add_special_tokens: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a string, a list of strings, a list of token ids, or a list of such lists")]
enum PromptField {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    ManyTokens(Vec<Vec<u32>>),
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
    tokens: Vec<u32>,
}

#[derive(Deserialize)]
struct ChatFields {
    max_completion_tokens: Option<u64>,
    logprobs: Option<bool>,
    top_logprobs: Option<u64>,
    add_special_tokens: Option<bool>,
}

#[derive(Deserialize)]
struct ConversationFields {
    messages: Vec<MessageField>,
    add_generation_prompt: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
}

impl ConversationFields {
    fn checked(self) -> Result<Prompts, ApiError> {
        if self.messages.is_empty() {
            return Err(ApiError::invalid("messages", "messages is empty: give at least one message"));
        }
        let messages = self.messages.into_iter().enumerate();
        let messages = messages.map(|(at, message)| message.checked(at)).collect::<Result<Vec<_>, _>>()?;
        let options = ChatOptions {
            add_generation_prompt: self.add_generation_prompt.unwrap_or(true),
            variables: self.chat_template_kwargs.unwrap_or_default(),
        };
        Ok(Prompts::Chat(messages, options))
    }
}

#[derive(Deserialize)]
struct MessageField {
    role: String,
    #[serde(default)]
    content: Option<ContentField>,
    name: Option<String>,
    tool_calls: Option<Value>,
    function_call: Option<Value>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of parts {\"type\": \"text\", \"text\": ...}")]
enum ContentField {
    Text(String),
    Parts(Vec<PartField>),
}

#[derive(Deserialize)]
struct PartField {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

impl MessageField {
    fn checked(self, at: usize) -> Result<ChatMessage, ApiError> {
        // A template would write them into the prompt.
        for (name, value) in [("tool_calls", &self.tool_calls), ("function_call", &self.function_call)] {
            if value.as_ref().is_some_and(|value| !asks_nothing(value, &["[]", "{}"])) {
                return Err(unsupported(&format!("messages[{at}].{name}")));
            }
        }
        let content = match self.content {
            None => String::new(),
            Some(ContentField::Text(text)) => text,
            Some(ContentField::Parts(parts)) => {
                let text = |(index, part): (usize, PartField)| match part {
                    PartField { kind, text: Some(text) } if kind == "text" => Ok(text),
                    PartField { kind, .. } => Err(ApiError::invalid(
                        format!("messages[{at}].content[{index}]"),
                        format!(
                            "messages[{at}].content[{index}] is of type {kind:?}: this server reads parts of type \"text\", with a text"
                        ),
                    )),
                };
                parts.into_iter().enumerate().map(text).collect::<Result<Vec<_>, _>>()?.join("\n")
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
    stop_token_ids: Option<Vec<u32>>,
    ignore_eos: Option<bool>,
    cache_salt: Option<String>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
enum StopField {
    One(String),
    Many(Vec<String>),
}

#[derive(Default, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

#[derive(Deserialize)]
struct SleepFields {
    level: Option<LevelField>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a number")]
enum LevelField {
    Number(u64),
    Text(String),
}

fn object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    let wrong = |what: String| ApiError::new(StatusCode::BAD_REQUEST, "invalid_json", what);
    match serde_json::from_slice(body) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(_) => Err(wrong("the body is JSON, but not an object: send {\"model\": ..., ...}".to_owned())),
        Err(error) => Err(wrong(format!("the body is not JSON: {error}"))),
    }
}

fn typed<T: DeserializeOwned>(fields: &Map<String, Value>) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(fields).map_err(|error| {
        let path = error.path().to_string();
        let what = error.into_inner().to_string();
        match path.as_str() {
            // A field that is missing at the top: the message names it.
            "." => ApiError::invalid(quoted(&what).unwrap_or_default(), what),
            _ => ApiError::invalid(path.clone(), format!("{path}: {what}")),
        }
    })
}

/// The name in a message such as "missing field `prompt`".
fn quoted(message: &str) -> Option<String> {
    message.split('`').nth(1).map(str::to_owned)
}

fn job(fields: CommonFields, prompts: Prompts, defaults: SamplingDefaults) -> Result<Job, ApiError> {
    let stops = match fields.stop {
        None => Vec::new(),
        Some(StopField::One(stop)) => vec![stop],
        Some(StopField::Many(stops)) => stops,
    };
    if stops.len() > MAX_STOPS || stops.iter().any(|stop| stop.len() > MAX_STOP_BYTES) {
        let message = format!("stop takes at most {MAX_STOPS} strings of at most {MAX_STOP_BYTES} bytes");
        return Err(ApiError::invalid("stop", message));
    }
    let temperature = in_range("temperature", fields.temperature, 0.0, 2.0)?.unwrap_or(defaults.temperature);
    let top_p = in_range("top_p", fields.top_p, f64::from(f32::MIN_POSITIVE), 1.0)?.unwrap_or(defaults.top_p);
    let stop_tokens = fields.stop_token_ids.unwrap_or_default();
    if stop_tokens.len() > MAX_STOP_TOKENS {
        let message = format!("stop_token_ids has {} ids: give at most {MAX_STOP_TOKENS}", stop_tokens.len());
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

fn refuse_unsupported(fields: &Map<String, Value>) -> Result<(), ApiError> {
    for &(name, neutral) in UNSUPPORTED {
        match fields.get(name) {
            Some(value) if !asks_nothing(value, neutral) => {
                return Err(match name {
                    "n" => {
                        let message = format!(
                            "n is {value}: this server makes one answer for each prompt (n = 1); send the request several times"
                        );
                        ApiError::new(StatusCode::BAD_REQUEST, "unsupported_parameter", message).about(name)
                    }
                    _ => unsupported(name),
                });
            }
            _ => {}
        }
    }
    Ok(())
}

fn asks_nothing(value: &Value, neutral: &[&str]) -> bool {
    value.is_null() || neutral.contains(&value.to_string().as_str())
}

fn unsupported(name: &str) -> ApiError {
    let message = format!("{name} is not supported by this server: leave it out");
    ApiError::new(StatusCode::BAD_REQUEST, "unsupported_parameter", message).about(name)
}

/// Whether special tokens are added is the model's business; a request may say what is done anyway.
fn refuse_special(asked: Option<bool>, done: bool) -> Result<(), ApiError> {
    if asked.is_some_and(|asked| asked != done) { Err(unsupported("add_special_tokens")) } else { Ok(()) }
}
