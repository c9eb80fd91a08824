//! A request on its way to an engine, and the answer on its way back, piece by piece as it comes.
//!
//! ```text
//!   client ── body ──> whose model? ──> Pass ──> engine
//!          <── status, headers, pieces as they come ──┘      dropped by the client: dropped here, cancelled there
//! ```
//!
//! Nothing of an answer is held back; the times of streams are taken. One answer is looked into: a 503, which may say that the engine
//! sleeps although nobody here knew. Then the model is woken and asked once more: it had not begun. An answer that breaks off in its middle cannot get
//! another status any more: a stream of events ends with an event that says so, any other answer is cut off.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Uri, Version, header};
use axum::response::IntoResponse;
use http_body::{Frame, SizeHint};
use http_body_util::{BodyExt, Collected};
use hyper::body::Incoming;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::Sleep;

use super::Gateway;
use super::error::Refusal;
use super::model::{EngineKind, Pass};
use super::upstream::Parts;
use crate::body_budget::BodyError;

/// A request may be so large: pictures in it are large too.
pub const MAX_BODY_BYTES: usize = 64 << 20;

/// A refusal that says that the engine sleeps is shorter.
const LOOKED_AT_BYTES: u64 = 4 << 10;

/// What concerns one connection and is not passed on.
const HOP_BY_HOP: [HeaderName; 8] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// The part of a request that decides where it goes.
#[derive(Deserialize)]
struct Head<'a> {
    #[serde(borrow)]
    model: Option<&'a RawValue>,
}

/// All pages that are answered by the engine of the model in the body.
pub(super) async fn relay(
    State(gateway): State<Arc<Gateway>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Body,
) -> Response<Body> {
    match pass_on(&gateway, &method, &uri, headers, body).await {
        Ok(response) => response,
        Err(refusal) => refusal.into_response(),
    }
}

async fn pass_on(
    gateway: &Arc<Gateway>,
    method: &Method,
    uri: &Uri,
    mut headers: HeaderMap,
    body: Body,
) -> Result<Response<Body>, Refusal> {
    let deadline = Instant::now() + gateway.settings.request_timeout;
    let body = match tokio::time::timeout_at(deadline.into(), whole(body)).await {
        Ok(body) => body?,
        Err(_) => return Err(Refusal::Body(BodyError::TooSlow)),
    };
    let head: Head<'_> =
        serde_json::from_slice(&body).map_err(|error| Refusal::InvalidJson { reason: error.to_string() })?;
    let asked: Option<String> = head.model.and_then(|raw| serde_json::from_str(raw.get()).ok());
    let Some(asked) = asked else {
        return Err(Refusal::MissingModel { known: gateway.known() });
    };
    let model = gateway.find(&asked)?;
    let served = &model.spec().served_name;
    let body = match head.model {
        Some(raw) if asked != *served => renamed(&body, raw, served),
        _ => Parts::from(body.clone()),
    };

    let (sleep, wake) = (&gateway.settings.sleep, |errand| gateway.wake_in_background(&model, errand));
    let mut pass = model.enter(sleep, deadline, wake).await?;
    strip(&mut headers);
    headers.remove(header::HOST);
    headers.remove(header::CONTENT_LENGTH);
    // The body is here already: nobody has to ask whether to send it.
    headers.remove(header::EXPECT);
    let path = uri.path_and_query().map_or(uri.path(), |path| path.as_str());
    let gone = |reason| Refusal::EngineGone { model: model.spec().name.clone(), reason };
    let late = |_| Refusal::Deadline { model: model.spec().name.clone(), what: "the engine's answer" };
    // Whose sleep is not ours to end says so itself, and is asked again with the next request: it may be woken past us.
    let may_wake = sleep.wakes_on_request && model.spec().engine != EngineKind::Command;
    // Once more for an engine that slept; one that sleeps again says so itself.
    for may_sleep in [may_wake, false] {
        let answer = gateway.upstream.send(method, &pass.address, path, &headers, &body);
        let answer = tokio::time::timeout_at(deadline.into(), answer).await.map_err(late)?;
        let answer = answer.map_err(|error| gone(error.to_string()))?;
        if !(may_sleep && may_say_asleep(&answer)) {
            return Ok(returned(answer, pass, gateway.settings.stream_timeout));
        }
        let (mut head, said) = answer.into_parts();
        let said = tokio::time::timeout_at(deadline.into(), said.collect()).await.map_err(late)?;
        let said = said.map_err(|error| gone(error.to_string()))?.to_bytes();
        if !says_asleep(&said) {
            head.version = Version::HTTP_11;
            strip(&mut head.headers);
            return Ok(Response::from_parts(head, Body::from(said)));
        }
        pass.wake_again(sleep, deadline, wake).await?;
    }
    unreachable!("the second answer is passed on whatever it is")
}

/// Whether an answer is worth looking into: a refusal of an engine that is short.
fn may_say_asleep(answer: &Response<Incoming>) -> bool {
    let most = http_body::Body::size_hint(answer.body()).upper();
    answer.status() == StatusCode::SERVICE_UNAVAILABLE && most.is_some_and(|most| most <= LOOKED_AT_BYTES)
}

fn says_asleep(body: &[u8]) -> bool {
    let body: Option<serde_json::Value> = serde_json::from_slice(body).ok();
    body.is_some_and(|body| body.pointer("/error/code").is_some_and(|code| code == "model_asleep"))
}

async fn whole(body: Body) -> Result<Bytes, Refusal> {
    // It comes in one piece, which the budget knows of until it was sent.
    body.collect().await.map(Collected::to_bytes).map_err(|error| match BodyError::behind(&error) {
        Some(reason) => Refusal::Body(reason),
        None => Refusal::InvalidJson { reason: error.to_string() },
    })
}

/// The body with another model in it and every other byte as it was, and where it was.
fn renamed(body: &Bytes, model: &RawValue, name: &str) -> Parts {
    // The raw value is a part of the body, so where it lies is a difference of addresses.
    let start = model.get().as_ptr().addr() - body.as_ptr().addr();
    let end = start + model.get().len();
    let name = serde_json::Value::from(name).to_string();
    Parts([body.slice(..start), name.into(), body.slice(end..)])
}

/// Takes off what concerns one connection alone.
fn strip(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// The engine's answer as ours.
fn returned(answer: Response<Incoming>, pass: Pass, stream_timeout: Duration) -> Response<Body> {
    let (mut head, body) = answer.into_parts();
    // The engine's version is the business of our connection to it.
    head.version = Version::HTTP_11;
    strip(&mut head.headers);
    let kind = head.headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    let is_stream = kind.is_some_and(|kind| kind.starts_with(b"text/event-stream"));
    let pieces = Pieces {
        inner: Some(body),
        pass,
        is_good: head.status < StatusCode::BAD_REQUEST,
        is_stream,
        is_mid_event: false,
        latest: None,
        stream_timeout,
        silence: Box::pin(tokio::time::sleep(stream_timeout)),
    };
    Response::from_parts(head, Body::new(pieces))
}

/// An answer on its way: pieces, their times, and the pass of the request until the last of them.
struct Pieces {
    /// None once the answer is over.
    inner: Option<Incoming>,
    pass: Pass,
    is_good: bool,
    is_stream: bool,
    /// The latest piece ends in the middle of an event.
    is_mid_event: bool,
    latest: Option<Instant>,
    stream_timeout: Duration,
    silence: Pin<Box<Sleep>>,
}

impl fmt::Debug for Pieces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pieces").field("pass", &self.pass).finish_non_exhaustive()
    }
}

/// Whether a piece of a stream has more in it than comments, which engines send while they have nothing to say.
fn says_something(piece: &[u8]) -> bool {
    piece.split(|&byte| byte == b'\n').any(|line| !matches!(line.first(), None | Some(b':' | b'\r')))
}

/// Why an answer that had begun was cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum BrokenOff {
    #[error("the engine ended in the middle of its answer")]
    EngineGone,
    #[error("the engine was silent for too long in the middle of its answer (stream_timeout_seconds)")]
    Silent,
}

impl Pieces {
    fn time(&mut self) {
        let now = Instant::now();
        let (came, latest) = (self.pass.came(), self.latest.replace(now));
        self.pass.model().traffic(|traffic| match latest {
            None => traffic.first_token(now, now - came),
            Some(latest) => traffic.next_token(now, now - latest),
        });
    }

    /// Ends the answer early. In a stream of events that is an event.
    fn break_off(&mut self, why: BrokenOff) -> Option<Result<Frame<Bytes>, BrokenOff>> {
        self.inner = None;
        tracing::warn!("{}: {why}", self.pass.model().spec().name);
        if !self.is_stream {
            return Some(Err(why));
        }
        let error = Refusal::EngineGone { model: self.pass.model().spec().name.clone(), reason: why.to_string() };
        // What was under way is half a line, and this must not become the rest of it.
        let end = if self.is_mid_event { "\n\n" } else { "" };
        let text = format!("{end}data: {}\n\ndata: [DONE]\n\n", error.to_api().body());
        Some(Ok(Frame::data(text.into())))
    }
}

impl http_body::Body for Pieces {
    type Data = Bytes;
    type Error = BrokenOff;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
        let this = &mut *self;
        let Some(inner) = &mut this.inner else { return Poll::Ready(None) };
        match Pin::new(inner).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                let next = tokio::time::Instant::now() + this.stream_timeout;
                this.silence.as_mut().reset(next);
                if let Some(piece) = frame.data_ref().filter(|piece| !piece.is_empty()) {
                    this.is_mid_event = !piece.ends_with(b"\n\n") && !piece.ends_with(b"\r\n\r\n");
                    if this.is_good && this.is_stream && says_something(piece) {
                        this.time();
                    }
                }
                if this.is_good && this.inner.as_ref().is_some_and(http_body::Body::is_end_stream) {
                    this.pass.ended_well();
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(_))) => Poll::Ready(this.break_off(BrokenOff::EngineGone)),
            Poll::Ready(None) => {
                this.inner = None;
                if this.is_good {
                    this.pass.ended_well();
                }
                Poll::Ready(None)
            }
            Poll::Pending => match this.silence.as_mut().poll(cx) {
                Poll::Ready(()) => Poll::Ready(this.break_off(BrokenOff::Silent)),
                Poll::Pending => Poll::Pending,
            },
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.as_ref().is_none_or(http_body::Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.as_ref().map(http_body::Body::size_hint).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rename(body: &str, name: &str) -> String {
        let body = Bytes::copy_from_slice(body.as_bytes());
        let head: Head<'_> = serde_json::from_slice(&body).unwrap();
        String::from_utf8(renamed(&body, head.model.unwrap(), name).0.concat()).unwrap()
    }

    #[test]
    fn only_the_name_of_the_model_changes() {
        assert_eq!(
            rename("{ \"a\": 1e400, \"model\" : \"default\" , \"b\": 12345678901234567890123 }", "Qwen/Qwen3"),
            "{ \"a\": 1e400, \"model\" : \"Qwen/Qwen3\" , \"b\": 12345678901234567890123 }"
        );
        assert_eq!(rename("{\"model\":\"m\\u00e9\"}", "a\"b"), "{\"model\":\"a\\\"b\"}");
    }

    #[test]
    fn comments_say_nothing() {
        for silent in [": keep-alive\n\n", ":\n\n", "\r\n", ":\r\n:\r\n\r\n"] {
            assert!(!says_something(silent.as_bytes()), "{silent:?}");
        }
        for piece in ["data: x\n\n", ": keep-alive\n\ndata: x\n\n", "event: x\r\n", "x"] {
            assert!(says_something(piece.as_bytes()), "{piece:?}");
        }
    }

    #[test]
    fn what_concerns_one_connection_is_taken_off() {
        let mut headers = HeaderMap::new();
        for (name, value) in [("connection", "close, X-Mine"), ("x-mine", "1"), ("te", "trailers"), ("x-kept", "1")] {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        strip(&mut headers);
        assert_eq!(headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["x-kept"]);
    }

    proptest! {
        #[test]
        fn any_body_is_the_same_apart_from_its_model(
            prompt in ".*", model in ".*", name in ".*", before in any::<bool>(),
        ) {
            let model_pair = format!("\"model\":{}", serde_json::Value::from(model));
            let prompt_pair = format!("\"prompt\":{}", serde_json::Value::from(prompt.clone()));
            let pairs = if before { [model_pair, prompt_pair] } else { [prompt_pair, model_pair] };
            let renamed = rename(&format!("{{{}}}", pairs.join(",")), &name);
            let value: serde_json::Value = serde_json::from_str(&renamed).unwrap();
            prop_assert_eq!(value, serde_json::json!({"model": name, "prompt": prompt}));
        }
    }
}
