//! The worker's side: one scheduler at a time, one order at a time, in the order received.
//!
//! ```text
//!   listening --connect--> greeting --hello--> serving --order--> handler --answer--> serving ...
//!       ^                     |                   |
//!       |   stranger, rubbish,| another rank's    | closed, rubbish, stopped scheduler that takes no answers
//!       +---------------------+-------------------+      scheduler_gone(), then the next one is accepted
//! ```
//!
//! One thread does all of it, so an order is never carried out beside another, and what one scheduler ordered is given
//! back before the next is heard. Whoever connects while a scheduler is served is told so ([`RefusalKind::Busy`]) and
//! dropped, within about a [`TICK`].
//!
//! The thread blocks in one system call per order (`recv`, or a futex) and wakes at least every [`TICK`] to look after
//! the rest: the handler's own work, other schedulers, being stopped. Bad peers and bad frames cost their connection.
//!
//! [`RefusalKind::Busy`]: crate::message::RefusalKind::Busy

mod connection;

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};
use tidekv_fork::ClosedInChild;

use crate::address::SocketDir;
use crate::address::folder::os;
use crate::address::place::Place;
use crate::error::IpcError;
use crate::link::Link;
use crate::message::{Balance, Order, Verdict};
use crate::peer::{AskUid, Stranger, check_peer, kernel_uid};
use connection::Connection;

/// What a worker does with orders. One thread calls all of it, never two methods at once.
pub trait Handler {
    /// Carries an order out. `Hello` and `Ping` are answered by the server and never arrive here.
    fn handle(&mut self, order: &Order) -> Verdict;

    /// How the order's group stands now; asked after every order, pings too, so it must be cheap.
    fn balance(&mut self, order: &Order) -> Balance;

    /// A scheduler has connected.
    fn scheduler_came(&mut self) {}

    /// The scheduler's connection is gone: everything it ordered must be given back.
    fn scheduler_gone(&mut self);

    /// Called about every [`TICK`], between orders and while none comes.
    fn tick(&mut self) {}
}

/// How long a worker without orders sleeps at most.
pub const TICK: Duration = Duration::from_millis(100);

/// A worker's socket, and what serves it.
#[derive(Debug)]
pub struct WorkerServer {
    place: Place,
    stage: u32,
    rank: u32,
    instance: u64,
    stop: Arc<Stop>,
    is_served: AtomicBool,
    ask_uid: AskUid,
}

impl WorkerServer {
    /// Takes the place of one rank. Refused while a living worker has it; what a dead one left is replaced.
    pub fn bind(dir: &SocketDir, stage: u32, rank: u32) -> Result<Self, IpcError> {
        let place = Place::take(dir, stage, rank)?;
        let listener = Arc::downgrade(place.listener());
        let stop = Arc::new(Stop { is_set: AtomicBool::new(false), listener, connection: Mutex::default() });
        let is_served = AtomicBool::new(false);
        Ok(Self { place, stage, rank, instance: draw_instance(), stop, is_served, ask_uid: kernel_uid })
    }

    /// Drawn anew by every `bind`, never 0.
    pub fn instance(&self) -> u64 {
        self.instance
    }

    /// Where schedulers connect.
    pub fn path(&self) -> &Path {
        self.place.path()
    }

    /// Serves one scheduler after the other until it is stopped. Bad peers and bad frames cost a connection, no more.
    pub fn serve(&self, handler: &mut dyn Handler) -> Result<(), IpcError> {
        if self.place.listener().is_foreign() {
            return Err(IpcError::Forked);
        }
        if self.is_served.swap(true, Ordering::AcqRel) {
            return Err(IpcError::AlreadyServing);
        }
        let result = self.serve_all(handler);
        self.is_served.store(false, Ordering::Release);
        result
    }

    fn serve_all(&self, handler: &mut dyn Handler) -> Result<(), IpcError> {
        let mut next = None;
        let mut ticked = Instant::now();
        while !self.stop.is_set() {
            let accepted = match next.take() {
                Some(socket) => Some(socket),
                None => self.wait_for_scheduler()?,
            };
            if let Some(socket) = accepted {
                next = Connection::serve(self, socket, handler, &mut ticked);
            }
            tick(handler, &mut ticked);
        }
        Ok(())
    }

    /// Ends `serve` from another thread.
    pub fn stopper(&self) -> Stopper {
        Stopper(Arc::clone(&self.stop))
    }

    /// Waits for a tick at most.
    fn wait_for_scheduler(&self) -> Result<Option<ClosedInChild>, IpcError> {
        let mut fds = [PollFd::new(&**self.place.listener(), PollFlags::IN)];
        let wait = Timespec::try_from(TICK).expect("a tick fits");
        match poll(&mut fds, Some(&wait)) {
            Ok(0) | Err(Errno::INTR) => Ok(None),
            Ok(_) => self.accept(),
            Err(error) => Err(os("poll", self.place.path())(error)),
        }
    }

    /// Takes somebody of our user who waits to be accepted, if there is one.
    fn accept(&self) -> Result<Option<ClosedInChild>, IpcError> {
        let listener = self.place.listener();
        let socket = match ClosedInChild::open(|| accept_with(&**listener, SocketFlags::CLOEXEC)) {
            Ok(socket) => socket,
            // Nobody there after all, or nobody any more.
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return Ok(None),
            // The stopper closed the listener.
            Err(Errno::INVAL) if self.stop.is_set() => return Ok(None),
            Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS)) => {
                tracing::warn!("a scheduler cannot be accepted: {error}");
                std::thread::sleep(TICK);
                return Ok(None);
            }
            Err(error) => return Err(os("accept", self.place.path())(error)),
        };
        match check_peer(socket.as_fd(), self.ask_uid) {
            Ok(()) => Ok(Some(socket)),
            Err(Stranger::Uid(uid)) => {
                tracing::warn!(uid, path = %self.place.path().display(), "a process of another user was turned away");
                Ok(None)
            }
            Err(Stranger::Unknown(error)) => {
                tracing::warn!("a process of unknown user was turned away: {error}");
                Ok(None)
            }
        }
    }

    /// Another answer than the kernel's to who is on the other side.
    #[cfg(test)]
    pub(crate) fn set_ask_uid(&mut self, ask_uid: AskUid) {
        self.ask_uid = ask_uid;
    }
}

/// The handler's own work, when it is time for it.
fn tick(handler: &mut dyn Handler, ticked: &mut Instant) -> bool {
    let is_time = ticked.elapsed() >= TICK;
    if is_time {
        handler.tick();
        *ticked = Instant::now();
    }
    is_time
}

/// Ends a server's `serve`. It keeps nothing of the server alive.
#[derive(Clone, Debug)]
pub struct Stopper(Arc<Stop>);

impl Stopper {
    /// `serve` returns soon, after the order that it is busy with. Its place is free when the server is dropped.
    pub fn stop(&self) {
        self.0.is_set.store(true, Ordering::SeqCst);
        // Both wake whoever waits on them. Failing to would cost a tick.
        for socket in [self.0.listener.upgrade(), self.0.connection().upgrade()].into_iter().flatten() {
            if !socket.is_foreign() {
                let _ = shutdown(&*socket, Shutdown::Both);
            }
        }
    }
}

#[derive(Debug)]
struct Stop {
    is_set: AtomicBool,
    listener: Weak<ClosedInChild>,
    /// Of the scheduler that is being served.
    connection: Mutex<Weak<ClosedInChild>>,
}

impl Stop {
    fn is_set(&self) -> bool {
        self.is_set.load(Ordering::SeqCst)
    }

    fn watch(&self, link: &Link) {
        *self.connection() = Arc::downgrade(link.socket());
    }

    fn connection(&self) -> MutexGuard<'_, Weak<ClosedInChild>> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A number that no other start of any worker has drawn.
fn draw_instance() -> u64 {
    // The keys come from the system's randomness; process and time tell forks and threads apart.
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    hasher.write_u64(tidekv_shm::now_ms());
    hasher.finish().max(1)
}
