//! The reference: the same steps by plain vectors, token by token, and the comparison of every output.
//!
//! It shares no code with what it checks. Whoever prepares steps is a [`Subject`]; the walk through a cell admits a
//! batch, places its prompts, decodes over block boundaries, lets half the batch go and come again in a mixed step, and
//! pads some of the steps.

use std::collections::VecDeque;

use tidekv_batch::{IdRun, Metadata, Padding, SeqId, Work};

use super::cell::{Cell, CellError};
use crate::random::Random;

/// Prompts longer than this are held when the sequence comes, so that a walk stays short.
const LONGEST_PROMPT: u32 = 512;
/// And all prompts of a batch together are not longer than this.
const ALL_PROMPTS: u32 = 1 << 21;

/// Something that prepares steps. Refusals are not expected: there is room for everything.
pub(super) trait Subject {
    fn lend(&mut self, runs: &[IdRun]) -> Result<(), CellError>;
    fn admit(&mut self, seq: SeqId, tokens: u32) -> Result<(), CellError>;
    fn release(&mut self, seq: SeqId) -> Result<(), CellError>;
    /// The arrays of the step, wherever they were written.
    fn step(&mut self, work: Work<'_>, padding: Padding) -> Result<&Metadata, CellError>;
    /// The first `blocks` entries of a row of the block table that attention reads.
    fn table_row(&mut self, row: usize, blocks: usize) -> Result<Vec<i32>, CellError>;
}

/// An output that is not what it should be.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("step {step}: {field} at {place} is {found}, the reference says {expected}")]
pub(super) struct Mismatch {
    pub(super) step: u64,
    pub(super) field: &'static str,
    pub(super) place: usize,
    pub(super) found: String,
    pub(super) expected: String,
}

#[derive(Clone, Debug)]
struct Row {
    seq: SeqId,
    tokens: u32,
    ids: Vec<i32>,
}

/// Blocks that [`verify`] takes at most, in rows that hold up to `seq + decodes(block_tokens) + 1` tokens.
pub(super) const fn decodes(block_tokens: u32) -> u32 {
    // Over a boundary from wherever a row begins, and one more; long blocks are met by the random beginnings.
    if block_tokens < 64 { block_tokens + 1 } else { 65 }
}

struct Walk<'a> {
    subject: &'a mut dyn Subject,
    cell: Cell,
    block_tokens: u32,
    free: VecDeque<i32>,
    rows: Vec<Row>,
    steps: u64,
}

/// Walks `subject` through a cell; the number of steps whose outputs were compared.
pub(super) fn verify(
    subject: &mut dyn Subject,
    cell: Cell,
    block_tokens: u32,
    runs: &[IdRun],
) -> Result<u64, CellError> {
    subject.lend(runs)?;
    let free = runs.iter().flat_map(|run| (0..run.count).map(move |place| (run.first.0 + place) as i32)).collect();
    let mut walk = Walk { subject, cell, block_tokens, free, rows: Vec::new(), steps: 0 };
    let mut random = Random::seeded(u64::from(cell.batch) << 32 | u64::from(cell.seq));
    let padding = Padding { rows: cell.batch, tokens: 0 };
    let longest_prompt = LONGEST_PROMPT.min(ALL_PROMPTS / cell.batch).min(cell.seq);

    // Everybody comes, and the prompts are placed.
    let mut prompts = Vec::new();
    for seq in 0..cell.batch {
        let tokens = cell.seq - random.between(0, block_tokens.min(cell.seq) - 1);
        let prompt = tokens.min(longest_prompt);
        walk.admit(SeqId(u64::from(seq)), tokens - prompt)?;
        prompts.push(prompt);
    }
    walk.step(Work::Rows(&prompts), &prompts, Padding::NONE)?;
    let ones = vec![1; cell.batch as usize];
    for _ in 0..decodes(block_tokens) {
        walk.step(Work::Decode, &ones, padding)?;
    }
    // Half of them go, from anywhere in the batch; a padded step without them.
    for _ in 0..cell.batch / 2 {
        let row = random.below(walk.rows.len());
        walk.release(row)?;
    }
    walk.step(Work::Decode, &ones[..walk.rows.len()], padding)?;
    // One comes with a prompt beside the others' decode, and a row that waits.
    if cell.batch > 1 {
        walk.admit(SeqId(u64::from(cell.batch)), 0)?;
        let mut queries = vec![1; walk.rows.len()];
        queries[0] = 0;
        queries[walk.rows.len() - 1] = longest_prompt;
        walk.step(Work::Rows(&queries), &queries, padding)?;
    }
    while !walk.rows.is_empty() {
        walk.release(walk.rows.len() - 1)?;
    }
    walk.step(Work::Decode, &[], Padding::NONE)?;
    Ok(walk.steps)
}

impl Walk<'_> {
    fn admit(&mut self, seq: SeqId, tokens: u32) -> Result<(), CellError> {
        self.subject.admit(seq, tokens)?;
        let ids = self.free.drain(..tokens.div_ceil(self.block_tokens) as usize).collect();
        self.rows.push(Row { seq, tokens, ids });
        Ok(())
    }

    fn release(&mut self, row: usize) -> Result<(), CellError> {
        let row = self.rows.swap_remove(row);
        self.free.extend(row.ids);
        self.subject.release(row.seq)
    }

    fn step(&mut self, work: Work<'_>, queries: &[u32], padding: Padding) -> Result<(), CellError> {
        let expected = self.expected(queries, padding);
        let found = self.subject.step(work, padding)?;
        self.steps += 1;
        let (step, cell) = (self.steps, self.cell);
        let compared = compare(step, found, &expected);
        compared.map_err(|mismatch| CellError::Wrong { cell, mismatch: *mismatch })?;
        for (row, expected) in self.rows.iter().enumerate() {
            let found = self.subject.table_row(row, expected.ids.len())?;
            let same = array(step, "block_tables", &found, &expected.ids);
            same.map_err(|mismatch| CellError::Wrong { cell, mismatch: *mismatch })?;
        }
        Ok(())
    }

    fn expected(&mut self, queries: &[u32], padding: Padding) -> Metadata {
        let mut step = Metadata { query_start_loc: vec![0], seq_start_loc: vec![0], ..Metadata::default() };
        let (mut query_end, mut seq_end) = (0, 0);
        for (row, &query) in self.rows.iter_mut().zip(queries) {
            step.context_lens.push(row.tokens as i32);
            for _ in 0..query {
                let place = row.tokens % self.block_tokens;
                if place == 0 {
                    row.ids.push(self.free.pop_front().expect("the walk was lent enough"));
                }
                let id = row.ids[(row.tokens / self.block_tokens) as usize];
                step.slot_mapping.push(i64::from(id) * i64::from(self.block_tokens) + i64::from(place));
                row.tokens += 1;
            }
            query_end += query as i32;
            seq_end += row.tokens as i32;
            step.seq_lens.push(row.tokens as i32);
            step.query_start_loc.push(query_end);
            step.seq_start_loc.push(seq_end);
            step.batch += 1;
            step.tokens += query;
            step.max_query_len = step.max_query_len.max(query);
            step.max_seq_len = step.max_seq_len.max(row.tokens);
            if query > 1 {
                step.num_prefills += 1;
                step.num_prefill_tokens += query;
            } else {
                step.num_decode_tokens += query;
            }
        }
        let rows = step.seq_lens.len().max(padding.rows as usize);
        step.seq_lens.resize(rows, 0);
        step.context_lens.resize(rows, 0);
        step.query_start_loc.resize(rows + 1, query_end);
        step.seq_start_loc.resize(rows + 1, seq_end);
        step.slot_mapping.resize(step.slot_mapping.len().max(padding.tokens as usize), -1);
        step
    }
}

/// Boxed: a comparison that finds nothing should cost nothing.
type Compared = Result<(), Box<Mismatch>>;

fn compare(step: u64, found: &Metadata, expected: &Metadata) -> Compared {
    array(step, "slot_mapping", &found.slot_mapping, &expected.slot_mapping)?;
    array(step, "seq_lens", &found.seq_lens, &expected.seq_lens)?;
    array(step, "context_lens", &found.context_lens, &expected.context_lens)?;
    array(step, "query_start_loc", &found.query_start_loc, &expected.query_start_loc)?;
    array(step, "seq_start_loc", &found.seq_start_loc, &expected.seq_start_loc)?;
    let numbers = |step: &Metadata| {
        [
            step.batch,
            step.tokens,
            step.max_query_len,
            step.max_seq_len,
            step.num_prefills,
            step.num_prefill_tokens,
            step.num_decode_tokens,
        ]
    };
    array(step, "the numbers", &numbers(found), &numbers(expected))
}

fn array<T: PartialEq + ToString>(step: u64, field: &'static str, found: &[T], expected: &[T]) -> Compared {
    if found == expected {
        return Ok(());
    }
    let place = found.iter().zip(expected).position(|(found, expected)| found != expected);
    let place = place.unwrap_or(found.len().min(expected.len()));
    let say = |values: &[T]| values.get(place).map_or_else(|| "missing".to_owned(), ToString::to_string);
    Err(Box::new(Mismatch { step, field, place, found: say(found), expected: say(expected) }))
}
