//! A bound address, and serving it until told to stop.
//!
//! ```text
//!   serving ── stop ──> draining                                       ──> ended
//!                       nothing new is accepted; the engine finishes       connections that are still
//!                       what runs, for `drain` at most, and fails the      open after GRACE are dropped
//!                       rest with a sentence
//! ```

use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::{Semaphore, oneshot, watch};

use crate::access::Access;
use crate::api::{self, Service};
use crate::connections::{self, ConnectionLimits};

/// How long a client may take for the end of its answer once the engine has ended.
const GRACE: Duration = Duration::from_secs(2);
/// Clients that may wait to be accepted; the system has a limit of its own.
const BACKLOG: i32 = 4096;
/// Connections wait for requests and tokens; two threads carry thousands.
const IO_THREADS: usize = 2;
/// Open files that are not for clients: the model, the pool and its neighbours.
const OTHER_FILES: u64 = 128;

/// Why nothing is served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The name of the host is not known.
    #[error("the host {host:?} cannot be found: give an address of this machine, such as 127.0.0.1")]
    Host {
        /// As given.
        host: String,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// Something else serves there.
    #[error(
        "port {port} of {host} is taken: stop what serves there, or choose another with --port (0 for any free one)"
    )]
    PortTaken {
        /// As given.
        host: String,
        /// As given.
        port: u16,
    },
    /// The address cannot be used.
    #[error("{host}:{port} cannot be listened on")]
    Bind {
        /// As given.
        host: String,
        /// As given.
        port: u16,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// Others could ask it.
    #[error(
        "to listen on {host} a key is needed, because others can reach it there: give --api-key-file FILE, set VLLM_API_KEY (kvserve) or KVCACHED_WEB_API_KEY (kvctl up), or listen on 127.0.0.1"
    )]
    NoKey {
        /// As given.
        host: String,
    },
    /// No threads, or no more files.
    #[error("the server could not be started")]
    Start(#[source] io::Error),
}

/// An address that is ours. Clients may connect; they are answered once [`run`](Self::run) is called.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    limits: ConnectionLimits,
    access: Access,
}

/// Tells a running server to stop, once.
#[derive(Debug)]
pub struct Stop(oneshot::Sender<()>);

/// The other end of a [`Stop`].
#[derive(Debug)]
pub struct Stopped(oneshot::Receiver<()>);

/// Both ends. A [`Stop`] that is dropped stops the server too.
pub fn stop_channel() -> (Stop, Stopped) {
    let (sender, receiver) = oneshot::channel();
    (Stop(sender), Stopped(receiver))
}

impl Stop {
    /// Drain and end.
    pub fn stop(self) {
        // A server that has ended already needs no telling.
        let _ = self.0.send(());
    }
}

impl Server {
    /// Takes the address; port 0 for any free one.
    ///
    /// # Errors
    /// [`ServeError::PortTaken`], [`ServeError::NoKey`] and the like; nothing is listened on.
    pub fn bind(host: &str, port: u16, access: Access) -> Result<Self, ServeError> {
        let unknown = |source| ServeError::Host { host: host.to_owned(), source };
        let addresses: Vec<_> = (host, port).to_socket_addrs().map_err(unknown)?.collect();
        let listener = TcpListener::bind(addresses.as_slice()).map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => ServeError::PortTaken { host: host.to_owned(), port },
            _ => ServeError::Bind { host: host.to_owned(), port, source },
        })?;
        // A thousand clients that come at once are not told to come back a second later.
        rustix::net::listen(&listener, BACKLOG).map_err(|error| ServeError::Start(error.into()))?;
        let address = listener.local_addr().map_err(ServeError::Start)?;
        let access = access.listening_on(host, address).ok_or_else(|| ServeError::NoKey { host: host.to_owned() })?;
        Ok(Self { listener, address, limits: ConnectionLimits::default(), access })
    }

    /// The same with other limits for its clients.
    #[must_use]
    pub fn with_limits(self, limits: ConnectionLimits) -> Self {
        Self { limits, ..self }
    }

    /// Where it listens: the port that was chosen, where any was asked for.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The listener, for a runtime that runs, what its clients may take (no more places than there are open files), and who may ask.
    pub(crate) fn listen(self) -> Result<(tokio::net::TcpListener, ConnectionLimits, Access), ServeError> {
        let for_clients = usize::try_from(raise_open_files().saturating_sub(OTHER_FILES)).unwrap_or(usize::MAX);
        let places = self.limits.places.min(for_clients).clamp(1, Semaphore::MAX_PERMITS);
        self.listener.set_nonblocking(true).map_err(ServeError::Start)?;
        let listener = tokio::net::TcpListener::from_std(self.listener).map_err(ServeError::Start)?;
        Ok((listener, ConnectionLimits { places, ..self.limits }, self.access))
    }

    /// Serves until stopped, then drains: requests have so long to end.
    ///
    /// # Errors
    /// [`ServeError::Start`].
    pub fn run(self, service: Service, stopped: Stopped, drain: Duration) -> Result<(), ServeError> {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(IO_THREADS).thread_name("kvserve-io").enable_all().build();
        let runtime = runtime.map_err(ServeError::Start)?;
        let result = runtime.block_on(self.serve(Arc::new(service), stopped, drain));
        // A connection whose client does not read is dropped here.
        runtime.shutdown_timeout(GRACE);
        result
    }

    async fn serve(self, service: Arc<Service>, stopped: Stopped, drain: Duration) -> Result<(), ServeError> {
        let (listener, limits, access) = self.listen()?;
        let engine = Arc::clone(service.engine());
        let (drained, was_drained) = watch::channel(false);
        let mut engine_ended = was_drained.clone();
        let stop = async move {
            // An error means that the other end is gone: nobody could stop us any more.
            let _ = stopped.0.await;
            tracing::info!("stopping: nothing new is accepted, running requests have {} s", drain.as_secs());
            tokio::task::spawn_blocking(move || {
                engine.drain(drain);
                drained.send_replace(true);
            });
        };
        let serving = connections::serve(listener, api::router(service, access), limits, api::MAX_BODY_BYTES, stop);
        let engine_and_grace = async {
            // An error means that draining itself failed: then nothing keeps the connections either.
            let _ = engine_ended.wait_for(|&ended| ended).await;
            tokio::time::sleep(GRACE).await;
        };
        tokio::select! {
            () = serving => {
                // Without connections the engine may be the last to end.
                let mut was_drained = was_drained;
                let _ = was_drained.wait_for(|&ended| ended).await;
            }
            () = engine_and_grace => {}
        }
        Ok(())
    }
}

/// Every client is an open file, and shells allow 1,024: takes as many as the system lets us have. Says how many.
fn raise_open_files() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
        if let Err(error) = setrlimit(Resource::Nofile, raised) {
            tracing::warn!("the limit of open files stays at {:?}: {error}", limit.current);
        }
    }
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}
