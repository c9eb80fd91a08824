//! What can go wrong between a scheduler and its workers, as values that say what helps.
//!
//! [`IpcError`] is about a place: a folder, a socket, a server. [`LaneError`] is about one rank of one broadcast; it can
//! be compared and cloned, because a fleet keeps the last one of every rank.

use std::path::PathBuf;
use std::time::Duration;

use rustix::io::Errno;

use crate::frame::FrameError;
use crate::message::Refusal;

/// A socket or its folder could not be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IpcError {
    /// The kernel has no room for such a path.
    #[error("{} has {bytes} bytes, a socket's path may have {max}: choose a shorter KVCACHED_RUNTIME_DIR or pool name", .path.display())]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its length.
        bytes: usize,
        /// The longest that fits.
        max: usize,
    },
    /// Somebody else could reach into the folder, or it is not one.
    #[error("{} is not a private folder of this user: {why}; move it away", .path.display())]
    NotOurs {
        /// The folder.
        path: PathBuf,
        /// What is wrong with it.
        why: NotOurs,
    },
    /// A living worker listens there.
    #[error("{} belongs to a worker that is running: end it first, or use another pool name", .path.display())]
    Taken {
        /// The socket.
        path: PathBuf,
    },
    /// Others were changing the folder all the time, or one is stopped in the middle of it. Trying again can help.
    #[error("{} was locked for all of {waited:?}: a worker that is starting or ending may be stopped", .path.display())]
    FolderBusy {
        /// The folder.
        path: PathBuf,
        /// How long we tried.
        waited: Duration,
    },
    /// One thread serves; a second has nothing to do.
    #[error("this worker is being served by another thread already")]
    AlreadyServing,
    /// The object belongs to the process that made it.
    #[error("this was made before a fork and belongs to the parent process: make it again in the child")]
    Forked,
    /// The operating system refused a call.
    #[error("{call} of {} failed", .path.display())]
    Os {
        /// The system call.
        call: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Errno,
    },
}

impl IpcError {
    /// Whether the same call can succeed later without anybody changing anything about it.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::FolderBusy { .. })
    }
}

/// Why a folder is not to be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotOurs {
    /// A link, a file or a device.
    #[error("it is not a folder, or a link to one")]
    NotAFolder,
    /// Another user's folder.
    #[error("it belongs to user {uid}")]
    Owner {
        /// The other user.
        uid: u32,
    },
    /// Others may enter it.
    #[error("its mode is {mode:o} and must be 700")]
    Mode {
        /// The permission bits.
        mode: u32,
    },
}

/// Why one rank did not answer an order.
///
/// | error | the lane afterwards | was the order carried out? |
/// | --- | --- | --- |
/// | `NotConnected`, `NoWorker`, `WrongUser`, `Place`, `Forked` | not connected | no |
/// | `Refused` (to the greeting) | not connected | no |
/// | `Closed`, `Frame`, `Os` | not connected | perhaps; a worker whose scheduler is gone gives everything back |
/// | `TimedOut` | connected | perhaps, or later; its late answer is dropped |
/// | `TooManyPages` | as before | no |
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaneError {
    /// Nobody called `connect`, or the lane was lost since.
    #[error("no connection to this worker")]
    NotConnected,
    /// Nobody listens: the worker has not started, or has ended.
    #[error("no worker listens at {}", .path.display())]
    NoWorker {
        /// The socket.
        path: PathBuf,
    },
    /// A worker is there and will not have us: another scheduler is served, or it is another rank's.
    #[error("the worker refused the connection: {}", .0.reason)]
    Refused(Refusal),
    /// Whoever listens is not of our user.
    #[error("the socket is served by user {uid}, not by this one")]
    WrongUser {
        /// The other user.
        uid: u32,
    },
    /// The worker is gone: killed, ended, or it closed the connection because of us.
    #[error("the worker closed the connection")]
    Closed,
    /// No answer until the deadline.
    #[error("the worker did not answer within {waited:?} (KVCACHED_IPC_TIMEOUT)")]
    TimedOut {
        /// How long we waited.
        waited: Duration,
    },
    /// The worker's bytes are not an answer.
    #[error("the worker's answer cannot be read")]
    Frame(#[from] FrameError),
    /// The order has more pages than a frame has room for; nothing was sent to anybody.
    #[error("an order of {pages} pages was asked for, {max} fit into one: use several")]
    TooManyPages {
        /// How many.
        pages: usize,
        /// The most.
        max: usize,
    },
    /// The socket's place cannot be used.
    #[error(transparent)]
    Place(Box<IpcError>),
    /// The lane belongs to the process that made it.
    #[error("this connection was made before a fork and belongs to the parent process")]
    Forked,
    /// The operating system refused a call.
    #[error("{call} failed")]
    Os {
        /// The system call.
        call: &'static str,
        /// Why.
        #[source]
        source: Errno,
    },
}

impl LaneError {
    /// Whether the same order can succeed later without anybody changing anything about it.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::TimedOut { .. } => true,
            Self::Place(error) => error.is_transient(),
            _ => false,
        }
    }

    /// Whether the lane must be connected anew before it can be used again.
    pub fn is_fatal(&self) -> bool {
        !matches!(self, Self::TimedOut { .. } | Self::TooManyPages { .. })
    }
}

impl From<IpcError> for LaneError {
    fn from(error: IpcError) -> Self {
        Self::Place(Box::new(error))
    }
}
