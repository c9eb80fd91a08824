//! The baseline: a shared-memory object for each block.

use std::path::PathBuf;
use std::time::Instant;

use tidekv_shm::baseline::{self, CallError, SegmentName, Touch};

use super::{Plan, TOUCHED_KB, bytes};
use crate::shm::chunks::nanos;
use crate::shm::tidy_up::Undisturbed;
use crate::stats::Samples;

/// Blocks of each row of the table by size.
const BY_SIZE: u32 = 100;

/// Blocks of each row with touched memory.
const TOUCHED: u32 = 200;

/// Times of the baseline.
#[derive(Debug)]
pub(super) struct SyscallTimes {
    /// What was timed call by call: the whole, or mmap alone.
    pub(super) calls: CallTimes,
    /// Smallest to largest: the whole life of a block.
    pub(super) by_size: Vec<(u32, Samples)>,
    /// Mixed sizes: the whole life of a block.
    pub(super) mixed: Samples,
    /// Every byte written.
    pub(super) touched: Vec<(u32, Samples)>,
    /// A byte of every page written.
    pub(super) paged: Vec<(u32, Samples)>,
    /// Objects that were left behind, as asked for.
    pub(super) left: Vec<PathBuf>,
}

/// Times of single calls.
#[derive(Debug, Default)]
pub(super) struct CallTimes {
    pub(super) shm_open: Samples,
    pub(super) ftruncate: Samples,
    pub(super) mmap: Samples,
    pub(super) touch: Samples,
    /// The three together, without touching.
    pub(super) total: Samples,
    pub(super) cleanup: Samples,
}

pub(super) fn measure(plan: &Plan) -> anyhow::Result<SyscallTimes> {
    let mut left = Vec::new();
    // Unmeasured: the first calls of a process fault in the code that they run.
    for _ in 0..10 {
        life(4096, Touch::Nothing)?;
    }
    let calls = if plan.measure_mmap_only { mmap_only(plan)? } else { call_by_call(plan, &mut left)? };
    let lives =
        |kb: u32, touch, count| -> Result<Samples, CallError> { (0..count).map(|_| life(bytes(kb), touch)).collect() };
    let mut by_size = Vec::new();
    for kb in plan.sizes_kb() {
        by_size.push((kb, lives(kb, Touch::Nothing, BY_SIZE)?));
    }
    let count = plan.num_iterations.min(10_000) as usize;
    let mixed =
        plan.mixed_bytes(count).into_iter().map(|bytes| life(bytes, Touch::Nothing)).collect::<Result<_, _>>()?;
    let (mut touched, mut paged) = (Vec::new(), Vec::new());
    for kb in TOUCHED_KB {
        touched.push((kb, lives(kb, Touch::Bytes, plan.num_iterations.min(TOUCHED))?));
        paged.push((kb, lives(kb, Touch::Pages, plan.num_iterations.min(TOUCHED))?));
    }
    Ok(SyscallTimes { calls, by_size, mixed, touched, paged, left })
}

/// Every call of a block's life, timed alone.
fn call_by_call(plan: &Plan, left: &mut Vec<PathBuf>) -> Result<CallTimes, CallError> {
    let mut times = CallTimes::default();
    let size = bytes(plan.min_size_kb);
    let timed = |times: &mut Samples, started: Instant| {
        let ns = nanos(started);
        times.push(ns);
        ns
    };
    for _ in 0..plan.num_iterations {
        let name = SegmentName::new();
        let undisturbed = plan.cleanup.then(Undisturbed::begin);

        let started = Instant::now();
        let fd = baseline::shm_open(&name)?;
        let mut total = timed(&mut times.shm_open, started);

        let started = Instant::now();
        baseline::ftruncate(&fd, size)?;
        total += timed(&mut times.ftruncate, started);

        let started = Instant::now();
        let mut mapping = baseline::mmap(&fd, size)?;
        total += timed(&mut times.mmap, started);
        times.total.push(total);

        if plan.touch.touch() != Touch::Nothing {
            let started = Instant::now();
            mapping.touch(plan.touch.touch());
            timed(&mut times.touch, started);
        }

        let started = Instant::now();
        mapping.munmap()?;
        drop(fd);
        if plan.cleanup {
            baseline::shm_unlink(&name)?;
        }
        timed(&mut times.cleanup, started);
        drop(undisturbed);
        if !plan.cleanup {
            left.push(name.path());
        }
    }
    Ok(times)
}

/// One object that is there already, mapped again and again.
fn mmap_only(plan: &Plan) -> Result<CallTimes, CallError> {
    let mut times = CallTimes::default();
    let size = bytes(plan.max_size_kb);
    let name = SegmentName::new();
    let undisturbed = Undisturbed::begin();
    let fd = baseline::shm_open(&name)?;
    baseline::shm_unlink(&name)?;
    drop(undisturbed);
    baseline::ftruncate(&fd, size)?;
    for _ in 0..plan.num_iterations {
        let started = Instant::now();
        let mut mapping = baseline::mmap(&fd, size)?;
        times.mmap.push(nanos(started));
        mapping.touch(plan.touch.touch());
        mapping.munmap()?;
    }
    Ok(times)
}

/// The whole life of a block, in nanoseconds.
fn life(bytes: usize, touch: Touch) -> Result<u64, CallError> {
    let name = SegmentName::new();
    let _undisturbed = Undisturbed::begin();
    let started = Instant::now();
    let fd = baseline::shm_open(&name)?;
    baseline::ftruncate(&fd, bytes)?;
    let mut mapping = baseline::mmap(&fd, bytes)?;
    mapping.touch(touch);
    mapping.munmap()?;
    drop(fd);
    baseline::shm_unlink(&name)?;
    Ok(nanos(started))
}
