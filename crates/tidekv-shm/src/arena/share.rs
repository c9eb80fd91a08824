//! Blocks that several processes hold.
//!
//! ```text
//!   producer                          consumer
//!   h = local.alloc(n)                                            LIVE {producer}
//!   local.share(h)                                                SHARED {producer}
//!   ... sends h.to_bits() ...
//!                                     local.retain(h)             SHARED {producer, consumer}
//!   local.release(h)                  reads the bytes             SHARED {consumer}
//!                                     local.release(h)            FREED, then FREE
//! ```
//!
//! Until `share` a block costs no read-modify-write. From then on its word has a bit for each process that holds it; how
//! often a process holds it, it counts for itself. A process that dies takes its bit with it, however often it had
//! counted. Retaining and releasing can race at will: either the consumer comes first and keeps the block, or it finds the
//! handle stale.

use super::attachment::Attachment;
use super::class::BIG;
use super::error::HandleError;
use super::handle::Handle;
use super::local::LocalArena;
use super::slot::{self, FOR_MEMBER, NOBODY, Slot};
use super::word;

impl Attachment {
    /// Makes a block of this process shared; says whether it was already.
    pub(super) fn share(&self, handle: Handle) -> Result<bool, HandleError> {
        let grain = self.find(handle)?;
        let mut holds = self.holds.part(handle);
        let was_shared = word::share(&self.tables.words()[grain], handle.generation(), self.member)?;
        if !was_shared {
            holds.insert(handle.to_bits(), 1);
        }
        Ok(was_shared)
    }

    pub(super) fn retain(&self, handle: Handle) -> Result<(), HandleError> {
        let grain = self.find(handle)?;
        let mut holds = self.holds.part(handle);
        let count = holds.entry(handle.to_bits()).or_insert(0);
        if *count == 0 {
            let word = &self.tables.words()[grain];
            if let Err(error) = word::retain(word, handle.generation(), self.member) {
                holds.remove(&handle.to_bits());
                return Err(error);
            }
        }
        *count += 1;
        Ok(())
    }

    /// Releases for a thread that has no cache. What is done to a run is done in the member's name, so that whoever
    /// recovers it can finish.
    pub(super) fn release(&self, handle: Handle) -> Result<(), HandleError> {
        let grain = self.find(handle)?;
        // Members are below 32.
        let deputy = FOR_MEMBER | self.member as u16;
        let Some((head, now, block)) = self.give_up(handle, grain, deputy)? else { return Ok(()) };
        if now.class() == BIG {
            self.give_back_big(head, now, deputy);
            return Ok(());
        }
        word::announce(&self.tables.bitmaps()[head], 1 << block);
        // Whoever needs such blocks next looks for spans that nobody owns.
        if slot::load(&self.tables.slots()[head]).owner() == NOBODY {
            self.tables.add_orphan();
        }
        Ok(())
    }

    /// Gives one hold back. If it was the last of all, the block is FREED, for `freed_by` if it is a run, and lies in the
    /// span or run that is answered.
    fn give_up(&self, handle: Handle, grain: usize, freed_by: u16) -> Result<Option<(usize, Slot, u32)>, HandleError> {
        // Before the word changes: afterwards the span may be gone.
        let place = self.place_of(grain)?;
        let freed_by = if place.1.class() == BIG { u32::from(freed_by) } else { 0 };
        let mut holds = self.holds.part(handle);
        match holds.get_mut(&handle.to_bits()) {
            None => return Err(HandleError::NotHolder),
            Some(count) if *count > 1 => {
                *count -= 1;
                return Ok(None);
            }
            Some(_) => {}
        }
        holds.remove(&handle.to_bits());
        let last = word::release(&self.tables.words()[grain], handle.generation(), self.member, freed_by)?;
        Ok(last.then_some(place))
    }
}

impl LocalArena {
    /// Lets other processes retain a block that this process allocated. Sharing a shared block changes nothing.
    pub fn share(&mut self, handle: Handle) -> Result<(), HandleError> {
        self.attachment.share(handle).map(drop)
    }

    /// Holds a shared block (once more). The block lives until everybody has released it as often as retained; whoever
    /// shared it counts as holding it once.
    pub fn retain(&mut self, handle: Handle) -> Result<(), HandleError> {
        self.attachment.retain(handle)
    }

    /// Gives one hold of a shared block back. The last of all frees it.
    pub fn release(&mut self, handle: Handle) -> Result<(), HandleError> {
        let grain = self.attachment.find(handle)?;
        self.release_at(handle, grain)
    }

    pub(super) fn release_at(&mut self, handle: Handle, grain: usize) -> Result<(), HandleError> {
        let Some((head, now, block)) = self.attachment.give_up(handle, grain, self.id)? else { return Ok(()) };
        if now.class() == BIG {
            self.give_back_big(head, now);
            return Ok(());
        }
        word::announce(&self.attachment.tables.bitmaps()[head], 1 << block);
        self.look_after(head);
        Ok(())
    }
}
