//! A model and its memory without an engine around them: sequences in, the logits of every token out.

use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use tidekv_batch::{BatchConfig, BlockTables, IdRun, Metadata, Padding, SeqId, Work};
use tidekv_core::geometry::{Capacity, ChunkChoice, GeometryConfig, Layout};
use tidekv_core::units::Bytes;
use tidekv_mem::Backend;
use tidekv_mem::host::{HostBackend, HostOptions};
use tidekv_pool::PoolConfig;
use tidekv_serve::compute::{Compute, CpuCompute, KvStore, StepInput};
use tidekv_serve::model::Model;
use tidekv_shm::{PoolName, RuntimeDir};

type Failure = Box<dyn std::error::Error>;

/// See the module.
pub(crate) struct Lab {
    compute: CpuCompute,
    kv: KvStore,
    tables: BlockTables,
    metadata: Metadata,
    vocab: usize,
    _dir: TempDir,
}

impl Lab {
    /// Room for `tokens` tokens in blocks of `block_tokens`.
    pub(crate) fn new(model: Model, threads: usize, block_tokens: u32, tokens: u32) -> Result<Self, Failure> {
        let dir = tempfile::tempdir()?;
        let backend = HostBackend::open(HostOptions::default())?;
        let blocks = tokens.div_ceil(block_tokens) + 64;
        let shape = model.shape.kv_shape(block_tokens);
        let block_bytes = u64::from(block_tokens) * model.shape.kv_size() as u64 * 4;
        let budget = Bytes(u64::from(blocks) * block_bytes * 2 * model.shape.layers as u64 * 2 + (64 << 20));
        let geometry = GeometryConfig {
            shape,
            layout: Layout::Slab,
            granularity: backend.capabilities().granularity,
            // Four blocks to a page: ids are sparse, and neighbours often on different pages.
            chunk: ChunkChoice::Bytes(Bytes(4 * block_bytes)),
            capacity: Capacity::Budget(budget),
        };
        let mut config = PoolConfig::new(PoolName::new("lab")?, Arc::new(backend), geometry);
        config.runtime_dir = RuntimeDir::at(dir.path());
        config.budget = Some(budget);
        let mut kv = KvStore::open(config)?;
        let mut tables = BlockTables::new(BatchConfig {
            block_tokens,
            max_rows: 64,
            max_row_tokens: tokens.max(1),
            max_step_tokens: tokens.max(64),
            max_ids: blocks,
        })?;
        let metadata = Metadata::new(tables.shape())?;
        let mut ids = Vec::new();
        kv.alloc(blocks, Duration::ZERO, &mut ids)?;
        let runs: Vec<IdRun> = ids.into_iter().map(|first| IdRun { first, count: 1 }).collect();
        tables.lend(&runs)?;
        let vocab = model.shape.vocab;
        Ok(Self { compute: CpuCompute::new(model, threads)?, kv, tables, metadata, vocab, _dir: dir })
    }

    /// The logits behind every token of every sequence. All sequences are in the batch from the start; in each step
    /// sequence `i` computes `chunk(i, step)` tokens, or what it has left.
    pub(crate) fn logits(
        &mut self,
        sequences: &[Vec<u32>],
        chunk: impl Fn(usize, usize) -> usize,
    ) -> Result<Vec<Vec<f32>>, Failure> {
        for index in 0..sequences.len() {
            self.tables.admit(SeqId(index as u64), 0, &[])?;
        }
        let mut out = vec![Vec::new(); sequences.len()];
        let mut step = 0;
        while out.iter().zip(sequences).any(|(out, tokens)| out.len() < tokens.len() * self.vocab) {
            let done = |index: usize| out[index].len() / self.vocab;
            let query: Vec<usize> =
                sequences.iter().enumerate().map(|(i, all)| chunk(i, step).min(all.len() - done(i))).collect();
            let tokens: Vec<u32> =
                sequences.iter().enumerate().flat_map(|(i, all)| all[done(i)..][..query[i]].iter().copied()).collect();
            let lengths = query.iter().map(|&tokens| u32::try_from(tokens)).collect::<Result<Vec<u32>, _>>()?;
            self.tables.step(Work::Rows(&lengths), Padding::NONE, &mut self.metadata)?;
            let wanted: Vec<u32> = (0..u32::try_from(tokens.len())?).collect();
            let tables = self.tables.block_tables();
            let input = StepInput { tokens: &tokens, metadata: &self.metadata, tables, wanted: &wanted };
            let logits = self.compute.forward(&mut self.kv, &input)?;
            let mut rows = logits.rows();
            for (out, &tokens) in out.iter_mut().zip(&query) {
                rows.by_ref().take(tokens).for_each(|row| out.extend_from_slice(row));
            }
            step += 1;
        }
        for index in 0..sequences.len() {
            self.tables.release(SeqId(index as u64), &mut Vec::new())?;
        }
        Ok(out)
    }
}
