//! One word per block that tells its present lease from every earlier one.
//!
//! ```text
//!   word     0        1        2        3        4
//!          [free]--[leased]--[free]--[leased]--[free]-- ...      +1 on lease, +1 on free, never reset
//! ```
//!
//! A lease carries the odd word it was made with. Freeing it needs the same word still there, so a second free,
//! a copy kept too long, and two copies in one batch all fail to match, also after the page was unmapped and
//! mapped again. A stale lease could pass only after exactly 2^31 further leases of the same block.

use super::FreeError;
use crate::units::BlockIndex;

/// The right to use one block until it is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockLease {
    /// The block.
    pub block: BlockIndex,
    /// Which of the block's leases. Always odd.
    pub generation: u32,
}

// Engines keep one per block in use.
const _: () = assert!(size_of::<BlockLease>() == 8);

/// How callers name a block they free: by the lease, or by its index where that is all they keep.
pub(super) trait NamesBlock: Copy {
    fn block(self) -> BlockIndex;

    /// The generation that must still be there, if the name carries one.
    fn generation(self) -> Option<u32>;
}

impl NamesBlock for BlockLease {
    fn block(self) -> BlockIndex {
        self.block
    }

    fn generation(self) -> Option<u32> {
        Some(self.generation)
    }
}

impl NamesBlock for BlockIndex {
    fn block(self) -> BlockIndex {
        self
    }

    fn generation(self) -> Option<u32> {
        None
    }
}

/// The generation words of all blocks of a pool.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Generations {
    words: Vec<u32>,
}

impl Generations {
    pub(super) fn new(blocks: u32) -> Self {
        Self { words: vec![0; blocks as usize] }
    }

    /// Begins a lease of a block that is not leased.
    pub(super) fn lease(&mut self, block: BlockIndex) -> BlockLease {
        let word = &mut self.words[block.index()];
        debug_assert!(!is_leased(*word), "block {block} is leased already");
        *word = word.wrapping_add(1);
        BlockLease { block, generation: *word }
    }

    /// Whether the block is leased.
    pub(super) fn is_leased(&self, block: BlockIndex) -> bool {
        self.words.get(block.index()).is_some_and(|&word| is_leased(word))
    }

    /// Whether this very lease is in force.
    pub(super) fn is_current(&self, lease: BlockLease) -> bool {
        is_leased(lease.generation) && self.words.get(lease.block.index()) == Some(&lease.generation)
    }

    /// Ends all leases, or none and says why.
    ///
    /// Each word flips as it is looked at, so that a block named twice no longer matches the second time, and
    /// flips back if a later one is bad. That finds duplicates without a set and without memory.
    pub(super) fn end_all<T: NamesBlock>(&mut self, names: &[T]) -> Result<(), FreeError> {
        for (position, &name) in names.iter().enumerate() {
            match self.words.get_mut(name.block().index()) {
                Some(word) if is_leased(*word) && name.generation().is_none_or(|generation| generation == *word) => {
                    *word = word.wrapping_add(1);
                }
                _ => {
                    for undone in &names[..position] {
                        let word = &mut self.words[undone.block().index()];
                        *word = word.wrapping_sub(1);
                    }
                    return Err(self.explain(names, position));
                }
            }
        }
        Ok(())
    }

    /// Why the name at `position` ends no lease. All words are as before the call.
    #[cold]
    fn explain<T: NamesBlock>(&self, names: &[T], position: usize) -> FreeError {
        let name = names[position];
        let block = name.block();
        let Some(&word) = self.words.get(block.index()) else {
            let pool_blocks = u32::try_from(self.words.len()).expect("a pool has fewer than 2^31 blocks");
            return FreeError::Foreign { block, pool_blocks };
        };
        if !is_leased(word) {
            return FreeError::NotLeased { block };
        }
        match name.generation() {
            Some(generation) if generation != word => {
                FreeError::Stale { block, lease_generation: generation, current_generation: word }
            }
            _ => {
                // Good by itself, so an earlier copy in the batch has used it up.
                let first = names.iter().position(|other| other.block() == block).unwrap_or(position);
                FreeError::Repeated { block, first, second: position }
            }
        }
    }
}

/// Leases make words odd, frees make them even; wrapping at 2^32 keeps that.
const fn is_leased(word: u32) -> bool {
    word % 2 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(generations: &mut Generations, block: u32) -> BlockLease {
        generations.lease(BlockIndex(block))
    }

    #[test]
    fn a_lease_ends_once() {
        let mut generations = Generations::new(4);
        let first = lease(&mut generations, 2);
        assert!(generations.is_current(first));
        assert_eq!(generations.end_all(&[first]), Ok(()));
        assert!(!generations.is_current(first));
        assert_eq!(generations.end_all(&[first]), Err(FreeError::NotLeased { block: BlockIndex(2) }));
        let second = lease(&mut generations, 2);
        assert_eq!(
            generations.end_all(&[first]),
            Err(FreeError::Stale { block: BlockIndex(2), lease_generation: 1, current_generation: 3 })
        );
        assert!(generations.is_current(second));
    }

    #[test]
    fn a_bad_name_anywhere_undoes_the_batch() {
        let mut generations = Generations::new(4);
        let leases = [0, 1, 3].map(|block| lease(&mut generations, block));
        let foreign = BlockLease { block: BlockIndex(4), generation: 1 };
        let before = generations.words.clone();
        for bad in [leases[1], foreign, BlockLease { block: BlockIndex(2), generation: 1 }] {
            assert!(generations.end_all(&[leases[0], leases[1], bad, leases[2]]).is_err());
            assert_eq!(generations.words, before);
        }
    }

    #[test]
    fn a_block_named_twice_is_told_from_a_double_free() {
        let mut generations = Generations::new(2);
        let [first, second] = [0, 1].map(|block| lease(&mut generations, block));
        let repeated = Err(FreeError::Repeated { block: BlockIndex(1), first: 0, second: 2 });
        assert_eq!(generations.end_all(&[second, first, second]), repeated);
        assert_eq!(generations.end_all(&[second.block, first.block, second.block]), repeated);
    }

    #[test]
    fn a_forged_even_generation_is_no_lease() {
        let mut generations = Generations::new(1);
        let forged = BlockLease { block: BlockIndex(0), generation: 0 };
        assert!(!generations.is_current(forged));
        assert_eq!(generations.end_all(&[forged]), Err(FreeError::NotLeased { block: BlockIndex(0) }));
    }

    #[test]
    fn parity_survives_the_wrap() {
        let mut generations = Generations { words: vec![u32::MAX - 1] };
        let last = lease(&mut generations, 0);
        assert_eq!(last.generation, u32::MAX);
        assert_eq!(generations.end_all(&[last]), Ok(()));
        assert!(!generations.is_leased(BlockIndex(0)));
        assert_eq!(lease(&mut generations, 0).generation, 1);
    }
}
