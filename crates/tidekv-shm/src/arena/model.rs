//! Every interleaving, and every reordering that the memory model allows, of the lock-free parts: `word` and `slot` with
//! loom's atomics.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p tidekv-shm --lib --release arena::model`
//!
//! A block's bytes are a loom cell: whoever may use the block accesses it, and loom fails the model if two can at the same
//! time, or if one does not see what the other did before.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, AtomicU64};
use loom::thread;

use super::error::HandleError;
use super::prefault::Wake;
use super::slot::{self, NOBODY, Slot, SlotState};
use super::word::{self, Atomic, Reaped, State};
use std::sync::atomic::Ordering;

/// An atomic whose plain stores take their place among compare-and-swaps.
///
/// A compare-and-swap that succeeds comes directly after what it replaced, so a store of the thread that had written that
/// comes after both. loom keeps the two unordered and lets the storing thread read what it overwrote, which neither the
/// memory model nor any machine does. A swap is the same store with its place fixed.
struct Exact(AtomicU64);

impl Atomic for Exact {
    fn load(&self, order: Ordering) -> u64 {
        self.0.load(order)
    }
    fn store(&self, value: u64, order: Ordering) {
        self.0.swap(value, order);
    }
    fn swap(&self, value: u64, order: Ordering) -> u64 {
        self.0.swap(value, order)
    }
    fn fetch_or(&self, bits: u64, order: Ordering) -> u64 {
        self.0.fetch_or(bits, order)
    }
    fn replace(&self, old: u64, new: u64) -> Result<u64, u64> {
        Atomic::replace(&self.0, old, new)
    }
}

/// A span with one block.
struct Span<A = AtomicU64> {
    word: A,
    remote: A,
    bytes: UnsafeCell<u32>,
}

impl Span {
    fn new() -> Arc<Self> {
        Arc::new(Self { word: AtomicU64::new(0), remote: AtomicU64::new(0), bytes: UnsafeCell::new(0) })
    }
}

impl<A: Atomic> Span<A> {
    /// Uses the block as its only holder.
    fn use_bytes(&self) {
        self.bytes.with_mut(|bytes| {
            // SAFETY: loom checks that nobody else accesses it.
            unsafe { *bytes += 1 };
        });
    }

    /// Reads the block as one of several holders.
    fn read_bytes(&self) {
        self.bytes.with(|bytes| {
            // SAFETY: loom checks that nobody writes it.
            std::hint::black_box(unsafe { *bytes });
        });
    }

    fn collect(&self) -> u64 {
        word::collect(&self.remote, |_| Some(&self.word))
    }
}

/// A span for models where a plain store races with a compare-and-swap.
fn exact() -> Arc<Span<Exact>> {
    let word = || Exact(AtomicU64::new(0));
    Arc::new(Span { word: word(), remote: word(), bytes: UnsafeCell::new(0) })
}

fn generation(word: u64) -> u32 {
    u32::try_from(word).expect("30 bits")
}

/// A block goes to another thread, is freed there, collected here and used again: its bytes have one user at a time.
#[test]
fn a_block_freed_from_afar_is_seen_whole_by_its_next_user() {
    loom::model(|| {
        let span = Span::new();
        let handle = generation(word::allot(&span.word, 0));
        span.use_bytes();
        let other = {
            let span = Arc::clone(&span);
            thread::spawn(move || {
                span.use_bytes();
                word::free_from_afar(&span.word, &span.remote, 1, handle).expect("held");
            })
        };
        if span.collect() == 1 {
            word::allot(&span.word, 0);
            span.use_bytes();
        }
        other.join().expect("no panic");
        span.collect();
        assert_ne!(word::load(&span.word).state(), State::Freed, "nothing stays uncollected");
    });
}

/// Two others free two blocks of one span: the owner's one look at the bitmap acquires both.
#[test]
fn announcements_of_two_are_one_release_sequence() {
    loom::model(|| {
        let spans = [Span::new(), Span::new()];
        let remote = Arc::new(AtomicU64::new(0));
        let others: Vec<_> = (0..2)
            .map(|at| {
                let (span, remote) = (Arc::clone(&spans[at]), Arc::clone(&remote));
                let handle = generation(word::allot(&span.word, 0));
                thread::spawn(move || {
                    span.use_bytes();
                    word::free_from_afar(&span.word, &*remote, 1 << at, handle).expect("held");
                })
            })
            .collect();
        let found = word::collect(&*remote, |block| Some(&spans[block as usize].word));
        for (at, span) in spans.iter().enumerate().filter(|(at, _)| found & (1 << at) != 0) {
            assert_eq!(word::load(&span.word).state(), State::Free, "block {at}");
            span.use_bytes();
        }
        others.into_iter().for_each(|other| other.join().expect("no panic"));
    });
}

/// Two free the same unshared block from afar: one of them is told that it is stale.
#[test]
fn a_double_free_from_afar_is_noticed() {
    loom::model(|| {
        let span = Span::new();
        let handle = generation(word::allot(&span.word, 0));
        let free = |span: Arc<Span>| move || word::free_from_afar(&span.word, &span.remote, 1, handle);
        let other = thread::spawn(free(Arc::clone(&span)));
        let ours = free(Arc::clone(&span))();
        let theirs = other.join().expect("no panic");
        assert!(ours.is_ok() ^ theirs.is_ok());
        assert_eq!(span.collect(), 1);
        assert_eq!(span.collect(), 0, "once");
    });
}

/// The owner frees at home (plain store) what another frees from afar at the same time, and uses the place again: a rule
/// is broken, and still the new block is not freed.
#[test]
fn a_double_free_never_frees_the_next_block() {
    loom::model(|| {
        let span = exact();
        let handle = generation(word::allot(&span.word, 0));
        let other = {
            let span = Arc::clone(&span);
            thread::spawn(move || word::free_from_afar(&span.word, &span.remote, 1, handle).is_ok())
        };
        let now = word::load(&span.word);
        let freed_at_home = now.is_live(handle);
        if freed_at_home {
            Atomic::store(&span.word, now.free().0, Ordering::Release);
            let next = generation(word::allot(&span.word, 0));
            span.collect();
            other.join().expect("no panic");
            span.collect();
            // The other's CAS may have come between our load and our store; the new block is not its.
            assert!(word::load(&span.word).is_live(next));
        } else {
            assert!(other.join().expect("no panic"));
        }
    });
}

/// A consumer retains while the producer releases: either it keeps the block, or it is told that it came too late.
#[test]
fn retaining_races_with_the_last_release() {
    loom::model(|| {
        let span = Span::new();
        let handle = generation(word::allot(&span.word, 0));
        span.use_bytes();
        word::share(&span.word, handle, 0).expect("held");
        let consumer = {
            let span = Arc::clone(&span);
            thread::spawn(move || match word::retain(&span.word, handle, 1) {
                Ok(()) => {
                    span.read_bytes();
                    if word::release(&span.word, handle, 1, 0).expect("held") {
                        word::announce(&span.remote, 1);
                    }
                }
                Err(error) => assert_eq!(error, HandleError::Stale),
            })
        };
        if word::release(&span.word, handle, 0, 0).expect("held") {
            word::announce(&span.remote, 1);
        }
        if span.collect() == 1 {
            word::allot(&span.word, 0);
            span.use_bytes();
        }
        consumer.join().expect("no panic");
        span.collect();
        assert_ne!(word::load(&span.word).state(), State::Freed);
        assert_ne!(word::load(&span.word).state(), State::Shared);
    });
}

/// A member died; whoever recovers takes it out of a block that another releases meanwhile. One of them is the last.
#[test]
fn recovery_races_with_the_last_release() {
    loom::model(|| {
        let span = Span::new();
        let handle = generation(word::allot(&span.word, 0));
        word::share(&span.word, handle, 0).expect("held");
        word::retain(&span.word, handle, 1).expect("shared");
        let survivor = {
            let span = Arc::clone(&span);
            thread::spawn(move || {
                span.read_bytes();
                word::release(&span.word, handle, 1, 0).expect("held")
            })
        };
        let reaped = word::reap(&span.word, 0, 0);
        let last = survivor.join().expect("no panic");
        assert!((reaped == Reaped::Freed) ^ last, "{reaped:?}");
        assert_eq!(word::load(&span.word).state(), State::Freed);
    });
}

/// A span without owner is settled by recovery with plain stores while somebody frees from afar the dead one's block.
#[test]
fn settling_races_with_a_free_from_afar() {
    loom::model(|| {
        let span = exact();
        let handle = generation(word::allot(&span.word, 3));
        let other = {
            let span = Arc::clone(&span);
            thread::spawn(move || word::free_from_afar(&span.word, &span.remote, 1, handle))
        };
        let (is_free, _) = word::settle(&span.word, 3);
        assert!(is_free);
        let next = generation(word::allot(&span.word, 0));
        let _ = other.join().expect("no panic");
        assert_eq!(span.collect(), 0, "a late announcement is dropped");
        assert!(word::load(&span.word).is_live(next));
    });
}

fn run(slots: usize) -> Arc<Vec<AtomicU64>> {
    Arc::new((0..slots).map(|_| AtomicU64::new(0)).collect())
}

/// Two claim overlapping runs: no slot has two owners, and what was claimed in vain is free again.
#[test]
fn runs_are_claimed_whole_by_one() {
    loom::model(|| {
        let slots = run(3);
        let other = {
            let slots = Arc::clone(&slots);
            thread::spawn(move || slot::claim_run(&slots[1..], 2))
        };
        let ours = slot::claim_run(&slots[..2], 1);
        let theirs = other.join().expect("no panic");
        assert!(!(ours && theirs));
        let owners: Vec<u16> = slots.iter().map(|slot| slot::load(slot).owner()).collect();
        match (ours, theirs) {
            (true, _) => assert_eq!(owners, [1, 1, 0]),
            (_, true) => assert_eq!(owners, [0, 2, 2]),
            _ => assert_eq!(owners, [0, 0, 0]),
        }
    });
}

/// Two adopt one span, and what its last owner did to its blocks is seen by the one who gets it.
#[test]
fn a_span_left_by_one_is_adopted_by_one() {
    loom::model(|| {
        let slots = run(2);
        let span = Span::new();
        assert!(slot::claim_run(&slots, 1));
        slot::make_span(&slots, 1, Slot::head(0, 1, 0, 2));
        let leaver = {
            let (slots, span) = (Arc::clone(&slots), Arc::clone(&span));
            thread::spawn(move || {
                let handle = generation(word::allot(&span.word, 0));
                span.use_bytes();
                let now = word::load(&span.word);
                assert!(now.is_live(handle));
                Atomic::store(&span.word, now.free().0, Ordering::Release);
                assert!(slot::abandon(&slots, Slot::head(0, 1, 0, 2)));
            })
        };
        let adopter = {
            let (slots, span) = (Arc::clone(&slots), Arc::clone(&span));
            thread::spawn(move || {
                let got = slot::adopt(&slots, 3, 0);
                if got {
                    word::allot(&span.word, 1);
                    span.use_bytes();
                }
                got
            })
        };
        let got = slot::adopt(&slots, 2, 0);
        if got {
            word::allot(&span.word, 2);
            span.use_bytes();
        }
        leaver.join().expect("no panic");
        let theirs = adopter.join().expect("no panic");
        assert!(!(got && theirs));
        let owner = slot::load(&slots[0]).owner();
        assert_eq!(
            owner,
            if got {
                2
            } else if theirs {
                3
            } else {
                NOBODY
            }
        );
        assert_eq!(slot::load(&slots[1]).owner(), owner, "the tail has the owner of the head");
    });
}

/// A run is given back while another claims its slots: each slot is claimed once, and giving back touches none of them.
#[test]
fn giving_back_races_with_claiming() {
    loom::model(|| {
        let slots = run(2);
        assert!(slot::claim_run(&slots, 1));
        slot::make_span(&slots, 1, Slot::head(0, 1, 0, 2));
        let claimer = {
            let slots = Arc::clone(&slots);
            thread::spawn(move || slot::claim_run(&slots[1..], 2))
        };
        assert!(slot::give_back(&slots, Slot::head(0, 1, 0, 2), 1, || {}));
        let claimed = claimer.join().expect("no panic");
        assert_eq!(slot::load(&slots[0]).state(), SlotState::Free);
        let tail = slot::load(&slots[1]);
        assert_eq!((tail.state(), tail.owner()), if claimed { (SlotState::Claimed, 2) } else { (SlotState::Free, 0) });
    });
}

/// The thread that touches pages ahead hears of a segment that comes while it is about to sleep, and of its end. A model
/// in which it does not ends in a deadlock.
#[test]
fn a_segment_that_comes_while_the_thread_lies_down_wakes_it() {
    loom::model(|| {
        let shared = Arc::new((Wake::default(), AtomicU32::new(0)));
        let theirs = Arc::clone(&shared);
        let other = thread::spawn(move || {
            theirs.1.store(1, Ordering::Release);
            theirs.0.ring();
        });
        let (wake, mapped) = &*shared;
        assert_eq!(wake.next(|| mapped.load(Ordering::Acquire)), Some(0));
        other.join().unwrap();
    });
    loom::model(|| {
        let wake = Arc::new(Wake::default());
        let theirs = Arc::clone(&wake);
        let other = thread::spawn(move || theirs.stop());
        assert_eq!(wake.next(|| 0), None);
        other.join().unwrap();
    });
}
