//! One direction of a ring: one sender, one receiver, words in between.
//!
//! Positions count words and wrap at 2^32; `tail - head` is what is in the ring, and more than it has words is damage. A message is published by one store to the tail, after all its words: a sender killed in the middle of a
//! message has not sent it.
//!
//! | who | reads | writes |
//! | --- | --- | --- |
//! | sender | `head.position` (checked), `tail.sleeper` | words, `tail.position`, `head.sleeper` |
//! | receiver | `tail.position` (checked), words (copied), `head.sleeper` | `head.position`, `tail.sleeper` |
//!
//! Nobody sleeps through a message: the receiver announces that it sleeps and then looks at the position once more, the
//! sender moves the position and then looks whether anybody sleeps. All four are `SeqCst`, so at least one of them sees
//! the other.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::RingError;

const WORD_BYTES: usize = size_of::<u64>();

/// A position and who waits for it to move, on a cache line of their own.
#[repr(C, align(64))]
#[derive(Debug)]
pub(super) struct Cursor {
    position: AtomicU32,
    sleeper: AtomicU32,
    unused: [AtomicU64; 7],
}

impl Cursor {
    pub(super) fn position(&self) -> u32 {
        self.position.load(Ordering::SeqCst)
    }

    /// The word to sleep on.
    pub(super) fn futex(&self) -> &AtomicU32 {
        &self.position
    }

    pub(super) fn announce_sleep(&self) {
        self.sleeper.store(1, Ordering::SeqCst);
    }

    pub(super) fn end_sleep(&self) {
        self.sleeper.store(0, Ordering::Relaxed);
    }

    pub(super) fn has_sleeper(&self) -> bool {
        self.sleeper.load(Ordering::SeqCst) != 0
    }

    fn publish(&self, position: u32) {
        self.position.store(position, Ordering::SeqCst);
    }
}

/// One direction, with room for two of the longest messages.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Track<const WORDS: usize> {
    pub(super) tail: Cursor,
    pub(super) head: Cursor,
    words: [AtomicU64; WORDS],
}

impl<const WORDS: usize> Track<WORDS> {
    /// Positions wrap at 2^32, so the number of words must divide it.
    const CAPACITY: u32 = {
        assert!(WORDS.is_power_of_two() && WORDS <= 1 << 20);
        #[expect(clippy::cast_possible_truncation, reason = "bounded by the line above")]
        let words = WORDS as u32;
        words
    };
    /// The longest message.
    pub(super) const MESSAGE_BYTES_MAX: usize = (WORDS / 2 - 1) * WORD_BYTES;

    /// Writes a message at the sender's own `tail`; where the next one goes, or `None` while there is no room.
    pub(super) fn push(&self, tail: u32, message: &[u8]) -> Result<Option<u32>, RingError> {
        if self.full_at(tail, message.len())?.is_some() {
            return Ok(None);
        }
        self.word(tail).store(message.len() as u64, Ordering::Relaxed);
        let mut at = tail.wrapping_add(1);
        for chunk in message.chunks(WORD_BYTES) {
            let mut word = [0; WORD_BYTES];
            word[..chunk.len()].copy_from_slice(chunk);
            self.word(at).store(u64::from_le_bytes(word), Ordering::Relaxed);
            at = at.wrapping_add(1);
        }
        self.tail.publish(at);
        Ok(Some(at))
    }

    /// Copies the message at the receiver's own `head`; where the next one is, or `None` while there is none.
    pub(super) fn pop(&self, head: u32, message: &mut Vec<u8>) -> Result<Option<u32>, RingError> {
        let available = self.tail.position().wrapping_sub(head);
        if available == 0 {
            return Ok(None);
        }
        // A length of the other side's making: bounded before anything is done with it.
        let length = self.word(head).load(Ordering::Relaxed);
        let length = usize::try_from(length).ok().filter(|length| *length <= Self::MESSAGE_BYTES_MAX);
        let Some(length) = length.filter(|length| words_of(*length) <= available && available <= Self::CAPACITY) else {
            return Err(RingError::Damaged);
        };
        message.clear();
        let mut at = head.wrapping_add(1);
        while message.len() < length {
            let word = self.word(at).load(Ordering::Relaxed).to_le_bytes();
            message.extend_from_slice(&word[..WORD_BYTES.min(length - message.len())]);
            at = at.wrapping_add(1);
        }
        self.head.publish(at);
        Ok(Some(at))
    }

    /// `None` if a message of this length has room behind the sender's own `tail`, else the head that is in its way.
    pub(super) fn full_at(&self, tail: u32, bytes: usize) -> Result<Option<u32>, RingError> {
        if bytes > Self::MESSAGE_BYTES_MAX {
            return Err(RingError::TooLong { bytes });
        }
        let head = self.head.position();
        let free = Self::CAPACITY.checked_sub(tail.wrapping_sub(head)).ok_or(RingError::Damaged)?;
        Ok((free < words_of(bytes)).then_some(head))
    }

    fn word(&self, position: u32) -> &AtomicU64 {
        &self.words[(position % Self::CAPACITY) as usize]
    }
}

/// Words of a message with its length.
fn words_of(bytes: usize) -> u32 {
    1 + u32::try_from(bytes.div_ceil(WORD_BYTES)).expect("messages are bounded far below 4 GiB")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Small: Miri looks at every word of it at every call.
    fn track() -> Arc<Track<128>> {
        let cursor = || Cursor { position: AtomicU32::new(0), sleeper: AtomicU32::new(0), unused: Default::default() };
        Arc::new(Track { tail: cursor(), head: cursor(), words: std::array::from_fn(|_| AtomicU64::new(0)) })
    }

    /// On the heap, so that it runs under Miri: `cargo +nightly miri test -p tidekv-shm ring::track`.
    #[test]
    fn a_receiver_sees_whole_messages_or_none() {
        const MESSAGES: usize = if cfg!(miri) { 60 } else { 20_000 };
        let sending = track();
        let receiving = Arc::clone(&sending);
        let message = |number: usize| vec![u8::try_from(number % 251).unwrap(); number % 300];
        let sender = std::thread::spawn(move || {
            let mut tail = 0;
            for number in 0..MESSAGES {
                tail = loop {
                    match sending.push(tail, &message(number)).unwrap() {
                        Some(next) => break next,
                        None => std::thread::yield_now(),
                    }
                };
            }
        });
        let (mut head, mut found) = (0, Vec::new());
        for number in 0..MESSAGES {
            head = loop {
                match receiving.pop(head, &mut found).unwrap() {
                    Some(next) => break next,
                    None => std::thread::yield_now(),
                }
            };
            assert_eq!(found, message(number));
        }
        sender.join().unwrap();
        assert_eq!(receiving.pop(head, &mut found), Ok(None));
    }

    /// Whoever announces its sleep before it looks, and whoever looks for sleepers after it published: one of the two
    /// sees the other, every time.
    #[test]
    fn nobody_sleeps_through_a_message() {
        const ROUNDS: u32 = if cfg!(miri) { 20 } else { 5_000 };
        for round in 0..ROUNDS {
            let ours = track();
            let theirs = Arc::clone(&ours);
            let sender = std::thread::spawn(move || {
                theirs.push(0, &[1]).unwrap();
                theirs.tail.has_sleeper()
            });
            ours.tail.announce_sleep();
            let would_sleep = ours.tail.position() == 0;
            let wakes = sender.join().unwrap();
            assert!(wakes || !would_sleep, "round {round}");
        }
    }

    #[test]
    fn positions_wrap() {
        let track = track();
        let mut position = u32::MAX - 3;
        track.head.publish(position);
        track.tail.publish(position);
        let mut found = Vec::new();
        for _ in 0..5 {
            let tail = track.push(position, b"across the end").unwrap().unwrap();
            let head = track.pop(position, &mut found).unwrap().unwrap();
            assert_eq!((found.as_slice(), head), (&b"across the end"[..], tail));
            position = head;
        }
        assert!(position < 100);
    }
}
