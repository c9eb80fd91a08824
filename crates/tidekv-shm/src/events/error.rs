//! What can go wrong with an events file.

use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use super::format::{FormatError, VERSION};
use crate::Foreign;
use crate::private_file::OpenError;

/// Events that could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EventsError {
    /// There is something of this name that no events file of this user is.
    #[error("{} is not an events file of this user: {why}; move it away", .path.display())]
    NotOurs {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: Foreign,
    },
    /// Written by another release.
    #[error("{} has format {found}, and this program knows format {VERSION}", .path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u32,
    },
    /// It is being made, or was damaged; the next event mends it.
    #[error("{} is not complete; the next event makes it anew", .path.display())]
    HalfBuilt {
        /// The file.
        path: PathBuf,
    },
    /// It belongs to the process that opened it.
    #[error("these events were opened before a fork and belong to the parent process")]
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
        source: io::Error,
    },
}

impl EventsError {
    pub(super) fn os(call: &'static str, path: &Path) -> impl FnOnce(Errno) -> Self {
        let path = path.to_owned();
        move |source| Self::Os { call, path, source: source.into() }
    }

    pub(super) fn format(error: FormatError, path: &Path) -> Self {
        let path = path.to_owned();
        match error {
            FormatError::HalfBuilt => Self::HalfBuilt { path },
            FormatError::NotEvents => Self::NotOurs { path, why: Foreign::Contents },
            FormatError::Version { found } => Self::Version { path, found },
        }
    }

    pub(super) fn open(error: OpenError, path: &Path) -> Self {
        match error {
            OpenError::NotOurs(why) => Self::NotOurs { path: path.to_owned(), why },
            OpenError::Os { call, error } => Self::os(call, path)(error),
        }
    }
}
