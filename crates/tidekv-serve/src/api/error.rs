//! Refusals as OpenAI's clients expect them: the right status, and one sentence in
//! `{"error": {"message", "type", "param", "code"}}`.
//!
//! | status | type                    | code                                       | when                                      |
//! |--------|-------------------------|--------------------------------------------|-------------------------------------------|
//! | 400    | `invalid_request_error` | `context_length_exceeded`, `invalid_value`, `unsupported_parameter`, `invalid_json` | the request is wrong |
//! | 401    | `authentication_error`  | `wrong_key`                                | the key is missing or not the one         |
//! | 403    | `permission_error`      | `foreign_host`, `foreign_origin`           | an unknown name, or a page of another site |
//! | 404    | `invalid_request_error` | `model_not_found`, `unknown_url`           | there is no such model or page            |
//! | 405    | `invalid_request_error` | `method_not_supported`                     | GET where POST is meant, or the reverse   |
//! | 408    | `invalid_request_error` | `request_timeout`                          | the body came too slowly                  |
//! | 413    | `invalid_request_error` | `request_too_large`                        | the body is over the limit                |
//! | 409    | `conflict_error`        | `busy`                                     | asleep while requests run                 |
//! | 429    | `rate_limit_error`      | `queue_full`                               | too many wait; `Retry-After` says when    |
//! | 500    | `server_error`          | `engine_failed`                            | our fault                                 |
//! | 503    | `service_unavailable`   | `too_many_bodies`, `model_asleep`, `shutting_down`, `kv_cache_too_small`, `memory_unavailable`, `device_lost` | later, or elsewhere |

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::body_budget::BodyError;
use crate::handle::{GenerateError, SleepError, SubmitError};
use crate::tokenizer::TokenizerError;

/// Most of a sentence.
const MAX_MESSAGE_BYTES: usize = 2048;

/// A refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApiError {
    status: StatusCode,
    code: &'static str,
    param: Option<String>,
    message: String,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, param: None, message: shortened(message.into()) }
    }

    /// A field that is not what it should be.
    pub(crate) fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_value", message).about(param)
    }

    /// Says which field is meant.
    pub(crate) fn about(mut self, param: impl Into<String>) -> Self {
        self.param = Some(shortened(param.into()));
        self
    }

    /// The body, which streams send as an event.
    pub(crate) fn body(&self) -> Value {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            409 => "conflict_error",
            429 => "rate_limit_error",
            503 => "service_unavailable",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }
}

/// Messages repeat what a client sent, which may be megabytes.
fn shortened(mut text: String) -> String {
    if text.len() > MAX_MESSAGE_BYTES {
        let end = (0..=MAX_MESSAGE_BYTES).rev().find(|&at| text.is_char_boundary(at));
        text.truncate(end.unwrap_or(0));
        text.push('…');
        text.shrink_to_fit();
    }
    text
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

impl From<BodyError> for ApiError {
    fn from(error: BodyError) -> Self {
        let (status, code) = error.status_and_code();
        Self::new(status, code, error.to_string())
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        let (status, code, param) = match &error {
            SubmitError::EmptyPrompt => (StatusCode::BAD_REQUEST, "invalid_value", Some("prompt")),
            SubmitError::PromptTooLong { .. } => (StatusCode::BAD_REQUEST, "context_length_exceeded", Some("prompt")),
            SubmitError::TooManyTokens { .. } | SubmitError::NeverFits { .. } => {
                (StatusCode::BAD_REQUEST, "context_length_exceeded", Some("max_tokens"))
            }
            SubmitError::UnknownToken { .. } => (StatusCode::BAD_REQUEST, "invalid_value", Some("prompt")),
            SubmitError::OutOfRange { field, .. } => (StatusCode::BAD_REQUEST, "invalid_value", Some(*field)),
            SubmitError::Asleep => (StatusCode::SERVICE_UNAVAILABLE, "model_asleep", None),
            SubmitError::QueueFull { .. } => (StatusCode::TOO_MANY_REQUESTS, "queue_full", None),
            SubmitError::DeviceLost { .. } => (StatusCode::SERVICE_UNAVAILABLE, "device_lost", None),
            SubmitError::ShutDown => (StatusCode::SERVICE_UNAVAILABLE, "shutting_down", None),
            SubmitError::EngineGone => (StatusCode::INTERNAL_SERVER_ERROR, "engine_failed", None),
        };
        Self { status, code, param: param.map(str::to_owned), message: error.to_string() }
    }
}

impl From<GenerateError> for ApiError {
    fn from(error: GenerateError) -> Self {
        let (status, code) = match &error {
            GenerateError::Asleep => (StatusCode::SERVICE_UNAVAILABLE, "model_asleep"),
            GenerateError::DeviceLost { .. } => (StatusCode::SERVICE_UNAVAILABLE, "device_lost"),
            GenerateError::ShutDown => (StatusCode::SERVICE_UNAVAILABLE, "shutting_down"),
            GenerateError::OutOfMemory { .. } => (StatusCode::SERVICE_UNAVAILABLE, "kv_cache_too_small"),
            GenerateError::Starved { .. } => (StatusCode::SERVICE_UNAVAILABLE, "memory_unavailable"),
            GenerateError::Compute { .. } | GenerateError::EngineGone => {
                (StatusCode::INTERNAL_SERVER_ERROR, "engine_failed")
            }
        };
        Self::new(status, code, error.to_string())
    }
}

impl From<SleepError> for ApiError {
    fn from(error: SleepError) -> Self {
        match &error {
            SleepError::Level { .. } => Self::invalid("level", error.to_string()),
            SleepError::Busy { .. } => Self::new(StatusCode::CONFLICT, "busy", error.to_string()),
            SleepError::ShutDown => Self::new(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", error.to_string()),
            SleepError::DeviceLost { .. } => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "device_lost", error.to_string())
            }
            SleepError::Memory { .. } => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "memory_unavailable", error.to_string())
            }
            SleepError::EngineGone => Self::new(StatusCode::INTERNAL_SERVER_ERROR, "engine_failed", error.to_string()),
        }
    }
}

impl From<TokenizerError> for ApiError {
    fn from(error: TokenizerError) -> Self {
        let param = if matches!(error, TokenizerError::Template { .. }) { "messages" } else { "prompt" };
        Self::invalid(param, error.to_string())
    }
}
