//! The connections of a server: how many there may be, how slow a client may be, and how they end.
//!
//! ```text
//!                       place taken           whole head within `head`      whole body within `body`
//!   system's queue ── accept ──────> waits for a request ────────────> reads it ────────────> answers ──┐
//!    while all places are taken              ^  idle for `head`: closed        too slow: 408            │
//!                                            └────────────────── kept alive ────────────────────────────┘
//!                                                                   takes nothing for `stalled`: dropped
//!   stop: nothing more is accepted; idle connections close; the others have their answer first
//! ```
//!
//! A client that sends a byte now and then, or reads none, would otherwise hold its place for ever, and a few thousand of
//! them all places. The number of places is also below the number of files that the process may open, so that the pool
//! and the model's files always find one.

use std::error::Error;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::middleware::map_request;
use futures_util::stream::{self, StreamExt};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep, timeout_at};

/// How long to wait when the system has no file or memory for one more connection.
const ACCEPT_AGAIN: Duration = Duration::from_millis(500);

/// What clients may take of a server: places, and time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Connections at once; who comes later waits to be accepted.
    pub places: usize,
    /// For the head of a request, and for staying idle between two.
    pub head: Duration,
    /// For the body of a request.
    pub body: Duration,
    /// For reading anything of an answer.
    pub stalled: Duration,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            places: 16_384,
            head: Duration::from_secs(30),
            body: Duration::from_secs(60),
            stalled: Duration::from_secs(120),
        }
    }
}

/// The body of a request did not arrive in time.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("it did not arrive within {} s", patience.as_secs_f32())]
pub(crate) struct SlowBody {
    patience: Duration,
}

impl SlowBody {
    /// Whether it is why a body did not arrive.
    pub(crate) fn is_behind(error: &(dyn Error + 'static)) -> bool {
        let mut cause = Some(error);
        while let Some(error) = cause {
            if error.is::<Self>() {
                return true;
            }
            cause = error.source();
        }
        false
    }
}

/// Serves until `stop`, then lets answers end. Dropping it drops what is left.
pub(crate) async fn serve(listener: TcpListener, pages: Router, limits: ConnectionLimits, stop: impl Future) {
    let ConnectionLimits { places, head, body, stalled } = limits;
    let pages = pages.layer(map_request(move |request: Request| async move { request.map(|all| patient(all, body)) }));
    let places = Arc::new(Semaphore::new(places));
    let connections = GracefulShutdown::new();
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(head);
    let mut stop = pin!(stop);
    loop {
        let (socket, place) = tokio::select! {
            biased;
            _ = &mut stop => break,
            accepted = accept(&listener, &places) => accepted,
        };
        prepare(&socket, stalled);
        let connection = http.serve_connection(TokioIo::new(socket), TowerToHyperService::new(pages.clone()));
        let connection = connections.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection ended early");
            }
            drop(place);
        });
    }
    drop(listener);
    connections.shutdown().await;
}

/// The next client, and its place.
async fn accept(listener: &TcpListener, places: &Arc<Semaphore>) -> (TcpStream, OwnedSemaphorePermit) {
    let place = Arc::clone(places).acquire_owned().await.expect("nobody closes the semaphore");
    loop {
        match listener.accept().await {
            Ok((socket, _)) => return (socket, place),
            // The client was gone before we looked.
            Err(error) if is_clients(&error) => {}
            Err(error) => {
                tracing::error!(%error, "no connection can be accepted at the moment");
                sleep(ACCEPT_AGAIN).await;
            }
        }
    }
}

fn is_clients(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

/// Neither is vital: a connection without them is served too.
fn prepare(socket: &TcpStream, stalled: Duration) {
    // A token is a small packet, and is not to wait for the next.
    if let Err(error) = socket.set_nodelay(true) {
        tracing::debug!(%error, "a connection stays with Nagle's algorithm");
    }
    // The system drops a connection whose client is gone, or takes nothing, for so long.
    let milliseconds = u32::try_from(stalled.as_millis()).unwrap_or(u32::MAX);
    if let Err(error) = rustix::net::sockopt::set_tcp_user_timeout(socket, milliseconds) {
        tracing::debug!(%error, "a connection may stall for as long as the system allows");
    }
}

/// A body that fails with [`SlowBody`] when it takes longer than `patience`.
fn patient(body: Body, patience: Duration) -> Body {
    if body.is_end_stream() {
        return body;
    }
    let deadline = Instant::now() + patience;
    let parts = stream::unfold(Some(body.into_data_stream()), move |parts| async move {
        let mut parts = parts?;
        match timeout_at(deadline, parts.next()).await {
            Ok(part) => part.map(|part| (part, Some(parts))),
            Err(_) => Some((Err(axum::Error::new(SlowBody { patience })), None)),
        }
    });
    Body::from_stream(parts)
}
