//! Sequences come, share, are cut, change places and leave.
//!
//! ```text
//!   admit(seq 5, 40 tokens, shared [a, b])   row: [ a | b | popped | popped ]      block_tokens 10: a and b are full
//!                                                  shared  `-- the row's own --'
//!   release    own -> ring, behind what is there        remove, preempt    own -> caller
//!              shared: one sharer fewer; who has none left -> caller, in both
//! ```

use tidekv_core::units::KernelId;

use super::BlockTables;
use crate::error::BatchError;
use crate::ids::SeqId;

/// What a sequence left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Left {
    /// Tokens that it held.
    pub tokens: u32,
    /// Tokens of those that nobody in the batch holds any more: what must be computed again if it comes back. Less, if
    /// the caller keeps the blocks it was handed in a cache of prefixes.
    pub lost_tokens: u32,
    /// Ids handed to the caller that had been shared; they come before the row's own.
    pub unshared: u32,
}

/// Where a leaving row's own ids go.
enum Goal {
    Ring,
    Caller,
}

impl BlockTables {
    /// A row for `seq`, which holds `tokens` tokens already (0 if its prompt is still to be computed).
    ///
    /// Its first blocks are `shared`: full blocks that others read as well or that a cache of prefixes kept. The rest is
    /// popped. Returns the row.
    pub fn admit(&mut self, seq: SeqId, tokens: u32, shared: &[KernelId]) -> Result<u32, BatchError> {
        let config = *self.shape.config();
        if self.rows.find(seq).is_some() {
            return Err(BatchError::DuplicateSequence { seq });
        }
        if self.batch() == config.max_rows {
            return Err(BatchError::BatchFull { seq, max_rows: config.max_rows });
        }
        if tokens > config.max_row_tokens {
            let max_row_tokens = config.max_row_tokens;
            return Err(BatchError::SequenceTooLong { seq, tokens: u64::from(tokens), max_row_tokens });
        }
        self.check_total(u64::from(tokens))?;
        let prefix = self.check_prefix(seq, tokens, shared)?;
        let blocks = self.shape.blocks_for(tokens);
        let own = blocks - prefix;
        if own > self.ring.free() {
            return Err(BatchError::Shortage { needed: own, free: self.ring.free() });
        }

        for &KernelId(id) in shared {
            if *self.sharers.entry(id).and_modify(|rows| *rows += 1).or_insert(1) == 1 {
                self.here.insert(id..id + 1);
            }
        }
        let row = self.batch();
        let (front, back) = self.rows.cells_mut(row)[..blocks as usize].split_at_mut(shared.len());
        front.iter_mut().zip(shared).for_each(|(cell, id)| *cell = id.0 as i32);
        self.ring.pop_into(back);
        self.last = None;
        Ok(self.rows.add(seq, tokens, prefix))
    }

    /// `seq` is done: its own blocks go to the tail of the ring, shared ones that nobody else has to `out`.
    pub fn release(&mut self, seq: SeqId, out: &mut Vec<KernelId>) -> Result<Left, BatchError> {
        let row = self.find(seq)?;
        Ok(self.leave(row, &Goal::Ring, out))
    }

    /// `seq` is done and its memory is wanted elsewhere: its own blocks go to `out` too, behind the shared ones.
    pub fn remove(&mut self, seq: SeqId, out: &mut Vec<KernelId>) -> Result<Left, BatchError> {
        let row = self.find(seq)?;
        Ok(self.leave(row, &Goal::Caller, out))
    }

    /// `seq` must make room and will come back. Returns how many tokens must then be computed again; the blocks that
    /// it frees are in `out`.
    pub fn preempt(&mut self, seq: SeqId, out: &mut Vec<KernelId>) -> Result<u32, BatchError> {
        self.remove(seq, out).map(|left| left.lost_tokens)
    }

    /// Exchanges the rows of two sequences.
    pub fn swap(&mut self, a: SeqId, b: SeqId) -> Result<(), BatchError> {
        let (a, b) = (self.find(a)?, self.find(b)?);
        self.rows.swap(a, b);
        self.last = None;
        Ok(())
    }

    /// Cuts `seq` to `tokens` tokens, as when guessed tokens were refused. Blocks that become empty go to the ring.
    pub fn truncate(&mut self, seq: SeqId, tokens: u32) -> Result<(), BatchError> {
        let row = self.find(seq)?;
        let held = self.rows.tokens(row);
        let shared = self.rows.shared[row as usize] * self.shape.config().block_tokens;
        if tokens > held || tokens < shared {
            return Err(BatchError::BadCut { seq, tokens, held, shared });
        }
        let empty = &self.rows.ids(row)[self.shape.blocks_for(tokens) as usize..];
        self.ring.push(empty.iter().copied());
        self.rows.cut(row, tokens);
        self.last = None;
        Ok(())
    }

    /// The first `blocks` blocks of `seq`, all full, may be read by others from now on: their ids go to `out`, for
    /// [`admit`](Self::admit) to be told. They never return to the ring.
    pub fn share(&mut self, seq: SeqId, blocks: u32, out: &mut Vec<KernelId>) -> Result<(), BatchError> {
        let row = self.find(seq)?;
        let (tokens, block_tokens) = (self.rows.tokens(row), self.shape.config().block_tokens);
        if u64::from(blocks) * u64::from(block_tokens) > u64::from(tokens) {
            return Err(BatchError::SharedTooLong { seq, blocks: blocks as usize, tokens, block_tokens });
        }
        let before = &mut self.rows.shared[row as usize];
        let newly = (*before).min(blocks) as usize..blocks as usize;
        *before = blocks.max(*before);
        let ids = &self.rows.ids(row)[..blocks as usize];
        self.sharers.extend(ids[newly].iter().map(|&id| (id as u32, 1)));
        out.extend(ids.iter().map(|&id| KernelId(id as u32)));
        Ok(())
    }

    pub(super) fn find(&self, seq: SeqId) -> Result<u32, BatchError> {
        self.rows.find(seq).ok_or(BatchError::UnknownSequence { seq })
    }

    /// Refuses a batch whose prefix sums would not fit.
    pub(crate) fn check_total(&self, more: u64) -> Result<(), BatchError> {
        let tokens = self.rows.total + more;
        if tokens > i32::MAX as u64 { Err(BatchError::TotalTooLong { tokens }) } else { Ok(()) }
    }

    /// How many blocks the prefix has. Refuses one that is longer than the sequence, has an id twice, or has ids that
    /// are not to be shared.
    fn check_prefix(&mut self, seq: SeqId, tokens: u32, shared: &[KernelId]) -> Result<u32, BatchError> {
        let block_tokens = self.shape.config().block_tokens;
        let blocks = match u32::try_from(shared.len()) {
            Ok(blocks) if blocks <= tokens / block_tokens => blocks,
            _ => return Err(BatchError::SharedTooLong { seq, blocks: shared.len(), tokens, block_tokens }),
        };
        if let Some(&id) = shared.iter().find(|id| !self.sharers.contains_key(&id.0) && self.here.contains(id.0)) {
            return Err(BatchError::NotShared { seq, id });
        }
        self.scratch.extend(shared.iter().map(|id| id.0));
        self.scratch.sort_unstable();
        let twice = self.scratch.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0]);
        let bad = twice.or(self.scratch.last().copied().filter(|&id| id > i32::MAX as u32));
        self.scratch.clear();
        bad.map_or(Ok(blocks), |id| Err(BatchError::BadPrefix { seq, id: KernelId(id) }))
    }

    fn leave(&mut self, row: u32, goal: &Goal, out: &mut Vec<KernelId>) -> Left {
        let tokens = self.rows.tokens(row);
        let prefix = self.rows.shared[row as usize];
        let (shared, own) = self.rows.ids(row).split_at(prefix as usize);
        let mut unshared = 0;
        for &id in shared {
            let id = id as u32;
            let rows = self.sharers.get_mut(&id).expect("every block of a row's shared start is counted");
            *rows -= 1;
            if *rows == 0 {
                self.sharers.remove(&id);
                self.here.remove(id..id + 1);
                out.push(KernelId(id));
                unshared += 1;
            }
        }
        match goal {
            Goal::Ring => self.ring.push(own.iter().copied()),
            Goal::Caller => {
                for &id in own {
                    let id = id as u32;
                    self.here.remove(id..id + 1);
                    out.push(KernelId(id));
                }
            }
        }
        let kept = (prefix - unshared) * self.shape.config().block_tokens;
        self.rows.remove(row);
        self.last = None;
        Left { tokens, lost_tokens: tokens - kept, unshared }
    }
}
