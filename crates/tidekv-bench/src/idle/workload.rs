//! Requests of staggered lengths, and an engine reduced to what it does with blocks.
//!
//! ```text
//!   admit    look up the prompt's full blocks in the prefix cache, lease the rest at once      (prefill)
//!   step     one token for every running request; one block wherever the last one is full     (decode)
//!   finish   full blocks go to the prefix cache, the partly filled one is freed; then the cache is cut to its bound
//! ```

use tidekv_core::blocks::BlockLease;
use tidekv_core::pages::Fence;
use tidekv_core::units::{Bytes, Step};
use tidekv_pool::{KvPool, PoolError};

use crate::lab::BLOCK_TOKENS;
use crate::prefix_cache::{EvictionOrder, Key, PrefixCache};
use crate::progress::Progress;
use crate::random::Random;
use crate::stats::to_f64;

/// No device work ever sees these blocks.
const FENCE: Fence = Fence::Step(Step(0));

/// One request in three begins with one of a few common prefixes.
const HOT_PREFIXES: u32 = 16;
const HOT_TOKENS: u32 = 128;
const HOT_SUFFIX_TOKENS: u32 = 64;
const HOT_PERCENT: u32 = 30;
/// The others are unlike each other.
const COLD_TOKENS: (u32, u32) = (192, 1024);
/// What each of them decodes.
const DECODE_TOKENS: (u32, u32) = (16, 256);

/// How many requests there are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traffic {
    pub(super) requests: u32,
    pub(super) concurrency: u32,
}

/// A request that has been admitted.
#[derive(Debug)]
struct Running {
    id: u32,
    tokens: u32,
    end_tokens: u32,
    /// Keys of the full blocks, in order: held in the cache's books.
    keys: Vec<Key>,
    /// The block that is being filled.
    open: Option<BlockLease>,
}

/// What an engine does with blocks.
#[derive(Debug)]
pub(super) struct Engine<'a> {
    pool: &'a KvPool,
    traffic: Traffic,
    max_cached: Option<usize>,
    cache: PrefixCache,
    random: Random,
    admitted: u32,
    running: Vec<Running>,
    peak: Bytes,
    prompt_blocks: u64,
    hit_blocks: u64,
}

impl<'a> Engine<'a> {
    pub(super) fn new(pool: &'a KvPool, traffic: Traffic, max_cached: Option<usize>, order: EvictionOrder) -> Self {
        Self {
            pool,
            traffic,
            max_cached,
            cache: PrefixCache::new(pool.geometry().blocks_per_page(), order),
            random: Random::new(),
            admitted: 0,
            running: Vec::new(),
            peak: Bytes::ZERO,
            prompt_blocks: 0,
            hit_blocks: 0,
        }
    }

    /// Serves all requests to their end.
    pub(super) fn run(&mut self, progress: &Progress) -> Result<(), PoolError> {
        let concurrency = usize::try_from(self.traffic.concurrency).unwrap_or(usize::MAX);
        while self.admitted < self.traffic.requests || !self.running.is_empty() {
            while self.admitted < self.traffic.requests && self.running.len() < concurrency {
                self.admit()?;
            }
            self.step()?;
            let held = self.pool.reservation().expect("memory of its own").mapped_bytes();
            self.peak = self.peak.max(held);
            self.finish_ended(progress)?;
        }
        Ok(())
    }

    /// Blocks that the prefix cache holds and no request uses.
    pub(super) fn cached_blocks(&self) -> usize {
        self.cache.cached()
    }

    /// The most that the pool held.
    pub(super) fn peak(&self) -> Bytes {
        self.peak
    }

    /// Of all full blocks of prompts, how many were in the cache.
    pub(super) fn hit_percent(&self) -> f64 {
        100.0 * to_f64(self.hit_blocks) / to_f64(self.prompt_blocks.max(1))
    }

    /// Empties the prefix cache.
    pub(super) fn forget_all(&mut self) -> Result<(), PoolError> {
        self.evict(self.cache.cached())
    }

    fn admit(&mut self) -> Result<(), PoolError> {
        let id = self.admitted;
        self.admitted += 1;
        let hot = self.random.between(0, 99) < HOT_PERCENT;
        let prefix = self.random.between(0, HOT_PREFIXES - 1);
        let cold_tokens = self.random.between(COLD_TOKENS.0, COLD_TOKENS.1);
        let prompt = if hot { HOT_TOKENS + HOT_SUFFIX_TOKENS } else { cold_tokens };
        let end_tokens = prompt + self.random.between(DECODE_TOKENS.0, DECODE_TOKENS.1);

        let full_blocks = prompt / BLOCK_TOKENS;
        let hot_blocks = if hot { HOT_TOKENS / BLOCK_TOKENS } else { 0 };
        let key_of = |index: u32| if index < hot_blocks { hot_key(prefix, index) } else { cold_key(id, index) };
        let mut keys: Vec<Key> = Vec::new();
        // A prefix ends at its first block that is not there.
        while keys.len() < count(full_blocks) && self.cache.acquire(key_of(position(keys.len()))) {
            keys.push(key_of(position(keys.len())));
        }
        self.prompt_blocks += u64::from(full_blocks);
        self.hit_blocks += u64::try_from(keys.len()).unwrap_or(u64::MAX);

        let mut fresh = Vec::new();
        let missing = prompt.div_ceil(BLOCK_TOKENS) - position(keys.len());
        self.pool.alloc(missing, &mut fresh)?;
        let open = (!prompt.is_multiple_of(BLOCK_TOKENS)).then(|| fresh.pop()).flatten();
        for lease in fresh {
            self.publish(key_of(position(keys.len())), lease, &mut keys)?;
        }
        self.running.push(Running { id, tokens: prompt, end_tokens, keys, open });
        Ok(())
    }

    /// A block is full. Where another request filled the same one meanwhile, that one is shared.
    fn publish(&mut self, key: Key, lease: BlockLease, keys: &mut Vec<Key>) -> Result<(), PoolError> {
        if !self.cache.publish(key, lease) {
            self.cache.acquire(key);
            self.pool.free(&[lease], FENCE)?;
        }
        keys.push(key);
        Ok(())
    }

    /// One token for every running request.
    fn step(&mut self) -> Result<(), PoolError> {
        let mut running = std::mem::take(&mut self.running);
        let mut fresh = Vec::with_capacity(1);
        for request in &mut running {
            let block = match request.open.take() {
                Some(block) => block,
                None => {
                    self.pool.alloc(1, &mut fresh)?;
                    fresh.pop().expect("one block was leased")
                }
            };
            request.tokens += 1;
            if request.tokens.is_multiple_of(BLOCK_TOKENS) {
                let key = cold_key(request.id, position(request.keys.len()));
                self.publish(key, block, &mut request.keys)?;
            } else {
                request.open = Some(block);
            }
        }
        self.running = running;
        Ok(())
    }

    fn finish_ended(&mut self, progress: &Progress) -> Result<(), PoolError> {
        for request in self.running.extract_if(.., |request| request.tokens >= request.end_tokens) {
            // The end of a sequence is the least likely to be wanted again: it is the first to grow old.
            request.keys.iter().rev().for_each(|&key| self.cache.release(key));
            if let Some(open) = request.open {
                self.pool.free(&[open], FENCE)?;
            }
            progress.step();
        }
        let excess = self.max_cached.map_or(0, |most| self.cache.cached().saturating_sub(most));
        self.evict(excess)
    }

    fn evict(&mut self, blocks: usize) -> Result<(), PoolError> {
        if blocks == 0 {
            return Ok(());
        }
        let evicted = self.cache.evict(blocks, |pages| self.pool.occupancy(pages));
        self.pool.free(&evicted, FENCE)
    }
}

/// Keys of common prefixes are apart from those of single requests.
fn hot_key(prefix: u32, index: u32) -> Key {
    (1 << 63) | (u64::from(prefix) << 32) | u64::from(index)
}

fn cold_key(request: u32, index: u32) -> Key {
    (u64::from(request) << 32) | u64::from(index)
}

fn count(blocks: u32) -> usize {
    usize::try_from(blocks).unwrap_or(usize::MAX)
}

fn position(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}
