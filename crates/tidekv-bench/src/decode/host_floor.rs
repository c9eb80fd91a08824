//! The processor's floor: as many bytes as a model's weights, read once by all threads.

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use tidekv_core::units::Bytes;

/// Memory to read.
#[derive(Debug)]
pub(super) struct HostFloor {
    words: Vec<u64>,
    threads: usize,
}

impl HostFloor {
    pub(super) fn new(bytes: Bytes, threads: usize) -> Self {
        let words = bytes.0.div_ceil(8);
        // Written, so that there is memory behind all of it.
        Self { words: (0..words).collect(), threads: threads.max(1) }
    }

    /// From the common start to the end of the slowest thread.
    pub(super) fn time(&self) -> Duration {
        let start = Barrier::new(self.threads);
        let read = |part: &[u64]| {
            start.wait();
            let began = Instant::now();
            black_box(part.iter().fold(0u64, |sum, word| sum ^ word));
            began.elapsed()
        };
        let share = self.words.len().div_ceil(self.threads).max(1);
        // Every thread is waited for at the start, so each has a part, be it empty.
        let part =
            |index: usize| self.words.get(index * share..).map_or(&[][..], |rest| &rest[..share.min(rest.len())]);
        thread::scope(|scope| {
            let readers: Vec<_> = (1..self.threads).map(|index| scope.spawn(move || read(part(index)))).collect();
            let own = read(part(0));
            // A reader that panicked took no time; reading cannot panic.
            readers.into_iter().map(|reader| reader.join().unwrap_or_default()).fold(own, Duration::max)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_number_of_threads_reads_any_number_of_bytes() {
        for (bytes, threads) in [(0, 1), (1, 4), (8, 3), (80, 3), (1 << 20, 2)] {
            let floor = HostFloor::new(Bytes(bytes), threads);
            assert!(floor.time() < Duration::from_secs(60), "{bytes} bytes, {threads} threads");
        }
    }
}
