//! Names: sequences, runs of block ids, and the set of all ids that are here.
//!
//! Kernel ids are sparse in the slab layout (a page's blocks are consecutive, pages lie far apart), so the set keeps
//! words of 64 ids in a map: exact, as large as what it holds, and a page's run costs a look-up for each 64 ids.
//! Steps never touch it: an id that moves from the ring to a row and back stays in the set.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

use tidekv_core::units::KernelId;

/// A sequence, by the engine's own number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeqId(pub u64);

impl fmt::Display for SeqId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Consecutive block ids, such as the blocks of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IdRun {
    /// The first of them.
    pub first: KernelId,
    /// How many.
    pub count: u32,
}

impl IdRun {
    /// The run as numbers, or `None` if one of them does not fit an `i32`.
    pub(crate) fn range(self) -> Option<Range<u32>> {
        let end = self.first.0.checked_add(self.count)?;
        (end <= 1 << 31).then_some(self.first.0..end)
    }
}

/// The ids that are in the ring, in a row, or shared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct IdSet {
    /// Bit `id % 64` of the word `id / 64`; no word is zero.
    words: HashMap<u32, u64>,
    count: u32,
}

impl IdSet {
    pub(crate) const fn len(&self) -> u32 {
        self.count
    }

    pub(crate) fn contains(&self, id: u32) -> bool {
        self.words.get(&(id / 64)).is_some_and(|word| word >> (id % 64) & 1 == 1)
    }

    /// The first id of `ids` that is here.
    pub(crate) fn first_present(&self, ids: Range<u32>) -> Option<u32> {
        split(ids).find_map(|(word, mask)| lowest(word, self.word(word) & mask))
    }

    /// The first id of `ids` that is not here.
    pub(crate) fn first_absent(&self, ids: Range<u32>) -> Option<u32> {
        split(ids).find_map(|(word, mask)| lowest(word, !self.word(word) & mask))
    }

    /// Adds `ids`, none of which is here.
    pub(crate) fn insert(&mut self, ids: Range<u32>) {
        self.count += ids.end - ids.start;
        for (word, mask) in split(ids) {
            let bits = self.words.entry(word).or_default();
            debug_assert_eq!(*bits & mask, 0, "an id is inserted once");
            *bits |= mask;
        }
    }

    /// Takes `ids` out, all of which are here.
    pub(crate) fn remove(&mut self, ids: Range<u32>) {
        self.count -= ids.end - ids.start;
        for (word, mask) in split(ids) {
            let left = self.word(word) & !mask;
            debug_assert_eq!(self.word(word) & mask, mask, "only what is here is removed");
            if left == 0 {
                self.words.remove(&word);
            } else {
                self.words.insert(word, left);
            }
        }
    }

    fn word(&self, word: u32) -> u64 {
        self.words.get(&word).copied().unwrap_or(0)
    }
}

/// `ids` as masks over words of 64.
fn split(ids: Range<u32>) -> impl Iterator<Item = (u32, u64)> {
    let words = if ids.is_empty() { 0..0 } else { ids.start / 64..(ids.end - 1) / 64 + 1 };
    words.map(move |word| {
        let base = word * 64;
        let (from, to) = (ids.start.max(base) - base, ids.end.min(base.saturating_add(64)) - base);
        (word, (u64::MAX >> (64 - (to - from))) << from)
    })
}

fn lowest(word: u32, bits: u64) -> Option<u32> {
    (bits != 0).then(|| word * 64 + bits.trailing_zeros())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Ids that runs begin with; a few words of them.
    const SPAN: u32 = 700;

    #[test]
    fn a_run_ends_where_kernels_stop_counting() {
        let last = IdRun { first: KernelId(i32::MAX as u32), count: 1 };
        assert_eq!(last.range(), Some(i32::MAX as u32..1 << 31));
        assert_eq!(IdRun { count: 2, ..last }.range(), None);
        assert_eq!(IdRun { first: KernelId(u32::MAX), count: 2 }.range(), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        #[cfg_attr(miri, ignore = "thousands of look-ups; the model of the tables makes a few")]
        fn the_set_is_a_set(runs in prop::collection::vec((0..SPAN, 0..SPAN / 3), 0..60)) {
            let (mut set, mut model) = (IdSet::default(), BTreeSet::new());
            for (first, count) in runs {
                let ids = first..first + count;
                let present = ids.clone().find(|id| model.contains(id));
                let absent = ids.clone().find(|id| !model.contains(id));
                prop_assert_eq!(set.first_present(ids.clone()), present);
                prop_assert_eq!(set.first_absent(ids.clone()), absent);
                if present.is_none() {
                    set.insert(ids.clone());
                    model.extend(ids);
                } else if absent.is_none() {
                    set.remove(ids.clone());
                    model.retain(|id| !ids.contains(id));
                }
                prop_assert_eq!(set.len() as usize, model.len());
                prop_assert!((0..SPAN * 2).all(|id| set.contains(id) == model.contains(&id)));
                prop_assert!(set.words.values().all(|&word| word != 0));
            }
        }
    }
}
