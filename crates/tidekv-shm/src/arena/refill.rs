//! Where a cache's spans come from and go to: the slow half of [`LocalArena`].
//!
//! ```text
//!   a class has no free block:
//!     1  what others freed in our own spans       (a look at a few bitmaps)
//!     2  a span that somebody left                (only if any was left since we last looked)
//!     3  a run of free slots
//!     4  all of our own spans
//!     5  our own empty spans of other classes, what the dead left behind
//!     6  another segment
//! ```
//!
//! A cache keeps at most one empty span of each class besides the current one, so memory moves between classes.
//! Nothing here waits for another process, except 6 for the lock under which segments are added, with a deadline.

use std::sync::atomic::Ordering;

use tidekv_core::units::Bytes;

use super::class::{BIG, CLASSES, SLOT_GRAINS};
use super::error::{AllocError, HandleError};
use super::handle::Handle;
use super::local::LocalArena;
use super::slot::{self, NOBODY, Slot, SlotState};
use super::span::{List, Span};
use super::word::{self, Atomic, State};

/// How many bitmaps of our own spans are looked at before a new span is taken.
const LOOKS: usize = 16;
/// Empty spans that a class keeps besides its current one.
const EMPTIES_KEPT: u32 = 1;
/// How often a segment is added for one allocation: others may use it up first.
const GROWTHS: u32 = 16;

impl LocalArena {
    /// Makes at least one block of a class ready.
    pub(super) fn refill(&mut self, class: usize, wanted: Bytes) -> Result<(), AllocError> {
        let index = match self.look_at_own(class, LOOKS) {
            Some(index) => index,
            None => self.find_room(wanted, |cache| {
                let found = cache.adopt_any(class).or_else(|| cache.claim_span(class));
                found.or_else(|| cache.look_at_own(class, usize::MAX))
            })?,
        };
        self.make_ready(class, index);
        Ok(())
    }

    fn span(&self, index: usize) -> &Span {
        self.spans[index].as_ref().expect("listed, so it is there")
    }

    fn span_mut(&mut self, index: usize) -> &mut Span {
        self.spans[index].as_mut().expect("listed, so it is there")
    }

    /// Takes free blocks of a span into the ready list, the first of them on top.
    fn make_ready(&mut self, class: usize, index: usize) {
        self.unlist(index);
        let mut span = *self.span(index);
        let bin = &mut self.bins[class];
        let words = self.attachment.tables.words();
        while bin.ready.len() < bin.ready_max && span.bits != 0 {
            let block = 63 - span.bits.leading_zeros();
            span.bits &= !(1 << block);
            let grain = span.grain_of(block);
            let generation = word::load(&words[grain]).allotted(0).generation();
            bin.ready.push(Handle::with_generation(span.handle + (grain - span.first) as u64, generation));
        }
        *self.span_mut(index) = span;
        self.list(index);
    }

    /// Moves the older half of a class's ready list back to the spans.
    #[cold]
    #[inline(never)]
    pub(super) fn make_room_for_ready(&mut self, class: usize) {
        let count = self.bins[class].ready.len().div_ceil(2);
        self.put_back(class, count);
    }

    /// Moves blocks from the bottom of the ready list back to their spans.
    fn put_back(&mut self, class: usize, count: usize) {
        let handles: Vec<Handle> = self.bins[class].ready.drain(..count).collect();
        for handle in handles {
            let grain = self.attachment.grain_of(handle);
            let slot = slot::load(&self.attachment.tables.slots()[grain / SLOT_GRAINS as usize]);
            let index = slot.index();
            // Our own words say where our spans are; if somebody damaged them, the block is lost and nothing else.
            let ours = self.spans.get(index).and_then(Option::as_ref).is_some_and(|span| span.contains(grain));
            if !ours {
                continue;
            }
            self.unlist(index);
            let span = self.span_mut(index);
            span.bits |= 1 << span.block_at(grain);
            self.list(index);
            self.keep_or_give_back(index);
        }
    }

    /// Tries again after each thing that may make room.
    pub(super) fn find_room<T>(
        &mut self,
        wanted: Bytes,
        attempt: impl Fn(&mut Self) -> Option<T>,
    ) -> Result<T, AllocError> {
        let exhausted = |source| AllocError::Exhausted { wanted, source: Box::new(source) };
        if let Some(found) = attempt(self) {
            return Ok(found);
        }
        let mut room_made = self.attachment.recover().map_err(exhausted)?.members > 0;
        room_made |= self.adopt_all();
        room_made |= self.give_back_empties();
        if room_made {
            self.cursor = 0;
            if let Some(found) = attempt(self) {
                return Ok(found);
            }
        }
        let mut growths = 0;
        loop {
            let seen = self.attachment.mapped();
            let grown = self.attachment.grow(seen);
            if let Some(found) = attempt(self) {
                return Ok(found);
            }
            grown.map_err(exhausted)?;
            growths += 1;
            if growths == GROWTHS {
                let limit = self.attachment.head.geometry.limit();
                return Err(exhausted(super::error::ArenaError::AtLimit { limit }));
            }
        }
    }

    /// Looks for free blocks in the spans that we have, at no more than `looks` of those that were full.
    fn look_at_own(&mut self, class: usize, looks: usize) -> Option<usize> {
        if let Some(index) = self.bins[class].partial.last() {
            return Some(*index as usize);
        }
        for _ in 0..looks.min(self.bins[class].full.len()) {
            let bin = &mut self.bins[class];
            bin.look = if bin.look + 1 < bin.full.len() { bin.look + 1 } else { 0 };
            let index = bin.full[bin.look] as usize;
            if self.collect(index) {
                return Some(index);
            }
        }
        None
    }

    /// Takes what others freed in a span of ours, and lists it anew. Says whether it has free blocks.
    fn collect(&mut self, index: usize) -> bool {
        let span = *self.span(index);
        let bitmap = &self.attachment.tables.bitmaps()[span.head()];
        if bitmap.load(Ordering::Relaxed) == 0 {
            return span.bits != 0;
        }
        let words = self.attachment.tables.words();
        let word_of = |block: u32| (block < span.shape.blocks).then(|| &words[span.grain_of(block)]);
        let collected = word::collect(bitmap, word_of);
        self.unlist(index);
        self.span_mut(index).bits |= collected;
        self.list(index);
        self.span(index).bits != 0
    }

    /// Puts a span into the list where it belongs.
    fn list(&mut self, index: usize) {
        let span = self.spans[index].as_mut().expect("made before it is listed");
        let bin = &mut self.bins[usize::from(span.class)];
        let (kind, list) = if span.bits == 0 { (List::Full, &mut bin.full) } else { (List::Partial, &mut bin.partial) };
        (span.list, span.place) = (kind, list.len() as u32);
        list.push(index as u32);
        bin.empties += u32::from(span.is_empty());
    }

    /// Takes a span out of its list, if it is in one.
    fn unlist(&mut self, index: usize) {
        let span = *self.span(index);
        let bin = &mut self.bins[usize::from(span.class)];
        let list = match span.list {
            List::None => return,
            List::Partial => &mut bin.partial,
            List::Full => &mut bin.full,
        };
        list.swap_remove(span.place as usize);
        let moved = list.get(span.place as usize).copied();
        bin.empties -= u32::from(span.is_empty());
        if let Some(moved) = moved {
            self.span_mut(moved as usize).place = span.place;
        }
        self.span_mut(index).list = List::None;
    }

    /// Gives a listed span back if it is empty and its class has another that is.
    fn keep_or_give_back(&mut self, index: usize) {
        let span = *self.span(index);
        if span.is_empty() && self.bins[usize::from(span.class)].empties > EMPTIES_KEPT {
            self.give_back(index);
        }
    }

    /// Gives an empty span back to all.
    fn give_back(&mut self, index: usize) {
        self.unlist(index);
        let span = *self.span(index);
        let run = self.attachment.tables.own_run(span.head(), span.shape.slots as usize);
        slot::give_back(run, span.slot(self.id, index), self.id, || {});
        self.cursor = self.cursor.min(span.head());
        self.spans[index] = None;
        self.spare.push(index as u32);
    }

    /// Everything that is ready goes back to its span.
    fn put_all_back(&mut self) {
        for class in 0..CLASSES {
            self.put_back(class, self.bins[class].ready.len());
        }
    }

    fn give_back_empties(&mut self) -> bool {
        self.put_all_back();
        let is_empty = |span: &Option<Span>| span.as_ref().is_some_and(Span::is_empty);
        let empties: Vec<usize> = (0..self.spans.len()).filter(|index| is_empty(&self.spans[*index])).collect();
        for index in &empties {
            self.give_back(*index);
        }
        !empties.is_empty()
    }

    /// Gives everything back or leaves it to others.
    pub(super) fn leave(&mut self) {
        self.put_all_back();
        for index in 0..self.spans.len() {
            if self.spans[index].is_none() {
                continue;
            }
            self.collect(index);
            let span = *self.span(index);
            if span.is_empty() {
                self.give_back(index);
            } else {
                let run = self.attachment.tables.own_run(span.head(), span.shape.slots as usize);
                slot::abandon(run, span.slot(self.id, index));
                self.attachment.tables.add_orphan();
            }
        }
    }

    /// A free place for a span.
    fn record(&mut self) -> usize {
        match self.spare.pop() {
            Some(index) => index as usize,
            None => {
                self.spans.push(None);
                self.spans.len() - 1
            }
        }
    }

    fn claim_span(&mut self, class: usize) -> Option<usize> {
        let shape = self.attachment.tables.shapes[class];
        let head = self.claim(shape.slots as usize, 1)?;
        let index = self.record();
        let run = self.attachment.tables.own_run(head, shape.slots as usize);
        // Classes are below 28.
        let span = Span::new(&self.attachment.head.geometry, head, class as u8, shape, shape.all());
        slot::make_span(run, self.id, span.slot(self.id, index));
        self.spans[index] = Some(span);
        self.list(index);
        Some(index)
    }

    /// Claims a run of free slots inside one segment, whose first is a multiple of `align` there.
    pub(super) fn claim(&mut self, count: usize, align: usize) -> Option<usize> {
        let segments = self.attachment.map_existing().unwrap_or_else(|_| self.attachment.mapped());
        let end = (segments as usize) << self.attachment.head.geometry.slot_bits();
        let slots = &self.attachment.tables.slots()[..end];
        let skipped = slots.iter().skip(self.cursor).take_while(|slot| slot::load(*slot) != Slot::FREE).count();
        self.cursor += skipped;
        let per_segment = self.attachment.head.geometry.segment_slots() as usize;
        if let Some(head) = claim_from(slots, self.cursor, per_segment, count, align, self.id) {
            return Some(head);
        }
        // Others may have given back what lies below.
        if self.cursor == 0 {
            return None;
        }
        self.cursor = 0;
        claim_from(slots, 0, per_segment, count, align, self.id)
    }

    /// Takes over spans of a class that nobody owns until one has a free block.
    fn adopt_any(&mut self, class: usize) -> Option<usize> {
        let orphans = self.attachment.tables.orphans();
        if self.orphans_seen[class] == orphans {
            return None;
        }
        let end = (self.attachment.mapped() as usize) << self.attachment.head.geometry.slot_bits();
        for head in 0..end {
            let now = slot::load(&self.attachment.tables.slots()[head]);
            let left = now.state() == SlotState::Head && now.owner() == NOBODY && usize::from(now.class()) == class;
            if left
                && let Some(index) = self.adopt(head, now)
                && self.span(index).bits != 0
            {
                return Some(index);
            }
        }
        self.orphans_seen[class] = orphans;
        None
    }

    /// Takes over every span that nobody owns, so that the empty ones among them can be given back.
    fn adopt_all(&mut self) -> bool {
        let mut any = false;
        let end = (self.attachment.mapped() as usize) << self.attachment.head.geometry.slot_bits();
        for head in 0..end {
            let now = slot::load(&self.attachment.tables.slots()[head]);
            if now.state() == SlotState::Head && now.owner() == NOBODY && self.adopt(head, now).is_some() {
                any = true;
            }
        }
        any
    }

    /// Takes over a span that nobody owns, and lists it.
    fn adopt(&mut self, head: usize, now: Slot) -> Option<usize> {
        let shape = *self.attachment.tables.shapes.get(usize::from(now.class()))?;
        self.attachment.tables.run(head, now)?;
        let index = self.record();
        let run = self.attachment.tables.own_run(head, shape.slots as usize);
        if !slot::adopt(run, self.id, index as u32) {
            self.spare.push(index as u32);
            return None;
        }
        // What others announced is found in the words, so it need not be remembered.
        self.attachment.tables.bitmaps()[head].swap(0, Ordering::Acquire);
        let words = self.attachment.tables.words();
        let first = head * SLOT_GRAINS as usize;
        let mut bits = 0;
        for block in 0..shape.blocks {
            let word = &words[first + (block * shape.grains) as usize];
            let now = word::load(word);
            if now.state() == State::Freed {
                Atomic::store(word, now.free().0, Ordering::Release);
            }
            bits |= u64::from(matches!(now.state(), State::Free | State::Freed)) << block;
        }
        self.spans[index] = Some(Span::new(&self.attachment.head.geometry, head, now.class(), shape, bits));
        self.list(index);
        Some(index)
    }

    /// Frees a LIVE block of somebody else's span, or one that is a run of its own.
    #[inline(never)]
    pub(super) fn free_from_afar(&mut self, handle: Handle, grain: usize) -> Result<(), HandleError> {
        let (head, now, block) = self.attachment.place_of(grain)?;
        let word = &self.attachment.tables.words()[grain];
        if now.class() == BIG {
            word::make_freed(word, handle.generation(), u32::from(self.id))?;
            self.give_back_big(head, now);
            return Ok(());
        }
        word::free_from_afar(word, &self.attachment.tables.bitmaps()[head], 1 << block, handle.generation())?;
        self.look_after(head);
        Ok(())
    }

    /// A block of this span was freed from afar. If nobody owns the span, nobody would ever collect it: we do.
    pub(super) fn look_after(&mut self, head: usize) {
        let now = slot::load(&self.attachment.tables.slots()[head]);
        let left = now.state() == SlotState::Head && now.owner() == NOBODY && usize::from(now.class()) < CLASSES;
        if left && let Some(index) = self.adopt(head, now) {
            self.keep_or_give_back(index);
        }
    }
}

fn claim_from(
    slots: &[std::sync::atomic::AtomicU64],
    from: usize,
    per_segment: usize,
    count: usize,
    align: usize,
    owner: u16,
) -> Option<usize> {
    let mut at = from;
    loop {
        let (segment, inside) = (at / per_segment, (at % per_segment).next_multiple_of(align));
        if inside + count > per_segment {
            at = (segment + 1) * per_segment;
            if at >= slots.len() {
                return None;
            }
            continue;
        }
        at = segment * per_segment + inside;
        let run = slots.get(at..at + count)?;
        match run.iter().rposition(|slot| slot::load(slot) != Slot::FREE) {
            Some(busy) => at += busy + 1,
            None if slot::claim_run(run, owner) => return Some(at),
            None => at += 1,
        }
    }
}
