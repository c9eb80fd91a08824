//! What can go wrong with a ledger, as values that say what helps.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// An operation on a ledger that was not carried out. The ledger is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LedgerError {
    /// The folder is not one to put it in.
    #[error(transparent)]
    Folder(#[from] crate::FolderError),
    /// Somebody held the table's lock all the time; most likely it is stopped. Trying again can help.
    #[error("{} was locked for all of {waited:?}: a process that uses it may be stopped", .path.display())]
    LockTimeout {
        /// The ledger.
        path: PathBuf,
        /// How long we tried.
        waited: Duration,
    },
    /// The file was replaced each time we looked. Trying again can help.
    #[error("{} was replaced {tries} times while it was being opened", .path.display())]
    Unsettled {
        /// The ledger.
        path: PathBuf,
        /// How often we started over.
        tries: u32,
    },
    /// The file has no contents yet. Trying again can help.
    #[error("{} is not complete: somebody is making it, or was killed while doing so", .path.display())]
    HalfBuilt {
        /// The ledger.
        path: PathBuf,
    },
    /// Every slot belongs to a pool.
    #[error("{} has no free slot: all {slots} belong to pools", .path.display())]
    Full {
        /// The ledger.
        path: PathBuf,
        /// How many there are.
        slots: u32,
    },
    /// There is something of this name that no ledger of this user is.
    #[error("{} is not a ledger of this user: {why}; move it away", .path.display())]
    NotOurs {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: Foreign,
    },
    /// Written by an older release.
    #[error("{} has format {found}, which is older than ours ({ours}): end the pools of the older release first", .path.display())]
    OldVersion {
        /// The ledger.
        path: PathBuf,
        /// Its format.
        found: u32,
        /// The one we write.
        ours: u32,
    },
    /// Written by a newer release.
    #[error("{} has format {found}, which is newer than ours ({ours}): update this program", .path.display())]
    NewVersion {
        /// The ledger.
        path: PathBuf,
        /// Its format.
        found: u32,
        /// The one we write.
        ours: u32,
    },
    /// The handle belongs to the process that made it.
    #[error("this ledger was opened before a fork and belongs to the parent process: open it again in the child")]
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

/// Why a file is not a ledger of this user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Foreign {
    /// A link, a folder, a pipe or a device.
    #[error("it is not a regular file")]
    NotAFile,
    /// Another user's file.
    #[error("it belongs to user {uid}")]
    Owner {
        /// The other user.
        uid: u32,
    },
    /// Others may read or write it.
    #[error("its mode is {mode:o} and must be 600")]
    Mode {
        /// The permission bits.
        mode: u32,
    },
    /// What is written to it would change a file elsewhere.
    #[error("it is a hard link to a file that has another name")]
    Linked,
    /// The bytes are something else.
    #[error("its contents are something else")]
    Contents,
}

impl LedgerError {
    /// Whether the same call can succeed later without anybody changing anything about it.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::LockTimeout { .. } | Self::Unsettled { .. } | Self::HalfBuilt { .. })
    }
}
