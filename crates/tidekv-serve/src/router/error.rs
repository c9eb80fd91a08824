//! Why the router itself refuses a request. What engines answer is passed on as it is.
//!
//! | status | code                                        | when                                                        |
//! |--------|---------------------------------------------|-------------------------------------------------------------|
//! | 400    | `invalid_json`, `missing_model`             | the body names no model                                     |
//! | 401    | `wrong_key`                                 | the key is missing or not the one                           |
//! | 403    | `foreign_host`, `foreign_origin`, `no_key_set` | an unknown name or a page of another site asks; nobody may change limits here |
//! | 404    | `model_not_found`, `pool_not_found`         | the message lists what there is                             |
//! | 408    | `request_timeout`                           | the body did not arrive in time                             |
//! | 413    | `request_too_large`                         | above 64 MiB                                                |
//! | 422    | `invalid_value`                             | a limit or share that cannot be                             |
//! | 429    | `queue_full`                                | `Retry-After` says when to come back                        |
//! | 502    | `engine_gone`, `engine_restarting`, `engine_failed`, `wake_failed` | the engine died or does not wake up  |
//! | 503    | `model_starting`, `model_asleep`, `too_many_bodies` | `Retry-After`, or wake it up                        |
//! | 504    | `deadline_exceeded`                         | no answer within `request_timeout_seconds`                  |

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::api::error::ApiError;
use crate::body_budget::BodyError;

/// A refusal of the router's own.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("the body is not a JSON object: {reason}")]
    InvalidJson { reason: String },
    #[error("the request names no model: set \"model\" to one of {known}, or to \"default\"")]
    MissingModel { known: String },
    #[error("there is no model {asked:?} here: ask for one of {known}, or for \"default\"")]
    UnknownModel { asked: String, known: String },
    #[error(transparent)]
    Body(BodyError),
    #[error(
        "{model} answers {running} requests and {waiting} wait: come back later, or raise max_concurrency or max_queue"
    )]
    QueueFull { model: String, running: usize, waiting: usize },
    #[error("{model} is being started: come back later")]
    Starting { model: String },
    #[error("{model} ended and is being started again: come back later")]
    Restarting { model: String },
    #[error("{model} ended too often and is not started again: `kvctl logs {model}` may say why")]
    Failed { model: String },
    #[error("{model} is asleep and wakeup_on_request is off: POST /action/wakeup/{model} wakes it up")]
    Asleep { model: String },
    #[error("{model} did not wake up: {reason}")]
    WakeFailed { model: String, reason: String },
    #[error("{model}: waited too long for {what} (request_timeout_seconds)")]
    Deadline { model: String, what: &'static str },
    #[error("the engine of {model} did not answer: {reason}")]
    EngineGone { model: String, reason: String },
}

impl Refusal {
    fn status_and_code(&self) -> (StatusCode, &'static str) {
        match self {
            Self::InvalidJson { .. } => (StatusCode::BAD_REQUEST, "invalid_json"),
            Self::MissingModel { .. } => (StatusCode::BAD_REQUEST, "missing_model"),
            Self::UnknownModel { .. } => (StatusCode::NOT_FOUND, "model_not_found"),
            Self::Body(error) => error.status_and_code(),
            Self::QueueFull { .. } => (StatusCode::TOO_MANY_REQUESTS, "queue_full"),
            Self::Starting { .. } => (StatusCode::SERVICE_UNAVAILABLE, "model_starting"),
            Self::Restarting { .. } => (StatusCode::BAD_GATEWAY, "engine_restarting"),
            Self::Failed { .. } => (StatusCode::BAD_GATEWAY, "engine_failed"),
            Self::Asleep { .. } => (StatusCode::SERVICE_UNAVAILABLE, "model_asleep"),
            Self::WakeFailed { .. } => (StatusCode::BAD_GATEWAY, "wake_failed"),
            Self::Deadline { .. } => (StatusCode::GATEWAY_TIMEOUT, "deadline_exceeded"),
            Self::EngineGone { .. } => (StatusCode::BAD_GATEWAY, "engine_gone"),
        }
    }

    /// As OpenAI's clients read it.
    pub(crate) fn to_api(&self) -> ApiError {
        let (status, code) = self.status_and_code();
        let error = ApiError::new(status, code, self.to_string());
        match self {
            Self::MissingModel { .. } | Self::UnknownModel { .. } => error.about("model"),
            _ => error,
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = self.to_api().into_response();
        if matches!(self, Self::Restarting { .. }) {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}
