//! Partly used pages, sorted by how many blocks they have free.
//!
//! ```text
//!   free blocks    1     2     3     4   ...  m-1
//!                 [p7]  [  ]  [p2]  [  ] ...  [p0]      one list per count
//!                        -     p9    -
//!   bit tree       1     0     1     0   ...   1        which lists have pages; one word sums up 64
//! ```
//!
//! Best fit asks for the smallest count that is at least `n`, the fallback for the largest count. With 64
//! counts per word and 64 words per word above, both look at one or two words per level: two levels for 4,096
//! blocks per page, three for 262,144. The time depends on neither the number of pages nor on how full they are.

use crate::list::{Links, ListId};
use crate::units::PageId;

/// In-use pages that still have free blocks, by their number.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Buckets {
    links: Links,
    occupied: BitTree,
    blocks_per_page: u32,
}

impl Buckets {
    pub(super) fn new(page_count: u32, blocks_per_page: u32) -> Self {
        // A list for each count below that of an empty page. The list of count 0 stays empty: it makes a
        // count the index of its list.
        Self {
            links: Links::new(blocks_per_page, page_count),
            occupied: BitTree::new(blocks_per_page),
            blocks_per_page,
        }
    }

    /// The page that wastes least: the fewest free blocks that are still at least `wanted`.
    pub(super) fn best_fit(&self, wanted: u32) -> Option<PageId> {
        self.links.front(ListId(self.occupied.first_at_least(wanted)?))
    }

    /// The page with the most free blocks.
    pub(super) fn emptiest(&self) -> Option<PageId> {
        self.links.front(ListId(self.occupied.last()?))
    }

    /// The page had `before` blocks free and has `after` now. Full and empty pages are in no bucket.
    pub(super) fn refile(&mut self, page: PageId, before: u32, after: u32) {
        if self.is_bucket(before) {
            self.links.remove(page);
            if self.links.is_empty(ListId(before)) {
                self.occupied.remove(before);
            }
        }
        if self.is_bucket(after) {
            if self.links.is_empty(ListId(after)) {
                self.occupied.insert(after);
            }
            self.links.push_front(ListId(after), page);
        }
    }

    fn is_bucket(&self, free: u32) -> bool {
        0 < free && free < self.blocks_per_page
    }

    /// Asserts that links and bits agree, and that the buckets hold exactly the pages of `expected`, each in
    /// the bucket of its free blocks.
    pub(super) fn check_invariants(&self, expected: impl Iterator<Item = (PageId, u32)>) {
        self.links.check_invariants();
        self.occupied.check_invariants();
        let mut filed = 0;
        for free in 0..self.blocks_per_page {
            let pages = self.links.iter(ListId(free)).count();
            assert_eq!(self.occupied.contains(free), pages > 0, "bit of bucket {free}");
            filed += pages;
        }
        let mut expected_pages = 0;
        for (page, free) in expected {
            assert!(self.is_bucket(free), "page {page} with {free} free blocks belongs in no bucket");
            assert!(self.links.iter(ListId(free)).any(|other| other == page), "page {page} is not in bucket {free}");
            expected_pages += 1;
        }
        assert_eq!(filed, expected_pages, "pages in buckets");
    }
}

/// A set of small integers with constant-time search in both directions.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct BitTree {
    /// Level 0 has a bit per member; each level above a bit per non-empty word below; the last is one word.
    levels: Vec<Vec<u64>>,
}

const WORD: u32 = u64::BITS;

impl BitTree {
    /// An empty set that can hold `0..bits`.
    fn new(bits: u32) -> Self {
        let mut levels = Vec::new();
        let mut words = bits;
        loop {
            words = words.div_ceil(WORD).max(1);
            levels.push(vec![0; words as usize]);
            if words == 1 {
                return Self { levels };
            }
        }
    }

    fn insert(&mut self, member: u32) {
        let mut index = member;
        for level in &mut self.levels {
            let word = &mut level[(index / WORD) as usize];
            let was_empty = *word == 0;
            *word |= 1 << (index % WORD);
            if !was_empty {
                return; // The levels above know of this word already.
            }
            index /= WORD;
        }
    }

    fn remove(&mut self, member: u32) {
        let mut index = member;
        for level in &mut self.levels {
            let word = &mut level[(index / WORD) as usize];
            *word &= !(1 << (index % WORD));
            if *word != 0 {
                return; // Other members keep the word known above.
            }
            index /= WORD;
        }
    }

    fn contains(&self, member: u32) -> bool {
        self.levels[0][(member / WORD) as usize] & (1 << (member % WORD)) != 0
    }

    /// The smallest member that is at least `start`.
    fn first_at_least(&self, start: u32) -> Option<u32> {
        let mut index = start;
        for (height, level) in self.levels.iter().enumerate() {
            let word = level.get((index / WORD) as usize)?;
            let candidates = word & (u64::MAX << (index % WORD));
            if candidates != 0 {
                let found = index / WORD * WORD + candidates.trailing_zeros();
                return Some(self.first_below(height, found));
            }
            index = index / WORD + 1; // The rest of this word is empty: look from the next one, a level up.
        }
        None
    }

    /// The smallest member under a bit that is set at `height`.
    fn first_below(&self, height: usize, index: u32) -> u32 {
        let below = self.levels[..height].iter().rev();
        below.fold(index, |index, level| index * WORD + level[index as usize].trailing_zeros())
    }

    /// The largest member.
    fn last(&self) -> Option<u32> {
        let mut index = 0;
        for level in self.levels.iter().rev() {
            let highest = level[index as usize].checked_ilog2()?; // None at the top only: the set is empty.
            index = index * WORD + highest;
        }
        Some(index)
    }

    fn check_invariants(&self) {
        for (below, above) in self.levels.iter().zip(&self.levels[1..]) {
            for (index, &word) in below.iter().enumerate() {
                let summary = above[index / WORD as usize] & (1 << (index % WORD as usize)) != 0;
                assert_eq!(summary, word != 0, "word {index} and the bit above it");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_level_for_each_factor_of_64() {
        for (bits, levels) in [(1, 1), (64, 1), (65, 2), (4096, 2), (4097, 3), (1 << 18, 3), ((1 << 18) + 1, 4)] {
            assert_eq!(BitTree::new(bits).levels.len(), levels, "{bits} bits");
        }
    }

    #[test]
    fn search_crosses_levels() {
        let mut tree = BitTree::new(1 << 18);
        assert_eq!((tree.first_at_least(0), tree.last()), (None, None));
        for member in [5, 4_095, 4_096, 262_143] {
            tree.insert(member);
        }
        assert_eq!(tree.first_at_least(0), Some(5));
        assert_eq!(tree.first_at_least(6), Some(4_095));
        assert_eq!(tree.first_at_least(4_096), Some(4_096));
        assert_eq!(tree.first_at_least(4_097), Some(262_143));
        assert_eq!(tree.last(), Some(262_143));
        tree.remove(262_143);
        assert_eq!((tree.first_at_least(4_097), tree.last()), (None, Some(4_096)));
        assert_eq!(tree.first_at_least(u32::MAX), None);
    }

    #[test]
    fn full_and_empty_pages_are_in_no_bucket() {
        let mut buckets = Buckets::new(3, 4);
        buckets.refile(PageId(0), 4, 3);
        buckets.refile(PageId(1), 4, 1);
        assert_eq!(buckets.best_fit(1), Some(PageId(1)));
        assert_eq!(buckets.best_fit(2), Some(PageId(0)));
        assert_eq!(buckets.best_fit(4), None);
        assert_eq!(buckets.emptiest(), Some(PageId(0)));
        buckets.refile(PageId(0), 3, 4);
        buckets.refile(PageId(1), 1, 0);
        assert_eq!((buckets.best_fit(1), buckets.emptiest()), (None, None));
        buckets.check_invariants(std::iter::empty());
    }

    const BITS: &[u32] = if cfg!(miri) { &[1, 64, 65] } else { &[1, 63, 64, 65, 4_096, 4_097, 262_145] };

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 2 } else { 128 }, failure_persistence: None, ..ProptestConfig::default()
        })]

        #[test]
        fn searches_as_an_ordered_set(
            bits in prop::sample::select(BITS),
            toggles in prop::collection::vec((any::<u32>(), any::<u32>()), 1..60),
        ) {
            let mut tree = BitTree::new(bits);
            let mut model = BTreeSet::new();
            for (member, start) in toggles {
                let (member, start) = (member % bits, start % bits);
                if model.insert(member) {
                    tree.insert(member);
                } else {
                    model.remove(&member);
                    tree.remove(member);
                }
                tree.check_invariants();
                prop_assert_eq!(tree.contains(member), model.contains(&member));
                prop_assert_eq!(tree.first_at_least(start), model.range(start..).next().copied());
                prop_assert_eq!(tree.last(), model.last().copied());
            }
        }
    }
}
