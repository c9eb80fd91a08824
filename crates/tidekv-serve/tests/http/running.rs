//! A server that is up, on a thread of its own, and is stopped when the test is over, however it ends.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use tidekv_serve::access::Access;
use tidekv_serve::api::Service;
use tidekv_serve::connections::ConnectionLimits;
use tidekv_serve::handle::Engine;
use tidekv_serve::server::{ServeError, Server, Stop, stop_channel};
use tidekv_serve::tokenizer::Tokenizer;

use crate::echo::Echo;

/// A server over any engine whose tokens are bytes.
pub(crate) struct Up {
    pub(crate) address: SocketAddr,
    stop: Option<Stop>,
    thread: Option<JoinHandle<Result<(), ServeError>>>,
}

impl Up {
    /// Requests have so long to end when it is stopped.
    fn start(bound: &str, access: Access, engine: Arc<dyn Engine>, drain: Duration, limits: ConnectionLimits) -> Self {
        let service = Service::new(engine, Arc::new(Tokenizer::bytes()), Some("org/echo".to_owned()));
        let server = Server::bind(bound, 0, access).unwrap().with_limits(limits);
        let address = server.address();
        let (stop, stopped) = stop_channel();
        let thread = std::thread::spawn(move || server.run(service, stopped, drain));
        Self { address, stop: Some(stop), thread: Some(thread) }
    }

    /// Waits until it has ended.
    pub(crate) fn join(&mut self) {
        self.thread.take().unwrap().join().unwrap().unwrap();
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(std::thread::panicking() || matches!(ended, Ok(Ok(()))), "{ended:?}");
        }
    }
}

/// A server over an engine that echoes.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    pub(crate) engine: Arc<Echo>,
    up: Up,
}

impl Running {
    pub(crate) fn start() -> Self {
        Self::with_drain(Duration::from_secs(60))
    }

    /// Requests have so long to end when it is stopped.
    pub(crate) fn with_drain(drain: Duration) -> Self {
        Self::of("127.0.0.1", Access::default(), drain, ConnectionLimits::default())
    }

    /// Clients may take so much and no more.
    pub(crate) fn with_limits(limits: ConnectionLimits) -> Self {
        Self::of("127.0.0.1", Access::default(), Duration::from_secs(60), limits)
    }

    /// At this address, for those who may ask.
    pub(crate) fn at(bound: &str, access: Access) -> Self {
        Self::of(bound, access, Duration::from_secs(60), ConnectionLimits::default())
    }

    fn of(bound: &str, access: Access, drain: Duration, limits: ConnectionLimits) -> Self {
        let engine = Echo::start();
        let up = Up::start(bound, access, Arc::<Echo>::clone(&engine), drain, limits);
        Self { address: up.address, engine, up }
    }

    /// Tells it to stop and does not wait.
    pub(crate) fn begin_stop(&mut self) {
        self.up.stop.take().unwrap().stop();
    }

    /// Waits until it has ended.
    pub(crate) fn join(&mut self) {
        self.up.join();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // What is held would keep it from ending.
        self.engine.hold_at(None);
    }
}
