//! Operations that take a few nanoseconds, timed a chunk at a time.
//!
//! A pair of clock readings costs 16 to 40 ns, so an operation of 4 ns cannot be timed alone. A chunk of 1,000 or so
//! spreads that over all of them; the median chunk is what is reported, because a chunk that was interrupted says
//! nothing about the operation. Where a chunk is so short that the clock is more than a twentieth of it, the figure is
//! marked: it is an upper bound and no more.

use std::fmt;
use std::time::Instant;

use crate::stats::{Samples, to_f64};

/// Operations of a chunk, where so many are asked for. Never fewer than 500 are where they are.
const CHUNK: usize = 1000;

/// Operations of a chunk for `wanted` operations: all of them, or 1,000.
pub(super) fn chunk_len(wanted: usize) -> usize {
    wanted.clamp(1, CHUNK)
}

/// A chunk that takes this many clock readings is resolved.
const CLOCKS: f64 = 20.0;

/// What a pair of clock readings costs here, in nanoseconds.
pub(super) fn clock_ns() -> f64 {
    let times: Samples = (0..1001).map(|_| nanos(Instant::now())).collect();
    times.percentiles().map_or(0.0, |p| p.avg.min(to_f64(p.p90)))
}

/// Times of chunks of one operation.
#[derive(Clone, Debug)]
pub(super) struct Chunks {
    /// Operations in each.
    len: usize,
    clock_ns: f64,
    samples: Samples,
}

impl Chunks {
    pub(super) fn new(len: usize, clock_ns: f64) -> Self {
        Self { len, clock_ns, samples: Samples::new() }
    }

    /// Times one chunk. The closure does `len` operations; what it answers is kept alive past the clock.
    pub(super) fn time<T>(&mut self, chunk: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let answer = std::hint::black_box(chunk());
        self.samples.push(nanos(started));
        answer
    }

    /// A chunk that was timed elsewhere.
    pub(super) fn push(&mut self, ns: u64) {
        self.samples.push(ns);
    }

    pub(super) fn samples(&self) -> &Samples {
        &self.samples
    }

    /// The time of one operation.
    pub(super) fn figure(&self) -> Option<Figure> {
        let p = self.samples.percentiles()?;
        #[expect(clippy::cast_precision_loss, reason = "operations of a chunk: thousands")]
        let per_op = |ns: u64| to_f64(ns) / self.len as f64;
        let mut sorted = self.samples.values_ns().to_vec();
        sorted.sort_unstable();
        let p10 = sorted.get(sorted.len() / 10).copied().unwrap_or(p.min);
        let resolved = to_f64(p.p50) >= CLOCKS * self.clock_ns;
        Some(Figure { p50_ns: per_op(p.p50), p10_ns: per_op(p10), p99_ns: per_op(p.p99), resolved })
    }
}

/// Nanoseconds since `started`, at least one: a rate must not divide by zero.
pub(super) fn nanos(started: Instant) -> u64 {
    u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX).max(1)
}

/// The time of one operation, over the chunks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Figure {
    pub(super) p50_ns: f64,
    pub(super) p10_ns: f64,
    pub(super) p99_ns: f64,
    /// Whether the clock could tell.
    pub(super) resolved: bool,
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { p50_ns, p10_ns, p99_ns, resolved } = self;
        write!(f, "p50={p50_ns:.2} ns, p10={p10_ns:.2} ns, p99={p99_ns:.2} ns{}", mark(*resolved))
    }
}

/// What stands behind a figure that the clock could not tell.
pub(super) const fn mark(resolved: bool) -> &'static str {
    if resolved { "" } else { " (not resolved)" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_per_operation_and_short_chunks_are_marked() {
        let mut chunks = Chunks::new(500, 20.0);
        assert_eq!(chunks.figure(), None);
        for ns in [3000, 2000, 90_000] {
            chunks.push(ns);
        }
        let figure = chunks.figure().unwrap();
        assert!((figure.p50_ns - 6.0).abs() < 1e-9 && figure.resolved, "{figure}");
        let mut short = Chunks::new(10, 20.0);
        short.push(399);
        assert_eq!(short.figure().unwrap().to_string(), "p50=39.90 ns, p10=39.90 ns, p99=39.90 ns (not resolved)");
        assert_eq!([chunk_len(0), chunk_len(100), chunk_len(10_000)], [1, 100, 1000]);
    }

    #[test]
    fn the_clock_costs_something() {
        assert!(clock_ns() > 0.0);
        let mut chunks = Chunks::new(1, 0.0);
        assert_eq!(chunks.time(|| 7), 7);
        assert_eq!(chunks.samples().len(), 1);
    }
}
