//! A step: planned on the host, launched, then mirrored while the device works.
//!
//! ```text
//!   plan      enough ids, room in every row, arrays large enough?     no: an error, and nothing happened
//!   flush     changes since the last step -> pinned slots -> apply     usually nothing to do
//!   launch    decode, or mixed
//!   advance   the mirror does the same step; it was planned, so it cannot fail
//! ```

use super::gpu::Stream;
use super::kernels::{Decode, Kernels, Words};
use super::replica::{RowState, RowWork, Run};
use super::staging::Slot;
use super::{CudaBatch, CudaBatchError, LastStep};
use crate::metadata::{StepSize, check_padding};
use crate::{BatchError, CellRun, Padding, RowWords, Update, Work};

/// Longer runs are cut: each is written by one warp.
const MAX_RUN: u32 = 1024;
/// Blocks of threads that each read the rows' work do so over the bus up to this many bytes; beyond, it is copied once.
const DIRECT_BYTES: usize = 64 << 10;

impl CudaBatch {
    /// Gives every query token of the step its place and writes the step's arrays. All or nothing; returns when the work is on
    /// the stream.
    ///
    /// # Errors
    /// What [`BlockTables::step`](crate::BlockTables::step) refuses, before anything was launched; what the driver says.
    pub fn step(&mut self, work: Work<'_>, padding: Padding) -> Result<Update, CudaBatchError> {
        check_padding(self.tables.shape(), padding)?;
        let (update, size) = self.tables.check(work)?;
        let _entered = self.gpu.enter()?;
        self.flush()?;
        match work {
            Work::Decode => self.launch_decode(Decode::Step, padding)?,
            Work::Rows(query) => self.launch_mixed(query, padding, size.tokens.max(padding.tokens))?,
        }
        self.advance(work, size, padding)?;
        Ok(update)
    }

    /// The first half of a decode step: every row gets its token; no arrays are written.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn update_decode(&mut self) -> Result<Update, CudaBatchError> {
        let (update, size) = self.tables.check(Work::Decode)?;
        let _entered = self.gpu.enter()?;
        self.flush()?;
        self.launch_decode(Decode::Update, Padding::NONE)?;
        self.advance(Work::Decode, size, Padding::NONE)?;
        Ok(update)
    }

    /// The second half: writes the arrays of the decode step before it. May be repeated, with other padding.
    ///
    /// # Errors
    /// [`BatchError::NothingToPack`] unless the latest step was a decode step and nothing changed since.
    pub fn pack_decode(&mut self, padding: Padding) -> Result<(), CudaBatchError> {
        check_padding(self.tables.shape(), padding)?;
        if !self.last.packable || self.has_changes() {
            return Err(BatchError::NothingToPack.into());
        }
        let _entered = self.gpu.enter()?;
        self.launch_decode(Decode::Pack, padding)?;
        self.last.padding = padding;
        Ok(())
    }

    /// What the control words must be before the next step.
    fn words(&self) -> Words {
        let cells = u64::from(self.tables.shape().ring_cells());
        let head = u32::try_from(self.tables.ring_head() % cells).expect("cells are counted in 32 bits");
        Words { batch: self.tables.batch(), head, free: self.tables.free_blocks() }
    }

    fn has_changes(&self) -> bool {
        // Ids that were taken back from the tail change nothing but the count.
        self.tables.has_changes() || self.words() != self.known
    }

    /// Puts what changed since the last step on the stream now. The next step does so anyway; this is for those who have time before it.
    ///
    /// # Errors
    /// [`CudaBatchError::Capturing`], and what the driver says. Then the next step tries again.
    pub fn flush(&mut self) -> Result<(), CudaBatchError> {
        if !self.has_changes() {
            return Ok(());
        }
        let _entered = self.gpu.enter()?;
        if self.stream.is_capturing()? {
            return Err(CudaBatchError::Capturing);
        }
        self.last.packable = false;
        self.tables.take_changes(&mut self.changes);
        let words = self.words();
        let sent = self.send_changes(words);
        match sent {
            Ok(()) => self.known = words,
            // Nobody knows what arrived: next time, everything goes.
            Err(_) => self.tables.mark_everything_changed(),
        }
        sent
    }

    fn send_changes(&mut self, words: Words) -> Result<(), CudaBatchError> {
        let Self { changes, staging, stream, kernels, replica, .. } = self;
        let mut runs = pieces(Run::TABLE, &changes.table).chain(pieces(Run::RING, &changes.ring)).peekable();
        let mut rows = changes.rows.as_slice();
        loop {
            let mut slot = staging.slot()?;
            let (run_count, row_count) = fill(&mut slot, &mut runs, rows);
            rows = &[];
            // SAFETY: the slot stays until `hand_over`'s event is over; the mirror, which has the replica's shape, named the cells.
            unsafe { kernels.apply(stream.raw(), &replica.addresses, slot.staged(run_count, row_count), words) }?;
            slot.hand_over(stream)?;
            if runs.peek().is_none() {
                return Ok(());
            }
        }
    }

    /// Puts (part of) a decode step on the batch's stream. The context is current.
    pub(super) fn launch_decode(&self, part: Decode, padding: Padding) -> Result<(), CudaBatchError> {
        self.launch_decode_on(&self.stream, part, padding)
    }

    pub(super) fn launch_decode_on(
        &self,
        stream: &Stream,
        part: Decode,
        padding: Padding,
    ) -> Result<(), CudaBatchError> {
        // SAFETY: the arrays live until the batch is dropped, which waits for the stream; only launches that are ordered with this
        // one write to them. The padding was checked.
        Ok(unsafe { self.kernels.decode(part, stream.raw(), &self.replica.addresses, padding.into()) }?)
    }

    fn launch_mixed(&mut self, query: &[u32], padding: Padding, tokens_out: u32) -> Result<(), CudaBatchError> {
        if self.stream.is_capturing()? {
            return Err(CudaBatchError::Capturing);
        }
        let words = self.known;
        let Self { tables, staging, stream, kernels, replica, .. } = self;
        let slot = staging.slot()?;
        for ((work, &context), &query) in slot.work.iter_mut().zip(tables.lens()).zip(query) {
            *work = RowWork { context, query };
        }
        let bytes = query.len() * size_of::<RowWork>();
        let mut row_work = slot.work_address();
        if bytes * Kernels::mixed_blocks(tokens_out) as usize > DIRECT_BYTES {
            // SAFETY: room for `max_rows` on both sides; the slot stays until `hand_over`'s event is over, and only this stream
            // uses the target.
            unsafe { stream.copy_in(replica.row_work, slot.work.as_ptr().cast(), bytes) }?;
            row_work = replica.row_work;
        }
        // SAFETY: as in `launch_decode_on`, and the row work as above.
        unsafe { kernels.mixed(stream.raw(), &replica.addresses, padding.into(), row_work, words, tokens_out) }?;
        Ok(slot.hand_over(stream)?)
    }

    /// The mirror does what was launched.
    pub(super) fn advance(&mut self, work: Work<'_>, size: StepSize, padding: Padding) -> Result<(), CudaBatchError> {
        self.tables.update_block_table(work)?;
        self.steps += 1;
        self.known = self.words();
        let packable = matches!(work, Work::Decode);
        self.last = LastStep { size, padding, max_seq_len: self.tables.longest_row(), packable };
        Ok(())
    }
}

/// Runs as kernels want them.
fn pieces(array: u32, runs: &[CellRun]) -> impl Iterator<Item = Run> {
    runs.iter().flat_map(move |&CellRun { dst, first, count }| {
        (0..count).step_by(MAX_RUN as usize).map(move |from| Run {
            array,
            cell: dst + from,
            first: first + from.cast_signed(),
            count: MAX_RUN.min(count - from),
        })
    })
}

/// Writes rows, and runs until the slot is full; says how many of each. A slot has room for every row.
fn fill(slot: &mut Slot<'_>, runs: &mut impl Iterator<Item = Run>, rows: &[RowWords]) -> (u32, u32) {
    for (to, &RowWords { row, len, next_slot }) in slot.rows.iter_mut().zip(rows) {
        *to = RowState { next_slot, row, len };
    }
    let mut run_count = 0;
    for (to, run) in slot.runs.iter_mut().zip(runs) {
        *to = run;
        run_count += 1;
    }
    (run_count, u32::try_from(rows.len()).expect("rows are counted in 32 bits"))
}
