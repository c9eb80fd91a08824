//! Blocks between the pool, the rows of the batch and the cache of prefixes.
//!
//! ```text
//!             alloc ─────> ring ──step──> a row's own ──share──> shared, known to the cache
//!   pool  <── free ──┬──────┘                 │                        │ last row left
//!             (kv)   └─────────── leave ──────┘       evict <── idle in the cache
//! ```
//!
//! A block is in exactly one of these places; the tests count them after every operation. Memory is short in two ways, and
//! both end here: the pool has nothing more to give ([`BlocksError::Short`]), or asks for some back
//! ([`Blocks::owed`]).

use std::time::Duration;

use tidekv_batch::{BatchError, BlockTables, IdRun, LeaseError, SeqId};
use tidekv_core::units::{Bytes, KernelId};
use tidekv_pool::{PoolError, ReclaimRequest};

use super::prefix::{PrefixCache, PrefixName};
use super::sequence::Sequence;
use crate::compute::{KvStore, StepTables};

/// Why blocks could not be had or moved.
#[derive(Debug, thiserror::Error)]
pub(super) enum BlocksError {
    /// The pool is exhausted and nothing cached is left: somebody must make room.
    #[error("{missing} blocks are missing")]
    Short {
        /// How many.
        missing: u32,
    },
    /// The pool failed for another reason.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The batch's tables refused: a bug of the engine.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// The same, for ids.
    #[error(transparent)]
    Lease(#[from] LeaseError),
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Blocks {
    kv: KvStore,
    tables: StepTables,
    cache: PrefixCache,
    /// Idle blocks that the cache may keep; `None` for as many as memory allows, 0 for no cache.
    max_cached: Option<u32>,
    /// For ids on their way; empty between calls.
    moved: Vec<KernelId>,
}

impl Blocks {
    pub(super) fn new(kv: KvStore, tables: StepTables, max_cached_tokens: Option<u64>) -> Self {
        let block_tokens = u64::from(tables.view().shape().config().block_tokens);
        // At least one block, unless nothing shall be kept at all: as kvcached reads it.
        let blocks = |tokens: u64| if tokens == 0 { 0 } else { (tokens / block_tokens).max(1) };
        let max_cached = max_cached_tokens.map(|tokens| u32::try_from(blocks(tokens)).unwrap_or(u32::MAX));
        Self { kv, tables, cache: PrefixCache::default(), max_cached, moved: Vec::new() }
    }

    pub(super) fn kv(&self) -> &KvStore {
        &self.kv
    }

    pub(super) fn tables(&self) -> &BlockTables {
        self.tables.view()
    }

    /// The memory, to compute in, beside the tables that say where.
    pub(super) fn kv_and_tables(&mut self) -> (&mut KvStore, &mut StepTables) {
        (&mut self.kv, &mut self.tables)
    }

    /// Blocks that only the cache holds.
    pub(super) fn cached(&self) -> u32 {
        self.cache.idle_blocks()
    }

    /// Blocks that no request needs: cached ones, and those that wait in the ring.
    pub(super) fn kept(&self) -> u32 {
        self.cached().saturating_add(self.tables().free_blocks())
    }

    /// Blocks that rows hold or that wait in the ring.
    pub(super) fn in_rows(&self) -> u32 {
        self.kv.held_blocks() - self.cached()
    }

    /// Blocks that could be had without anybody making room.
    pub(super) fn within_reach(&self) -> u32 {
        self.tables().free_blocks().saturating_add(self.cached()).saturating_add(self.kv.available())
    }

    /// Lets neighbours know that `needed` blocks will be wanted soon, as far as they are not here.
    pub(super) fn ask(&self, needed: u32) -> Result<(), PoolError> {
        let here = self.tables().free_blocks().saturating_add(self.cached());
        self.kv.ask(needed.saturating_sub(here))
    }

    /// Fills the ring up to `needed` blocks: from the pool as far as that goes, then from the cache. Waits so long for
    /// neighbours.
    pub(super) fn reserve(&mut self, needed: u32, wait: Duration) -> Result<(), BlocksError> {
        let missing = |blocks: &Self| needed.saturating_sub(blocks.tables().free_blocks());
        // Less than the whole is taken too: where each of several pools may have one page and all ask for two, none would
        // have any.
        let part = self.kv.available();
        if part > 0 && part < missing(self) {
            self.take(part, Duration::ZERO)?;
        }
        if self.take(missing(self), Duration::ZERO)? {
            return Ok(());
        }
        // Cached blocks change hands without seeing the pool; what is still missing may be there by now.
        self.cache.evict(missing(self), &mut self.moved);
        self.lend()?;
        let missing = missing(self);
        if self.take(missing, wait)? { Ok(()) } else { Err(BlocksError::Short { missing }) }
    }

    /// So many blocks of the pool go into the ring, all or none. Says whether the pool had them.
    fn take(&mut self, count: u32, wait: Duration) -> Result<bool, BlocksError> {
        if count == 0 {
            return Ok(true);
        }
        match self.kv.alloc(count, wait, &mut self.moved) {
            Ok(()) => self.lend().map(|()| true),
            Err(error) if is_shortage(&error) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Gives the ids in `moved` to the ring.
    fn lend(&mut self) -> Result<(), BlocksError> {
        let runs: Vec<IdRun> = self.moved.drain(..).map(|first| IdRun { first, count: 1 }).collect();
        Ok(self.tables.lend(&runs)?)
    }

    /// A row for `seq`, with what the cache knows of its text. Says how many tokens that is.
    pub(super) fn admit(&mut self, id: SeqId, seq: &mut Sequence) -> Result<u32, BlocksError> {
        let block_tokens = self.kv.block_tokens();
        // One token at least is computed: somebody must say what comes next.
        let most = (seq.tokens.len() - 1) / block_tokens;
        let (found, name) = match self.max_cached {
            Some(0) => (Vec::new(), PrefixName::default()),
            _ => self.cache.find(seq.cache_salt(), &seq.tokens, block_tokens, most),
        };
        let blocks = u32::try_from(found.len()).unwrap_or(u32::MAX);
        let tokens = blocks * self.tables().shape().config().block_tokens;
        self.tables.admit(id, tokens, &found)?;
        self.cache.make_busy(&found);
        seq.computed = tokens;
        seq.named = blocks;
        seq.name = name;
        Ok(tokens)
    }

    /// How many blocks of a text the cache has.
    pub(super) fn known(&self, seq: &Sequence) -> u32 {
        let block_tokens = self.kv.block_tokens();
        let most = (seq.tokens.len() - 1) / block_tokens;
        let known = match self.max_cached {
            Some(0) => 0,
            _ => self.cache.find(seq.cache_salt(), &seq.tokens, block_tokens, most).0.len(),
        };
        u32::try_from(known).unwrap_or(u32::MAX)
    }

    /// Makes the full blocks that `seq` computed known to others.
    pub(super) fn publish(&mut self, id: SeqId, seq: &mut Sequence) -> Result<(), BlocksError> {
        let block_tokens = self.kv.block_tokens();
        let full = seq.computed as usize / block_tokens;
        if self.max_cached == Some(0) || full <= seq.named as usize {
            return Ok(());
        }
        let mut ids = Vec::with_capacity(full);
        self.tables.share(id, u32::try_from(full).unwrap_or(u32::MAX), &mut ids)?;
        let blocks = seq.tokens.chunks_exact(block_tokens).zip(ids).skip(seq.named as usize);
        for (tokens, block) in blocks {
            // Where another block has this text already, ours stays unknown and is free when the row leaves.
            self.cache.insert(seq.name, tokens, seq.named, block);
            seq.name = self.cache.name(seq.name, tokens);
            seq.named += 1;
        }
        Ok(())
    }

    /// The row of `seq` is gone: what the cache knows stays there as long as its bound allows, the rest is free.
    pub(super) fn leave(&mut self, id: SeqId) -> Result<(), BlocksError> {
        let mut out = Vec::new();
        self.tables.remove(id, &mut out)?;
        self.cache.tick();
        out.retain(|&id| !self.cache.make_idle(id));
        let excess = self.max_cached.map_or(0, |most| self.cached().saturating_sub(most));
        if excess > 0 {
            self.evict_excess(excess, &mut out);
        }
        self.kv.free(&out)?;
        Ok(())
    }

    /// Whole pages first, then the longest unused.
    fn evict_excess(&mut self, excess: u32, out: &mut Vec<KernelId>) {
        let before = out.len();
        let per_page = self.kv.blocks_per_page();
        let kv = &self.kv;
        self.cache.evict_pages(excess / per_page, page_of(kv), |pages| kv.occupancy(pages), out);
        let gone = u32::try_from(out.len() - before).unwrap_or(excess);
        self.cache.evict(excess.saturating_sub(gone), out);
    }

    /// What the pool asks for.
    pub(super) fn owed(&self) -> ReclaimRequest {
        self.kv.reclaim_requested()
    }

    /// Frees cached blocks because the pool owes `pages` pages: those that empty pages, and where they do not suffice
    /// all, since rows that make room next would otherwise leave pages that cached blocks pin.
    pub(super) fn give_back(&mut self, pages: u32) -> Result<(), BlocksError> {
        let mut out = Vec::new();
        self.tables.take_back(u32::MAX, &mut out);
        let kv = &self.kv;
        let emptied = self.cache.evict_pages(pages, page_of(kv), |pages| kv.occupancy(pages), &mut out);
        if emptied < pages {
            self.cache.evict(u32::MAX, &mut out);
        }
        Ok(self.kv.free(&out)?)
    }

    /// Frees everything that no row holds.
    pub(super) fn clear(&mut self) -> Result<(), BlocksError> {
        let mut out = Vec::new();
        self.tables.take_back(u32::MAX, &mut out);
        self.cache.evict(u32::MAX, &mut out);
        Ok(self.kv.free(&out)?)
    }

    /// Gives what waits in the ring back to the pool.
    pub(super) fn return_spare(&mut self) -> Result<(), BlocksError> {
        let mut out = Vec::new();
        self.tables.take_back(u32::MAX, &mut out);
        Ok(self.kv.free(&out)?)
    }

    /// Gives idle pages back to the device.
    pub(super) fn trim(&self) -> Result<(), PoolError> {
        self.kv.trim().map(|_| ())
    }

    /// Maps all memory that there is, as engines without an elastic pool do. Waits so long for neighbours.
    pub(super) fn map_everything(&mut self, wait: Duration) -> Result<(), PoolError> {
        let mut ids = Vec::new();
        let all = self.kv.block_count() - self.kv.held_blocks();
        self.kv.alloc(all, wait, &mut ids)?;
        self.kv.free(&ids)
    }

    /// Has the device keep `bytes` free for something else of ours than blocks: neighbours give them back as they would for blocks, and
    /// get nothing of it until [`KvStore::set_floor`] says otherwise. Says what the floor was.
    pub(super) fn make_room(&mut self, bytes: Bytes, wait: Duration) -> Result<Bytes, PoolError> {
        let floor = self.kv.set_floor(bytes)?;
        let pages = bytes.0.div_ceil(self.kv.page_bytes().0);
        let blocks = u32::try_from(pages * u64::from(self.kv.blocks_per_page())).unwrap_or(u32::MAX);
        let mut ids = Vec::new();
        let taken = self.kv.alloc(blocks.min(self.kv.block_count() - self.kv.held_blocks()), wait, &mut ids);
        let room = taken.and_then(|()| self.kv.free(&ids)).and_then(|()| self.kv.trim());
        match room {
            Ok(_) => Ok(floor),
            Err(error) => self.kv.set_floor(floor).and(Err(error)),
        }
    }

    /// Panics unless every held block is in one place. Slow: for tests.
    #[cfg(test)]
    pub(super) fn check_invariants(&self) {
        self.tables().check_invariants();
        self.cache.check_invariants();
        let counts = self.tables().counts();
        assert_eq!(counts.free + counts.exclusive + counts.shared + self.cached(), self.kv.held_blocks());
    }
}

fn page_of(kv: &KvStore) -> impl Fn(KernelId) -> tidekv_core::units::PageId {
    |id| kv.page_of(id).expect("cached blocks are blocks of the pool")
}

/// Whether making room can help.
fn is_shortage(error: &PoolError) -> bool {
    matches!(error, PoolError::Exhausted { .. }) || error.is_transient()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use proptest::prelude::*;
    use tidekv_batch::BatchConfig;
    use tidekv_core::geometry::{Capacity, ChunkChoice, GeometryConfig, KvShape, Layout};
    use tidekv_mem::host::{HostBackend, HostOptions};
    use tidekv_pool::{PoolConfig, ReservePolicy};
    use tidekv_shm::{PoolName, RuntimeDir};

    use super::*;
    use crate::handle::{GenerateRequest, Generation, Prompt, Sampling};

    const ROWS: u32 = 6;

    /// What a page takes: see [`blocks`].
    const PAGE: Bytes = Bytes::kib(8);

    fn blocks(dir: &tempfile::TempDir, max_cached_tokens: Option<u64>) -> Blocks {
        blocks_within(dir, Bytes::mib(1), max_cached_tokens)
    }

    /// 8 pages of 4 blocks of 4 tokens, as far as the budget goes: one layer, one head of 64 floats.
    fn blocks_within(dir: &tempfile::TempDir, budget: Bytes, max_cached_tokens: Option<u64>) -> Blocks {
        let geometry = GeometryConfig {
            shape: KvShape::heads(1, 1, 64, 4, 4),
            layout: Layout::Slab,
            granularity: Bytes::kib(4),
            chunk: ChunkChoice::Bytes(Bytes::kib(4)),
            capacity: Capacity::Pages(8),
        };
        let backend = Arc::new(HostBackend::open(HostOptions::default()).unwrap());
        let mut config = PoolConfig::new(PoolName::new("blocks").unwrap(), backend, geometry);
        config.runtime_dir = RuntimeDir::at(dir.path());
        config.budget = Some(budget);
        // Nothing is mapped ahead: a page is held because somebody asked for it.
        config.reserve = ReservePolicy::Fixed { min: 0, max: 0 };
        let kv = KvStore::open(config).unwrap();
        let batch = BatchConfig {
            block_tokens: 4,
            max_rows: ROWS,
            max_row_tokens: 64,
            max_step_tokens: 64,
            max_ids: kv.block_count(),
        };
        Blocks::new(kv, StepTables::host(batch).unwrap(), max_cached_tokens)
    }

    fn sequence(number: u64, tokens: Vec<u32>) -> Sequence {
        let request = GenerateRequest {
            prompt: Prompt { tokens },
            sampling: Sampling::GREEDY,
            max_tokens: 1,
            stop_tokens: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            cache_salt: None,
        };
        Sequence::new(SeqId(number), request, 0, Generation::channel().0)
    }

    /// A text that fills so many blocks, all of them idle in the cache then.
    fn cache_text(blocks: &mut Blocks, number: u64, count: u32) {
        let letter = u32::try_from(number).unwrap();
        let mut seq = sequence(number, vec![letter; 4 * count as usize]);
        blocks.admit(seq.id, &mut seq).unwrap();
        let (id, tokens) = (seq.id, seq.remaining());
        let mut rows = BTreeMap::from([(id, seq)]);
        step(blocks, &mut rows, tokens);
        blocks.leave(id).unwrap();
    }

    #[test]
    fn what_the_pool_still_has_is_taken_before_anything_is_evicted() {
        let dir = tempfile::tempdir().unwrap();
        let mut blocks = blocks(&dir, None);
        cache_text(&mut blocks, 1, 11);
        cache_text(&mut blocks, 2, 11);
        assert_eq!(blocks.cached(), 22);
        blocks.reserve(12, Duration::ZERO).unwrap();
        assert_eq!((blocks.cached(), blocks.tables().free_blocks()), (20, 12), "ten were free, two had to go");
        blocks.check_invariants();
    }

    /// Three pages each, and two are free: nobody may have more than four, and everybody asks for three more.
    #[test]
    fn neighbours_who_all_want_more_than_they_may_have_leave_nothing_idle() {
        let dir = tempfile::tempdir().unwrap();
        let mut servers = [1, 2].map(|number| {
            let mut blocks = blocks_within(&dir, Bytes(8 * PAGE.0), None);
            cache_text(&mut blocks, number, 12);
            blocks
        });
        for blocks in servers.iter_mut().rev() {
            blocks.reserve(12, Duration::ZERO).unwrap();
            blocks.check_invariants();
        }
        let held: u32 = servers.iter().map(|blocks| blocks.kv().held_blocks()).sum();
        assert_eq!(held, 8 * 4);
    }

    #[derive(Clone, Debug)]
    enum Op {
        /// A text comes: full blocks of zeros and ones, so that many begin alike.
        Admit(Vec<bool>, u32),
        /// Every row computes so many tokens, as far as it has them; who is youngest makes room.
        Step(u32),
        Leave(usize),
        GiveBack(u32),
        Spare,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => (prop::collection::vec(any::<bool>(), 0..8), 1u32..8).prop_map(|(text, rest)| Op::Admit(text, rest)),
            6 => (1u32..10).prop_map(Op::Step),
            2 => any::<usize>().prop_map(Op::Leave),
            1 => (1u32..4).prop_map(Op::GiveBack),
            1 => Just(Op::Spare),
        ]
    }

    fn step(blocks: &mut Blocks, rows: &mut BTreeMap<SeqId, Sequence>, tokens: u32) {
        let shape = *blocks.tables().shape();
        loop {
            let query = |seq: &Sequence| seq.remaining().min(tokens);
            let more = |seq: &Sequence| shape.blocks_for(seq.computed + query(seq)) - shape.blocks_for(seq.computed);
            match blocks.reserve(rows.values().map(more).sum(), Duration::ZERO) {
                Ok(()) => {
                    let order = blocks.tables().sequences().to_vec();
                    let lengths: Vec<u32> = order.iter().map(|id| query(&rows[id])).collect();
                    blocks.tables.step(&lengths).unwrap();
                    for (id, query) in order.into_iter().zip(lengths) {
                        let seq = rows.get_mut(&id).unwrap();
                        seq.computed += query;
                        blocks.publish(id, seq).unwrap();
                    }
                    return;
                }
                Err(BlocksError::Short { .. }) => {
                    let (id, _) = rows.pop_last().expect("an empty batch needs no blocks");
                    assert!(!rows.is_empty(), "one text of 35 tokens always fits 128");
                    blocks.leave(id).unwrap();
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

        /// Whatever happens, every block that the pool leased is in one place, and in the end none is.
        #[test]
        fn no_block_is_lost_or_held_twice(
            ops in prop::collection::vec(op(), 1..60),
            max_cached in prop_oneof![Just(None), Just(Some(0)), Just(Some(24))],
        ) {
            let dir = tempfile::tempdir().unwrap();
            let mut blocks = blocks(&dir, max_cached);
            let mut rows = BTreeMap::new();
            for (number, op) in (0..).zip(ops) {
                match op {
                    Op::Admit(text, rest) if blocks.tables().batch() < ROWS => {
                        let full = text.iter().flat_map(|&bit| [u32::from(bit); 4]);
                        let mut seq = sequence(number, full.chain(2..2 + rest).collect());
                        let known = blocks.known(&seq);
                        prop_assert_eq!(blocks.admit(seq.id, &mut seq).unwrap(), known * 4);
                        prop_assert!(seq.remaining() > 0);
                        rows.insert(seq.id, seq);
                    }
                    Op::Step(tokens) if !rows.is_empty() => step(&mut blocks, &mut rows, tokens),
                    Op::Leave(which) if !rows.is_empty() => {
                        let id = *rows.keys().nth(which % rows.len()).unwrap();
                        rows.remove(&id);
                        blocks.leave(id).unwrap();
                    }
                    Op::GiveBack(pages) => blocks.give_back(pages).unwrap(),
                    Op::Spare => blocks.return_spare().unwrap(),
                    _ => {}
                }
                blocks.check_invariants();
                prop_assert_eq!(blocks.kv().gauge().snapshot().allocated_blocks, blocks.kv().held_blocks());
                prop_assert!(max_cached.is_none_or(|most| u64::from(blocks.cached()) * 4 <= most));
            }
            for id in rows.into_keys() {
                blocks.leave(id).unwrap();
            }
            blocks.clear().unwrap();
            prop_assert_eq!(blocks.kv().gauge().snapshot().allocated_blocks, 0);
        }
    }
}
