//! Which blocks hold the beginning of which text: prompts that begin alike are computed once.
//!
//! ```text
//!   tokens   [ 16 tokens ][ 16 tokens ][ 16 tokens ][ 5 ]          only full blocks have a name
//!   name        h1 = H(h0, t)  h2 = H(h1, t)  h3 = H(h2, t)        a name stands for the whole text up to it
//!   block       17             4              92
//!
//!   busy   some row of the batch reads it          idle   nobody does: it may be evicted
//! ```
//!
//! h0 is 0, or the hash of a request's salt: texts with different salts have no name in common.
//!
//! Names are hashes with a key of their own for each engine, so that nobody can look for prompts that share one by
//! mistake, and the tokens of the last block are compared as well.
//!
//! Memory is given back by the page, so eviction looks at pages where that is what is wanted: first those that hold
//! nothing but idle blocks, the longest unused first; then single blocks, the longest unused first and of one text
//! the last one first, because a beginning is of use without what follows and not the other way round.
//!
//! Pure bookkeeping: it decides, [`Blocks`](super::blocks::Blocks) acts.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};

use tidekv_core::units::{KernelId, PageId};

/// The text up to and including one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(super) struct PrefixName(u64);

#[derive(Debug)]
struct Entry {
    id: KernelId,
    parent: PrefixName,
    tokens: Box<[u32]>,
    /// Blocks before this one.
    depth: u32,
    /// When it became idle; `None` while it is busy.
    idle_since: Option<u64>,
}

/// Order of eviction: the longest idle first, of those the deepest.
type Age = (u64, std::cmp::Reverse<u32>, KernelId);

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct PrefixCache {
    keys: RandomState,
    entries: HashMap<PrefixName, Entry>,
    names: HashMap<KernelId, PrefixName>,
    idle: BTreeSet<Age>,
    clock: u64,
}

impl PrefixCache {
    /// Blocks that nobody reads.
    pub(super) fn idle_blocks(&self) -> u32 {
        u32::try_from(self.idle.len()).unwrap_or(u32::MAX)
    }

    /// The name of `parent`'s text with one more block of `tokens`.
    pub(super) fn name(&self, parent: PrefixName, tokens: &[u32]) -> PrefixName {
        PrefixName(self.keys.hash_one((parent.0, tokens)))
    }

    /// The name of no text at all, where texts with this salt begin.
    fn root(&self, salt: Option<&str>) -> PrefixName {
        salt.map_or_else(PrefixName::default, |salt| PrefixName(self.keys.hash_one(salt)))
    }

    /// The blocks of the longest known beginning of `tokens`, at most `most` of them, and its name.
    pub(super) fn find(
        &self,
        salt: Option<&str>,
        tokens: &[u32],
        block_tokens: usize,
        most: usize,
    ) -> (Vec<KernelId>, PrefixName) {
        let (mut found, mut text) = (Vec::new(), self.root(salt));
        for block in tokens.chunks_exact(block_tokens).take(most) {
            let name = self.name(text, block);
            match self.entries.get(&name) {
                Some(entry) if entry.parent == text && *entry.tokens == *block => found.push(entry.id),
                _ => break,
            }
            text = name;
        }
        (found, text)
    }

    /// A row reads these blocks from now on.
    pub(super) fn make_busy(&mut self, ids: &[KernelId]) {
        for id in ids {
            let entry = self.names.get(id).and_then(|name| self.entries.get_mut(name));
            let entry = entry.expect("only blocks that were found are read");
            if let Some(since) = entry.idle_since.take() {
                self.idle.remove(&(since, std::cmp::Reverse(entry.depth), *id));
            }
        }
    }

    /// A row computed `id`, which holds `tokens` behind `parent`'s text of `depth` blocks. Says whether it is known from
    /// now on: another block may hold the same text already.
    pub(super) fn insert(&mut self, parent: PrefixName, tokens: &[u32], depth: u32, id: KernelId) -> bool {
        let name = self.name(parent, tokens);
        if self.entries.contains_key(&name) {
            return false;
        }
        self.entries.insert(name, Entry { id, parent, tokens: tokens.into(), depth, idle_since: None });
        let had = self.names.insert(id, name);
        debug_assert_eq!(had, None, "a block holds one text");
        true
    }

    /// The last row that read `id` left. `false` if it is not known here: then it is free.
    pub(super) fn make_idle(&mut self, id: KernelId) -> bool {
        let Some(entry) = self.names.get(&id).and_then(|name| self.entries.get_mut(name)) else { return false };
        debug_assert_eq!(entry.idle_since, None, "a block becomes idle once");
        entry.idle_since = Some(self.clock);
        self.idle.insert((self.clock, std::cmp::Reverse(entry.depth), id));
        true
    }

    /// What becomes idle from now on is younger than what did before.
    pub(super) fn tick(&mut self) {
        self.clock += 1;
    }

    /// Forgets up to `count` idle blocks, the longest unused first, and appends them to `out`.
    pub(super) fn evict(&mut self, count: u32, out: &mut Vec<KernelId>) {
        for _ in 0..count {
            let Some(&(_, _, id)) = self.idle.first() else { return };
            self.forget(id);
            out.push(id);
        }
    }

    /// Forgets idle blocks so that up to `pages` pages become empty, and appends them to `out`. Only pages count that
    /// hold nothing but idle blocks: `occupancy` says how many blocks of each page are in use by anybody. Says how many
    /// pages that were.
    pub(super) fn evict_pages(
        &mut self,
        pages: u32,
        page_of: impl Fn(KernelId) -> PageId,
        occupancy: impl FnOnce(&[PageId]) -> Vec<u32>,
        out: &mut Vec<KernelId>,
    ) -> u32 {
        let mut by_page: HashMap<PageId, (u64, Vec<KernelId>)> = HashMap::new();
        for &(since, _, id) in &self.idle {
            let (newest, ids) = by_page.entry(page_of(id)).or_default();
            *newest = since.max(*newest);
            ids.push(id);
        }
        let mut candidates: Vec<_> = by_page.into_iter().collect();
        candidates.sort_unstable_by_key(|(page, (newest, _))| (*newest, *page));
        let numbers: Vec<PageId> = candidates.iter().map(|(page, _)| *page).collect();
        let mut emptied = 0;
        for ((_, (_, ids)), in_use) in candidates.into_iter().zip(occupancy(&numbers)) {
            if emptied == pages {
                break;
            }
            if ids.len() == in_use as usize {
                ids.iter().for_each(|&id| self.forget(id));
                out.extend(ids);
                emptied += 1;
            }
        }
        emptied
    }

    fn forget(&mut self, id: KernelId) {
        let name = self.names.remove(&id).expect("idle blocks have names");
        let entry = self.entries.remove(&name).expect("names have entries");
        let since = entry.idle_since.expect("only idle blocks are forgotten");
        self.idle.remove(&(since, std::cmp::Reverse(entry.depth), id));
    }

    /// Panics unless the three tables agree. Slow: for tests.
    #[cfg(test)]
    pub(super) fn check_invariants(&self) {
        assert_eq!(self.entries.len(), self.names.len());
        for (name, entry) in &self.entries {
            assert_eq!(self.names[&entry.id], *name);
        }
        let idle = self
            .entries
            .values()
            .filter_map(|entry| entry.idle_since.map(|since| (since, std::cmp::Reverse(entry.depth), entry.id)));
        assert_eq!(idle.collect::<BTreeSet<_>>(), self.idle);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BLOCK: usize = 2;

    /// Puts a text's full blocks in, as a row would that computed them; ids from `next`.
    fn compute(cache: &mut PrefixCache, salt: Option<&str>, text: &[u32], next: &mut u32) -> Vec<KernelId> {
        let (mut ids, mut name) = cache.find(salt, text, BLOCK, usize::MAX);
        cache.make_busy(&ids);
        for (depth, block) in (0..).zip(text.chunks_exact(BLOCK)).skip(ids.len()) {
            let id = KernelId(*next);
            *next += 1;
            assert!(cache.insert(name, block, depth, id));
            name = cache.name(name, block);
            ids.push(id);
        }
        ids
    }

    #[test]
    fn a_beginning_is_found_and_goes_last() {
        let (mut cache, mut next) = (PrefixCache::default(), 0);
        let first = compute(&mut cache, None, &[1, 2, 3, 4, 5, 6], &mut next);
        assert!(first.iter().all(|&id| cache.make_idle(id)));
        assert_eq!(cache.find(None, &[1, 2, 3, 4, 9, 9], BLOCK, 9).0, first[..2]);
        assert_eq!(cache.find(None, &[1, 2, 3, 4, 9, 9], BLOCK, 1).0, first[..1]);
        assert_eq!(cache.find(None, &[3, 4, 1, 2], BLOCK, 9).0, [], "a name stands for the whole text");
        let mut out = Vec::new();
        cache.evict(1, &mut out);
        assert_eq!(out, first[2..], "the end of a text goes before its beginning");
        cache.evict(9, &mut out);
        assert_eq!(out.len(), 3);
        cache.check_invariants();
    }

    #[test]
    fn what_is_read_stays_and_what_is_not_known_is_free() {
        let (mut cache, mut next) = (PrefixCache::default(), 0);
        let ids = compute(&mut cache, None, &[1, 2, 3, 4], &mut next);
        let mut out = Vec::new();
        cache.evict(9, &mut out);
        assert_eq!(out, []);
        assert!(!cache.insert(PrefixName::default(), &[1, 2], 0, KernelId(77)), "one block for one text");
        assert!(!cache.make_idle(KernelId(77)));
        ids.iter().for_each(|&id| assert!(cache.make_idle(id)));
        assert_eq!(cache.idle_blocks(), 2);
    }

    #[test]
    fn whole_pages_go_first_where_pages_are_wanted() {
        let (mut cache, mut next) = (PrefixCache::default(), 0);
        // Blocks 0..4 are page 0, 4..8 page 1. Block 1 is still read.
        let old = compute(&mut cache, None, &[1, 1, 1, 2, 1, 3, 1, 4], &mut next);
        let young = compute(&mut cache, None, &[2, 1, 2, 2, 2, 3, 2, 4], &mut next);
        [old[0], old[2], old[3]].iter().for_each(|&id| assert!(cache.make_idle(id)));
        cache.tick();
        young.iter().for_each(|&id| assert!(cache.make_idle(id)));
        let mut out = Vec::new();
        let page_of = |id: KernelId| PageId(id.0 / 4);
        let emptied = cache.evict_pages(2, page_of, |pages| vec![4; pages.len()], &mut out);
        out.sort_unstable();
        assert_eq!((emptied, out), (1, young), "page 0 cannot become empty, though its blocks are older");
        cache.check_invariants();
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Against a list of all texts that were computed and not evicted, with their salts.
        #[test]
        fn it_finds_what_a_list_finds(
            ops in prop::collection::vec(
                (prop::collection::vec(0u32..2, 0..10), prop::option::of("[ab]"), 0u32..4, any::<bool>()), 1..40,
            ),
        ) {
            let (mut cache, mut next) = (PrefixCache::default(), 0);
            let mut model: HashMap<(Option<String>, Vec<u32>), KernelId> = HashMap::new();
            for (text, salt, evict, busy) in ops {
                let beginning = |blocks: usize| (salt.clone(), text[..blocks * BLOCK].to_vec());
                let known = (1..=text.len() / BLOCK).map(|blocks| model.get(&beginning(blocks)).copied());
                let known: Vec<KernelId> = known.map_while(|id| id).collect();
                prop_assert_eq!(&cache.find(salt.as_deref(), &text, BLOCK, usize::MAX).0, &known);
                // Orphans (their beginning was evicted) keep their name: a text is put in again only if all of it is new.
                let is_new = |blocks: usize| !model.contains_key(&beginning(blocks));
                if (known.len() + 1..=text.len() / BLOCK).all(is_new) {
                    let ids = compute(&mut cache, salt.as_deref(), &text, &mut next);
                    for (blocks, &id) in (1..).zip(&ids) {
                        model.insert(beginning(blocks), id);
                    }
                    let mut out = Vec::new();
                    if busy {
                        cache.evict(evict, &mut out);
                        prop_assert!(out.iter().all(|id| !ids.contains(id)));
                    }
                    ids.iter().for_each(|&id| assert!(cache.make_idle(id)));
                    cache.tick();
                    cache.evict(evict, &mut out);
                    model.retain(|_, id| !out.contains(id));
                    prop_assert_eq!(cache.idle_blocks() as usize, model.len());
                }
                cache.check_invariants();
            }
        }
    }
}
