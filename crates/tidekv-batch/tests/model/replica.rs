//! A replica as a device keeps it: told of changes, it does the steps itself from its own cells.

use std::collections::BTreeSet;

use tidekv_batch::{BlockTables, CellRun, Changes};

pub(crate) struct Replica {
    stride: usize,
    block_tokens: u32,
    batch: usize,
    head: u64,
    table: Vec<i32>,
    ring: Vec<i32>,
    len: Vec<i32>,
    next_slot: Vec<i64>,
    changes: Changes,
}

impl Replica {
    pub(crate) fn new(tables: &BlockTables) -> Self {
        let shape = tables.shape();
        let rows = shape.config().max_rows as usize;
        Self {
            stride: shape.stride() as usize,
            block_tokens: shape.config().block_tokens,
            batch: 0,
            head: 0,
            table: vec![-7; shape.table_cells() as usize],
            ring: vec![-7; shape.ring_cells() as usize],
            len: vec![-7; rows],
            next_slot: vec![-7; rows],
            changes: Changes::default(),
        }
    }

    pub(crate) fn catch_up(&mut self, tables: &mut BlockTables) {
        let expected = tables.has_changes();
        tables.take_changes(&mut self.changes);
        let Changes { batch, ring_head, ring_tail, rows, table, ring } = &self.changes;
        let named = !(rows.is_empty() && table.is_empty() && ring.is_empty());
        assert!(expected || (!named && *batch as usize == self.batch && *ring_head == self.head));
        assert_eq!((*batch, *ring_head, *ring_tail), (tables.batch(), tables.ring_head(), tables.ring_tail()));
        write(&mut self.table, table);
        write(&mut self.ring, ring);
        let distinct: BTreeSet<u32> = rows.iter().map(|words| words.row).collect();
        assert_eq!(distinct.len(), rows.len(), "a row is named once");
        for words in rows {
            assert!(words.row < *batch);
            self.len[words.row as usize] = words.len;
            self.next_slot[words.row as usize] = words.next_slot;
        }
        (self.batch, self.head) = (*batch as usize, *ring_head);
        assert!(!tables.has_changes());
    }

    pub(crate) fn step(&mut self, queries: &[u32]) {
        for (row, &query) in queries.iter().enumerate() {
            for _ in 0..query {
                let position = self.len[row] as u32;
                if position.is_multiple_of(self.block_tokens) {
                    let id = self.ring[(self.head % self.ring.len() as u64) as usize];
                    self.head += 1;
                    self.table[row * self.stride + (position / self.block_tokens) as usize] = id;
                    self.next_slot[row] = i64::from(id) * i64::from(self.block_tokens);
                }
                self.len[row] += 1;
                self.next_slot[row] += 1;
            }
        }
    }

    pub(crate) fn assert_equals(&self, tables: &BlockTables) {
        assert_eq!(self.batch as u32, tables.batch());
        assert_eq!(self.head, tables.ring_head());
        assert_eq!(&self.len[..self.batch], tables.lens());
        assert_eq!(&self.next_slot[..self.batch], tables.next_slots());
        for (row, &seq) in tables.sequences().iter().enumerate() {
            let ids = tables.blocks_of(seq).unwrap();
            let cells = &self.table[row * self.stride..][..ids.len()];
            assert!(ids.map(|id| id.0 as i32).eq(cells.iter().copied()));
        }
        let cells =
            (self.head..tables.ring_tail()).map(|position| self.ring[(position % self.ring.len() as u64) as usize]);
        assert!(tables.free_ids().map(|id| id.0 as i32).eq(cells));
    }
}

/// Writes runs as a device does, in any order: so no cell may be named twice.
fn write(cells: &mut [i32], runs: &[CellRun]) {
    let mut written = BTreeSet::new();
    for run in runs.iter().rev() {
        for place in 0..run.count {
            assert!(written.insert(run.dst + place), "cell {} is named twice", run.dst + place);
            cells[(run.dst + place) as usize] = run.first + place as i32;
        }
    }
}
