//! The side that publishes: what it has outstanding, and what holds it up.
//!
//! ```text
//!   publish   claim an entry -> share the block -> write the record, seal it -> announce it -> wake
//!             killed before the seal: nothing is published, the block comes back with recovery
//!             killed after it: published for whoever finds it first; stale as soon as recovery has run
//! ```
//!
//! The budget counts what this publisher has published until nobody holds it any more, so it bounds the memory that
//! slow consumers can keep. It is private: it dies with its publisher and cannot be wrong after somebody else's death.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering;
use std::time::Instant;

use tidekv_core::units::Bytes;

use super::bell::fence;
use super::entry::{self, Entry, Record};
use super::error::{ExchangeError, Pressure, PublishError};
use super::key::{Key, Meta};
use super::{Exchange, log};
use crate::arena::Handle;

/// What becomes of announcements that a subscriber has not read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Delivery {
    /// The oldest are overwritten, and the subscriber hears how many.
    #[default]
    Lossy,
    /// The publisher is held up while a subscriber that lives is half the log (2,048 announcements or more) behind. None
    /// is lost as long as all publishers of the exchange say so and fewer than that publish at the same moment.
    Lossless,
}

/// How a publisher is held up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublishOptions {
    /// Bytes of blocks that may be outstanding: published, or withdrawn and still borrowed.
    pub budget: Bytes,
    /// What becomes of announcements that a subscriber has not read.
    pub delivery: Delivery,
}

impl Default for PublishOptions {
    /// No bound but the arena's.
    fn default() -> Self {
        Self { budget: Bytes(u64::MAX), delivery: Delivery::Lossy }
    }
}

/// Publishes blocks. One thread uses it at a time; there can be many. Dropping it withdraws what it published; blocks
/// that somebody borrowed live on.
#[derive(Debug)]
pub struct Publisher {
    exchange: Exchange,
    options: PublishOptions,
    outstanding: HashMap<Handle, Outstanding>,
    /// The same, in the order in which they are looked at.
    queue: VecDeque<Handle>,
    used: u64,
}

/// Outstanding blocks that are looked at for each that is published: more than come in, so all of them in time.
const LOOKED_AT: usize = 4;

#[derive(Clone, Copy, Debug)]
struct Outstanding {
    entry: usize,
    /// What the block occupies.
    bytes: u64,
    /// Whether it is published as far as we know, and held by us.
    held: bool,
}

impl Publisher {
    pub(super) fn new(exchange: Exchange, options: PublishOptions) -> Self {
        Self { exchange, options, outstanding: HashMap::new(), queue: VecDeque::new(), used: 0 }
    }

    /// Publishes a block that this process allocated and has not shared; from now on nobody writes to it. On an error
    /// nothing is published, and the block is still the caller's.
    pub fn publish(&mut self, key: Key, handle: Handle, meta: Meta) -> Result<(), PublishError> {
        let arena = self.exchange.arena();
        let block = arena.block(handle)?.len() as u64;
        if meta.bytes > block {
            return Err(PublishError::TooLong { bytes: meta.bytes, block });
        }
        self.check_room(block)?;
        let exchange = self.exchange.clone();
        let parts = exchange.parts()?;
        let record = Record { handle: handle.to_bits(), key, meta };
        if exchange.look_up(parts, key).is_some() {
            return Err(PublishError::Exists { key });
        }
        let (at, entry) = match self.claim(&record)? {
            Some(claimed) => claimed,
            None => {
                // The dead may have entries there.
                exchange.arena().recover().map_err(ExchangeError::from)?;
                self.claim(&record)?.ok_or(PublishError::Full(Pressure::Directory))?
            }
        };
        if let Err(error) = exchange.arena().share_first(handle) {
            entry::remove(entry, record.handle);
            return Err(error.into());
        }
        entry::seal(entry, &record);
        let window = parts.window(key);
        let fence = || fence(Ordering::SeqCst);
        if !entry::settle_twins(window, at, &record, fence, |handle| exchange.is_held(handle)) {
            entry::remove(entry, record.handle);
            return Err(PublishError::Exists { key });
        }
        self.outstanding.insert(handle, Outstanding { entry: at, bytes: block, held: true });
        self.queue.push_back(handle);
        self.used += block;
        self.look_at(LOOKED_AT)?;
        // In a damaged log nobody finds it; by its key everybody does.
        let _ = log::append(&parts.front.log_head, parts.log, at as u32);
        parts.front.news.ring();
        Ok(())
    }

    /// The same, and while there is no room waits for it until the deadline.
    pub fn publish_by(&mut self, key: Key, handle: Handle, meta: Meta, deadline: Instant) -> Result<(), PublishError> {
        loop {
            let full = match self.publish(key, handle, meta) {
                Err(error @ PublishError::Full(_)) => error,
                other => return other,
            };
            if Instant::now() >= deadline {
                return Err(full);
            }
            // What the dead held counts as long as it is not taken back.
            self.exchange.arena().recover().map_err(ExchangeError::from)?;
            let exchange = self.exchange.clone();
            let room = &exchange.parts()?.front.room;
            let bytes = exchange.arena().block(handle)?.len() as u64;
            let may_be_free = || self.check_room(bytes).is_ok() && self.finds_entry(key).unwrap_or(true);
            room.wait(deadline, may_be_free).map_err(ExchangeError::Wait)?;
        }
    }

    /// Takes a publication of this publisher away; says whether it was there. Those who borrowed it keep it.
    pub fn withdraw(&mut self, key: Key) -> Result<bool, ExchangeError> {
        let exchange = self.exchange.clone();
        let parts = exchange.parts()?;
        let records = parts.window(key).filter_map(|(_, entry)| Some((entry, entry::read(entry)?)));
        for (entry, record) in records.filter(|(_, record)| record.key == key) {
            let ours = Handle::from_bits(record.handle).filter(|handle| self.outstanding.contains_key(handle));
            let Some(handle) = ours else { continue };
            if entry::remove(entry, record.handle) {
                self.let_go(handle);
                parts.front.room.ring();
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Lets go of what consumers took, and says how many bytes are still published or borrowed. Publishing does the same
    /// by the way; a publisher that pauses calls it so that memory comes back meanwhile.
    pub fn settle(&mut self) -> Result<Bytes, ExchangeError> {
        self.look_at(self.queue.len())?;
        Ok(Bytes(self.used))
    }

    fn check_room(&mut self, bytes: u64) -> Result<(), PublishError> {
        let budget = self.options.budget;
        if self.used.saturating_add(bytes) > budget.0 {
            self.settle()?;
        }
        if self.used.saturating_add(bytes) > budget.0 {
            return Err(PublishError::Full(Pressure::Budget { used: Bytes(self.used), budget }));
        }
        match self.options.delivery {
            Delivery::Lossy => Ok(()),
            Delivery::Lossless => self.check_subscribers(),
        }
    }

    fn check_subscribers(&self) -> Result<(), PublishError> {
        let parts = self.exchange.parts()?;
        let head = parts.front.log_head.load(Ordering::Acquire);
        for subscriber in &parts.front.subscribers {
            let token = subscriber.token.load(Ordering::Acquire);
            let behind = head.saturating_sub(subscriber.cursor.load(Ordering::Acquire));
            if token != 0 && behind >= parts.log.len() as u64 / 2 && self.exchange.is_held(token) {
                return Err(PublishError::Full(Pressure::Subscriber { behind }));
            }
        }
        Ok(())
    }

    /// Takes the first free entry of the key's window.
    fn claim(&self, record: &Record) -> Result<Option<(usize, &Entry)>, ExchangeError> {
        for (at, entry) in self.exchange.parts()?.window(record.key) {
            let found = entry::claimant(entry);
            if !self.exchange.is_held(found) && entry::claim(entry, found, record.handle) {
                return Ok(Some((at, entry)));
            }
        }
        Ok(None)
    }

    fn finds_entry(&self, key: Key) -> Result<bool, ExchangeError> {
        Ok(self.exchange.parts()?.window(key).any(|(_, entry)| !self.exchange.is_held(entry::claimant(entry))))
    }

    /// Looks at the next so many outstanding blocks: lets go of what others took, and counts what nobody holds any more as
    /// free.
    fn look_at(&mut self, count: usize) -> Result<(), ExchangeError> {
        let exchange = self.exchange.clone();
        let parts = exchange.parts()?;
        for _ in 0..count.min(self.queue.len()) {
            let Some(handle) = self.queue.pop_front() else { break };
            let Some(one) = self.outstanding.get(&handle).copied() else { continue };
            if one.held && entry::claimant(&parts.entries[one.entry]) == handle.to_bits() {
                self.queue.push_back(handle);
                continue;
            }
            self.let_go(handle);
            if exchange.is_held(handle.to_bits()) {
                self.queue.push_back(handle);
            } else {
                self.outstanding.remove(&handle);
                self.used -= one.bytes;
            }
        }
        Ok(())
    }

    /// Gives our hold of a block back that is not published any more.
    fn let_go(&mut self, handle: Handle) {
        if let Some(one) = self.outstanding.get_mut(&handle)
            && std::mem::take(&mut one.held)
        {
            // Held since it was published. In a damaged arena it may be gone, which is what was wanted.
            let _ = self.exchange.arena().release(handle);
        }
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        let exchange = self.exchange.clone();
        // A forked child has no part in it.
        let Ok(parts) = exchange.parts() else { return };
        let published: Vec<(Handle, Outstanding)> =
            self.outstanding.iter().filter(|(_, one)| one.held).map(|(handle, one)| (*handle, *one)).collect();
        for (handle, one) in published {
            entry::remove(&parts.entries[one.entry], handle.to_bits());
            self.let_go(handle);
        }
        parts.front.room.ring();
    }
}
