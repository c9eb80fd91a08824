//! What can go wrong with an exchange, as values that say what helps.

use rustix::io::Errno;
use tidekv_core::units::Bytes;

use super::directory::{MAX_ENTRIES, MIN_ENTRIES, SUBSCRIBERS};
use super::key::Key;
use crate::arena::{AllocError, ArenaError, HandleError};

/// An exchange that could not be opened or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExchangeError {
    /// A directory of a size that there cannot be.
    #[error("a directory of {entries} entries cannot be: use a power of two from {MIN_ENTRIES} to {MAX_ENTRIES}")]
    Config {
        /// What was asked for.
        entries: u32,
    },
    /// What the arena leads to is no exchange.
    #[error("the arena's exchange is damaged ({what}): delete the arena")]
    Damaged {
        /// What is wrong.
        what: &'static str,
    },
    /// Written by another release.
    #[error(
        "the arena's exchange has format {found}, ours is {ours}: end the processes of the other release, or update this program"
    )]
    Version {
        /// Its format.
        found: u32,
        /// The one we write.
        ours: u32,
    },
    /// As many subscriptions as there can be.
    #[error("the exchange has {SUBSCRIBERS} subscriptions, which is the most there can be: share one, or drop some")]
    TooManySubscriptions,
    /// The directory was made and let go again each time we looked. Trying again can help.
    #[error("the exchange was made and let go {tries} times while it was being opened")]
    Unsettled {
        /// How often we started over.
        tries: u32,
    },
    /// No room in the arena for the directory, or for the block by which a subscription is known to live.
    #[error("the exchange needs memory of the arena")]
    Alloc(#[from] AllocError),
    /// The arena refused.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// A handle was refused, or the arena was attached before a fork.
    #[error(transparent)]
    Handle(#[from] HandleError),
    /// The operating system refused to wait.
    #[error("futex failed")]
    Wait(#[source] Errno),
}

/// A block that was not published. It is still the caller's: to free, or to publish later.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PublishError {
    /// Consumers have to let go of something first, or the publisher has to withdraw something.
    #[error("no room to publish: {0}")]
    Full(Pressure),
    /// Somebody has published it already.
    #[error("{key} is published already: free the block and borrow the one that is there")]
    Exists {
        /// The key.
        key: Key,
    },
    /// More bytes than the block has.
    #[error("{bytes} bytes were to be published of a block that has {block}")]
    TooLong {
        /// What was said.
        bytes: u64,
        /// What there is.
        block: u64,
    },
    /// The exchange or the block's handle.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
}

impl From<HandleError> for PublishError {
    fn from(error: HandleError) -> Self {
        Self::Exchange(error.into())
    }
}

impl PublishError {
    /// Whether the same call can succeed later: somebody lets go, withdraws or dies.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Full(_))
    }
}

/// What there is no room in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Pressure {
    /// All entries of the directory in which the key can be.
    #[error("all entries of the directory that the key can have are taken")]
    Directory,
    /// What this publisher may have outstanding.
    #[error("{used} of this publisher's are published or borrowed, and {budget} are the most")]
    Budget {
        /// Published and not yet let go by everybody.
        used: Bytes,
        /// What there may be.
        budget: Bytes,
    },
    /// A subscriber that is behind, of a publisher that loses none.
    #[error("a subscriber is {behind} announcements behind")]
    Subscriber {
        /// How far.
        behind: u64,
    },
}
