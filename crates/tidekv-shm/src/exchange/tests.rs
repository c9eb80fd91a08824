//! One process: against a plain map, and what is refused. Several processes are in `tests/exchange.rs`.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use tidekv_core::units::Bytes;

use super::*;
use crate::RuntimeDir;
use crate::arena::{ArenaConfig, ArenaName, LocalArena, Prefault};

const SOON: Duration = Duration::from_secs(60);

struct Scene {
    arena: Arena,
    local: LocalArena,
    exchange: Exchange,
    _folder: tempfile::TempDir,
}

fn scene(entries: u32) -> Scene {
    let folder = tempfile::tempdir().unwrap();
    let dir = RuntimeDir::at(folder.path());
    let config = ArenaConfig { segment: Bytes::mib(4), limit: Bytes::mib(32), ..ArenaConfig::default() };
    let config = ArenaConfig { initial: Bytes::mib(4), ..config };
    let arena = Arena::create(&dir, &ArenaName::new("x").unwrap(), &config, Prefault::Off).unwrap();
    let exchange = Exchange::open(&arena, &ExchangeConfig { entries }).unwrap();
    Scene { local: arena.local().unwrap(), arena, exchange, _folder: folder }
}

impl Scene {
    /// A block with these bytes.
    fn block(&mut self, bytes: &[u8]) -> (Handle, Meta) {
        let handle = self.local.alloc(bytes.len()).unwrap();
        self.arena.block(handle).unwrap().copy_in(0, bytes).unwrap();
        let crc32c = Some(crc32c::crc32c(bytes));
        (handle, Meta { crc32c, tokens: 16, ..Meta::of_bytes(bytes.len() as u64) })
    }

    fn publish(&mut self, publisher: &mut Publisher, key: Key, bytes: &[u8]) -> Result<(), PublishError> {
        let (handle, meta) = self.block(bytes);
        publisher.publish(key, handle, meta).inspect_err(|_| self.local.free(handle).unwrap())
    }

    /// Everything is given back but the directory.
    fn assert_empty(self) {
        let Self { arena, local, exchange, _folder } = self;
        drop(local);
        assert_eq!(exchange.published().unwrap(), []);
        let report = arena.verify().unwrap();
        assert_eq!((report.problems, report.live, report.shared), (vec![], 0, 1));
        drop(exchange);
        let report = arena.verify().unwrap();
        assert_eq!((report.problems, report.held), (vec![], Bytes(0)));
    }
}

fn bytes_of(borrowed: &Borrowed) -> Vec<u8> {
    let mut bytes = vec![0; borrowed.meta().bytes as usize];
    assert_eq!(borrowed.copy_out(&mut bytes).unwrap(), bytes.len());
    assert_eq!(borrowed.is_intact().unwrap(), Some(true));
    bytes
}

#[test]
fn what_is_published_is_borrowed_taken_and_withdrawn() {
    let mut scene = scene(64);
    let mut publisher = scene.exchange.publisher(PublishOptions::default());
    let (a, b) = (Key::of_name("a"), Key(7));
    scene.publish(&mut publisher, a, b"first").unwrap();
    scene.publish(&mut publisher, b, &[5; 3 << 20]).unwrap();
    assert!(matches!(scene.publish(&mut publisher, a, b"again"), Err(PublishError::Exists { key }) if key == a));
    assert_eq!(scene.exchange.published().unwrap().len(), 2);
    let borrowed = scene.exchange.borrow(a).unwrap().expect("published");
    assert_eq!((bytes_of(&borrowed), borrowed.key(), borrowed.meta().tokens), (b"first".to_vec(), a, 16));
    assert!(publisher.withdraw(a).unwrap() && !publisher.withdraw(a).unwrap());
    assert!(scene.exchange.borrow(a).unwrap().is_none());
    assert_eq!(bytes_of(&borrowed), b"first", "whoever borrowed it keeps it");
    let taken = scene.exchange.take(b).unwrap().expect("published");
    assert!(scene.exchange.take(b).unwrap().is_none(), "once");
    drop(publisher);
    assert_eq!(bytes_of(&taken), [5; 3 << 20], "also when its publisher is gone");
    drop((borrowed, taken));
    scene.assert_empty();
}

#[test]
fn a_damaged_checksum_is_noticed() {
    let mut scene = scene(64);
    let mut publisher = scene.exchange.publisher(PublishOptions::default());
    let (handle, meta) = scene.block(&[1; 100_000]);
    scene.arena.block(handle).unwrap().copy_in(99_999, &[2]).unwrap();
    publisher.publish(Key(1), handle, meta).unwrap();
    assert_eq!(scene.exchange.borrow(Key(1)).unwrap().unwrap().is_intact().unwrap(), Some(false));
    let (handle, _) = scene.block(&[1]);
    publisher.publish(Key(2), handle, Meta::of_bytes(1)).unwrap();
    assert_eq!(scene.exchange.borrow(Key(2)).unwrap().unwrap().is_intact().unwrap(), None);
}

#[test]
fn a_block_is_published_once_whole_and_by_its_owner() {
    let mut scene = scene(64);
    let mut publisher = scene.exchange.publisher(PublishOptions::default());
    let (handle, meta) = scene.block(b"x");
    let long = publisher.publish(Key(1), handle, Meta::of_bytes(4097)).unwrap_err();
    assert!(matches!(long, PublishError::TooLong { bytes: 4097, block: 4096 }), "{long}");
    publisher.publish(Key(1), handle, meta).unwrap();
    let again = publisher.publish(Key(2), handle, meta).unwrap_err();
    assert!(matches!(again, PublishError::Exchange(ExchangeError::Handle(HandleError::AlreadyShared))), "{again}");
    assert!(scene.exchange.borrow(Key(2)).unwrap().is_none() && scene.exchange.borrow(Key(1)).unwrap().is_some());
    drop(publisher);
    let mut publisher = scene.exchange.publisher(PublishOptions::default());
    let stale = publisher.publish(Key(1), handle, meta).unwrap_err();
    assert!(matches!(stale, PublishError::Exchange(ExchangeError::Handle(HandleError::Stale))), "{stale}");
}

#[test]
fn the_budget_counts_until_the_last_one_lets_go() {
    let mut scene = scene(64);
    let options = PublishOptions { budget: Bytes::kib(64), ..PublishOptions::default() };
    let mut publisher = scene.exchange.publisher(options);
    for key in 0..4 {
        scene.publish(&mut publisher, Key(key), &[0; 16 << 10]).unwrap();
    }
    let full = scene.publish(&mut publisher, Key(9), &[0; 16 << 10]).unwrap_err();
    let pressure = Pressure::Budget { used: Bytes::kib(64), budget: Bytes::kib(64) };
    assert!(full.is_transient() && matches!(full, PublishError::Full(found) if found == pressure), "{full}");
    let taken = scene.exchange.take(Key(2)).unwrap().unwrap();
    assert_eq!(publisher.settle().unwrap(), Bytes::kib(64), "taken is not let go");
    assert!(scene.publish(&mut publisher, Key(9), &[0; 16 << 10]).is_err());
    drop(taken);
    assert_eq!(publisher.settle().unwrap(), Bytes::kib(48));
    scene.publish(&mut publisher, Key(9), &[0; 16 << 10]).unwrap();
    drop(publisher);
    scene.assert_empty();
}

#[test]
fn a_publisher_waits_until_a_consumer_lets_go_or_the_deadline() {
    let mut scene = scene(64);
    let options = PublishOptions { budget: Bytes::kib(4), ..PublishOptions::default() };
    let mut publisher = scene.exchange.publisher(options);
    scene.publish(&mut publisher, Key(1), b"one").unwrap();
    let (handle, meta) = scene.block(b"two");
    let started = Instant::now();
    let wait = Duration::from_millis(20);
    let late = publisher.publish_by(Key(2), handle, meta, started + wait).unwrap_err();
    assert!(late.is_transient() && started.elapsed() >= wait, "{late}");
    let exchange = scene.exchange.clone();
    std::thread::scope(|scope| {
        let consumer = scope.spawn(move || drop(exchange.take(Key(1)).unwrap().unwrap()));
        publisher.publish_by(Key(2), handle, meta, Instant::now() + SOON).unwrap();
        consumer.join().unwrap();
    });
    assert_eq!(bytes_of(&scene.exchange.borrow(Key(2)).unwrap().unwrap()), b"two");
}

#[test]
fn a_full_directory_is_an_answer_and_holds_most_of_its_entries() {
    let mut scene = scene(1024);
    let mut publisher = scene.exchange.publisher(PublishOptions::default());
    let mut count = 0;
    let full = loop {
        match scene.publish(&mut publisher, Key(count), b"x") {
            Ok(()) => count += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(full, PublishError::Full(Pressure::Directory)), "{full}");
    assert!((700..=1024).contains(&count), "{count} of 1024");
    assert!((0..count).all(|key| scene.exchange.borrow(Key(key)).unwrap().is_some()));
    drop(publisher);
    let mut publisher = scene.exchange.publisher(PublishOptions::default());
    assert!(scene.publish(&mut publisher, Key(count), b"x").is_ok(), "what is withdrawn makes room");
}

#[test]
fn subscribers_hear_in_order_what_is_there_and_how_much_they_missed() {
    let mut scene = scene(64);
    let mut publisher = scene.exchange.publisher(PublishOptions::default());
    scene.publish(&mut publisher, Key(0), b"before").unwrap();
    let mut slow = scene.exchange.subscribe().unwrap();
    let mut fast = scene.exchange.subscribe().unwrap();
    assert_eq!(fast.poll().unwrap(), None);
    assert_eq!(fast.wait(Instant::now() + Duration::from_millis(5)).unwrap(), None);
    for key in 1..=3 {
        scene.publish(&mut publisher, Key(key), b"x").unwrap();
    }
    publisher.withdraw(Key(2)).unwrap();
    for expected in [1, 3] {
        assert!(matches!(fast.poll().unwrap(), Some(News::Published { key, .. }) if key == Key(expected)));
    }
    assert_eq!(fast.poll().unwrap(), None);
    // The log has 4,096 places; the slow one has three in it already.
    for _ in 0..4096 {
        scene.publish(&mut publisher, Key(9), b"x").unwrap();
        publisher.withdraw(Key(9)).unwrap();
    }
    assert_eq!(slow.poll().unwrap(), Some(News::Missed(3)));
    assert_eq!(slow.poll().unwrap(), None, "what was announced is gone");
    scene.publish(&mut publisher, Key(10), b"x").unwrap();
    assert!(matches!(slow.poll().unwrap(), Some(News::Published { key: Key(10), .. })));
    drop((slow, fast, publisher));
    scene.assert_empty();
}

#[test]
fn a_lossless_publisher_waits_for_subscribers_and_not_for_those_who_left() {
    let mut scene = scene(64);
    let options = PublishOptions { delivery: Delivery::Lossless, ..PublishOptions::default() };
    let mut publisher = scene.exchange.publisher(options);
    let mut subscription = scene.exchange.subscribe().unwrap();
    let mut publish = |scene: &mut Scene| {
        scene.publish(&mut publisher, Key(1), b"x").map(|()| assert!(publisher.withdraw(Key(1)).unwrap()))
    };
    for _ in 0..2048 {
        publish(&mut scene).unwrap();
    }
    let full = publish(&mut scene).unwrap_err();
    assert!(matches!(full, PublishError::Full(Pressure::Subscriber { behind: 2048 })), "{full}");
    assert_eq!(subscription.poll().unwrap(), None, "all were withdrawn");
    for _ in 0..2048 {
        publish(&mut scene).unwrap();
    }
    assert!(publish(&mut scene).is_err());
    drop(subscription);
    publish(&mut scene).unwrap();
}

#[test]
fn the_exchange_is_one_and_goes_with_the_last() {
    let mut scene = scene(64);
    let other = Exchange::open(&scene.arena, &ExchangeConfig { entries: 128 }).unwrap();
    assert_eq!(other.capacity().unwrap(), 64, "taken as it is");
    let mut publisher = other.publisher(PublishOptions::default());
    scene.publish(&mut publisher, Key(1), b"x").unwrap();
    assert!(scene.exchange.borrow(Key(1)).unwrap().is_some());
    for entries in [0, 63, 100, 1 << 17] {
        let error = Exchange::open(&scene.arena, &ExchangeConfig { entries }).unwrap_err();
        assert!(matches!(error, ExchangeError::Config { .. }), "{error}");
    }
    drop((publisher, other));
    let arena = scene.arena.clone();
    scene.assert_empty();
    assert_eq!(Exchange::open(&arena, &ExchangeConfig { entries: 128 }).unwrap().capacity().unwrap(), 128);
}

#[test]
fn there_are_as_many_subscriptions_as_places() {
    let scene = scene(64);
    let mut all: Vec<Subscription> = (0..SUBSCRIBERS).map(|_| scene.exchange.subscribe().unwrap()).collect();
    assert!(matches!(scene.exchange.subscribe().unwrap_err(), ExchangeError::TooManySubscriptions));
    all.pop();
    all.push(scene.exchange.subscribe().unwrap());
    drop(all);
    scene.assert_empty();
}

/// Whatever is written over the directory: answers may be wrong, never the process.
#[test]
fn a_scribbled_directory_is_survived() {
    for fill in [u64::MAX, 1, 0x0000_0400_0010_0000, 0x5555_5555_5555_5555] {
        let mut scene = scene(64);
        let mut subscription = scene.exchange.subscribe().unwrap();
        let mut publisher = scene.exchange.publisher(PublishOptions::default());
        scene.publish(&mut publisher, Key(1), b"x").unwrap();
        let parts = scene.exchange.parts().unwrap();
        parts.entries.iter().flatten().chain(parts.log).for_each(|word| word.store(fill, Ordering::Release));
        parts.front.log_head.store(fill, Ordering::Release);
        for subscriber in &parts.front.subscribers {
            subscriber.cursor.store(fill, Ordering::Release);
        }
        let _ = scene.exchange.borrow(Key(1));
        let _ = scene.exchange.take(Key(u128::from(fill) << 64 | u128::from(fill)));
        let _ = scene.exchange.published();
        let _ = subscription.poll();
        let _ = scene.publish(&mut publisher, Key(2), b"y");
        let _ = publisher.withdraw(Key(1));
    }
}

#[test]
fn an_arena_that_leads_elsewhere_is_an_error() {
    let mut scene = scene(64);
    let (handle, _) = scene.block(&[0xAB; 8192]);
    for (bits, shared) in [(u64::MAX, false), (handle.to_bits(), false), (handle.to_bits(), true)] {
        if shared {
            scene.local.share(handle).unwrap();
        }
        scene.arena.exchange_word().unwrap().store(bits, Ordering::Release);
        let error = Exchange::open(&scene.arena, &ExchangeConfig::default()).unwrap_err();
        assert!(matches!(error, ExchangeError::Damaged { .. }), "{bits:x}: {error}");
    }
    scene.arena.exchange_word().unwrap().store(0, Ordering::Release);
    assert!(Exchange::open(&scene.arena, &ExchangeConfig::default()).is_ok());
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Publish(u8, u8),
    Withdraw(u8),
    Borrow(u8),
    Take(u8),
    Return(u8),
    Poll,
}

fn step() -> impl Strategy<Value = Step> {
    let key = 0..12_u8;
    prop_oneof![
        4 => (key.clone(), any::<u8>()).prop_map(|(key, byte)| Step::Publish(key, byte)),
        1 => key.clone().prop_map(Step::Withdraw),
        2 => key.clone().prop_map(Step::Borrow),
        2 => key.prop_map(Step::Take),
        2 => any::<u8>().prop_map(Step::Return),
        1 => Just(Step::Poll),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn as_a_plain_map_does(steps in prop::collection::vec(step(), 1..200)) {
        let mut scene = scene(64);
        let budget = Bytes::kib(4 * 16);
        let mut publisher = scene.exchange.publisher(PublishOptions { budget, ..PublishOptions::default() });
        let mut subscription = scene.exchange.subscribe().unwrap();
        let mut model: HashMap<u8, u8> = HashMap::new();
        let mut borrowed: Vec<(Borrowed, u8)> = Vec::new();
        let mut unread: Vec<u8> = Vec::new();
        for step in steps {
            match step {
                Step::Publish(key, byte) => {
                    let held: std::collections::HashSet<Handle> = borrowed.iter().map(|(one, _)| one.handle()).collect();
                    let published = model.keys().filter_map(|key| scene.exchange.borrow(Key(u128::from(*key))).unwrap());
                    let occupied = held.union(&published.map(|one| one.handle()).collect()).count();
                    match scene.publish(&mut publisher, Key(u128::from(key)), &[byte; 100]) {
                        Ok(()) => {
                            prop_assert_eq!(model.insert(key, byte), None);
                            prop_assert!(occupied < 16);
                            unread.push(key);
                        }
                        Err(PublishError::Exists { .. }) => prop_assert!(model.contains_key(&key)),
                        Err(PublishError::Full(Pressure::Budget { .. })) => prop_assert_eq!(occupied, 16),
                        Err(error) => panic!("{error}"),
                    }
                }
                Step::Withdraw(key) => {
                    let gone = publisher.withdraw(Key(u128::from(key))).unwrap();
                    prop_assert_eq!(gone, model.remove(&key).is_some());
                }
                Step::Borrow(key) | Step::Take(key) => {
                    let take = matches!(step, Step::Take(_));
                    let key = Key(u128::from(key));
                    let found = if take { scene.exchange.take(key) } else { scene.exchange.borrow(key) }.unwrap();
                    let key = key.0 as u8;
                    let expected = if take { model.remove(&key) } else { model.get(&key).copied() };
                    prop_assert_eq!(found.is_some(), expected.is_some());
                    borrowed.extend(found.zip(expected));
                }
                Step::Return(which) if !borrowed.is_empty() => {
                    borrowed.swap_remove(usize::from(which) % borrowed.len());
                }
                Step::Return(_) => {}
                Step::Poll => {
                    while let Some(news) = subscription.poll().unwrap() {
                        let News::Published { key, .. } = news else { panic!("{news:?}") };
                        prop_assert!(model.contains_key(&(key.0 as u8)) && unread.contains(&(key.0 as u8)));
                    }
                    unread.clear();
                }
            }
            for (one, byte) in &borrowed {
                prop_assert_eq!(bytes_of(one), vec![*byte; 100]);
            }
            prop_assert_eq!(scene.exchange.published().unwrap().len(), model.len());
        }
        drop((borrowed, subscription, publisher));
        scene.assert_empty();
    }
}
