//! What came back: the times of one request, in nanoseconds on the clock of its run.
//!
//! ```text
//!   intended ──> released ──> sent ──> first byte ──> chunk, chunk, ... ──> done
//!           cap         client    │                   └─ first: TTFT ─┘ └ last: E2EL
//!           wait        lag       └ latencies of vLLM start here; ours start at `intended` as well
//! ```

use serde::Serialize;

use super::endpoint::Api;

/// One request and all that was seen of its answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Index of its stream.
    pub stream: usize,
    /// Which of the stream's requests it is.
    pub index: usize,
    /// The dialect, on which it depends what the first token is.
    pub api: Api,
    /// When it was to be sent. In a closed loop that is when its place became free.
    pub intended_ns: u64,
    /// When it might be sent: `intended_ns`, or later where the cap made it wait.
    pub released_ns: u64,
    /// When it was sent: before anything was written, or a connection opened for it.
    pub sent_ns: u64,
    /// When the head of the answer was here.
    pub first_byte_ns: Option<u64>,
    /// What the answer said, in the order in which it came.
    pub chunks: Vec<Chunk>,
    /// When nothing more could come: the answer's end, or its failure.
    pub done_ns: u64,
    /// What HTTP said.
    pub status: Option<u16>,
    /// What the server counted.
    pub usage: Option<Usage>,
    /// Length of the prompt, if it was known beforehand.
    pub planned_input_tokens: Option<u32>,
    /// Why the answer ended, as the server says.
    pub finish_reason: Option<String>,
    /// The answer, if it was to be kept.
    pub text: Option<String>,
    /// Connections that had to be opened for it: 0 on one that was kept.
    pub connects: u32,
    /// How often it was sent again because the server closed a kept connection without a byte of an answer.
    pub resends: u32,
    /// Why it failed.
    pub failure: Option<Failure>,
}

/// One event of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// When the bytes that completed it were here.
    pub at_ns: u64,
    /// What it is.
    pub kind: ChunkKind,
    /// Tokens it brought, if the server says; more than one in a chunk happens.
    pub tokens: Option<u32>,
}

/// What an event brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkKind {
    /// Text, or the choice that opens or closes an answer, whose text is empty.
    Choice {
        /// Whether there was any text in it.
        has_text: bool,
    },
    /// The server's count of tokens, and nothing else.
    Usage,
}

/// What the server counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens of the answer.
    pub completion_tokens: u64,
    /// Tokens of the prompt that were found in a cache, if it says.
    pub cached_tokens: Option<u64>,
}

/// Why a request has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Failure {
    /// Nobody listens.
    #[error("cannot connect: {reason}")]
    Connect {
        /// What the system says.
        reason: String,
    },
    /// The connection broke before the answer was whole.
    #[error("the server closed the connection {after}: {reason}")]
    Disconnected {
        /// How far it had come.
        after: String,
        /// What was seen.
        reason: String,
    },
    /// Not 200.
    #[error("HTTP {status}: {message}")]
    Status {
        /// The code.
        status: u16,
        /// What the server says about it.
        message: String,
    },
    /// An error in the middle of an answer.
    #[error("the server gave up: {message}")]
    Server {
        /// What it says.
        message: String,
    },
    /// An answer that is none.
    #[error("the answer is not to be understood: {reason}")]
    Malformed {
        /// What was seen.
        reason: String,
    },
    /// Longer than a request may take.
    #[error("no end after {seconds} s")]
    Timeout {
        /// The bound.
        seconds: u64,
    },
    /// The run was interrupted.
    #[error("the run was interrupted")]
    Cancelled,
}

impl Record {
    /// Whether the answer is whole.
    pub fn is_complete(&self) -> bool {
        self.failure.is_none()
    }

    /// Whether the run was interrupted meanwhile: neither an answer nor a fault of the server.
    pub fn is_cancelled(&self) -> bool {
        self.failure == Some(Failure::Cancelled)
    }

    /// When the first token was here: vLLM's first event with a choice, whose text may be empty; SGLang's first with text.
    pub fn first_token_ns(&self) -> Option<u64> {
        let is_first = |chunk: &&Chunk| match (self.api, chunk.kind) {
            (Api::Completions | Api::Chat, ChunkKind::Choice { .. }) => true,
            (Api::SglangGenerate, ChunkKind::Choice { has_text }) => has_text,
            (_, ChunkKind::Usage) => false,
        };
        self.chunks.iter().find(is_first).map(|chunk| chunk.at_ns)
    }

    /// When the last token was here: the last event with a choice; in a chat and of SGLang the last event of all.
    pub fn last_token_ns(&self) -> Option<u64> {
        let is_last = |chunk: &&Chunk| self.api != Api::Completions || chunk.kind != ChunkKind::Usage;
        self.chunks.iter().rev().find(is_last).map(|chunk| chunk.at_ns)
    }

    /// From chunk to chunk. SGLang says how many tokens a chunk has; a gap is divided among them there.
    pub fn gaps_ns(&self) -> Vec<u64> {
        let mut gaps = Vec::new();
        let mut latest = None;
        for chunk in self.chunks.iter().filter(|chunk| chunk.kind != ChunkKind::Usage) {
            if let Some(latest) = latest {
                let gap = chunk.at_ns.saturating_sub(latest);
                match (self.api, chunk.tokens) {
                    // Nothing new: what follows waits from the same moment on.
                    (Api::SglangGenerate, Some(0)) => continue,
                    (Api::SglangGenerate, Some(tokens)) => {
                        gaps.extend((0..tokens).map(|_| gap / u64::from(tokens)));
                    }
                    _ => gaps.push(gap),
                }
            }
            latest = Some(chunk.at_ns);
        }
        gaps
    }

    /// Tokens of the answer: the server's count, else those that chunks brought, else the chunks with text.
    pub fn output_tokens(&self) -> u64 {
        if let Some(usage) = self.usage {
            return usage.completion_tokens;
        }
        let of_chunk = |chunk: &Chunk| match (chunk.tokens, chunk.kind) {
            (Some(tokens), _) => u64::from(tokens),
            (None, ChunkKind::Choice { has_text: true }) => 1,
            (None, _) => 0,
        };
        self.chunks.iter().map(of_chunk).sum()
    }

    /// Tokens of the prompt: the server's count, else what was planned.
    pub fn input_tokens(&self) -> u64 {
        let planned = u64::from(self.planned_input_tokens.unwrap_or(0));
        self.usage.map_or(planned, |usage| usage.prompt_tokens)
    }
}
