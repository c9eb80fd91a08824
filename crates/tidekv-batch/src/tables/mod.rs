//! [`BlockTables`]: every operation on a batch. Each checks everything first and then cannot fail, so a refusal leaves
//! every bit as it was.
//!
//! An id is in one of these hands, and [`BlockTables::check_invariants`] counts them:
//!
//! | hand       | where                         | comes from                    | goes to                                |
//! |------------|-------------------------------|-------------------------------|----------------------------------------|
//! | free       | the ring                      | `lend`, `release`, `truncate` | a row; the caller (`withdraw`, `take_back`) |
//! | a row's    | one row, behind what it shares | the ring                      | the ring (`release`), the caller (`remove`) |
//! | shared     | the start of one or more rows | `share`, or `admit`'s caller  | the caller, when the last row left     |
//!
//! A shared block never enters the ring: whoever caches prefixes decides what becomes of it.
//!
//! `lease` moves ids between caller and ring, `sequences` between ring and rows, `step` makes rows longer.

mod lease;
mod sequences;
mod step;

use std::collections::HashMap;

use tidekv_core::units::KernelId;

use crate::changes::Changes;
use crate::config::{BatchConfig, BatchShape, ConfigError};
use crate::ids::{IdSet, SeqId};
use crate::metadata::{StepSize, TableView};
use crate::ring::LeaseRing;
use crate::rows::Rows;

pub use sequences::Left;
pub use step::{Update, Work};

/// The block tables of one batch: the CPU path, and the exact mirror of a device that runs the same steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockTables {
    shape: BatchShape,
    rows: Rows,
    ring: LeaseRing,
    /// Ids in any of the three hands.
    here: IdSet,
    /// Rows that begin with each shared block.
    sharers: HashMap<u32, u32>,
    /// The step that the table was last updated for, if no row moved since.
    last: Option<LastStep>,
    /// The query lengths of that step, unless it was a decode step.
    query: Vec<u32>,
    /// For sorting; empty between calls.
    scratch: Vec<u32>,
}

/// What [`BlockTables::pack_flash_attn_metadata`] describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LastStep {
    Decode,
    Rows(StepSize),
}

/// How many ids are in which hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// In the ring.
    pub free: u32,
    /// In one row.
    pub exclusive: u32,
    /// At the start of one row or several; each is counted once.
    pub shared: u32,
}

impl BlockTables {
    /// An empty batch without ids. All memory that steps need is allocated here.
    pub fn new(config: BatchConfig) -> Result<Self, ConfigError> {
        let shape = BatchShape::new(config)?;
        let mut query = crate::config::allocate("the query lengths", config.max_rows, 0)?;
        query.clear();
        Ok(Self {
            shape,
            rows: Rows::new(shape)?,
            ring: LeaseRing::new(&shape)?,
            here: IdSet::default(),
            sharers: HashMap::new(),
            last: None,
            query,
            scratch: Vec::new(),
        })
    }

    /// The sizes of all arrays.
    pub const fn shape(&self) -> &BatchShape {
        &self.shape
    }

    /// Sequences in the batch.
    pub const fn batch(&self) -> u32 {
        self.rows.batch()
    }

    /// Ids in the ring.
    pub const fn free_blocks(&self) -> u32 {
        self.ring.free()
    }

    /// Who holds how many ids.
    pub fn counts(&self) -> Counts {
        let (free, shared) = (self.ring.free(), self.shared_blocks());
        Counts { free, exclusive: self.here.len() - free - shared, shared }
    }

    /// The row of a sequence. It changes when another sequence leaves or is swapped.
    pub fn row_of(&self, seq: SeqId) -> Option<u32> {
        self.rows.find(seq)
    }

    /// The sequences, in the order of their rows.
    pub fn sequences(&self) -> &[SeqId] {
        &self.rows.seq[..self.batch() as usize]
    }

    /// Tokens that each row holds.
    pub fn lens(&self) -> &[i32] {
        &self.rows.len[..self.batch() as usize]
    }

    /// One past the slot of each row's last token, 0 for an empty row. The next token goes there unless the row's
    /// last block is full.
    pub fn next_slots(&self) -> &[i64] {
        &self.rows.next_slot[..self.batch() as usize]
    }

    /// The longest row's tokens.
    pub const fn longest_row(&self) -> u32 {
        self.rows.longest
    }

    /// The blocks of a sequence, in the order of its tokens.
    pub fn blocks_of(&self, seq: SeqId) -> Option<impl ExactSizeIterator<Item = KernelId>> {
        self.rows.find(seq).map(|row| self.rows.ids(row).iter().map(|&id| KernelId(id as u32)))
    }

    /// The free ids, next first.
    pub fn free_ids(&self) -> impl Iterator<Item = KernelId> {
        self.ring.iter().map(|id| KernelId(id as u32))
    }

    /// The block table as attention reads it.
    pub fn block_tables(&self) -> TableView<'_> {
        TableView {
            ids: &self.rows.table,
            stride: self.shape.stride(),
            rows: self.batch(),
            max_blocks: self.shape.blocks_for(self.rows.longest),
        }
    }

    /// Position of the next id that the ring gives away; its cell is `position % ring_cells`.
    pub const fn ring_head(&self) -> u64 {
        self.ring.head()
    }

    /// Position behind the ring's last id.
    pub const fn ring_tail(&self) -> u64 {
        self.ring.tail()
    }

    /// Whether [`take_changes`](Self::take_changes) would name anything.
    pub const fn has_changes(&self) -> bool {
        self.rows.has_changes() || self.ring.has_written()
    }

    /// What anything but a step changed since the last call, for a replica that does the steps itself.
    pub fn take_changes(&mut self, out: &mut Changes) {
        out.take(&mut self.rows, &mut self.ring, self.shape.stride());
    }

    /// Everything counts as changed: for a replica that starts from nothing.
    pub fn mark_everything_changed(&mut self) {
        self.rows.mark_all();
        self.ring.mark_all();
    }

    #[expect(clippy::cast_possible_truncation, reason = "ids have 31 bits, so there are not more of them")]
    fn shared_blocks(&self) -> u32 {
        self.sharers.len() as u32
    }

    /// Panics unless every id is in one hand and every sum is right. Slow: for tests.
    pub fn check_invariants(&self) {
        self.rows.check_invariants();
        let mut owners: HashMap<u32, u32> = self.ring.iter().map(|id| (id as u32, 0)).collect();
        assert_eq!(owners.len(), self.ring.free() as usize, "no id is in the ring twice");
        let mut sharers: HashMap<u32, u32> = HashMap::new();
        for row in 0..self.batch() {
            let (shared, own) = self.rows.ids(row).split_at(self.rows.shared[row as usize] as usize);
            shared.iter().for_each(|&id| *sharers.entry(id as u32).or_default() += 1);
            for &id in own {
                assert_eq!(owners.insert(id as u32, 1), None, "block {id} has two owners");
            }
        }
        assert_eq!(sharers, self.sharers);
        assert!(sharers.keys().all(|id| !owners.contains_key(id)), "a shared block is nobody's own");
        assert_eq!(owners.len() + sharers.len(), self.here.len() as usize);
        assert!(owners.keys().chain(sharers.keys()).all(|&id| self.here.contains(id)));
        assert!(owners.len() <= self.shape.config().max_ids as usize);
        assert!(self.scratch.is_empty());
    }
}
