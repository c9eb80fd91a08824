//! The exchange: blocks of an arena published under a key, found by others, read in place.
//!
//! ```text
//!   prefill                                  the arena                          decode
//!   handle = local.alloc(n), writes          block, LIVE
//!   publisher.publish(key, handle, meta)     block, SHARED; directory: key      subscription.wait() -> key
//!                                                                               exchange.take(key)   -> Borrowed
//!   publisher has room again             <-  block freed                    <-  drop(borrowed)
//! ```
//!
//! | module | |
//! | --- | --- |
//! | `key` | what blocks are published under; what is said about them |
//! | `entry`, `log`, `bell` | the lock-free pieces; checked by loom in `model` |
//! | `directory` | the block that they lie in |
//! | `publisher`, `subscription`, `borrowed` | the three sides |
//!
//! Two uses. **Handing over**: each block is taken once ([`Exchange::take`]); the publisher's budget, in bytes, holds it up
//! until consumers have let go of what they took. **A cache shared by engines**: blocks stay published, many borrow them
//! ([`Exchange::borrow`]), and the publisher withdraws what it wants to be rid of; memory comes back with the last borrower.
//!
//! What makes it safe to kill anybody at any instruction: nothing here says of itself that it is somebody's. An entry, a
//! subscription, the directory each carry the handle of a block, and belong to whoever holds that block. The arena takes
//! blocks of the dead back (by their lock); what carried their handles is free from that moment, because the handles are
//! stale. No list is repaired, no process number is guessed, and nobody waits for the dead longer than a slice of
//! 50 ms.
//!
//! What is published lives as long as its publisher, or whoever borrows it. A cache loses what a dead engine had put
//! there and nobody was reading, which is what a cache may do.

#![allow(
    clippy::cast_possible_truncation,
    reason = "numbers here are fields of words, whose widths tests hold, and places on a machine of 64 bits"
)]

mod bell;
mod borrowed;
mod directory;
mod entry;
mod error;
mod key;
mod log;
#[cfg(test)]
#[cfg(loom)]
mod model;
mod publisher;
mod subscription;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use directory::{Directory, Parts};
use entry::{Entry, Record};

pub use borrowed::Borrowed;
pub use directory::{MAX_ENTRIES, MIN_ENTRIES, SUBSCRIBERS, VERSION};
pub use error::{ExchangeError, Pressure, PublishError};
pub use key::{Key, Meta};
pub use publisher::{Delivery, PublishOptions, Publisher};
pub use subscription::{News, Subscription};

use crate::arena::{Arena, Handle, HandleError};

/// How often opening starts over while others make and leave exchanges.
const TRIES: u32 = 64;
/// How often a lookup starts over because what it found went away under it.
const LOOKS: u32 = 64;

/// How an exchange is made. Whoever comes later takes it as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExchangeConfig {
    /// Blocks that can be published at the same time: a power of two from 64 to 65,536. At 64 bytes each.
    pub entries: u32,
}

impl Default for ExchangeConfig {
    fn default() -> Self {
        Self { entries: 4096 }
    }
}

/// The exchange of an arena; there is one. Clones are the same.
#[derive(Clone, Debug)]
pub struct Exchange(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    directory: Directory,
    /// The block that the directory is, held until this is dropped.
    handle: Handle,
    arena: Arena,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // It is held; in a forked child it is the parent's to give back.
        let _ = self.arena.release(self.handle);
    }
}

impl Exchange {
    /// Opens the arena's exchange, or makes it. It goes when nobody has it open any more.
    pub fn open(arena: &Arena, config: &ExchangeConfig) -> Result<Self, ExchangeError> {
        let bytes = Directory::bytes(config.entries)?;
        let word = arena.exchange_word()?;
        for _ in 0..TRIES {
            let found = word.load(Ordering::Acquire);
            match Handle::from_bits(found).map(|handle| (handle, arena.retain(handle))) {
                Some((handle, Ok(()))) => return Self::attach(arena, handle),
                // Nobody had it open any more.
                None | Some((_, Err(HandleError::Stale))) => {}
                Some((_, Err(HandleError::Forked))) => return Err(HandleError::Forked.into()),
                Some((_, Err(_))) => return Err(ExchangeError::Damaged { what: "its arena leads elsewhere" }),
            }
            let mut local = arena.local()?;
            let handle = local.alloc(bytes)?;
            Directory::write(&arena.block(handle)?, config.entries)?;
            local.share(handle)?;
            // Only now can anybody find it. Whoever dies before leaves a block that is his alone.
            if word.compare_exchange(found, handle.to_bits(), Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return Self::attach(arena, handle);
            }
            local.free(handle)?;
        }
        Err(ExchangeError::Unsettled { tries: TRIES })
    }

    /// `handle` is held, once, for what is made here.
    fn attach(arena: &Arena, handle: Handle) -> Result<Self, ExchangeError> {
        let found = arena.block(handle).map_err(ExchangeError::from).and_then(|block| Directory::find(&block));
        match found {
            Ok(directory) => Ok(Self(Arc::new(Inner { directory, handle, arena: arena.clone() }))),
            Err(error) => {
                let _ = arena.release(handle);
                Err(error)
            }
        }
    }

    /// The arena whose blocks are exchanged.
    pub fn arena(&self) -> &Arena {
        &self.0.arena
    }

    /// Blocks that can be published at the same time.
    pub fn capacity(&self) -> Result<usize, ExchangeError> {
        Ok(self.parts()?.entries.len())
    }

    /// The directory, unless this is a forked child, where it is not mapped.
    fn parts(&self) -> Result<Parts<'_>, ExchangeError> {
        self.0.arena.exchange_word()?;
        Ok(self.0.directory.parts(&self.0.arena))
    }

    /// Whether a block is held, by its handle's bits from the directory.
    fn is_held(&self, bits: u64) -> bool {
        Handle::from_bits(bits).is_some_and(|handle| self.0.arena.address(handle).is_ok())
    }

    /// Borrows what is published under a key. It stays published; the block cannot be freed before the guard is dropped.
    pub fn borrow(&self, key: Key) -> Result<Option<Borrowed>, ExchangeError> {
        self.find(key, |entry, handle| entry::claimant(entry) == handle)
    }

    /// Takes what is published under a key: the same, and nobody else finds it any more. Of several who take a key, one
    /// gets it.
    pub fn take(&self, key: Key) -> Result<Option<Borrowed>, ExchangeError> {
        let taken = self.find(key, entry::remove)?;
        if taken.is_some() {
            self.parts()?.front.room.ring();
        }
        Ok(taken)
    }

    /// Finds a key, holds its block, then makes sure of it by `confirm`, which says whether it was still published.
    fn find(&self, key: Key, confirm: impl Fn(&Entry, u64) -> bool) -> Result<Option<Borrowed>, ExchangeError> {
        let parts = self.parts()?;
        for _ in 0..LOOKS {
            let Some((entry, record)) = self.look_up(parts, key) else { return Ok(None) };
            let Some(handle) = Handle::from_bits(record.handle) else { return Ok(None) };
            match self.0.arena.retain(handle) {
                Ok(()) => {}
                // Freed, or claimed by one who lives and has not shared it: nothing is published there.
                Err(HandleError::Stale | HandleError::NotShared | HandleError::OutOfRange) => {
                    entry::remove(entry, record.handle);
                    continue;
                }
                Err(error) => return Err(error.into()),
            }
            let borrowed = Borrowed::new(self.clone(), handle, key, record.meta);
            if confirm(entry, record.handle) {
                borrowed.check_length()?;
                return Ok(Some(borrowed));
            }
        }
        // Published and taken all the time; at each of these moments it was not there for us.
        Ok(None)
    }

    /// The first entry that has the key and a block that is held.
    fn look_up<'a>(&self, parts: Parts<'a>, key: Key) -> Option<(&'a Entry, Record)> {
        let mut found = parts.window(key).filter_map(|(_, entry)| Some((entry, entry::read(entry)?)));
        found.find(|(_, record)| record.key == key && self.is_held(record.handle))
    }

    /// What is published at the moment, in no order.
    pub fn published(&self) -> Result<Vec<(Key, Meta)>, ExchangeError> {
        let records = self.parts()?.entries.iter().filter_map(entry::read);
        Ok(records.filter(|record| self.is_held(record.handle)).map(|record| (record.key, record.meta)).collect())
    }

    /// A side that publishes.
    pub fn publisher(&self, options: PublishOptions) -> Publisher {
        Publisher::new(self.clone(), options)
    }

    /// Hears of everything that is published from now on.
    pub fn subscribe(&self) -> Result<Subscription, ExchangeError> {
        Subscription::new(self.clone())
    }
}
