//! What a pool has to tell until its next update of the ledger, and how a storm becomes a few events.
//!
//! ```text
//!   note:   need need need . need need need need need need . . . need          the same kind, reason and neighbour
//!   event:  1              5                             8 ...   1             how often, and their bytes together
//!           at once        after 100 ms of quiet         then 200, 400 ... 6400
//! ```
//!
//! The first of a sort is told at once. Those that follow closely are told as one, at the end of a quiet time that doubles
//! while they keep coming and starts over once they stop. So a caller that is refused every few milliseconds for a day
//! writes some ten events a minute, and neither it nor a pool that grows page by page pushes the others out of the ring.

use tidekv_core::units::Bytes;

use super::event::Note;

/// How long nothing of the same sort is told after the first.
const QUIET_MS: u64 = 100;
/// How long at most.
const LONGEST_QUIET_MS: u64 = 6_400;
/// Sorts that are remembered. There are fewer kinds and reasons than this; only neighbours could make more.
const SORTS: usize = 64;

/// What has happened, once or several times, and is not written yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Happened {
    pub(crate) note: Note,
    pub(crate) count: u32,
    pub(crate) at_ms: u64,
}

/// One sort of event.
#[derive(Debug)]
struct Sort {
    /// The last one, with its bytes added up where they do.
    waiting: Happened,
    quiet_ms: u64,
    quiet_until_ms: u64,
}

/// A pool's untold events.
#[derive(Debug, Default)]
pub(crate) struct Journal {
    sorts: Vec<Sort>,
}

impl Journal {
    /// Remembers something until it is told.
    pub(crate) fn add(&mut self, note: Note, now_ms: u64) {
        let sort = |note: &Note| (note.kind, note.reason, note.peer);
        let once = Happened { note, count: 1, at_ms: now_ms };
        if let Some(known) = self.sorts.iter_mut().find(|known| sort(&known.waiting.note) == sort(&note)) {
            let waiting = &mut known.waiting;
            if waiting.count > 0 {
                let before = if note.kind.adds_up() { waiting.note.bytes } else { Bytes::ZERO };
                waiting.count = waiting.count.saturating_add(1);
                waiting.at_ms = now_ms;
                waiting.note = Note { bytes: Bytes(before.0.saturating_add(note.bytes.0)), ..note };
                return;
            }
            let stopped = now_ms >= known.quiet_until_ms.saturating_add(known.quiet_ms);
            known.quiet_ms = if stopped { QUIET_MS } else { (known.quiet_ms * 2).min(LONGEST_QUIET_MS) };
            known.waiting = once;
            return;
        }
        if self.sorts.len() == SORTS {
            // The one that was told longest ago; what it had to tell besides is lost.
            let oldest = (0..SORTS).min_by_key(|&at| (self.sorts[at].waiting.count > 0, self.sorts[at].quiet_until_ms));
            self.sorts.swap_remove(oldest.expect("SORTS is not 0"));
        }
        self.sorts.push(Sort { waiting: once, quiet_ms: QUIET_MS, quiet_until_ms: 0 });
    }

    /// Takes what is to be told now; all of it, if this is the end.
    pub(crate) fn take(&mut self, now_ms: u64, at_the_end: bool) -> Vec<Happened> {
        let mut due = Vec::new();
        for sort in &mut self.sorts {
            if sort.waiting.count > 0 && (at_the_end || now_ms >= sort.quiet_until_ms) {
                due.push(sort.waiting);
                sort.waiting.count = 0;
                sort.quiet_until_ms = now_ms.saturating_add(sort.quiet_ms);
            }
        }
        due.sort_by_key(|happened| happened.at_ms);
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{EventKind, Reason};

    fn note(kind: EventKind, bytes: u64) -> Note {
        Note::new(kind, Reason::Need, Bytes(bytes))
    }

    fn told(journal: &mut Journal, now_ms: u64) -> Vec<(u64, u32)> {
        journal.take(now_ms, false).iter().map(|happened| (happened.note.bytes.0, happened.count)).collect()
    }

    #[test]
    fn the_first_is_told_at_once_and_the_rest_together() {
        let mut journal = Journal::default();
        journal.add(note(EventKind::Granted, 5), 1000);
        assert_eq!(told(&mut journal, 1000), [(5, 1)]);
        for now in 1001..=1010 {
            journal.add(note(EventKind::Granted, 2), now);
            assert_eq!(told(&mut journal, now), []);
        }
        assert_eq!(told(&mut journal, 1099), []);
        assert_eq!(told(&mut journal, 1100), [(20, 10)], "movements add up");
        assert_eq!(told(&mut journal, 9000), [], "once");
    }

    #[test]
    fn of_states_the_last_one_holds_and_other_sorts_do_not_wait() {
        let mut journal = Journal::default();
        journal.add(note(EventKind::Refused, 5), 0);
        assert_eq!(told(&mut journal, 0), [(5, 1)]);
        journal.add(note(EventKind::Refused, 7), 1);
        journal.add(note(EventKind::Refused, 6), 2);
        journal.add(note(EventKind::Asked, 9), 3);
        journal.add(Note { peer: Some(3), ..note(EventKind::Refused, 1) }, 4);
        assert_eq!(told(&mut journal, 4), [(9, 1), (1, 1)]);
        assert_eq!(told(&mut journal, 100), [(6, 2)]);
    }

    #[test]
    fn a_day_of_refusals_every_5_ms_is_ten_events_a_minute() {
        let mut journal = Journal::default();
        let mut events = Vec::new();
        for now in (0..600_000).step_by(5) {
            journal.add(note(EventKind::Refused, 1), now);
            events.extend(journal.take(now, false));
        }
        assert!((60..120).contains(&events.len()), "{} events in ten minutes", events.len());
        let in_all: u32 = events.iter().map(|event| event.count).sum();
        assert!(in_all > 120_000 - 6_400 / 5 - 1, "all are counted but those of the last quiet time: {in_all}");
        // Once they stop, the next is told at once.
        journal.take(700_000, true);
        journal.add(note(EventKind::Refused, 1), 800_000);
        assert_eq!(told(&mut journal, 800_000), [(1, 1)]);
        journal.add(note(EventKind::Refused, 1), 800_010);
        assert_eq!(told(&mut journal, 800_100), [(1, 1)], "and the quiet time is short again");
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut journal = Journal::default();
        for peer in 0..1000 {
            journal.add(Note { peer: Some(peer), ..note(EventKind::Reclaimed, 1) }, u64::from(peer));
        }
        assert_eq!(journal.take(1000, true).len(), SORTS);
    }
}
