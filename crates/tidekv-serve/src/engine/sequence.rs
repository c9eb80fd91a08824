//! One request inside the engine.
//!
//! | state    | where            | blocks                    | left by                                        |
//! |----------|------------------|---------------------------|------------------------------------------------|
//! | waiting  | the queue        | none                      | a row is free and memory is within reach       |
//! | running  | a row            | those of `computed` tokens| its end, a failure, nobody reading, preemption |
//!
//! Preemption forgets what was computed, not what was said: `tokens` keeps the answer so far, and the request goes on
//! behind it when it has been computed again.

use std::time::Instant;

use tidekv_batch::SeqId;

use super::prefix::PrefixName;
use super::sampling;
use crate::handle::{Event, EventSender, FinishReason, GenerateError, GenerateRequest, Usage};

/// A request that was accepted.
#[derive(Debug)]
pub(super) struct Sequence {
    /// Also its age: older ones have smaller numbers.
    pub(super) id: SeqId,
    /// When the engine took it.
    pub(super) accepted: Instant,
    /// The prompt and what was made so far.
    pub(super) tokens: Vec<u32>,
    /// Tokens whose K and V are in its blocks.
    pub(super) computed: u32,
    /// Full blocks that have a name, and the name of the last of them.
    pub(super) named: u32,
    pub(super) name: PrefixName,
    request: GenerateRequest,
    prompt_tokens: u32,
    cached_tokens: Option<u32>,
    seed: u64,
    events: EventSender,
}

impl Sequence {
    /// `seed` is for requests that named none.
    pub(super) fn new(id: SeqId, mut request: GenerateRequest, seed: u64, events: EventSender) -> Self {
        let tokens = std::mem::take(&mut request.prompt.tokens);
        Self {
            id,
            accepted: Instant::now(),
            prompt_tokens: u32::try_from(tokens.len()).expect("prompts are no longer than a context"),
            tokens,
            computed: 0,
            named: 0,
            name: PrefixName::default(),
            seed: request.sampling.seed.unwrap_or(seed),
            request,
            cached_tokens: None,
            events,
        }
    }

    /// Tokens in all.
    pub(super) fn len(&self) -> u32 {
        u32::try_from(self.tokens.len()).expect("no longer than a context")
    }

    /// Tokens that are not computed yet; at least one until it ends.
    pub(super) fn remaining(&self) -> u32 {
        self.len() - self.computed
    }

    /// Tokens made so far.
    pub(super) fn made(&self) -> u32 {
        self.len() - self.prompt_tokens
    }

    /// Whom it shares cached beginnings with.
    pub(super) fn cache_salt(&self) -> Option<&str> {
        self.request.cache_salt.as_deref()
    }

    /// Whether nobody reads it any more.
    pub(super) fn is_cancelled(&self) -> bool {
        self.events.is_cancelled()
    }

    /// The batch has it; `tokens` of its text were known. What counts for its usage is the first time. Says how many
    /// of the prompt's tokens that were, the first time.
    pub(super) fn admitted(&mut self, tokens: u32) -> Option<u32> {
        if self.cached_tokens.is_some() {
            return None;
        }
        self.cached_tokens = Some(tokens);
        self.events.tell_cached(tokens);
        Some(tokens)
    }

    /// It lost its row and begins again from its tokens.
    pub(super) fn preempted(&mut self) {
        self.computed = 0;
        self.named = 0;
        self.name = PrefixName::default();
    }

    /// Whether the next token takes more than the likeliest.
    pub(super) fn needs_logits(&self) -> bool {
        self.request.sampling.temperature > 0.0 || self.request.logprobs.is_some()
    }

    /// Chooses the next token, from the logits if it [needs](Self::needs_logits) them, and says it. Some when that was the last.
    pub(super) fn advance(&mut self, likeliest: u32, logits: Option<&[f32]>) -> Option<FinishReason> {
        let made = self.made();
        let id = logits.map_or(likeliest, |logits| sampling::choose(logits, &self.request.sampling, self.seed, made));
        let logprob = self.request.logprobs.zip(logits).map(|(top, logits)| sampling::logprob(logits, id, top));
        self.tokens.push(id);
        let is_read = self.events.send(Event::Token { id, logprob });
        if !is_read {
            Some(FinishReason::Cancelled)
        } else if !self.request.ignore_eos && self.request.stop_tokens.contains(&id) {
            Some(FinishReason::Stop)
        } else if made + 1 >= self.request.max_tokens {
            Some(FinishReason::Length)
        } else {
            None
        }
    }

    /// Its last words.
    pub(super) fn finish(self, reason: FinishReason) {
        let usage = Usage {
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens.unwrap_or(0),
            completion_tokens: self.made(),
        };
        self.events.send(Event::Done { reason, usage });
    }

    /// The same when it went wrong.
    pub(super) fn fail(self, error: GenerateError) {
        self.events.send(Event::Failed(error));
    }
}
