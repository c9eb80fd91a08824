//! The rows: the block table, and four words for each sequence.
//!
//! ```text
//!           seq  len  next_slot  shared      table [max_rows, stride]
//!   row 0 |  41    7         27       1  |  [ 3 | 6 |  -  |  -  ]..      blocks_for(len) ids are live, what follows
//!   row 1 |  17    8         56       0  |  [ 9 | 13|  -  |  -  ]..      them is stale. Slots are id * block_tokens
//!   row 2 |  -- behind the batch --      |                               + place in the block.
//! ```
//!
//! Sequences lie in rows 0..batch without holes: who leaves is replaced by the last row, so the table itself is what
//! attention reads and no step gathers. `next_slot` is one past the slot of the last token: unless a block is full, the
//! next token goes there, and a decode step reads no table at all. How many rows have a full block is counted by
//! [`Phases`], so the blocks that a decode step needs are known before it looks at a single row.

use std::collections::HashMap;

use crate::config::{BatchShape, ConfigError, allocate};
use crate::ids::SeqId;

/// A row without a change.
const CLEAN: u32 = u32::MAX;

/// The rows of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    shape: BatchShape,
    batch: u32,
    pub(crate) seq: Vec<SeqId>,
    pub(crate) len: Vec<i32>,
    pub(crate) next_slot: Vec<i64>,
    /// Blocks at the start of the row that others may read too.
    pub(crate) shared: Vec<u32>,
    pub(crate) table: Vec<i32>,
    index: HashMap<SeqId, u32>,
    pub(crate) phases: Phases,
    /// Tokens of all rows.
    pub(crate) total: u64,
    /// The longest row's tokens.
    pub(crate) longest: u32,
    /// For each row, the first block that anything but a step changed; `changed` lists those that are not [`CLEAN`].
    changed_from: Vec<u32>,
    changed: Vec<u32>,
    /// A row was added or left.
    batch_changed: bool,
}

impl Rows {
    pub(crate) fn new(shape: BatchShape) -> Result<Self, ConfigError> {
        let rows = shape.config().max_rows;
        let mut changed = allocate("the list of changed rows", rows, 0)?;
        changed.clear();
        let mut index = HashMap::new();
        // Twice the rows: below half its capacity a map cleans up in place instead of growing.
        index.try_reserve(2 * rows as usize).map_err(|_| ConfigError::OutOfMemory {
            what: "the index of sequences",
            bytes: u64::from(rows) * 2 * size_of::<(SeqId, u32)>() as u64,
        })?;
        Ok(Self {
            shape,
            batch: 0,
            seq: allocate("the rows", rows, SeqId(0))?,
            len: allocate("the rows", rows, 0)?,
            next_slot: allocate("the rows", rows, 0)?,
            shared: allocate("the rows", rows, 0)?,
            table: allocate("the block table", shape.table_cells(), 0)?,
            index,
            phases: Phases::new(shape.config().block_tokens)?,
            total: 0,
            longest: 0,
            changed_from: allocate("the rows", rows, CLEAN)?,
            changed,
            batch_changed: false,
        })
    }

    pub(crate) const fn batch(&self) -> u32 {
        self.batch
    }

    pub(crate) fn find(&self, seq: SeqId) -> Option<u32> {
        self.index.get(&seq).copied()
    }

    pub(crate) fn tokens(&self, row: u32) -> u32 {
        self.len[row as usize] as u32
    }

    /// The live ids of a row.
    pub(crate) fn ids(&self, row: u32) -> &[i32] {
        &self.cells(row)[..self.shape.blocks_for(self.tokens(row)) as usize]
    }

    /// All cells of a row, stale ones too.
    pub(crate) fn cells(&self, row: u32) -> &[i32] {
        let stride = self.shape.stride() as usize;
        &self.table[row as usize * stride..][..stride]
    }

    pub(crate) fn cells_mut(&mut self, row: u32) -> &mut [i32] {
        let stride = self.shape.stride() as usize;
        &mut self.table[row as usize * stride..][..stride]
    }

    /// A row for `seq`, which holds `tokens` tokens; the caller has put their blocks into the row behind the batch.
    pub(crate) fn add(&mut self, seq: SeqId, tokens: u32, shared: u32) -> u32 {
        let row = self.batch;
        self.batch += 1;
        self.seq[row as usize] = seq;
        self.shared[row as usize] = shared;
        self.index.insert(seq, row);
        self.len[row as usize] = tokens as i32;
        self.next_slot[row as usize] = self.slot_after(row, tokens);
        self.phases.add(tokens);
        self.total += u64::from(tokens);
        self.longest = self.longest.max(tokens);
        self.batch_changed = true;
        self.mark(row, 0);
        row
    }

    /// Forgets a row; the last one takes its place.
    pub(crate) fn remove(&mut self, row: u32) {
        let tokens = self.tokens(row);
        self.index.remove(&self.seq[row as usize]);
        self.phases.remove(tokens);
        self.total -= u64::from(tokens);
        self.batch -= 1;
        self.batch_changed = true;
        let last = self.batch;
        if row != last {
            let (from, to, stride) = (last as usize, row as usize, self.shape.stride() as usize);
            let live = self.ids(last).len();
            self.table.copy_within(from * stride..from * stride + live, to * stride);
            self.seq[to] = self.seq[from];
            self.len[to] = self.len[from];
            self.next_slot[to] = self.next_slot[from];
            self.shared[to] = self.shared[from];
            self.index.insert(self.seq[to], row);
            self.mark(row, 0);
        }
        self.forget_longest(tokens);
    }

    /// Exchanges two rows.
    pub(crate) fn swap(&mut self, a: u32, b: u32) {
        if a == b {
            return;
        }
        let (low, high) = (a.min(b), a.max(b));
        let live = self.ids(low).len().max(self.ids(high).len());
        let (front, back) = self.table.split_at_mut(high as usize * self.shape.stride() as usize);
        front[low as usize * self.shape.stride() as usize..][..live].swap_with_slice(&mut back[..live]);
        let (low_at, high_at) = (low as usize, high as usize);
        self.seq.swap(low_at, high_at);
        self.len.swap(low_at, high_at);
        self.next_slot.swap(low_at, high_at);
        self.shared.swap(low_at, high_at);
        for row in [low, high] {
            self.index.insert(self.seq[row as usize], row);
            self.mark(row, 0);
        }
    }

    /// Cuts a row to `tokens` tokens, not more than it holds.
    pub(crate) fn cut(&mut self, row: u32, tokens: u32) {
        let held = self.tokens(row);
        self.phases.remove(held);
        self.phases.add(tokens);
        self.total -= u64::from(held - tokens);
        self.len[row as usize] = tokens as i32;
        self.next_slot[row as usize] = self.slot_after(row, tokens);
        self.mark(row, self.shape.blocks_for(tokens));
        self.forget_longest(held);
    }

    /// One past the slot of the last of `tokens` tokens.
    pub(crate) fn slot_after(&self, row: u32, tokens: u32) -> i64 {
        let Some(last) = tokens.checked_sub(1) else { return 0 };
        let shift = self.shape.block_shift();
        let id = self.cells(row)[(last >> shift) as usize];
        (i64::from(id) << shift) + i64::from(last & (self.shape.config().block_tokens - 1)) + 1
    }

    /// A row of `tokens` tokens became shorter or left.
    fn forget_longest(&mut self, tokens: u32) {
        if tokens == self.longest {
            self.longest = self.len[..self.batch as usize].iter().copied().max().unwrap_or(0) as u32;
        }
    }

    fn mark(&mut self, row: u32, from_block: u32) {
        let before = &mut self.changed_from[row as usize];
        if *before == CLEAN {
            self.changed.push(row);
        }
        *before = from_block.min(*before);
    }

    /// Everything counts as changed.
    pub(crate) fn mark_all(&mut self) {
        self.batch_changed = true;
        (0..self.batch).for_each(|row| self.mark(row, 0));
    }

    pub(crate) const fn has_changes(&self) -> bool {
        self.batch_changed || !self.changed.is_empty()
    }

    /// Calls `each(self, row, first changed block)` for the changed rows of the batch, and forgets them.
    pub(crate) fn take_changes(&mut self, mut each: impl FnMut(&Self, u32, u32)) {
        self.batch_changed = false;
        while let Some(row) = self.changed.pop() {
            let from = std::mem::replace(&mut self.changed_from[row as usize], CLEAN);
            if row < self.batch {
                each(self, row, from);
            }
        }
    }

    pub(crate) fn check_invariants(&self) {
        let rows = 0..self.batch;
        assert_eq!(self.index.len(), self.batch as usize);
        let mut phases = Phases { counts: vec![0; self.phases.counts.len()], ..self.phases };
        for row in rows.clone() {
            assert_eq!(self.find(self.seq[row as usize]), Some(row));
            assert_eq!(self.next_slot[row as usize], self.slot_after(row, self.tokens(row)));
            assert!(self.shared[row as usize] * self.shape.config().block_tokens <= self.tokens(row));
            phases.add(self.tokens(row));
        }
        assert_eq!(phases, self.phases);
        assert_eq!(self.total, rows.clone().map(|row| u64::from(self.tokens(row))).sum::<u64>());
        assert_eq!(self.longest, rows.map(|row| self.tokens(row)).max().unwrap_or(0));
        let marked = self.changed_from.iter().filter(|&&from| from != CLEAN).count();
        assert_eq!(marked, self.changed.len());
    }
}

/// How many rows have each length modulo the block size, so that it is known how many fill their last block.
/// A decode step lengthens every row by one, which turns the whole wheel and touches no count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Phases {
    counts: Vec<u32>,
    turns: u32,
}

impl Phases {
    fn new(block_tokens: u32) -> Result<Self, ConfigError> {
        Ok(Self { counts: allocate("the phases", block_tokens, 0)?, turns: 0 })
    }

    /// Rows whose next token needs a new block.
    pub(crate) fn full(&self) -> u32 {
        self.counts[self.place(0)]
    }

    pub(crate) fn add(&mut self, tokens: u32) {
        let place = self.place(tokens);
        self.counts[place] += 1;
    }

    pub(crate) fn remove(&mut self, tokens: u32) {
        let place = self.place(tokens);
        self.counts[place] -= 1;
    }

    /// Every row has one token more.
    pub(crate) const fn turn(&mut self) {
        self.turns = self.turns.wrapping_add(1);
    }

    const fn place(&self, tokens: u32) -> usize {
        tokens.wrapping_sub(self.turns) as usize & (self.counts.len() - 1)
    }
}
