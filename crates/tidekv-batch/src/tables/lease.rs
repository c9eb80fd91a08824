//! Ids between the pool and the ring: lent when memory grows, withdrawn when it shrinks.
//!
//! Withdrawing looks at the whole ring once, whatever number of pages goes, because the others keep their order. That is
//! the price for steps that pop without keeping a word for each id.

use std::ops::Range;

use tidekv_core::units::KernelId;

use super::BlockTables;
use crate::error::LeaseError;
use crate::ids::IdRun;

impl BlockTables {
    /// Ids for the ring, behind those that are there: the pool's leases in its packing order, or a new page's run.
    pub fn lend(&mut self, runs: &[IdRun]) -> Result<(), LeaseError> {
        let asked: u64 = runs.iter().map(|run| u64::from(run.count)).sum();
        let lent = self.here.len() - self.shared_blocks();
        let max_ids = self.shape.config().max_ids;
        if u64::from(lent) + asked > u64::from(max_ids) {
            return Err(LeaseError::TooMany { asked, lent, max_ids });
        }
        for (position, &run) in runs.iter().enumerate() {
            let refused = match run.range() {
                None => Some(LeaseError::IdTooLarge { first: run.first, count: run.count }),
                Some(ids) => match self.here.first_present(ids.clone()) {
                    Some(id) => Some(LeaseError::AlreadyLent { id: KernelId(id) }),
                    None => {
                        self.here.insert(ids);
                        None
                    }
                },
            };
            if let Some(error) = refused {
                // The ring was not touched yet; the runs before this one leave the set again.
                runs[..position].iter().filter_map(|run| run.range()).for_each(|ids| self.here.remove(ids));
                return Err(error);
            }
        }
        for ids in runs.iter().filter_map(|run| run.range()) {
            self.ring.push(ids.map(|id| id as i32));
        }
        Ok(())
    }

    /// Takes runs out of the ring, such as those of pages that shall be unmapped: all of them, if all are free.
    pub fn withdraw(&mut self, runs: &[IdRun]) -> Result<(), LeaseError> {
        let mut sorted = Vec::with_capacity(runs.len());
        for run in runs.iter().filter(|run| run.count > 0) {
            sorted.push(run.range().ok_or(LeaseError::IdTooLarge { first: run.first, count: run.count })?);
        }
        sorted.sort_unstable_by_key(|ids| ids.start);
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0].end > pair[1].start) {
            return Err(LeaseError::NotLent { id: KernelId(pair[1].start) });
        }
        if let Some(id) = sorted.iter().find_map(|ids| self.here.first_absent(ids.clone())) {
            return Err(LeaseError::NotLent { id: KernelId(id) });
        }
        let asked = sorted.iter().map(|ids| u64::from(ids.end - ids.start)).sum::<u64>();
        let mut going = Going::new(&sorted);
        let found = self.ring.iter().filter(|&id| going.contains(id as u32)).count() as u64;
        if found < asked {
            let in_use = u32::try_from(asked - found).unwrap_or(u32::MAX);
            return Err(LeaseError::InUse { in_use, asked });
        }
        self.ring.retain(|id| !going.contains(id as u32));
        sorted.into_iter().for_each(|ids| self.here.remove(ids));
        Ok(())
    }

    /// Gives up to `count` unspent ids back, those that would have been popped last; says how many.
    pub fn take_back(&mut self, count: u32, out: &mut Vec<KernelId>) -> u32 {
        let count = count.min(self.ring.free());
        let from = self.ring.tail() - u64::from(count);
        for position in from..self.ring.tail() {
            let id = self.ring.at(position) as u32;
            self.here.remove(id..id + 1);
            out.push(KernelId(id));
        }
        self.ring.cut(from);
        count
    }
}

/// Whether ids lie in any of some runs. Neighbours in the ring are mostly neighbours in a page, so the answer for the last
/// id, and the ids that it holds for, are remembered.
struct Going<'a> {
    /// In order and apart.
    runs: &'a [Range<u32>],
    last: Range<u32>,
    answer: bool,
}

impl<'a> Going<'a> {
    const fn new(runs: &'a [Range<u32>]) -> Self {
        Self { runs, last: 0..0, answer: false }
    }

    fn contains(&mut self, id: u32) -> bool {
        if !self.last.contains(&id) {
            let (before, after) = self.runs.split_at(self.runs.partition_point(|run| run.start <= id));
            let gap_start = match before.last() {
                Some(run) if run.contains(&id) => {
                    (self.last, self.answer) = (run.clone(), true);
                    return true;
                }
                run => run.map_or(0, |run| run.end),
            };
            (self.last, self.answer) = (gap_start..after.first().map_or(u32::MAX, |run| run.start), false);
        }
        self.answer
    }
}
