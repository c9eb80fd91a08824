//! The router's side towards engines: connections that are kept and used again, and the few calls that are the router's own.
//!
//! A request goes out once. It is sent again only where no byte of it can have reached the engine: the connection could not be
//! made, or one that was kept turned out to be closed before it was used (the client below does that itself).

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{HeaderMap, Method, Request, Response, StatusCode, Uri, header};
use http_body::{Frame, SizeHint};
use http_body_util::{BodyExt, Collected, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde_json::{Value, json};

use super::model::EngineKind;

/// Engines behind uvicorn close connections that were idle for 5 s: ours are gone before.
const KEPT_FOR: Duration = Duration::from_secs(4);
/// An engine on this machine answers a connection at once or not at all.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Answers to the router's own calls are short.
const OWN_ANSWER_BYTES: usize = 1 << 16;
/// An engine has so long to say that it is well.
pub(crate) const HEALTH_TIMEOUT: Duration = Duration::from_secs(5);
/// Weights may be read from a disk again.
const REST_TIMEOUT: Duration = Duration::from_secs(600);

/// The body of a request: parts of what the client sent, which are not copied, with a name of ours between them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Parts(pub(crate) [Bytes; 3]);

impl From<Bytes> for Parts {
    fn from(whole: Bytes) -> Self {
        Self([whole, Bytes::new(), Bytes::new()])
    }
}

impl http_body::Body for Parts {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let next = self.0.iter_mut().find(|part| !part.is_empty());
        Poll::Ready(next.map(|part| Ok(Frame::data(std::mem::take(part)))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.iter().all(Bytes::is_empty)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.iter().map(|part| part.len() as u64).sum())
    }
}

/// Calls engines. Clones share the connections.
#[derive(Clone, Debug)]
pub(crate) struct Upstream {
    client: Client<HttpConnector, Parts>,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub(crate) struct NoAnswer {
    reason: String,
}

impl Upstream {
    /// Without connections yet.
    pub(crate) fn new() -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let client = Client::builder(TokioExecutor::new())
            .pool_idle_timeout(KEPT_FOR)
            .pool_timer(TokioTimer::new())
            .retry_canceled_requests(true)
            .build(connector);
        Self { client }
    }

    /// Sends a request, and sends it once more if no connection could be made.
    pub(crate) async fn send(
        &self,
        method: &Method,
        address: &str,
        path_and_query: &str,
        headers: &HeaderMap,
        body: &Parts,
    ) -> Result<Response<Incoming>, NoAnswer> {
        let uri: Uri = format!("http://{address}{path_and_query}")
            .parse()
            .map_err(|error| NoAnswer { reason: format!("{address} is not an address: {error}") })?;
        let mut tries = 2;
        loop {
            tries -= 1;
            let mut request = Request::new(body.clone());
            *request.method_mut() = method.clone();
            *request.uri_mut() = uri.clone();
            *request.headers_mut() = headers.clone();
            match self.client.request(request).await {
                Ok(response) => return Ok(response),
                Err(error) if error.is_connect() && tries > 0 => tokio::task::yield_now().await,
                Err(error) => return Err(NoAnswer { reason: causes(&error) }),
            }
        }
    }

    /// A call of the router's own: what the engine answered, or why it did not carry it out in its words.
    async fn call(
        &self,
        method: Method,
        address: &str,
        path: &str,
        body: &Value,
        timeout: Duration,
    ) -> Result<Bytes, String> {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
        let body = if body.is_null() { Bytes::new() } else { Bytes::from(body.to_string()) };
        let answer = async {
            let response =
                self.send(&method, address, path, &headers, &body.into()).await.map_err(|error| error.to_string())?;
            let status = response.status();
            let body = Limited::new(response.into_body(), OWN_ANSWER_BYTES).collect().await;
            let body = body.map(Collected::to_bytes).unwrap_or_default();
            if status.is_success() { Ok(body) } else { Err(said(status, path, &String::from_utf8_lossy(&body))) }
        };
        match tokio::time::timeout(timeout, answer).await {
            Ok(answer) => answer,
            Err(_) => Err(format!("{path} was not answered within {} s", timeout.as_secs())),
        }
    }

    /// Whether the engine says that it is well.
    pub(crate) async fn health(&self, address: &str) -> Result<(), String> {
        self.call(Method::GET, address, "/health", &Value::Null, HEALTH_TIMEOUT).await.map(drop)
    }

    /// Whether the engine says that it sleeps; none where it does not say.
    pub(crate) async fn is_sleeping(&self, engine: EngineKind, address: &str) -> Option<bool> {
        let (EngineKind::Kvserve | EngineKind::Vllm) = engine else { return None };
        let body = self.call(Method::GET, address, "/is_sleeping", &Value::Null, HEALTH_TIMEOUT).await.ok()?;
        serde_json::from_slice::<Value>(&body).ok()?["is_sleeping"].as_bool()
    }

    /// Has the engine give its memory back.
    pub(crate) async fn sleep(&self, engine: EngineKind, address: &str, level: u8) -> Result<(), String> {
        match engine {
            EngineKind::Kvserve | EngineKind::Vllm => {
                // The level in the query is vLLM's way, in the body kvcached's: an engine reads the one it knows.
                let path = format!("/sleep?level={level}");
                self.call(Method::POST, address, &path, &json!({"level": level.to_string()}), REST_TIMEOUT)
                    .await
                    .map(drop)
            }
            EngineKind::Sglang => {
                self.call(Method::POST, address, "/release_memory_occupation", &json!({}), REST_TIMEOUT).await.map(drop)
            }
            EngineKind::Command => Err("the router knows no page of it that makes it sleep".to_owned()),
        }
    }

    /// Has the engine take its memory again.
    pub(crate) async fn wake(&self, engine: EngineKind, address: &str, model: &str) -> Result<(), String> {
        match engine {
            EngineKind::Kvserve | EngineKind::Vllm => {
                self.call(Method::POST, address, "/wake_up", &Value::Null, REST_TIMEOUT).await.map(drop)
            }
            EngineKind::Sglang => {
                self.call(Method::POST, address, "/resume_memory_occupation", &json!({}), REST_TIMEOUT).await?;
                // SGLang's weights are not what they were: it reads them again.
                let weights = json!({"model_path": model});
                self.call(Method::POST, address, "/update_weights_from_disk", &weights, REST_TIMEOUT).await.map(drop)
            }
            EngineKind::Command => Err("the router knows no page of it that wakes it up".to_owned()),
        }
    }
}

/// What an engine said, short enough for a log.
fn said(status: StatusCode, path: &str, text: &str) -> String {
    let message = serde_json::from_str::<Value>(text).ok();
    let message = message.as_ref().and_then(|value| value.pointer("/error/message")).and_then(Value::as_str);
    let text: String = message.unwrap_or(text).chars().take(300).collect();
    format!("{path} answered {}: {}", status.as_u16(), text.trim())
}

/// An error and its causes on one line.
fn causes(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        line = format!("{line}: {error}");
        cause = error.source();
    }
    line
}
