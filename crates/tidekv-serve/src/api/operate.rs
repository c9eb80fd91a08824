//! The pages beside the answers: what is served, whether it is well, what it holds, and sleep.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use super::error::ApiError;
use super::{Service, request};
use crate::handle::{Engine, Health, SleepError, SubmitError};

pub(super) async fn models(State(service): State<Arc<Service>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [model_body(&service)]}))
}

/// A Hugging Face id has a slash in it, so the name is the rest of the path.
pub(super) async fn model(
    State(service): State<Arc<Service>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    service.check_model(Some(&name))?;
    Ok(Json(model_body(&service)))
}

fn model_body(service: &Service) -> Value {
    json!({
        "id": service.name, "object": "model", "created": service.created, "owned_by": "tidekv",
        "root": service.model.name, "parent": null, "max_model_len": service.model.context_tokens,
    })
}

pub(super) async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// 200 while the engine can answer, asleep or awake; 503 and why when only a new process could.
pub(super) async fn health(State(service): State<Arc<Service>>) -> Response {
    let (status, word, reason) = match service.engine.health() {
        Health::Well => (StatusCode::OK, "healthy", None),
        Health::DeviceLost { what } => {
            let reason = SubmitError::DeviceLost { what }.to_string();
            (StatusCode::SERVICE_UNAVAILABLE, "device_lost", Some(reason))
        }
        Health::Stopped => (StatusCode::SERVICE_UNAVAILABLE, "stopped", Some(SubmitError::EngineGone.to_string())),
    };
    let mut body = json!({"status": word, "model": service.name, "kv_mode": service.engine.stats().kv_mode.name()});
    if let Some(reason) = reason {
        body["reason"] = reason.into();
    }
    (status, Json(body)).into_response()
}

pub(super) async fn metrics(State(service): State<Arc<Service>>) -> Response {
    let page = service.metrics.page(&service.name, &service.engine.stats(), service.engine.is_sleeping());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page).into_response()
}

#[derive(Deserialize)]
pub(super) struct SleepQuery {
    level: Option<u8>,
}

/// The level stands in the query (vLLM) or in a JSON body (kvcached's controller); 1 without either.
pub(super) async fn sleep(
    State(service): State<Arc<Service>>,
    query: Result<Query<SleepQuery>, QueryRejection>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Value>, ApiError> {
    let in_query = query.map_err(|error| ApiError::invalid("level", error.body_text()))?.level;
    let level = match in_query {
        Some(level) => level,
        None => request::sleep_level(&super::whole_body(body)?)?.unwrap_or(1),
    };
    change(service, move |engine| engine.sleep(level)).await
}

pub(super) async fn wake_up(State(service): State<Arc<Service>>) -> Result<Json<Value>, ApiError> {
    change(service, |engine| engine.wake_up()).await
}

pub(super) async fn is_sleeping(State(service): State<Arc<Service>>) -> Json<Value> {
    Json(json!({"is_sleeping": service.engine.is_sleeping()}))
}

/// Runs what may take long where it holds nobody up.
async fn change(
    service: Arc<Service>,
    act: impl FnOnce(&dyn Engine) -> Result<(), SleepError> + Send + 'static,
) -> Result<Json<Value>, ApiError> {
    let engine = Arc::clone(&service.engine);
    match tokio::task::spawn_blocking(move || act(engine.as_ref())).await {
        Ok(changed) => changed?,
        Err(_) => return Err(SleepError::EngineGone.into()),
    }
    Ok(Json(json!({"is_sleeping": service.engine.is_sleeping()})))
}
