//! What the mock answers, step by step.

use std::time::Duration;

use serde_json::Value;

use crate::load::endpoint::Api;

/// A request as the mock sees it.
#[derive(Clone, Debug)]
pub struct MockRequest {
    /// Counted from 0 in the order of arrival.
    pub ordinal: usize,
    /// The dialect.
    pub api: Api,
    /// The prompt; of token numbers, their list.
    pub prompt: String,
    /// Its tokens: numbers, or words.
    pub prompt_tokens: u64,
    /// Longest answer.
    pub max_tokens: u32,
    /// Whether the count of tokens is wanted.
    pub wants_usage: bool,
    /// All of it.
    pub body: Value,
}

impl MockRequest {
    pub(super) fn new(ordinal: usize, api: Api, body: Value) -> Self {
        let prompt = match api {
            Api::Completions => &body["prompt"],
            Api::Chat => &body["messages"][0]["content"],
            Api::SglangGenerate if body["text"].is_null() => &body["input_ids"],
            Api::SglangGenerate => &body["text"],
        };
        let (prompt, prompt_tokens) = match prompt {
            Value::String(text) => (text.clone(), text.split_whitespace().count()),
            Value::Array(tokens) => (prompt.to_string(), tokens.len()),
            _ => (String::new(), 0),
        };
        let max_tokens = match api {
            Api::Completions | Api::Chat => &body["max_tokens"],
            Api::SglangGenerate => &body["sampling_params"]["max_new_tokens"],
        };
        Self {
            ordinal,
            api,
            prompt,
            prompt_tokens: u64::try_from(prompt_tokens).unwrap_or(u64::MAX),
            max_tokens: max_tokens.as_u64().and_then(|tokens| u32::try_from(tokens).ok()).unwrap_or(16),
            wants_usage: body["stream_options"]["include_usage"].as_bool().unwrap_or(false),
            body,
        }
    }
}

/// An answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Script {
    /// Anything but 200 is an error, whose sentence is the text of the steps.
    pub status: u16,
    /// What happens, in this order.
    pub steps: Vec<Step>,
    /// And then.
    pub ending: Ending,
}

/// Something that the mock does.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Waits.
    Wait(Duration),
    /// One event with so many tokens.
    Tokens {
        /// What they say.
        text: String,
        /// How many they are.
        count: u32,
    },
    /// An event with a choice and no text: what a chat opens with.
    Opening,
    /// A comment, as servers send to keep a connection open.
    Comment,
    /// An error in the middle of a stream.
    Error(String),
    /// Bytes that need not be an event.
    Raw(Vec<u8>),
}

/// How an answer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// With a reason, the count if it is wanted, and `[DONE]`.
    Done,
    /// The same, and the connection is closed, which the client may learn only when it wants to use it again.
    Close,
    /// As a stream that is over, with nothing said about it.
    Silence,
    /// In the middle of a chunk.
    Disconnect,
    /// Never.
    Stall,
}

impl Script {
    /// These steps, and a proper end.
    pub fn new(steps: Vec<Step>) -> Self {
        Self { status: 200, steps, ending: Ending::Done }
    }

    /// An error.
    pub fn error(status: u16, message: &str) -> Self {
        Self { status, steps: vec![Step::Error(message.to_owned())], ending: Ending::Done }
    }

    /// One event that says this.
    pub fn saying(text: &str) -> Self {
        let count = u32::try_from(text.split_whitespace().count()).unwrap_or(u32::MAX);
        Self::new(vec![Step::Tokens { text: text.to_owned(), count }])
    }
}

/// How long tokens take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// To the first.
    pub first: Duration,
    /// And longer for each token of the prompt.
    pub per_prompt_token: Duration,
    /// From each to the next.
    pub gap: Duration,
    /// How many come in one event.
    pub tokens_per_chunk: u32,
}

impl Timing {
    /// Everything at once.
    pub const IMMEDIATE: Self =
        Self { first: Duration::ZERO, per_prompt_token: Duration::ZERO, gap: Duration::ZERO, tokens_per_chunk: 1 };

    /// The answer to a request, as long as it may be.
    pub fn script(&self, request: &MockRequest) -> Script {
        let mut steps = Vec::new();
        let wait = |steps: &mut Vec<Step>, time: Duration| {
            if !time.is_zero() {
                steps.push(Step::Wait(time));
            }
        };
        let prompt_tokens = u32::try_from(request.prompt_tokens).unwrap_or(u32::MAX);
        wait(&mut steps, self.first + self.per_prompt_token.saturating_mul(prompt_tokens));
        let mut made = 0;
        while made < request.max_tokens {
            let count = self.tokens_per_chunk.clamp(1, request.max_tokens - made);
            if made > 0 {
                wait(&mut steps, self.gap.saturating_mul(count));
            }
            steps.push(Step::Tokens { text: " token".repeat(usize::try_from(count).unwrap_or(1)), count });
            made += count;
        }
        Script::new(steps)
    }
}
