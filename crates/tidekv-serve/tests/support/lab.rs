//! A model and its memory without an engine around them: sequences in, the logits of every token out.

#![allow(dead_code, reason = "each program uses its own part of this")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tidekv_batch::{BatchConfig, IdRun, SeqId};
use tidekv_core::geometry::{Capacity, ChunkChoice, Geometry, GeometryConfig, Layout};
use tidekv_core::units::{Buffer, Bytes};
use tidekv_mem::Backend;
use tidekv_mem::cuda::{CudaBackend, CudaOptions};
use tidekv_mem::host::{HostBackend, HostOptions};
use tidekv_pool::PoolConfig;
use tidekv_serve::compute::{Compute, CpuCompute, KvStore, StepInput, StepTables, Wanted, likeliest};
use tidekv_serve::config::Precision;
use tidekv_serve::model::{Model, ModelShape};
use tidekv_shm::{PoolName, RuntimeDir};

type Failure = Box<dyn std::error::Error>;

/// Most sequences at once.
pub(crate) const MAX_ROWS: u32 = 64;

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
        Self::sized(compute, shape, home, block_tokens, tokens, tokens)
    }

    /// The same with steps of at most `step_tokens` tokens.
    pub(crate) fn sized(
        compute: Box<dyn Compute>,
        shape: &ModelShape,
        home: Home,
        block_tokens: u32,
        tokens: u32,
        step_tokens: u32,
    ) -> Result<Self, Failure> {
        let dir = tempfile::tempdir()?;
        let (backend, kv_shape): (Arc<dyn Backend>, _) = match home {
            Home::Host => (Arc::new(HostBackend::open(HostOptions::default())?), shape.kv_shape(block_tokens)),
            Home::Gpu(precision) => {
                let backend = CudaBackend::open(CudaOptions::default())?;
                (Arc::new(backend), shape.kv_shape_of(precision.bytes(), block_tokens))
            }
        };
        let blocks = tokens.div_ceil(block_tokens) + 64;
        let block_bytes = kv_shape.block_bytes(Buffer::Key)?.0;
        let geometry = GeometryConfig {
            shape: kv_shape,
            layout: Layout::Slab,
            granularity: backend.capabilities().granularity,
            // Four blocks to a page: ids are sparse, and neighbours often on different pages.
            chunk: ChunkChoice::Bytes(Bytes(4 * block_bytes)),
            capacity: Capacity::Pages(blocks.div_ceil(4)),
        };
        let mut config = PoolConfig::new(PoolName::new("lab")?, backend, geometry);
        config.runtime_dir = RuntimeDir::at(dir.path());
        config.budget = Some(Bytes(Geometry::new(&geometry)?.page_bytes().0 * u64::from(blocks.div_ceil(4))));
        let batch = BatchConfig {
            block_tokens,
            max_rows: MAX_ROWS,
            max_row_tokens: tokens.max(1),
            max_step_tokens: step_tokens.max(MAX_ROWS),
            max_ids: blocks,
        };
        let (mut kv, mut tables) = match home {
            Home::Host => (KvStore::open(config)?, StepTables::host(batch)?),
            Home::Gpu(_) => (KvStore::open_on_device(config)?, StepTables::cuda(0, batch)?),
        };
        let mut ids = Vec::new();
        kv.alloc(blocks, Duration::ZERO, &mut ids)?;
        let runs: Vec<IdRun> = ids.into_iter().map(|first| IdRun { first, count: 1 }).collect();
        tables.lend(&runs)?;
        Ok(Self { compute, kv, tables, vocab: shape.vocab, _dir: dir })
    }

    /// Turns the order around in which free blocks are taken.
    pub(crate) fn reverse_blocks(&mut self) -> Result<(), Failure> {
        let mut ids = Vec::new();
        self.tables.take_back(u32::MAX, &mut ids);
        ids.sort_unstable_by_key(|id| std::cmp::Reverse(id.0));
        let runs: Vec<IdRun> = ids.into_iter().map(|first| IdRun { first, count: 1 }).collect();
        Ok(self.tables.lend(&runs)?)
    }

    /// Computes `context` tokens for each of so many new sequences, as many as a step takes at a time; says how long that took.
    pub(crate) fn fill(&mut self, rows: u32, context: u32) -> Result<Duration, Failure> {
        let most = self.tables.view().shape().config().max_step_tokens;
        let start = Instant::now();
        for row in 0..rows {
            self.tables.admit(SeqId(u64::from(row)), 0, &[])?;
            let mut done = 0;
            while done < context {
                let count = (context - done).min(most);
                let mut query = vec![0; row as usize + 1];
                query[row as usize] = count;
                let tokens: Vec<u32> = (done..done + count).map(|at| (row * 31 + at * 7) % 251).collect();
                self.compute.forward(
                    &mut self.kv,
                    &mut self.tables,
                    &StepInput { query: &query, tokens: &tokens, wanted: &[] },
                )?;
                done += count;
            }
        }
        Ok(start.elapsed())
    }

    /// Makes `steps` tokens for each of the first rows, each the likeliest; says how long each step took.
    pub(crate) fn decode(&mut self, rows: u32, steps: u32) -> Result<Vec<Duration>, Failure> {
        let query = vec![1; rows as usize];
        let wanted: Vec<Wanted> = (0..rows).map(|token| Wanted { token, logits: false }).collect();
        let mut tokens = vec![0; rows as usize];
        let mut times = Vec::new();
        for _ in 0..steps {
            let start = Instant::now();
            let step = StepInput { query: &query, tokens: &tokens, wanted: &wanted };
            tokens = self.compute.forward(&mut self.kv, &mut self.tables, &step)?.best;
            times.push(start.elapsed());
        }
        Ok(times)
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
