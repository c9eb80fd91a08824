//! The neighbour: a process whose pool maps and unmaps pages while it is told to.
//!
//! ```text
//!    parent ── Open ──> opens its pool                                    ── Opened ──>
//!           ── Map ───> a thread maps; answered once it has mapped        ── Mapping ─>
//!           ── Rest ──> the thread ends, everything is unmapped           ── Rested ──>   how many pages, and the time of each call
//! ```

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use clap::Args;
use serde::{Deserialize, Serialize};
use tidekv_cli::exit::Outcome;
use tidekv_core::blocks::BlockLease;
use tidekv_core::pages::Fence;
use tidekv_core::units::{ByteOffset, Step};
use tidekv_pool::KvPool;

use crate::lab::PoolSpec;
use crate::ranks::{answer, serve};
use crate::stats::Samples;
use crate::subprocess::orders;

/// No device work ever sees these pages.
const FENCE: Fence = Fence::Step(Step(0));
/// Times of calls that are told of a slice, at most: evenly chosen from all.
const TOLD: usize = 1000;
/// How long pages that the pool's own thread is still unmapping are waited for.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often a wait looks whether it is to rest.
const LOOK: Duration = Duration::from_millis(5);
/// Written at a time where pages are touched.
const PIECE: usize = 1 << 20;

/// Arguments of the hidden `kvbench map-neighbour`: none. Everything comes as orders.
#[derive(Args, Clone, Copy, Debug)]
#[command(after_help = "Examples:\n  kvbench interference    # starts its neighbour itself")]
pub struct NeighbourArgs {}

/// From the parent; each is answered before the next one comes.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Order {
    /// Open the pool, whose pages have a block each. First, and once.
    Open(PoolSpec),
    /// Map until told to rest.
    Map(Pace),
    /// Stop mapping and give everything back.
    Rest,
}

/// How the neighbour maps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Pace {
    /// Pages a second; `None` for as many as possible.
    pub(super) pages_per_s: Option<f64>,
    /// Pages that are mapped, and unmapped, at a time.
    pub(super) batch: u32,
    /// Pages that are kept.
    pub(super) keep: u32,
    /// Whether every page is written.
    pub(super) touch: bool,
}

/// What it answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Word {
    Opened,
    Mapping,
    Rested(Rested),
}

/// What it did between `Map` and `Rest`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Rested {
    /// Pages mapped.
    pub(super) pages: u64,
    /// For so long.
    pub(super) seconds: f64,
    /// Times of its calls.
    pub(super) map_ns: Vec<u64>,
    pub(super) unmap_ns: Vec<u64>,
}

/// Follows orders until there are no more.
pub fn run(_: &NeighbourArgs) -> anyhow::Result<Outcome> {
    serve(work)
}

fn work() -> anyhow::Result<()> {
    let mut pool: Option<KvPool> = None;
    let mut mapper: Option<Mapper> = None;
    for order in orders() {
        let word = match (order, &pool, mapper.take()) {
            (Order::Open(spec), None, None) => {
                pool = Some(spec.open().context("opening the pool")?);
                Word::Opened
            }
            (Order::Map(pace), Some(pool), None) => {
                mapper = Some(Mapper::start(pool.clone(), pace)?);
                Word::Mapping
            }
            (Order::Rest, Some(_), Some(mapper)) => Word::Rested(mapper.rest()?),
            (order, ..) => bail!("not now: {order:?}"),
        };
        answer(&word)?;
    }
    Ok(())
}

/// The thread that maps. One that is dropped without [`rest`](Self::rest) ends with the process.
struct Mapper {
    thread: JoinHandle<anyhow::Result<Rested>>,
    rest: Arc<AtomicBool>,
}

impl Mapper {
    /// Starts mapping, and returns once something was mapped.
    fn start(pool: KvPool, pace: Pace) -> anyhow::Result<Self> {
        let rest = Arc::new(AtomicBool::new(false));
        let (told, begun) = channel();
        let is_over = Arc::clone(&rest);
        let name = "mapper".to_owned();
        let thread = thread::Builder::new().name(name).spawn(move || cycle(&pool, pace, &is_over, &told))?;
        match begun.recv() {
            Ok(()) => Ok(Self { thread, rest }),
            // It ended before it had mapped anything, and knows why.
            Err(_) => {
                Err(Self { thread, rest }.rest().err().unwrap_or_else(|| anyhow!("the neighbour mapped nothing")))
            }
        }
    }

    fn rest(self) -> anyhow::Result<Rested> {
        self.rest.store(true, Ordering::Release);
        self.thread.join().unwrap_or_else(|_| bail!("the thread that maps panicked"))
    }
}

/// Maps a batch, unmaps the oldest where more than `keep` pages are held, waits for the next moment; at the end nothing is held.
fn cycle(pool: &KvPool, pace: Pace, is_over: &AtomicBool, begun: &Sender<()>) -> anyhow::Result<Rested> {
    let (mut map, mut unmap, mut pages) = (Samples::new(), Samples::new(), 0);
    let mut held: VecDeque<Vec<BlockLease>> = VecDeque::new();
    let mut schedule = Schedule::begin(pace);
    let start = Instant::now();
    while !is_over.load(Ordering::Acquire) {
        let mut leases = Vec::with_capacity(pace.batch as usize);
        let began = Instant::now();
        pool.alloc_within(pace.batch, PATIENCE, &mut leases).context("mapping")?;
        map.push_duration(began.elapsed());
        pages += u64::from(pace.batch);
        if pace.touch {
            touch(pool, &leases)?;
        }
        held.push_back(leases);
        if held.len() > (pace.keep / pace.batch).max(1) as usize {
            let oldest = held.pop_front().unwrap_or_default();
            let began = Instant::now();
            give_back(pool, &oldest)?;
            unmap.push_duration(began.elapsed());
        }
        // A parent that does not wait for it has ended.
        let _ = begun.send(());
        schedule.wait(is_over);
    }
    let seconds = start.elapsed().as_secs_f64();
    give_back(pool, &held.into_iter().flatten().collect::<Vec<_>>())?;
    Ok(Rested { pages, seconds, map_ns: told(&map), unmap_ns: told(&unmap) })
}

/// Frees and unmaps. What the pool's own thread is unmapping at the moment is on its way too.
fn give_back(pool: &KvPool, leases: &[BlockLease]) -> anyhow::Result<()> {
    pool.free(leases, FENCE).context("freeing")?;
    pool.trim().context("unmapping")?;
    Ok(())
}

/// Writes all bytes of these pages.
fn touch(pool: &KvPool, leases: &[BlockLease]) -> anyhow::Result<()> {
    let memory = pool.reservation().context("the neighbour's memory is elsewhere")?;
    let (geometry, piece) = (pool.geometry(), vec![0x5a; PIECE]);
    for lease in leases {
        let page = geometry.page_of(lease.block)?;
        for handle in 0..geometry.placement().handles_per_page() {
            let extent = geometry.placement().extent(page, handle);
            let (mut at, end) = (extent.offset.0, extent.offset.0 + extent.bytes.0);
            while at < end {
                let bytes = usize::try_from(end - at).map_or(PIECE, |left| left.min(PIECE));
                memory.write(ByteOffset(at), &piece[..bytes]).context("touching")?;
                at += bytes as u64;
            }
        }
    }
    Ok(())
}

/// The moments at which batches are mapped.
struct Schedule {
    period: Option<Duration>,
    next: Instant,
}

impl Schedule {
    fn begin(pace: Pace) -> Self {
        let period = pace.pages_per_s.map(|rate| Duration::from_secs_f64(f64::from(pace.batch) / rate));
        Self { period, next: Instant::now() }
    }

    /// Sleeps until the next moment. One that has passed is made up for, unless it is long ago: a machine that cannot keep up
    /// is not asked for all of it at once.
    fn wait(&mut self, is_over: &AtomicBool) {
        let Some(period) = self.period else { return };
        self.next += period;
        let now = Instant::now();
        if now > self.next + period {
            self.next = now;
        }
        while !is_over.load(Ordering::Acquire) {
            let left = self.next.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            thread::sleep(left.min(LOOK));
        }
    }
}

/// At most [`TOLD`] of the times, evenly chosen.
fn told(times: &Samples) -> Vec<u64> {
    let values = times.values_ns();
    values.iter().step_by(values.len().div_ceil(TOLD).max(1)).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::Lab;
    use tidekv_core::units::Bytes;
    use tidekv_mem::Call;

    fn pool(lab: &Lab, pages: u32) -> KvPool {
        let mut spec = PoolSpec::new("neighbour", lab.path(), Bytes::kib(64), pages);
        spec.backend = "fake".to_owned();
        spec.open().unwrap()
    }

    const PACE: Pace = Pace { pages_per_s: None, batch: 2, keep: 6, touch: true };

    #[test]
    fn a_neighbour_maps_until_it_is_told_to_rest_and_holds_nothing_then() {
        let lab = Lab::new().unwrap();
        let pool = pool(&lab, 8);
        let mapper = Mapper::start(pool.clone(), PACE).unwrap();
        // Until it has given back what it mapped first, however slow the machine is.
        let deadline = Instant::now() + Duration::from_secs(60);
        let unmapped = || pool.reservation().unwrap().backend().meter().made(Call::Unmap);
        while unmapped() == 0 && Instant::now() < deadline {
            thread::yield_now();
        }
        let rested = mapper.rest().unwrap();
        assert!(rested.pages >= 8 && rested.pages.is_multiple_of(2), "{rested:?}");
        assert!(!rested.map_ns.is_empty() && !rested.unmap_ns.is_empty() && rested.seconds > 0.0, "{rested:?}");
        assert_eq!(pool.reservation().unwrap().mapped_pages(), 0);
    }

    #[test]
    fn a_neighbour_without_room_says_so_at_once() {
        let lab = Lab::new().unwrap();
        let error = Mapper::start(pool(&lab, 1), PACE).err().unwrap();
        assert!(format!("{error:#}").starts_with("mapping: "), "{error:#}");
    }

    #[test]
    fn a_rate_is_kept_and_what_was_missed_is_not_made_up_for_at_once() {
        let pace = Pace { pages_per_s: Some(1e6), batch: 1, ..PACE };
        let mut schedule = Schedule::begin(pace);
        let before = schedule.next;
        schedule.next -= Duration::from_secs(5);
        schedule.wait(&AtomicBool::new(false));
        assert!(schedule.next >= before, "five seconds of a million pages each are forgotten");
        let mut slow = Schedule::begin(Pace { pages_per_s: Some(1e-3), ..pace });
        // Nobody waits for a thousand seconds who is told to rest.
        slow.wait(&AtomicBool::new(true));
    }

    #[test]
    fn times_are_told_evenly_and_not_all() {
        assert!(told(&Samples::new()).is_empty());
        let all: Samples = (0..2500u64).collect();
        assert_eq!((told(&all).len(), told(&all)[1]), (834, 3));
        assert_eq!(told(&(0..1000u64).collect()).len(), 1000);
    }
}
