//! The order in which entries were published: a ring of words that nobody holds up.
//!
//! ```text
//!   head -> 4711                                   the next position
//!   word of position p, at p modulo length:        | position: 44 bits | entry: 20 bits |
//! ```
//!
//! Whoever announces replaces, at the head's place, the word of exactly one lap before by his own (one CAS), then
//! moves the head. If he dies in between, the next one finds the word there and moves the head for him. So there are no
//! gaps, and what a word says it says about one position only.

use std::sync::atomic::Ordering;

use crate::arena::Atomic;

const INDEX_BITS: u32 = 20;
const POSITION_MASK: u64 = (1 << (64 - INDEX_BITS)) - 1;
/// Entries that the log can tell apart.
pub(super) const MAX_ENTRIES: u32 = 1 << INDEX_BITS;
/// Where positions begin. A word of zeros is none.
pub(super) const FIRST: u64 = 1;

/// How often an announcement is tried. Others get in between, so it can take a few; a log in which nothing fits together
/// must not take for ever.
const TRIES: u32 = 100_000;

/// What a subscriber finds at a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Nothing yet.
    Nothing,
    /// Something was published in this entry.
    Entry(u32),
    /// The position was used again; the oldest that there still is.
    Overwritten { oldest: u64 },
}

/// Announces an entry; gives its position, or nothing if the log is damaged.
pub(super) fn append<A: Atomic>(head: &A, log: &[A], index: u32) -> Option<u64> {
    let laps = log.len() as u64;
    for _ in 0..TRIES {
        let at = head.load(Ordering::Acquire);
        let word = word_of(log, at);
        let found = word.load(Ordering::Acquire);
        if found >> INDEX_BITS == at & POSITION_MASK && found != 0 {
            // Somebody's announcement, who has not come to move the head.
            let _ = head.replace(at, at.wrapping_add(1));
            continue;
        }
        let before = at.saturating_sub(laps) & POSITION_MASK;
        if found >> INDEX_BITS != before {
            // The head that we saw is an old one.
            continue;
        }
        let new = (at & POSITION_MASK) << INDEX_BITS | u64::from(index);
        if word.replace(found, new).is_ok() {
            let _ = head.replace(at, at.wrapping_add(1));
            return Some(at);
        }
    }
    None
}

/// Looks at a position.
pub(super) fn look<A: Atomic>(head: &A, log: &[A], position: u64) -> Found {
    let found = word_of(log, position).load(Ordering::Acquire);
    if found >> INDEX_BITS == position & POSITION_MASK && found != 0 {
        // Masked to 20 bits.
        return Found::Entry((found & ((1 << INDEX_BITS) - 1)) as u32);
    }
    let oldest = head.load(Ordering::Acquire).saturating_sub(log.len() as u64);
    if oldest > position { Found::Overwritten { oldest } } else { Found::Nothing }
}

fn word_of<A>(log: &[A], position: u64) -> &A {
    &log[position as usize % log.len()]
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    fn log(length: usize) -> (AtomicU64, Vec<AtomicU64>) {
        (AtomicU64::new(FIRST), (0..length).map(|_| AtomicU64::new(0)).collect())
    }

    #[test]
    fn what_is_announced_is_found_in_order_until_it_is_overwritten() {
        let (head, log) = log(4);
        assert_eq!(look(&head, &log, FIRST), Found::Nothing);
        for position in FIRST..FIRST + 11 {
            assert_eq!(append(&head, &log, position as u32 * 3), Some(position));
        }
        assert_eq!(look(&head, &log, 2), Found::Overwritten { oldest: 8 });
        for position in 8..12 {
            assert_eq!(look(&head, &log, position), Found::Entry(position as u32 * 3));
        }
        assert_eq!(look(&head, &log, 12), Found::Nothing);
    }

    #[test]
    fn the_head_is_moved_for_whoever_died() {
        let (head, log) = log(4);
        append(&head, &log, 1);
        head.store(FIRST, Ordering::Release);
        assert_eq!(look(&head, &log, FIRST), Found::Entry(1), "there, whatever the head says");
        assert_eq!(append(&head, &log, 2), Some(FIRST + 1));
    }

    #[test]
    fn a_damaged_log_ends() {
        let (head, log) = log(4);
        log.iter().for_each(|word| word.store(u64::MAX, Ordering::Release));
        assert_eq!(append(&head, &log, 1), None);
        head.store(u64::MAX, Ordering::Release);
        assert_eq!(look(&head, &log, 7), Found::Overwritten { oldest: u64::MAX - 4 });
        // Whatever the answer is, there is one.
        let _ = append(&head, &log, MAX_ENTRIES - 1);
    }
}
