//! What pools tell of themselves: real sequences of grants, demands, refusals and giving back, read as an operator does.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use support::{BLOCKS, Device, NO_WORK, PAGE, SOON, alloc, pages};
use tidekv_core::units::Bytes;
use tidekv_mem::Backend;
use tidekv_mem::fake::FakeBackend;
use tidekv_pool::{KvPool, PoolConfig, PoolError, ReservePolicy, Share};
use tidekv_shm::events::EventsWatch;
use tidekv_shm::{DeviceName, Event, EventKind, EventReader, Reason, segment};

const DIR: &str = "TIDEKV_POOL_EVENTS_DIR";

/// Reads events as they come.
struct Tape {
    reader: EventReader,
    watch: EventsWatch,
    events: Vec<Event>,
}

impl Tape {
    /// The device has at least one pool.
    fn of(device: &Device) -> Self {
        let name = DeviceName::new(&device.backend.capabilities().id).unwrap();
        let dir = device.runtime_dir();
        let watch = EventsWatch::new(&dir).unwrap();
        watch.add(&dir.events_path(&name)).unwrap();
        Self { reader: EventReader::open(&dir, &name).unwrap().expect("a pool has joined"), watch, events: Vec::new() }
    }

    fn read(&mut self) {
        let batch = self.reader.read().unwrap();
        assert_eq!((batch.overwritten, batch.skipped), (0, 0));
        self.events.extend(batch.events);
    }

    /// Waits for an event of this kind about this pool, and says its place on the tape.
    fn wait(&mut self, kind: EventKind, pool: &str) -> usize {
        self.wait_for(|event| event.kind == kind && name(event) == pool)
    }

    /// Waits for the first event that is as it should be, and says its place on the tape.
    fn wait_for(&mut self, is_it: impl Fn(&Event) -> bool) -> usize {
        let deadline = Instant::now() + 6 * SOON;
        loop {
            self.read();
            if let Some(at) = self.events.iter().position(&is_it) {
                return at;
            }
            assert!(Instant::now() < deadline, "it did not come:\n{self}");
            let mut fds = [PollFd::new(&self.watch, PollFlags::IN)];
            poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 50_000_000 })).unwrap();
            self.watch.drain().unwrap();
        }
    }

    fn find(&mut self, kind: EventKind, pool: &str) -> Event {
        let at = self.wait(kind, pool);
        self.events[at].clone()
    }

    fn of_kind(&self, kind: EventKind) -> Vec<&Event> {
        self.events.iter().filter(|event| event.kind == kind).collect()
    }
}

impl std::fmt::Display for Tape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for event in &self.events {
            let (kind, reason) = (event.kind.word(), event.reason.word());
            writeln!(f, "{} {kind} {} {reason} {} x{}", event.sequence, name(event), event.bytes, event.count)?;
        }
        Ok(())
    }
}

fn name(event: &Event) -> &str {
    event.pool.as_ref().map_or("-", |pool| &pool.name)
}

fn peer(event: &Event) -> Option<&str> {
    event.peer.as_ref().map(|pool| pool.name.as_str())
}

/// The story of a share: a has all, b asks, a's engine is asked, a gives, b is granted.
#[test]
fn one_takes_all_and_gives_when_another_asks() {
    use EventKind::{Asked, Budget, EvictAsked, Granted, Joined, Reclaimed};
    let device = Device::new(8);
    let (a, b) = (device.pool("a"), device.pool("b"));
    let mut tape = Tape::of(&device);
    let held = Mutex::new(alloc(&a, 8 * BLOCKS));
    let evicting = a.clone();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| b.alloc_within(4 * BLOCKS, 6 * SOON, &mut Vec::new()));
        tape.wait(EvictAsked, "a");
        let evicted = held.lock().unwrap().split_off(4 * BLOCKS as usize);
        evicting.free(&evicted, NO_WORK).unwrap();
        waiting.join().unwrap().unwrap();
    });
    tape.wait(Granted, "b");

    let order = [(Joined, "a"), (Joined, "b"), (Granted, "a"), (Asked, "b"), (EvictAsked, "a"), (Reclaimed, "a")];
    let order: Vec<usize> = order.into_iter().chain([(Granted, "b")]).map(|(kind, of)| tape.wait(kind, of)).collect();
    assert!(order.is_sorted(), "{order:?}\n{tape}");

    let budget = tape.find(Budget, "-");
    assert_eq!((budget.reason, budget.budget), (Reason::Given, pages(8)));
    let granted = tape.find(Granted, "a");
    assert_eq!((granted.reason, granted.bytes, granted.held), (Reason::Need, pages(8), pages(8)));
    let asked = tape.find(Asked, "b");
    assert_eq!((asked.bytes, asked.held, asked.share, asked.free), (pages(4), Bytes::ZERO, pages(4), Bytes::ZERO));
    let urged = tape.find(EvictAsked, "a");
    assert_eq!((urged.reason, urged.bytes, peer(&urged)), (Reason::Neighbours, pages(4), Some("b")));
    let given: u64 = tape.of_kind(Reclaimed).iter().map(|event| event.bytes.0).sum();
    let first = tape.find(Reclaimed, "a");
    assert_eq!((name(&first), peer(&first), first.reason), ("a", Some("b"), Reason::Neighbours));
    assert!(given <= pages(4).0 && first.bytes >= PAGE, "{tape}");
    let granted = tape.find(Granted, "b");
    assert_eq!((granted.bytes, granted.held, granted.budget), (pages(4), pages(4), pages(8)));
    assert_eq!(granted.pid, std::process::id());
}

#[test]
fn every_refusal_says_why() {
    let device = Device::new(8);
    let share = |floor, ceiling| Share { floor: pages(floor), ceiling, ..Share::default() };
    let quiet = KvPool::open(PoolConfig { share: share(3, None), ..device.config("quiet") }).unwrap();
    let low = KvPool::open(PoolConfig { share: share(0, Some(pages(1))), ..device.config("low") }).unwrap();
    let greedy = device.pool("greedy");
    let mut tape = Tape::of(&device);
    let _held = alloc(&greedy, 4 * BLOCKS);
    let refuse = |pool: &KvPool, count: u32| {
        assert!(pool.alloc(count * BLOCKS, &mut Vec::new()).unwrap_err().is_exhausted());
    };

    refuse(&greedy, 2);
    let floors = tape.find(EventKind::Refused, "greedy");
    assert_eq!((floors.reason, floors.bytes, floors.free), (Reason::Floors, pages(2), pages(1)));
    assert_eq!(peer(&floors), Some("quiet"));
    refuse(&greedy, 5);
    refuse(&low, 2);
    greedy.set_limit(pages(5), 1).unwrap();
    refuse(&greedy, 2);
    let error = greedy.alloc(1000 * BLOCKS, &mut Vec::new()).unwrap_err();
    assert!(matches!(error, PoolError::NeverFits { .. }), "{error}");
    let mut refused = |reason| {
        let at =
            tape.wait_for(|event| (event.kind, event.reason, name(event)) == (EventKind::Refused, reason, "greedy"));
        tape.events[at].clone()
    };
    let (held, limit, never) = (refused(Reason::Held), refused(Reason::Limit), refused(Reason::NeverFits));
    assert_eq!((never.bytes, never.free), (pages(1000), pages(64)));
    assert_eq!((held.bytes, held.free, held.held), (pages(5), pages(1), pages(4)));
    let ceiling = tape.find(EventKind::Refused, "low");
    assert_eq!((ceiling.reason, ceiling.bytes, ceiling.limit), (Reason::Ceiling, pages(2), pages(1)));
    assert_eq!((limit.bytes, limit.free, limit.limit), (pages(2), pages(1), pages(5)));
    let set = tape.find(EventKind::LimitSet, "greedy");
    assert_eq!((set.reason, set.bytes), (Reason::Engine, pages(5)));
    drop(quiet);
}

#[test]
fn a_caller_that_asks_again_and_again_is_told_a_few_times() {
    let device = Device::new(4);
    let (rich, poor) = (device.pool("rich"), device.pool("poor"));
    let mut tape = Tape::of(&device);
    alloc(&rich, 4 * BLOCKS);
    for _ in 0..3000 {
        poor.alloc(BLOCKS, &mut Vec::new()).unwrap_err();
    }
    // One that waits asks once.
    poor.alloc_within(2 * BLOCKS, Duration::from_millis(50), &mut Vec::new()).unwrap_err();
    drop(poor);
    tape.wait(EventKind::Left, "poor");
    let refused = tape.of_kind(EventKind::Refused);
    assert_eq!(refused[0].count, 1);
    assert_eq!(refused.iter().map(|event| event.count).sum::<u32>(), 3001, "{tape}");
    assert!(refused.len() + tape.of_kind(EventKind::Asked).len() < 60, "{tape}");
}

#[test]
fn a_lowered_limit_and_idleness_are_told_apart() {
    let device = Device::new(32);
    let reserve = ReservePolicy::Fixed { min: 0, max: 4 };
    let pool = KvPool::open(PoolConfig { reserve, ..device.config("a") }).unwrap();
    let mut tape = Tape::of(&device);
    let leases = alloc(&pool, 16 * BLOCKS);
    // kvcached's own tools write the segment's word and nothing else.
    segment::write_limit(&device.runtime_dir().segment_path(pool.name()), pages(12)).unwrap();
    let set = tape.find(EventKind::LimitSet, "a");
    assert_eq!((set.reason, set.bytes), (Reason::Kvcached, pages(12)));
    let urged = tape.find(EventKind::EvictAsked, "a");
    assert_eq!((urged.reason, urged.bytes, peer(&urged)), (Reason::Limit, pages(4), None));
    // Four of these go because of the limit, and four stay as the reserve.
    pool.free(&leases[8 * BLOCKS as usize..], NO_WORK).unwrap();
    let applied = tape.find(EventKind::LimitApplied, "a");
    assert_eq!((applied.bytes, applied.limit, applied.held), (pages(12), pages(12), pages(12)));
    // All of these go because the reserve is full.
    pool.free(&leases[..8 * BLOCKS as usize], NO_WORK).unwrap();
    device.until("they are back", |view| view.entries[0].reserved == pages(4));
    drop(pool);
    tape.wait(EventKind::Left, "a");
    let sum = |kind| Bytes(tape.of_kind(kind).iter().map(|event| event.bytes.0).sum());
    assert_eq!((sum(EventKind::Shrunk), sum(EventKind::Decayed)), (pages(4), pages(8)), "{tape}");
    assert!(tape.of_kind(EventKind::Shrunk).iter().all(|event| event.reason == Reason::Limit));
}

#[test]
fn a_trim_says_who_asked() {
    let device = Device::new(32);
    let pool = device.pool("a");
    let mut tape = Tape::of(&device);
    let leases = alloc(&pool, 6 * BLOCKS);
    pool.free(&leases[..2 * BLOCKS as usize], NO_WORK).unwrap();
    assert_eq!(pool.trim().unwrap(), pages(2));
    let trimmed = tape.find(EventKind::Trimmed, "a");
    assert_eq!(trimmed.reason, Reason::Engine);
    pool.free(&leases[2 * BLOCKS as usize..], NO_WORK).unwrap();
    device.until("all are known to be idle", |view| view.entries[0].idle == pages(4));
    device.ledger().update(Instant::now() + SOON, |view| view.entries[0].trim_request += 1).unwrap();
    let asked = tape.find(EventKind::TrimAsked, "a");
    assert_eq!((asked.reason, asked.bytes), (Reason::Operator, pages(4)));
    device.until("the trim is done", |view| view.entries[0].trim_done == 1);
    drop(pool);
    tape.wait(EventKind::Left, "a");
    let by = |reason| {
        let trimmed = tape.of_kind(EventKind::Trimmed).into_iter().filter(|event| event.reason == reason);
        Bytes(trimmed.map(|event| event.bytes.0).sum())
    };
    assert_eq!((by(Reason::Engine), by(Reason::Operator)), (pages(2), pages(4)), "{tape}");
}

#[test]
fn a_device_that_refuses_undoes_the_grant() {
    let small = Arc::new(FakeBackend::with_total(pages(2)));
    let device = Device { backend: small, ..Device::new(8) };
    let pool = device.pool("a");
    let mut tape = Tape::of(&device);
    let error = pool.alloc(4 * BLOCKS, &mut Vec::new()).unwrap_err();
    assert!(error.is_exhausted(), "{error}");
    let undone = tape.find(EventKind::Undone, "a");
    assert_eq!((undone.reason, undone.bytes, undone.held), (Reason::Device, pages(4), Bytes::ZERO));
    let refused = tape.find(EventKind::Refused, "a");
    assert_eq!((refused.reason, refused.bytes), (Reason::Device, pages(4)));
}

/// A process of its own that holds three pages until it is killed.
#[test]
#[ignore = "started by another test, to be killed"]
fn victim() {
    let folder = std::env::var_os(DIR).expect("started by another test");
    // What it leaves behind lies in the other test's folder.
    let dir = tempfile::tempdir_in(&folder).unwrap();
    let device = Device { dir, backend: Arc::new(FakeBackend::default()), budget_pages: 8 };
    let config = PoolConfig { runtime_dir: tidekv_shm::RuntimeDir::at(folder), ..device.config("victim") };
    let pool = KvPool::open(config).unwrap();
    let _leases = alloc(&pool, 3 * BLOCKS);
    println!("@ready");
    let _ = std::io::stdin().read_line(&mut String::new());
}

struct Victim(Child);

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_killed_pool_is_found_dead_and_its_bytes_come_back() {
    let device = Device::new(8);
    let survivor = device.pool("survivor");
    let mut tape = Tape::of(&device);
    let mut victim = Victim(
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "victim", "--ignored", "--nocapture"])
            .env(DIR, device.dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    let mut lines = BufReader::new(victim.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.contains("@ready")), "the victim ended early");
    let pid = victim.0.id();
    victim.0.kill().unwrap();
    victim.0.wait().unwrap();
    let (died, returned) = (tape.wait(EventKind::Died, "victim"), tape.wait(EventKind::Returned, "victim"));
    assert!(died < returned, "{tape}");
    let (died, returned) = (&tape.events[died], &tape.events[returned]);
    assert_eq!((died.bytes, died.pid, died.held), (pages(3), pid, pages(3)));
    assert_eq!((returned.bytes, returned.held), (pages(3), Bytes::ZERO));
    assert_eq!(tape.of_kind(EventKind::Died).len(), 1, "told once:\n{tape}");
    drop(survivor);
}
