//! Pools on a GPU: the driver's own count of memory, fences, and memory that moves between models. Needs a GPU.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tidekv_core::blocks::BlockLease;
use tidekv_core::geometry::{Capacity, ChunkChoice, GeometryConfig, KvShape, Layout};
use tidekv_core::pages::Fence;
use tidekv_core::units::{Bytes, Step};
use tidekv_mem::cuda::{CudaBackend, CudaOptions};
use tidekv_mem::{Backend, MemError};
use tidekv_pool::{KvPool, PoolConfig, PoolError, ReservePolicy};
use tidekv_shm::{PoolName, RuntimeDir};

const SOON: Duration = Duration::from_secs(20);
const NO_WORK: Fence = Fence::Step(Step(0));

/// One GPU and a folder for the files of its pools, removed with the test that made it.
struct Card {
    dir: PathBuf,
    _made: Option<TempDir>,
    backend: Arc<dyn Backend>,
}

impl Card {
    /// Says loudly that a test did not run; with `TIDEKV_REQUIRE_GPU` set, that is a failure.
    fn open(test: &str) -> Option<Self> {
        let made = tempfile::Builder::new().prefix("kvcached-test").tempdir_in("/dev/shm").unwrap();
        let card = Self::at(test, made.path())?;
        Some(Self { _made: Some(made), ..card })
    }

    fn at(test: &str, dir: &Path) -> Option<Self> {
        match CudaBackend::open(CudaOptions::default()) {
            Ok(backend) => Some(Self { dir: dir.to_owned(), _made: None, backend: Arc::new(backend) }),
            Err(error @ (MemError::Unavailable { .. } | MemError::NoSuchDevice { count: 0, .. })) => {
                assert!(std::env::var_os("TIDEKV_REQUIRE_GPU").is_none(), "{test} needs a GPU: {error}");
                let _ = std::io::stderr().write_all(format!("SKIPPED: {test}: {error}\n").as_bytes());
                None
            }
            Err(error) => panic!("{test}: {error}"),
        }
    }

    /// A model of 32 layers whose cache may grow to the whole card.
    fn config(&self, name: &str) -> PoolConfig {
        let geometry = GeometryConfig {
            shape: KvShape::heads(32, 8, 128, 2, 16),
            layout: Layout::Slab,
            granularity: self.backend.capabilities().granularity,
            chunk: ChunkChoice::Auto,
            capacity: Capacity::Budget(self.backend.memory().unwrap().total),
        };
        PoolConfig {
            runtime_dir: RuntimeDir::at(&self.dir),
            reserve: ReservePolicy::Fixed { min: 0, max: u32::MAX },
            decay: Duration::from_secs(3600),
            ..PoolConfig::new(PoolName::new(name).unwrap(), Arc::clone(&self.backend), geometry)
        }
    }

    fn pool(&self, name: &str) -> KvPool {
        KvPool::open(self.config(name)).unwrap()
    }

    fn free(&self) -> Bytes {
        self.backend.memory().unwrap().free
    }
}

fn blocks_of(pool: &KvPool, bytes: Bytes) -> u32 {
    let pages = u32::try_from(bytes.0 / pool.geometry().page_bytes().0).unwrap();
    pages * pool.geometry().blocks_per_page()
}

fn alloc(pool: &KvPool, count: u32) -> Vec<BlockLease> {
    let mut leases = Vec::new();
    pool.alloc(count, &mut leases).unwrap();
    leases
}

#[test]
fn the_driver_counts_what_the_pool_counts() {
    let Some(card) = Card::open("the_driver_counts_what_the_pool_counts") else { return };
    let before = card.free();
    let pool = card.pool("counted");
    let leases = alloc(&pool, blocks_of(&pool, Bytes::gib(2)));
    let held = pool.snapshot().mapped_bytes;
    assert!(held >= Bytes(Bytes::gib(2).0 - pool.geometry().page_bytes().0));
    assert_eq!(before.0 - card.free().0, held.0);
    pool.free(&leases, NO_WORK).unwrap();
    assert_eq!(pool.trim().unwrap(), held);
    assert_eq!(card.free(), before);
}

#[test]
fn steady_serving_makes_no_driver_call() {
    let Some(card) = Card::open("steady_serving_makes_no_driver_call") else { return };
    let pool = card.pool("steady");
    let warm = alloc(&pool, 200);
    pool.free(&warm, NO_WORK).unwrap();
    let calls = card.backend.meter().total();
    for _ in 0..10_000 {
        let leases = alloc(&pool, 16);
        pool.free(&leases, NO_WORK).unwrap();
    }
    assert_eq!(card.backend.meter().total(), calls);
}

#[test]
fn no_page_is_unmapped_before_its_step_is_over() {
    let Some(card) = Card::open("no_page_is_unmapped_before_its_step_is_over") else { return };
    let pool = card.pool("fenced");
    let leases = alloc(&pool, 20);
    let held = pool.snapshot().mapped_bytes;
    pool.free(&leases, Fence::Step(Step(7))).unwrap();
    assert_eq!(pool.trim().unwrap(), Bytes::ZERO, "step 7 may still read the pages");
    assert_eq!(pool.snapshot().mapped_bytes, held);
    pool.step_completed(Step(6));
    assert_eq!(pool.trim().unwrap(), Bytes::ZERO);
    pool.step_completed(Step(7));
    let deadline = Instant::now() + SOON;
    while pool.snapshot().mapped_bytes > Bytes::ZERO {
        assert!(Instant::now() < deadline, "the pages of step 7 were not given back");
        pool.trim().unwrap();
        std::thread::yield_now();
    }
}

/// One model leaves most of the card idle, another wants it: the rate at which memory changes hands.
#[test]
fn idle_memory_moves_to_a_starved_model_at_the_speed_of_the_driver() {
    let Some(card) = Card::open("idle_memory_moves_to_a_starved_model_at_the_speed_of_the_driver") else { return };
    let (rich, poor) = (card.pool("rich"), card.pool("poor"));
    let most = Bytes(card.free().0 / 10 * 8);
    let leases = alloc(&rich, blocks_of(&rich, most));
    rich.free(&leases, NO_WORK).unwrap();

    let wanted = Bytes(card.free().0 + most.0 / 2);
    let begun = Instant::now();
    let mut got = Vec::new();
    poor.alloc_within(blocks_of(&poor, wanted), SOON, &mut got).unwrap();
    let took = begun.elapsed();
    let moved = most.as_gib() / 2.0;
    let rate = moved / took.as_secs_f64();
    let _ = std::io::stderr().write_all(
        format!("MEASURED: {moved:.1} GiB reclaimed and mapped again in {took:?}: {rate:.0} GiB/s\n").as_bytes(),
    );
    // The promise is 100 GiB/s of giving back; this also maps, so a bound with slack.
    assert!(rate > 30.0, "{rate} GiB/s");
    assert!(rich.snapshot().counters.reclaims > 0);
}

#[test]
fn more_than_the_card_has_is_exhausted_and_nothing_is_lost() {
    let Some(card) = Card::open("more_than_the_card_has_is_exhausted_and_nothing_is_lost") else { return };
    let before = card.free();
    let pool = card.pool("greedy");
    let mut held = Vec::new();
    let refused = loop {
        match pool.alloc(blocks_of(&pool, Bytes::gib(4)), &mut held) {
            Ok(()) => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, PoolError::Exhausted { .. }) && refused.is_transient(), "{refused}");
    let snapshot = pool.snapshot();
    assert_eq!(snapshot.ledger_bytes, snapshot.mapped_bytes);
    assert_eq!(before.0 - card.free().0, snapshot.mapped_bytes.0);
    pool.free(&held, NO_WORK).unwrap();
    drop(pool);
    assert_eq!(card.free(), before);
}

/// The kernel drops a dead owner's lock at once, the driver takes its memory back a little later: until then it is
/// nobody's. A neighbour that waits gets it.
#[test]
fn memory_of_a_killed_process_comes_back() {
    const TEST: &str = "memory_of_a_killed_process_comes_back";
    const VICTIM: &str = "TIDEKV_TEST_VICTIM";
    if let Some(dir) = std::env::var_os(VICTIM) {
        return hold_most_of_the_card(&Card::at(TEST, Path::new(&dir)).unwrap());
    }
    let Some(card) = Card::open(TEST) else { return };
    let survivor = card.pool("survivor");
    let mut victim = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", TEST, "--nocapture"])
        .env(VICTIM, &card.dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(victim.stdout.as_mut().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().ends_with("holding")), "the victim ended early");
    let wanted = Bytes(card.backend.memory().unwrap().total.0 / 10 * 7);
    let mut leases = Vec::new();
    let refused = survivor.alloc(blocks_of(&survivor, wanted), &mut leases).unwrap_err();
    assert!(refused.is_transient(), "{refused}");

    victim.kill().unwrap();
    let begun = Instant::now();
    survivor.alloc_within(blocks_of(&survivor, wanted), SOON, &mut leases).unwrap();
    let took = begun.elapsed();
    victim.wait().unwrap();
    let _ = std::io::stderr()
        .write_all(format!("MEASURED: {:.0} GiB had {took:?} after the kill\n", wanted.as_gib()).as_bytes());
    // The promise is 1 s after the driver has it; a bound with slack for mapping it too.
    assert!(took < Duration::from_secs(4), "{took:?}");
}

fn hold_most_of_the_card(card: &Card) {
    let pool = card.pool("victim");
    let _leases = alloc(&pool, blocks_of(&pool, Bytes(card.free().0 / 10 * 6)));
    let mut stdout = std::io::stdout();
    writeln!(stdout, "holding").and_then(|()| stdout.flush()).unwrap();
    // Until it is killed; or its parent died, which closes the pipe.
    let _ = std::io::stdin().read(&mut [0; 1]);
}
