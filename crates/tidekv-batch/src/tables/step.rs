//! Steps: rows become longer, and the arrays of the step are written.
//!
//! ```text
//!   check    may it be done? how many blocks?     decode: four comparisons; else one pass over the query lengths
//!   advance  pop, append, lengthen                one pass over the rows
//!   pack     the arrays of the step just done     array by array, from the rows as they are; repeatable
//! ```
//!
//! A decode step reads 12 bytes and writes 40 for each row whatever the length of its sequence, and pops for the rows whose last
//! block is full. Packing is a pass of its own also in `step`: the rows' words are still in the nearest cache, and loops over one
//! array each become vector instructions, which one loop that does everything does not.

use super::{BlockTables, LastStep};
use crate::error::BatchError;
use crate::metadata::{Metadata, Padding, StepSize, check_padding};

/// What a step adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work<'a> {
    /// One token to every row.
    Decode,
    /// So many tokens to each row, in the order of the rows; 0 is allowed. Prompts, chunks of them, and mixed batches.
    Rows(&'a [u32]),
}

/// What a step takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Update {
    /// Query tokens.
    pub tokens: u32,
    /// Blocks popped from the ring.
    pub new_blocks: u32,
    /// Blocks left in it.
    pub free_blocks: u32,
}

impl BlockTables {
    /// Checks a step without doing it: what it would take, or why it cannot be done. O(1) for [`Work::Decode`].
    ///
    /// For those who start a device on the step before they bring this mirror forward.
    pub fn plan(&self, work: Work<'_>) -> Result<Update, BatchError> {
        self.check(work).map(|(update, _)| update)
    }

    /// Gives every query token of the step its place. All or nothing.
    pub fn update_block_table(&mut self, work: Work<'_>) -> Result<Update, BatchError> {
        let (update, size) = self.check(work)?;
        self.advance(work, size);
        Ok(update)
    }

    /// Writes the arrays of the step that the table was last updated for.
    pub fn pack_flash_attn_metadata(&self, padding: Padding, out: &mut Metadata) -> Result<(), BatchError> {
        check_padding(&self.shape, padding)?;
        let last = self.last.ok_or(BatchError::NothingToPack)?;
        self.pack(last, padding, out);
        Ok(())
    }

    /// [`update_block_table`](Self::update_block_table) and
    /// [`pack_flash_attn_metadata`](Self::pack_flash_attn_metadata), all or nothing.
    pub fn step(&mut self, work: Work<'_>, padding: Padding, out: &mut Metadata) -> Result<Update, BatchError> {
        check_padding(&self.shape, padding)?;
        let (update, size) = self.check(work)?;
        let done = self.advance(work, size);
        self.pack(done, padding, out);
        Ok(update)
    }

    fn decode_size(&self) -> StepSize {
        let batch = self.batch();
        StepSize { batch, tokens: batch, max_query_len: batch.min(1), prefills: 0, prefill_tokens: 0 }
    }

    pub(crate) fn check(&self, work: Work<'_>) -> Result<(Update, StepSize), BatchError> {
        let (size, new_blocks) = match work {
            Work::Decode => (self.check_decode()?, self.rows.phases.full()),
            Work::Rows(query) => self.check_rows(query)?,
        };
        let free = self.ring.free();
        if new_blocks > free {
            return Err(BatchError::Shortage { needed: new_blocks, free });
        }
        Ok((Update { tokens: size.tokens, new_blocks, free_blocks: free - new_blocks }, size))
    }

    fn check_decode(&self) -> Result<StepSize, BatchError> {
        let max_row_tokens = self.shape.config().max_row_tokens;
        if self.rows.longest >= max_row_tokens && self.batch() > 0 {
            let longest = self.lens().iter().position(|&len| len as u32 >= max_row_tokens);
            let seq = self.sequences()[longest.expect("the longest row is one of the rows")];
            return Err(BatchError::SequenceTooLong { seq, tokens: u64::from(max_row_tokens) + 1, max_row_tokens });
        }
        // Every row fits a step: the configuration was refused otherwise.
        self.check_total(u64::from(self.batch()))?;
        Ok(self.decode_size())
    }

    fn check_rows(&self, query: &[u32]) -> Result<(StepSize, u32), BatchError> {
        let config = self.shape.config();
        if query.len() != self.batch() as usize {
            return Err(BatchError::WrongRowCount { given: query.len(), rows: self.batch() });
        }
        let (mut tokens, mut new_blocks) = (0u64, 0u64);
        let mut size = StepSize { batch: self.batch(), ..StepSize::default() };
        for ((&more, &len), &seq) in query.iter().zip(self.lens()).zip(&self.rows.seq) {
            let after = u64::from(len as u32) + u64::from(more);
            if after > u64::from(config.max_row_tokens) {
                let max_row_tokens = config.max_row_tokens;
                return Err(BatchError::SequenceTooLong { seq, tokens: after, max_row_tokens });
            }
            tokens += u64::from(more);
            new_blocks += u64::from(self.shape.blocks_for(len as u32 + more) - self.shape.blocks_for(len as u32));
            size.max_query_len = size.max_query_len.max(more);
            if more > 1 {
                size.prefills += 1;
                // Wraps only in a step that is refused below.
                size.prefill_tokens = size.prefill_tokens.wrapping_add(more);
            }
        }
        size.tokens = match u32::try_from(tokens) {
            Ok(fits) if fits <= config.max_step_tokens => fits,
            _ => return Err(BatchError::StepTooLarge { tokens, max_step_tokens: config.max_step_tokens }),
        };
        self.check_total(tokens)?;
        // Not more blocks than tokens.
        Ok((size, u32::try_from(new_blocks).unwrap_or(u32::MAX)))
    }

    /// Does a step that was checked.
    fn advance(&mut self, work: Work<'_>, size: StepSize) -> LastStep {
        let done = match work {
            Work::Decode => {
                self.advance_decode();
                LastStep::Decode
            }
            Work::Rows(query) => {
                self.advance_rows(query);
                self.query.clear();
                self.query.extend_from_slice(query);
                LastStep::Rows(size)
            }
        };
        self.rows.total += u64::from(size.tokens);
        self.last = Some(done);
        done
    }

    /// First the rows whose last block is full, found a group at a time without a branch for each; then every row's words, in
    /// loops that become vector instructions because nothing in them is checked: a batch that overflows was refused.
    fn advance_decode(&mut self) {
        let (batch, shift, stride) = (self.batch() as usize, self.shape.block_shift(), self.shape.stride() as usize);
        let in_block = (1i32 << shift) - 1;
        let rows = &mut self.rows;
        for (group, lens) in rows.len[..batch].chunks(GROUP).enumerate() {
            let mut full = full_rows(lens, in_block);
            while full != 0 {
                let at = full.trailing_zeros() as usize;
                full &= full - 1;
                let (row, id) = (group * GROUP + at, self.ring.pop());
                rows.table[row * stride + (lens[at] >> shift) as usize] = id;
                rows.next_slot[row] = i64::from(id) << shift;
            }
        }
        rows.len[..batch].iter_mut().for_each(|len| *len = len.wrapping_add(1));
        rows.next_slot[..batch].iter_mut().for_each(|next| *next = next.wrapping_add(1));
        if batch > 0 {
            rows.phases.turn();
            rows.longest += 1;
        }
    }

    fn advance_rows(&mut self, query: &[u32]) {
        for (row, &more) in (0..).zip(query).filter(|&(_, &more)| more > 0) {
            let context = self.rows.tokens(row);
            let after = context + more;
            let (held, needed) = (self.shape.blocks_for(context), self.shape.blocks_for(after));
            self.ring.pop_into(&mut self.rows.cells_mut(row)[held as usize..needed as usize]);
            self.rows.len[row as usize] = after as i32;
            self.rows.next_slot[row as usize] = self.rows.slot_after(row, after);
            self.rows.phases.remove(context);
            self.rows.phases.add(after);
            self.rows.longest = self.rows.longest.max(after);
        }
    }

    fn pack(&self, done: LastStep, padding: Padding, out: &mut Metadata) {
        let batch = self.batch() as usize;
        match done {
            LastStep::Decode => {
                let mut writer = out.begin(&self.decode_size(), self.rows.longest, padding);
                writer.decode(&self.rows.len[..batch], &self.rows.next_slot[..batch]);
                writer.finish();
            }
            LastStep::Rows(size) => {
                let mut writer = out.begin(&size, self.rows.longest, padding);
                for (row, &query) in (0..).zip(&self.query) {
                    let context = self.rows.tokens(row) - query;
                    writer.query(context, query, self.rows.cells(row), self.shape.block_shift());
                }
                writer.finish();
            }
        }
    }
}

/// Rows that are looked at together: the bits of a word.
const GROUP: usize = 64;

/// One bit for each of at most [`GROUP`] rows: whether its last block is full (or it has none).
#[inline]
fn full_rows(lens: &[i32], in_block: i32) -> u64 {
    let mut full = 0;
    for (byte, lens) in lens.chunks(8).enumerate() {
        let bits = lens.iter().enumerate().fold(0u8, |bits, (at, len)| bits | u8::from(len & in_block == 0) << at);
        full |= u64::from(bits) << (8 * byte);
    }
    full
}
