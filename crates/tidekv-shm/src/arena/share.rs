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

use super::error::HandleError;
use super::handle::Handle;
use super::local::LocalArena;
use super::word;

impl LocalArena {
    /// Lets other processes retain a block that this process allocated. Sharing a shared block changes nothing.
    pub fn share(&mut self, handle: Handle) -> Result<(), HandleError> {
        let grain = self.attachment.find(handle)?;
        let mut holds = self.attachment.holds.part(handle);
        let word = &self.attachment.tables.words()[grain];
        if !word::share(word, handle.generation(), self.member())? {
            holds.insert(handle.to_bits(), 1);
        }
        Ok(())
    }

    /// Holds a shared block (once more). The block lives until everybody has released it as often as retained; whoever
    /// shared it counts as holding it once.
    pub fn retain(&mut self, handle: Handle) -> Result<(), HandleError> {
        let grain = self.attachment.find(handle)?;
        let mut holds = self.attachment.holds.part(handle);
        let count = holds.entry(handle.to_bits()).or_insert(0);
        if *count == 0 {
            let word = &self.attachment.tables.words()[grain];
            if let Err(error) = word::retain(word, handle.generation(), self.member()) {
                holds.remove(&handle.to_bits());
                return Err(error);
            }
        }
        *count += 1;
        Ok(())
    }

    /// Gives one hold of a shared block back. The last of all frees it.
    pub fn release(&mut self, handle: Handle) -> Result<(), HandleError> {
        let grain = self.attachment.find(handle)?;
        self.release_at(handle, grain)
    }

    pub(super) fn release_at(&mut self, handle: Handle, grain: usize) -> Result<(), HandleError> {
        // Before the word changes: afterwards the span may be gone.
        let (head, now) = self.attachment.head_of(grain)?;
        let is_big = now.class() == super::class::BIG;
        {
            let mut holds = self.attachment.holds.part(handle);
            match holds.get_mut(&handle.to_bits()) {
                None => return Err(HandleError::NotHolder),
                Some(count) if *count > 1 => {
                    *count -= 1;
                    return Ok(());
                }
                Some(_) => {}
            }
            let word = &self.attachment.tables.words()[grain];
            let freed_by = if is_big { u32::from(self.id) } else { 0 };
            holds.remove(&handle.to_bits());
            if !word::release(word, handle.generation(), self.member(), freed_by)? {
                return Ok(());
            }
        }
        if is_big {
            self.give_back_big(head, now);
            return Ok(());
        }
        let bit = 1 << self.attachment.block_in_span(head, now, grain);
        word::announce(&self.attachment.tables.bitmaps()[head], bit);
        self.look_after(head);
        Ok(())
    }
}
