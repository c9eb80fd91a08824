//! One answer while it is being made: events of the engine become text, up to a stop string, an end token or the last token.
//!
//! Dropping it cancels the request, whoever drops it: a client that went away, a stop string, a neighbour of the same
//! request that failed.

use std::sync::Arc;

use super::metrics::{Ending, Metrics, Timer};
use crate::handle::{Event, FinishReason, GenerateError, GenerateRequest, Generation, TokenLogprob, Usage};
use crate::tokenizer::{StopScanner, TextStream, Tokenizer};

/// Text that is new, and why it is the last where it is.
#[derive(Debug, Default)]
pub(super) struct Piece {
    pub(super) text: String,
    /// Tokens since the piece before, when log-probabilities were asked for.
    pub(super) tokens: Vec<(u32, TokenLogprob)>,
    pub(super) finish: Option<FinishReason>,
}

/// The answer to one prompt.
#[derive(Debug)]
pub(super) struct Answer {
    /// Gone when the answer is over.
    generation: Option<Generation>,
    text: TextStream,
    stop: StopScanner,
    /// End tokens, which are counted and not shown.
    end_tokens: Vec<u32>,
    usage: Usage,
    timer: Timer,
}

impl Answer {
    pub(super) fn new(
        generation: Generation,
        request: &GenerateRequest,
        stops: Vec<String>,
        tokenizer: Arc<Tokenizer>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let prompt_tokens = u32::try_from(request.prompt.tokens.len()).unwrap_or(u32::MAX);
        Self {
            generation: Some(generation),
            text: TextStream::new(tokenizer, &request.prompt.tokens),
            stop: StopScanner::new(stops),
            end_tokens: if request.ignore_eos { Vec::new() } else { request.stop_tokens.clone() },
            usage: Usage { prompt_tokens, ..Usage::default() },
            timer: Timer::start(metrics),
        }
    }

    /// What it cost so far.
    pub(super) fn usage(&self) -> Usage {
        self.usage
    }

    /// The next piece with something in it; `None` behind the last one, which says why it is the last.
    pub(super) async fn next(&mut self) -> Option<Result<Piece, GenerateError>> {
        let mut piece = Piece::default();
        loop {
            let generation = self.generation.as_mut()?;
            match generation.next().await? {
                Event::Token { id, logprob } => {
                    self.usage.cached_tokens = generation.cached_tokens();
                    self.usage.completion_tokens += 1;
                    self.timer.token();
                    if !self.end_tokens.contains(&id) {
                        let text = self.text.push(id);
                        piece.text += &self.stop.push(&text);
                    }
                    piece.tokens.extend(logprob.map(|logprob| (id, logprob)));
                    if self.stop.is_stopped() {
                        self.end(Ending::Finished(FinishReason::Stop));
                        piece.finish = Some(FinishReason::Stop);
                        return Some(Ok(piece));
                    }
                    if !piece.text.is_empty() {
                        return Some(Ok(piece));
                    }
                }
                Event::Done { reason, usage } => {
                    self.usage = usage;
                    let held = self.text.finish();
                    piece.text += &self.stop.push(&held);
                    piece.text += &self.stop.finish();
                    // What was held may have completed a stop string at the very end.
                    let reason = if self.stop.is_stopped() { FinishReason::Stop } else { reason };
                    self.end(Ending::Finished(reason));
                    piece.finish = Some(reason);
                    return Some(Ok(piece));
                }
                Event::Failed(error) => {
                    self.end(Ending::Failed);
                    return Some(Err(error));
                }
            }
        }
    }

    fn end(&mut self, ending: Ending) {
        self.generation = None;
        self.timer.end(ending);
    }
}
