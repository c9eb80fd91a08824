//! What can go wrong with an arena, as values that say what helps.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use tidekv_core::units::Bytes;

use crate::Foreign;

/// An arena that could not be made, attached to, grown or removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// The folder is not one to put it in.
    #[error(transparent)]
    Folder(#[from] crate::FolderError),
    /// There is no arena of this name.
    #[error("there is no arena {}: its creator has not made it yet, or it was deleted", .path.display())]
    NotFound {
        /// Where it would lie.
        path: PathBuf,
    },
    /// There is an arena of this name already.
    #[error("{} exists already: attach to it, or delete it first", .path.display())]
    Exists {
        /// Where it lies.
        path: PathBuf,
    },
    /// A name that cannot be a file's.
    #[error("{0:?} cannot name an arena: use 1 to 64 of A-Z, a-z, 0-9, '_' and '-'")]
    Name(String),
    /// Sizes that do not fit together.
    #[error("{what} is {value}: {rule}")]
    Config {
        /// Which of them.
        what: &'static str,
        /// What it is.
        value: u64,
        /// What it may be.
        rule: &'static str,
    },
    /// There is something of this name that no arena of this user is.
    #[error("{} is not an arena of this user: {why}; move it away", .path.display())]
    NotOurs {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: Foreign,
    },
    /// Cut short, or its maker died half-way.
    #[error("{} has {bytes} bytes and should have {needed}: it was cut short; delete it", .path.display())]
    Truncated {
        /// The arena.
        path: PathBuf,
        /// What it has.
        bytes: u64,
        /// What it should have.
        needed: u64,
    },
    /// Its contents contradict each other.
    #[error("{} is damaged ({what}): delete it", .path.display())]
    Damaged {
        /// The arena.
        path: PathBuf,
        /// What is wrong.
        what: &'static str,
    },
    /// Written by another release.
    #[error("{} has format {found}, ours is {ours}: end the processes of the other release, or update this program", .path.display())]
    Version {
        /// The arena.
        path: PathBuf,
        /// Its format.
        found: u32,
        /// The one we write.
        ours: u32,
    },
    /// The file system has no room.
    #[error("{} needs {wanted} more and its file system is full: free memory there, or make it smaller", .path.display())]
    NoSpace {
        /// The arena.
        path: PathBuf,
        /// What was asked for.
        wanted: Bytes,
    },
    /// It has grown as far as it may.
    #[error("the arena has all of its {limit}: free blocks, or make it with a larger limit")]
    AtLimit {
        /// The limit.
        limit: Bytes,
    },
    /// As many processes as can be are attached.
    #[error("{} has {limit} processes attached, which is the most there can be", .path.display())]
    TooManyMembers {
        /// The arena.
        path: PathBuf,
        /// How many there can be.
        limit: u32,
    },
    /// As many threads as can have a cache have one.
    #[error("all {limit} thread caches of the arena are in use: share one between threads, or drop some")]
    TooManyCaches {
        /// How many there can be.
        limit: u32,
    },
    /// Somebody held a lock all the time; most likely it is stopped. Trying again can help.
    #[error("{} was locked for all of {waited:?}: a process that uses it may be stopped", .path.display())]
    LockTimeout {
        /// The arena.
        path: PathBuf,
        /// How long we tried.
        waited: Duration,
    },
    /// The file was replaced each time we looked. Trying again can help.
    #[error("{} was made and deleted {tries} times while it was being opened", .path.display())]
    Unsettled {
        /// The arena.
        path: PathBuf,
        /// How often we started over.
        tries: u32,
    },
    /// Attachments belong to the process that made them.
    #[error("this arena was attached before a fork and belongs to the parent process: attach again in the child")]
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

impl ArenaError {
    /// Whether the same call can succeed later without anybody changing anything about it.
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            Self::LockTimeout { .. }
                | Self::Unsettled { .. }
                | Self::NoSpace { .. }
                | Self::AtLimit { .. }
                | Self::TooManyMembers { .. }
                | Self::TooManyCaches { .. }
        )
    }
}

/// A handle that was not followed. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HandleError {
    /// The block was freed; its place may belong to another by now.
    #[error("the handle is stale: its block was freed")]
    Stale,
    /// No block can begin there.
    #[error("the handle points outside the arena: it is damaged, or another arena's")]
    OutOfRange,
    /// Only a shared block can be retained by another process.
    #[error("the block is not shared: its holder calls `share` before it sends the handle")]
    NotShared,
    /// A block is published once in its life, and before others can have it.
    #[error("the block is shared already: publish one that was just allocated")]
    AlreadyShared,
    /// This process has no part in the block.
    #[error("this process does not hold the block: retain it first")]
    NotHolder,
    /// An offset or a length beyond the block's end.
    #[error("the bytes asked for lie beyond the end of the block")]
    BeyondEnd,
    /// Attachments belong to the process that made them.
    #[error("this arena was attached before a fork and belongs to the parent process: attach again in the child")]
    Forked,
}

/// A block that was not allocated. Nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// No block can be that large: it must fit into a segment.
    #[error("a block of {wanted} does not fit into a segment of {segment}: make the arena with larger segments")]
    TooLarge {
        /// What was asked for.
        wanted: Bytes,
        /// What there is.
        segment: Bytes,
    },
    /// Not a power of two, or above 2 MiB.
    #[error("an alignment of {align} cannot be had: use a power of two up to 2 MiB and up to the segment's size")]
    Alignment {
        /// What was asked for.
        align: u64,
    },
    /// The arena has no room and could not be given more.
    #[error("no room for a block of {wanted}")]
    Exhausted {
        /// What was asked for.
        wanted: Bytes,
        /// Why there is no more.
        #[source]
        source: Box<ArenaError>,
    },
    /// The handle of a block to resize was not good.
    #[error(transparent)]
    Handle(#[from] HandleError),
    /// Attachments belong to the process that made them.
    #[error("this arena was attached before a fork and belongs to the parent process: attach again in the child")]
    Forked,
}

impl AllocError {
    /// Whether the same call can succeed later: somebody frees, or somebody dies.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Exhausted { source, .. } if source.is_transient())
    }
}
