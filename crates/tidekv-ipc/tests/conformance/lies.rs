//! Workers that send what no worker sends.

use std::net::Shutdown;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tidekv_core::units::Bytes;
use tidekv_ipc::broadcast::{Broadcaster, Channel, Ranks, StrategyEntry};
use tidekv_ipc::frame::encode_answer;
use tidekv_ipc::message::{Answer, Balance, Deed, Refusal, RefusalKind, Verdict};
use tidekv_ipc::{FrameError, LaneError, SocketDir};

use crate::support::fake::{FakePeer, INSTANCE, answer, answer_to, listen_at};
use crate::support::{PATIENCE, folder, heading, soon};

/// A scheduler with one lane to a worker that is ours to play.
struct Stage {
    caster: Broadcaster,
    listener: UnixListener,
    epoch: u64,
    _root: tempfile::TempDir,
}

impl Stage {
    fn new(strategy: &StrategyEntry) -> Self {
        let (root, dir) = folder();
        let listener = listen_at(&dir, 0);
        let caster = Broadcaster::new(SocketDir::clone(&dir), 0, 1, strategy, None);
        Self { caster, listener, epoch: 0, _root: root }
    }

    /// Connects; the worker's side of it.
    fn connect(&mut self) -> FakePeer {
        let Self { caster, listener, .. } = self;
        std::thread::scope(|scope| {
            let worker = scope.spawn(|| FakePeer::worker(listener));
            assert_eq!(caster.connect(soon()), [Ok(INSTANCE)]);
            worker.join().expect("a worker")
        })
    }

    fn ping(&mut self, deadline: Instant) -> Result<Answer, LaneError> {
        self.epoch += 1;
        self.caster.send(Ranks::All, heading(self.epoch), &Deed::Ping, deadline)[0].outcome.clone()
    }

    /// What an order gets when the worker sends this instead of an answer.
    fn ping_answered_by(&mut self, play: impl FnOnce(&mut FakePeer) + Send) -> Result<Answer, LaneError> {
        let mut worker = self.connect();
        std::thread::scope(|scope| {
            let worker = scope.spawn(move || {
                play(&mut worker);
                worker
            });
            let outcome = self.ping(soon());
            drop(worker.join().expect("a worker"));
            outcome
        })
    }
}

pub(crate) fn late_and_double_answers_are_dropped(strategy: &StrategyEntry) {
    let mut stage = Stage::new(strategy);
    let mut worker = stage.connect();
    // Nobody answers in time.
    let late = stage.ping(Instant::now() + Duration::from_millis(20));
    assert!(matches!(late, Err(LaneError::TimedOut { .. })), "{late:?}");
    let late = stage.ping(Instant::now());
    assert!(matches!(late, Err(LaneError::TimedOut { .. })), "{late:?}");
    let orders = [worker.order(), worker.order()];
    assert!(orders[0].sequence < orders[1].sequence);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let third = worker.order();
            // All of them at once: two late ones, one of them twice, and the right one twice.
            for order in [&orders[0], &orders[1], &orders[0], &third, &third] {
                worker.send(&answer_to(order));
            }
            let fourth = worker.order();
            worker.send(&answer_to(&fourth));
        });
        for epoch in [3, 4] {
            let answer = stage.ping(soon()).expect("the right answer");
            assert_eq!(answer.epoch, epoch);
        }
    });
}

/// More late answers than a ring has room for, and then the right one; and late answers for as long as anybody reads.
pub(crate) fn late_answers_without_end_keep_nobody(strategy: &StrategyEntry) {
    const MORE_THAN_A_RING: usize = 2000;
    let is_flood =
        |outcome: &Result<Answer, LaneError>| matches!(outcome, Err(LaneError::Frame(FrameError::Flood { .. })));
    let mut stage = Stage::new(strategy);
    let mut worker = stage.connect();
    let late = stage.ping(Instant::now());
    assert!(matches!(late, Err(LaneError::TimedOut { .. })), "{late:?}");
    let stale = answer_to(&worker.order());
    if worker.ring.is_none() {
        worker.send(&stale.repeat(MORE_THAN_A_RING));
        // The second order's answer is there, behind more than anybody is that far behind with.
        worker.send(&answer(3, 2));
        let outcome = stage.ping(Instant::now());
        assert!(is_flood(&outcome), "{outcome:?}");
        assert!(!stage.caster.is_connected(0), "the lane is let go of");
        // A worker that greets in this way keeps those who greet others no longer.
        let Stage { caster, listener, .. } = &mut stage;
        let greeted = std::thread::scope(|scope| {
            scope.spawn(|| FakePeer::flood_instead_of_greeting(listener, &stale.repeat(MORE_THAN_A_RING)));
            caster.connect(soon()).remove(0)
        });
        assert!(matches!(greeted, Err(LaneError::Frame(FrameError::Flood { .. }))), "{greeted:?}");
        worker = stage.connect();
    }
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let is_over = &is_over;
        scope.spawn(move || {
            let give_up = soon();
            while !is_over.load(Ordering::Relaxed) && Instant::now() < give_up && worker.push(&stale) {}
        });
        let started = Instant::now();
        let outcome = stage.ping(started + Duration::from_millis(20));
        is_over.store(true, Ordering::Relaxed);
        let is_right = is_flood(&outcome) || matches!(outcome, Err(LaneError::TimedOut { .. }));
        assert!(is_right && started.elapsed() < PATIENCE / 4, "{outcome:?} after {:?}", started.elapsed());
    });
}

pub(crate) fn rubbish_ends_the_lane(strategy: &StrategyEntry) {
    let mut stage = Stage::new(strategy);
    let changed = |at: usize, byte: u8| {
        move |worker: &mut FakePeer| {
            let order = worker.order();
            let mut bytes = answer_to(&order);
            bytes[at] = byte;
            worker.send(&bytes);
        }
    };
    let frame = |error| Err(LaneError::Frame(error));
    assert_eq!(stage.ping_answered_by(changed(0, b'X')), frame(FrameError::Magic));
    assert_eq!(stage.ping_answered_by(changed(4, 9)), frame(FrameError::Version { found: 9 }));
    assert_eq!(stage.ping_answered_by(changed(6, 2)), frame(FrameError::Kind { found: 2 }));
    assert_eq!(stage.ping_answered_by(changed(7, 1)), frame(FrameError::Flags { kind: 0x81, found: 1 }));
    assert_eq!(stage.ping_answered_by(changed(11, 0xff)), frame(FrameError::TooLong { bytes: 64 + 0xff00_0000 }));
    let other = stage.ping_answered_by(changed(32, 1));
    assert!(matches!(other, Err(LaneError::Frame(FrameError::Instance { .. }))), "{other:?}");
    let unasked = stage.ping_answered_by(|worker| {
        let order = worker.order();
        worker.send(&answer(order.sequence + 1, 0));
    });
    assert!(matches!(unasked, Err(LaneError::Frame(FrameError::Unasked { .. }))), "{unasked:?}");
    // Bytes without any sense, of many lengths.
    let mut noise = 0x9e37_79b9_u32;
    for length in [1, 7, 64, 65, 4096, 60_000] {
        let bytes: Vec<u8> = (0..length)
            .map(|_| {
                noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                noise.to_be_bytes()[0] | 0x80
            })
            .collect();
        let outcome = stage.ping_answered_by(|worker| {
            worker.order();
            worker.send(&bytes);
        });
        assert!(matches!(outcome, Err(LaneError::Frame(_))), "{length} bytes: {outcome:?}");
    }
    // Every time the lane was let go of, and could be connected again.
    assert!(!stage.caster.is_connected(0));
    let answer = stage.ping_answered_by(|worker| {
        let order = worker.order();
        worker.send(&answer_to(&order));
    });
    assert!(answer.is_ok(), "{answer:?}");
}

/// A worker that will not go on says why and closes; that is heard although it comes behind late answers, and although
/// the next order cannot be sent any more.
pub(crate) fn a_last_word_is_heard(strategy: &StrategyEntry) {
    let mut stage = Stage::new(strategy);
    let mut worker = stage.connect();
    let late = stage.ping(Instant::now() + Duration::from_millis(20));
    assert!(matches!(late, Err(LaneError::TimedOut { .. })), "{late:?}");
    let order = worker.order();
    let refusal = Refusal {
        kind: RefusalKind::Protocol,
        wanted: Bytes::ZERO,
        grantable: Bytes::ZERO,
        reason: "enough".to_owned(),
    };
    let verdict = Verdict::Refused(refusal.clone());
    let mut last_word = Vec::new();
    let answer = Answer { sequence: 0, epoch: 0, instance: INSTANCE, balance: Balance::default(), verdict };
    encode_answer(&mut last_word, &answer).expect("no pages");
    for bytes in [answer_to(&order), answer_to(&order), last_word] {
        worker.send(&bytes);
    }
    drop(worker);
    assert_eq!(stage.ping(soon()), Err(LaneError::Refused(refusal)));
    assert!(!stage.caster.is_connected(0));
}

pub(crate) fn half_an_answer_is_no_answer(strategy: &StrategyEntry) {
    let mut stage = Stage::new(strategy);
    let channel = (strategy.make)().channel();
    for length in [1, 63] {
        let outcome = stage.ping_answered_by(|worker| {
            let order = worker.order();
            worker.send(&answer_to(&order)[..length]);
            worker.stream.shutdown(Shutdown::Both).expect("a socket");
        });
        // On a socket the rest could still come; a ring's message is whole or wrong.
        let is_right = match &outcome {
            Err(LaneError::Closed) => channel == Channel::Socket,
            Err(LaneError::Frame(FrameError::Truncated { .. })) => channel == Channel::Ring,
            _ => false,
        };
        assert!(is_right, "{outcome:?}");
    }
}

pub(crate) fn an_answer_in_pieces_is_one(strategy: &StrategyEntry) {
    let mut stage = Stage::new(strategy);
    let outcome = stage.ping_answered_by(|worker| {
        let order = worker.order();
        let bytes = answer_to(&order);
        let pieces = if worker.ring.is_some() { 64 } else { 1 };
        bytes.chunks(pieces).for_each(|piece| worker.send(piece));
        // Stays until the scheduler has read it all.
    });
    assert!(outcome.is_ok(), "{outcome:?}");
}
