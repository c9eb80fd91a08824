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

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::middleware::map_request;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::sleep;

use crate::body_budget::BodyBudget;

/// How long to wait when the system has no file or memory for one more connection.
const ACCEPT_AGAIN: Duration = Duration::from_millis(500);

/// What the bodies of requests may hold unless told otherwise.
pub const DEFAULT_BODY_BUDGET_BYTES: usize = 256 << 20;
/// Most of a head, and most that is read of a connection at once: every client may keep so much.
const READ_BYTES: usize = 16 << 10;

/// What clients may take of a server: places, time, and memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Connections at once; who comes later waits to be accepted.
    pub places: usize,
    /// For the head of a request, and for staying idle between two.
    pub head: Duration,
    /// For the body of a request.
    pub body: Duration,
    /// Bytes of all bodies that are being read, or wait to be.
    pub body_budget_bytes: usize,
    /// For reading anything of an answer.
    pub stalled: Duration,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            places: 16_384,
            head: Duration::from_secs(30),
            body: Duration::from_secs(60),
            body_budget_bytes: DEFAULT_BODY_BUDGET_BYTES,
            stalled: Duration::from_secs(120),
        }
    }
}

/// Serves until `stop`, then lets answers end. Dropping it drops what is left. A body has at most `max_body_bytes`.
pub(crate) async fn serve(
    listener: TcpListener,
    pages: Router,
    limits: ConnectionLimits,
    max_body_bytes: usize,
    stop: impl Future,
) {
    let ConnectionLimits { places, head, body, body_budget_bytes, stalled } = limits;
    let budget = BodyBudget::new(body_budget_bytes);
    let pages = pages.layer(map_request(move |request: Request| {
        let charged = request.map(|all| budget.charge(all, max_body_bytes, body));
        std::future::ready(charged)
    }));
    let places = Arc::new(Semaphore::new(places));
    let connections = GracefulShutdown::new();
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(head).max_buf_size(READ_BYTES);
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
