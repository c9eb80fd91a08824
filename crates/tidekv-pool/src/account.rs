//! The pool's account in the device's ledger: what it may hold, what it holds, what it wants.
//!
//! ```text
//!   reserve:  granted += bytes   under the ledger's lock, before the map      refused: the demand is posted
//!   release:  granted -= bytes   then written                                 after the unmap
//!
//!   ledger entry   reserved >= granted >= what the driver holds for us        at every instruction
//! ```
//!
//! `granted` is kept here and every update writes it whole, never as a difference. So an update that fails (a
//! neighbour stopped with the lock in hand) needs no undo list: the entry shows a little too much until the next update
//! succeeds, and too much is the safe side. A process killed anywhere leaves an entry that counts all it held.
//!
//! Demand has two sorts: *waiting*, by callers that are inside a wait, and *lingering*, of a caller that was refused
//! and is expected back within a scheduling round. The second expires, so that nobody evicts for an engine that has
//! changed its mind. A *wish* is weaker: what will be needed soon. Neighbours give idle pages and cached prefixes for it, and
//! stop nothing that runs. It expires in the same way.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use tidekv_core::share::{PoolClaim, grantable, is_short};
use tidekv_core::units::Bytes;
use tidekv_mem::Backend;
use tidekv_shm::{
    Counters, EntryState, EventKind, Ledger, LedgerEntry, LedgerError, LedgerView, Note, OwnedEntry, Reason, UNLIMITED,
    Watch, now_ms,
};

use crate::returning::{DeviceLook, non_pool_falls, refresh_budget, settle_returning};
use crate::table::assert_unlocked;

/// Looks at the device in one round that may be lost to what pools change meanwhile; a lost one is made up for at once, or
/// pools that are busy would never hear of what others take.
const LOOKS: u32 = 4;

/// How long a refused demand stays posted when its caller does not wait.
pub(crate) const LINGER: Duration = Duration::from_millis(250);

/// What an update waits at most for the ledger's lock.
pub(crate) const LEDGER_PATIENCE: Duration = Duration::from_millis(200);

/// What a caller whose wait is over still waits to say so; otherwise the background thread does.
const WITHDRAW_PATIENCE: Duration = Duration::from_millis(5);

/// Counts of events, as the ledger shows them.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) maps: AtomicU64,
    pub(crate) unmaps: AtomicU64,
    pub(crate) waits: AtomicU64,
    pub(crate) reclaims: AtomicU64,
    pub(crate) failures: AtomicU64,
}

impl Tally {
    pub(crate) fn counters(&self) -> Counters {
        Counters {
            maps: self.maps.load(Relaxed),
            unmaps: self.unmaps.load(Relaxed),
            waits: self.waits.load(Relaxed),
            reclaims: self.reclaims.load(Relaxed),
            failures: self.failures.load(Relaxed),
        }
    }
}

/// What only the table knows, taken before an update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Figures {
    /// Held with nothing in it: idle pages and those on their way out.
    pub(crate) spare: Bytes,
    /// Held for what the engine only keeps in case.
    pub(crate) cached: Bytes,
    /// What the engine was asked to free.
    pub(crate) reclaim: Bytes,
}

/// Who asks for memory, and so what becomes of a refusal.
#[derive(Debug)]
pub(crate) enum Asker<'a> {
    /// A caller that comes back later.
    Passing,
    /// A caller inside a wait; what it has posted so far.
    Waiting(&'a mut Bytes),
    /// The same for the last time. Refused, it waits no longer, and nobody else is refused for its sake.
    Leaving(&'a mut Bytes),
    /// The reserve: it never posts and never competes with those who do.
    Reserve,
}

/// The ledger's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grant {
    Granted,
    Short { grantable: Bytes },
}

#[derive(Debug)]
pub(crate) struct Account {
    entry: OwnedEntry,
    ledger: Ledger,
    /// What says how much memory the device has; a ledger without a device has none.
    backend: Option<Arc<dyn Backend>>,
    has_table: bool,
    pub(crate) tally: Tally,
    granted: AtomicU64,
    /// What the ledger would have granted on top at our last look: see [`note_headroom`](Self::note_headroom).
    headroom: AtomicU64,
    waiting: AtomicU64,
    lingering: AtomicU64,
    linger_until_ms: AtomicU64,
    wish: AtomicU64,
    wish_until_ms: AtomicU64,
    /// Bytes in use on the device at the last look; `u64::MAX` for unknown.
    device_used: AtomicU64,
    /// Others than pools used less at the last look than the ledger says.
    saw_fall: AtomicBool,
}

impl Account {
    pub(crate) fn new(entry: OwnedEntry, backend: Option<Arc<dyn Backend>>, has_table: bool) -> Self {
        Self {
            ledger: entry.ledger().clone(),
            entry,
            backend,
            has_table,
            tally: Tally::default(),
            granted: AtomicU64::new(0),
            headroom: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            lingering: AtomicU64::new(0),
            linger_until_ms: AtomicU64::new(0),
            wish: AtomicU64::new(0),
            wish_until_ms: AtomicU64::new(0),
            device_used: AtomicU64::new(u64::MAX),
            saw_fall: AtomicBool::new(false),
        }
    }

    /// The ledger as it is, without its lock, and where we are in it. `None` if it cannot be read, or if it is another
    /// file than the one that we have a seat in: the next update takes one.
    pub(crate) fn look(&self) -> Option<(LedgerView, usize)> {
        let view = self.ledger.read().inspect_err(|error| tracing::debug!(%error, "no look at the ledger")).ok()?;
        let me = self.entry.index_in(&view)?;
        Some((view, me))
    }

    /// Wakes when anybody changes the ledger or dies.
    pub(crate) fn watch(&self) -> Result<Watch, LedgerError> {
        self.ledger.watch()
    }

    /// Bytes this pool has a right to.
    pub(crate) fn granted(&self) -> Bytes {
        Bytes(self.granted.load(Relaxed))
    }

    /// What the ledger would have granted on top at the last look.
    pub(crate) fn headroom(&self) -> Bytes {
        Bytes(self.headroom.load(Relaxed))
    }

    /// Somebody looked. Where a table holds limit and ceiling, they are left out: it knows them at once, and a headroom
    /// of a moment ago would bring the old ones back.
    pub(crate) fn note_headroom(&self, budget: Bytes, mut claims: Vec<PoolClaim>, me: usize) {
        if self.has_table {
            claims[me].ceiling = UNLIMITED;
        }
        self.headroom.store(grantable(budget, &claims, me).0, Relaxed);
    }

    /// What the pool wants beyond that and did not get.
    pub(crate) fn demand(&self) -> Bytes {
        Bytes(self.waiting.load(Relaxed).saturating_add(self.lingering.load(Relaxed)))
    }

    /// When the lingering demand or the wish expires, if there is one.
    pub(crate) fn lingers_for(&self) -> Option<Duration> {
        let left = |posted: &AtomicU64, until_ms: &AtomicU64| {
            (posted.load(Relaxed) > 0).then(|| Duration::from_millis(until_ms.load(Relaxed).saturating_sub(now_ms())))
        };
        let (demand, wish) = (left(&self.lingering, &self.linger_until_ms), left(&self.wish, &self.wish_until_ms));
        demand.into_iter().chain(wish).min()
    }

    /// Forgets a lingering demand and a wish whose time is over. Says whether there was one.
    pub(crate) fn expire_demand(&self) -> bool {
        let now = now_ms();
        let expire =
            |posted: &AtomicU64, until_ms: &AtomicU64| until_ms.load(Relaxed) <= now && posted.swap(0, Relaxed) > 0;
        let demand = expire(&self.lingering, &self.linger_until_ms);
        expire(&self.wish, &self.wish_until_ms) || demand
    }

    /// Asks for the right to map `bytes` more. A refusal is posted as demand, unless the reserve asks.
    pub(crate) fn reserve(
        &self,
        bytes: Bytes,
        figures: Figures,
        mut asker: Asker<'_>,
        deadline: Instant,
    ) -> Result<Grant, LedgerError> {
        let mut taken = Bytes::ZERO;
        let answer = self.update(deadline, |view, me| {
            let mut me = me;
            let (slot, demand_before) = (view.entries[me].slot, view.entries[me].demand);
            self.write(&mut view.entries[me], figures);
            let mut free = free_for(view, me, &asker);
            if free < bytes {
                // A dead neighbour may hold what we need.
                me = self.tidy(view, me);
                free = free_for(view, me, &asker);
            }
            let granted = bytes <= free;
            if granted {
                taken = bytes;
                self.granted.fetch_add(bytes.0, Relaxed);
                // What is there now need not be wished for.
                self.wish.store(self.wish.load(Relaxed).saturating_sub(bytes.0), Relaxed);
            }
            let refusal = (!granted).then(|| refusal(view, me, bytes, free));
            self.note_demand(&mut asker, if granted { Bytes::ZERO } else { bytes });
            self.write(&mut view.entries[me], figures);
            if granted {
                let reason = if matches!(asker, Asker::Reserve) { Reason::Ahead } else { Reason::Need };
                view.note(slot, Note::new(EventKind::Granted, reason, bytes));
            }
            // A caller that waits is refused when its wait is over, and nobody waits for the reserve.
            if let (Some(refusal), Asker::Passing | Asker::Leaving(_)) = (refusal, &asker) {
                view.note(slot, refusal);
            }
            let demand = view.entries[me].demand;
            if demand > demand_before {
                view.note(slot, Note { free, ..Note::new(EventKind::Asked, Reason::Need, demand) });
            }
            if granted { Grant::Granted } else { Grant::Short { grantable: free } }
        });
        if answer.is_err() {
            // The closure may have run and its result not been written: nothing was granted.
            self.granted.fetch_sub(taken.0, Relaxed);
        }
        answer
    }

    /// Says that the right to `bytes` more will be asked for soon. Posted as a wish, unless so much is free.
    pub(crate) fn ask(&self, bytes: Bytes, figures: Figures, deadline: Instant) -> Result<(), LedgerError> {
        self.update(deadline, |view, me| {
            let (slot, wish_before) = (view.entries[me].slot, view.entries[me].wish);
            let free = free_for(view, me, &Asker::Passing);
            let wish = if free < bytes { bytes } else { Bytes::ZERO };
            self.wish.store(wish.0, Relaxed);
            self.wish_until_ms.store(until_ms(LINGER), Relaxed);
            self.write(&mut view.entries[me], figures);
            if wish > wish_before {
                view.note(slot, Note { free, ..Note::new(EventKind::Asked, Reason::Ahead, wish) });
            }
        })
    }

    /// Takes lingering demand and wish back if another pool waits, unless what this one waits for is its own. Says whether it did.
    /// One update, so of two that do it the second sees that the first no longer waits.
    pub(crate) fn give_way(&self, figures: Figures, deadline: Instant) -> Result<bool, LedgerError> {
        self.update(deadline, |view, me| {
            self.write(&mut view.entries[me], figures);
            let gives_way = others_wait(view, me) && !is_short(view.header.budget, &view.pool_claims(), me);
            if gives_way {
                self.lingering.store(0, Relaxed);
                self.wish.store(0, Relaxed);
                self.write(&mut view.entries[me], figures);
            }
            gives_way
        })
    }

    /// Gives up the right to `bytes`, which the driver has back; `notes` say why. Where the ledger is locked, it hears
    /// of it later.
    pub(crate) fn release(&self, bytes: Bytes, figures: Figures, notes: Vec<Note>) {
        if bytes == Bytes::ZERO {
            return;
        }
        self.granted.fetch_sub(bytes.0, Relaxed);
        let tell = |view: &mut LedgerView, me: usize| {
            let slot = view.entries[me].slot;
            notes.iter().for_each(|note| view.note(slot, *note));
        };
        if let Err(error) = self.publish(figures, tell) {
            tracing::debug!(%error, %bytes, "the ledger hears of released memory later");
            notes.into_iter().for_each(|note| self.note(note));
        }
    }

    /// Gives up what was granted and could not be mapped.
    pub(crate) fn undo(&self, bytes: Bytes, figures: Figures) {
        self.release(bytes, figures, vec![Note::new(EventKind::Undone, Reason::Device, bytes)]);
    }

    /// Something happened that the events hear of with the next update.
    pub(crate) fn note(&self, note: Note) {
        self.entry.note(note);
    }

    /// The caller no longer waits; it has what it wanted, or was refused it. Says whether the events hear of that.
    pub(crate) fn withdraw(&self, posted: Bytes, figures: Figures, refused: bool) -> bool {
        if posted == Bytes::ZERO {
            return false;
        }
        self.waiting.fetch_sub(posted.0, Relaxed);
        let withdrawn = self.update(Instant::now() + WITHDRAW_PATIENCE, |view, me| {
            self.write(&mut view.entries[me], figures);
            if refused {
                let free = free_for(view, me, &Asker::Passing);
                view.note(view.entries[me].slot, refusal(view, me, posted, free));
            }
        });
        if let Err(error) = &withdrawn {
            tracing::debug!(%error, "the ledger hears of a withdrawn demand later");
        }
        withdrawn.is_ok()
    }

    /// Writes everything this pool says of itself, and `change` on top, which gets the place of the pool's entry.
    pub(crate) fn publish(
        &self,
        figures: Figures,
        change: impl FnOnce(&mut LedgerView, usize),
    ) -> Result<(), LedgerError> {
        self.update(Instant::now() + LEDGER_PATIENCE, |view, me| {
            self.write(&mut view.entries[me], figures);
            change(view, me);
        })
    }

    /// Looks after the ledger: dead owners, memory on its way back, the budget where nobody gave one.
    pub(crate) fn maintain(&self) -> Result<(), LedgerError> {
        for _ in 0..LOOKS {
            if self.look_after()? {
                break;
            }
        }
        Ok(())
    }

    /// One round; says whether the device's answer was of the ledger as it is.
    fn look_after(&self) -> Result<bool, LedgerError> {
        // Asked before the lock is taken: a driver may take its time. What the ledger says is read before that, so that
        // what changes while the driver answers can be seen.
        let ledger = self.ledger.read().ok();
        let memory = self.backend.as_ref().and_then(|backend| backend.memory().ok());
        let used = memory.map_or(u64::MAX, |memory| memory.total.saturating_sub(memory.free).0);
        self.device_used.store(used, Relaxed);
        let look = ledger.zip(memory).map(|(ledger, memory)| DeviceLook { memory, changes: ledger.header.changes });
        self.update(Instant::now() + LEDGER_PATIENCE, |view, me| {
            let is_of_now = look.is_none_or(|look| look.is_of(view));
            self.tidy(view, me);
            let Some(DeviceLook { memory, .. }) = look.filter(|_| is_of_now) else { return is_of_now };
            let returning = view.entries.iter().any(|entry| entry.state == EntryState::Returning);
            let falls = non_pool_falls(view, memory);
            // While memory of the dead comes back a fall says nothing: they are counted, and it is gone.
            let fell_before = self.saw_fall.swap(falls && !returning, Relaxed);
            if !returning && (!falls || fell_before) {
                refresh_budget(view, memory, self.is_asynchronous(), now_ms());
            }
            true
        })
    }

    /// Whether pools hold more than a budget that somebody gave. Looked at under the lock: a reader without it may see memory twice that
    /// goes from one pool to another, and nothing in use is given up for that.
    pub(crate) fn is_above_given_budget(&self, view: &LedgerView) -> bool {
        let is_above = |view: &LedgerView| view.header.explicit_budget && view.reserved() > view.header.budget;
        is_above(view) && self.update(Instant::now() + LEDGER_PATIENCE, |view, _| is_above(view)).unwrap_or(false)
    }

    /// Whether the entry in the ledger says something else than [`write`](Self::write) would.
    pub(crate) fn differs(&self, entry: &LedgerEntry, figures: Figures) -> bool {
        let mut now = entry.clone();
        self.write(&mut now, figures);
        now != *entry
    }

    /// What this pool claims of the device at this moment, on the terms that its entry has.
    pub(crate) fn claim(&self, entry: &LedgerEntry, figures: Figures) -> PoolClaim {
        let mut now = entry.clone();
        self.write(&mut now, figures);
        now.claim()
    }

    fn write(&self, entry: &mut LedgerEntry, figures: Figures) {
        entry.reserved = self.granted();
        entry.idle = figures.spare.min(entry.reserved);
        // Pages being mapped count as used: they are about to be.
        entry.in_use = entry.reserved.saturating_sub(entry.idle);
        entry.cached = figures.cached.min(entry.in_use);
        entry.demand = self.demand();
        entry.wish = Bytes(self.wish.load(Relaxed));
        entry.reclaim = figures.reclaim;
        entry.counters = self.tally.counters();
    }

    fn note_demand(&self, asker: &mut Asker<'_>, missing: Bytes) {
        match asker {
            Asker::Reserve => {}
            Asker::Waiting(posted) => {
                self.waiting.fetch_add(missing.0, Relaxed);
                self.waiting.fetch_sub(posted.0, Relaxed);
                **posted = missing;
            }
            Asker::Leaving(posted) => {
                self.waiting.fetch_sub(posted.0, Relaxed);
                **posted = Bytes::ZERO;
            }
            Asker::Passing => {
                self.lingering.store(missing.0, Relaxed);
                self.linger_until_ms.store(until_ms(LINGER), Relaxed);
            }
        }
    }

    /// Whether the device gives memory back when it likes to, and not when it is told to.
    pub(crate) fn is_asynchronous(&self) -> bool {
        self.backend.as_ref().is_some_and(|backend| backend.capabilities().needs_fence)
    }

    /// Settles what dead owners left (every update reaps them before). Says where our entry is then.
    fn tidy(&self, view: &mut LedgerView, me: usize) -> usize {
        let (now, slot) = (now_ms(), view.entries[me].slot);
        let used = Some(Bytes(self.device_used.load(Relaxed))).filter(|used| used.0 < u64::MAX);
        if settle_returning(view, now, self.is_asynchronous(), used) {
            view.reap(now);
        }
        view.index_of(slot).expect("our own lock is held, so nobody reaps our entry")
    }

    fn update<T>(&self, deadline: Instant, change: impl FnOnce(&mut LedgerView, usize) -> T) -> Result<T, LedgerError> {
        assert_unlocked("a ledger update");
        self.entry.update(deadline, |view, me| {
            let slot = view.entries[me].slot;
            let outcome = change(view, me);
            if let Some(me) = view.index_of(slot) {
                self.note_headroom(view.header.budget, view.pool_claims(), me);
            }
            outcome
        })
    }
}

fn until_ms(time: Duration) -> u64 {
    now_ms().saturating_add(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

/// Why `bytes` were not granted when `free` were free, and to whom the rest belongs.
fn refusal(view: &LedgerView, me: usize, bytes: Bytes, free: Bytes) -> Note {
    let mine = &view.entries[me];
    let others = || view.entries.iter().enumerate().filter(|&(at, _)| at != me).map(|(_, entry)| entry);
    let left_of = |taken: &dyn Fn(&LedgerEntry) -> Bytes| {
        others().map(taken).fold(view.header.budget.saturating_sub(mine.reserved), Bytes::saturating_sub)
    };
    let most = |weigh: &dyn Fn(&LedgerEntry) -> Bytes| {
        others().filter(|entry| weigh(entry) > Bytes::ZERO).max_by_key(|entry| weigh(entry)).map(|entry| entry.slot)
    };
    let unused_floor = |entry: &LedgerEntry| entry.claim().kept_floor().saturating_sub(entry.reserved);
    let bound = mine.limit.min(mine.ceiling).saturating_sub(mine.reserved);
    let (reason, free, peer) = if bound < bytes {
        (if mine.ceiling < mine.limit { Reason::Ceiling } else { Reason::Limit }, bound, None)
    } else if left_of(&|entry| entry.reserved) < bytes {
        (Reason::Held, free, most(&|entry| entry.reserved))
    } else if left_of(&|entry| entry.reserved.max(entry.claim().kept_floor())) < bytes {
        (Reason::Floors, free, most(&unused_floor))
    } else {
        (Reason::Waiters, free, most(&|entry| entry.demand))
    };
    Note { free, peer, ..Note::new(EventKind::Refused, reason, bytes) }
}

fn free_for(view: &LedgerView, me: usize, asker: &Asker<'_>) -> Bytes {
    if matches!(asker, Asker::Reserve) && others_wait(view, me) {
        return Bytes::ZERO;
    }
    grantable(view.header.budget, &view.pool_claims(), me)
}

/// Whether another pool that lives waits for memory.
fn others_wait(view: &LedgerView, me: usize) -> bool {
    let waits = |entry: &LedgerEntry| entry.state == EntryState::Live && entry.demand > Bytes::ZERO;
    view.entries.iter().enumerate().any(|(at, entry)| at != me && waits(entry))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tidekv_core::geometry::Placement;
    use tidekv_core::units::GroupId;
    use tidekv_mem::fake::FakeBackend;
    use tidekv_mem::{CallMeter, Capabilities, MemError, MemoryInfo, RawPages, Region, RegionOptions};
    use tidekv_shm::{BudgetAuthor, BudgetRight, DeviceName, EntrySpec, PoolName, RuntimeDir};

    use super::*;

    /// A device of 1 GiB that says how much of it is in use, and takes its time: something happens after it looked.
    #[derive(Debug)]
    struct Device {
        fake: FakeBackend,
        used: AtomicU64,
        neighbour: OwnedEntry,
        /// What the neighbour keeps while the device answers; it gives the rest back.
        meanwhile: Mutex<Option<Bytes>>,
    }

    impl Device {
        fn neighbour_holds(&self, bytes: Bytes) {
            let hold = |view: &mut LedgerView, me: usize| view.entries[me].reserved = bytes;
            self.neighbour.update(Instant::now() + Duration::from_secs(10), hold).unwrap();
        }
    }

    impl Backend for Device {
        fn capabilities(&self) -> &Capabilities {
            self.fake.capabilities()
        }

        fn memory(&self) -> Result<MemoryInfo, MemError> {
            let used = Bytes(self.used.load(Relaxed));
            if let Some(bytes) = self.meanwhile.lock().unwrap().take() {
                let held = self.neighbour.read().unwrap().reserved;
                self.used.fetch_sub(held.0 - bytes.0, Relaxed);
                self.neighbour_holds(bytes);
            }
            Ok(MemoryInfo { total: Bytes::gib(1), free: Bytes::gib(1).saturating_sub(used) })
        }

        fn held(&self) -> Bytes {
            self.fake.held()
        }

        fn meter(&self) -> &CallMeter {
            self.fake.meter()
        }

        fn open_region(&self, placement: &Placement, options: RegionOptions) -> Result<Box<dyn Region>, MemError> {
            self.fake.open_region(placement, options)
        }

        fn raw_pages(&self, page_bytes: Bytes, pages: u32) -> Result<Box<dyn RawPages>, MemError> {
            self.fake.raw_pages(page_bytes, pages)
        }
    }

    /// An account whose neighbour holds 100 MiB, on a device where others use 50 MiB, and half of it is for pools.
    fn beside_a_neighbour(test: impl FnOnce(&Account, &Device, &dyn Fn() -> (Bytes, Bytes))) {
        let dir = tempfile::tempdir().unwrap();
        let open = || Ledger::open(&RuntimeDir::at(dir.path()), &DeviceName::host()).unwrap();
        let register = |name: &str| {
            let spec = EntrySpec::new(PoolName::new(name).unwrap(), GroupId(0), Bytes::mib(2));
            open().register(Instant::now() + Duration::from_secs(10), spec).unwrap()
        };
        let device = Arc::new(Device {
            fake: FakeBackend::default(),
            used: AtomicU64::new(Bytes::mib(150).0),
            neighbour: register("neighbour"),
            meanwhile: Mutex::new(None),
        });
        device.neighbour_holds(Bytes::mib(100));
        let account = Account::new(register("pool"), Some(device.clone()), true);
        let half = |view: &mut LedgerView, _| {
            view.header.decide_utilization(0.5, BudgetAuthor::here(BudgetRight::Pool, "pool"));
        };
        account.publish(Figures::default(), half).unwrap();
        let header = || {
            let header = open().read().unwrap().header;
            (header.non_pool, header.budget)
        };
        account.maintain().unwrap();
        assert_eq!(header(), (Bytes::mib(50), Bytes::mib(512 - 50)));
        test(&account, &device, &header);
    }

    #[test]
    fn memory_that_a_neighbour_gives_back_while_the_device_answers_is_not_taken_for_others() {
        beside_a_neighbour(|account, device, header| {
            *device.meanwhile.lock().unwrap() = Some(Bytes::ZERO);
            account.maintain().unwrap();
            assert_eq!(header(), (Bytes::mib(50), Bytes::mib(512 - 50)), "asked before, and once more behind it");
            // What others really take is believed at once.
            device.used.store(Bytes::mib(90).0, Relaxed);
            account.maintain().unwrap();
            assert_eq!(header(), (Bytes::mib(90), Bytes::mib(512 - 90)));
        });
    }

    /// Bytes are counted before they are mapped: on the host too, where the difference was taken for memory that others had
    /// given back, and promised to all.
    #[test]
    fn memory_that_is_granted_and_not_mapped_yet_is_not_taken_from_others() {
        beside_a_neighbour(|account, device, header| {
            device.neighbour_holds(Bytes::mib(140));
            account.maintain().unwrap();
            assert_eq!(header(), (Bytes::mib(50), Bytes::mib(512 - 50)), "a fall, seen once");
            device.used.store(Bytes::mib(190).0, Relaxed);
            account.maintain().unwrap();
            assert_eq!(header(), (Bytes::mib(50), Bytes::mib(512 - 50)), "it was mapped");
            device.used.store(Bytes::mib(160).0, Relaxed);
            account.maintain().unwrap();
            assert_eq!(header(), (Bytes::mib(50), Bytes::mib(512 - 50)), "the one before does not count");
            account.maintain().unwrap();
            assert_eq!(header(), (Bytes::mib(20), Bytes::mib(512 - 20)), "seen twice: others did end");
        });
    }
}
