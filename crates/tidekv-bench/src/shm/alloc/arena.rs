//! Our side: pairs of alloc and free on an arena whose pages are there.

use anyhow::Context;
use tidekv_core::units::Bytes;
use tidekv_shm::RuntimeDir;
use tidekv_shm::arena::{Arena, ArenaConfig, ArenaName, LocalArena, Prefault};
use tidekv_shm::baseline::{Touch, arena_pairs};

use super::peer::{self, Peers};
use super::{Plan, TOUCHED_KB, bytes};
use crate::progress::Progress;
use crate::shm::chunks::{Chunks, chunk_len, clock_ns};
use crate::shm::tidy_up::{Named, Undisturbed};

/// Chunks of each measurement.
const CHUNKS: usize = 201;
/// Touching a megabyte takes microseconds: fewer chunks of fewer operations do.
const TOUCHED_CHUNKS: usize = 41;
const TOUCHED_PAIRS: usize = 50;

/// Of the arena: a segment has at least this many bytes, and there are at most this many.
const MIN_SEGMENT: usize = 64 << 20;
const SEGMENTS: u64 = 4;

/// Times of the arena.
#[derive(Debug)]
pub(super) struct ArenaTimes {
    pub(super) mixed: Chunks,
    pub(super) by_size: Vec<(u32, Chunks)>,
    pub(super) touched: Vec<(u32, Chunks)>,
    pub(super) paged: Vec<(u32, Chunks)>,
    /// Of each process, this one first; empty for one process.
    pub(super) processes: Vec<Chunks>,
}

pub(super) fn measure(plan: &Plan, progress: &Progress) -> anyhow::Result<ArenaTimes> {
    let stage = Stage::new(plan)?;
    let (clock, len) = (clock_ns(), chunk_len(plan.num_iterations as usize));
    let mut local = stage.arena.local().context("the arena has no cache for this thread")?;
    progress.now("arena");
    let mixed = stage.chunks(&mut local, &plan.mixed_bytes(len), Touch::Nothing, CHUNKS, clock)?;
    let mut by_size = Vec::new();
    for kb in plan.sizes_kb() {
        by_size.push((kb, stage.chunks(&mut local, &vec![bytes(kb); len], Touch::Nothing, CHUNKS, clock)?));
    }
    progress.step();
    progress.now("arena, touched");
    let (mut touched, mut paged) = (Vec::new(), Vec::new());
    for kb in TOUCHED_KB {
        let sizes = vec![bytes(kb); len.min(TOUCHED_PAIRS)];
        touched.push((kb, stage.chunks(&mut local, &sizes, Touch::Bytes, TOUCHED_CHUNKS, clock)?));
        paged.push((kb, stage.chunks(&mut local, &sizes, Touch::Pages, TOUCHED_CHUNKS, clock)?));
    }
    progress.step();
    progress.now(format!("{} processes", plan.procs));
    let processes = if plan.procs > 1 { stage.processes(plan, &mut local, clock)? } else { Vec::new() };
    Ok(ArenaTimes { mixed, by_size, touched, paged, processes })
}

/// An arena of this run. It is unlinked when this is dropped, and by an interrupt.
struct Stage {
    arena: Arena,
    dir: RuntimeDir,
    name: ArenaName,
    _note: Named,
}

impl Stage {
    fn new(plan: &Plan) -> anyhow::Result<Self> {
        let segment = bytes(plan.max_size_kb.max(TOUCHED_KB[1])).next_power_of_two().max(MIN_SEGMENT) as u64;
        let config = ArenaConfig {
            segment: Bytes(segment),
            initial: Bytes(segment),
            limit: Bytes(SEGMENTS * segment),
            huge_pages: plan.hugepages.of_arena(),
            ..ArenaConfig::default()
        };
        let dir = RuntimeDir::from_env();
        let name = ArenaName::new(&format!("bench-{}", std::process::id()))?;
        let undisturbed = Undisturbed::begin();
        let arena = Arena::create(&dir, &name, &config, Prefault::Now).context("the arena cannot be made")?;
        let note = undisturbed.note(arena.path());
        plan.hugepages.warn_unless_granted(&arena);
        Ok(Self { arena, dir, name, _note: note })
    }

    fn chunks(
        &self,
        local: &mut LocalArena,
        sizes: &[usize],
        touch: Touch,
        count: usize,
        clock: f64,
    ) -> anyhow::Result<Chunks> {
        let mut chunks = Chunks::new(sizes.len(), clock);
        // One chunk unmeasured: first blocks of a size fetch a span.
        arena_pairs(&self.arena, local, sizes, touch)?;
        for _ in 0..count {
            chunks.time(|| arena_pairs(&self.arena, local, sizes, touch))?;
        }
        Ok(chunks)
    }

    /// This process and its peers, all at once.
    fn processes(&self, plan: &Plan, local: &mut LocalArena, clock: f64) -> anyhow::Result<Vec<Chunks>> {
        let len = chunk_len(plan.num_iterations as usize);
        let mut peers = Peers::start(&self.dir, &self.name, plan, len)?;
        let sizes = plan.mixed_bytes(len);
        peers.go()?;
        let mut mine = Chunks::new(len, clock);
        peer::hammer(&self.arena, local, &sizes, &mut mine)?;
        let mut all = vec![mine];
        for times in peers.finish()? {
            let mut chunks = Chunks::new(len, clock);
            times.into_iter().for_each(|ns| chunks.push(ns));
            all.push(chunks);
        }
        Ok(all)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // A name that will not go is found by `kvctl gc`.
        let _ = Arena::unlink(&self.dir, &self.name);
    }
}
