//! `/v1/completions` and `/v1/chat/completions`: from a checked [`Job`] to an answer, whole or as a stream of events.
//!
//! ```text
//!   Job ── tokens ── submit, every prompt ──> [Answer] ── whole ──> one JSON object
//!                       any refusal: 4xx               └─ stream ─> data: {chunk} ... data: [DONE]
//! ```
//!
//! Prompts are accepted before the first byte is sent, so that a refusal has its status. What fails later ends a stream with
//! an error event.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream, StreamExt};
use serde::Serialize;
use serde_json::{Value, json};

use super::answer::{Answer, Piece};
use super::error::ApiError;
use super::request::{self, Job, Prompts};
use super::response::{Choice, Envelope, Kind, LogprobWriter, UsageBody};
use super::{Service, bodies};
use crate::handle::{FinishReason, GenerateError, GenerateRequest, Prompt, SubmitError, Usage};
use crate::tokenizer::ChatMessage;

/// A text has more tokens than one for so many bytes.
const MAX_BYTES_OF_TOKEN: usize = 16;
/// `/tokenize` takes so much, however short the model's context is.
const MIN_TOKENIZED_BYTES: usize = 1 << 20;

pub(super) async fn completions(
    State(service): State<Arc<Service>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let read = |service: &Service, body: &[u8]| service.read(request::completion(body, &service.tokenizer)?);
    let (job, prompts) = bodies::read(&service, super::whole_body(body)?, read).await?;
    answer(service, Kind::Text, &job, prompts).await
}

pub(super) async fn chat(
    State(service): State<Arc<Service>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let read = |service: &Service, body: &[u8]| service.read(request::chat(body, &service.tokenizer)?);
    let (job, prompts) = bodies::read(&service, super::whole_body(body)?, read).await?;
    answer(service, Kind::Chat, &job, prompts).await
}

async fn answer(service: Arc<Service>, kind: Kind, job: &Job, prompts: Vec<Vec<u32>>) -> Result<Response, ApiError> {
    let answers = prompts.into_iter().map(|prompt| service.submit(job, prompt)).collect::<Result<Vec<_>, _>>()?;
    let envelope = service.envelope(kind);
    if job.stream {
        let events = events(service, envelope, answers, job.include_usage);
        Ok(Sse::new(events).keep_alive(KeepAlive::default()).into_response())
    } else {
        whole(&service, &envelope, answers).await
    }
}

/// Ids may be many, so they are written as they are.
#[derive(Serialize)]
pub(super) struct Tokenized {
    count: usize,
    max_model_len: u32,
    tokens: Vec<u32>,
}

/// `POST /tokenize`, as vLLM has it.
pub(super) async fn tokenize(
    State(service): State<Arc<Service>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Tokenized>, ApiError> {
    let read = |service: &Service, body: &[u8]| {
        let (model, prompts, add_special) = request::tokenize(body, &service.tokenizer)?;
        service.check_model(model.as_deref())?;
        let most = service.most_text_bytes().max(MIN_TOKENIZED_BYTES);
        Ok(service.tokens(prompts, add_special, most)?.concat())
    };
    let ids = bodies::read(&service, super::whole_body(body)?, read).await?;
    Ok(Json(Tokenized { count: ids.len(), max_model_len: service.model.context_tokens, tokens: ids }))
}

/// `POST /detokenize`, as vLLM has it.
pub(super) async fn detokenize(
    State(service): State<Arc<Service>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Value>, ApiError> {
    let read = |service: &Service, body: &[u8]| {
        let (model, tokens) = request::detokenize(body)?;
        service.check_model(model.as_deref())?;
        Ok(service.tokenizer.decode(&tokens))
    };
    let text = bodies::read(&service, super::whole_body(body)?, read).await?;
    Ok(Json(json!({"prompt": text})))
}

/// A tokenizer needs many times the memory of a text, so its length is looked at before.
fn check_text(name: &str, bytes: usize, most: usize) -> Result<(), ApiError> {
    if bytes <= most {
        return Ok(());
    }
    let message = format!("{name} has {bytes} bytes of text, and at most {most} are tokenised here: shorten it");
    Err(ApiError::new(StatusCode::BAD_REQUEST, "context_length_exceeded", message).about("prompt"))
}

impl Service {
    /// What is asked for, and the ids of its prompts.
    fn read(&self, mut job: Job) -> Result<(Job, Vec<Vec<u32>>), ApiError> {
        self.check_model(job.model.as_deref())?;
        let prompts = std::mem::replace(&mut job.prompts, Prompts::Tokens(Vec::new()));
        Ok((job, self.tokens(prompts, true, self.most_text_bytes())?))
    }

    /// A longer text is not worth counting its tokens: no language has words of so many letters.
    fn most_text_bytes(&self) -> usize {
        self.model.context_tokens as usize * MAX_BYTES_OF_TOKEN
    }

    /// The ids of every prompt, none of which has more than `most` bytes of text.
    fn tokens(&self, prompts: Prompts, add_special: bool, most: usize) -> Result<Vec<Vec<u32>>, ApiError> {
        let tokenizer = &self.tokenizer;
        match prompts {
            Prompts::Texts(texts) => {
                let (mut prompts, mut count) = (Vec::with_capacity(texts.len()), 0);
                for text in texts {
                    check_text("prompt", text.len(), most)?;
                    let ids = tokenizer.encode_with(&text, add_special)?;
                    count += ids.len();
                    request::check_ids("prompt", count)?;
                    prompts.push(ids);
                }
                Ok(prompts)
            }
            Prompts::Tokens(several) => Ok(several),
            Prompts::Chat(messages, options) => {
                let name = |message: &ChatMessage| message.name.as_ref().map_or(0, String::len);
                let text = |message: &ChatMessage| message.role.len() + message.content.len() + name(message);
                let bytes = messages.iter().map(text).sum();
                check_text("messages", bytes, most)?;
                Ok(vec![tokenizer.encode_chat(&messages, &options)?])
            }
        }
    }

    /// Hands one prompt to the engine.
    fn submit(&self, job: &Job, tokens: Vec<u32>) -> Result<Answer, ApiError> {
        let max_tokens = self.room_for(tokens.len(), job.max_tokens)?;
        let mut stop_tokens = job.stop_tokens.clone();
        if !job.ignore_eos {
            stop_tokens.extend_from_slice(&self.end_tokens);
        }
        let mut request = GenerateRequest {
            prompt: Prompt { tokens },
            sampling: job.sampling,
            max_tokens,
            // Stop tokens that the request names itself count even where the model's own do not.
            ignore_eos: stop_tokens.is_empty(),
            stop_tokens,
            logprobs: job.logprobs,
            cache_salt: job.cache_salt.clone(),
        };
        let generation = match self.engine.submit(request.clone()) {
            Err(SubmitError::NeverFits { capacity_tokens, .. }) if job.max_tokens.is_none() => {
                // Nobody asked for so many: as many as memory allows.
                let room = capacity_tokens.saturating_sub(request.prompt.tokens.len() as u64);
                request.max_tokens = u32::try_from(room).unwrap_or(u32::MAX).clamp(1, max_tokens);
                self.engine.submit(request.clone())?
            }
            other => other?,
        };
        let (tokenizer, metrics) = (Arc::clone(&self.tokenizer), Arc::clone(&self.metrics));
        Ok(Answer::new(generation, &request, job.stops.clone(), tokenizer, metrics))
    }

    /// How many tokens the answer may have; more than there is room for is refused, as OpenAI does.
    fn room_for(&self, prompt_tokens: usize, wanted: Option<u64>) -> Result<u32, SubmitError> {
        let (prompt_tokens, context_tokens) = (prompt_tokens as u64, self.model.context_tokens);
        let room = u64::from(context_tokens).saturating_sub(prompt_tokens);
        if room == 0 {
            return Err(SubmitError::PromptTooLong { prompt_tokens, context_tokens });
        }
        let usual = self.model.answer_tokens.map_or(room, |tokens| room.min(tokens.into()));
        let max_tokens = wanted.unwrap_or(usual);
        match u32::try_from(max_tokens) {
            Ok(fits) if max_tokens <= room => Ok(fits),
            _ => Err(SubmitError::TooManyTokens { prompt_tokens, max_tokens, context_tokens }),
        }
    }
}

/// All answers in one object.
async fn whole(service: &Service, envelope: &Envelope, mut answers: Vec<Answer>) -> Result<Response, ApiError> {
    let mut choices = Vec::with_capacity(answers.len());
    for (index, answer) in answers.iter_mut().enumerate() {
        let mut all = Piece::default();
        while let Some(piece) = answer.next().await {
            let piece = piece?;
            all.text += &piece.text;
            all.tokens.extend(piece.tokens);
            all.finish = piece.finish;
        }
        let logprobs = LogprobWriter::new(envelope.kind).of(&mut all, &service.tokenizer);
        let finish = all.finish.unwrap_or(FinishReason::Cancelled);
        choices.push(Choice::whole(envelope.kind, index, all.text, logprobs, finish));
    }
    let usage = UsageBody::sum(answers.iter().map(Answer::usage));
    Ok(Json(envelope.whole(choices, usage)).into_response())
}

/// One answer on its way out.
struct Outgoing {
    index: usize,
    answer: Answer,
    logprobs: LogprobWriter,
    /// Whose turn it is was said, where that has to be.
    is_open: bool,
}

/// What comes out of it.
enum Part {
    /// A chunk; before the first of a chat one that says whose turn it is.
    Choices(Vec<Choice>),
    Over(Usage),
    Failed(ApiError),
}

/// The chunks of all answers as they come, then the usage where it was asked for, then `[DONE]`.
fn events(
    service: Arc<Service>,
    envelope: Envelope,
    answers: Vec<Answer>,
    include_usage: bool,
) -> impl Stream<Item = Result<SseEvent, Infallible>> {
    let kind = envelope.kind;
    let parts = stream::select_all(answers.into_iter().enumerate().map(|(index, answer)| {
        let outgoing = Outgoing { index, answer, logprobs: LogprobWriter::new(kind), is_open: kind == Kind::Text };
        let service = Arc::clone(&service);
        stream::unfold(Some(outgoing), move |outgoing| next_part(Arc::clone(&service), kind, outgoing)).boxed()
    }));
    let mut usages = Vec::new();
    let chunks = parts.map(Some).chain(stream::iter([None])).flat_map(move |part| {
        let chunk = |choice, usage| json_event(&envelope.chunk(choice, usage));
        let events = match part {
            Some(Part::Choices(choices)) => choices.into_iter().map(|choice| chunk(Some(choice), None)).collect(),
            Some(Part::Over(usage)) => {
                usages.push(usage);
                Vec::new()
            }
            Some(Part::Failed(error)) => vec![json_event(&error.body())],
            None => {
                let usage = include_usage.then(|| chunk(None, Some(UsageBody::sum(usages.drain(..)))));
                usage.into_iter().chain([SseEvent::default().data("[DONE]")]).collect()
            }
        };
        stream::iter(events)
    });
    chunks.map(Ok)
}

async fn next_part(service: Arc<Service>, kind: Kind, outgoing: Option<Outgoing>) -> Option<(Part, Option<Outgoing>)> {
    let mut outgoing = outgoing?;
    match outgoing.answer.next().await {
        Some(Ok(mut piece)) => {
            // Whoever measures the time to the first token takes the first chunk for it, so nothing is said before there is one.
            let opening = (!outgoing.is_open).then(|| Choice::opening(outgoing.index));
            outgoing.is_open = true;
            let logprobs = outgoing.logprobs.of(&mut piece, &service.tokenizer);
            let choice = Choice::part(kind, outgoing.index, piece.text, logprobs, piece.finish);
            Some((Part::Choices(opening.into_iter().chain([choice]).collect()), Some(outgoing)))
        }
        Some(Err(error)) => Some((Part::Failed(error.into()), None)),
        None => Some((Part::Over(outgoing.answer.usage()), None)),
    }
}

fn json_event(body: &impl serde::Serialize) -> SseEvent {
    // Our own types have nothing that JSON cannot say; were it otherwise, the client would see an error.
    let text = serde_json::to_string(body)
        .unwrap_or_else(|error| ApiError::from(GenerateError::Compute { what: error.to_string() }).body().to_string());
    SseEvent::default().data(text)
}
