//! An engine with a runtime folder of its own, and what tests ask of one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tidekv_core::geometry::ChunkChoice;
use tidekv_core::units::Bytes;
use tidekv_pool::ReservePolicy;
use tidekv_serve::config::{ComputeChoice, EngineConfig, KvBudget, KvMode, ModelSource, SyntheticSize};
use tidekv_serve::engine;
use tidekv_serve::handle::{
    Engine, Event, FinishReason, GenerateError, GenerateRequest, Generation, Prompt, Sampling, Usage,
};
use tidekv_shm::{PoolName, RuntimeDir};

/// Tokens of a block.
pub(crate) const BLOCK: u64 = 16;
/// The tiny model's block: 16 tokens, 4 layers, K and V, 2 heads of 16 floats.
pub(crate) const BLOCK_BYTES: u64 = 16 * 4 * 2 * 2 * 16 * 4;
/// A page of four of them.
pub(crate) const PAGE: Bytes = Bytes(4 * BLOCK_BYTES);
/// Longer than any wait of a test that passes.
const DEADLINE: Duration = Duration::from_secs(300);

/// An engine, and the folder that goes with it.
pub(crate) struct Lab {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) dir: Arc<TempDir>,
}

/// The tiny model in small pages: `pages` of them in all.
pub(crate) fn config(dir: &TempDir, kv: KvMode, pages: u64) -> EngineConfig {
    EngineConfig {
        model: ModelSource::Synthetic { size: SyntheticSize::Tiny, seed: 0 },
        kv: kv.into(),
        kv_budget: KvBudget::Given(Bytes(pages * PAGE.0)),
        pool_name: PoolName::new("engine-test").unwrap(),
        runtime_dir: RuntimeDir::at(dir.path()),
        compute: ComputeChoice::Cpu,
        max_batch_rows: 32,
        max_step_tokens: 64,
        max_waiting: 1000,
        max_cached_tokens: None,
        context_tokens: None,
        block_tokens: 16,
        // Of one layer's K or V: a page has eight such chunks.
        chunk: ChunkChoice::Bytes(Bytes(PAGE.0 / 8)),
        reserve: ReservePolicy::Auto,
        threads: Some(1),
    }
}

impl Lab {
    pub(crate) fn elastic(pages: u64) -> Self {
        Self::new(|dir| config(dir, KvMode::Elastic, pages))
    }

    pub(crate) fn new(config: impl FnOnce(&TempDir) -> EngineConfig) -> Self {
        Self::beside(Arc::new(tempfile::tempdir().unwrap()), config)
    }

    /// On the same device as whoever uses `dir`.
    pub(crate) fn beside(dir: Arc<TempDir>, config: impl FnOnce(&TempDir) -> EngineConfig) -> Self {
        let engine = engine::start(config(&dir)).unwrap();
        Self { engine, dir }
    }

    pub(crate) fn submit(&self, prompt: &[u32], max_tokens: u32) -> Generation {
        self.engine.submit(request(prompt, max_tokens)).unwrap()
    }

    /// Waits until the engine's statistics are as wanted.
    pub(crate) fn wait_for(&self, what: &str, wanted: impl Fn(&tidekv_serve::handle::EngineStats) -> bool) {
        let start = Instant::now();
        loop {
            let stats = self.engine.stats();
            if wanted(&stats) {
                return;
            }
            assert!(start.elapsed() < DEADLINE, "{what} did not come: {stats:?}");
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }

    /// No request holds a block.
    pub(crate) fn assert_nothing_leaked(&self) {
        self.wait_for("a pool without blocks in rows", |stats| stats.blocks_used == stats.blocks_cached);
        let stats = self.engine.stats();
        assert_eq!((stats.running, stats.waiting), (0, 0));
    }
}

/// Greedy, to the end of `max_tokens`.
pub(crate) fn request(prompt: &[u32], max_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        prompt: Prompt { tokens: prompt.to_vec() },
        sampling: Sampling::GREEDY,
        max_tokens,
        stop_tokens: Vec::new(),
        ignore_eos: false,
        logprobs: None,
        cache_salt: None,
    }
}

/// A text of so many tokens; another number is another text.
pub(crate) fn text(number: u32, len: u32) -> Vec<u32> {
    (0..len).map(|at| (number.wrapping_mul(2_654_435_761) >> 7).wrapping_add(at * at + 31 * at) % 256).collect()
}

/// All of an answer.
pub(crate) fn finish(mut generation: Generation) -> Result<(Vec<u32>, FinishReason, Usage), GenerateError> {
    let mut tokens = Vec::new();
    loop {
        match generation.blocking_next().expect("a stream ends in Done or Failed") {
            Event::Token { id, .. } => tokens.push(id),
            Event::Done { reason, usage } => return Ok((tokens, reason, usage)),
            Event::Failed(error) => return Err(error),
        }
    }
}

/// The tokens of an answer that ends well.
pub(crate) fn tokens(generation: Generation) -> Vec<u32> {
    finish(generation).unwrap().0
}
