//! Exchanges between real processes: killed at any instruction, stopped, slow. Whoever lives goes on, finds only whole
//! blocks, and is never held up by the dead.
//!
//! ```text
//!   TIDEKV_EXCHANGE_KILLS=5000    rounds of the kill test (default 200)
//! ```

#[path = "../examples/prefill_decode.rs"]
#[allow(dead_code, reason = "its main function is not ours")]
mod prefill_decode;
mod support;

use std::process::Stdio;
use std::time::{Duration, Instant};

use support::{Worker, folder, listen, role, say, soon};
use tidekv_core::units::Bytes;
use tidekv_shm::RuntimeDir;
use tidekv_shm::arena::{Arena, ArenaConfig, ArenaName, LocalArena, Prefault, Report};
use tidekv_shm::exchange::{
    Borrowed, Delivery, Exchange, ExchangeConfig, ExchangeError, Key, Meta, News, Pressure, PublishError,
    PublishOptions, Publisher, Subscription,
};

const WORKERS: usize = 4;
/// Few, so that everybody meets at the same entries.
const KEYS: usize = 24;
const BORROWED_MAX: usize = 6;

fn name() -> ArenaName {
    ArenaName::new("exchange").expect("a name")
}

fn create(dir: &RuntimeDir) -> Arena {
    let config = ArenaConfig { segment: Bytes::mib(8), limit: Bytes::mib(64), ..ArenaConfig::default() };
    let config = ArenaConfig { initial: Bytes::mib(8), ..config };
    Arena::create(dir, &name(), &config, Prefault::Off).expect("an arena")
}

fn attach(dir: &RuntimeDir) -> Arena {
    Arena::attach(dir, &name(), Prefault::Off).expect("an arena")
}

fn open(arena: &Arena) -> Exchange {
    Exchange::open(arena, &ExchangeConfig { entries: 64 }).expect("an exchange")
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
    let (role, argument) = role.split_once(' ').unwrap_or((&role, "0"));
    match role {
        "trade" => trade(&dir, argument.parse().expect("a seed")),
        "borrow" => borrow(&dir),
        "subscribe" => subscribe(&dir),
        "publish" => publish(&dir),
        "fork" => fork(&dir),
        "decode" => prefill_decode::decode(&dir, &name()).expect("the example works"),
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

/// What is published under a key: it says which.
fn bytes_of(key: Key) -> Vec<u8> {
    let length = if key.0 == 8 { 1_200_000 } else { 100 + 500 * key.0 as usize };
    key.0.to_le_bytes().into_iter().cycle().take(length).collect()
}

fn check(borrowed: &Borrowed) {
    let expected = bytes_of(borrowed.key());
    let mut found = vec![0; expected.len()];
    assert_eq!(borrowed.meta().bytes, expected.len() as u64);
    assert_eq!(borrowed.copy_out(&mut found).expect("held"), expected.len());
    assert!(found == expected, "{} has another's bytes", borrowed.key());
}

/// Somebody who publishes, withdraws, borrows, takes, subscribes and leaves.
struct Trader {
    arena: Arena,
    exchange: Exchange,
    local: LocalArena,
    publisher: Publisher,
    subscription: Option<Subscription>,
    borrowed: Vec<Borrowed>,
    random: Random,
}

impl Trader {
    fn new(arena: Arena, seed: u64) -> Self {
        let (exchange, local) = (open(&arena), arena.local().expect("a cache"));
        let publisher = exchange.publisher(PublishOptions::default());
        let random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        Self { arena, exchange, local, publisher, subscription: None, borrowed: Vec::new(), random }
    }

    fn key(&mut self) -> Key {
        Key(1 + self.random.below(KEYS) as u128)
    }

    fn publish(&mut self) {
        let key = self.key();
        let bytes = bytes_of(key);
        // A full arena is nobody's fault here.
        let Ok(handle) = self.local.alloc(bytes.len()) else { return };
        self.arena.block(handle).expect("ours").copy_in(0, &bytes).expect("inside");
        match self.publisher.publish(key, handle, Meta::of_bytes(bytes.len() as u64)) {
            Ok(()) => {}
            Err(PublishError::Exists { .. } | PublishError::Full(_)) => self.local.free(handle).expect("still ours"),
            Err(error) => panic!("{error}"),
        }
    }

    fn change_publisher(&mut self) {
        let delivery = if self.random.below(2) == 0 { Delivery::Lossy } else { Delivery::Lossless };
        let budget = Bytes::mib(1 + self.random.below(4) as u64);
        self.publisher = self.exchange.publisher(PublishOptions { budget, delivery });
    }

    fn read(&mut self) {
        let key = self.key();
        let found = if self.random.below(3) == 0 { self.exchange.take(key) } else { self.exchange.borrow(key) };
        let Some(found) = found.expect("a sound exchange") else { return };
        check(&found);
        if self.borrowed.len() == BORROWED_MAX {
            let at = self.random.below(BORROWED_MAX);
            check(&self.borrowed[at]);
            self.borrowed.swap_remove(at);
        }
        self.borrowed.push(found);
    }

    fn listen(&mut self) {
        match &mut self.subscription {
            Some(subscription) => while subscription.poll().expect("a sound exchange").is_some() {},
            none => *none = Some(self.exchange.subscribe().expect("a place")),
        }
    }

    fn step(&mut self) {
        match self.random.below(200) {
            0 => self.change_publisher(),
            1 => self.subscription = None,
            2 => self.borrowed.clear(),
            // Now and then the last one leaves, and the next makes another directory.
            3 => *self = Self::new(self.arena.clone(), self.random.0),
            4..30 => {
                let key = self.key();
                self.publisher.withdraw(key).expect("a sound exchange");
            }
            30..60 => self.listen(),
            60..130 => self.publish(),
            _ => self.read(),
        }
    }
}

fn trade(dir: &RuntimeDir, seed: u64) {
    let mut trader = Trader::new(attach(dir), seed);
    say("ready");
    loop {
        trader.step();
    }
}

#[test]
fn processes_killed_at_any_moment_leave_nothing_and_hold_nobody_up() {
    let rounds = std::env::var("TIDEKV_EXCHANGE_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(200_u64);
    let (_folder, dir) = folder();
    let arena = create(&dir);
    let mut trader = Trader::new(arena.clone(), 99);
    let start = |seed: u64| Worker::start(&dir, &format!("trade {seed}"));
    let mut workers: Vec<Worker> = (0..WORKERS as u64).map(start).collect();
    let (mut random, mut blocks) = (Random(7), 0);
    for (round, victim) in (0..rounds).zip((0..WORKERS).cycle()) {
        (0..random.below(100)).for_each(|_| trader.step());
        // The others start, or are at work, meanwhile.
        workers[victim].expect("ready");
        workers[victim].kill();
        blocks += arena.recover().expect("recovery").blocks;
        let report = sound(&arena);
        assert!(report.members.iter().all(|member| member.alive), "round {round}: {:?}", report.members);
        trader.borrowed.iter().for_each(check);
        workers[victim] = start(1000 + round);
    }
    assert!(blocks > 0, "nobody was killed with a block in hand");
    workers.clear();
    arena.recover().expect("recovery");
    drop(trader);
    let report = sound(&arena);
    assert_eq!((report.live, report.shared), (0, 0), "everything came back: {report:#?}");
    let exchange = open(&arena);
    assert_eq!(exchange.published().expect("a sound exchange"), []);
}

/// Publishes a block under key 1 and one under key 2, with room for one of them.
struct Prefill {
    publisher: Publisher,
    local: LocalArena,
    exchange: Exchange,
}

impl Prefill {
    fn new(arena: &Arena, options: PublishOptions) -> Self {
        let exchange = open(arena);
        Self { publisher: exchange.publisher(options), local: arena.local().expect("a cache"), exchange }
    }

    fn publish(&mut self, key: u128, deadline: Instant) -> Result<(), PublishError> {
        let handle = self.local.alloc(4096).expect("room");
        let published = self.publisher.publish_by(Key(key), handle, Meta::of_bytes(4096), deadline);
        published.inspect_err(|_| self.local.free(handle).expect("still ours"))
    }
}

/// Takes key 1 and holds it.
fn borrow(dir: &RuntimeDir) {
    let exchange = open(&attach(dir));
    let taken = exchange.take(Key(1)).expect("a sound exchange").expect("published");
    say("taken");
    listen();
    drop(taken);
    say("dropped");
    listen();
}

#[test]
fn a_consumer_that_died_does_not_hold_the_producer() {
    let (_folder, dir) = folder();
    let arena = create(&dir);
    let mut prefill = Prefill::new(&arena, PublishOptions { budget: Bytes::kib(4), ..PublishOptions::default() });
    prefill.publish(1, soon()).expect("room");
    let mut consumer = Worker::start(&dir, "borrow");
    consumer.expect("taken");
    consumer.stop();
    let full = prefill.publish(2, Instant::now() + Duration::from_millis(10)).expect_err("one that is stopped lives");
    assert!(matches!(full, PublishError::Full(Pressure::Budget { .. })), "{full}");
    consumer.kill();
    prefill.publish(2, soon()).expect("the dead hold nothing");
    sound(&arena);
}

#[test]
fn a_producer_waits_for_the_last_consumer() {
    let (_folder, dir) = folder();
    let arena = create(&dir);
    let mut prefill = Prefill::new(&arena, PublishOptions { budget: Bytes::kib(4), ..PublishOptions::default() });
    prefill.publish(1, soon()).expect("room");
    let mut consumer = Worker::start(&dir, "borrow");
    consumer.expect("taken");
    assert!(prefill.publish(2, Instant::now()).is_err());
    consumer.tell("drop it");
    prefill.publish(2, soon()).expect("it was let go");
    consumer.expect("dropped");
}

/// Subscribes, says so, and reads when it is told to.
fn subscribe(dir: &RuntimeDir) {
    let exchange = open(&attach(dir));
    let mut subscription = exchange.subscribe().expect("a place");
    say("subscribed");
    loop {
        listen();
        match subscription.wait(soon()).expect("a sound exchange") {
            Some(News::Published { key, .. }) => say(&key.0.to_string()),
            other => say(&format!("{other:?}")),
        }
    }
}

#[test]
fn news_wake_those_who_wait_in_other_processes() {
    let (_folder, dir) = folder();
    let arena = create(&dir);
    let mut prefill = Prefill::new(&arena, PublishOptions::default());
    let mut workers = [Worker::start(&dir, "subscribe"), Worker::start(&dir, "subscribe")];
    workers.iter_mut().for_each(|worker| worker.expect("subscribed"));
    for key in 1..20 {
        workers.iter_mut().for_each(|worker| worker.tell("wait"));
        prefill.publish(key, soon()).expect("room");
        workers.iter_mut().for_each(|worker| worker.expect(&key.to_string()));
    }
}

#[test]
fn a_subscriber_that_died_does_not_hold_a_lossless_publisher() {
    let (_folder, dir) = folder();
    let arena = create(&dir);
    let options = PublishOptions { delivery: Delivery::Lossless, ..PublishOptions::default() };
    let mut prefill = Prefill::new(&arena, options);
    let mut worker = Worker::start(&dir, "subscribe");
    worker.expect("subscribed");
    for _ in 0..2048 {
        prefill.publish(1, soon()).expect("room");
        assert!(prefill.publisher.withdraw(Key(1)).expect("a sound exchange"));
    }
    let full = prefill.publish(1, Instant::now()).expect_err("it lives and does not read");
    assert!(matches!(full, PublishError::Full(Pressure::Subscriber { behind: 2048 })), "{full}");
    worker.kill();
    prefill.publish(1, soon()).expect("the dead read nothing");
}

/// Publishes key 1 and waits.
fn publish(dir: &RuntimeDir) {
    let arena = attach(dir);
    let mut prefill = Prefill::new(&arena, PublishOptions::default());
    prefill.publish(1, soon()).expect("room");
    say("published");
    listen();
}

#[test]
fn what_a_dead_producer_published_is_gone_and_what_was_borrowed_stays() {
    let (_folder, dir) = folder();
    let arena = create(&dir);
    let exchange = open(&arena);
    for borrows in [true, false] {
        let mut producer = Worker::start(&dir, "publish");
        producer.expect("published");
        let borrowed = if borrows { exchange.borrow(Key(1)).expect("a sound exchange") } else { None };
        assert_eq!(borrowed.is_some(), borrows);
        producer.kill();
        arena.recover().expect("recovery");
        if let Some(borrowed) = borrowed {
            assert_eq!(borrowed.copy_out(&mut [0; 4096]), Ok(4096));
            // As long as somebody holds the block it can be found, by its key, by others too.
            drop(exchange.take(Key(1)).expect("a sound exchange").expect("still there"));
        }
        assert!(exchange.borrow(Key(1)).expect("a sound exchange").is_none());
        assert_eq!(sound(&arena).shared, 1, "the directory");
    }
}

/// A child neither uses nor gives back what its parent has.
fn fork(dir: &RuntimeDir) {
    let arena = attach(dir);
    let mut prefill = Prefill::new(&arena, PublishOptions::default());
    prefill.publish(1, soon()).expect("room");
    let borrowed = prefill.exchange.borrow(Key(1)).expect("a sound exchange").expect("published");
    let mut subscription = prefill.exchange.subscribe().expect("a place");
    // SAFETY: the child calls nothing but what a forked child may, and ends without running destructors of others.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let refused = matches!(prefill.exchange.borrow(Key(1)), Err(ExchangeError::Handle(_)))
            && prefill.exchange.published().is_err()
            && subscription.poll().is_err()
            && prefill.publisher.withdraw(Key(1)).is_err()
            && borrowed.block().is_err();
        drop((borrowed, subscription, prefill, arena));
        // SAFETY: ends the process.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    let mut status = -1;
    // SAFETY: waits for the child made above, and writes its status.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!((waited, status), (pid, 0), "refused everything and ended");
    assert_eq!(borrowed.copy_out(&mut [0; 16]), Ok(16));
    assert!(prefill.exchange.borrow(Key(1)).expect("a sound exchange").is_some());
    say("sound");
}

#[test]
fn a_forked_child_has_no_part_in_it() {
    let (_folder, dir) = folder();
    let _arena = create(&dir);
    Worker::start(&dir, "fork").expect("sound");
}

#[test]
fn the_example_works_and_leaves_nothing() {
    let (_folder, dir) = folder();
    // What the other test runner prints about itself is not ours.
    let start = || support::command(&dir, "decode").stdout(Stdio::null()).spawn();
    prefill_decode::prefill(&dir, &name(), start).expect("the example works");
    assert!(Arena::unlink_if_unused(&dir, &name()).expect("unlink"), "nobody is attached any more");
    assert_eq!(std::fs::read_dir(dir.path()).expect("a folder").count(), 0);
}
