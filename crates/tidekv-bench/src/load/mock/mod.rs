//! A server with known timing: it answers like an engine and computes nothing. Tests know what it did and when; `--selftest`
//! measures the client against it; `kvbench mock` lets anybody try a scenario without a model.
//!
//! ```text
//!   request ──> Behaviour ──> Script: [wait 20 ms][token][wait 5 ms][3 tokens][disconnect]
//!                                │
//!   log: when the request was whole, when each piece went out, by the clock that the client has too
//! ```
//!
//! Times of a script count from the moment at which the request was whole, so that one late wait makes no other late.

mod script;
mod wire;

use std::io;
use std::net::SocketAddr;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use serde_json::{Value, json};
use tokio::io::BufReader;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};

use super::endpoint::{Api, BaseUrl, Endpoint};
pub use script::{Ending, MockRequest, Script, Step, Timing};
use wire::{Head, Wire};

/// What the mock's model is called.
pub const MODEL: &str = "mock";

/// What it answers to a request.
pub type Behaviour = dyn Fn(&MockRequest) -> Script + Send + Sync;

/// A running server. It stops when it is dropped.
#[derive(Debug)]
pub struct Mock {
    address: SocketAddr,
    state: Arc<State>,
    _runtime: Runtime,
}

/// What the mock did about one request.
#[derive(Clone, Debug)]
pub struct MockLog {
    /// Which request it was, counted from 0 in the order of arrival.
    pub ordinal: usize,
    /// What it asked.
    pub prompt: String,
    /// When the request was whole.
    pub received: Instant,
    /// Before each piece was written, and after it.
    pub writes: Vec<(Instant, Instant)>,
}

struct State {
    behaviour: Box<Behaviour>,
    arrived: AtomicUsize,
    under_way: AtomicUsize,
    /// `None` where nobody will ask: a long run must not fill memory.
    log: Option<Mutex<Vec<MockLog>>>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State")
            .field("arrived", &self.arrived)
            .field("under_way", &self.under_way)
            .finish_non_exhaustive()
    }
}

impl Mock {
    /// A server on a port that the kernel chooses, of this machine alone, which keeps a log.
    pub fn start(behaviour: impl Fn(&MockRequest) -> Script + Send + Sync + 'static) -> io::Result<Self> {
        Self::listen(SocketAddr::from(([127, 0, 0, 1], 0)), NonZero::<usize>::MIN, true, Box::new(behaviour))
    }

    /// A server at an address, with so many threads.
    pub fn listen(
        address: SocketAddr,
        threads: NonZero<usize>,
        keeps_log: bool,
        behaviour: Box<Behaviour>,
    ) -> io::Result<Self> {
        let mut runtime = Builder::new_multi_thread();
        let runtime = runtime.worker_threads(threads.get()).thread_name("kvbench-mock").enable_all().build()?;
        let listener = runtime.block_on(TcpListener::bind(address))?;
        let address = listener.local_addr()?;
        let state = Arc::new(State {
            behaviour,
            arrived: AtomicUsize::new(0),
            under_way: AtomicUsize::new(0),
            log: keeps_log.then(Mutex::default),
        });
        runtime.spawn(accept(listener, Arc::clone(&state)));
        Ok(Self { address, state, _runtime: runtime })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The same as a client wants it.
    pub fn base_url(&self) -> BaseUrl {
        BaseUrl::new(self.address.ip().to_string(), self.address.port())
    }

    /// Its model in one of the dialects.
    pub fn endpoint(&self, api: Api) -> Endpoint {
        Endpoint::new(self.base_url(), api, MODEL)
    }

    /// Requests that have arrived so far.
    pub fn arrived(&self) -> usize {
        self.state.arrived.load(Ordering::Relaxed)
    }

    /// What it did so far, in the order of arrival. Waits for requests under way: a client may have heard the end of an
    /// answer before its server has noted it.
    pub fn log(&self) -> Vec<MockLog> {
        while self.state.under_way.load(Ordering::Acquire) > 0 {
            std::thread::yield_now();
        }
        let mut log = self.state.log.as_ref().map_or_else(Vec::new, |log| lock(log).clone());
        log.sort_by_key(|entry| entry.ordinal);
        log
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn accept(listener: TcpListener, state: Arc<State>) {
    loop {
        match listener.accept().await {
            Ok((socket, _)) => drop(tokio::spawn(attend(socket, Arc::clone(&state)))),
            // Out of descriptors, most likely: those under way will free some.
            Err(_) => tokio::task::yield_now().await,
        }
    }
}

/// Answers the requests of one connection until either side has enough.
async fn attend(socket: TcpStream, state: Arc<State>) {
    if socket.set_nodelay(true).is_err() {
        return;
    }
    let mut wire = Wire::new(BufReader::new(socket));
    // Whatever goes wrong on a connection ends it, and nothing else.
    while let Ok(Some(head)) = wire.head().await {
        let Ok(body) = wire.body(head.content_length).await else { return };
        let received = Instant::now();
        let is_kept = match api_of(&head) {
            Some(api) => answer(&mut wire, &state, api, &body, received).await,
            None => wire.page(page(&state, &head)).await,
        };
        if !matches!(is_kept, Ok(true)) || head.closes {
            return;
        }
    }
}

fn api_of(head: &Head) -> Option<Api> {
    let apis = [Api::Completions, Api::Chat, Api::SglangGenerate];
    apis.into_iter().find(|api| head.method == "POST" && head.path == api.path())
}

/// Plays the script; says whether the connection may be used again.
async fn answer(wire: &mut Wire, state: &State, api: Api, body: &[u8], received: Instant) -> io::Result<bool> {
    let Ok(body) = serde_json::from_slice::<Value>(body) else {
        return wire.page((400, json!({"error": {"message": "the body is no JSON"}}))).await;
    };
    let ordinal = state.arrived.fetch_add(1, Ordering::Relaxed);
    let request = MockRequest::new(ordinal, api, body);
    let script = (state.behaviour)(&request);
    state.under_way.fetch_add(1, Ordering::Relaxed);
    let mut writes = Vec::new();
    let outcome = wire.play(&script, &request, received, &mut writes).await;
    if let Some(log) = &state.log {
        lock(log).push(MockLog { ordinal, prompt: request.prompt, received, writes });
    }
    state.under_way.fetch_sub(1, Ordering::Release);
    outcome
}

/// The pages beside the answers.
fn page(state: &State, head: &Head) -> (u16, Value) {
    match (head.method.as_str(), head.path.as_str()) {
        ("GET", "/v1/models") => {
            (200, json!({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "kvbench"}]}))
        }
        ("GET", "/version") => (200, json!({"version": env!("CARGO_PKG_VERSION")})),
        ("GET", "/health") => (200, json!({"status": "healthy", "model": MODEL, "kv_mode": "mock"})),
        ("GET", "/metrics") => {
            let running = state.under_way.load(Ordering::Relaxed);
            (
                200,
                Value::String(format!(
                    "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{model_name=\"{MODEL}\",kv_mode=\"mock\"}} {running}\n"
                )),
            )
        }
        _ => (404, json!({"error": {"message": format!("there is no {} {}", head.method, head.path)}})),
    }
}
