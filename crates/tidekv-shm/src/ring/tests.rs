//! Rings between threads, against a dull model, and against a side that writes rubbish.

use std::collections::VecDeque;
use std::fs::File;
use std::io::pipe;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::{Errno, pwrite};

use super::*;

const PATIENCE: Duration = Duration::from_secs(60);
const WORDS: u32 = 16_384;
const TRACK_BYTES: u64 = 64 + 64 + 131_072;

fn pair() -> (RingEnd, RingEnd, OwnedFd) {
    let (creator, file) = RingEnd::create(2).unwrap();
    let other = RingEnd::attach(&file).unwrap();
    (creator, other, file)
}

fn receive(end: &mut RingEnd) -> Result<Option<Vec<u8>>, RingError> {
    let mut message = Vec::new();
    Ok(end.receive(&mut message)?.then_some(message))
}

/// Waits for the next message.
fn expect(end: &mut RingEnd, message: &mut Vec<u8>) {
    let deadline = Instant::now() + PATIENCE;
    while !end.receive(message).unwrap() {
        assert!(Instant::now() < deadline, "nothing came");
        end.wait_message(Duration::from_millis(100)).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Both directions against queues; long messages fill the ring and wrap around its end.
    #[test]
    fn it_is_two_queues(steps in proptest::collection::vec((any::<bool>(), any::<bool>(), 0..20_000_usize), 1..120)) {
        let (mut creator, mut other, _file) = pair();
        let mut queues = [VecDeque::new(), VecDeque::new()];
        let mut room = [WORDS; 2];
        for (number, (is_creator, is_send, length)) in (0_u8..).zip(steps) {
            let (end, out, inward) = if is_creator { (&mut creator, 0, 1) } else { (&mut other, 1, 0) };
            let words = |length: usize| 1 + u32::try_from(length.div_ceil(8)).unwrap();
            if is_send {
                let message = vec![number; length];
                let fits = words(length) <= room[out];
                prop_assert_eq!(end.send(&message), Ok(fits));
                if fits {
                    room[out] -= words(length);
                    queues[out].push_back(message);
                }
            } else {
                let expected: Option<Vec<u8>> = queues[inward].pop_front();
                room[inward] += expected.as_ref().map_or(0, |message| words(message.len()));
                prop_assert_eq!(receive(end), Ok(expected));
            }
        }
    }
}

#[test]
fn two_threads_lose_nothing_and_nobody_sleeps_for_ever() {
    let (mut creator, mut other, _file) = pair();
    const MESSAGES: u64 = 20_000;
    let echo = std::thread::spawn(move || {
        let mut message = Vec::new();
        for _ in 0..MESSAGES {
            expect(&mut other, &mut message);
            assert!(other.send(&message).unwrap(), "one message is under way at a time");
        }
    });
    let mut back = Vec::new();
    let started = Instant::now();
    for number in 0..MESSAGES {
        let message = number.to_le_bytes().repeat(usize::try_from(number % 9).unwrap());
        assert!(creator.send(&message).unwrap());
        expect(&mut creator, &mut back);
        assert_eq!(back, message);
    }
    echo.join().unwrap();
    // A lost wake-up would cost a slice of 100 ms each.
    assert!(started.elapsed() < PATIENCE);
}

#[test]
fn a_full_ring_waits_for_room_and_is_woken() {
    let (mut creator, mut other, _file) = pair();
    let long = vec![7; MESSAGE_BYTES_MAX];
    assert!(creator.send(&long).unwrap() && creator.send(&long).unwrap());
    assert!(!creator.send(&[]).unwrap(), "two of the longest fill it");
    let waiting = std::thread::spawn(move || {
        let deadline = Instant::now() + PATIENCE;
        while !creator.send(&long).unwrap() {
            assert!(Instant::now() < deadline, "no room in time");
            creator.wait_room(long.len(), PATIENCE).unwrap();
        }
    });
    assert_eq!(receive(&mut other).unwrap().map(|message| message.len()), Some(MESSAGE_BYTES_MAX));
    waiting.join().unwrap();
    let error = other.send(&vec![0; MESSAGE_BYTES_MAX + 1]).unwrap_err();
    assert_eq!(error, RingError::TooLong { bytes: MESSAGE_BYTES_MAX + 1 });
}

#[test]
fn waiting_ends() {
    let (mut creator, mut other, _file) = pair();
    let started = Instant::now();
    other.wait_message(Duration::from_millis(30)).unwrap();
    assert!(started.elapsed() >= Duration::from_millis(30));
    assert!(creator.send(b"x").unwrap());
    other.wait_message(PATIENCE).unwrap();
    assert_eq!(receive(&mut other), Ok(Some(b"x".to_vec())));
    creator.wait_room(1, PATIENCE).unwrap();
}

/// One that has announced its sleep and is not yet asleep misses it, and ends its slice; most do not.
#[test]
fn an_end_that_goes_wakes_the_other() {
    let slice = Duration::from_secs(2);
    let woken = |_| {
        let (creator, mut other, _file) = pair();
        let sleeper = std::thread::spawn(move || {
            let started = Instant::now();
            other.wait_message(slice).unwrap();
            started.elapsed() < slice
        });
        let [out, _] = tracks(&creator.memory, creator.side).unwrap();
        while !out.tail.has_sleeper() {
            std::thread::yield_now();
        }
        (0..100).for_each(|_| std::thread::yield_now());
        drop(creator);
        sleeper.join().unwrap()
    };
    assert!((0..10).any(woken));
}

#[test]
fn only_a_sealed_ring_of_the_right_size_is_taken() {
    let refused = |file: &OwnedFd| assert_eq!(RingEnd::attach(file).unwrap_err(), RingError::NotARing);
    let memory = |flags| memfd_create("no-ring", flags | MemfdFlags::CLOEXEC).unwrap();
    let (_ring, _other, whole) = pair();
    let bytes = rustix::fs::fstat(&whole).unwrap().st_size;
    let bytes = u64::try_from(bytes).unwrap();

    let unsealed = memory(MemfdFlags::ALLOW_SEALING);
    ftruncate(&unsealed, bytes).unwrap();
    refused(&unsealed);
    rustix::fs::fcntl_add_seals(&unsealed, rustix::fs::SealFlags::SHRINK).unwrap();
    refused(&unsealed);
    pwrite(&unsealed, b"TIDERING\x01\0\0\0", 0).unwrap();
    RingEnd::attach(&unsealed).unwrap();
    pwrite(&unsealed, b"\x02", 8).unwrap();
    refused(&unsealed);

    let short = memory(MemfdFlags::ALLOW_SEALING);
    ftruncate(&short, bytes - 1).unwrap();
    rustix::fs::fcntl_add_seals(&short, rustix::fs::SealFlags::SHRINK).unwrap();
    refused(&short);
    refused(&File::open("/dev/null").unwrap().into());
    refused(&pipe().unwrap().0.into());
    refused(&tempfile::tempfile().unwrap().into());
}

#[test]
fn nobody_can_cut_it_short() {
    let (_creator, _other, file) = pair();
    assert_eq!(ftruncate(&file, 0), Err(Errno::PERM));
    assert_eq!(ftruncate(&file, 1 << 30), Err(Errno::PERM));
}

#[test]
fn impossible_positions_and_lengths_are_damage() {
    let tail = 64 + TRACK_BYTES;
    let (mut creator, _other, file) = pair();
    for too_far in [WORDS + 1, u32::MAX, 1 << 31] {
        pwrite(&file, &too_far.to_le_bytes(), tail).unwrap();
        assert_eq!(receive(&mut creator), Err(RingError::Damaged));
    }
    // A length that reaches beyond what was published, or beyond any ring.
    pwrite(&file, &2_u32.to_le_bytes(), tail).unwrap();
    for length in [9_u64, MESSAGE_BYTES_MAX as u64 + 1, u64::MAX] {
        pwrite(&file, &length.to_le_bytes(), tail + 128).unwrap();
        assert_eq!(receive(&mut creator), Err(RingError::Damaged));
    }
    pwrite(&file, &8_u64.to_le_bytes(), tail + 128).unwrap();
    assert_eq!(receive(&mut creator), Ok(Some(vec![0; 8])));
    // The head of what we send: more taken away than was ever there.
    pwrite(&file, &5_u32.to_le_bytes(), 64 + 64).unwrap();
    assert_eq!(creator.send(b"x"), Err(RingError::Damaged));
    assert_eq!(creator.wait_room(1, Duration::ZERO), Err(RingError::Damaged));
}

/// A side that scribbles over everything while the other works: errors and rubbish, no fault.
#[test]
fn scribbling_is_survived() {
    let (mut creator, mut other, file) = pair();
    let bytes = 64 + 2 * TRACK_BYTES;
    static SEED: AtomicU64 = AtomicU64::new(0x9e37_79b9_7f4a_7c15);
    let random = || {
        let mut x = SEED.load(Ordering::Relaxed);
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        SEED.store(x, Ordering::Relaxed);
        x
    };
    let mut outcomes = [0_u32; 3];
    for _ in 0..200_000 {
        // Mostly near the positions, where it hurts.
        let place = match random() % 4 {
            0 => random() % (bytes - 8),
            1 => 64 + random() % 160,
            2 => 64 + TRACK_BYTES + random() % 160,
            _ => 128,
        };
        let value = if random() % 2 == 0 { random() } else { random() % 20_000 };
        pwrite(&file, &value.to_le_bytes(), place).unwrap();
        for end in [&mut creator, &mut other] {
            let sent = end.send(&[1; 40]);
            let result = receive(end);
            outcomes[match (sent, result) {
                (Err(_), _) | (_, Err(_)) => 0,
                (_, Ok(Some(_))) => 1,
                _ => 2,
            }] += 1;
        }
    }
    assert!(outcomes.iter().all(|count| *count > 100), "every outcome was seen: {outcomes:?}");
}
