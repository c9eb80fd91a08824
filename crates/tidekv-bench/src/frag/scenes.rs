//! The four situations of a few retained blocks.

use std::time::Duration;

use anyhow::Context;
use tidekv_core::blocks::BlockLease;
use tidekv_core::geometry::Geometry;
use tidekv_core::pages::Fence;
use tidekv_core::units::Step;
use tidekv_pool::{KvPool, PoolConfig};

use crate::prefix_cache::{EvictionOrder, PrefixCache};
use crate::random::Random;
use crate::stats::to_f64;

/// No device work ever sees these blocks.
const FENCE: Fence = Fence::Step(Step(0));

/// How long filling the pool may take.
const FILL_TIMEOUT: Duration = Duration::from_secs(30);

/// How often each retained block is replaced in the churn.
const CHURN_PASSES: usize = 4;

/// Waste of one share, in each situation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Wastes {
    pub(super) keep: u32,
    pub(super) blocks: usize,
    pub(super) scattered: f64,
    pub(super) churned: f64,
    pub(super) evicted_by_age: f64,
    pub(super) evicted_by_pages: f64,
}

/// A pool to scatter blocks in.
#[derive(Debug)]
pub(super) struct Scene {
    pool: KvPool,
}

impl Scene {
    pub(super) fn new(config: PoolConfig) -> anyhow::Result<Self> {
        Ok(Self { pool: KvPool::open(config)? })
    }

    pub(super) fn geometry(&self) -> &Geometry {
        self.pool.geometry()
    }

    pub(super) fn measure(&self, keep: u32) -> anyhow::Result<Wastes> {
        let (mut kept, mut random) = self.scatter(keep)?;
        let (blocks, scattered) = (kept.len(), self.waste(kept.len())?);
        for _ in 0..CHURN_PASSES * kept.len() {
            let choice = random.below(kept.len());
            self.pool.free(&[kept.swap_remove(choice)], FENCE)?;
            self.pool.alloc(1, &mut kept)?;
        }
        let churned = self.waste(kept.len())?;
        self.pool.free(&kept, FENCE)?;
        let [evicted_by_age, evicted_by_pages] = EvictionOrder::ALL.map(|order| self.evict_half(keep, order));
        let (evicted_by_age, evicted_by_pages) = (evicted_by_age?, evicted_by_pages?);
        Ok(Wastes { keep, blocks, scattered, churned, evicted_by_age, evicted_by_pages })
    }

    /// Fills the pool and frees all but a random share of it.
    fn scatter(&self, keep: u32) -> anyhow::Result<(Vec<BlockLease>, Random)> {
        let total = self.geometry().block_count();
        let mut leases = Vec::new();
        // The pages of the last scene may still be on their way out.
        self.pool.alloc_within(total, FILL_TIMEOUT, &mut leases).context("filling the pool: lower --pages")?;
        let mut random = Random::new();
        random.shuffle(&mut leases);
        let kept = u64::from(total) * u64::from(keep) / 100;
        let freed = leases.split_off(usize::try_from(kept)?.max(1));
        self.pool.free(&freed, FENCE)?;
        Ok((leases, random))
    }

    fn evict_half(&self, keep: u32, order: EvictionOrder) -> anyhow::Result<f64> {
        let (kept, _) = self.scatter(keep)?;
        let mut cache = PrefixCache::new(self.geometry().blocks_per_page(), order);
        for (key, &lease) in (0..).zip(&kept) {
            let _ = cache.publish(key, lease);
            cache.release(key);
        }
        let live_blocks = |pages: &[_]| self.pool.occupancy(pages);
        let evicted = cache.evict(kept.len() / 2, live_blocks);
        self.pool.free(&evicted, FENCE)?;
        let waste = self.waste(cache.cached())?;
        self.pool.free(&cache.evict(usize::MAX, live_blocks), FENCE)?;
        Ok(waste)
    }

    /// Bytes that pages hold after a trim over the bytes of `live` blocks.
    fn waste(&self, live: usize) -> anyhow::Result<f64> {
        self.pool.trim()?;
        let geometry = self.geometry();
        let pinned = self.pool.reservation().expect("memory of its own").mapped_bytes();
        let mut row_bytes = 0;
        for &buffer in geometry.shape().buffers() {
            row_bytes += geometry.shape().block_bytes(buffer)?.0 * u64::from(geometry.shape().layers);
        }
        Ok(to_f64(pinned.0) / to_f64(row_bytes * u64::try_from(live)?))
    }
}
