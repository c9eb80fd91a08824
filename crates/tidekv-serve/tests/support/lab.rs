//! A model and its memory without an engine around them: sequences in, the logits of every token out.

#![allow(dead_code, reason = "each program uses its own part of this")]

use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use tidekv_batch::{BatchConfig, IdRun, SeqId};
use tidekv_core::geometry::{Capacity, ChunkChoice, Geometry, GeometryConfig, Layout};
use tidekv_core::units::{Buffer, Bytes, KernelId};
use tidekv_mem::Backend;
use tidekv_mem::cuda::{CudaBackend, CudaOptions};
use tidekv_mem::host::{HostBackend, HostOptions};
use tidekv_pool::PoolConfig;
use tidekv_serve::compute::{Compute, CpuCompute, KvStore, Outputs, StepInput, StepTables, Wanted, likeliest};
use tidekv_serve::config::Precision;
use tidekv_serve::model::{Model, ModelShape};
use tidekv_shm::{PoolName, RuntimeDir};

type Failure = Box<dyn std::error::Error>;

/// Most sequences at once.
pub(crate) const MAX_ROWS: u32 = 64;
/// So few that ids are sparse, and neighbours often on different pages.
const BLOCKS_PER_PAGE: u32 = 4;

/// Where a model is computed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Home {
    Host,
    Gpu(Precision),
}

/// See the module.
pub(crate) struct Lab {
    compute: Box<dyn Compute>,
    kv: KvStore,
    tables: StepTables,
    vocab: usize,
    _dir: TempDir,
}

impl Lab {
    /// On the processor: room for `tokens` tokens in blocks of `block_tokens`.
    pub(crate) fn new(model: Model, threads: usize, block_tokens: u32, tokens: u32) -> Result<Self, Failure> {
        let shape = model.shape.clone();
        Self::with(Box::new(CpuCompute::new(model, threads)?), &shape, Home::Host, block_tokens, tokens)
    }

    /// With anything that computes, where that is.
    pub(crate) fn with(
        compute: Box<dyn Compute>,
        shape: &ModelShape,
        home: Home,
        block_tokens: u32,
        tokens: u32,
    ) -> Result<Self, Failure> {
        Self::large(
            compute,
            shape,
            home,
            block_tokens,
            tokens,
            (tokens.div_ceil(block_tokens) + 64).div_ceil(BLOCKS_PER_PAGE),
        )
    }

    /// The same over a pool of so many pages, all of them mapped.
    pub(crate) fn large(
        compute: Box<dyn Compute>,
        shape: &ModelShape,
        home: Home,
        block_tokens: u32,
        tokens: u32,
        pages: u32,
    ) -> Result<Self, Failure> {
        let dir = tempfile::tempdir()?;
        let (backend, kv_shape): (Arc<dyn Backend>, _) = match home {
            Home::Host => (Arc::new(HostBackend::open(HostOptions::default())?), shape.kv_shape(block_tokens)),
            Home::Gpu(precision) => {
                let backend = CudaBackend::open(CudaOptions::default())?;
                (Arc::new(backend), shape.kv_shape_of(precision.bytes(), block_tokens))
            }
        };
        let blocks = pages * BLOCKS_PER_PAGE;
        let block_bytes = kv_shape.block_bytes(Buffer::Key)?.0;
        let geometry = GeometryConfig {
            shape: kv_shape,
            layout: Layout::Slab,
            granularity: backend.capabilities().granularity,
            chunk: ChunkChoice::Bytes(Bytes(u64::from(BLOCKS_PER_PAGE) * block_bytes)),
            capacity: Capacity::Pages(pages),
        };
        let mut config = PoolConfig::new(PoolName::new("lab")?, backend, geometry);
        config.runtime_dir = RuntimeDir::at(dir.path());
        config.budget = Some(Bytes(Geometry::new(&geometry)?.page_bytes().0 * u64::from(pages)));
        let batch = BatchConfig {
            block_tokens,
            max_rows: MAX_ROWS,
            max_row_tokens: tokens.max(1),
            max_step_tokens: tokens.max(MAX_ROWS),
            max_ids: blocks,
        };
        let (mut kv, tables) = match home {
            Home::Host => (KvStore::open(config)?, StepTables::host(batch)?),
            Home::Gpu(_) => (KvStore::open_on_device(config)?, StepTables::cuda(0, batch)?),
        };
        let mut ids = Vec::new();
        kv.alloc(blocks, Duration::ZERO, &mut ids)?;
        let mut lab = Self { compute, kv, tables, vocab: shape.vocab, _dir: dir };
        lab.lend(&ids)?;
        Ok(lab)
    }

    /// Turns the order around in which free blocks are taken.
    pub(crate) fn reverse_blocks(&mut self) -> Result<(), Failure> {
        let mut ids = self.free_blocks();
        ids.reverse();
        self.lend(&ids)
    }

    /// Takes all free blocks out of use, from the first id to the last.
    pub(crate) fn free_blocks(&mut self) -> Vec<KernelId> {
        let mut ids = Vec::new();
        self.tables.take_back(u32::MAX, &mut ids);
        ids.sort_unstable_by_key(|id| id.0);
        ids
    }

    /// Puts blocks into use, to be taken in this order.
    pub(crate) fn lend(&mut self, ids: &[KernelId]) -> Result<(), Failure> {
        let runs: Vec<IdRun> = ids.iter().map(|&first| IdRun { first, count: 1 }).collect();
        Ok(self.tables.lend(&runs)?)
    }

    /// Computes the tokens of a new sequence in one step.
    pub(crate) fn step(&mut self, tokens: &[u32], wanted: &[Wanted]) -> Result<Outputs, Failure> {
        self.tables.admit(SeqId(0), 0, &[])?;
        let input = StepInput { query: &[u32::try_from(tokens.len())?], tokens, wanted };
        let outputs = self.compute.forward(&mut self.kv, &mut self.tables, &input)?;
        self.tables.release(SeqId(0), &mut Vec::new())?;
        Ok(outputs)
    }

    /// What computes.
    pub(crate) fn compute(&mut self) -> &mut dyn Compute {
        &mut *self.compute
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
            let wanted: Vec<Wanted> =
                (0..u32::try_from(tokens.len())?).map(|token| Wanted { token, logits: true }).collect();
            let input = StepInput { query: &lengths, tokens: &tokens, wanted: &wanted };
            let outputs = self.compute.forward(&mut self.kv, &mut self.tables, &input)?;
            let chosen: Vec<u32> = outputs.logits.rows().map(likeliest).collect();
            assert_eq!(outputs.best, chosen, "the device chooses as the host would");
            let mut rows = outputs.logits.rows();
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
