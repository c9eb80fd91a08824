//! An engine that does what a test tells it, and remembers what was asked of it.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::sync::{Notify, Semaphore, mpsc};

/// What came to the engine.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) at: Instant,
    pub(crate) path: String,
    pub(crate) body: Value,
    pub(crate) headers: HeaderMap,
}

/// How an engine behaves; shared with the test.
#[derive(Debug)]
pub(crate) struct Script {
    pub(crate) asked: Mutex<Vec<Asked>>,
    /// Answers wait for one of these each, where `is_gated`.
    pub(crate) gate: Semaphore,
    pub(crate) is_gated: bool,
    /// Wake-ups wait for one of these each, where `is_wake_gated`.
    pub(crate) wake_gate: Semaphore,
    pub(crate) is_wake_gated: bool,
    /// It gave its memory up: it refuses requests.
    pub(crate) is_asleep: AtomicBool,
    /// Sleeps whose answer is an error although it sleeps.
    pub(crate) lost_sleeps: AtomicUsize,
    /// Wake-ups that fail before one succeeds.
    pub(crate) failing_wakes: AtomicUsize,
    /// Requests with `"stream": true` get what the test sends here.
    pub(crate) pieces: Mutex<Option<mpsc::UnboundedReceiver<Option<Bytes>>>>,
    /// Answers that nobody waited for to their end.
    pub(crate) cancelled: AtomicUsize,
    pub(crate) on_cancel: Notify,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            asked: Mutex::default(),
            gate: Semaphore::new(0),
            is_gated: false,
            wake_gate: Semaphore::new(0),
            is_wake_gated: false,
            is_asleep: AtomicBool::new(false),
            lost_sleeps: AtomicUsize::new(0),
            failing_wakes: AtomicUsize::new(0),
            pieces: Mutex::default(),
            cancelled: AtomicUsize::new(0),
            on_cancel: Notify::new(),
        }
    }
}

impl Script {
    pub(crate) fn asked_of(&self, path: &str) -> Vec<Asked> {
        self.asked.lock().unwrap().iter().filter(|asked| asked.path == path).cloned().collect()
    }

    /// The pieces of the next stream, sent by the test; none ends it as if the engine had died.
    pub(crate) fn next_stream(&self) -> mpsc::UnboundedSender<Option<Bytes>> {
        let (send, receive) = mpsc::unbounded_channel();
        *self.pieces.lock().unwrap() = Some(receive);
        send
    }
}

/// Counts itself if it is dropped before it was told that all is well.
struct Cancel {
    script: Arc<Script>,
    is_over: bool,
}

impl Cancel {
    /// Nobody has to be told.
    fn call_off(mut self) {
        self.is_over = true;
    }
}

impl Drop for Cancel {
    fn drop(&mut self) {
        if !self.is_over {
            self.script.cancelled.fetch_add(1, Ordering::SeqCst);
            self.script.on_cancel.notify_one();
        }
    }
}

/// Serves on a port that the kernel chose, for as long as the runtime lives.
pub(crate) async fn start(script: Arc<Script>) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(answer).with_state(script)).await });
    address
}

async fn answer(
    State(script): State<Arc<Script>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let body: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
    let asked = Asked { at: Instant::now(), path: uri.path().to_owned(), body: body.clone(), headers };
    script.asked.lock().unwrap().push(asked);
    match (method.as_str(), uri.path()) {
        ("GET", "/health") => StatusCode::OK.into_response(),
        ("GET", "/is_sleeping") => {
            axum::Json(json!({"is_sleeping": script.is_asleep.load(Ordering::SeqCst)})).into_response()
        }
        ("POST", "/sleep") => sleep(&script),
        ("POST", "/wake_up") => wake_up(&script).await,
        ("POST", _) => generate(script, body).await,
        _ => StatusCode::NOT_FOUND.into_response(),
    }
}

fn sleep(script: &Script) -> Response {
    script.is_asleep.store(true, Ordering::SeqCst);
    if take(&script.lost_sleeps) { StatusCode::GATEWAY_TIMEOUT.into_response() } else { StatusCode::OK.into_response() }
}

/// One of so many, if any are left.
fn take(left: &AtomicUsize) -> bool {
    left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
}

async fn wake_up(script: &Script) -> Response {
    if script.is_wake_gated {
        script.wake_gate.acquire().await.unwrap().forget();
    }
    if take(&script.failing_wakes) {
        return (StatusCode::SERVICE_UNAVAILABLE, "{\"error\": {\"message\": \"no memory\"}}").into_response();
    }
    script.is_asleep.store(false, Ordering::SeqCst);
    StatusCode::OK.into_response()
}

async fn generate(script: Arc<Script>, body: Value) -> Response {
    if script.is_asleep.load(Ordering::SeqCst) {
        return (StatusCode::SERVICE_UNAVAILABLE, "{\"error\": {\"code\": \"model_asleep\"}}").into_response();
    }
    let cancel = Cancel { script: Arc::clone(&script), is_over: false };
    if body["stream"] == true {
        let pieces = script.pieces.lock().unwrap().take().expect("the test made a stream");
        let pieces = stream::unfold((pieces, cancel), |(mut pieces, cancel)| async move {
            match pieces.recv().await {
                Some(Some(piece)) => Some((Ok(piece), (pieces, cancel))),
                Some(None) => Some((Err(std::io::Error::other("died")), (pieces, cancel))),
                None => {
                    cancel.call_off();
                    None
                }
            }
        });
        return ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(pieces)).into_response();
    }
    if script.is_gated {
        script.gate.acquire().await.unwrap().forget();
    }
    cancel.call_off();
    match body["prompt"].as_str() {
        Some("teapot") => {
            (StatusCode::IM_A_TEAPOT, [("x-mine", "kept")], "{\"error\": {\"message\": \"short and stout\"}}")
                .into_response()
        }
        _ => axum::Json(json!({"model": body["model"], "choices": [{"text": "ok"}]})).into_response(),
    }
}
