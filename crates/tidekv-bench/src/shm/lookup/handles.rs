//! Our side: handles of an arena with that many segments.
//!
//! Segments of an arena are memory, so these are small ones, filled with blocks of 64 KiB. Every block carries its
//! number, and a lookup is right if it leads to the block of that number.
//!
//! Few and many segments are measured in turns, pass by pass: what disturbs the machine for a while disturbs both. They
//! hold the same number of blocks, as a workload has as many requests in few segments as in many: what grows is the number
//! of segments, and not how much of the blocks' words fits into the caches.

use std::fs;
use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use tidekv_core::units::Bytes;
use tidekv_shm::RuntimeDir;
use tidekv_shm::arena::{Arena, ArenaConfig, ArenaName, Handle, LocalArena, Prefault};
use tidekv_shm::baseline;

use super::Plan;
use crate::random::Random;
use crate::shm::chunks::{Chunks, chunk_len, clock_ns};
use crate::shm::tidy_up::{Named, Undisturbed};

const BLOCK: usize = 64 << 10;
/// As many as the arena's smallest segment holds.
const BLOCKS_PER_SEGMENT: u32 = 4;
/// The two ends of the growth that is promised to be small, and the blocks that both hold.
const FEW: u32 = 10;
const MANY: u32 = 10_000;
const GROWTH_BLOCKS: u32 = MANY * BLOCKS_PER_SEGMENT;

const TIME: Duration = Duration::from_millis(100);
const MAX_PASSES: usize = 200;

/// Times of lookups in one arena.
#[derive(Debug)]
pub(super) struct HandleTimes {
    pub(super) segments: u32,
    pub(super) independent: Chunks,
    pub(super) dependent: Chunks,
    pub(super) found: u64,
    pub(super) wrong: u64,
}

/// Few segments against many.
#[derive(Debug)]
pub(super) struct Growth {
    pub(super) few: HandleTimes,
    /// Where there is memory for them; else the reason why they were not measured.
    pub(super) many: Result<HandleTimes, String>,
}

impl Growth {
    pub(super) fn wrong(&self) -> u64 {
        self.few.wrong + self.many.as_ref().map_or(0, |many| many.wrong)
    }

    pub(super) fn factor(&self) -> Option<f64> {
        let (few, many) = (self.few.independent.figure()?, self.many.as_ref().ok()?.independent.figure()?);
        Some(many.p50_ns / few.p50_ns)
    }
}

pub(super) fn growth(plan: &Plan) -> anyhow::Result<Growth> {
    let needed = 2 * u64::from(GROWTH_BLOCKS) * BLOCK as u64;
    let room = available_bytes().unwrap_or(u64::MAX).min(baseline::free_bytes()?);
    // A benchmark that pushes other people's memory out measures that.
    if room < 2 * needed {
        let reason = format!("{} MiB are free and twice {} are wanted", room >> 20, needed >> 20);
        return Ok(Growth { few: measure(plan, FEW)?, many: Err(reason) });
    }
    let mut few = Measurement::new(plan, Scene::new(plan, FEW, GROWTH_BLOCKS.div_ceil(FEW).next_power_of_two())?);
    let mut many = Measurement::new(plan, Scene::new(plan, MANY, BLOCKS_PER_SEGMENT)?);
    run(&mut [&mut few, &mut many]);
    Ok(Growth { few: few.times, many: Ok(many.times) })
}

/// What the kernel thinks can be had without swapping.
fn available_bytes() -> Option<u64> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

pub(super) fn measure(plan: &Plan, segments: u32) -> anyhow::Result<HandleTimes> {
    let mut one = Measurement::new(plan, Scene::new(plan, segments, BLOCKS_PER_SEGMENT)?);
    run(&mut [&mut one]);
    Ok(one.times)
}

/// Passes in turns, for as long as each has its time.
fn run(all: &mut [&mut Measurement]) {
    let started = Instant::now();
    let time = TIME * u32::try_from(all.len()).unwrap_or(1);
    for _ in 0..MAX_PASSES {
        all.iter_mut().for_each(|one| one.pass());
        if started.elapsed() > time {
            break;
        }
    }
}

/// An arena, what is looked for in it, and how long that took.
struct Measurement {
    scene: Scene,
    requests: Vec<Handle>,
    expected: Vec<usize>,
    times: HandleTimes,
}

impl Measurement {
    fn new(plan: &Plan, scene: Scene) -> Self {
        let mut random = Random::seeded(plan.seed);
        let numbers: Vec<usize> = (0..plan.num_lookups).map(|_| random.below(scene.handles.len())).collect();
        let requests: Vec<Handle> = numbers.iter().map(|&number| scene.handles[number]).collect();
        let wrong = numbers.iter().filter(|&&number| !scene.leads_to(number)).count() as u64;
        let found = requests.iter().filter(|handle| scene.arena.address(**handle).is_ok()).count() as u64;
        let expected =
            requests.iter().map(|handle| scene.arena.block(*handle).map_or(0, |b| b.as_ptr().addr())).collect();
        let (len, clock) = (chunk_len(requests.len()), clock_ns());
        let (independent, dependent) = (Chunks::new(len, clock), Chunks::new(len, clock));
        let times = HandleTimes { segments: scene.segments, independent, dependent, found, wrong };
        Self { scene, requests, expected, times }
    }

    fn pass(&mut self) {
        let Self { scene, requests, expected, times } = self;
        let len = chunk_len(requests.len());
        for (chunk, expected) in requests.chunks_exact(len).zip(expected.chunks_exact(len)) {
            let right = expected.iter().fold(0usize, |sum, address| sum.wrapping_add(*address));
            let sum = times.independent.time(|| independent(&scene.arena, chunk));
            times.wrong += u64::from(sum != right);
            let sum = times.dependent.time(|| dependent(&scene.arena, chunk));
            times.wrong += u64::from(sum != right);
        }
    }
}

fn address(arena: &Arena, handle: Handle) -> usize {
    // A refusal is no address; the sum will tell.
    arena.address(handle).map_or(0, |found| found.as_ptr().addr())
}

fn independent(arena: &Arena, handles: &[Handle]) -> usize {
    handles.iter().fold(0usize, |sum, handle| sum.wrapping_add(address(arena, *handle)))
}

/// Which handle comes next depends on the address before: its highest bit is 0, which the compiler does not know.
fn dependent(arena: &Arena, handles: &[Handle]) -> usize {
    let (mut at, mut sum) = (0, 0usize);
    while let Some(handle) = handles.get(at) {
        let found = address(arena, *handle);
        sum = sum.wrapping_add(found);
        at += 1 + (black_box(found) >> (usize::BITS - 1));
    }
    sum
}

/// An arena full of numbered blocks.
struct Scene {
    arena: Arena,
    dir: RuntimeDir,
    name: ArenaName,
    segments: u32,
    handles: Vec<Handle>,
    _local: LocalArena,
    _note: Named,
}

impl Scene {
    fn new(plan: &Plan, segments: u32, blocks_per_segment: u32) -> anyhow::Result<Self> {
        let segment = u64::from(blocks_per_segment) * BLOCK as u64;
        let all = Bytes(u64::from(segments) * segment);
        let config = ArenaConfig {
            segment: Bytes(segment),
            initial: all,
            limit: all,
            huge_pages: plan.hugepages.of_arena(),
            ..ArenaConfig::default()
        };
        let dir = RuntimeDir::from_env();
        let name = ArenaName::new(&format!("bench-{}-{segments}", std::process::id()))?;
        let undisturbed = Undisturbed::begin();
        let arena = Arena::create(&dir, &name, &config, Prefault::Off)
            .with_context(|| format!("an arena of {segments} segments ({all}) cannot be made"))?;
        let note = undisturbed.note(arena.path());
        plan.hugepages.warn_unless_granted(&arena);
        let mut local = arena.local()?;
        let mut handles = Vec::new();
        while let Ok(handle) = local.alloc(BLOCK) {
            let number = handles.len() as u64;
            arena.block(handle)?.copy_in(0, &number.to_le_bytes())?;
            handles.push(handle);
        }
        // Segments are powers of two, so few large ones hold a little more than many small ones.
        handles.truncate(GROWTH_BLOCKS as usize);
        let mut seen: Vec<u32> = handles.iter().map(|handle| handle.segment()).collect();
        seen.sort_unstable();
        seen.dedup();
        ensure!(seen.len() == segments as usize, "only {} of {segments} segments have blocks", seen.len());
        Ok(Self { arena, dir, name, segments, handles, _local: local, _note: note })
    }

    /// Whether handle and address lead to the block of this number.
    fn leads_to(&self, number: usize) -> bool {
        let handle = self.handles[number];
        let mut stamp = [0; 8];
        let Ok(block) = self.arena.block(handle) else { return false };
        let read = block.copy_out(0, &mut stamp).is_ok() && u64::from_le_bytes(stamp) == number as u64;
        read && self.arena.address(handle).is_ok_and(|found| found.as_ptr() == block.as_ptr())
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        // A name that will not go is found by `kvctl gc`.
        let _ = Arena::unlink(&self.dir, &self.name);
    }
}
