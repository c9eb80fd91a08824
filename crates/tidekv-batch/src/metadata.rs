//! The arrays of one step, as FlashAttention-like kernels want them.
//!
//! ```text
//!   batch of 3, query lengths 2 1 1, padded to 4 rows and 6 tokens
//!     slot_mapping     [ s0 s1 | s2 | s3 | -1 -1 ]     where the K and V of each query token go
//!     seq_lens         [ c+q | c+q | c+q | 0 ]         tokens to attend to
//!     context_lens     [ c   | c   | c   | 0 ]         of which were there before
//!     query_start_loc  [ 0  2  3  4  4 ]               padding repeats the end
//!     seq_start_loc    [ 0  ...    n  n ]
//! ```
//!
//! The block table is not among them: attention reads [`BlockTables::block_tables`](crate::BlockTables::block_tables)
//! itself. The arrays are made for the largest step once; a step sets their lengths and contents and allocates nothing.

use crate::config::{BatchShape, ConfigError, allocate};
use crate::error::BatchError;

/// Fills a step up to a fixed size, as captured graphs need. A step that is larger is not cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Padding {
    /// Rows at least.
    pub rows: u32,
    /// Query tokens at least.
    pub tokens: u32,
}

impl Padding {
    /// Exactly what the batch has.
    pub const NONE: Self = Self { rows: 0, tokens: 0 };

    /// A decode step of a graph for `rows` rows.
    pub const fn decode(rows: u32) -> Self {
        Self { rows, tokens: rows }
    }
}

/// The block table as attention reads it: row `i` is row `i` of the batch.
///
/// Entries behind a row's tokens, and rows behind the batch, are whatever was there last: never read them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableView<'a> {
    /// All cells, `max_rows * stride` of them.
    pub ids: &'a [i32],
    /// Cells from one row to the next.
    pub stride: u32,
    /// Rows that are live.
    pub rows: u32,
    /// Entries that the longest live row has.
    pub max_blocks: u32,
}

impl<'a> TableView<'a> {
    /// The cells of a row.
    pub fn row(&self, row: u32) -> &'a [i32] {
        &self.ids[row as usize * self.stride as usize..][..self.stride as usize]
    }
}

/// One step's arrays and numbers. `rows` and `tokens` below are those of the padding.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metadata {
    /// `[tokens]`: the slot of each query token; -1 where there is none.
    pub slot_mapping: Vec<i64>,
    /// `[rows]`: tokens of the sequence with this step's; 0 behind the batch.
    pub seq_lens: Vec<i32>,
    /// `[rows]`: tokens of the sequence before this step; 0 behind the batch.
    pub context_lens: Vec<i32>,
    /// `[rows + 1]`: where each row's query tokens begin (cu_seqlens_q); behind the batch the number of query tokens.
    pub query_start_loc: Vec<i32>,
    /// `[rows + 1]`: where each row's tokens begin (cu_seqlens_k); behind the batch the number of all tokens.
    pub seq_start_loc: Vec<i32>,
    /// Rows without padding.
    pub batch: u32,
    /// Query tokens without padding.
    pub tokens: u32,
    /// The longest query.
    pub max_query_len: u32,
    /// The longest sequence.
    pub max_seq_len: u32,
    /// Rows with more than one query token.
    pub num_prefills: u32,
    /// Query tokens of those rows.
    pub num_prefill_tokens: u32,
    /// Query tokens of all other rows.
    pub num_decode_tokens: u32,
}

/// The numbers of a step, known before its arrays are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StepSize {
    pub(crate) batch: u32,
    pub(crate) tokens: u32,
    pub(crate) max_query_len: u32,
    pub(crate) prefills: u32,
    pub(crate) prefill_tokens: u32,
}

impl Metadata {
    /// Empty arrays that never have to grow.
    pub fn new(shape: &BatchShape) -> Result<Self, ConfigError> {
        let (rows, tokens) = (shape.config().max_rows, shape.config().max_step_tokens);
        let mut step = Self {
            slot_mapping: allocate("the slot mapping", tokens, 0)?,
            seq_lens: allocate("the sequence lengths", rows, 0)?,
            context_lens: allocate("the context lengths", rows, 0)?,
            query_start_loc: allocate("the query starts", rows + 1, 0)?,
            seq_start_loc: allocate("the sequence starts", rows + 1, 0)?,
            ..Self::default()
        };
        step.resize(0, 0);
        Ok(step)
    }

    /// Sets the lengths of all arrays; what is new in them is 0.
    fn resize(&mut self, rows: u32, tokens: u32) {
        self.slot_mapping.resize(tokens as usize, 0);
        self.seq_lens.resize(rows as usize, 0);
        self.context_lens.resize(rows as usize, 0);
        self.query_start_loc.resize(rows as usize + 1, 0);
        self.seq_start_loc.resize(rows as usize + 1, 0);
    }

    /// Sets lengths and numbers; the rows are written through the [`Writer`], the padding by its `finish`.
    pub(crate) fn begin(&mut self, size: &StepSize, max_seq_len: u32, padding: Padding) -> Writer<'_> {
        self.resize(padding.rows.max(size.batch), padding.tokens.max(size.tokens));
        self.batch = size.batch;
        self.tokens = size.tokens;
        self.max_query_len = size.max_query_len;
        self.max_seq_len = max_seq_len;
        self.num_prefills = size.prefills;
        self.num_prefill_tokens = size.prefill_tokens;
        self.num_decode_tokens = size.tokens - size.prefill_tokens;
        self.query_start_loc[0] = 0;
        self.seq_start_loc[0] = 0;
        Writer {
            slots: &mut self.slot_mapping,
            seq_lens: &mut self.seq_lens,
            context_lens: &mut self.context_lens,
            query_starts: &mut self.query_start_loc[1..],
            seq_starts: &mut self.seq_start_loc[1..],
            row: 0,
            token: 0,
            seq_total: 0,
        }
    }
}

/// Refuses padding for which the arrays were not made.
pub(crate) fn check_padding(shape: &BatchShape, padding: Padding) -> Result<(), BatchError> {
    let (max_rows, max_step_tokens) = (shape.config().max_rows, shape.config().max_step_tokens);
    if padding.rows > max_rows || padding.tokens > max_step_tokens {
        let Padding { rows, tokens } = padding;
        return Err(BatchError::PaddingTooLarge { rows, tokens, max_rows, max_step_tokens });
    }
    Ok(())
}

/// Writes the arrays.
pub(crate) struct Writer<'a> {
    slots: &'a mut [i64],
    seq_lens: &'a mut [i32],
    context_lens: &'a mut [i32],
    query_starts: &'a mut [i32],
    seq_starts: &'a mut [i32],
    row: usize,
    token: usize,
    seq_total: i32,
}

impl Writer<'_> {
    /// Fills what is behind the batch.
    #[expect(clippy::cast_possible_truncation, reason = "a step has at most 2^30 tokens")]
    pub(crate) fn finish(self) {
        self.slots[self.token..].fill(-1);
        self.seq_lens[self.row..].fill(0);
        self.context_lens[self.row..].fill(0);
        self.query_starts[self.row..].fill(self.token as i32);
        self.seq_starts[self.row..].fill(self.seq_total);
    }

    /// All rows of a decode step that was done: `lens` and `next_slots` are those behind it.
    ///
    /// Array by array and not row by row: loops over one array become vector instructions, as long as nothing in them is
    /// checked for overflow. Nothing can: a row that decoded has a token, and all tokens together fit an `i32`.
    pub(crate) fn decode(&mut self, lens: &[i32], next_slots: &[i64]) {
        let rows = lens.len();
        self.seq_lens[..rows].copy_from_slice(lens);
        self.context_lens[..rows].iter_mut().zip(lens).for_each(|(context, len)| *context = len.wrapping_sub(1));
        self.slots[..rows].iter_mut().zip(next_slots).for_each(|(slot, next)| *slot = next.wrapping_sub(1));
        let mut query_end = 0i32;
        for end in &mut self.query_starts[..rows] {
            query_end = query_end.wrapping_add(1);
            *end = query_end;
        }
        let mut seq_end = 0i32;
        for (end, &len) in self.seq_starts[..rows].iter_mut().zip(lens) {
            seq_end = seq_end.wrapping_add(len);
            *end = seq_end;
        }
        self.seq_total = seq_end;
        (self.row, self.token) = (rows, rows);
    }

    /// The next row: `query` tokens behind `context` others, in the blocks `cells`.
    #[expect(clippy::cast_possible_truncation, reason = "a step has at most 2^30 tokens")]
    pub(crate) fn query(&mut self, context: u32, query: u32, cells: &[i32], block_shift: u32) {
        let block_tokens = 1u32 << block_shift;
        let (mut slots, mut position) = (&mut self.slots[self.token..][..query as usize], context);
        while !slots.is_empty() {
            let place = position & (block_tokens - 1);
            let here = slots.len().min((block_tokens - place) as usize);
            let (block, rest) = slots.split_at_mut(here);
            let first = (i64::from(cells[(position >> block_shift) as usize]) << block_shift) + i64::from(place);
            block.iter_mut().zip(first..).for_each(|(slot, value)| *slot = value);
            position = position - place + block_tokens;
            slots = rest;
        }
        let row = self.row;
        self.token += query as usize;
        self.seq_total += (context + query) as i32;
        self.seq_lens[row] = (context + query) as i32;
        self.context_lens[row] = context as i32;
        self.query_starts[row] = self.token as i32;
        self.seq_starts[row] = self.seq_total;
        self.row += 1;
    }
}
