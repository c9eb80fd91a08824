//! The HTTP API: OpenAI's pages for those who ask, a few more for those who operate.
//!
//! ```text
//!   POST /v1/completions        generate ── bodies ── request (checked) ── answer (tokens to text) ── response (JSON, SSE)
//!   POST /v1/chat/completions
//!   POST /tokenize /detokenize
//!   GET  /v1/models[/ID]        operate
//!   GET  /health /metrics /version /is_sleeping
//!   POST /sleep /wake_up
//! ```
//!
//! Nothing here blocks: the engine answers through channels, and what may take long (sleep, long bodies) runs on threads of its
//! own. A client that goes away drops its `answer::Answer`, which cancels the request. Every refusal is an
//! `error::ApiError` and the server goes on.

mod answer;
mod bodies;
pub(crate) mod error;
mod fields;
mod generate;
mod metrics;
mod operate;
mod request;
mod response;

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::Bytes;
use axum::extract::DefaultBodyLimit;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;

use crate::access::{Access, KeyRule};
use crate::body_budget::BodyError;
use crate::handle::{Engine, ModelInfo};
use crate::pages::{self, Page, Route};
use crate::tokenizer::Tokenizer;
use error::ApiError;
use metrics::Metrics;
use response::{Envelope, Kind};

/// A request may be so large.
pub const MAX_BODY_BYTES: usize = 16 << 20;

/// The name that always means the served model.
pub(crate) const DEFAULT_MODEL: &str = "default";

/// An engine and the tokenizer of its model, under the name that clients use.
pub struct Service {
    engine: Arc<dyn Engine>,
    model: ModelInfo,
    tokenizer: Arc<Tokenizer>,
    /// The tokenizer's, or the model's own where it names none.
    end_tokens: Vec<u32>,
    name: String,
    created: u64,
    metrics: Arc<Metrics>,
    places: bodies::Places,
    /// Makes ids that no other run has.
    run: u64,
    requests: AtomicU64,
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service").field("name", &self.name).field("model", &self.model).finish_non_exhaustive()
    }
}

impl Service {
    /// `name` is the model's name for clients; `None` for its own.
    pub fn new(engine: Arc<dyn Engine>, tokenizer: Arc<Tokenizer>, name: Option<String>) -> Self {
        let model = engine.model();
        let known = tokenizer.end_tokens();
        Self {
            end_tokens: if known.is_empty() { model.eos.clone() } else { known.to_vec() },
            name: name.unwrap_or_else(|| model.name.clone()),
            created: unix_seconds(),
            metrics: Arc::new(Metrics::default()),
            places: bodies::Places::default(),
            run: RandomState::new().hash_one(std::process::id()),
            requests: AtomicU64::new(0),
            engine,
            model,
            tokenizer,
        }
    }

    /// The name that clients use.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What is behind the API.
    pub fn engine(&self) -> &Arc<dyn Engine> {
        &self.engine
    }

    fn check_model(&self, asked: Option<&str>) -> Result<(), ApiError> {
        match asked {
            None | Some(DEFAULT_MODEL) => Ok(()),
            Some(asked) if asked == self.name => Ok(()),
            Some(asked) => {
                let message =
                    format!("the model {asked:?} is not served here: ask for {:?}, or for \"default\"", self.name);
                Err(ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message).about("model"))
            }
        }
    }

    fn envelope(&self, kind: Kind) -> Envelope {
        let prefix = match kind {
            Kind::Text => "cmpl",
            Kind::Chat => "chatcmpl",
        };
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        let id = format!("{prefix}-{:016x}{number:08x}", self.run);
        Envelope { kind, id, created: unix_seconds(), model: self.name.clone() }
    }
}

/// All pages.
fn pages() -> Vec<Page<Arc<Service>>> {
    vec![
        Page::post("/v1/completions", KeyRule::IfSet, generate::completions),
        Page::post("/v1/chat/completions", KeyRule::IfSet, generate::chat),
        Page::post("/tokenize", KeyRule::IfSet, generate::tokenize),
        Page::post("/detokenize", KeyRule::IfSet, generate::detokenize),
        Page::get("/v1/models", KeyRule::IfSet, operate::models),
        Page::get("/v1/models/{*name}", KeyRule::IfSet, operate::model),
        Page::get("/health", KeyRule::Open, operate::health),
        Page::get("/ping", KeyRule::Open, operate::health),
        Page::get("/metrics", KeyRule::Open, operate::metrics),
        Page::get("/version", KeyRule::Open, operate::version),
        Page::post("/sleep", KeyRule::IfSet, operate::sleep),
        Page::post("/wake_up", KeyRule::IfSet, operate::wake_up),
        Page::get("/is_sleeping", KeyRule::Open, operate::is_sleeping),
    ]
}

/// The routes of `kvserve`.
pub fn routes() -> Vec<Route> {
    pages().into_iter().map(|page| page.route).collect()
}

/// All pages behind their checks.
pub(crate) fn router(service: Arc<Service>, access: Access) -> Router {
    pages::router(pages(), access, "docs/serving.md").layer(DefaultBodyLimit::disable()).with_state(service)
}

/// The body of a request, or why it did not arrive.
fn whole_body(body: Result<Bytes, BytesRejection>) -> Result<Bytes, ApiError> {
    body.map_err(|error| match BodyError::behind(&error) {
        Some(reason) => reason.into(),
        None => {
            ApiError::new(StatusCode::BAD_REQUEST, "invalid_json", format!("the body did not arrive whole: {error}"))
        }
    })
}

/// For the fuzz target `request`: reads a body as each of the pages does, and says which take it.
#[doc(hidden)]
pub fn read_on_every_page(body: &[u8], tokenizer: &Tokenizer) -> [bool; 5] {
    [
        request::completion(body, tokenizer).is_ok(),
        request::chat(body, tokenizer).is_ok(),
        request::tokenize(body, tokenizer).is_ok(),
        request::detokenize(body).is_ok(),
        request::sleep_level(body).is_ok(),
    ]
}

pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
