//! What clients get: OpenAI's objects, whole or in chunks.

use serde::Serialize;

use super::answer::Piece;
use crate::handle::{FinishReason, TokenLogprob, Usage};
use crate::tokenizer::Tokenizer;

/// Which of the two pages is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Text,
    Chat,
}

/// What all objects of one answer have in common.
#[derive(Clone, Debug)]
pub(super) struct Envelope {
    pub(super) kind: Kind,
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) model: String,
}

#[derive(Serialize)]
pub(super) struct Body<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<Choice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<UsageBody>,
}

#[derive(Serialize)]
pub(super) struct Choice {
    index: usize,
    #[serde(flatten)]
    said: Said,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Said {
    Text(String),
    Message(Message),
    Delta(Message),
}

#[derive(Serialize)]
struct Message {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
}

#[derive(Clone, Copy, Serialize)]
pub(super) struct UsageBody {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    prompt_tokens_details: PromptDetails,
}

#[derive(Clone, Copy, Serialize)]
struct PromptDetails {
    cached_tokens: u64,
}

#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum Logprobs {
    Chat { content: Vec<ChatLogprob> },
    Text(TextLogprobs),
}

#[derive(Serialize)]
pub(super) struct ChatLogprob {
    #[serde(flatten)]
    token: NamedLogprob,
    top_logprobs: Vec<NamedLogprob>,
}

#[derive(Serialize)]
struct NamedLogprob {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

#[derive(Default, Serialize)]
pub(super) struct TextLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    top_logprobs: Vec<serde_json::Map<String, serde_json::Value>>,
    text_offset: Vec<usize>,
}

impl Envelope {
    /// An answer as a whole.
    pub(super) fn whole(&self, choices: Vec<Choice>, usage: UsageBody) -> Body<'_> {
        let object = match self.kind {
            Kind::Text => "text_completion",
            Kind::Chat => "chat.completion",
        };
        self.body(object, choices, Some(usage))
    }

    /// A part of one; without a choice it carries the usage.
    pub(super) fn chunk(&self, choice: Option<Choice>, usage: Option<UsageBody>) -> Body<'_> {
        let object = match self.kind {
            Kind::Text => "text_completion",
            Kind::Chat => "chat.completion.chunk",
        };
        self.body(object, choice.into_iter().collect(), usage)
    }

    fn body(&self, object: &'static str, choices: Vec<Choice>, usage: Option<UsageBody>) -> Body<'_> {
        Body { id: &self.id, object, created: self.created, model: &self.model, choices, usage }
    }
}

impl Choice {
    /// A whole answer.
    pub(super) fn whole(
        kind: Kind,
        index: usize,
        text: String,
        logprobs: Option<Logprobs>,
        finish: FinishReason,
    ) -> Self {
        let said = match kind {
            Kind::Text => Said::Text(text),
            Kind::Chat => Said::Message(Message { role: Some("assistant"), content: Some(text) }),
        };
        Self { index, said, logprobs, finish_reason: Some(reason(finish)) }
    }

    /// Whose turn it is: the first chunk of a chat.
    pub(super) fn opening(index: usize) -> Self {
        let message = Message { role: Some("assistant"), content: Some(String::new()) };
        Self { index, said: Said::Delta(message), logprobs: None, finish_reason: None }
    }

    /// What was said since the chunk before.
    pub(super) fn part(
        kind: Kind,
        index: usize,
        text: String,
        logprobs: Option<Logprobs>,
        finish: Option<FinishReason>,
    ) -> Self {
        let said = match kind {
            Kind::Text => Said::Text(text),
            Kind::Chat => {
                let content = if text.is_empty() && finish.is_some() { None } else { Some(text) };
                Said::Delta(Message { role: None, content })
            }
        };
        Self { index, said, logprobs, finish_reason: finish.map(reason) }
    }
}

fn reason(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Cancelled => "abort",
    }
}

impl UsageBody {
    /// Of all prompts of a request together.
    pub(super) fn sum(usages: impl IntoIterator<Item = Usage>) -> Self {
        let (mut prompt_tokens, mut completion_tokens, mut cached_tokens) = (0, 0, 0);
        for usage in usages {
            prompt_tokens += u64::from(usage.prompt_tokens);
            completion_tokens += u64::from(usage.completion_tokens);
            cached_tokens += u64::from(usage.cached_tokens);
        }
        let prompt_tokens_details = PromptDetails { cached_tokens };
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details,
        }
    }
}

/// Names the tokens of one answer, piece after piece.
#[derive(Debug)]
pub(super) struct LogprobWriter {
    kind: Kind,
    /// Letters of the tokens named so far.
    offset: usize,
}

impl LogprobWriter {
    pub(super) fn new(kind: Kind) -> Self {
        Self { kind, offset: 0 }
    }

    /// The log-probabilities of a piece, when it has any.
    pub(super) fn of(&mut self, piece: &mut Piece, tokenizer: &Tokenizer) -> Option<Logprobs> {
        let tokens = std::mem::take(&mut piece.tokens);
        if tokens.is_empty() {
            return None;
        }
        Some(match self.kind {
            Kind::Chat => Logprobs::Chat {
                content: tokens.iter().map(|(id, logprob)| chat_logprob(*id, logprob, tokenizer)).collect(),
            },
            Kind::Text => {
                let mut all = TextLogprobs::default();
                for (id, logprob) in &tokens {
                    let (text, _) = tokenizer.token(*id);
                    let top = logprob.top.iter().map(|&(id, logprob)| (tokenizer.token(id).0, finite(logprob).into()));
                    all.top_logprobs.push(top.collect());
                    all.token_logprobs.push(finite(logprob.logprob));
                    all.text_offset.push(self.offset);
                    self.offset += text.chars().count();
                    all.tokens.push(text);
                }
                Logprobs::Text(all)
            }
        })
    }
}

fn chat_logprob(id: u32, logprob: &TokenLogprob, tokenizer: &Tokenizer) -> ChatLogprob {
    let named = |id: u32, logprob: f32| {
        let (token, bytes) = tokenizer.token(id);
        NamedLogprob { token, logprob: finite(logprob), bytes }
    };
    let top_logprobs = logprob.top.iter().map(|&(id, logprob)| named(id, logprob)).collect();
    ChatLogprob { token: named(id, logprob.logprob), top_logprobs }
}

/// JSON has no infinity; OpenAI writes -9999 for what cannot happen.
fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { -9999.0 }
}
