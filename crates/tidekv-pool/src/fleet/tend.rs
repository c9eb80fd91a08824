//! Looking after the fleet: who is silent, who is back, what is still quarantined. The pools' background threads do it,
//! whichever comes first; never while an operation is under way.
//!
//! ```text
//!   every BEAT    lost ranks        connect; whoever answers has nothing: its pages are mapped again, then it is a member
//!                 quarantine        abort or unmap once more, on the ranks that have not acked
//!                 members, late     ping for each group: who lives, what is idle here, what neighbours are owed there
//!                 patience over     excluded
//! ```

use std::sync::TryLockError;
use std::time::{Duration, Instant};

use tidekv_core::units::PageId;
use tidekv_ipc::LaneError;
use tidekv_ipc::message::{Deed, PAGES_MAX, Verdict};

use super::book::{RankIndex, Standing};
use super::error::{FleetError, RankFault};
use super::exchange::{Exchange, Wires};

/// How often ranks are asked whether they live.
const BEAT: Duration = Duration::from_millis(100);
/// How long a greeting may take: a worker that is there answers at once, unless it is giving memory back.
const GREETING: Duration = Duration::from_millis(100);
/// How long a ping may take before the rank counts as late.
const PING: Duration = Duration::from_secs(1);
/// What a late rank is waited for.
const COURTESY: Duration = Duration::from_millis(5);
/// Pages that a rejoining rank maps in one order.
const REJOIN_PAGES: usize = 256;
const _: () = assert!(REJOIN_PAGES <= PAGES_MAX);

/// When that was done last.
#[derive(Debug, Default)]
pub(super) struct Tending {
    last: Option<Instant>,
}

impl Exchange {
    /// Does what is due. Says when to come again.
    pub(super) fn tend(&self) -> Duration {
        if self.check_birth().is_err() {
            return BEAT;
        }
        let mut tending = match self.tending.try_lock() {
            Ok(tending) => tending,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // Another pool's thread is at it.
            Err(TryLockError::WouldBlock) => return BEAT,
        };
        let since = tending.last.map_or(BEAT, |at| at.elapsed());
        if since < BEAT {
            return BEAT - since;
        }
        // An operation that is under way finds out for itself who lives.
        let Some(mut wires) = self.try_wires() else { return BEAT };
        tending.last = Some(Instant::now());
        self.look_after(&mut wires);
        BEAT
    }

    pub(super) fn look_after(&self, wires: &mut Wires) {
        self.give_up_on_the_missing(wires);
        self.look_for_the_lost(wires);
        // Bound first: a guard in the head of a loop would be held through it.
        let quarantine = self.book().quarantine();
        for epoch in quarantine {
            let _ = self.pursue(wires, epoch);
        }
        self.ping(wires);
    }

    fn give_up_on_the_missing(&self, wires: &mut Wires) {
        let (patience, ranks) = (self.config.rejoin_patience, self.book().indices());
        for rank in ranks {
            let missing = match self.book().standing(rank) {
                Standing::Lost { since, cause } => Some((*since, cause.to_string())),
                Standing::Late { since } => Some((*since, "it is connected and does not answer".to_owned())),
                _ => None,
            };
            if let Some((since, why)) = missing
                && since.elapsed() >= patience
            {
                self.exclude(wires, rank, format!("not back within {patience:?}: {why}"));
            }
        }
    }

    pub(super) fn exclude(&self, wires: &mut Wires, rank: RankIndex, reason: String) {
        let id = self.book().id(rank);
        tracing::error!(rank = %id, %reason, "a worker is excluded: nothing can be mapped until it is readmitted");
        wires[id.stage as usize].disconnect(id.rank);
        self.book().exclude(rank, reason);
    }

    /// Connects to lost ranks. Whoever is back is given its pages again.
    pub(super) fn look_for_the_lost(&self, wires: &mut Wires) {
        for (stage, wire) in wires.iter_mut().enumerate() {
            let ranks: Vec<RankIndex> = {
                let book = self.book();
                book.indices().filter(|&rank| book.id(rank).stage as usize == stage).collect()
            };
            let is_lost = |&rank: &RankIndex| matches!(self.book().standing(rank), Standing::Lost { .. });
            if !ranks.iter().any(is_lost) {
                continue;
            }
            for (&rank, greeted) in ranks.iter().zip(wire.connect(Instant::now() + GREETING)) {
                let mut book = self.book();
                match (book.standing(rank), greeted) {
                    (Standing::Excluded { .. }, Ok(_)) => wire.disconnect(book.id(rank).rank),
                    (Standing::Lost { .. }, Ok(instance)) => {
                        book.greeted(rank, instance);
                    }
                    (Standing::Lost { .. }, Err(cause)) => book.lost(rank, Instant::now(), cause),
                    _ => {}
                }
            }
        }
        let ranks = self.book().indices();
        for rank in ranks {
            let rejoining = matches!(self.book().standing(rank), Standing::Rejoining { .. });
            if rejoining && let Err(error) = self.rejoin(wires, rank) {
                tracing::warn!(%error, "a worker could not be given its pages again; it is tried again");
                let id = self.book().id(rank);
                // It gives back what it has, and the next try starts from nothing.
                wires[id.stage as usize].disconnect(id.rank);
                self.book().lost(rank, Instant::now(), LaneError::Closed);
            }
        }
    }

    /// Maps everything on one rank that every other member has.
    fn rejoin(&self, wires: &mut Wires, rank: RankIndex) -> Result<(), FleetError> {
        let groups = self.book().groups();
        for group in groups {
            if !self.book().group_ranks(group)?.contains(&rank) {
                continue;
            }
            let pages: Vec<PageId> = self.book().mapped(group);
            for chunk in pages.chunks(REJOIN_PAGES) {
                let epoch = self.book().next_epoch();
                let deed = Deed::Map { pages: chunk.to_vec(), ahead: false };
                for (rank, verdict) in self.ask(wires, group, epoch, &[rank], &deed, self.deadline()) {
                    if let Verdict::Refused(refusal) = verdict? {
                        let at = self.book().id(rank);
                        return Err(FleetError::Rank { at, fault: RankFault::Refused(refusal) });
                    }
                }
            }
        }
        let mut book = self.book();
        book.rejoined(rank);
        tracing::info!(rank = %book.id(rank), "a worker has rejoined; the contents of its pages are gone");
        Ok(())
    }

    /// Asks every connected rank of every group whether it lives, which tells it what is idle, and us what its
    /// neighbours are owed and what its device has left.
    fn ping(&self, wires: &mut Wires) {
        let groups = self.book().groups();
        for group in groups {
            let (late, prompt): (Vec<_>, Vec<_>) = {
                let book = self.book();
                let ranks = book.group_ranks(group).unwrap_or_default();
                let connected = ranks.filter(|&rank| book.is_connected(rank));
                connected.partition(|&rank| matches!(book.standing(rank), Standing::Late { .. }))
            };
            let epoch = self.book().settled();
            let patience = self.config.timeout.map_or(PING, |timeout| timeout.min(PING));
            self.ask(wires, group, epoch, &prompt, &Deed::Ping, Instant::now() + patience);
            self.ask(wires, group, epoch, &late, &Deed::Ping, Instant::now() + COURTESY);
        }
    }
}
