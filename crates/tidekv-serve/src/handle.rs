//! The seam between the API and the engine: what one asks, what the other answers, and nothing else.
//!
//! ```text
//!    api (asynchronous, many clients)                     engine (one thread, never waits for a client)
//!
//!      submit(GenerateRequest) ─────────────────────────>  queue
//!      Generation  <── Token, Token, ... Done | Failed ──  EventSender
//!      dropped     ───────────────────────────────────>    is_cancelled(): the blocks are freed
//! ```
//!
//! A stream of events ends in exactly one [`Event::Done`] or [`Event::Failed`]. When the engine dies in between, the
//! stream ends in [`GenerateError::EngineGone`] rather than in silence. The channel needs no bound of its own: a request
//! makes at most `max_tokens` events and one, and `max_tokens` is bounded by the model's context.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tidekv_core::share::MemoryUse;
use tidekv_core::units::Bytes;
use tokio::sync::mpsc;

use crate::config::KvMode;

/// What is to be continued.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Prompt {
    /// Ids of the model's vocabulary; at least one.
    pub tokens: Vec<u32>,
}

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the likeliest token; larger values are more even.
    pub temperature: f32,
    /// Only the likeliest tokens that have this probability together; above 0 and at most 1.
    pub top_p: f32,
    /// The same seed gives the same tokens, whoever else is served; `None` for any.
    pub seed: Option<u64>,
}

impl Sampling {
    /// Always the likeliest token.
    pub const GREEDY: Self = Self { temperature: 0.0, top_p: 1.0, seed: None };
}

/// One request to continue a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateRequest {
    /// What is to be continued.
    pub prompt: Prompt,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Most tokens to make; at least 1, and no more than the context has room for.
    pub max_tokens: u32,
    /// Tokens that end the text. The one that did is sent as the last [`Event::Token`] and counted.
    pub stop_tokens: Vec<u32>,
    /// Go on behind `stop_tokens`, up to `max_tokens`.
    pub ignore_eos: bool,
    /// Send the log-probability of each token and of this many likeliest ones (0: of the token alone).
    pub logprobs: Option<u8>,
    /// Cached beginnings are shared only among requests with the same salt, so that nobody else can tell by the time of
    /// an answer what was asked before.
    pub cache_salt: Option<String>,
}

/// How likely a token was.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// Natural logarithm of its probability, before temperature and `top_p`.
    pub logprob: f32,
    /// The likeliest tokens and theirs, likeliest first; as many as asked for.
    pub top: Vec<(u32, f32)>,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model said so: one of `stop_tokens`.
    Stop,
    /// `max_tokens` are made.
    Length,
    /// Nobody reads it any more, or the engine was told to end.
    Cancelled,
}

/// What a request cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Those of them that were not computed, because an earlier prompt began alike.
    pub cached_tokens: u32,
    /// Tokens made.
    pub completion_tokens: u32,
}

/// What an engine says of a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The next token.
    Token {
        /// Its id.
        id: u32,
        /// When it was asked for.
        logprob: Option<TokenLogprob>,
    },
    /// The last event of a request that ended well.
    Done {
        /// Why it ended.
        reason: FinishReason,
        /// What it cost.
        usage: Usage,
    },
    /// The last event of one that did not.
    Failed(GenerateError),
}

/// Why an accepted request was not finished.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// The step could not be computed. Other requests go on.
    #[error("the engine could not compute this request: {what}")]
    Compute {
        /// What the layer below said.
        what: String,
    },
    /// Memory that the request needs is gone for good, for example by a lowered limit.
    #[error(
        "the KV cache may now hold {capacity_tokens} tokens and this request needs {needed_tokens}: raise the pool's limit or ask for less"
    )]
    OutOfMemory {
        /// Tokens that the request needs at once.
        needed_tokens: u64,
        /// Tokens that fit under the limit in force.
        capacity_tokens: u64,
    },
    /// Nothing could be computed for a long time, because other pools hold the memory.
    #[error(
        "no memory came free within {} s for the {needed_tokens} tokens of this request, because other pools hold it: ask again later, or give this pool a larger share",
        waited.as_secs()
    )]
    Starved {
        /// Tokens that the request needs at once.
        needed_tokens: u64,
        /// How long nothing moved.
        waited: Duration,
    },
    /// The model was put to sleep in between.
    #[error("the model was put to sleep before this request was finished: wake it up and ask again")]
    Asleep,
    /// The server is ending and the time for draining is over.
    #[error("the server is shutting down and this request took longer than it waits: ask again elsewhere")]
    ShutDown,
    /// The device is lost: nothing can be computed until a new process is started.
    #[error("the GPU is lost to this process, and nothing can be computed until the server is started again: {what}")]
    DeviceLost {
        /// What the driver said.
        what: String,
    },
    /// The engine's thread is gone.
    #[error("the engine has stopped: its log says why, and the server must be started again")]
    EngineGone,
}

/// Why a request was not accepted. Nothing of it is kept.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// There is nothing to continue.
    #[error("the prompt is empty: give at least one token")]
    EmptyPrompt,
    /// No room for even one more token.
    #[error("the prompt has {prompt_tokens} tokens and the model's context is {context_tokens}: shorten it")]
    PromptTooLong {
        /// Tokens given.
        prompt_tokens: u64,
        /// Longest sequence.
        context_tokens: u32,
    },
    /// Prompt and answer together are longer than the context.
    #[error("the prompt has {prompt_tokens} tokens and {max_tokens} more are asked for, but the model's context is {context_tokens}: shorten the prompt or ask for at most {} tokens", u64::from(*.context_tokens).saturating_sub(*.prompt_tokens))]
    TooManyTokens {
        /// Tokens given.
        prompt_tokens: u64,
        /// Tokens asked for.
        max_tokens: u64,
        /// Longest sequence.
        context_tokens: u32,
    },
    /// Even alone on the device it would not fit.
    #[error(
        "the request needs a KV cache of {needed_tokens} tokens and the pool holds {capacity_tokens} at most: ask for less, or start the server with a larger KV budget"
    )]
    NeverFits {
        /// Prompt and answer.
        needed_tokens: u64,
        /// What the budget allows.
        capacity_tokens: u64,
    },
    /// An id outside the vocabulary.
    #[error("token {id} is not in the model's vocabulary of {vocab}")]
    UnknownToken {
        /// As given.
        id: u32,
        /// Ids are below this.
        vocab: u32,
    },
    /// A number that makes no sense.
    #[error("{field} is {value}, which is not {wanted}")]
    OutOfRange {
        /// Which.
        field: &'static str,
        /// As given.
        value: f64,
        /// What it should be.
        wanted: &'static str,
    },
    /// The model sleeps.
    #[error("the model is asleep: POST /wake_up wakes it")]
    Asleep,
    /// Too many wait already.
    #[error("{waiting} requests are waiting already, and no more than {limit} may: ask again later")]
    QueueFull {
        /// Requests that wait.
        waiting: u32,
        /// The most that may.
        limit: u32,
    },
    /// The server is ending.
    #[error("the server is shutting down: ask again elsewhere")]
    ShutDown,
    /// The device is lost: nothing can be computed until a new process is started.
    #[error("the GPU is lost to this process, and nothing can be computed until the server is started again: {what}")]
    DeviceLost {
        /// What the driver said.
        what: String,
    },
    /// The engine's thread is gone.
    #[error("the engine has stopped: its log says why, and the server must be started again")]
    EngineGone,
}

/// Why a model was not put to sleep or woken up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SleepError {
    /// There is no such level.
    #[error(
        "there is no sleep level {level}: 1 gives the KV cache back and keeps the weights, 2 drops the weights too"
    )]
    Level {
        /// As given.
        level: u8,
    },
    /// Requests are running that must end first.
    #[error("{running} requests are running: sleep when they have ended")]
    Busy {
        /// How many.
        running: u32,
    },
    /// Memory or weights could not be taken or given back.
    #[error("the memory could not be changed over: {what}")]
    Memory {
        /// What the layer below said.
        what: String,
    },
    /// The server is ending.
    #[error("the server is shutting down")]
    ShutDown,
    /// The device is lost: nothing can be computed until a new process is started.
    #[error("the GPU is lost to this process, and nothing can be computed until the server is started again: {what}")]
    DeviceLost {
        /// What the driver said.
        what: String,
    },
    /// The engine's thread is gone.
    #[error("the engine has stopped: its log says why, and the server must be started again")]
    EngineGone,
}

/// Whether an engine can answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// It can, or could if it were woken up.
    Well,
    /// Its device is lost; it refuses everything, with this reason.
    DeviceLost {
        /// What the driver said.
        what: String,
    },
    /// Its thread has ended.
    Stopped,
}

/// What an engine serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelInfo {
    /// As the model itself is called: `synthetic:tiny`, or its folder's name.
    pub name: String,
    /// Ids are below this.
    pub vocab: u32,
    /// Longest sequence, prompt and answer together.
    pub context_tokens: u32,
    /// End-of-text ids of `config.json`; `generation_config.json` may name others.
    pub eos: Vec<u32>,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Tokens of an answer whose length nobody asked for; `None` for as many as there is room for.
    pub answer_tokens: Option<u32>,
}

/// What an engine has done and holds, at one moment. Counters never fall.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineStats {
    /// Where KV memory comes from.
    pub kv_mode: KvMode,
    /// The pool's name, as `kvctl list` shows it.
    pub pool: String,
    /// Requests with a place in the batch.
    pub running: u32,
    /// Requests that wait for one.
    pub waiting: u32,
    /// Blocks that requests or cached prefixes hold.
    pub blocks_used: u64,
    /// Those of them that only cached prefixes hold.
    pub blocks_cached: u64,
    /// Blocks that fit under the limit in force.
    pub blocks_total: u64,
    /// The memory held: for requests, for cached prefixes alone, and with nothing in it.
    pub memory: MemoryUse,
    /// The limit in force.
    pub limit_bytes: Bytes,
    /// Memory of one page, the least that is mapped.
    pub page_bytes: Bytes,
    /// Tokens that fit into it.
    pub page_tokens: u64,
    /// Counter: steps computed.
    pub steps: u64,
    /// Counter: prompt tokens of accepted requests.
    pub prompt_tokens: u64,
    /// Counter: tokens made.
    pub generated_tokens: u64,
    /// Counter: prompt tokens that were looked up among the cached prefixes.
    pub prefix_queried_tokens: u64,
    /// Counter: those that were found there.
    pub prefix_hit_tokens: u64,
    /// Counter: requests that gave their blocks back to let others go on, and were computed again.
    pub preemptions: u64,
    /// Counter: requests that ended because nobody read them any more.
    pub cancelled: u64,
}

/// The engine as the API sees it. None of its methods may take long except where it says so.
pub trait Engine: Send + Sync {
    /// Accepts a request, or says why not.
    ///
    /// # Errors
    /// [`SubmitError`]; nothing of the request is kept.
    fn submit(&self, request: GenerateRequest) -> Result<Generation, SubmitError>;

    /// What is served.
    fn model(&self) -> ModelInfo;

    /// What is held and was done.
    fn stats(&self) -> EngineStats;

    /// Gives the KV cache back, and at level 2 the weights too. May take long.
    ///
    /// # Errors
    /// [`SleepError`]; the model is as awake as before.
    fn sleep(&self, level: u8) -> Result<(), SleepError>;

    /// Makes the model ready again; a model that is awake stays so. May take long.
    ///
    /// # Errors
    /// [`SleepError`]; the model sleeps on.
    fn wake_up(&self) -> Result<(), SleepError>;

    /// Whether requests are refused because the model sleeps.
    fn is_sleeping(&self) -> bool;

    /// Whether it can answer: what `/health` says.
    fn health(&self) -> Health;

    /// Accepts nothing more, lets what runs end for so long, fails the rest with [`GenerateError::ShutDown`] and ends the
    /// engine. Returns when that is done. May take long.
    fn drain(&self, within: Duration);
}

/// The answers to one request. Dropping it cancels the request and frees its blocks.
#[derive(Debug)]
#[must_use = "dropping a Generation cancels its request"]
pub struct Generation {
    events: mpsc::UnboundedReceiver<Event>,
    cached_tokens: Arc<AtomicU32>,
    is_over: bool,
}

/// The engine's end of a [`Generation`].
#[derive(Clone, Debug)]
pub struct EventSender {
    events: mpsc::UnboundedSender<Event>,
    cached_tokens: Arc<AtomicU32>,
}

impl Generation {
    /// Both ends of one request's answers.
    pub fn channel() -> (EventSender, Self) {
        let (sender, receiver) = mpsc::unbounded_channel();
        let cached_tokens = Arc::<AtomicU32>::default();
        let sender = EventSender { events: sender, cached_tokens: Arc::clone(&cached_tokens) };
        (sender, Self { events: receiver, cached_tokens, is_over: false })
    }

    /// Tokens of the prompt that were not computed: known from the first event on, also to who does not read the last.
    pub fn cached_tokens(&self) -> u32 {
        // The channel orders it: it is told before the first event is sent.
        self.cached_tokens.load(Ordering::Relaxed)
    }

    /// The next event; `None` behind the last one. An engine that is gone before that is [`GenerateError::EngineGone`].
    pub async fn next(&mut self) -> Option<Event> {
        if self.is_over {
            return None;
        }
        let event = self.events.recv().await;
        Some(self.seen(event))
    }

    /// [`next`](Self::next) for threads that may block.
    pub fn blocking_next(&mut self) -> Option<Event> {
        if self.is_over {
            return None;
        }
        let event = self.events.blocking_recv();
        Some(self.seen(event))
    }

    fn seen(&mut self, event: Option<Event>) -> Event {
        let event = event.unwrap_or(Event::Failed(GenerateError::EngineGone));
        self.is_over = !matches!(event, Event::Token { .. });
        event
    }
}

impl EventSender {
    /// Hands an event over without waiting. `false` when nobody reads any more: stop working for it.
    pub fn send(&self, event: Event) -> bool {
        self.events.send(event).is_ok()
    }

    /// Says how many tokens of the prompt need no computing, before the first event.
    pub fn tell_cached(&self, tokens: u32) {
        self.cached_tokens.store(tokens, Ordering::Relaxed);
    }

    /// Whether the [`Generation`] was dropped.
    pub fn is_cancelled(&self) -> bool {
        self.events.is_closed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_ends_once_and_an_engine_that_dies_is_named() {
        let (sender, mut generation) = Generation::channel();
        assert!(sender.send(Event::Token { id: 7, logprob: None }));
        drop(sender);
        assert_eq!(generation.blocking_next(), Some(Event::Token { id: 7, logprob: None }));
        assert_eq!(generation.blocking_next(), Some(Event::Failed(GenerateError::EngineGone)));
        assert_eq!(generation.blocking_next(), None);
    }

    #[test]
    fn dropping_the_answers_cancels() {
        let (sender, generation) = Generation::channel();
        assert!(!sender.is_cancelled());
        drop(generation);
        assert!(sender.is_cancelled());
        assert!(!sender.send(Event::Token { id: 7, logprob: None }));
    }

    #[test]
    fn an_answer_that_is_too_long_says_how_much_room_there_is() {
        let error = SubmitError::TooManyTokens { prompt_tokens: 10, max_tokens: 100, context_tokens: 64 };
        assert!(error.to_string().ends_with("ask for at most 54 tokens"), "{error}");
    }
}
