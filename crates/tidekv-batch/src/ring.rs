//! The free block ids, first in, first out.
//!
//! ```text
//!   position   ..   head                      tail     ..       Positions only grow; the cell of a position is
//!   cells    [ -- | id 7 | id 8 | id 9 | id 0 | -- | -- ]       position & (cells - 1).
//!                   ^ popped next                ^ pushed here
//! ```
//!
//! A queue and not a stack: the pool lends ids in its packing order, so that old pages fill up and others empty, and
//! a device that pops `cells[head + rank]` for its rank among the rows gets the same ids without asking. There are
//! at least as many cells as ids that can be lent, so a push never meets a full ring.

use std::ops::Range;

use crate::config::{BatchShape, ConfigError, allocate};

/// The ring. Its head moves by pops; its tail by pushes, and back when ids are taken out again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LeaseRing {
    cells: Vec<i32>,
    head: u64,
    tail: u64,
    /// The lowest position written since the last [`take_written`](Self::take_written).
    written_from: u64,
}

impl LeaseRing {
    pub(crate) fn new(shape: &BatchShape) -> Result<Self, ConfigError> {
        let cells = allocate("the lease ring", shape.ring_cells(), 0)?;
        Ok(Self { cells, head: 0, tail: 0, written_from: u64::MAX })
    }

    #[expect(clippy::cast_possible_truncation, reason = "at most as many as there are cells, which are counted in u32")]
    pub(crate) const fn free(&self) -> u32 {
        (self.tail - self.head) as u32
    }

    pub(crate) const fn head(&self) -> u64 {
        self.head
    }

    pub(crate) const fn tail(&self) -> u64 {
        self.tail
    }

    /// The next id. The caller has seen that there is one.
    pub(crate) fn pop(&mut self) -> i32 {
        debug_assert!(self.head < self.tail, "a step pops what it checked for");
        let id = self.cells[self.cell(self.head)];
        self.head += 1;
        id
    }

    /// The next ids, in order. The caller has seen that there are enough.
    pub(crate) fn pop_into(&mut self, out: &mut [i32]) {
        debug_assert!(out.len() as u64 <= self.tail - self.head, "a step pops what it checked for");
        let from = self.cell(self.head);
        let straight = out.len().min(self.cells.len() - from);
        let (before, after) = out.split_at_mut(straight);
        before.copy_from_slice(&self.cells[from..from + straight]);
        after.copy_from_slice(&self.cells[..after.len()]);
        self.head += out.len() as u64;
    }

    pub(crate) fn push(&mut self, ids: impl IntoIterator<Item = i32>) {
        self.written_from = self.written_from.min(self.tail);
        for id in ids {
            let cell = self.cell(self.tail);
            self.cells[cell] = id;
            self.tail += 1;
        }
        debug_assert!(self.tail - self.head <= self.cells.len() as u64, "there is a cell for every id that was lent");
    }

    /// The ids from `position` to the tail leave the ring; positions are handed out again.
    pub(crate) fn cut(&mut self, position: u64) {
        debug_assert!((self.head..=self.tail).contains(&position), "a cut lies inside the ring");
        self.tail = position;
    }

    /// Keeps the ids that `stays` wants, in order, from the first that goes on.
    pub(crate) fn retain(&mut self, mut stays: impl FnMut(i32) -> bool) {
        let Some(first) = (self.head..self.tail).find(|&position| !stays(self.at(position))) else { return };
        let mut to = first;
        for position in first + 1..self.tail {
            let id = self.at(position);
            if stays(id) {
                let cell = self.cell(to);
                self.cells[cell] = id;
                to += 1;
            }
        }
        self.tail = to;
        self.written_from = self.written_from.min(first);
    }

    pub(crate) fn at(&self, position: u64) -> i32 {
        self.cells[self.cell(position)]
    }

    /// Every id, from the head to the tail.
    pub(crate) fn iter(&self) -> impl Iterator<Item = i32> {
        (self.head..self.tail).map(|position| self.at(position))
    }

    /// Where something was written and not yet popped, since the last call.
    pub(crate) fn take_written(&mut self) -> Range<u64> {
        let from = std::mem::replace(&mut self.written_from, u64::MAX);
        from.clamp(self.head, self.tail)..self.tail
    }

    /// The cells of positions between head and tail, in at most two pieces: each with its first cell.
    #[expect(clippy::cast_possible_truncation, reason = "a ring has at most 2^30 cells")]
    pub(crate) fn cells(&self, positions: Range<u64>) -> [(u32, &[i32]); 2] {
        let (from, count) = (self.cell(positions.start), (positions.end - positions.start) as usize);
        let straight = count.min(self.cells.len() - from);
        [(from as u32, &self.cells[from..from + straight]), (0, &self.cells[..count - straight])]
    }

    /// Whether [`take_written`](Self::take_written) would name a position.
    pub(crate) const fn has_written(&self) -> bool {
        self.written_from < self.tail && self.head < self.tail
    }

    /// Everything counts as written.
    pub(crate) const fn mark_all(&mut self) {
        self.written_from = 0;
    }

    /// The cell of a position.
    #[expect(clippy::cast_possible_truncation, reason = "masked to a cell")]
    pub(crate) const fn cell(&self, position: u64) -> usize {
        (position & (self.cells.len() as u64 - 1)) as usize
    }
}
