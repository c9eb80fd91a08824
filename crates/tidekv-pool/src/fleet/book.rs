//! The fleet's books: which pages every rank has, which operations some rank has not finished, who belongs to us.
//! Pure: it decides and remembers, the exchange talks.
//!
//! ```text
//!   page of a group                                       rank
//!   Free --begin_map--> Open --commit--> Mapped           Member <--answered-- Late       slow, still connected
//!    ^                   | ^               |                | lost                        killed, closed
//!    |    every rank     | | some rank     | begin_unmap    v
//!    +---acked or gone---+ +---did not-----+              Lost --greeted--> Rejoining --rejoined--> Member
//!                          (quarantine)                     +--- patience over, by hand ---> Excluded
//! ```
//!
//! An operation is *open* until every rank that may have taken part said that it is done, was greeted anew (a worker gives
//! everything back before it answers the next greeting) or was excluded. Its pages are nobody's until then: the pool
//! keeps them claimed, so no rank is ever asked to map a page that it may still have.
//!
//! Two promises, which the tests hold against a model: a mapped page has memory on every member, and a free page has
//! memory nowhere but on ranks that are excluded.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Instant;

use tidekv_core::units::{GroupId, PageId, Step};
use tidekv_ipc::LaneError;
use tidekv_ipc::message::Balance;

use super::error::{FleetError, PageMark, RankFault, RankId};
use crate::owed::Owed;

/// A rank by its place in the book: all ranks of stage 0, then those of stage 1, ...
pub(crate) type RankIndex = usize;

/// Which ranks have a part of a group's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Those of one pipeline stage.
    Stage(u32),
    /// Those of all stages: every stage keeps its own layers of every block.
    AllStages,
}

/// Whether a rank takes part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Member,
    /// Connected, but it has not answered since.
    Late {
        since: Instant,
    },
    Lost {
        since: Instant,
        cause: LaneError,
    },
    /// Connected again, without its pages.
    Rejoining {
        since: Instant,
    },
    Excluded {
        reason: String,
    },
}

/// What is left to do on the ranks that have not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// First phase of a map: not decided yet.
    Map,
    /// A map that failed somewhere is undone everywhere.
    Abort,
    Unmap {
        after: Option<Step>,
    },
}

/// An operation that is not over everywhere.
#[derive(Clone, Debug)]
pub(crate) struct Operation {
    pub(crate) group: GroupId,
    pub(crate) work: Work,
    pub(crate) pages: Vec<PageId>,
    /// Ranks that may have taken part and have not said that it is done.
    pub(crate) awaited: BTreeSet<RankIndex>,
}

#[derive(Clone, Debug)]
struct Rank {
    id: RankId,
    standing: Standing,
    instance: u64,
    rejoins: u64,
}

#[derive(Clone, Debug)]
struct Group {
    ranks: Range<RankIndex>,
    marks: Vec<Mark>,
    /// Its pool is gone; it is kept until its last operation is over.
    closed: bool,
    /// What every rank said last.
    reports: Vec<Report>,
    /// What the pool last said of its pages.
    idle: IdlePages,
}

/// Pages that the pool could do without.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct IdlePages {
    /// Those that could be given back without losing anything.
    pub(crate) spare: u32,
    /// Those that hold only what the engine keeps in case.
    pub(crate) evictable: u32,
}

/// What a rank said of its device, and how many pages were spare when it said so.
#[derive(Clone, Copy, Debug, Default)]
struct Report {
    balance: Balance,
    told_spare: u32,
}

impl Report {
    /// What of the debt stands now. Spare pages are given first; those that are in use again since then are not owed
    /// any more, and must not be asked of the engine.
    fn owed(self, spare: u32) -> Owed {
        let standing = |owed: u32| {
            let from_spare = owed.min(self.told_spare);
            owed - from_spare + from_spare.min(spare)
        };
        let Balance { owed_pages, firm_pages, .. } = self.balance;
        Owed { pages: standing(owed_pages), firm: standing(firm_pages.min(owed_pages)) }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Mark {
    #[default]
    Free,
    Mapped,
    Open(u64),
}

impl From<Mark> for PageMark {
    fn from(mark: Mark) -> Self {
        match mark {
            Mark::Free => Self::Free,
            Mark::Mapped => Self::Mapped,
            Mark::Open(_) => Self::Open,
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct FleetBook {
    ranks: Vec<Rank>,
    stages: Vec<Range<RankIndex>>,
    groups: BTreeMap<GroupId, Group>,
    open: BTreeMap<u64, Operation>,
    last_epoch: u64,
}

/// Ranks.
impl FleetBook {
    /// Everybody is lost until greeted.
    pub(crate) fn new(stages: &[u32], now: Instant) -> Self {
        let mut book = Self {
            ranks: Vec::new(),
            stages: Vec::new(),
            groups: BTreeMap::new(),
            open: BTreeMap::new(),
            last_epoch: 0,
        };
        for (stage, &count) in (0..).zip(stages) {
            let first = book.ranks.len();
            book.ranks.extend((0..count).map(|rank| Rank {
                id: RankId { stage, rank },
                standing: Standing::Lost { since: now, cause: LaneError::NotConnected },
                instance: 0,
                rejoins: 0,
            }));
            book.stages.push(first..book.ranks.len());
        }
        book
    }

    pub(crate) fn id(&self, rank: RankIndex) -> RankId {
        self.ranks[rank].id
    }

    pub(crate) fn index(&self, id: RankId) -> Option<RankIndex> {
        self.ranks.iter().position(|rank| rank.id == id)
    }

    pub(crate) fn indices(&self) -> Range<RankIndex> {
        0..self.ranks.len()
    }

    pub(crate) fn standing(&self, rank: RankIndex) -> &Standing {
        &self.ranks[rank].standing
    }

    pub(crate) fn instance(&self, rank: RankIndex) -> u64 {
        self.ranks[rank].instance
    }

    pub(crate) fn rejoins(&self, rank: RankIndex) -> u64 {
        self.ranks[rank].rejoins
    }

    /// Whether orders can be sent to it.
    pub(crate) fn is_connected(&self, rank: RankIndex) -> bool {
        matches!(self.ranks[rank].standing, Standing::Member | Standing::Late { .. } | Standing::Rejoining { .. })
    }

    /// It answered something.
    pub(crate) fn answered(&mut self, rank: RankIndex) {
        let standing = &mut self.ranks[rank].standing;
        if matches!(standing, Standing::Late { .. }) {
            *standing = Standing::Member;
        }
    }

    /// It did not answer in time.
    pub(crate) fn late(&mut self, rank: RankIndex, now: Instant) {
        let standing = &mut self.ranks[rank].standing;
        if *standing == Standing::Member {
            *standing = Standing::Late { since: now };
        }
    }

    /// Its connection is gone, or could not be made.
    pub(crate) fn lost(&mut self, rank: RankIndex, now: Instant, why: LaneError) {
        let standing = &mut self.ranks[rank].standing;
        *standing = match standing {
            Standing::Member => Standing::Lost { since: now, cause: why },
            // The patience counts from when it last took part.
            Standing::Late { since } | Standing::Rejoining { since } => Standing::Lost { since: *since, cause: why },
            // How it was lost says more than that it is not back yet, unless somebody else is there now.
            Standing::Lost { since, cause } if matches!(why, LaneError::NoWorker { .. } | LaneError::NotConnected) => {
                Standing::Lost { since: *since, cause: cause.clone() }
            }
            Standing::Lost { since, .. } => Standing::Lost { since: *since, cause: why },
            Standing::Excluded { .. } => return,
        };
        for group in self.groups.values_mut().filter(|group| group.ranks.contains(&rank)) {
            group.reports[rank - group.ranks.start] = Report::default();
        }
    }

    /// It answered the greeting of a new connection: whatever it had was given back before. Says whether there are pages
    /// to map again; otherwise it is a member at once.
    pub(crate) fn greeted(&mut self, rank: RankIndex, instance: u64) -> bool {
        let Standing::Lost { since, .. } = self.ranks[rank].standing else { return false };
        self.release(rank);
        let known = &mut self.ranks[rank];
        let first_time = std::mem::replace(&mut known.instance, instance) == 0;
        known.rejoins += u64::from(!first_time);
        let lacks_pages =
            self.groups.values().any(|group| group.ranks.contains(&rank) && group.marks.contains(&Mark::Mapped));
        self.ranks[rank].standing = if lacks_pages { Standing::Rejoining { since } } else { Standing::Member };
        lacks_pages
    }

    /// Its pages are mapped again.
    pub(crate) fn rejoined(&mut self, rank: RankIndex) {
        if matches!(self.ranks[rank].standing, Standing::Rejoining { .. }) {
            self.ranks[rank].standing = Standing::Member;
        }
    }

    /// It no longer counts, and nothing waits for it any more.
    pub(crate) fn exclude(&mut self, rank: RankIndex, reason: String) {
        self.lost(rank, Instant::now(), LaneError::NotConnected);
        self.ranks[rank].standing = Standing::Excluded { reason };
        self.release(rank);
    }

    /// An excluded rank may come back, like a lost one.
    pub(crate) fn readmit(&mut self, rank: RankIndex, now: Instant) {
        if matches!(self.ranks[rank].standing, Standing::Excluded { .. }) {
            self.ranks[rank].standing = Standing::Lost { since: now, cause: LaneError::NotConnected };
        }
    }

    /// The ranks that keep it from mapping anything, gravest first.
    pub(crate) fn obstacle(&self, ranks: Range<RankIndex>, now: Instant) -> Option<FleetError> {
        let faults = ranks.filter_map(|rank| {
            let fault = match &self.ranks[rank].standing {
                Standing::Member => return None,
                Standing::Late { since } => RankFault::Late { silent: now.saturating_duration_since(*since) },
                Standing::Lost { cause, .. } => RankFault::Lost { cause: cause.clone() },
                Standing::Rejoining { .. } => RankFault::Rejoining,
                Standing::Excluded { reason } => RankFault::Excluded { reason: reason.clone() },
            };
            Some(FleetError::Rank { at: self.id(rank), fault })
        });
        gravest(faults)
    }

    /// Nothing waits for this rank any more: what it had is gone, or it does not count.
    fn release(&mut self, rank: RankIndex) {
        let over: Vec<u64> = self
            .open
            .iter_mut()
            .filter_map(|(&epoch, operation)| {
                (operation.work != Work::Map && operation.awaited.remove(&rank) && operation.awaited.is_empty())
                    .then_some(epoch)
            })
            .collect();
        over.into_iter().for_each(|epoch| self.close(epoch));
    }
}

/// Groups and pages.
impl FleetBook {
    pub(crate) fn ranks_of(&self, scope: Scope) -> Result<Range<RankIndex>, FleetError> {
        match scope {
            Scope::AllStages => Ok(self.indices()),
            Scope::Stage(stage) => {
                let found = usize::try_from(stage).ok().and_then(|at| self.stages.get(at));
                found.cloned().ok_or(FleetError::NoSuchStage { stage, stages: self.stages.len() })
            }
        }
    }

    pub(crate) fn open_group(&mut self, id: GroupId, scope: Scope, page_count: u32) -> Result<(), FleetError> {
        let ranks = self.ranks_of(scope)?;
        if self.groups.contains_key(&id) {
            return Err(FleetError::GroupInUse { group: id });
        }
        let reports = vec![Report::default(); ranks.len()];
        let marks = vec![Mark::Free; page_count as usize];
        self.groups.insert(id, Group { ranks, marks, closed: false, reports, idle: IdlePages::default() });
        Ok(())
    }

    /// Forgets a group, at once or when the last of its operations is over. What is still mapped goes with the workers'
    /// connections.
    pub(crate) fn close_group(&mut self, id: GroupId) {
        let busy = self.open.values().any(|operation| operation.group == id);
        match self.groups.get_mut(&id) {
            Some(group) if busy => group.closed = true,
            _ => drop(self.groups.remove(&id)),
        }
    }

    pub(crate) fn group_ranks(&self, id: GroupId) -> Result<Range<RankIndex>, FleetError> {
        self.groups.get(&id).map(|group| group.ranks.clone()).ok_or(FleetError::GroupNotOpen { group: id })
    }

    pub(crate) fn groups(&self) -> Vec<GroupId> {
        self.groups.keys().copied().collect()
    }

    pub(crate) fn mark(&self, id: GroupId, page: PageId) -> PageMark {
        let mark = self.groups.get(&id).and_then(|group| group.marks.get(page.index()));
        mark.copied().unwrap_or_default().into()
    }

    /// The pages that every member has.
    pub(crate) fn mapped(&self, id: GroupId) -> Vec<PageId> {
        let Some(group) = self.groups.get(&id) else { return Vec::new() };
        let pages = (0..).map(PageId).zip(&group.marks);
        pages.filter_map(|(page, &mark)| (mark == Mark::Mapped).then_some(page)).collect()
    }

    /// Pages that some rank has not given back, or may not have.
    pub(crate) fn quarantined(&self, id: GroupId) -> usize {
        let undecided = |operation: &&Operation| operation.group == id && operation.work != Work::Map;
        self.open.values().filter(undecided).map(|operation| operation.pages.len()).sum()
    }

    /// How a rank stands on its device, in pages of the group, when it was told of so many spare ones.
    pub(crate) fn note_balance(&mut self, id: GroupId, rank: RankIndex, balance: Balance, told_spare: u32) {
        if let Some(group) = self.groups.get_mut(&id).filter(|group| group.ranks.contains(&rank)) {
            group.reports[rank - group.ranks.start] = Report { balance, told_spare };
        }
    }

    pub(crate) fn note_idle(&mut self, id: GroupId, idle: IdlePages) {
        if let Some(group) = self.groups.get_mut(&id) {
            group.idle = idle;
        }
    }

    pub(crate) fn idle(&self, id: GroupId) -> IdlePages {
        self.groups.get(&id).map_or(IdlePages::default(), |group| group.idle)
    }

    /// The most that any rank owes: a page is given back on all of them or on none.
    pub(crate) fn owed(&self, id: GroupId, spare: u32) -> Owed {
        let reports = self.groups.get(&id).map_or(&[][..], |group| &group.reports);
        reports.iter().map(|report| report.owed(spare)).fold(Owed::default(), Owed::max)
    }

    /// The least that any rank could have: a page is mapped on all of them or on none.
    pub(crate) fn grantable(&self, id: GroupId) -> u32 {
        let reports = self.groups.get(&id).map_or(&[][..], |group| &group.reports);
        reports.iter().map(|report| report.balance.grantable_pages).min().unwrap_or(u32::MAX)
    }
}

/// Operations.
impl FleetBook {
    /// No operation up to here is open, or ever will be again.
    pub(crate) fn settled(&self) -> u64 {
        self.open.keys().next().map_or(self.last_epoch, |first| first - 1)
    }

    /// The number of an operation that is over before the next one begins.
    pub(crate) fn next_epoch(&mut self) -> u64 {
        self.last_epoch += 1;
        self.last_epoch
    }

    pub(crate) fn operation(&self, epoch: u64) -> Option<&Operation> {
        self.open.get(&epoch)
    }

    /// What is quarantined, oldest first.
    pub(crate) fn quarantine(&self) -> Vec<u64> {
        self.open.iter().filter(|(_, operation)| operation.work != Work::Map).map(|(&epoch, _)| epoch).collect()
    }

    /// The quarantined operations that these pages are part of.
    pub(crate) fn operations_on(&self, id: GroupId, pages: &[PageId]) -> BTreeSet<u64> {
        let Some(group) = self.groups.get(&id) else { return BTreeSet::new() };
        let epoch = |page: &PageId| match group.marks.get(page.index()) {
            Some(&Mark::Open(epoch)) => Some(epoch),
            _ => None,
        };
        pages.iter().filter_map(epoch).collect()
    }

    /// First phase of a map: the pages are nobody's until [`commit`](Self::commit) or the end of the abort.
    pub(crate) fn begin_map(&mut self, id: GroupId, pages: &[PageId], now: Instant) -> Result<u64, FleetError> {
        let ranks = self.group_ranks(id)?;
        self.check_pages(id, pages, Mark::Free, "mapped")?;
        if let Some(obstacle) = self.obstacle(ranks.clone(), now) {
            return Err(obstacle);
        }
        Ok(self.begin(id, pages, Work::Map, ranks.collect()))
    }

    /// Gives pages back that every member has. Ranks that are lost are waited for, excluded ones are not.
    pub(crate) fn begin_unmap(
        &mut self,
        id: GroupId,
        pages: &[PageId],
        after: Option<Step>,
    ) -> Result<u64, FleetError> {
        let ranks = self.group_ranks(id)?;
        self.check_pages(id, pages, Mark::Mapped, "unmapped")?;
        // It has some of the pages and not others, and will soon have all.
        if let Some(rank) = ranks.clone().find(|&rank| matches!(self.standing(rank), Standing::Rejoining { .. })) {
            return Err(FleetError::Rank { at: self.id(rank), fault: RankFault::Rejoining });
        }
        let awaited = self.counting(ranks);
        let nobody = awaited.is_empty();
        let epoch = self.begin(id, pages, Work::Unmap { after }, awaited);
        if nobody {
            self.close(epoch);
        }
        Ok(epoch)
    }

    /// A rank said that its part is done. What every awaited rank has undone or unmapped is over.
    pub(crate) fn done(&mut self, epoch: u64, rank: RankIndex) {
        let Some(operation) = self.open.get_mut(&epoch) else { return };
        operation.awaited.remove(&rank);
        if operation.awaited.is_empty() && operation.work != Work::Map {
            self.close(epoch);
        }
    }

    /// Second phase of a map that every rank has done.
    pub(crate) fn commit(&mut self, epoch: u64) {
        let Some(operation) = self.open.remove(&epoch) else { return };
        debug_assert!(operation.work == Work::Map && operation.awaited.is_empty(), "{operation:?}");
        self.set(operation.group, &operation.pages, Mark::Mapped);
    }

    /// Second phase of a map that failed somewhere: it is undone everywhere, also where nobody knows what happened.
    pub(crate) fn abort(&mut self, epoch: u64) {
        let Some(group) = self.open.get(&epoch).map(|operation| operation.group) else { return };
        let awaited = self.group_ranks(group).map_or_else(|_| BTreeSet::new(), |ranks| self.counting(ranks));
        let nobody = awaited.is_empty();
        if let Some(operation) = self.open.get_mut(&epoch) {
            (operation.work, operation.awaited) = (Work::Abort, awaited);
        }
        if nobody {
            self.close(epoch);
        }
    }

    fn counting(&self, ranks: Range<RankIndex>) -> BTreeSet<RankIndex> {
        ranks.filter(|&rank| !matches!(self.standing(rank), Standing::Excluded { .. })).collect()
    }

    fn begin(&mut self, group: GroupId, pages: &[PageId], work: Work, awaited: BTreeSet<RankIndex>) -> u64 {
        let epoch = self.next_epoch();
        self.set(group, pages, Mark::Open(epoch));
        self.open.insert(epoch, Operation { group, work, pages: pages.to_vec(), awaited });
        epoch
    }

    fn close(&mut self, epoch: u64) {
        let Some(operation) = self.open.remove(&epoch) else { return };
        self.set(operation.group, &operation.pages, Mark::Free);
        if self.groups.get(&operation.group).is_some_and(|group| group.closed) {
            self.close_group(operation.group);
        }
    }

    fn set(&mut self, id: GroupId, pages: &[PageId], mark: Mark) {
        if let Some(group) = self.groups.get_mut(&id) {
            pages.iter().for_each(|page| group.marks[page.index()] = mark);
        }
    }

    /// Before anything is sent: every page exists, is in the state wanted, and is named once.
    fn check_pages(&self, id: GroupId, pages: &[PageId], state: Mark, wanted: &'static str) -> Result<(), FleetError> {
        let marks = &self.groups[&id].marks;
        let mut named = BTreeSet::new();
        for &page in pages {
            let Some(&mark) = marks.get(page.index()) else {
                let last = u32::try_from(marks.len().saturating_sub(1)).unwrap_or(u32::MAX);
                return Err(FleetError::PageOutOfRange { page, last: PageId(last) });
            };
            if mark != state {
                return Err(FleetError::PageState { page, state: mark.into(), wanted });
            }
            if !named.insert(page) {
                return Err(FleetError::PageState { page, state: PageMark::Open, wanted });
            }
        }
        Ok(())
    }

    /// Asserts that marks and operations agree. For tests: it walks everything.
    #[cfg(test)]
    pub(crate) fn check_invariants(&self) {
        for (id, group) in &self.groups {
            for (page, mark) in (0..).map(PageId).zip(&group.marks) {
                if let Mark::Open(epoch) = mark {
                    let operation = &self.open[epoch];
                    assert!(operation.group == *id && operation.pages.contains(&page), "page {page}");
                }
            }
        }
        for (epoch, operation) in &self.open {
            assert!(*epoch > self.settled() && *epoch <= self.last_epoch);
            let group = &self.groups[&operation.group];
            assert!(operation.pages.iter().all(|page| group.marks[page.index()] == Mark::Open(*epoch)));
            assert!(operation.awaited.iter().all(|rank| group.ranks.contains(rank)));
            assert!(operation.work == Work::Map || !operation.awaited.is_empty(), "an operation that nobody ends");
        }
    }
}

/// Of several ranks' faults the one to report: what does not pass by itself before what does, a miss last, then the first.
pub(crate) fn gravest(errors: impl Iterator<Item = FleetError>) -> Option<FleetError> {
    let weight = |error: &FleetError| match error {
        error if error.as_miss().is_some() => 2,
        error if error.is_transient() => 1,
        _ => 0,
    };
    errors.min_by_key(weight)
}
