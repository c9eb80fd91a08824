//! From an update to events: what its author told, and what it changed of pools that are not its own.
//!
//! ```text
//!   entry before   after                event of that pool
//!   live           returning            died
//!   live           gone, another pool   died, and returned if it held anything
//!   returning      fewer bytes, gone    returned
//!   live           live                 limit-set, share-set, trim-asked, for each of these that changed
//!   the device's budget, or who decided it       budget
//! ```
//!
//! The author's own entry is not looked at: an owner tells itself why it changed. Only entries that the update writes
//! are compared, so an update of one's own entry costs next to nothing here, and one without news nothing.

use tidekv_core::share::fair_shares;
use tidekv_core::units::Bytes;

use super::budget::{BudgetAuthor, BudgetRight};
use super::format::{self, Write};
use super::view::{EntryState, LedgerEntry, LedgerView, UNLIMITED};
use crate::clock::wall_ms;
use crate::events::{Event, EventKind, Happened, Journal, Note, PoolRef, Reason};
use crate::now_ms;

/// Whose update it is.
#[derive(Debug)]
pub(super) enum Author<'a> {
    /// Somebody without a pool: an operator's tool.
    Stranger,
    /// The pool that has just taken this slot.
    Joining(u32),
    /// The pool in this slot.
    Owner { slot: u32, journal: &'a mut Journal },
    /// A pool that is no longer in the view; as it last was.
    Leaving { entry: &'a LedgerEntry, journal: &'a mut Journal },
}

impl Author<'_> {
    fn slot(&self) -> Option<u32> {
        match self {
            Author::Stranger => None,
            Author::Joining(slot) | Author::Owner { slot, .. } => Some(*slot),
            Author::Leaving { entry, .. } => Some(entry.slot),
        }
    }
}

/// What an update that wrote `writes` over `bytes` has to tell. Takes the notes out of the view.
pub(super) fn events(bytes: &[u8], writes: &[Write], view: &mut LedgerView, author: Author<'_>) -> Vec<Event> {
    let mut notes = std::mem::take(&mut view.notes);
    let mut story = Story::new(view);
    if let Some(note) = budget_note(bytes, writes, view) {
        match &author {
            // A pool's budget follows the device: many small changes are told as one.
            Author::Owner { slot, .. } => {
                let peer = (note.reason == Reason::Given).then_some(*slot);
                notes.insert(0, (*slot, Note { peer, ..note }));
            }
            _ => story.happened(None, note),
        }
    }
    for (at, new) in writes {
        story.compare(bytes, *at, new, author.slot());
    }
    story.tell(notes, author);
    story.events
}

/// The entries of other pools that these writes remove or replace.
pub(super) fn removed(bytes: &[u8], writes: &[Write], author: &Author<'_>) -> Vec<LedgerEntry> {
    let leaves = if let Author::Leaving { entry, .. } = author { Some(entry.slot) } else { None };
    let removed = |(at, new): &Write| {
        let (slot, old) = entry_before(bytes, *at)?;
        if leaves == Some(slot) || format::same_owner(old, new) {
            return None;
        }
        format::decode_slot(slot, old).ok()?
    };
    writes.iter().filter_map(removed).collect()
}

/// The entry that a write at this offset changes: its slot, and its bytes before.
fn entry_before(bytes: &[u8], at: usize) -> Option<(u32, &format::Record)> {
    let slot = format::slot_at_offset(at).filter(|&slot| slot < format::slots_used(bytes))?;
    let old = format::record(bytes, at).filter(|old| !format::is_free(old))?;
    Some((slot, old))
}

/// What the update did to the budget, if anything. An older release may have written the head: what stands there counts, and not what
/// it means beside the budget's record.
fn budget_note(bytes: &[u8], writes: &[Write], view: &LedgerView) -> Option<Note> {
    if writes.is_empty() {
        return None;
    }
    let before = format::record(bytes, 0).and_then(format::decode_header)?.budget;
    let revision = format::decode_device(bytes)?.setting.revision;
    let header = &view.header;
    let is_decided = header.setting.revision != revision;
    if header.budget == before && !is_decided {
        return None;
    }
    let reason = match header.setting.author.filter(|_| is_decided || header.explicit_budget) {
        Some(BudgetAuthor { right: BudgetRight::Operator, .. }) => Reason::Operator,
        Some(BudgetAuthor { right: BudgetRight::Pool, .. }) => Reason::Given,
        None if header.explicit_budget => Reason::Given,
        None => Reason::OtherUsers,
    };
    Some(Note { free: before, ..Note::new(EventKind::Budget, reason, header.non_pool) })
}

struct Story<'a> {
    view: &'a LedgerView,
    now_ms: u64,
    /// Made when the first event needs them.
    shares: Option<Vec<Bytes>>,
    events: Vec<Event>,
}

impl<'a> Story<'a> {
    fn new(view: &'a LedgerView) -> Self {
        Self { view, now_ms: now_ms(), shares: None, events: Vec::new() }
    }

    /// What the author says, of itself or of others.
    fn tell(&mut self, notes: Vec<(u32, Note)>, author: Author<'_>) {
        let own_slot = author.slot();
        let (own, of_others): (Vec<_>, Vec<_>) = notes.into_iter().partition(|(slot, _)| Some(*slot) == own_slot);
        for (slot, note) in of_others {
            self.happened(self.view.by_slot(slot), note);
        }
        match author {
            Author::Stranger => {}
            Author::Joining(slot) => {
                let entry = self.view.by_slot(slot);
                let floor = entry.map_or(Bytes::ZERO, |entry| entry.floor);
                self.happened(entry, Note::new(EventKind::Joined, Reason::None, floor));
            }
            Author::Owner { slot, journal } => {
                own.into_iter().for_each(|(_, note)| journal.add(note, self.now_ms));
                for happened in journal.take(self.now_ms, false) {
                    self.push(self.view.by_slot(slot), happened);
                }
            }
            Author::Leaving { entry, journal } => {
                for happened in journal.take(self.now_ms, true) {
                    self.push(Some(entry), happened);
                }
                self.happened(Some(entry), Note::new(EventKind::Left, Reason::None, entry.reserved));
            }
        }
    }

    /// What a write changes of an entry that is not the author's.
    fn compare(&mut self, bytes: &[u8], at: usize, new: &format::Record, author: Option<u32>) {
        let Some((slot, old)) = entry_before(bytes, at) else { return };
        // An owner's every-day update: the same pool before and after.
        if author == Some(slot) && (format::same_owner(old, new) || format::is_free(new)) {
            return;
        }
        let Ok(Some(old)) = format::decode_slot(slot, old) else { return };
        let same = |new: &&LedgerEntry| (new.pid, new.started, &new.name) == (old.pid, old.started, &old.name);
        match self.view.by_slot(slot).filter(same) {
            Some(new) if new.state == EntryState::Live => self.terms(&old, new),
            left => self.remains(&old, left),
        }
    }

    /// A pool that lives has new orders.
    fn terms(&mut self, old: &LedgerEntry, new: &'a LedgerEntry) {
        let by_operator = |kind, bytes| Note::new(kind, Reason::Operator, bytes);
        if (old.limit, old.limit_revision) != (new.limit, new.limit_revision) {
            self.happened(Some(new), by_operator(EventKind::LimitSet, new.limit));
        }
        let share = |entry: &LedgerEntry| (entry.weight, entry.priority, entry.floor, entry.ceiling);
        if share(old) != share(new) {
            self.happened(Some(new), by_operator(EventKind::ShareSet, new.floor));
        }
        if old.trim_request != new.trim_request {
            let with_cached = new.trim_cached == new.trim_request;
            let cached = if with_cached { new.cached } else { Bytes::ZERO };
            self.happened(Some(new), by_operator(EventKind::TrimAsked, Bytes(new.idle.0.saturating_add(cached.0))));
        }
    }

    /// A pool is dead: found so now, or before.
    fn remains(&mut self, old: &LedgerEntry, left: Option<&'a LedgerEntry>) {
        let held = left.map_or(Bytes::ZERO, |left| left.reserved);
        if old.state == EntryState::Live {
            self.happened(Some(left.unwrap_or(old)), Note::new(EventKind::Died, Reason::None, old.reserved));
        }
        let back = old.reserved.saturating_sub(held);
        if back > Bytes::ZERO {
            let gone = LedgerEntry { reserved: held, ..old.clone() };
            self.happened(Some(left.unwrap_or(&gone)), Note::new(EventKind::Returned, Reason::None, back));
        }
    }

    fn happened(&mut self, entry: Option<&LedgerEntry>, note: Note) {
        self.push(entry, Happened { note, count: 1, at_ms: self.now_ms });
    }

    fn push(&mut self, entry: Option<&LedgerEntry>, happened: Happened) {
        let Happened { note, count, at_ms } = happened;
        let pool = |entry: &LedgerEntry| PoolRef { name: entry.name.clone(), group: entry.group };
        let of_device = note.kind == EventKind::Budget;
        if entry.is_none() && !of_device {
            return;
        }
        let of_pool = entry.filter(|_| !of_device);
        // Also where a pool puts right what an older build wrote over it.
        let by_operator = of_device && note.reason == Reason::Operator;
        let operator = self.view.header.setting.author.filter(|_| by_operator).map(|author| author.pid);
        let share =
            of_pool.and_then(|entry| self.view.index_of(entry.slot)).map_or(Bytes::ZERO, |at| self.shares()[at]);
        self.events.push(Event {
            // Given by the log.
            sequence: 0,
            at_ms,
            wall_ms: wall_ms(at_ms),
            kind: note.kind,
            reason: note.reason,
            count,
            pool: of_pool.map(pool),
            pid: operator.or(entry.map(|entry| entry.pid)).unwrap_or_else(std::process::id),
            slot: entry.map_or(0, |entry| entry.slot),
            bytes: note.bytes,
            held: of_pool.map_or_else(|| self.view.reserved(), |entry| entry.reserved),
            demand: of_pool.map_or(Bytes::ZERO, |entry| entry.demand),
            share,
            budget: self.view.header.budget,
            limit: entry.map_or(UNLIMITED, |entry| entry.limit.min(entry.ceiling)),
            free: note.free,
            weight: entry.map_or(0, |entry| entry.weight),
            priority: entry.map_or(0, |entry| entry.priority),
            peer: note.peer.and_then(|slot| self.view.by_slot(slot)).map(pool),
        });
    }

    fn shares(&mut self) -> &[Bytes] {
        self.shares.get_or_insert_with(|| fair_shares(self.view.header.budget, &self.view.pool_claims()))
    }
}
