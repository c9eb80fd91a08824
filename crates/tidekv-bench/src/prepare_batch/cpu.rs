//! The CPU's side: one stage for a cell, on which every operation has its samples.

use tidekv_batch::{BatchConfig, BatchError, BatchShape, BlockTables, IdRun, Metadata, Padding, SeqId, Work};
use tidekv_core::units::{Bytes, KernelId};
use tidekv_mem::BackendName;

use super::cell::{Cell, CellError, Measured, Timed};
use super::reference::{self, Subject};
use super::{Op, Plan};
use crate::random::Random;

/// Blocks of a page, and how far the ids of pages lie apart: those of a slab of 36 layers.
const PAGE_BLOCKS: u32 = 8;
const PAGE_IDS: u32 = 9;
/// Query tokens of one step at most; longer prompts are computed in chunks.
const MAX_STEP_TOKENS: u32 = 1 << 22;
/// `step_ratio` takes turns this often.
const ROUNDS: u32 = 20;

/// Measures, and verifies where that is wanted.
pub(super) fn measure(plan: &Plan, cell: Cell, measured: &mut Measured) -> Result<(), CellError> {
    if plan.verify {
        let mut subject = OnCpu::new(plan, cell)?;
        measured.verified_steps += reference::verify(&mut subject, cell, plan.block_size, &runs(plan, cell))?;
    }
    let mut stage = Stage::new(plan, cell)?;
    stage.measure(plan, &mut measured.cpu).map_err(|error| CellError::of_batch(cell, error))
}

/// The median step of one cell over another's, measured in turns.
pub(super) fn step_ratio(plan: &Plan, of: Cell, over: Cell) -> anyhow::Result<f64> {
    let mut turns = [(Stage::new(plan, of)?, Timed::default()), (Stage::new(plan, over)?, Timed::default())];
    for (stage, times) in &mut turns {
        *times = Timed::new(stage.steps);
        stage.samples = plan.iterations.div_ceil(ROUNDS);
    }
    for _ in 0..ROUNDS {
        for (stage, times) in &mut turns {
            stage.step_into(times)?;
        }
    }
    let [of, over] = turns.map(|(_, times)| times.micros().map_or(f64::NAN, |times| times.p50));
    Ok(of / over)
}

/// How large the tables of a cell must be, for measuring and for verifying.
pub(super) fn config(plan: &Plan, cell: Cell) -> BatchConfig {
    let Cell { batch, seq } = cell;
    // Rows grow by a sample's steps, or by what the walk of the reference adds.
    let max_row_tokens = seq + plan.steps_per_sample.max(reference::decodes(plan.block_size) + 2);
    let prompts = batch.saturating_mul(seq).min(MAX_STEP_TOKENS);
    let row_blocks = max_row_tokens.div_ceil(plan.block_size);
    BatchConfig {
        block_tokens: plan.block_size,
        max_rows: batch,
        max_row_tokens,
        max_step_tokens: prompts.max(batch.saturating_mul(2)),
        max_ids: batch.saturating_mul(row_blocks).div_ceil(PAGE_BLOCKS).saturating_mul(PAGE_BLOCKS),
    }
}

/// The ids of enough pages.
pub(super) fn runs(plan: &Plan, cell: Cell) -> Vec<IdRun> {
    pages(config(plan, cell).max_ids)
}

/// As many whole pages as have at most `ids` ids.
pub(super) fn pages(ids: u32) -> Vec<IdRun> {
    (0..ids / PAGE_BLOCKS).map(|page| IdRun { first: KernelId(page * PAGE_IDS), count: PAGE_BLOCKS }).collect()
}

/// Empty tables with ids, or why this machine cannot have them.
fn tables(plan: &Plan, cell: Cell) -> Result<BlockTables, CellError> {
    let config = config(plan, cell);
    check_memory(config, cell)?;
    BlockTables::new(config).map_err(|error| CellError::of_config(cell, &error))
}

/// Memory that is promised and not there ends a process when it is touched: look before.
pub(super) fn check_memory(config: BatchConfig, cell: Cell) -> Result<(), CellError> {
    let shape = BatchShape::new(config).map_err(|error| CellError::of_config(cell, &error))?;
    let cells = u64::from(shape.table_cells()) + u64::from(shape.ring_cells());
    let needed = Bytes(cells * 4 + u64::from(config.max_step_tokens) * 8 + u64::from(config.max_rows) * 100);
    let memory = tidekv_mem::open(BackendName::Host, 0).and_then(|host| host.memory());
    if let Some(free) = memory.ok().map(|memory| memory.free).filter(|&free| needed > free) {
        return Err(CellError::too_large(cell, needed, free));
    }
    Ok(())
}

/// Tokens of each row where samples begin: anywhere in its last block.
pub(super) fn base_lengths(plan: &Plan, cell: Cell) -> Vec<u32> {
    let mut random = Random::new();
    let span = plan.block_size.min(cell.seq);
    (0..cell.batch).map(|_| cell.seq - random.between(0, span - 1)).collect()
}

fn metadata(tables: &BlockTables, cell: Cell) -> Result<Metadata, CellError> {
    Metadata::new(tables.shape()).map_err(|error| CellError::of_config(cell, &error))
}

type Times = Result<Timed, BatchError>;

/// A full batch, each row somewhere in its last block.
pub(super) struct Stage {
    cell: Cell,
    pub(super) samples: u32,
    /// Decode steps of a sample.
    pub(super) steps: u32,
    pub(super) tables: BlockTables,
    pub(super) out: Metadata,
    /// Tokens of each sequence at the start of a sample; sequence `i` is number `i`.
    base: Vec<u32>,
    queries: Vec<u32>,
}

impl Stage {
    pub(super) fn new(plan: &Plan, cell: Cell) -> Result<Self, CellError> {
        let mut tables = tables(plan, cell)?;
        let out = metadata(&tables, cell)?;
        tables.lend(&runs(plan, cell)).map_err(|error| CellError::of_lease(cell, error))?;
        let base = base_lengths(plan, cell);
        for (seq, &tokens) in (0..).zip(&base) {
            tables.admit(SeqId(seq), tokens, &[]).map_err(|error| CellError::of_batch(cell, error))?;
        }
        let queries = vec![1; cell.batch as usize];
        Ok(Self { cell, samples: plan.iterations, steps: plan.steps_per_sample, tables, out, base, queries })
    }

    /// Cuts every row back to where samples begin.
    pub(super) fn reset(&mut self) -> Result<(), BatchError> {
        (0..).zip(&self.base).try_for_each(|(seq, &tokens)| self.tables.truncate(SeqId(seq), tokens))
    }

    fn measure(&mut self, plan: &Plan, cpu: &mut Vec<(Op, Timed)>) -> Result<(), BatchError> {
        for op in [Op::Update, Op::Pack, Op::Step, Op::Mixed].into_iter().filter(|&op| plan.wants(op)) {
            let times = match op {
                Op::Update => self.update(),
                Op::Pack => self.pack(),
                Op::Mixed => self.mixed(),
                _ => self.step(),
            };
            cpu.push((op, times?));
        }
        if plan.wants(Op::Prefill) || plan.wants(Op::Free) {
            let both = self.come_and_go()?;
            cpu.extend(both.into_iter().filter(|&(op, _)| plan.wants(op)));
        }
        Ok(())
    }

    fn update(&mut self) -> Times {
        let mut times = Timed::new(self.steps);
        for _ in 0..self.samples {
            times.time(|| (0..self.steps).try_for_each(|_| self.tables.update_block_table(Work::Decode).map(drop)))?;
            self.reset()?;
        }
        Ok(times)
    }

    fn pack(&mut self) -> Times {
        let mut times = Timed::new(self.steps);
        self.tables.update_block_table(Work::Decode)?;
        for _ in 0..self.samples {
            times.time(|| {
                (0..self.steps).try_for_each(|_| self.tables.pack_flash_attn_metadata(Padding::NONE, &mut self.out))
            })?;
        }
        self.reset()?;
        Ok(times)
    }

    fn step(&mut self) -> Times {
        let mut times = Timed::new(self.steps);
        self.step_into(&mut times)?;
        Ok(times)
    }

    fn step_into(&mut self, times: &mut Timed) -> Result<(), BatchError> {
        for _ in 0..self.samples {
            times.time(|| {
                (0..self.steps).try_for_each(|_| self.tables.step(Work::Decode, Padding::NONE, &mut self.out).map(drop))
            })?;
            self.reset()?;
        }
        Ok(())
    }

    /// The first row computes its prompt, all others decode.
    fn mixed(&mut self) -> Times {
        let mut times = Timed::new(1);
        let room = self.tables.shape().config().max_step_tokens - self.cell.batch;
        for _ in 0..self.samples {
            self.tables.truncate(SeqId(0), 0)?;
            self.queries[0] = self.cell.seq.min(room);
            times.time(|| self.tables.step(Work::Rows(&self.queries), Padding::NONE, &mut self.out))?;
            self.base[0] = self.base[0].min(self.queries[0]);
            self.reset()?;
        }
        Ok(times)
    }

    /// Everybody comes and computes a prompt, in chunks where one step does not hold them; then everybody goes; the
    /// stage is empty then.
    fn come_and_go(&mut self) -> Result<[(Op, Timed); 2], BatchError> {
        let (mut prefill, mut free) = (Timed::new(1), Timed::new(1));
        let mut freed = Vec::new();
        self.leave(&mut freed)?;
        for _ in 0..self.samples {
            prefill.time(|| self.come())?;
            free.time(|| self.leave(&mut freed))?;
        }
        Ok([(Op::Prefill, prefill), (Op::Free, free)])
    }

    fn come(&mut self) -> Result<(), BatchError> {
        let Cell { batch, seq } = self.cell;
        for row in 0..batch {
            self.tables.admit(SeqId(u64::from(row)), 0, &[])?;
        }
        let chunk = (self.tables.shape().config().max_step_tokens / batch).min(seq);
        let mut held = 0;
        while held < seq {
            let now = chunk.min(seq - held);
            self.queries.fill(now);
            self.tables.step(Work::Rows(&self.queries), Padding::NONE, &mut self.out)?;
            held += now;
        }
        self.queries.fill(1);
        Ok(())
    }

    fn leave(&mut self, out: &mut Vec<KernelId>) -> Result<(), BatchError> {
        (0..u64::from(self.cell.batch)).try_for_each(|seq| self.tables.release(SeqId(seq), out).map(drop))
    }
}

/// The CPU path, to be verified.
pub(super) struct OnCpu {
    cell: Cell,
    tables: BlockTables,
    out: Metadata,
}

impl OnCpu {
    pub(super) fn new(plan: &Plan, cell: Cell) -> Result<Self, CellError> {
        let tables = tables(plan, cell)?;
        let out = metadata(&tables, cell)?;
        Ok(Self { cell, tables, out })
    }
}

impl Subject for OnCpu {
    fn lend(&mut self, runs: &[IdRun]) -> Result<(), CellError> {
        self.tables.lend(runs).map_err(|error| CellError::of_lease(self.cell, error))
    }

    fn admit(&mut self, seq: SeqId, tokens: u32) -> Result<(), CellError> {
        self.tables.admit(seq, tokens, &[]).map(drop).map_err(|error| CellError::of_batch(self.cell, error))
    }

    fn release(&mut self, seq: SeqId) -> Result<(), CellError> {
        let released = self.tables.release(seq, &mut Vec::new());
        released.map(drop).map_err(|error| CellError::of_batch(self.cell, error))
    }

    fn step(&mut self, work: Work<'_>, padding: Padding) -> Result<&Metadata, CellError> {
        let stepped = self.tables.step(work, padding, &mut self.out);
        stepped.map_err(|error| CellError::of_batch(self.cell, error))?;
        Ok(&self.out)
    }

    fn table_row(&mut self, row: usize, blocks: usize) -> Result<Vec<i32>, CellError> {
        let view = self.tables.block_tables();
        Ok(view.ids[row * view.stride as usize..][..blocks].to_vec())
    }
}
