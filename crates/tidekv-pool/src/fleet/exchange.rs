//! Operations over all ranks: decide in the book, send, note what came back, finish or undo.
//!
//! ```text
//!   map      begin -> Map to all -- all done ---------------------------------------> commit
//!                              \-- refused, lost or late somewhere --> Abort to all
//!   unmap    begin -> Unmap to all (each waits for its own device)
//!                                     what a rank has not acked is sent again until it has: the quarantine
//! ```
//!
//! Two locks, and the pool's table between them: wires, table, book. The *wires* are held by whoever talks: one operation
//! at a time, never begun with the table in hand; inside them the table is asked for the fences of pages. The *book* is
//! taken last, inside either or alone, for a moment: who only wants to know never waits for a worker, and the table may
//! ask which pages are stuck. With the book in hand nobody takes either of the others.
//!
//! A rank that let one deadline pass is *late*. Nothing new is begun then (it would only let the next deadline pass as
//! well), it is sent what is still to be undone with hardly any wait, and it is a member again with its next answer.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tidekv_core::pages::Fence;
use tidekv_core::units::{GroupId, PageId, Step};
use tidekv_fork::Birth;
use tidekv_ipc::LaneError;
use tidekv_ipc::message::{Deed, Heading, PAGES_MAX, RefusalKind, Verdict};

use super::book::{FleetBook, IdlePages, Operation, RankIndex, Scope, Standing, Work, gravest};
use super::config::FleetConfig;
use super::error::{FleetError, PageMark, RankFault};
use super::tend::Tending;
use super::wire::Wire;
use super::{RankId, RankPages};
use crate::grow::deadline_in;
use crate::table::assert_unlocked;

/// What a late rank is waited for: it answers at once, or with the next look.
const COURTESY: Duration = Duration::from_millis(20);

/// The connections of all stages, by stage.
pub(super) type Wires = Vec<Box<dyn Wire>>;

/// Pages of an unmap that stay claimed, and the first reason.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) pages: Vec<PageId>,
    pub(crate) error: FleetError,
}

/// A fleet: the connections and the books. [`Fleet`](super::Fleet) shares it.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) config: FleetConfig,
    wires: Mutex<Wires>,
    book: Mutex<FleetBook>,
    pub(super) tending: Mutex<Tending>,
    birth: Birth,
}

impl Exchange {
    pub(super) fn new(config: FleetConfig, wires: Wires) -> Self {
        let book = Mutex::new(FleetBook::new(&config.stages, Instant::now()));
        Self { config, wires: Mutex::new(wires), book, tending: Mutex::default(), birth: Birth::here() }
    }

    pub(super) fn check_birth(&self) -> Result<(), FleetError> {
        if self.birth.is_foreign() { Err(FleetError::Forked) } else { Ok(()) }
    }

    /// Never held across a call that waits, nor while wires or table are taken.
    pub(super) fn book(&self) -> MutexGuard<'_, FleetBook> {
        // Written by short methods that do not panic halfway.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn wires(&self) -> MutexGuard<'_, Wires> {
        assert_unlocked("an exchange with workers");
        self.wires.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The wires, unless an operation is under way.
    pub(super) fn try_wires(&self) -> Option<MutexGuard<'_, Wires>> {
        assert_unlocked("an exchange with workers");
        match self.wires.try_lock() {
            Ok(wires) => Some(wires),
            Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        }
    }

    pub(super) fn deadline(&self) -> Instant {
        deadline_in(self.config.timeout.unwrap_or(Duration::MAX))
    }

    /// Maps pages on every rank of the group, or on none; `ahead` where nobody waits for them.
    pub(super) fn map(&self, group: GroupId, pages: &[PageId], ahead: bool) -> Result<(), FleetError> {
        self.check_birth()?;
        // Looked at before the wires are waited for: whoever cannot be helped hears of it at once.
        let obstacle = {
            let book = self.book();
            book.obstacle(book.group_ranks(group)?, Instant::now())
        };
        if let Some(obstacle) = obstacle {
            return Err(obstacle);
        }
        let mut wires = self.wires();
        for (nth, chunk) in pages.chunks(PAGES_MAX).enumerate() {
            if let Err(error) = self.map_chunk(&mut wires, group, chunk, ahead) {
                let before = &pages[..nth * PAGES_MAX];
                // Nobody was told of these yet, so no device reads them.
                let _ = self.unmap_mapped(&mut wires, group, before, Some(Step(0)));
                return Err(error);
            }
        }
        Ok(())
    }

    fn map_chunk(&self, wires: &mut Wires, group: GroupId, pages: &[PageId], ahead: bool) -> Result<(), FleetError> {
        let (epoch, ranks) = {
            let mut book = self.book();
            let epoch = book.begin_map(group, pages, Instant::now())?;
            (epoch, book.group_ranks(group)?.collect::<Vec<_>>())
        };
        let deed = Deed::Map { pages: pages.to_vec(), ahead };
        let faults = self.send(wires, group, epoch, &ranks, &deed, self.deadline());
        let Some(error) = gravest(faults.into_iter()) else {
            self.book().commit(epoch);
            return Ok(());
        };
        self.book().abort(epoch);
        // Whoever does not answer now is asked again by the background thread; its pages are quarantined until then.
        let _ = self.pursue(wires, epoch);
        Err(error)
    }

    /// Gives pages back on every rank, each behind its fence. Pages that some rank has not acked are kept.
    pub(super) fn unmap(&self, group: GroupId, pages: &[PageId], fence: impl Fn(PageId) -> Fence) -> Result<(), Kept> {
        if let Err(error) = self.check_birth() {
            return Err(Kept { pages: pages.to_vec(), error });
        }
        let mut wires = self.wires();
        let mut first = None;
        // What an earlier try left open.
        let open = self.book().operations_on(group, pages);
        for epoch in open {
            first = first.or(self.pursue(&mut wires, epoch).err());
        }
        for (after, pages) in self.by_fence(group, pages, fence) {
            first = first.or(self.unmap_mapped(&mut wires, group, &pages, after).err());
        }
        let book = self.book();
        let kept: Vec<PageId> =
            pages.iter().copied().filter(|&page| book.mark(group, page) != PageMark::Free).collect();
        match first {
            _ if kept.is_empty() => Ok(()),
            Some(error) => Err(Kept { pages: kept, error }),
            None => {
                let (page, state) = (kept[0], book.mark(group, kept[0]));
                Err(Kept { pages: kept, error: FleetError::PageState { page, state, wanted: "unmapped" } })
            }
        }
    }

    /// Mapped pages by what each worker must wait for: the latest of their steps, or all work of its device.
    fn by_fence(
        &self,
        group: GroupId,
        pages: &[PageId],
        fence: impl Fn(PageId) -> Fence,
    ) -> Vec<(Option<Step>, Vec<PageId>)> {
        let mapped: Vec<PageId> = {
            let book = self.book();
            pages.iter().copied().filter(|&page| book.mark(group, page) == PageMark::Mapped).collect()
        };
        let (mut stepped, mut unknown, mut latest) = (Vec::new(), Vec::new(), Step(0));
        for page in mapped {
            match fence(page) {
                Fence::Unknown => unknown.push(page),
                Fence::Step(step) => {
                    latest = latest.max(step);
                    stepped.push(page);
                }
            }
        }
        [(Some(latest), stepped), (None, unknown)].into_iter().filter(|(_, pages)| !pages.is_empty()).collect()
    }

    fn unmap_mapped(
        &self,
        wires: &mut Wires,
        group: GroupId,
        pages: &[PageId],
        after: Option<Step>,
    ) -> Result<(), FleetError> {
        let mut outcome = Ok(());
        for chunk in pages.chunks(PAGES_MAX) {
            let begun = self.book().begin_unmap(group, chunk, after);
            outcome = outcome.and(begun.and_then(|epoch| self.pursue(wires, epoch)));
        }
        outcome
    }

    /// Sends what is left of an operation to the ranks that have not acked it and can be reached.
    pub(super) fn pursue(&self, wires: &mut Wires, epoch: u64) -> Result<(), FleetError> {
        let Some(Operation { group, work, pages, awaited }) = self.book().operation(epoch).cloned() else {
            return Ok(());
        };
        let deed = match work {
            Work::Unmap { after } => Deed::Unmap { pages, after },
            Work::Map | Work::Abort => Deed::Abort,
        };
        let (prompt, late): (Vec<_>, Vec<_>) = {
            let book = self.book();
            let connected = awaited.iter().copied().filter(|&rank| book.is_connected(rank));
            connected.partition(|&rank| !matches!(book.standing(rank), Standing::Late { .. }))
        };
        let mut faults = self.send(wires, group, epoch, &prompt, &deed, self.deadline());
        faults.extend(self.send(wires, group, epoch, &late, &deed, Instant::now() + COURTESY));
        let book = self.book();
        let unreachable = book.operation(epoch).and_then(|operation| {
            operation.awaited.iter().find_map(|&rank| book.obstacle(rank..rank + 1, Instant::now()))
        });
        gravest(faults.into_iter().chain(unreachable)).map_or(Ok(()), Err)
    }

    /// One order to these ranks. Acks are noted in the book, and who is late or lost; says what went wrong.
    pub(super) fn send(
        &self,
        wires: &mut Wires,
        group: GroupId,
        epoch: u64,
        ranks: &[RankIndex],
        deed: &Deed,
        deadline: Instant,
    ) -> Vec<FleetError> {
        let answers = self.ask(wires, group, epoch, ranks, deed, deadline);
        let refused = |(rank, verdict): (RankIndex, Result<Verdict, FleetError>)| match verdict {
            Ok(Verdict::Refused(refusal)) => {
                if let (
                    Deed::Unmap { .. } | Deed::Abort,
                    RefusalKind::BadPage | RefusalKind::UnknownGroup | RefusalKind::Protocol,
                ) = (deed, refusal.kind)
                {
                    self.distrust(wires, rank);
                }
                let at = self.book().id(rank);
                Some(FleetError::Rank { at, fault: RankFault::Refused(refusal) })
            }
            Ok(Verdict::Done | Verdict::Held(_)) => {
                self.book().done(epoch, rank);
                None
            }
            Err(error) => Some(error),
        };
        answers.into_iter().filter_map(refused).collect()
    }

    /// One order to these ranks, stage after stage, and what each said.
    pub(super) fn ask(
        &self,
        wires: &mut Wires,
        group: GroupId,
        epoch: u64,
        ranks: &[RankIndex],
        deed: &Deed,
        deadline: Instant,
    ) -> Vec<(RankIndex, Result<Verdict, FleetError>)> {
        let mut by_stage: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
        let heading = {
            let book = self.book();
            for &rank in ranks {
                let id = book.id(rank);
                by_stage.entry(id.stage as usize).or_default().push(id.rank);
            }
            // Nobody may forget what it is just being told, whether or not the book follows it.
            let settled = book.settled().min(epoch.saturating_sub(1));
            let IdlePages { spare, evictable } = book.idle(group);
            Heading { epoch, settled, group, spare_pages: spare, evictable_pages: evictable }
        };
        let mut said = Vec::new();
        for (stage, ranks) in by_stage {
            for answer in wires[stage].send(&ranks, heading, deed, deadline) {
                let mut book = self.book();
                let id = RankId { stage: u32::try_from(stage).unwrap_or(u32::MAX), rank: answer.rank };
                let Some(rank) = book.index(id) else { continue };
                let verdict = match answer.outcome {
                    Ok(answer) => {
                        book.answered(rank);
                        book.note_balance(group, rank, answer.balance, heading.spare_pages);
                        Ok(answer.verdict)
                    }
                    Err(LaneError::TimedOut { waited }) => {
                        book.late(rank, Instant::now());
                        Err(FleetError::Rank { at: id, fault: RankFault::TimedOut { waited } })
                    }
                    Err(cause) => {
                        tracing::warn!(rank = %id, %cause, "a worker is lost");
                        book.lost(rank, Instant::now(), cause.clone());
                        Err(FleetError::Rank { at: id, fault: RankFault::Lost { cause } })
                    }
                };
                said.push((rank, verdict));
            }
        }
        said
    }

    /// What every connected rank of a group says that it has.
    pub(super) fn held(&self, group: GroupId) -> Result<Vec<RankPages>, FleetError> {
        let mut wires = self.wires();
        let (ranks, epoch): (Vec<_>, u64) = {
            let book = self.book();
            (book.group_ranks(group)?.filter(|&rank| book.is_connected(rank)).collect(), book.settled())
        };
        let said = self.ask(&mut wires, group, epoch, &ranks, &Deed::Held, self.deadline());
        let book = self.book();
        let pages = |(rank, verdict): (RankIndex, Result<Verdict, FleetError>)| {
            let at = book.id(rank);
            let pages = verdict.and_then(|verdict| match verdict {
                Verdict::Held(pages) => Ok(pages),
                Verdict::Refused(refusal) => Err(FleetError::Rank { at, fault: RankFault::Refused(refusal) }),
                Verdict::Done => Ok(Vec::new()),
            });
            RankPages { at, pages }
        };
        Ok(said.into_iter().map(pages).collect())
    }

    /// Whether every rank of the scope knows the group.
    pub(super) fn has_group(&self, group: GroupId, scope: Scope) -> Result<bool, FleetError> {
        let mut wires = self.wires();
        let (ranks, epoch) = {
            let book = self.book();
            let ranks = book.ranks_of(scope)?;
            if let Some(obstacle) = book.obstacle(ranks.clone(), Instant::now()) {
                return Err(obstacle);
            }
            (ranks.collect::<Vec<_>>(), book.settled())
        };
        let mut all = true;
        for (rank, verdict) in self.ask(&mut wires, group, epoch, &ranks, &Deed::Held, self.deadline()) {
            match verdict? {
                Verdict::Refused(refusal) if refusal.kind == RefusalKind::UnknownGroup => all = false,
                Verdict::Refused(refusal) => {
                    let at = self.book().id(rank);
                    return Err(FleetError::Rank { at, fault: RankFault::Refused(refusal) });
                }
                Verdict::Held(_) | Verdict::Done => {}
            }
        }
        Ok(all)
    }

    /// A rank whose book contradicts ours starts over: it gives everything back when the connection ends.
    pub(super) fn distrust(&self, wires: &mut Wires, rank: RankIndex) {
        let id = self.book().id(rank);
        tracing::error!(rank = %id, "a worker's pages are not what they should be; it rejoins");
        wires[id.stage as usize].disconnect(id.rank);
        self.book().lost(rank, Instant::now(), LaneError::Closed);
    }

    /// Takes a group for a pool: every rank knows it, and has none of its pages.
    pub(super) fn open_group(&self, group: GroupId, scope: Scope, page_count: u32) -> Result<(), FleetError> {
        self.check_birth()?;
        let mut wires = self.wires();
        let ranks = {
            let mut book = self.book();
            let ranks = book.ranks_of(scope)?;
            if let Some(obstacle) = book.obstacle(ranks.clone(), Instant::now()) {
                return Err(obstacle);
            }
            book.open_group(group, scope, page_count)?;
            ranks.collect::<Vec<_>>()
        };
        let empty = self.empty_group(&mut wires, group, &ranks);
        if empty.is_err() {
            self.book().close_group(group);
        }
        empty
    }

    fn empty_group(&self, wires: &mut Wires, group: GroupId, ranks: &[RankIndex]) -> Result<(), FleetError> {
        let epoch = self.book().next_epoch();
        for (rank, verdict) in self.ask(wires, group, epoch, ranks, &Deed::Held, self.deadline()) {
            match verdict? {
                Verdict::Held(pages) if !pages.is_empty() => {
                    // A pool before us left them when it could not reach this rank.
                    let epoch = self.book().next_epoch();
                    let deed = Deed::Unmap { pages, after: None };
                    let faults = self.send(wires, group, epoch, &[rank], &deed, self.deadline());
                    faults.into_iter().next().map_or(Ok(()), Err)?;
                }
                Verdict::Refused(refusal) => {
                    let at = self.book().id(rank);
                    return Err(FleetError::Rank { at, fault: RankFault::Refused(refusal) });
                }
                Verdict::Held(_) | Verdict::Done => {}
            }
        }
        Ok(())
    }

    /// A pool is gone: its pages go back, as far as the ranks can be reached within `patience`.
    pub(super) fn close_group(&self, group: GroupId, patience: Duration) {
        if self.birth.is_foreign() {
            return;
        }
        let mut wires = self.wires();
        let pages = self.book().mapped(group);
        let deadline = Instant::now() + patience;
        for chunk in pages.chunks(PAGES_MAX) {
            let Ok(epoch) = self.book().begin_unmap(group, chunk, None) else { continue };
            let awaited = self.book().operation(epoch).map(|operation| operation.awaited.clone()).unwrap_or_default();
            let ranks: Vec<_> = awaited.into_iter().filter(|&rank| self.book().is_connected(rank)).collect();
            self.send(&mut wires, group, epoch, &ranks, &Deed::Unmap { pages: chunk.to_vec(), after: None }, deadline);
        }
        self.book().close_group(group);
    }
}
