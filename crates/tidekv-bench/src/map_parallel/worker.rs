//! The process of one rank: reserves its cache and maps its pages at the moment it is told.

use std::num::NonZero;
use std::thread;

use anyhow::{Context, bail};
use clap::Args;
use rustix::thread::{ClockId, clock_nanosleep_absolute, set_current_timer_slack};
use rustix::time::{Timespec, clock_gettime};
use serde::{Deserialize, Serialize};
use tidekv_core::units::PageId;
use tidekv_mem::Reservation;

use super::Range;
use crate::ranks::cache::CacheSpec;
use crate::ranks::{answer, serve};
use crate::subprocess::orders;
use tidekv_cli::exit::Outcome;

const NS_PER_S: u64 = 1_000_000_000;

/// Arguments of the hidden `kvbench map-worker`: none. Everything comes as orders.
#[derive(Args, Clone, Copy, Debug)]
#[command(after_help = "Examples:\n  kvbench map-parallel --pages-total 16    # starts its processes itself")]
pub struct MapWorkerArgs {}

/// From the parent to a rank; each is answered before the next one comes.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Order {
    /// Reserve the cache. First, and once.
    Open { cache: CacheSpec, device: u32 },
    /// Map these pages from a moment of the monotonic clock on.
    Map { range: Range, threads: u32, at_ns: u64 },
    /// Unmap these pages.
    Unmap { range: Range },
}

/// What a rank answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Word {
    Opened,
    /// Mapped, from its own first step to its last one.
    Mapped {
        /// The moment had passed before the rank was ready for it.
        late: bool,
        began_ns: u64,
        ended_ns: u64,
    },
    Unmapped,
}

/// Follows orders until there are no more.
pub fn run(_: &MapWorkerArgs) -> anyhow::Result<Outcome> {
    serve(work)
}

fn work() -> anyhow::Result<()> {
    // A sleeper is woken at its moment and not up to 50 us later, when it suits the kernel.
    set_current_timer_slack(NonZero::new(1)).context("asking for exact wake-ups")?;
    let mut cache = None;
    for order in orders() {
        let word = match (order, &cache) {
            (Order::Open { cache: spec, device }, None) => {
                cache = Some(spec.reserve(device).context("reserving the cache")?);
                Word::Opened
            }
            (Order::Map { range, threads, at_ns }, Some(cache)) => map(cache, range, threads, at_ns)?,
            (Order::Unmap { range }, Some(cache)) => {
                cache.unmap_pages(&ids(range)).context("unmapping")?;
                Word::Unmapped
            }
            (order, _) => bail!("not now: {order:?}"),
        };
        answer(&word)?;
    }
    Ok(())
}

/// Maps the range, in as many parts as there are threads; every thread keeps the appointment by itself.
fn map(cache: &Reservation, range: Range, threads: u32, at_ns: u64) -> anyhow::Result<Word> {
    let turns = thread::scope(|scope| {
        let parts = range.split(threads).into_iter().map(ids);
        let workers: Vec<_> = parts.map(|part| scope.spawn(move || map_part(cache, &part, at_ns))).collect();
        let join = |worker: thread::ScopedJoinHandle<'_, _>| {
            worker.join().unwrap_or_else(|_| bail!("a measuring thread panicked"))
        };
        workers.into_iter().map(join).collect::<anyhow::Result<Vec<Turn>>>()
    })?;
    Ok(Word::Mapped {
        late: turns.iter().any(|turn| turn.late),
        began_ns: turns.iter().map(|turn| turn.began_ns).min().unwrap_or(at_ns),
        ended_ns: turns.iter().map(|turn| turn.ended_ns).max().unwrap_or(at_ns),
    })
}

/// What one thread did.
struct Turn {
    late: bool,
    began_ns: u64,
    ended_ns: u64,
}

fn map_part(cache: &Reservation, pages: &[PageId], at_ns: u64) -> anyhow::Result<Turn> {
    let late = !sleep_until(at_ns);
    let began_ns = now_ns();
    cache.map_pages(pages).context("mapping")?;
    Ok(Turn { late, began_ns, ended_ns: now_ns() })
}

fn ids(range: Range) -> Vec<PageId> {
    (range.first..range.first + range.pages).map(PageId).collect()
}

/// Nanoseconds of the clock that all processes of a machine share.
pub(super) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let [seconds, nanoseconds] = [now.tv_sec, now.tv_nsec].map(|part| u64::try_from(part).unwrap_or(0));
    seconds * NS_PER_S + nanoseconds
}

/// Sleeps until a moment of [`now_ns`], and answers whether it was still to come.
fn sleep_until(at_ns: u64) -> bool {
    if now_ns() >= at_ns {
        return false;
    }
    let part = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    let at = Timespec { tv_sec: part(at_ns / NS_PER_S), tv_nsec: part(at_ns % NS_PER_S) };
    while now_ns() < at_ns {
        // A signal that is no reason to end is a reason to sleep on.
        let _ = clock_nanosleep_absolute(ClockId::Monotonic, &at);
    }
    true
}
