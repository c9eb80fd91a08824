//! What changed since the last look, for whoever keeps a replica: on a device, that is.
//!
//! ```text
//!   admit, release, remove, swap, truncate, lend, withdraw          marked: one word for each row, one for the ring
//!   a step (decode, prefill, mixed)                                 not marked: the replica does the same step itself
//!
//!   row 3:  [ 40 | 41 | 42 | 43 | 96 | 97 ]   ->   { dst, first 40, count 4 }, { dst + 4, first 96, count 2 }
//! ```
//!
//! A replica is brought up to date before each step: [`BlockTables::take_changes`](crate::BlockTables::take_changes)
//! gives the final contents of every changed cell, each cell at most once, so all of it can be written in any order and in
//! parallel. Blocks of a page are consecutive, so runs are few. Who keeps no replica never asks, and pays a store.

use crate::ring::LeaseRing;
use crate::rows::Rows;

/// Cells `dst..dst + count` hold `first`, `first + 1`, and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CellRun {
    /// The first cell: of the block table `row * stride + block`, of the ring `position % ring_cells`.
    pub dst: u32,
    /// The id in it.
    pub first: i32,
    /// How many cells; they do not go over the end of the ring.
    pub count: u32,
}

/// The words of a changed row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowWords {
    /// Which row.
    pub row: u32,
    /// Tokens that it holds.
    pub len: i32,
    /// One past the slot of its last token; 0 for an empty row.
    pub next_slot: i64,
}

/// What a replica must write. Reused: its vectors keep their memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Rows in the batch now.
    pub batch: u32,
    /// Position of the next id to pop.
    pub ring_head: u64,
    /// Position behind the last id.
    pub ring_tail: u64,
    /// The changed rows.
    pub rows: Vec<RowWords>,
    /// Changed cells of the block table.
    pub table: Vec<CellRun>,
    /// Changed cells of the ring.
    pub ring: Vec<CellRun>,
}

impl Changes {
    /// Takes the marks of `rows` and `ring`.
    pub(crate) fn take(&mut self, rows: &mut Rows, ring: &mut LeaseRing, stride: u32) {
        self.rows.clear();
        self.table.clear();
        self.ring.clear();
        (self.batch, self.ring_head, self.ring_tail) = (rows.batch(), ring.head(), ring.tail());
        rows.take_changes(|rows, row, from| {
            let at = row as usize;
            self.rows.push(RowWords { row, len: rows.len[at], next_slot: rows.next_slot[at] });
            let ids = rows.ids(row).get(from as usize..).unwrap_or_default();
            add_runs(&mut self.table, row * stride + from, ids);
        });
        let written = ring.take_written();
        for (cell, ids) in ring.cells(written) {
            add_runs(&mut self.ring, cell, ids);
        }
    }
}

/// Adds cells from `cell` on, which hold `ids`. A run never goes on from one call to the next: not from row to row, and not from the
/// ring's last cell to its first.
fn add_runs(runs: &mut Vec<CellRun>, mut cell: u32, mut ids: &[i32]) {
    while let Some(&first) = ids.first() {
        // Ids have 31 bits: what wraps is none.
        let follows = |pair: &&[i32]| pair[1] == pair[0].wrapping_add(1);
        let count = 1 + ids.windows(2).take_while(follows).count();
        let run = CellRun { dst: cell, first, count: u32::try_from(count).expect("cells are counted in 32 bits") };
        runs.push(run);
        cell += run.count;
        ids = &ids[count..];
    }
}
