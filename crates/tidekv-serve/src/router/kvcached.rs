//! The pages of kvcached's controller, for scripts that know them. Where kvcached answers 500 for what the asker got wrong, the status
//! here says what it was.
//!
//! | page                                         | answer                                                                |
//! |----------------------------------------------|-----------------------------------------------------------------------|
//! | `GET /health`, `/health/{model}`, `/health/all` | the router's own; engines are asked                                 |
//! | `GET /models`, `/models/idle`, `/models/active` | where engines listen; who was idle for `threshold` seconds          |
//! | `GET /traffic/stats`, `/traffic/stats/{model}`  | counts, and rates over `window` seconds                             |
//! | `GET /sleep/status`, `/sleep/candidates`     | who sleeps; who could                                                 |
//! | `POST /action/sleep/{model}`, `/action/wakeup/{model}` | `{model_name, success, message}`: 200, 400 where it cannot, 404 |

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::Gateway;
use super::error::Refusal;
use super::model::{EngineKind, Model, StateWord};
use super::rest::until_wakeable;
use crate::access::KeyRule;
use crate::api::error::ApiError;
use crate::pages::Page;

/// Names may have slashes in them, so they are the rest of the path.
pub(super) fn pages() -> Vec<Page<Arc<Gateway>>> {
    vec![
        Page::get("/health", KeyRule::Open, health),
        Page::get("/ping", KeyRule::Open, health),
        Page::get("/health/{*model}", KeyRule::Open, model_health),
        Page::get("/models", KeyRule::Open, models),
        Page::get("/models/idle", KeyRule::Open, idle_models),
        Page::get("/models/active", KeyRule::Open, active_models),
        Page::get("/get_server_info", KeyRule::Open, server_info),
        Page::get("/traffic/stats", KeyRule::Open, traffic),
        Page::get("/traffic/stats/{*model}", KeyRule::Open, model_traffic),
        Page::get("/sleep/status", KeyRule::Open, sleep_status),
        Page::get("/sleep/candidates", KeyRule::Open, sleep_candidates),
        Page::post("/action/sleep/{*model}", KeyRule::IfSet, sleep),
        Page::post("/action/wakeup/{*model}", KeyRule::IfSet, wake_up),
    ]
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct Span {
    #[serde(default = "Span::window")]
    window: u64,
    #[serde(default = "Span::threshold")]
    threshold: u64,
}

impl Span {
    fn window() -> u64 {
        60
    }

    fn threshold() -> u64 {
        300
    }
}

type SpanQuery = Result<Query<Span>, QueryRejection>;

fn span(query: SpanQuery) -> Result<Span, ApiError> {
    query.map(|Query(span)| span).map_err(|error| ApiError::invalid("window", error.body_text()))
}

async fn health() -> Json<Value> {
    Json(json!({"status": "healthy"}))
}

async fn server_info() -> Json<Value> {
    Json(json!({"status": "ok", "version": env!("CARGO_PKG_VERSION")}))
}

/// Asks the engine of a model, or of all of them at once.
async fn model_health(State(gateway): State<Arc<Gateway>>, Path(asked): Path<String>) -> Result<Response, Refusal> {
    let models = if asked == "all" { gateway.models.clone() } else { vec![gateway.find(&asked)?] };
    let answers = models.iter().map(|model| async {
        let is_well = match model.instance().address {
            Some(address) => gateway.upstream.health(&address).await.is_ok(),
            None => false,
        };
        (model.spec().name.clone(), is_well)
    });
    let answers = futures_util::future::join_all(answers).await;
    let status =
        if answers.iter().all(|(_, is_well)| *is_well) { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let health: Map<String, Value> = answers.into_iter().map(|(name, is_well)| (name, is_well.into())).collect();
    Ok((status, Json(json!({"model": asked, "health": health}))).into_response())
}

async fn models(State(gateway): State<Arc<Gateway>>) -> Json<Value> {
    let all = gateway.models.iter().map(|model| {
        let address = model.instance().address;
        let (host, port) = address.as_deref().and_then(|address| address.rsplit_once(':')).unzip();
        let port: Option<u16> = port.and_then(|port| port.parse().ok());
        (model.spec().name.clone(), json!({"endpoint": {"host": host, "port": port}}))
    });
    Json(json!({"models": all.collect::<Map<_, _>>()}))
}

/// kvcached's figures of one model.
fn figures(model: &Model, span: Span) -> Value {
    let now = Instant::now();
    let sight = model.sight();
    let (all, rate) = model.traffic(|traffic| (traffic.all(), traffic.rate(now, span.window)));
    json!({
        "model_name": model.spec().name,
        "total_requests": all.started,
        "successful_requests": all.good,
        "failed_requests": all.bad,
        "request_rate": rate,
        "avg_response_time": all.mean_seconds(),
        "last_activity_time": unix_time() - sight.idle.as_secs_f64(),
        "idle_time_seconds": sight.idle.as_secs_f64(),
        "is_idle": is_idle(model, span.threshold),
    })
}

fn is_idle(model: &Model, threshold: u64) -> bool {
    let sight = model.sight();
    sight.in_flight + sight.queued == 0 && sight.idle >= Duration::from_secs(threshold)
}

fn unix_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

async fn traffic(State(gateway): State<Arc<Gateway>>, query: SpanQuery) -> Result<Json<Value>, ApiError> {
    let span = span(query)?;
    let all: Map<_, _> = gateway.models.iter().map(|model| (model.spec().name.clone(), figures(model, span))).collect();
    Ok(Json(json!({"traffic_stats": all, "window_seconds": span.window})))
}

async fn model_traffic(
    State(gateway): State<Arc<Gateway>>,
    Path(asked): Path<String>,
    query: SpanQuery,
) -> Result<Json<Value>, ApiError> {
    let span = span(query)?;
    let model = gateway.find(&asked).map_err(|refusal| refusal.to_api())?;
    Ok(Json(json!({"model_stats": figures(&model, span), "window_seconds": span.window})))
}

fn those(gateway: &Gateway, span: Span, wanted: impl Fn(&Model) -> bool) -> (Vec<String>, Map<String, Value>) {
    let models: Vec<_> = gateway.models.iter().filter(|model| wanted(model)).collect();
    let names = models.iter().map(|model| model.spec().name.clone()).collect();
    let details = models.iter().map(|model| (model.spec().name.clone(), figures(model, span))).collect();
    (names, details)
}

async fn idle_models(State(gateway): State<Arc<Gateway>>, query: SpanQuery) -> Result<Json<Value>, ApiError> {
    let span = span(query)?;
    let (names, details) = those(&gateway, span, |model| is_idle(model, span.threshold));
    let count = names.len();
    Ok(Json(json!({
        "idle_models": names, "idle_threshold_seconds": span.threshold,
        "idle_model_details": details, "idle_models_count": count,
    })))
}

async fn active_models(State(gateway): State<Arc<Gateway>>, query: SpanQuery) -> Result<Json<Value>, ApiError> {
    let span = span(query)?;
    let (names, details) = those(&gateway, span, |model| !is_idle(model, span.threshold));
    let count = names.len();
    Ok(Json(json!({
        "active_models": names, "idle_threshold_seconds": span.threshold, "window_seconds": span.window,
        "active_model_details": details, "active_models_count": count,
    })))
}

async fn sleep_status(State(gateway): State<Arc<Gateway>>) -> Json<Value> {
    let now = Instant::now();
    let settings = gateway.settings.sleep;
    let sleeping: Map<_, _> = gateway
        .models
        .iter()
        .filter_map(|model| {
            let since = model.sight().asleep_since?;
            let slept = now.saturating_duration_since(since).as_secs_f64();
            let wait = until_wakeable(since, settings.min_sleep, now).as_secs_f64();
            let about = json!({
                "sleep_start_time": unix_time() - slept, "sleep_duration": slept, "seconds_until_wakeable": wait,
            });
            Some((model.spec().name.clone(), about))
        })
        .collect();
    let count = sleeping.len();
    Json(json!({
        "sleeping_models": sleeping,
        "sleeping_models_count": count,
        "config": {
            "idle_threshold_seconds": settings.idle_threshold.as_secs_f64(),
            "check_interval_seconds": settings.check_interval.as_secs_f64(),
            "auto_sleep_enabled": settings.is_automatic,
            "wakeup_on_request": settings.wakes_on_request,
            "min_sleep_duration": settings.min_sleep.as_secs_f64(),
        },
    }))
}

async fn sleep_candidates(State(gateway): State<Arc<Gateway>>) -> Json<Value> {
    let threshold = gateway.settings.sleep.idle_threshold;
    let could = |model: &&Arc<Model>| {
        let sight = model.sight();
        let can_sleep = model.spec().engine != EngineKind::Command;
        can_sleep && sight.state == StateWord::Ready && sight.in_flight + sight.queued == 0 && sight.idle >= threshold
    };
    let names: Vec<_> = gateway.models.iter().filter(could).map(|model| model.spec().name.clone()).collect();
    let count = names.len();
    Json(json!({"sleep_candidates": names, "candidates_count": count}))
}

async fn sleep(State(gateway): State<Arc<Gateway>>, Path(asked): Path<String>) -> Response {
    let begin = |model: &Arc<Model>| model.begin_sleep();
    act(&gateway, &asked, Order::Sleep, begin).await
}

async fn wake_up(State(gateway): State<Arc<Gateway>>, Path(asked): Path<String>) -> Response {
    let begin = |model: &Arc<Model>| model.begin_wake();
    act(&gateway, &asked, Order::WakeUp, begin).await
}

#[derive(Clone, Copy)]
enum Order {
    Sleep,
    WakeUp,
}

async fn act(
    gateway: &Arc<Gateway>,
    asked: &str,
    order: Order,
    begin: impl FnOnce(&Arc<Model>) -> Result<super::Errand, super::model::CannotRest>,
) -> Response {
    let answer = |status: StatusCode, name: &str, message: String| {
        (status, Json(json!({"model_name": name, "success": status.is_success(), "message": message}))).into_response()
    };
    let model = match gateway.find(asked) {
        Ok(model) => model,
        Err(refusal) => return answer(StatusCode::NOT_FOUND, asked, refusal.to_string()),
    };
    let name = model.spec().name.clone();
    let errand = match begin(&model) {
        Ok(errand) => errand,
        Err(cannot) => return answer(StatusCode::BAD_REQUEST, &name, format!("{name}: {cannot}")),
    };
    // Carried out to its end, whether or not whoever gave the order stays.
    let gateway = Arc::clone(gateway);
    let carried_out = tokio::spawn(async move {
        match order {
            Order::Sleep => gateway.sleep(&model, &errand).await,
            Order::WakeUp => gateway.wake(&model, &errand).await,
        }
    });
    let done = match order {
        Order::Sleep => "is asleep",
        Order::WakeUp => "is awake",
    };
    match carried_out.await.unwrap_or_else(|error| Err(error.to_string())) {
        Ok(()) => answer(StatusCode::OK, &name, format!("{name} {done}")),
        Err(reason) => answer(StatusCode::BAD_REQUEST, &name, format!("{name}: the engine refused: {reason}")),
    }
}
