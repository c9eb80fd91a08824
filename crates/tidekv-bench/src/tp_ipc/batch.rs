//! Batches: a measurement in parts, each with worker processes and a measuring thread of its own.
//!
//! How fast workers answer differs from one set of them to the next, with the same code on the same machine: in one run
//! of 40 batches on 2 processors, the batches' medians of a bare echo by 4 workers went from 45 to 116 us. Where the
//! kernel puts their threads has a part in it; how large a part is not known. One set of workers is therefore one throw
//! of the dice, and since the server and the echo of a worker are two threads, strategy and floor may be thrown for
//! separately. Many batches are many throws, of which the medians over all samples see the middle.
//!
//! ```text
//!   --noop --iters 8000     batch 0: 200 iterations | batch 1: 200 iterations | ...  40 of them, new workers in each
//!   anything that maps      batch 0: all iterations         a context on a device can take seconds
//! ```

use std::panic::resume_unwind;
use std::thread;

use anyhow::Context;

/// Fewer iterations are not worth new workers.
const ITERS_MIN: u32 = 100;

/// Starting workers takes some milliseconds each: this bounds what a long run spends on it.
const BATCHES_MAX: u32 = 40;

/// In how many batches so many iterations are measured.
pub(super) fn count(iters: u32, noop: bool) -> u32 {
    if noop { (iters / ITERS_MIN).clamp(1, BATCHES_MAX) } else { 1 }
}

/// Every batch's share of so many iterations; the first ones have one more where it does not come out even.
pub(super) fn shares(iters: u32, batches: u32) -> impl Iterator<Item = u32> {
    (0..batches).map(move |batch| iters / batches + u32::from(batch < iters % batches))
}

/// Runs a batch in a thread that no batch has been in. With one thread for all batches, nearly all of them came out
/// alike, at the fast end of what is seen with new ones: steadier, and blind to the rest.
pub(super) fn in_new_thread<T: Send>(work: impl FnOnce() -> anyhow::Result<T> + Send) -> anyhow::Result<T> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("scheduler".to_owned()).spawn_scoped(scope, work);
        thread.context("starting the scheduler's thread")?.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_alone_are_worth_new_workers_and_mappings_are_not() {
        assert_eq!([1, 20, 199, 200, 2000, 8000, 1_000_000].map(|iters| count(iters, true)), [1, 1, 1, 2, 20, 40, 40]);
        assert_eq!([1, 20, 1_000_000].map(|iters| count(iters, false)), [1, 1, 1]);
    }

    #[test]
    fn shares_are_even_and_miss_nothing() {
        assert_eq!(shares(10, 4).collect::<Vec<_>>(), [3, 3, 2, 2]);
        for (iters, batches) in [(1, 1), (20, 1), (8000, 40), (1000, 40), (8039, 40)] {
            assert_eq!(shares(iters, batches).count(), batches as usize);
            assert_eq!(shares(iters, batches).sum::<u32>(), iters);
        }
    }
}
