//! A pool in the middle of its life, and the two loops that are timed on it.
//!
//! The loops are the same for [`KvPool`] and for the bare allocator inside it, so that the difference between the two
//! is what the pool adds: its lock, its counters, its error type.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use tidekv_core::blocks::{BlockAllocator, BlockLease};
use tidekv_core::pages::Fence;
use tidekv_core::units::Step;
use tidekv_pool::KvPool;

use super::BATCH;
use crate::random::Random;
use crate::stats::Samples;

/// Every free is of work that the same step did. Nothing is unmapped here, so its number does not matter.
const FENCE: Fence = Fence::Step(Step(1));

/// Batches run and thrown away at the start of each round: the other pools had the caches before.
const WARM_UP: u32 = 4;

/// How long filling a pool may take.
const FILL_TIMEOUT: Duration = Duration::from_secs(60);

/// Every request is replaced this often before anything is timed. Fewer, and the requests still lie as the
/// set-up scattered them: figures would depend on how long the run is.
const SETTLING_PASSES: usize = 16;

/// Something that leases and frees blocks.
pub(super) trait Blocks {
    /// Leases all blocks there are.
    fn lease_all(&mut self) -> anyhow::Result<Vec<BlockLease>>;

    /// Leases `count` blocks, all or none.
    fn lease(&mut self, count: u32, out: &mut Vec<BlockLease>) -> anyhow::Result<()>;

    /// Frees leased blocks.
    fn give_back(&mut self, leases: &[BlockLease]) -> anyhow::Result<()>;
}

impl Blocks for BlockAllocator {
    fn lease_all(&mut self) -> anyhow::Result<Vec<BlockLease>> {
        let mut leases = Vec::new();
        self.alloc_mapped(self.total_blocks(), &mut leases)?;
        Ok(leases)
    }

    #[inline]
    fn lease(&mut self, count: u32, out: &mut Vec<BlockLease>) -> anyhow::Result<()> {
        Ok(self.alloc_mapped(count, out)?)
    }

    #[inline]
    fn give_back(&mut self, leases: &[BlockLease]) -> anyhow::Result<()> {
        self.free(leases, FENCE)?;
        Ok(())
    }
}

impl Blocks for KvPool {
    fn lease_all(&mut self) -> anyhow::Result<Vec<BlockLease>> {
        let mut leases = Vec::new();
        // The pool's own thread may have a page in its hands, for the reserve.
        let filled = self.alloc_within(self.geometry().block_count(), FILL_TIMEOUT, &mut leases);
        filled.context("filling the pool: lower --blocks")?;
        Ok(leases)
    }

    #[inline]
    fn lease(&mut self, count: u32, out: &mut Vec<BlockLease>) -> anyhow::Result<()> {
        Ok(self.alloc(count, out)?)
    }

    #[inline]
    fn give_back(&mut self, leases: &[BlockLease]) -> anyhow::Result<()> {
        Ok(self.free(leases, FENCE)?)
    }
}

/// The bare allocator, with all its pages mapped.
pub(super) fn bare_allocator(blocks: u32, blocks_per_page: u32) -> anyhow::Result<BlockAllocator> {
    let mut allocator = BlockAllocator::new(blocks.div_ceil(blocks_per_page), blocks_per_page)?;
    let claims = allocator.claim_pages(allocator.pages().page_count())?;
    allocator.pages_mapped(&claims)?;
    Ok(allocator)
}

/// A pool of which a share is leased, all pages mapped.
#[derive(Debug)]
pub(super) struct Pool<B> {
    pub(super) blocks: B,
    k: u32,
    requests: Vec<Vec<BlockLease>>,
    random: Random,
}

impl<B: Blocks> Pool<B> {
    /// A pool in which the same share of *every* page is leased, at random places. So an allocation meets the
    /// same pages in a pool of any size, and nothing but the size can make a difference.
    pub(super) fn scattered(mut blocks: B, blocks_per_page: u32, occupancy: f64, k: u32) -> anyhow::Result<Self> {
        let mut leases = blocks.lease_all()?;
        let total = leases.len();
        leases.sort_unstable_by_key(|lease| lease.block);

        let mut random = Random::new();
        let (mut kept, mut freed) = (Vec::new(), Vec::new());
        for page in leases.chunks_mut(usize::try_from(blocks_per_page)?) {
            random.shuffle(page);
            // Of the blocks so far, so that a share of a page that is no whole number comes out right over all.
            let keep = share_of(kept.len() + freed.len() + page.len(), occupancy) - kept.len();
            let (keep, free) = page.split_at(keep);
            kept.extend_from_slice(keep);
            freed.extend_from_slice(free);
        }
        ensure!(
            freed.len() >= usize::try_from(k)?,
            "a pool of {total} blocks at occupancy {occupancy} has {} free, and --k is {k}: \
             give a larger pool, a lower occupancy or a smaller k",
            freed.len()
        );
        random.shuffle(&mut freed);
        blocks.give_back(&freed)?;
        random.shuffle(&mut kept);
        // What is left over of the last request stays leased and is never replaced.
        let requests = kept.chunks_exact(usize::try_from(k)?).map(<[BlockLease]>::to_vec).collect();
        Ok(Self { blocks, k, requests, random })
    }

    /// The same pool after it has served for a while: every request lies as the allocator places it.
    pub(super) fn settled(mut self) -> anyhow::Result<Self> {
        for _ in 0..SETTLING_PASSES * self.requests.len() {
            let choice = self.random.below(self.requests.len());
            let request = &mut self.requests[choice];
            self.blocks.give_back(request)?;
            request.clear();
            self.blocks.lease(self.k, request)?;
        }
        Ok(self)
    }

    /// Times batches of "lease k, free them".
    pub(super) fn alloc_free(&mut self, samples: u32, times: &mut Samples) -> anyhow::Result<()> {
        let mut leases = Vec::with_capacity(usize::try_from(self.k)?);
        for sample in 0..samples + WARM_UP {
            let start = Instant::now();
            for _ in 0..BATCH {
                self.blocks.lease(self.k, &mut leases)?;
                self.blocks.give_back(black_box(&leases))?;
                leases.clear();
            }
            let time = start.elapsed();
            if sample >= WARM_UP {
                times.push_duration(time);
            }
        }
        Ok(())
    }

    /// Times batches of "free a random request, lease k for it". Without requests there is nothing to replace.
    pub(super) fn replace(&mut self, samples: u32, times: &mut Samples) -> anyhow::Result<()> {
        if self.requests.is_empty() {
            return Ok(());
        }
        let mut choices = Vec::with_capacity(usize::try_from(BATCH)?);
        for sample in 0..samples + WARM_UP {
            // Chosen before the clock starts, so that only the allocator is timed.
            choices.clear();
            choices.extend((0..BATCH).map(|_| self.random.below(self.requests.len())));
            let start = Instant::now();
            for &choice in &choices {
                let request = &mut self.requests[choice];
                self.blocks.give_back(request)?;
                request.clear();
                self.blocks.lease(self.k, black_box(request))?;
            }
            let time = start.elapsed();
            if sample >= WARM_UP {
                times.push_duration(time);
            }
        }
        Ok(())
    }
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "counts are below 2^27 and the share is from 0 to 1: exact, in range and not negative"
)]
fn share_of(count: usize, share: f64) -> usize {
    (count as f64 * share).round() as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidekv_core::units::PageId;

    fn scattered(blocks: u32, blocks_per_page: u32, occupancy: f64, k: u32) -> anyhow::Result<Pool<BlockAllocator>> {
        Pool::scattered(bare_allocator(blocks, blocks_per_page)?, blocks_per_page, occupancy, k)
    }

    fn leased_on(pool: &Pool<BlockAllocator>, page: u32) -> u32 {
        pool.blocks.live_blocks(PageId(page))
    }

    #[test]
    fn every_page_is_as_full_as_asked() {
        let pool = scattered(1000, 16, 0.5, 16).unwrap();
        assert_eq!(pool.blocks.total_blocks(), 1008, "rounded up to whole pages");
        assert!((0..63).all(|page| leased_on(&pool, page) == 8));
        let uneven = scattered(1600, 16, 0.4, 16).unwrap();
        assert!((0..100).all(|page| (6..=7).contains(&leased_on(&uneven, page))));
        assert_eq!(uneven.blocks.counts().leased, 640);
    }

    #[test]
    fn the_loops_leave_the_pool_as_full_as_it_was() {
        let mut pool = scattered(1000, 16, 0.5, 16).unwrap().settled().unwrap();
        let mut times = Samples::new();
        pool.alloc_free(3, &mut times).unwrap();
        pool.replace(5, &mut times).unwrap();
        assert_eq!(times.len(), 8, "the warm-up is not recorded");
        assert_eq!(pool.blocks.counts().leased, 504);
        pool.blocks.check_invariants();
    }

    #[test]
    fn an_empty_pool_has_nothing_to_replace() {
        let mut pool = scattered(64, 16, 0.0, 4).unwrap().settled().unwrap();
        let mut times = Samples::new();
        pool.replace(5, &mut times).unwrap();
        assert!(times.is_empty());
    }

    #[test]
    fn a_pool_too_full_for_k_is_an_error_that_says_what_to_change() {
        let error = scattered(100, 10, 0.9, 16).unwrap_err().to_string();
        assert!(error.contains("has 10 free") && error.contains("--k is 16"), "{error}");
    }
}
