//! What there is and how it is, for programs and for the page: `/v1/models`, `/api/status`, `/api/pools`, `/api/events`; and the
//! two things that can be changed about a pool.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures_util::stream::{self, Stream, StreamExt};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tidekv_core::units::Bytes as Size;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::MissedTickBehavior;

use super::desk::{DeskError, DeskView, DeviceSight, PoolSight, ShareTerms};
use super::error::Refusal;
use super::model::{Model, StateWord};
use super::traffic::Percentiles;
use super::{Decided, Gateway};
use crate::access::Access;
use crate::api::error::ApiError;

/// How often those who watch are told.
const EVERY: Duration = Duration::from_secs(1);
/// Rates are over so many seconds.
const RATE_WINDOW: u64 = 60;
/// A change of a limit or share is a few words.
const MAX_CHANGE_BYTES: usize = 4096;

pub(super) async fn models(State(gateway): State<Arc<Gateway>>) -> Json<Value> {
    let list: Vec<Value> = gateway.models.iter().map(|model| model_body(model)).collect();
    Json(json!({"object": "list", "data": list}))
}

/// A Hugging Face id has a slash in it, so the name is the rest of the path.
pub(super) async fn model(
    State(gateway): State<Arc<Gateway>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, Refusal> {
    Ok(Json(model_body(&*gateway.find(&name)?)))
}

fn model_body(model: &Model) -> Value {
    let spec = model.spec();
    json!({"id": spec.name, "object": "model", "created": 0, "owned_by": "tidekv", "root": spec.model, "parent": null})
}

#[derive(Debug, Serialize)]
struct ModelStatus {
    name: String,
    model: String,
    engine: &'static str,
    endpoint: Option<String>,
    state: StateWord,
    pid: Option<u32>,
    restarts: u32,
    in_flight: usize,
    queued: usize,
    request_rate: f64,
    ttft_ms: Percentiles,
    itl_ms: Percentiles,
    idle_s: f64,
    pool: Option<String>,
}

#[derive(Debug, Serialize)]
struct Status {
    version: &'static str,
    uptime_s: f64,
    auth_required: bool,
    models: Vec<ModelStatus>,
    devices: Vec<DeviceSight>,
}

fn status_of(gateway: &Gateway, access: &Access, view: DeskView) -> Status {
    let now = Instant::now();
    let one = |model: &Arc<Model>| {
        let (spec, sight) = (model.spec(), model.sight());
        let (request_rate, ttft_ms, itl_ms) =
            model.traffic(|traffic| (traffic.rate(now, RATE_WINDOW), traffic.ttft_ms(now), traffic.itl_ms(now)));
        let pool = view.pools.iter().find(|pool| pool.model.as_deref() == Some(&spec.name));
        ModelStatus {
            name: spec.name.clone(),
            model: spec.model.clone(),
            engine: spec.engine.name(),
            endpoint: sight.instance.address.map(|address| format!("http://{address}")),
            state: sight.state,
            pid: sight.instance.pid,
            restarts: sight.instance.restarts,
            in_flight: sight.in_flight,
            queued: sight.queued,
            request_rate,
            ttft_ms,
            itl_ms,
            idle_s: sight.idle.as_secs_f64(),
            pool: pool.map(|pool| pool.name.clone()),
        }
    };
    Status {
        version: env!("CARGO_PKG_VERSION"),
        uptime_s: gateway.started.elapsed().as_secs_f64(),
        auth_required: access.has_key(),
        models: gateway.models.iter().map(one).collect(),
        devices: view.devices,
    }
}

#[derive(Debug, Serialize)]
struct Pools {
    pools: Vec<PoolSight>,
}

/// Looks at all pools on a thread that may wait, and says which model each belongs to.
pub(super) async fn look(gateway: &Arc<Gateway>) -> Result<DeskView, DeskError> {
    let looking = Arc::clone(gateway);
    let look = move || {
        let mut view = looking.desk.look()?;
        let instances: Vec<(String, u32)> = looking
            .models
            .iter()
            .filter_map(|model| Some((model.spec().name.clone(), model.instance().pid?)))
            .collect();
        for pool in &mut view.pools {
            let Some(pid) = pool.pid else { continue };
            let owner = instances.iter().find(|(_, instance)| looking.desk.belongs_to(pid, *instance));
            pool.model = owner.map(|(name, _)| name.clone());
        }
        Ok(view)
    };
    tokio::task::spawn_blocking(look).await.unwrap_or_else(|error| Err(DeskError::Failed(error.to_string())))
}

impl From<DeskError> for ApiError {
    fn from(error: DeskError) -> Self {
        let (status, code) = match &error {
            DeskError::NoSuchPool { .. } => (StatusCode::NOT_FOUND, "pool_not_found"),
            DeskError::Refused(_) => (StatusCode::UNPROCESSABLE_ENTITY, "invalid_value"),
            DeskError::Failed(_) => (StatusCode::INTERNAL_SERVER_ERROR, "shared_files"),
        };
        Self::new(status, code, error.to_string())
    }
}

pub(super) async fn status(
    State(gateway): State<Arc<Gateway>>,
    Extension(access): Extension<Arc<Access>>,
) -> Result<Response, ApiError> {
    let view = look(&gateway).await?;
    Ok(Json(status_of(&gateway, &access, view)).into_response())
}

pub(super) async fn pools(State(gateway): State<Arc<Gateway>>) -> Result<Response, ApiError> {
    Ok(Json(Pools { pools: look(&gateway).await?.pools }).into_response())
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitChange {
    bytes: Option<u64>,
    size: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ShareChange {
    weight: Option<u32>,
    floor: Option<String>,
}

fn invalid(message: impl Into<String>) -> ApiError {
    ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid_value", message)
}

fn parsed<'a, T: Deserialize<'a>>(body: &'a Bytes) -> Result<T, ApiError> {
    if body.len() > MAX_CHANGE_BYTES {
        return Err(invalid("the body is too long for a change of a limit or share"));
    }
    serde_json::from_slice(body).map_err(|error| invalid(error.to_string()))
}

fn size(text: &str) -> Result<Size, ApiError> {
    text.parse().map_err(|error: tidekv_core::size::SizeError| invalid(error.to_string()))
}

pub(super) async fn set_limit(
    State(gateway): State<Arc<Gateway>>,
    Path(name): Path<String>,
    body: Bytes,
) -> Result<Json<Value>, ApiError> {
    let limit = match parsed(&body)? {
        LimitChange { bytes: Some(bytes), size: None } => Size(bytes),
        LimitChange { bytes: None, size: Some(text) } => size(&text)?,
        LimitChange { .. } => return Err(invalid("give {\"bytes\": N} or {\"size\": \"2G\"}, one of them")),
    };
    if i64::try_from(limit.0).is_err() {
        return Err(invalid("a limit is below 8 EiB"));
    }
    change(&gateway, &name, format!("limit {limit}"), move |desk, name| desk.set_limit(name, limit)).await?;
    Ok(Json(json!({"ok": true, "pool": name, "limit_bytes": limit.0})))
}

pub(super) async fn set_share(
    State(gateway): State<Arc<Gateway>>,
    Path(name): Path<String>,
    body: Bytes,
) -> Result<Json<Value>, ApiError> {
    let ShareChange { weight, floor } = parsed(&body)?;
    let floor = floor.as_deref().map(size).transpose()?;
    if weight == Some(0) || (weight.is_none() && floor.is_none()) {
        return Err(invalid("give {\"weight\": N} of 1 or more, {\"floor\": \"1G\"}, or both"));
    }
    let terms = ShareTerms { weight, floor };
    let action = format!("share {}", json!({"weight": weight, "floor_bytes": floor.map(|floor| floor.0)}));
    change(&gateway, &name, action, move |desk, name| desk.set_share(name, terms)).await?;
    Ok(Json(json!({"ok": true, "pool": name, "weight": weight, "floor_bytes": floor.map(|floor| floor.0)})))
}

async fn change(
    gateway: &Arc<Gateway>,
    name: &str,
    action: String,
    change: impl FnOnce(&dyn super::Desk, &str) -> Result<(), DeskError> + Send + 'static,
) -> Result<(), ApiError> {
    let (desk, pool) = (Arc::clone(&gateway.desk), name.to_owned());
    let outcome = tokio::task::spawn_blocking(move || change(desk.as_ref(), &pool)).await;
    outcome.unwrap_or_else(|error| Err(DeskError::Failed(error.to_string())))?;
    tracing::info!("{name}: {action}, through the router");
    Ok(())
}

/// Everything, again and again, and decisions as they are taken.
pub(super) async fn events(
    State(gateway): State<Arc<Gateway>>,
    Extension(access): Extension<Arc<Access>>,
) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let mut ticks = tokio::time::interval(EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let looks = stream::unfold((Arc::clone(&gateway), access, ticks), |(gateway, access, mut ticks)| async move {
        ticks.tick().await;
        let events = match look(&gateway).await {
            Ok(view) => {
                let pools = Pools { pools: view.pools.clone() };
                vec![event("status", &status_of(&gateway, &access, view)), event("pools", &pools)]
            }
            Err(error) => vec![event("problem", &json!({"message": error.to_string()}))],
        };
        Some((stream::iter(events), (gateway, access, ticks)))
    });
    let decisions = stream::unfold(gateway.decisions.subscribe(), |mut decisions| async move {
        loop {
            match decisions.recv().await {
                Ok(decided) => return Some((event::<Decided>("decision", &decided), decisions)),
                // Some were missed; the log has them.
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return None,
            }
        }
    });
    let mut closing = gateway.closing.subscribe();
    let closed = async move {
        let _ = closing.wait_for(|&closing| closing).await;
    };
    let events = stream::select(looks.flatten(), decisions).take_until(Box::pin(closed)).map(Ok);
    Sse::new(events).keep_alive(KeepAlive::default())
}

fn event<T: Serialize>(name: &str, body: &T) -> Event {
    let text = serde_json::to_string(body).expect("values of ours have string keys and no NaN that JSON would refuse");
    Event::default().event(name).data(text)
}
