//! Hearing of what is published, in the order in which it was.
//!
//! A subscription reads the log from where it was made. An announcement names an entry; what is published there by then
//! is what is told, once: if the entry has a later publication already, that one is told early, and the earlier is
//! gone anyway.
//!
//! It has a place in the directory, so that lossless publishers know how far it has read, and a block of its own by
//! which others see that it lives: when its process dies, recovery frees the block, and the place with it.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::Exchange;
use super::entry;
use super::error::ExchangeError;
use super::key::{Key, Meta};
use super::log::{self, Found};
use crate::arena::Handle;

/// Announcements of entries that are gone, passed over in one look.
const PASSED_MAX: u32 = 100_000;

/// What a subscription tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum News {
    /// A block was published, and was still there a moment ago.
    Published {
        /// Under this key.
        key: Key,
        /// What its publisher says about it.
        meta: Meta,
    },
    /// So many announcements were overwritten before they were read. [`Exchange::published`] says what there is.
    Missed(u64),
}

/// Hears of publications. Dropping it frees its place.
#[derive(Debug)]
pub struct Subscription {
    exchange: Exchange,
    place: usize,
    token: Handle,
    cursor: u64,
    /// For each entry, the handle that was told last.
    told: Vec<u64>,
}

impl Subscription {
    pub(super) fn new(exchange: Exchange) -> Result<Self, ExchangeError> {
        let arena = exchange.arena();
        let token = arena.local()?.alloc(1)?;
        arena.share_first(token)?;
        let taken = take_place(&exchange, token).and_then(|place| match place {
            Some(place) => Ok(Some(place)),
            None => {
                arena.recover()?;
                take_place(&exchange, token)
            }
        });
        let place = match taken.and_then(|place| place.ok_or(ExchangeError::TooManySubscriptions)) {
            Ok(place) => place,
            Err(error) => {
                // Allocated and shared just now.
                let _ = arena.release(token);
                return Err(error);
            }
        };
        let parts = exchange.parts()?;
        let cursor = parts.front.log_head.load(Ordering::Acquire);
        parts.front.subscribers[place].cursor.store(cursor, Ordering::Release);
        let told = vec![0; parts.entries.len()];
        Ok(Self { exchange, place, token, cursor, told })
    }

    /// The next news, if there are any.
    pub fn poll(&mut self) -> Result<Option<News>, ExchangeError> {
        let exchange = self.exchange.clone();
        let parts = exchange.parts()?;
        let mut news = None;
        for _ in 0..PASSED_MAX {
            match log::look(&parts.front.log_head, parts.log, self.cursor) {
                Found::Nothing => break,
                Found::Overwritten { oldest } => {
                    news = Some(News::Missed(oldest.saturating_sub(self.cursor)));
                    self.cursor = oldest;
                }
                Found::Entry(index) => {
                    self.cursor = self.cursor.wrapping_add(1);
                    // A number that is no entry's was not written by us.
                    let record = parts.entries.get(index as usize).and_then(entry::read);
                    news = record.filter(|record| exchange.is_held(record.handle)).and_then(|record| {
                        let before = std::mem::replace(&mut self.told[index as usize], record.handle);
                        let new = before != record.handle;
                        new.then_some(News::Published { key: record.key, meta: record.meta })
                    });
                }
            }
            if news.is_some() {
                break;
            }
        }
        let shown = &parts.front.subscribers[self.place].cursor;
        if shown.load(Ordering::Relaxed) != self.cursor {
            shown.store(self.cursor, Ordering::Release);
            parts.front.room.ring();
        }
        Ok(news)
    }

    /// The next news, waited for until the deadline.
    pub fn wait(&mut self, deadline: Instant) -> Result<Option<News>, ExchangeError> {
        let exchange = self.exchange.clone();
        loop {
            let news = self.poll()?;
            if news.is_some() || Instant::now() >= deadline {
                return Ok(news);
            }
            let parts = exchange.parts()?;
            let there = || log::look(&parts.front.log_head, parts.log, self.cursor) != Found::Nothing;
            parts.front.news.wait(deadline, there).map_err(ExchangeError::Wait)?;
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        // A forked child has no part in it.
        let Ok(parts) = self.exchange.parts() else { return };
        let place = &parts.front.subscribers[self.place].token;
        let _ = place.compare_exchange(self.token.to_bits(), 0, Ordering::AcqRel, Ordering::Relaxed);
        let _ = self.exchange.arena().release(self.token);
        parts.front.room.ring();
    }
}

/// A place that nobody has who lives.
fn take_place(exchange: &Exchange, token: Handle) -> Result<Option<usize>, ExchangeError> {
    let parts = exchange.parts()?;
    Ok(parts.front.subscribers.iter().position(|subscriber| {
        let found = subscriber.token.load(Ordering::Acquire);
        let free = !exchange.is_held(found);
        free && subscriber.token.compare_exchange(found, token.to_bits(), Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }))
}
