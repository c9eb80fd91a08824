//! The fleet's rules against workers that are only values, over wires that lose, delay and repeat messages.
//!
//! What must hold whatever happens: a mapped page has memory on every member, a free page has memory on nobody who counts,
//! and once everybody answers again all ranks hold the same pages.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use tidekv_core::pages::Fence;
use tidekv_core::units::{Bytes, GroupId, PageId, Step};
use tidekv_ipc::LaneError;
use tidekv_ipc::broadcast::RankAnswer;
use tidekv_ipc::message::{Answer, Balance, Deed, Heading, Refusal, RefusalKind, Verdict};
use tidekv_shm::PoolName;

use super::book::Standing;
use super::wire::Wire;
use super::*;
use crate::worker::{Plan, WorkerBook};

const PAGES: u32 = 8;
const G0: GroupId = GroupId(0);

/// What becomes of one order to one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Done,
    /// Done twice, answered once.
    Twice,
    /// A map is refused for want of memory.
    Miss,
    /// Not done yet; the worker does it before the next order.
    Stopped,
    /// Done, but the answer comes too late.
    LateAnswer,
    /// The connection breaks; the worker gives everything back.
    Closed,
}

#[derive(Debug, Default)]
struct MockWorker {
    books: BTreeMap<GroupId, WorkerBook>,
    waiting: Vec<(Heading, Deed)>,
    connected: bool,
    absent: bool,
    instance: u64,
    orders: u64,
    /// What it says of its device.
    balance: Balance,
    /// What it was last told of.
    idle: IdlePages,
}

impl MockWorker {
    fn new() -> Self {
        Self {
            books: BTreeMap::from([(G0, WorkerBook::new(PAGES)), (GroupId(1), WorkerBook::new(PAGES))]),
            ..Self::default()
        }
    }

    fn close(&mut self) {
        self.connected = false;
        self.waiting.clear();
        self.books.values_mut().for_each(|book| book.forget(Vec::new()));
    }

    fn carry_out(&mut self, heading: Heading, deed: &Deed) -> Verdict {
        self.orders += 1;
        let epoch = heading.epoch;
        let Some(book) = self.books.get_mut(&heading.group) else { return refuse(RefusalKind::UnknownGroup) };
        book.settle(heading.settled);
        let plan = match deed {
            Deed::Map { pages, .. } => book.plan_map(epoch, pages),
            Deed::Unmap { pages, .. } => book.plan_unmap(epoch, pages),
            Deed::Abort => book.plan_abort(epoch),
            Deed::Held => return Verdict::Held(book.held()),
            Deed::Hello { .. } | Deed::Ping => return Verdict::Done,
        };
        match (deed, plan) {
            (_, Plan::Refuse(kind, _)) => return refuse(kind),
            (Deed::Abort, Plan::Nothing) => book.aborted(epoch, &[], Vec::new()),
            (Deed::Abort, Plan::Do(pages)) => book.aborted(epoch, &pages, Vec::new()),
            (Deed::Map { .. }, Plan::Do(pages)) => book.mapped(epoch, &pages, Ok(())),
            (_, Plan::Do(pages)) => book.unmapped(epoch, &pages, Vec::new()),
            (_, Plan::Nothing) => {}
        }
        Verdict::Done
    }

    fn held(&self, group: GroupId) -> Vec<PageId> {
        self.books[&group].held()
    }
}

fn refuse(kind: RefusalKind) -> Verdict {
    Verdict::Refused(Refusal { kind, wanted: Bytes(1), grantable: Bytes::ZERO, reason: "as the test wants".to_owned() })
}

/// All workers of all stages, and what becomes of the next orders.
#[derive(Debug)]
struct Net {
    stages: Vec<Vec<MockWorker>>,
    fates: VecDeque<Fate>,
    log: Vec<(u32, u32, GroupId, Deed)>,
}

type SharedNet = Arc<Mutex<Net>>;

#[derive(Debug)]
struct MockWire {
    net: SharedNet,
    stage: usize,
}

fn lock(net: &SharedNet) -> std::sync::MutexGuard<'_, Net> {
    net.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Wire for MockWire {
    fn connect(&mut self, _deadline: Instant) -> Vec<Result<u64, LaneError>> {
        let greet = |worker: &mut MockWorker| {
            if worker.absent {
                return Err(LaneError::NoWorker { path: "here".into() });
            }
            if !worker.connected {
                worker.connected = true;
                worker.instance += 1;
            }
            Ok(worker.instance)
        };
        lock(&self.net).stages[self.stage].iter_mut().map(greet).collect()
    }

    fn send(&mut self, to: &[u32], heading: Heading, deed: &Deed, _deadline: Instant) -> Vec<RankAnswer> {
        let mut net = lock(&self.net);
        let answer = |&rank: &u32| {
            let stage = u32::try_from(self.stage).unwrap();
            let fate = net.fates.pop_front().unwrap_or(Fate::Done);
            net.log.push((stage, rank, heading.group, deed.clone()));
            let worker = &mut net.stages[self.stage][rank as usize];
            let outcome = worker.receive(heading, deed, fate);
            RankAnswer { rank, outcome }
        };
        to.iter().map(answer).collect()
    }

    fn disconnect(&mut self, rank: u32) {
        lock(&self.net).stages[self.stage][rank as usize].close();
    }
}

impl MockWorker {
    fn receive(&mut self, heading: Heading, deed: &Deed, fate: Fate) -> Result<Answer, LaneError> {
        if !self.connected {
            return Err(LaneError::NotConnected);
        }
        self.idle = IdlePages { spare: heading.spare_pages, evictable: heading.evictable_pages };
        let timed_out = Err(LaneError::TimedOut { waited: Duration::ZERO });
        if fate == Fate::Stopped {
            self.waiting.push((heading, deed.clone()));
            return timed_out;
        }
        for (heading, deed) in std::mem::take(&mut self.waiting) {
            self.carry_out(heading, &deed);
        }
        let verdict = match fate {
            Fate::Closed => {
                self.close();
                return Err(LaneError::Closed);
            }
            Fate::Miss if matches!(deed, Deed::Map { .. }) => refuse(RefusalKind::Exhausted),
            Fate::Twice => {
                self.carry_out(heading, deed);
                self.carry_out(heading, deed)
            }
            _ => self.carry_out(heading, deed),
        };
        if fate == Fate::LateAnswer {
            return timed_out;
        }
        Ok(Answer { sequence: 0, epoch: heading.epoch, instance: self.instance, balance: self.balance, verdict })
    }
}

fn fleet(stages: &[u32]) -> (Fleet, SharedNet) {
    let workers = |&ranks: &u32| (0..ranks).map(|_| MockWorker::new()).collect();
    let net = Net { stages: stages.iter().map(workers).collect(), fates: VecDeque::new(), log: Vec::new() };
    let net = Arc::new(Mutex::new(net));
    let wire = |stage| -> Box<dyn Wire> { Box::new(MockWire { net: Arc::clone(&net), stage }) };
    let wires = (0..stages.len()).map(wire).collect();
    let mut config = FleetConfig::new(PoolName::new("test").unwrap(), stages.to_vec());
    config.rejoin_patience = Duration::MAX;
    (Fleet::over(config, wires).unwrap(), net)
}

fn ids(pages: impl IntoIterator<Item = u32>) -> Vec<PageId> {
    pages.into_iter().map(PageId).collect()
}

fn no_work(_: PageId) -> Fence {
    Fence::Step(Step(0))
}

fn tend(fleet: &Fleet) {
    fleet.0.look_after(&mut fleet.0.wires());
}

fn fates(net: &SharedNet, fates: &[Fate]) {
    lock(net).fates = fates.iter().copied().collect();
}

#[test]
fn a_refusal_anywhere_undoes_the_map_everywhere_and_names_the_rank() {
    let (fleet, net) = fleet(&[3]);
    let group = fleet.group(G0, Scope::AllStages).open(PAGES).unwrap();
    group.map(&ids([0])).unwrap();
    fates(&net, &[Fate::Done, Fate::Miss]);
    let error = group.map(&ids([1, 2])).unwrap_err();
    assert_eq!(error.as_miss().map(|(at, _)| at), Some(RankId { stage: 0, rank: 1 }), "{error}");
    assert!(error.is_transient());
    for rank in 0..3 {
        assert_eq!(lock(&net).stages[0][rank].held(G0), ids([0]));
    }
    assert_eq!(fleet.quarantined(G0), 0, "everybody undid it");
    group.map(&ids([1, 2])).unwrap();
}

#[test]
fn wrong_pages_are_refused_before_anything_is_sent() {
    let (fleet, net) = fleet(&[2]);
    let group = fleet.group(G0, Scope::AllStages).open(PAGES).unwrap();
    group.map(&ids([3])).unwrap();
    let sent = lock(&net).log.len();
    let error = group.map(&ids([0, PAGES])).unwrap_err();
    assert_eq!(error, FleetError::PageOutOfRange { page: PageId(PAGES), last: PageId(PAGES - 1) });
    assert!(matches!(group.map(&ids([0, 3])), Err(FleetError::PageState { page: PageId(3), .. })));
    assert!(matches!(group.map(&ids([1, 1])), Err(FleetError::PageState { page: PageId(1), .. })));
    let kept = group.unmap(&ids([PAGES]), no_work);
    assert!(kept.is_ok(), "nobody has it");
    assert_eq!(lock(&net).log.len(), sent);
}

#[test]
fn a_late_rank_keeps_its_pages_in_quarantine_until_it_answers() {
    let (fleet, net) = fleet(&[2]);
    let group = fleet.group(G0, Scope::AllStages).open(PAGES).unwrap();
    // Rank 1 hears of the map and of the abort much later.
    fates(&net, &[Fate::Done, Fate::Stopped, Fate::Done, Fate::Stopped]);
    let error = group.map(&ids([0])).unwrap_err();
    assert!(matches!(error, FleetError::Rank { at: RankId { rank: 1, .. }, fault: RankFault::TimedOut { .. } }));
    assert_eq!(fleet.quarantined(G0), 1);
    assert!(group.is_quarantined(PageId(0)));
    let orders = lock(&net).log.len();
    let error = group.map(&ids([1])).unwrap_err();
    assert!(matches!(error, FleetError::Rank { fault: RankFault::Late { .. }, .. }) && error.is_transient());
    assert_eq!(lock(&net).log.len(), orders, "nothing is sent while somebody is late");
    tend(&fleet);
    assert_eq!(fleet.quarantined(G0), 0);
    assert!(fleet.status().iter().all(|rank| rank.state == RankState::Member));
    group.map(&ids([0])).unwrap();
    assert_eq!(lock(&net).stages[0][1].held(G0), ids([0]));
}

#[test]
fn a_lost_rank_is_rejoined_with_its_pages() {
    let (fleet, net) = fleet(&[2]);
    let group = fleet.group(G0, Scope::AllStages).open(PAGES).unwrap();
    group.map(&ids(0..5)).unwrap();
    fates(&net, &[Fate::Done, Fate::Closed]);
    lock(&net).stages[0][1].absent = true;
    let error = group.map(&ids([5])).unwrap_err();
    assert!(matches!(error, FleetError::Rank { at: RankId { rank: 1, .. }, fault: RankFault::Lost { .. } }));
    // Giving back goes on; what the lost rank may still have is kept.
    let kept = group.unmap(&ids([4]), no_work).unwrap_err();
    assert_eq!(kept.pages, ids([4]));
    assert_eq!(lock(&net).stages[0][0].held(G0), ids(0..4));
    tend(&fleet);
    assert_eq!(fleet.quarantined(G0), 2, "the map and the unmap");
    lock(&net).stages[0][1].absent = false;
    tend(&fleet);
    assert_eq!(fleet.quarantined(G0), 0);
    assert_eq!(lock(&net).stages[0][1].held(G0), ids(0..4));
    let status = fleet.status();
    assert_eq!((status[1].state.clone(), status[1].instance, status[1].rejoins), (RankState::Member, 2, 1));
    group.map(&ids(4..6)).unwrap();
}

#[test]
fn a_rejoin_that_fails_is_tried_again() {
    let (fleet, net) = fleet(&[2]);
    let group = fleet.group(G0, Scope::AllStages).open(PAGES).unwrap();
    group.map(&ids(0..2)).unwrap();
    fates(&net, &[Fate::Done, Fate::Closed]);
    assert!(group.map(&ids([5])).is_err());
    // The abort on rank 0 was done; now rank 1 has too little memory for its own pages.
    fates(&net, &[Fate::Miss]);
    tend(&fleet);
    assert!(matches!(fleet.status()[1].state, RankState::Lost { .. }));
    assert!(matches!(group.map(&ids([5])), Err(FleetError::Rank { fault: RankFault::Lost { .. }, .. })));
    tend(&fleet);
    assert_eq!(lock(&net).stages[0][1].held(G0), ids(0..2));
    group.map(&ids([5])).unwrap();
}

#[test]
fn an_excluded_rank_holds_nothing_up_and_every_map_names_it() {
    let (fleet, net) = fleet(&[2]);
    let group = fleet.group(G0, Scope::AllStages).open(PAGES).unwrap();
    group.map(&ids(0..3)).unwrap();
    fates(&net, &[Fate::Stopped, Fate::Stopped]);
    assert!(group.unmap(&ids([0]), no_work).is_err());
    tend(&fleet);
    let at = RankId { stage: 0, rank: 1 };
    fleet.exclude(at, "by hand").unwrap();
    assert_eq!(fleet.quarantined(G0), 0);
    let error = group.map(&ids([0])).unwrap_err();
    assert!(
        matches!(&error, FleetError::Rank { at: named, fault: RankFault::Excluded { .. } } if *named == at),
        "{error}"
    );
    assert!(!error.is_transient());
    group.unmap(&ids([1]), no_work).unwrap();
    tend(&fleet);
    assert_eq!(lock(&net).stages[0][0].held(G0), ids([2]));
    assert_eq!(lock(&net).stages[0][1].held(G0), ids([]), "it was cut off");
    fleet.readmit(at).unwrap();
    tend(&fleet);
    group.map(&ids([0])).unwrap();
    assert_eq!(lock(&net).stages[0][1].held(G0), ids([0, 2]));
}

#[test]
fn patience_ends() {
    let (fleet, net) = fleet(&[1]);
    let mut exchange = Arc::try_unwrap(fleet.0).unwrap();
    exchange.config.rejoin_patience = Duration::ZERO;
    let fleet = Fleet(Arc::new(exchange));
    let group = fleet.group(G0, Scope::AllStages).open(PAGES).unwrap();
    fates(&net, &[Fate::Closed]);
    assert!(group.map(&ids([0])).is_err());
    tend(&fleet);
    let error = group.map(&ids([0])).unwrap_err();
    assert!(matches!(error, FleetError::Rank { fault: RankFault::Excluded { .. }, .. }), "{error}");
    assert_eq!(fleet.quarantined(G0), 0);
}

/// Groups and stages go where they belong, for maps as for unmaps.
#[test]
fn orders_reach_their_stage_and_group() {
    let (fleet, net) = fleet(&[2, 1]);
    let first = fleet.group(GroupId(1), Scope::Stage(1)).open(PAGES).unwrap();
    let all = fleet.group(G0, Scope::AllStages).open(PAGES).unwrap();
    lock(&net).log.clear();
    first.map(&ids([7])).unwrap();
    all.map(&ids([1])).unwrap();
    first.unmap(&ids([7]), no_work).unwrap();
    let sent: Vec<_> = lock(&net).log.iter().map(|(stage, rank, group, _)| (*stage, *rank, group.0)).collect();
    assert_eq!(sent, [(1, 0, 1), (0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 0, 1)]);
    assert!(matches!(fleet.group(G0, Scope::AllStages).open(1), Err(FleetError::GroupInUse { .. })));
    let missing = fleet.group(GroupId(5), Scope::Stage(2)).open(1).unwrap_err();
    assert_eq!(missing, FleetError::NoSuchStage { stage: 2, stages: 2 });
    let unknown = fleet.group(GroupId(5), Scope::AllStages).open(1).unwrap_err();
    assert!(matches!(unknown, FleetError::Rank { fault: RankFault::Refused(_), .. }));
    drop(all);
    assert_eq!(lock(&net).stages[0][1].held(G0), ids([]), "its pages went with the pool");
    fleet.group(G0, Scope::AllStages).open(1).unwrap();
}

/// Each worker waits for its own device: the order says for which step, or for everything.
#[test]
fn unmaps_carry_what_the_worker_must_wait_for() {
    let (fleet, net) = fleet(&[1]);
    let group = fleet.group(G0, Scope::AllStages).open(PAGES).unwrap();
    group.map(&ids(0..4)).unwrap();
    lock(&net).log.clear();
    let fence = |page: PageId| if page.0 == 3 { Fence::Unknown } else { Fence::Step(Step(u64::from(page.0))) };
    group.unmap(&ids(0..4), fence).unwrap();
    let deeds: Vec<_> = lock(&net).log.iter().map(|(.., deed)| deed.clone()).collect();
    let unmap = |pages, after| Deed::Unmap { pages, after };
    assert_eq!(deeds, [unmap(ids(0..3), Some(Step(2))), unmap(ids([3]), None)]);
}

#[test]
fn a_worker_that_contradicts_the_book_starts_over() {
    let (fleet, net) = fleet(&[2]);
    let group = fleet.group(G0, Scope::AllStages).open(PAGES).unwrap();
    group.map(&ids(0..3)).unwrap();
    lock(&net).stages[0][0].books.get_mut(&G0).unwrap().forget(Vec::new());
    let kept = group.unmap(&ids([0]), no_work).unwrap_err();
    assert!(matches!(kept.error, FleetError::Rank { at: RankId { rank: 0, .. }, .. }), "{}", kept.error);
    tend(&fleet);
    assert_eq!(fleet.quarantined(G0), 0);
    for rank in 0..2 {
        assert_eq!(lock(&net).stages[0][rank].held(G0), ids([1, 2]));
    }
}

/// Orders say what is idle; of what a rank reports, the richest debt and the poorest device count.
#[test]
fn idle_pages_go_out_and_balances_come_back() {
    let (fleet, net) = fleet(&[2]);
    let group = fleet.group(G0, Scope::AllStages).open(PAGES).unwrap();
    let owed = |pages, firm| Owed { pages, firm };
    assert_eq!((group.owed(8), group.grantable_pages()), (owed(0, 0), u32::MAX), "nobody has said anything");
    group.map(&ids(0..6)).unwrap();
    let idle = IdlePages { spare: 3, evictable: 2 };
    group.note_idle(idle);
    lock(&net).stages[0][0].balance = Balance { owed_pages: 5, firm_pages: 1, grantable_pages: 7 };
    lock(&net).stages[0][1].balance = Balance { owed_pages: 4, firm_pages: 4, grantable_pages: 1 };
    fleet.0.look_after(&mut fleet.0.wires());
    assert!(lock(&net).stages[0].iter().all(|worker| worker.idle == idle));
    assert_eq!((group.owed(3), group.grantable_pages()), (owed(5, 4), 1), "what one rank must have is firm for all");
    assert_eq!(group.owed(1), owed(3, 2), "two of the three idle pages are in use again");
    assert_eq!(group.owed(0), owed(2, 1), "what is owed beyond idle pages stays owed");
    assert_eq!(group.owed(8), owed(5, 4));
    // A rank that is gone owes nothing and bounds nothing.
    lock(&net).fates = VecDeque::from([Fate::Done, Fate::Closed]);
    assert!(group.map(&ids([6])).is_err());
    assert_eq!((group.owed(3), group.grantable_pages()), (owed(5, 1), 7));
}

#[test]
fn a_refill_is_ordered_as_such() {
    let (fleet, net) = fleet(&[1]);
    let group = fleet.group(G0, Scope::AllStages).open(PAGES).unwrap();
    group.map_ahead(&ids([0])).unwrap();
    group.map(&ids([1])).unwrap();
    let orders: Vec<_> = lock(&net)
        .log
        .iter()
        .filter_map(|(.., deed)| match deed {
            Deed::Map { pages, ahead } => Some((pages.clone(), *ahead)),
            _ => None,
        })
        .collect();
    assert_eq!(orders, [(ids([0]), true), (ids([1]), false)]);
}

#[derive(Clone, Debug)]
enum Event {
    Map(Vec<u32>),
    Unmap(Vec<u32>),
    Tend,
    Absent(usize, bool),
    Exclude(u32),
    Readmit(u32),
}

fn events() -> impl Strategy<Value = (Event, Vec<Fate>)> {
    let pages = || prop::collection::btree_set(0..PAGES, 1..4).prop_map(|pages| pages.into_iter().collect::<Vec<_>>());
    let event = prop_oneof![
        4 => pages().prop_map(Event::Map),
        4 => pages().prop_map(Event::Unmap),
        3 => Just(Event::Tend),
        1 => (0..3usize, any::<bool>()).prop_map(|(rank, absent)| Event::Absent(rank, absent)),
        1 => (0..3u32).prop_map(Event::Exclude),
        1 => (0..3u32).prop_map(Event::Readmit),
    ];
    let fate = prop_oneof![
        12 => Just(Fate::Done),
        1 => Just(Fate::Twice),
        1 => Just(Fate::Miss),
        2 => Just(Fate::Stopped),
        1 => Just(Fate::LateAnswer),
        1 => Just(Fate::Closed),
    ];
    (event, prop::collection::vec(fate, 0..10))
}

fn check(fleet: &Fleet, net: &SharedNet) -> Result<(), TestCaseError> {
    let book = fleet.0.book();
    book.check_invariants();
    let net = lock(net);
    for rank in book.indices() {
        let worker = &net.stages[0][rank];
        for page in ids(0..PAGES) {
            let held = worker.held(G0).contains(&page);
            match (book.mark(G0, page), book.standing(rank)) {
                (PageMark::Mapped, Standing::Member) => prop_assert!(held, "rank {rank} lacks page {page}"),
                (PageMark::Free, Standing::Excluded { .. }) | (PageMark::Open, _) | (PageMark::Mapped, _) => {}
                (PageMark::Free, _) => {
                    prop_assert!(!held, "rank {rank} has page {page}, which is free");
                    let waits =
                        |(_, deed): &(_, Deed)| matches!(deed, Deed::Map { pages, .. } if pages.contains(&page));
                    prop_assert!(!worker.waiting.iter().any(waits), "rank {rank} will map page {page}, which is free");
                }
            }
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn whatever_happens_pages_are_everywhere_or_nowhere(events in prop::collection::vec(events(), 1..40)) {
        let (fleet, net) = fleet(&[3]);
        let group = fleet.group(G0, Scope::AllStages).open(PAGES).unwrap();
        for (event, fate) in events {
            fates(&net, &fate);
            match event {
                Event::Map(pages) => drop(group.map(&ids(pages))),
                Event::Unmap(pages) => drop(group.unmap(&ids(pages), no_work)),
                Event::Tend => tend(&fleet),
                Event::Absent(rank, absent) => lock(&net).stages[0][rank].absent = absent,
                Event::Exclude(rank) => fleet.exclude(RankId { stage: 0, rank }, "by hand").unwrap(),
                Event::Readmit(rank) => fleet.readmit(RankId { stage: 0, rank }).unwrap(),
            }
            check(&fleet, &net)?;
        }
        // Everybody answers again.
        fates(&net, &[]);
        for rank in 0..3 {
            lock(&net).stages[0][rank].absent = false;
            fleet.readmit(RankId { stage: 0, rank: u32::try_from(rank).unwrap() }).unwrap();
        }
        for _ in 0..3 {
            tend(&fleet);
            check(&fleet, &net)?;
        }
        prop_assert_eq!(fleet.quarantined(G0), 0);
        let mapped = fleet.0.book().mapped(G0);
        for rank in 0..3 {
            prop_assert_eq!(lock(&net).stages[0][rank].held(G0), mapped.clone(), "rank {}", rank);
        }
        let free = ids((0..PAGES).filter(|page| !mapped.contains(&PageId(*page))));
        prop_assert!(group.map(&free).is_ok());
    }
}
