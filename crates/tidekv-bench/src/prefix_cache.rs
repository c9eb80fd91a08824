//! A stand-in for an engine's prefix cache: blocks of finished requests that stay leased because another request
//! may begin with the same tokens.
//!
//! ```text
//!    publish ──> in use (refs > 0) ──release──> cached (refs = 0) ──evict──> freed
//!                      ^                             │
//!                      └───────── acquire: a hit ────┘
//! ```
//!
//! Which cached blocks go first decides how much memory comes back, because memory comes back in whole pages:
//!
//! | order   | takes                                                                                 |
//! |---------|---------------------------------------------------------------------------------------|
//! | `Age`   | the block that was used longest ago, wherever it lies                                  |
//! | `Pages` | from pages that hold nothing but cached blocks, the one with the fewest of them first  |

use std::collections::{BTreeMap, HashMap};

use tidekv_core::blocks::BlockLease;
use tidekv_core::units::PageId;

/// What a block's tokens are, its prefix included. The benchmark makes these up.
pub type Key = u64;

/// Which cached blocks are evicted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictionOrder {
    /// Least recently used.
    Age,
    /// Whole pages, the cheapest first; least recently used where no page can be emptied.
    Pages,
}

impl EvictionOrder {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Age, Self::Pages];

    /// The name in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Age => "age",
            Self::Pages => "pages",
        }
    }
}

/// The blocks of requests, running and finished.
#[derive(Debug)]
pub struct PrefixCache {
    blocks_per_page: u32,
    order: EvictionOrder,
    blocks: HashMap<Key, Entry>,
    /// Cached blocks by age: the smallest number was released longest ago.
    by_age: BTreeMap<u64, Key>,
    /// Cached blocks of each page, oldest first.
    by_page: BTreeMap<PageId, BTreeMap<u64, Key>>,
    now: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    lease: BlockLease,
    refs: u32,
    released: u64,
}

impl PrefixCache {
    /// An empty cache for a pool with this many blocks in a page.
    pub fn new(blocks_per_page: u32, order: EvictionOrder) -> Self {
        Self {
            blocks_per_page,
            order,
            blocks: HashMap::new(),
            by_age: BTreeMap::new(),
            by_page: BTreeMap::new(),
            now: 0,
        }
    }

    /// A block that some request begins with, if it is still here; it is in use from now on.
    pub fn acquire(&mut self, key: Key) -> bool {
        let Some(entry) = self.blocks.get_mut(&key) else { return false };
        entry.refs += 1;
        if entry.refs == 1 {
            let entry = *entry;
            self.uncache(entry);
        }
        true
    }

    /// A block that a request has just filled: in use, and found by its key from now on. `false` if there is one
    /// already, and the block stays the caller's.
    #[must_use]
    pub fn publish(&mut self, key: Key, lease: BlockLease) -> bool {
        if self.blocks.contains_key(&key) {
            return false;
        }
        self.blocks.insert(key, Entry { lease, refs: 1, released: 0 });
        true
    }

    /// A request is done with a block. Without any other user it is cached.
    ///
    /// # Panics
    ///
    /// If nobody uses the block, which is a mistake in the benchmark.
    pub fn release(&mut self, key: Key) {
        let entry = self.blocks.get_mut(&key).filter(|entry| entry.refs > 0).expect("a block in use is released");
        entry.refs -= 1;
        if entry.refs == 0 {
            self.now += 1;
            entry.released = self.now;
            let page = page_of(entry.lease, self.blocks_per_page);
            self.by_age.insert(self.now, key);
            self.by_page.entry(page).or_default().insert(self.now, key);
        }
    }

    /// Blocks that nobody uses.
    pub fn cached(&self) -> usize {
        self.by_age.len()
    }

    /// Takes `count` cached blocks out, for the caller to free. `live_blocks` tells how many blocks of each of some
    /// pages are leased, by anyone.
    pub fn evict(&mut self, count: usize, live_blocks: impl Fn(&[PageId]) -> Vec<u32>) -> Vec<BlockLease> {
        let mut evicted = Vec::new();
        // Emptied pages drop out by themselves; how many blocks the others hold does not change meanwhile.
        let pages: Vec<PageId> = match self.order {
            EvictionOrder::Age => Vec::new(),
            EvictionOrder::Pages => self.by_page.keys().copied().collect(),
        };
        let live: HashMap<PageId, u32> = pages.iter().copied().zip(live_blocks(&pages)).collect();
        while evicted.len() < count && !self.by_age.is_empty() {
            let missing = count - evicted.len();
            match self.cheapest_page(&live) {
                Some(page) => {
                    let keys: Vec<Key> = self.by_page[&page].values().copied().take(missing).collect();
                    evicted.extend(keys.into_iter().filter_map(|key| self.remove(key)));
                }
                None => {
                    let oldest = self.by_age.values().next().copied();
                    evicted.extend(oldest.and_then(|key| self.remove(key)));
                }
            }
        }
        evicted
    }

    /// Of the pages that hold nothing but cached blocks, the one with the fewest; of equals the one unused longest.
    fn cheapest_page(&self, live: &HashMap<PageId, u32>) -> Option<PageId> {
        let whole = |page: &PageId, cached: usize| live.get(page).is_some_and(|&live| as_count(live) == cached);
        self.by_page
            .iter()
            .filter(|(page, cached)| whole(page, cached.len()))
            .min_by_key(|(_, cached)| (cached.len(), cached.keys().next_back().copied()))
            .map(|(&page, _)| page)
    }

    fn remove(&mut self, key: Key) -> Option<BlockLease> {
        let entry = self.blocks.remove(&key)?;
        self.uncache(entry);
        Some(entry.lease)
    }

    fn uncache(&mut self, entry: Entry) {
        self.by_age.remove(&entry.released);
        let page = page_of(entry.lease, self.blocks_per_page);
        if let Some(cached) = self.by_page.get_mut(&page) {
            cached.remove(&entry.released);
            if cached.is_empty() {
                self.by_page.remove(&page);
            }
        }
    }
}

/// The page that a leased block lies on.
pub fn page_of(lease: BlockLease, blocks_per_page: u32) -> PageId {
    PageId(lease.block.0 / blocks_per_page)
}

fn as_count(live: u32) -> usize {
    usize::try_from(live).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidekv_core::units::BlockIndex;

    const PER_PAGE: u32 = 4;

    fn lease(block: u32) -> BlockLease {
        BlockLease { block: BlockIndex(block), generation: 1 }
    }

    /// Blocks under their own numbers as keys, released in the order given.
    fn cache_of(order: EvictionOrder, blocks: &[u32]) -> PrefixCache {
        let mut cache = PrefixCache::new(PER_PAGE, order);
        for &block in blocks {
            assert!(cache.publish(block.into(), lease(block)));
            cache.release(block.into());
        }
        cache
    }

    fn evicted(cache: &mut PrefixCache, count: usize, live: &[u32]) -> Vec<u32> {
        let live_blocks = |pages: &[PageId]| pages.iter().map(|page| live[page.index()]).collect();
        cache.evict(count, live_blocks).into_iter().map(|lease| lease.block.0).collect()
    }

    #[test]
    fn by_age_the_oldest_goes_first_wherever_it_lies() {
        let mut cache = cache_of(EvictionOrder::Age, &[0, 4, 8, 1]);
        assert!(cache.acquire(4), "used again, so no longer the second oldest");
        cache.release(4);
        assert_eq!(evicted(&mut cache, 2, &[2, 1, 1]), [0, 8]);
        assert_eq!((cache.cached(), cache.acquire(0)), (2, false));
    }

    #[test]
    fn by_pages_the_cheapest_page_goes_whole() {
        let mut cache = cache_of(EvictionOrder::Pages, &[0, 1, 2, 4, 5, 8]);
        // Page 2 has one cached block, and another one that is in use: emptying it is impossible.
        assert_eq!(evicted(&mut cache, 2, &[3, 2, 2]), [4, 5]);
        // Then page 0, oldest block first; and where no page can be emptied, the oldest block.
        assert_eq!(evicted(&mut cache, 4, &[3, 0, 2]), [0, 1, 2, 8]);
        assert_eq!(cache.cached(), 0);
    }

    #[test]
    fn a_block_in_use_is_not_cached() {
        let mut cache = cache_of(EvictionOrder::Age, &[0]);
        assert!(cache.acquire(0) && cache.acquire(0));
        cache.release(0);
        assert_eq!(cache.cached(), 0);
        cache.release(0);
        assert_eq!(cache.cached(), 1);
        assert!(!cache.publish(0, lease(1)), "the key is taken");
    }
}
