//! Arenas between real processes: killed at any instruction, forked, racing. After every death the verifier finds nothing
//! wrong, no block is lost, none has two owners and none that somebody holds was freed.
//!
//! ```text
//!   TIDEKV_ARENA_KILLS=1000    rounds of the kill test (default 40)
//!   TIDEKV_ARENA_SOAK=60       seconds of the soak (default 2)
//! ```

mod support;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use support::{PATIENCE, Worker, folder, listen, role, say};
use tidekv_core::units::Bytes;
use tidekv_shm::RuntimeDir;
use tidekv_shm::arena::{
    AllocError, Arena, ArenaConfig, ArenaError, ArenaName, Handle, HandleError, LocalArena, Prefault, Report,
};

const WORKERS: usize = 4;
/// What a worker holds at most.
const HELD_MAX: usize = 200;

fn name() -> ArenaName {
    ArenaName::new("between").expect("a name")
}

/// Small enough that workers run out of it, so that the slow paths are met as often as the fast one.
fn config() -> ArenaConfig {
    ArenaConfig { segment: Bytes::mib(8), limit: Bytes::mib(64), initial: Bytes::mib(8), ..ArenaConfig::default() }
}

fn attach(dir: &RuntimeDir) -> Arena {
    Arena::attach(dir, &name(), Prefault::Off).expect("an arena")
}

fn create(dir: &RuntimeDir) -> Arena {
    Arena::create(dir, &name(), &config(), Prefault::Off).expect("an arena")
}

fn from_env(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn sound(arena: &Arena) -> Report {
    let report = arena.verify().expect("a report");
    assert!(report.problems.is_empty(), "{:#?}", report.problems);
    report
}

/// The processes that the tests below start.
#[test]
fn worker() {
    let Some((role, dir)) = role() else { return };
    let mut words = role.split(' ');
    let role = words.next().expect("a role");
    let mut number = || words.next().and_then(|word| word.parse().ok()).expect("a number");
    match role {
        "churn" => churn(&dir, number(), Mailbox(Handle::from_bits(number()).expect("a handle"))),
        "hold" => hold(&dir),
        "million" => million(&dir),
        "fork" => fork(&dir),
        "consume" => consume(&dir),
        "create" => create_and_hold(&dir),
        "grow" => grow(&dir),
        other => panic!("no role {other}"),
    }
}

/// A small generator of our own: the same seed gives the same run in every process.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
}

/// Blocks that this process holds, each stamped with its handle at both ends.
struct Stamped {
    arena: Arena,
    local: LocalArena,
    held: Vec<Handle>,
    random: Random,
}

impl Stamped {
    fn new(arena: Arena, seed: u64) -> Self {
        let local = arena.local().expect("a cache");
        Self { arena, local, held: Vec::new(), random: Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1) }
    }

    fn stamp(&self, handle: Handle) {
        let block = self.arena.block(handle).expect("held");
        let stamp = handle.to_bits().to_le_bytes();
        block.copy_in(0, &stamp).expect("inside");
        block.copy_in(block.len() - 8, &stamp).expect("inside");
    }

    /// A block that somebody else got too, or that was freed under us, has another stamp.
    fn check(&self, handle: Handle) {
        let block = self.arena.block(handle).unwrap_or_else(|error| panic!("{handle:?} that we hold: {error}"));
        for offset in [0, block.len() - 8] {
            let mut stamp = [0; 8];
            block.copy_out(offset, &mut stamp).expect("inside");
            assert_eq!(u64::from_le_bytes(stamp), handle.to_bits(), "{handle:?} belongs to somebody else too");
        }
    }

    fn alloc(&mut self) {
        let bytes = match self.random.below(100) {
            0 => 1 << 20 | self.random.below(2 << 20),
            1..10 => self.random.below(1 << 20),
            _ => self.random.below(64 << 10),
        };
        let result = match self.random.below(8) {
            0 => self.local.alloc_aligned(bytes, 4096 << self.random.below(10)),
            _ => self.local.alloc(bytes),
        };
        match result {
            Ok(handle) => {
                self.stamp(handle);
                self.held.push(handle);
            }
            Err(AllocError::Exhausted { .. }) => self.free_some(self.held.len() / 2),
            Err(error) => panic!("{error}"),
        }
    }

    fn take_one(&mut self) -> Option<Handle> {
        let at = if self.held.is_empty() { return None } else { self.random.below(self.held.len()) };
        let handle = self.held.swap_remove(at);
        self.check(handle);
        Some(handle)
    }

    fn free_some(&mut self, count: usize) {
        for _ in 0..count {
            if let Some(handle) = self.take_one() {
                self.local.free(handle).expect("we hold it");
            }
        }
    }

    fn resize(&mut self) {
        let Some(handle) = self.take_one() else { return };
        match self.local.resize(handle, self.random.below(3 << 20)) {
            Ok(new) => {
                self.stamp(new);
                self.held.push(new);
            }
            Err(AllocError::Exhausted { .. }) => self.held.push(handle),
            Err(error) => panic!("{error}"),
        }
    }

    fn share(&mut self) {
        let Some(handle) = self.take_one() else { return };
        self.local.share(handle).expect("we hold it");
        self.local.retain(handle).expect("we shared it");
        self.local.release(handle).expect("held twice");
        self.check(handle);
        self.local.release(handle).expect("held once");
        assert!(self.arena.address(handle).is_err(), "nobody else retained it");
    }

    /// Leaves the cache and takes another: spans change hands.
    fn change_cache(&mut self) {
        self.local = self.arena.local().expect("a cache");
    }

    fn step(&mut self) {
        match self.random.below(1000) {
            0 => self.change_cache(),
            1..20 => self.resize(),
            20..60 => self.share(),
            60..540 if self.held.len() < HELD_MAX => self.alloc(),
            _ => self.free_some(1),
        }
    }
}

/// Where processes leave blocks for others to free: words in a block of the arena. Whoever dies with blocks in it has
/// them taken back, so a handle in it may be stale.
#[derive(Clone, Copy)]
struct Mailbox(Handle);

impl Mailbox {
    const SLOTS: usize = 64;

    fn new(arena: &Arena, local: &mut LocalArena) -> Self {
        let handle = local.alloc(8 * Self::SLOTS).expect("room");
        arena.block(handle).expect("held").copy_in(0, &[0; 8 * Self::SLOTS]).expect("inside");
        Self(handle)
    }

    /// Puts a handle (or nothing) into a slot, and takes what was there.
    fn swap(self, arena: &Arena, slot: usize, handle: Option<Handle>) -> Option<Handle> {
        let words = arena.address(self.0).expect("held as long as the test runs").cast::<AtomicU64>();
        let word = words.as_ptr().wrapping_add(slot % Self::SLOTS);
        // SAFETY: the block has this many words, they are used as atomics only, and the arena is attached.
        let word = unsafe { &*word };
        Handle::from_bits(word.swap(handle.map_or(0, Handle::to_bits), Ordering::AcqRel))
    }
}

/// Frees what another left in the mailbox.
fn free_anothers(local: &mut LocalArena, handle: Handle) {
    match local.free(handle) {
        // Stale: its maker died, and the block was taken back.
        Ok(()) | Err(HandleError::Stale) => {}
        Err(error) => panic!("{handle:?} from the mailbox: {error}"),
    }
}

/// Allocates, frees, resizes, shares and changes caches, in two threads, and lets others free some of its blocks, until
/// it is killed, or until it is told to end.
fn churn(dir: &RuntimeDir, seed: u64, mailbox: Mailbox) {
    let arena = attach(dir);
    say("ready");
    let stop = std::thread::spawn(listen);
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let (arena, stop) = (arena.clone(), &stop);
            scope.spawn(move || {
                let mut stamped = Stamped::new(arena, seed * 2 + thread);
                while !stop.is_finished() {
                    (0..50).for_each(|_| stamped.step());
                    let given = stamped.take_one();
                    let slot = stamped.random.below(Mailbox::SLOTS);
                    if let Some(handle) = mailbox.swap(&stamped.arena, slot, given) {
                        free_anothers(&mut stamped.local, handle);
                    }
                }
                stamped.free_some(stamped.held.len());
            });
        }
    });
    say("done");
    listen();
    drop(arena);
    say("left");
    listen();
}

#[test]
fn processes_killed_at_any_moment_leave_nothing_behind() {
    let rounds = from_env("TIDEKV_ARENA_KILLS", 40);
    let (_folder, dir) = folder();
    let arena = create(&dir);
    let mut stamped = Stamped::new(arena.clone(), 99);
    let mailbox = Mailbox::new(&arena, &mut stamped.local);
    let start = |seed: u64| Worker::start(&dir, &format!("churn {seed} {}", mailbox.0.to_bits()));
    let mut workers: Vec<Worker> = (0..WORKERS as u64).map(start).collect();
    workers.iter_mut().for_each(|worker| worker.expect("ready"));
    let mut random = Random(7);
    let mut blocks = 0;
    for round in 0..rounds {
        // The survivor works meanwhile, so that its own spans and those of the dead are mixed.
        (0..random.below(400)).for_each(|_| stamped.step());
        if let Some(handle) = mailbox.swap(&arena, random.below(Mailbox::SLOTS), None) {
            free_anothers(&mut stamped.local, handle);
        }
        let victim = random.below(WORKERS);
        workers[victim].kill();
        let recovered = arena.recover().expect("recovery");
        blocks += recovered.blocks;
        let report = sound(&arena);
        assert!(report.members.iter().all(|member| member.alive), "round {round}: {:?}", report.members);
        let ours = report.members.iter().find(|member| member.member == arena.member()).expect("we are attached");
        assert_eq!(ours.blocks, stamped.held.len() as u64 + 1, "round {round}: what we hold, and the mailbox");
        stamped.held.iter().for_each(|handle| stamped.check(*handle));
        workers[victim] = start(1000 + round);
        workers[victim].expect("ready");
    }
    assert!(blocks > 0, "nobody was killed with a block in hand");
    workers.clear();
    arena.recover().expect("recovery");
    let report = sound(&arena);
    assert_eq!(report.live + report.shared, stamped.held.len() as u64 + 1, "only what we hold is held");
    stamped.local.free(mailbox.0).expect("ours");
    stamped.free_some(stamped.held.len());
    drop(stamped);
    let report = sound(&arena);
    assert_eq!((report.held, report.spans), (Bytes(0), 0), "everything came back");
    assert_eq!(report.unused.0, u64::from(report.segments) * report.segment_bytes.0);
}

#[test]
fn many_processes_for_a_while() {
    let seconds = from_env("TIDEKV_ARENA_SOAK", 2);
    let (_folder, dir) = folder();
    let arena = create(&dir);
    let mut stamped = Stamped::new(arena.clone(), 5);
    let mailbox = Mailbox::new(&arena, &mut stamped.local);
    let start = |seed: u64| Worker::start(&dir, &format!("churn {seed} {}", mailbox.0.to_bits()));
    let mut workers: Vec<Worker> = (0..WORKERS as u64).map(start).collect();
    workers.iter_mut().for_each(|worker| worker.expect("ready"));
    let end = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < end {
        (0..100).for_each(|_| stamped.step());
    }
    stamped.free_some(stamped.held.len());
    for worker in &mut workers {
        worker.tell("end");
        worker.expect("done");
    }
    // Nobody has died, so nothing in the mailbox is stale.
    for slot in 0..Mailbox::SLOTS {
        if let Some(handle) = mailbox.swap(&arena, slot, None) {
            stamped.local.free(handle).expect("left by one who lives");
        }
    }
    for worker in &mut workers {
        worker.tell("leave");
        worker.expect("left");
    }
    stamped.local.free(mailbox.0).expect("ours");
    drop(stamped);
    let report = sound(&arena);
    assert_eq!((report.live, report.shared, report.freed, report.spans), (0, 0, 0, 0), "{report:#?}");
}

/// Holds blocks, shares some of them, and says which.
fn hold(dir: &RuntimeDir) {
    let arena = attach(dir);
    let mut local = arena.local().expect("a cache");
    let handles: Vec<Handle> = (0..100).map(|_| local.alloc(16 << 10).expect("room")).collect();
    let big = local.alloc(3 << 20).expect("room");
    for handle in handles[..10].iter().chain([&big]) {
        arena.block(*handle).expect("held").copy_in(0, b"from the dead").expect("inside");
        local.share(*handle).expect("held");
    }
    for handle in handles[..10].iter().chain([&big]) {
        say(&handle.to_bits().to_string());
    }
    listen();
}

#[test]
fn what_others_retained_survives_its_maker() {
    let (_folder, dir) = folder();
    let arena = create(&dir);
    let mut local = arena.local().expect("a cache");
    let mut worker = Worker::start(&dir, "hold");
    let handles: Vec<Handle> =
        (0..11).map(|_| Handle::from_bits(worker.hear().parse().expect("bits")).expect("a handle")).collect();
    for handle in handles[..5].iter().chain([&handles[10]]) {
        local.retain(*handle).expect("shared");
    }
    worker.kill();
    let recovered = arena.recover().expect("recovery");
    assert_eq!((recovered.members, recovered.blocks, recovered.kept), (1, 95, 6), "{recovered:?}");
    let mut bytes = [0; 13];
    for handle in handles[..5].iter().chain([&handles[10]]) {
        arena.block(*handle).expect("we hold it").copy_out(0, &mut bytes).expect("inside");
        assert_eq!(&bytes, b"from the dead");
    }
    assert_eq!(arena.block(handles[5]).expect_err("nobody held it"), HandleError::Stale);
    assert_eq!(sound(&arena).shared, 6);
    for handle in handles[..5].iter().chain([&handles[10]]) {
        local.release(*handle).expect("we hold it");
    }
    drop(local);
    assert_eq!((sound(&arena).held, sound(&arena).spans), (Bytes(0), 0));
}

fn million(dir: &RuntimeDir) {
    let arena = attach(dir);
    let mut local = arena.local().expect("a cache");
    let count = (0..1_000_000).map_while(|_| local.alloc(4096).ok()).count();
    say(&count.to_string());
    listen();
}

/// Survivors need not wait for the dead: a million blocks are back within milliseconds. The bound here is for a loaded
/// machine and a debug build; `arena_speed` measures.
#[test]
fn a_million_blocks_come_back() {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let dir = RuntimeDir::at(folder.path());
    let all = Bytes::mib(4096);
    // Nothing is written to the blocks, but the file has memory behind all of them.
    if rustix::fs::statvfs("/dev/shm").is_ok_and(|space| space.f_bavail * space.f_frsize < all.0 * 3 / 2) {
        use std::io::Write;
        let _ = writeln!(std::io::stderr(), "SKIPPED: a_million_blocks_come_back: /dev/shm has no room for 4 GiB");
        return;
    }
    let config = ArenaConfig { segment: Bytes::mib(512), limit: all, initial: all, ..ArenaConfig::default() };
    let arena = Arena::create(&dir, &name(), &config, Prefault::Off).expect("an arena");
    let mut worker = Worker::start(&dir, "million");
    assert_eq!(worker.hear(), "1000000");
    worker.kill();
    let start = Instant::now();
    let recovered = arena.recover().expect("recovery");
    let took = start.elapsed();
    eprintln!("1,000,000 blocks recovered in {took:?}");
    assert_eq!(recovered.blocks, 1_000_000);
    assert!(took < Duration::from_millis(500), "{took:?}");
}

/// A child neither uses its parent's arena nor keeps its place alive.
fn fork(dir: &RuntimeDir) {
    let arena = attach(dir);
    let mut local = arena.local().expect("a cache");
    let handle = local.alloc(4096).expect("room");
    // SAFETY: the child calls nothing but what a forked child may, and ends without running destructors.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let refused = matches!(local.alloc(4096), Err(AllocError::Forked))
            && arena.address(handle) == Err(HandleError::Forked)
            && local.free(handle) == Err(HandleError::Forked)
            && matches!(arena.recover(), Err(ArenaError::Forked))
            && matches!(arena.local(), Err(ArenaError::Forked));
        drop(local);
        drop(arena);
        say(if refused { "refused" } else { "allowed" });
        // Lives on after the parent, until the test closes its end of the pipe.
        let mut byte = [0_u8; 64];
        // SAFETY: reads into a buffer of this length.
        while unsafe { libc::read(0, byte.as_mut_ptr().cast(), byte.len()) } > 0 {}
        // SAFETY: ends the process.
        unsafe { libc::_exit(0) };
    }
    say("forked");
    loop {
        std::thread::park();
    }
}

#[test]
fn a_forked_child_neither_uses_nor_keeps_its_parents_place() {
    let (_folder, dir) = folder();
    let arena = create(&dir);
    let mut worker = Worker::start(&dir, "fork");
    let mut heard = [worker.hear(), worker.hear()];
    heard.sort();
    assert_eq!(heard, ["forked", "refused"]);
    worker.kill();
    assert_eq!(arena.recover().expect("recovery").blocks, 1, "the child does not hold the lock");
    sound(&arena);
}

/// Retains what it is sent, checks it, and says so.
fn consume(dir: &RuntimeDir) {
    let arena = attach(dir);
    let mut local = arena.local().expect("a cache");
    say("ready");
    loop {
        let line = listen();
        if line == "end" {
            break;
        }
        let handle = Handle::from_bits(line.parse().expect("bits")).expect("a handle");
        local.retain(handle).expect("shared");
        say("retained");
        listen();
        let mut bytes = [0; 8];
        arena.block(handle).expect("held").copy_out(0, &mut bytes).expect("inside");
        local.release(handle).expect("held");
        say(&u64::from_le_bytes(bytes).to_string());
    }
    say("done");
}

#[test]
fn a_block_goes_from_one_process_to_another() {
    let (_folder, dir) = folder();
    let arena = create(&dir);
    let mut local = arena.local().expect("a cache");
    let mut worker = Worker::start(&dir, "consume");
    worker.expect("ready");
    for number in 0..50_u64 {
        let bytes = if number % 10 == 0 { 2 << 20 } else { 20_000 };
        let handle = local.alloc(bytes).expect("room");
        arena.block(handle).expect("held").copy_in(0, &number.to_le_bytes()).expect("inside");
        local.share(handle).expect("held");
        worker.tell(&handle.to_bits().to_string());
        worker.expect("retained");
        local.release(handle).expect("held");
        assert!(arena.address(handle).is_ok(), "the other one has it");
        worker.tell("go on");
        worker.expect(&number.to_string());
        assert_eq!(arena.address(handle), Err(HandleError::Stale));
    }
    worker.tell("end");
    worker.expect("done");
}

fn create_and_hold(dir: &RuntimeDir) {
    say("ready");
    listen();
    for round in 0.. {
        let name = ArenaName::new(&format!("made-{round}")).expect("a name");
        let _arena = Arena::create(dir, &name, &config(), Prefault::Off).expect("an arena");
    }
}

#[test]
fn a_creator_killed_half_way_leaves_nothing_that_looks_like_an_arena() {
    let (_folder, dir) = folder();
    for round in 0..from_env("TIDEKV_ARENA_KILLS", 40) / 8 {
        let mut worker = Worker::start(&dir, "create");
        worker.expect("ready");
        worker.tell("go");
        // Long enough to be anywhere in its loop, each time somewhere else.
        let until = Instant::now() + PATIENCE;
        while Arena::list(&dir).expect("a list").len() as u64 <= round % 5 && Instant::now() < until {}
        worker.kill();
        for name in Arena::list(&dir).expect("a list") {
            let arena = Arena::attach(&dir, &name, Prefault::Off).expect("whole");
            sound(&arena);
            drop(arena);
            assert!(Arena::unlink_if_unused(&dir, &name).expect("unlink"), "nobody uses it");
        }
        Arena::remove_leftovers(&dir).expect("a sweep");
        let left: Vec<_> = std::fs::read_dir(dir.path()).expect("a folder").flatten().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

fn grow(dir: &RuntimeDir) {
    let arena = attach(dir);
    say("ready");
    listen();
    while arena.grow().is_ok() {}
    say("full");
    listen();
}

#[test]
fn growing_together_never_exceeds_the_limit() {
    let (_folder, dir) = folder();
    let arena = create(&dir);
    let mut workers: Vec<Worker> = (0..3).map(|_| Worker::start(&dir, "grow")).collect();
    workers.iter_mut().for_each(|worker| worker.expect("ready"));
    workers.iter_mut().for_each(|worker| worker.tell("go"));
    workers[0].kill();
    workers[1..].iter_mut().for_each(|worker| worker.expect("full"));
    assert_eq!(arena.segments(), 8);
    assert!(matches!(arena.grow(), Err(ArenaError::AtLimit { .. })));
    let mut local = arena.local().expect("a cache");
    let handles: HashMap<Handle, ()> =
        (0..).map_while(|_| local.alloc(8 << 20).ok()).map(|handle| (handle, ())).collect();
    assert_eq!(handles.len(), 8, "a block in every segment");
    sound(&arena);
}
