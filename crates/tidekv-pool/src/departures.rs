//! Why pages leave: remembered when they are sent on their way out, told when their memory is back.
//!
//! Between the two lie fences of the device, so pages of several causes may be under way at once. They leave in about the
//! order in which they were sent, so the oldest cause is told first; over time each cause is told for as many pages as
//! were sent for it.

use std::collections::VecDeque;

use tidekv_core::units::Bytes;
use tidekv_shm::{EventKind, Note, Reason};

/// Why a page goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// Others are owed it; the slot of the neighbour that waits for most. Without one the budget itself shrank.
    Owed { peer: Option<u32> },
    /// The limit or the ceiling forbids it.
    Limit,
    /// An operator or the engine asked for all that is idle.
    Trim(Reason),
    /// It was idle for long.
    Decay,
}

impl Cause {
    /// As an event of so many bytes.
    pub(crate) fn note(self, bytes: Bytes) -> Note {
        let (kind, reason, peer) = match self {
            Self::Owed { peer: Some(slot) } => (EventKind::Reclaimed, Reason::Neighbours, Some(slot)),
            Self::Owed { peer: None } => (EventKind::Reclaimed, Reason::OverBudget, None),
            Self::Limit => (EventKind::Shrunk, Reason::Limit, None),
            Self::Trim(by) => (EventKind::Trimmed, by, None),
            Self::Decay => (EventKind::Decayed, Reason::Idle, None),
        };
        Note { peer, ..Note::new(kind, reason, bytes) }
    }

    /// Why the engine is asked to free what cannot go by itself.
    pub(crate) fn evict_note(self, bytes: Bytes) -> Note {
        Note { kind: EventKind::EvictAsked, ..self.note(bytes) }
    }
}

/// Pages under way, the first sent first.
#[derive(Debug, Default)]
pub(crate) struct Departures(VecDeque<(Cause, u32)>);

impl Departures {
    pub(crate) fn sent(&mut self, cause: Cause, pages: u32) {
        match self.0.back_mut() {
            _ if pages == 0 => {}
            Some((last, count)) if *last == cause => *count += pages,
            _ => self.0.push_back((cause, pages)),
        }
    }

    /// So many pages have arrived: the causes of the longest under way.
    pub(crate) fn arrived(&mut self, mut pages: u32) -> Vec<(Cause, u32)> {
        let mut causes = Vec::new();
        while pages > 0
            && let Some((cause, count)) = self.0.front_mut()
        {
            let part = pages.min(*count);
            causes.push((*cause, part));
            pages -= part;
            *count -= part;
            if *count == 0 {
                self.0.pop_front();
            }
        }
        causes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_is_told_once_for_what_it_was_sent_for() {
        let mut departures = Departures::default();
        let owed = Cause::Owed { peer: Some(3) };
        for (cause, pages) in [(Cause::Decay, 2), (Cause::Decay, 1), (owed, 4), (Cause::Limit, 0), (Cause::Decay, 1)] {
            departures.sent(cause, pages);
        }
        assert_eq!(departures.arrived(2), [(Cause::Decay, 2)]);
        assert_eq!(departures.arrived(3), [(Cause::Decay, 1), (owed, 2)]);
        assert_eq!(departures.arrived(9), [(owed, 2), (Cause::Decay, 1)]);
        assert_eq!(departures.arrived(1), []);
    }
}
