//! Blocks above 1 MiB: a run of whole slots each, owned by nobody, held by whom its one word says.
//!
//! Whoever frees one makes its word FREED with his own number and then gives the run back; if he dies in between, the
//! number says on whose behalf recovery has to finish. No cache keeps such runs, so their memory is everybody's at once.

use tidekv_core::units::Bytes;

use super::attachment::Attachment;
use super::class::{BIG, SIZES, SLOT_GRAINS};
use super::error::{AllocError, HandleError};
use super::handle::Handle;
use super::local::LocalArena;
use super::recovery::give_back_run;
use super::slot::{self, Slot};
use super::word;

impl LocalArena {
    /// Allocates a run whose first slot is a multiple of `align` in its segment.
    pub(super) fn alloc_big(&mut self, bytes: usize, align: usize) -> Result<Handle, AllocError> {
        if self.attachment.is_foreign() {
            return Err(AllocError::Forked);
        }
        let geometry = self.attachment.head.geometry;
        let wanted = Bytes(bytes as u64);
        let slots = (bytes as u64).div_ceil(geometry.slot_bytes()).max(1);
        if slots > u64::from(geometry.segment_slots()) {
            return Err(AllocError::TooLarge { wanted, segment: geometry.segment_bytes() });
        }
        // At most the slots of a segment, 2^14.
        let slots = slots as usize;
        let head = self.find_room(wanted, |cache| cache.claim(slots, align))?;
        let first = head * SLOT_GRAINS as usize;
        // The word first: while the slots are only claimed nobody takes it for a block's.
        let generation = word::allot(&self.attachment.tables.words()[first], self.member());
        slot::make_span(self.attachment.tables.own_run(head, slots), self.id, Slot::big(slots as u16));
        let inside = (first & ((1 << geometry.grain_bits()) - 1)) as u64;
        Ok(Handle::with_generation(Handle::base((first >> geometry.grain_bits()) as u64, inside), generation))
    }

    /// The block's word is FREED in our name.
    pub(super) fn give_back_big(&mut self, head: usize, now: Slot) {
        self.attachment.give_back_big(head, now, self.id);
        self.cursor = self.cursor.min(head);
    }

    /// Gives the slots back that a smaller block does not need. Blocks of a class stay as they are.
    pub(super) fn shrink_big(&mut self, grain: usize, bytes: usize) {
        let Ok((head, now, _)) = self.attachment.place_of(grain) else { return };
        let needed = (bytes as u64).div_ceil(self.attachment.head.geometry.slot_bytes()).max(1) as usize;
        let has = usize::from(now.reach());
        if now.class() != BIG || needed >= has {
            return;
        }
        let run = self.attachment.tables.own_run(head, has);
        // From here on the tails are ours to answer for, once the head does not reach them any more.
        slot::write_tails(run, needed, self.id, now);
        slot::store(&run[0], Slot::big(needed as u16));
        for (at, tail) in run.iter().enumerate().skip(needed) {
            slot::free_tail(tail, at);
        }
        self.cursor = self.cursor.min(head + needed);
    }

    /// Adds the slots behind a run to it, if they are free.
    pub(super) fn extend_big(&mut self, grain: usize, bytes: usize) -> bool {
        let Ok((head, now, _)) = self.attachment.place_of(grain) else { return false };
        let geometry = self.attachment.head.geometry;
        let per_segment = geometry.segment_slots() as usize;
        let needed = (bytes as u64).div_ceil(geometry.slot_bytes());
        let left = per_segment - head % per_segment;
        if now.class() != BIG || needed > left as u64 {
            return false;
        }
        let (has, needed) = (usize::from(now.reach()), needed as usize);
        let run = self.attachment.tables.own_run(head, needed);
        if has >= needed {
            return true;
        }
        if !slot::claim_run(&run[has..], self.id) {
            return false;
        }
        slot::write_tails(run, has, self.id, now);
        slot::store(&run[0], Slot::big(needed as u16));
        true
    }
}

impl Attachment {
    /// The span or run that a held block lies in: its head, and which of its blocks it is.
    pub(super) fn place_of(&self, grain: usize) -> Result<(usize, Slot, u32), HandleError> {
        // Otherwise no block is held there, whatever its word said a moment ago.
        self.tables.block_at(grain).ok_or(HandleError::Stale)
    }

    /// A large block's word is FREED in the owner's name.
    pub(super) fn give_back_big(&self, head: usize, now: Slot, owner: u16) {
        if let Some(run) = self.tables.reached(head, now) {
            give_back_run(&self.tables, head, run, now, owner);
        }
    }

    /// The bytes of a held block, never beyond its segment.
    pub(super) fn block_bytes(&self, grain: usize) -> Result<usize, HandleError> {
        let (_, now, _) = self.place_of(grain)?;
        let geometry = self.head.geometry;
        let bytes = match SIZES.get(usize::from(now.class())) {
            Some(grains) => (*grains as usize) << geometry.grain_shift,
            None => usize::from(now.reach()) * geometry.slot_bytes() as usize,
        };
        let inside = grain & ((1 << geometry.grain_bits()) - 1);
        Ok(bytes.min((1 << geometry.segment_shift) - (inside << geometry.grain_shift)))
    }
}
