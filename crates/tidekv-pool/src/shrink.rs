//! Shrinking: retire idle pages, wait for the device, unmap, release in the ledger. In chunks, so that a starved
//! neighbour has its first page after one page's time and not after the whole batch's.
//!
//! ```text
//!   Idle -- retire --> Draining -- fence passed --> Unmapping -- ledger released --> Reserved
//!                          |                            |
//!                          | waits for a step: later    | refused: kept, counted, tried again
//!                          | waits for a synchronise: on this thread, no lock held
//! ```

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tidekv_core::pages::{Fence, PageClaim};
use tidekv_core::units::{Bytes, PageId, Step};
use tidekv_shm::Reason;

use crate::account::Figures;
use crate::departures::Cause;
use crate::inner::Inner;
use crate::memory::UnmapFailure;
use crate::table::{Table, assert_unlocked};

/// One release in the ledger per this much memory.
const CHUNK: Bytes = Bytes::mib(64);

/// How long a trim waits for pages that another thread is unmapping.
const TRIM_WAIT: Duration = Duration::from_secs(1);

/// What a shrink came to.
#[derive(Debug, Default)]
pub(crate) struct Shrunk {
    /// Pages whose memory is back.
    pub(crate) pages: u32,
    /// The first refusal of the driver.
    pub(crate) refused: Option<UnmapFailure>,
    /// The earliest step that a page still waits for.
    pub(crate) next_step: Option<Step>,
}

impl Inner {
    /// Pages of one chunk.
    pub(crate) fn chunk_pages(&self) -> u32 {
        u32::try_from(CHUNK.0 / self.page_bytes().0).unwrap_or(u32::MAX).max(1)
    }

    /// Sends up to `count` of the longest idle pages on their way out.
    pub(crate) fn retire(&self, count: u32, cause: Cause) -> u32 {
        let mut table = self.table.lock();
        let retired = table.retire(count, cause);
        table.publish();
        retired
    }

    /// Unmaps retired pages that the device is done with, at most `max_pages`, the first one alone.
    pub(crate) fn drain(&self, max_pages: u32) -> Shrunk {
        let mut shrunk = Shrunk::default();
        let mut chunk = 1;
        let mut synchronised = false;
        while shrunk.pages < max_pages {
            let plan = {
                let mut table = self.table.lock();
                let plan = table.blocks.begin_unmap(self.steps.completed(), chunk.min(max_pages - shrunk.pages));
                table.publish();
                plan
            };
            shrunk.next_step = plan.next_step;
            if !plan.pages.is_empty() {
                shrunk.pages += self.unmap(&plan.pages, &mut shrunk.refused);
                chunk = self.chunk_pages();
                continue;
            }
            // One synchronise covers all frees before it; what came since can wait for the next call.
            let Some(ticket) = plan.synchronise.filter(|_| !synchronised) else { break };
            assert_unlocked("a synchronise");
            if let Err(error) = self.memory.synchronise() {
                tracing::warn!(%error, "the device could not be synchronised; its pages are unmapped later");
                break;
            }
            self.table.lock().blocks.synchronised(ticket);
            synchronised = true;
        }
        shrunk
    }

    /// Gives the memory of claimed pages back, and says how many really went.
    fn unmap(&self, claims: &[PageClaim], refused: &mut Option<UnmapFailure>) -> u32 {
        assert_unlocked("an unmap");
        let pages: Vec<PageId> = claims.iter().map(|claim| claim.page).collect();
        self.tell_idle();
        let outcome = self.memory.unmap_pages(&pages, |page| self.table.lock().blocks.pages().fence(page));
        let kept: &[PageId] = outcome.as_ref().err().map_or(&[], |failure| failure.kept(&pages));
        let (failed, gone): (Vec<_>, Vec<_>) = claims.iter().partition(|claim| kept.contains(&claim.page));
        // The ledger before the table: whoever sees the page gone may count on its bytes.
        self.release(gone.len());
        {
            let mut table = self.table.lock();
            let reported = table.blocks.unmapped(&gone);
            debug_assert!(reported.is_ok(), "claims in flight are nobody else's");
            for claim in failed {
                let reported = table.blocks.unmap_failed(claim);
                debug_assert!(reported.is_ok(), "claims in flight are nobody else's");
            }
            table.publish();
        }
        self.account.tally.unmaps.fetch_add(gone.len() as u64, Relaxed);
        self.progress.announce();
        if let Err(error) = outcome {
            tracing::warn!(%error, "the driver would not take memory back; it is tried again");
            self.account.tally.failures.fetch_add(1, Relaxed);
            refused.get_or_insert(error);
        }
        u32::try_from(gone.len()).unwrap_or(u32::MAX)
    }

    /// Tries once more what the driver refused before: unmaps, and the remains of failed maps.
    pub(crate) fn retry_refused(&self) -> u32 {
        let (failed, stranded) = {
            let mut table = self.table.lock();
            (table.blocks.retry_unmap(), std::mem::take(&mut table.stranded))
        };
        let mut pages = 0;
        if !failed.is_empty() {
            pages += self.unmap(&failed, &mut None);
        }
        if !stranded.is_empty() {
            pages += self.unmap_stranded(&stranded);
        }
        pages
    }

    /// Pages of failed maps are Mapping in the table: when their memory is back, their map counts as refused.
    fn unmap_stranded(&self, claims: &[PageClaim]) -> u32 {
        assert_unlocked("an unmap");
        let pages: Vec<PageId> = claims.iter().map(|claim| claim.page).collect();
        // No step was ever given these.
        self.tell_idle();
        let outcome = self.memory.unmap_pages(&pages, |_| Fence::Step(Step(0)));
        let kept: &[PageId] = outcome.as_ref().err().map_or(&[], |failure| failure.kept(&pages));
        let gone = claims.len() - kept.len();
        self.account.undo(self.bytes_of(gone), self.figures());
        {
            let mut table = self.table.lock();
            table.refuse(claims, |page| kept.contains(&page));
            table.publish();
        }
        self.note_headroom();
        u32::try_from(gone).unwrap_or(u32::MAX)
    }

    /// Tells the ledger that the driver has the memory of so many unmapping pages back.
    fn release(&self, pages: usize) {
        let bytes = self.bytes_of(pages);
        let figures = self.figures();
        let causes = self.table.lock().departures.arrived(u32::try_from(pages).unwrap_or(u32::MAX));
        let notes = causes.into_iter().map(|(cause, pages)| cause.note(self.bytes_of(pages as usize))).collect();
        self.account.release(bytes, Figures { spare: figures.spare.saturating_sub(bytes), ..figures }, notes);
        self.note_headroom();
    }

    /// Gives back every idle page that the device is done with. Pages that the background thread is unmapping at the
    /// moment are waited for, within a bound: who trims wants to know that the memory is back.
    pub(crate) fn trim(&self) -> Shrunk {
        let leaving = |table: &Table| {
            let counts = table.blocks.pages().counts();
            (counts.draining + counts.unmapping, counts.unmapping - counts.unmap_failed)
        };
        let before = {
            let mut table = self.table.lock();
            table.retire(u32::MAX, Cause::Trim(Reason::Engine));
            table.publish();
            leaving(&table).0
        };
        let mut shrunk = self.drain(u32::MAX);
        let deadline = Instant::now() + TRIM_WAIT;
        let waiter = self.progress.enter();
        let left = loop {
            let seen = waiter.seen();
            let (left, in_flight) = leaving(&self.table.lock());
            if in_flight == 0 || Instant::now() >= deadline {
                break left;
            }
            waiter.wait(seen, deadline);
        };
        shrunk.pages = before.saturating_sub(left);
        shrunk
    }
}
