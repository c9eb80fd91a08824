//! Measuring which method is the fastest here.
//!
//! ```text
//!   round 1    class 4 KiB:  hot memcpy, hot movsb, hot nt, cold memcpy, cold movsb, cold nt      class 16 KiB: ...
//!   round 2    the same again, so that what slows the machine for a while slows one sample of each and not all of one
//!   ...
//!
//!   region  |  cold: the next blocks, round and round, more than any cache holds    |  hot: the same block  |
//!
//!   sample  some copies that are not timed, then some that are
//! ```
//!
//! The upper quartile of its rounds stands for a method: a neighbour, an interrupt or another thread in its place make
//! many a sample slower, and few things make one faster. `memcpy` stays unless another method beats it clearly, and one
//! thread stays unless more of them are worth the processors that they take. The region is shared memory with ordinary
//! pages, as blocks are: on huge pages, which the kernel gives to private memory, small copies are another matter.

use std::time::{Duration, Instant};

use super::profile::{CLASSES, Choice, Destination, MIN_SHARED_BYTES, Profile};
use super::team::Team;
use super::{Method, host};
use crate::baseline::SharedMemory;

const ROUNDS: usize = 9;

/// No round starts after this, and the first always does. On an idle machine all are done in a third of it.
const TIME_FOR_ROUNDS: Duration = Duration::from_millis(600);

/// Bytes of one sample, if a block is not larger.
const SAMPLE_BYTES: usize = 2 << 20;

/// Of each of the two regions. Together they are four times the last cache, as far as these bounds allow.
const MIN_REGION: usize = 64 << 20;
const MAX_REGION: usize = 128 << 20;

/// The largest block.
const LARGEST: usize = CLASSES[CLASSES.len() - 1];
const _: () = assert!(2 * LARGEST <= MIN_REGION);

/// A hot sample has this many times the bytes: caches are that much faster.
const HOT_TIMES: usize = 4;

/// Blocks from here on take milliseconds: they have a turn in every third round.
const LARGE_BYTES: usize = 16 << 20;
const LARGE_ROUNDS: usize = 3;

/// What another method has to win by.
const CLEARLY_FASTER: f64 = 1.03;
/// What several threads have to win by, against one.
const WORTH_THREADS: f64 = 1.2;

/// One way to copy blocks of a class, and how fast it was in each round.
#[derive(Debug)]
struct Candidate {
    destination: Destination,
    class: usize,
    method: Method,
    together: bool,
    bytes_per_ns: Vec<f64>,
}

impl Candidate {
    fn upper_quartile(&self) -> f64 {
        let mut sorted = self.bytes_per_ns.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() * 3 / 4).copied().unwrap_or(0.0)
    }
}

/// Measures; `None` where there is no memory to measure with.
pub(super) fn measure(team: &Team) -> Option<Profile> {
    let mut field = Field::new(team)?;
    let mut candidates = candidates(team.threads());
    let started = Instant::now();
    for round in 0..ROUNDS {
        if round > 0 && started.elapsed() > TIME_FOR_ROUNDS {
            break;
        }
        for candidate in &mut candidates {
            if candidate.class >= LARGE_BYTES && round % LARGE_ROUNDS != 0 {
                continue;
            }
            let rate = field.sample(candidate);
            candidate.bytes_per_ns.push(rate);
        }
    }
    Some(Profile::of(|destination, class| choose(&candidates, destination, class)))
}

fn candidates(threads: usize) -> Vec<Candidate> {
    let mut all = Vec::new();
    for class in CLASSES {
        for destination in Destination::ALL {
            for method in Method::available() {
                let new = |together| Candidate { destination, class, method, together, bytes_per_ns: Vec::new() };
                all.push(new(false));
                if threads > 1 && class >= MIN_SHARED_BYTES && method != Method::Movsb {
                    all.push(new(true));
                }
            }
        }
    }
    all
}

fn choose(candidates: &[Candidate], destination: Destination, class: usize) -> Choice {
    let of_class: Vec<&Candidate> =
        candidates.iter().filter(|c| c.destination == destination && c.class == class).collect();
    let best = |together| {
        let rates = of_class.iter().filter(|c| c.together == together).map(|c| (c.method, c.upper_quartile()));
        // `Plain` comes first, and whoever follows has to beat the best so far clearly.
        rates.reduce(|best, next| if next.1 > best.1 * CLEARLY_FASTER { next } else { best })
    };
    let (alone, one_thread) = best(false).unwrap_or((Method::Plain, 0.0));
    let together = best(true).filter(|(_, rate)| *rate > one_thread * WORTH_THREADS);
    Choice { alone, together: together.map(|(method, _)| method) }
}

/// The memory that is measured with.
struct Field<'a> {
    team: &'a Team,
    source: SharedMemory,
    destination: SharedMemory,
    cursor: usize,
}

impl<'a> Field<'a> {
    fn new(team: &'a Team) -> Option<Self> {
        let region = (2 * host::last_cache_bytes().unwrap_or(0)).clamp(MIN_REGION, MAX_REGION);
        let filled = |byte| {
            let mut memory = SharedMemory::of_memory_file(region).ok()?;
            // Touched, so that no page fault is timed.
            memory.bytes_mut().fill(byte);
            Some(memory)
        };
        Some(Self { team, source: filled(0xAB)?, destination: filled(0xCD)?, cursor: 0 })
    }

    /// Bytes for each nanosecond.
    fn sample(&mut self, candidate: &Candidate) -> f64 {
        let class = candidate.class;
        let hot = candidate.destination == Destination::ReadSoon;
        let bytes = if hot { HOT_TIMES * SAMPLE_BYTES } else { SAMPLE_BYTES };
        let blocks = (bytes / class).max(1);
        // Untimed, so that nobody pays for what the one before left in the caches to be written back.
        for _ in 0..if hot { 1 } else { blocks } {
            let at = if hot { self.hot_block() } else { self.next_block(class) };
            self.copy(candidate, at);
        }
        let started = Instant::now();
        for _ in 0..blocks {
            let at = if hot { self.hot_block() } else { self.next_block(class) };
            self.copy(candidate, at);
        }
        let elapsed = started.elapsed().as_nanos().max(1);
        #[expect(clippy::cast_precision_loss, reason = "a rate: far fewer than 2^52 bytes and nanoseconds")]
        let rate = (blocks * class) as f64 / elapsed as f64;
        rate
    }

    /// Where hot blocks are. Cold ones never come here, so none of them is in a cache because a hot one was.
    fn hot_block(&self) -> usize {
        self.source.bytes().len() - LARGEST
    }

    fn next_block(&mut self, class: usize) -> usize {
        if self.cursor + class > self.hot_block() {
            self.cursor = 0;
        }
        let at = self.cursor;
        self.cursor += class;
        at
    }

    fn copy(&mut self, candidate: &Candidate, at: usize) {
        let Candidate { class, method, together, .. } = *candidate;
        let source = &self.source.bytes()[at..at + class];
        let destination = &mut self.destination.bytes_mut()[at..at + class];
        let (to, from) = (destination.as_mut_ptr(), source.as_ptr());
        if together {
            // SAFETY: two slices of this length, one of them exclusive, so that they cannot overlap.
            unsafe { self.team.copy(method, to, from, class, false) };
        } else {
            // SAFETY: the same.
            unsafe { method.copy_unchecked(to, from, class) };
        }
        std::hint::black_box(&mut self.destination);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(method: Method, together: bool, rates: &[f64]) -> Candidate {
        let class = 1 << 20;
        Candidate { destination: Destination::Cold, class, method, together, bytes_per_ns: rates.to_vec() }
    }

    fn choice(candidates: &[Candidate]) -> Choice {
        choose(candidates, Destination::Cold, 1 << 20)
    }

    #[test]
    fn slow_rounds_do_not_count_and_a_tie_stays_plain() {
        let plain = candidate(Method::Plain, false, &[5.0, 0.1, 5.1]);
        let near = candidate(Method::Movsb, false, &[5.15, 5.2, 5.2]);
        let far = candidate(Method::NonTemporal, false, &[0.1, 8.0, 0.2]);
        assert_eq!(choice(&[plain, near]), Choice { alone: Method::Plain, together: None });
        let plain = candidate(Method::Plain, false, &[5.0, 5.1, 5.0]);
        assert_eq!(choice(&[plain, far]), Choice { alone: Method::NonTemporal, together: None });
    }

    #[test]
    fn threads_must_be_worth_it() {
        let alone = || candidate(Method::Plain, false, &[5.0]);
        assert_eq!(choice(&[alone(), candidate(Method::NonTemporal, true, &[5.9])]).together, None);
        let faster = choice(&[alone(), candidate(Method::NonTemporal, true, &[6.1])]);
        assert_eq!(faster, Choice { alone: Method::Plain, together: Some(Method::NonTemporal) });
    }

    #[test]
    fn nothing_measured_is_plain() {
        assert_eq!(choice(&[]), Choice { alone: Method::Plain, together: None });
    }
}
