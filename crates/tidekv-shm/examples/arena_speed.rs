//! How fast is the arena? Medians of chunks, for people who change it; `kvbench shm-alloc` and `shm-lookup` are the
//! benchmarks with baselines.
//!
//! `cargo run --release -p tidekv-shm --example arena_speed`

use std::hint::black_box;
use std::io::Write;
use std::time::{Duration, Instant};

use tidekv_core::units::Bytes;
use tidekv_shm::RuntimeDir;
use tidekv_shm::arena::{Arena, ArenaConfig, ArenaName, Handle, Prefault};

const CHUNK: usize = 1000;
const CHUNKS: usize = 2000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let dir = RuntimeDir::at(format!("/dev/shm/kvcached-arena-speed-{}", std::process::id()));
    let result = run(&dir);
    let _ = std::fs::remove_dir_all(dir.path());
    result
}

fn run(dir: &RuntimeDir) -> Result<(), Box<dyn std::error::Error>> {
    if std::env::args().nth(1).as_deref() == Some("child") {
        return child();
    }
    let mut out = std::io::stdout();
    pairs(dir, &mut out)?;
    two_processes(dir, &mut out)?;
    foreign(dir, &mut out)?;
    lookups(dir, &mut out)?;
    recovery(dir, &mut out)?;
    Ok(())
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

/// Nanoseconds for one operation, in the median chunk.
fn chunks(mut operation: impl FnMut()) -> f64 {
    let chunk = |_| {
        let start = Instant::now();
        (0..CHUNK).for_each(|_| operation());
        start.elapsed().as_secs_f64() * 1e9 / CHUNK as f64
    };
    median((0..CHUNKS).map(chunk).collect())
}

fn name(text: &str) -> ArenaName {
    ArenaName::new(text).expect("a good name")
}

fn pairs(dir: &RuntimeDir, out: &mut impl Write) -> Result<(), Box<dyn std::error::Error>> {
    let arena = Arena::create(dir, &name("pairs"), &ArenaConfig::default(), Prefault::Now)?;
    let mut local = arena.local()?;
    for kib in [4, 64, 1024] {
        let ns = chunks(|| {
            let handle = local.alloc(kib << 10).expect("room");
            local.free(black_box(handle)).expect("held");
        });
        writeln!(out, "alloc+free of {kib} KiB: {ns:.1} ns")?;
    }
    let mut held: Vec<Handle> = (0..400).map(|_| local.alloc(16 << 10).expect("room")).collect();
    let (mut at, mut step) = (0, 0);
    let ns = chunks(|| {
        step = (step * 5 + 7) % 397;
        at = (at + step) % held.len();
        local.free(held[at]).expect("held");
        held[at] = local.alloc(4096 << (step & 3)).expect("room");
    });
    writeln!(out, "free+alloc among 400 blocks of 4 to 32 KiB: {ns:.1} ns")?;
    drop(local);
    Arena::unlink(dir, &name("pairs"))?;
    Ok(())
}

/// Nanoseconds a pair in the median chunk of `time`.
fn hammer(arena: &Arena, time: Duration) -> f64 {
    let mut local = arena.local().expect("a cache");
    let start = Instant::now();
    let mut samples = Vec::new();
    while start.elapsed() < time {
        let chunk = Instant::now();
        for _ in 0..CHUNK {
            let handle = local.alloc(64 << 10).expect("room");
            local.free(black_box(handle)).expect("held");
        }
        samples.push(chunk.elapsed().as_secs_f64() * 1e9 / CHUNK as f64);
    }
    median(samples)
}

fn child() -> Result<(), Box<dyn std::error::Error>> {
    let dir = RuntimeDir::at(std::env::args().nth(2).unwrap_or_default());
    let arena = Arena::attach(&dir, &name("both"), Prefault::Now)?;
    writeln!(std::io::stdout(), "  the other one: {:.1} ns", hammer(&arena, Duration::from_millis(500)))?;
    Ok(())
}

fn two_processes(dir: &RuntimeDir, out: &mut impl Write) -> Result<(), Box<dyn std::error::Error>> {
    let arena = Arena::create(dir, &name("both"), &ArenaConfig::default(), Prefault::Now)?;
    let mut other = std::process::Command::new(std::env::current_exe()?).arg("child").arg(dir.path()).spawn()?;
    let ns = hammer(&arena, Duration::from_millis(500));
    writeln!(out, "two processes, 64 KiB: {ns:.1} ns a pair")?;
    other.wait()?;
    Arena::unlink(dir, &name("both"))?;
    Ok(())
}

fn foreign(dir: &RuntimeDir, out: &mut impl Write) -> Result<(), Box<dyn std::error::Error>> {
    let arena = Arena::create(dir, &name("foreign"), &ArenaConfig::default(), Prefault::Now)?;
    let (mut ours, mut theirs) = (arena.local()?, arena.local()?);
    let ns = chunks(|| {
        let handle = ours.alloc(16 << 10).expect("room");
        theirs.free(black_box(handle)).expect("held");
    });
    writeln!(out, "alloc here, free in another's cache (one thread): {ns:.1} ns a pair")?;
    let handle = ours.alloc(4096)?;
    ours.share(handle)?;
    let ns = chunks(|| {
        theirs.retain(handle).expect("shared");
        theirs.release(handle).expect("held");
    });
    writeln!(out, "retain+release, held already: {ns:.1} ns")?;
    drop((ours, theirs));
    Arena::unlink(dir, &name("foreign"))?;
    Ok(())
}

fn lookups(dir: &RuntimeDir, out: &mut impl Write) -> Result<(), Box<dyn std::error::Error>> {
    for segments in [10_usize, 100, 1000, 10_000] {
        let bytes = Bytes::kib(segments as u64 * 256);
        let config = ArenaConfig { segment: Bytes::kib(256), limit: bytes, initial: bytes, ..ArenaConfig::default() };
        let arena = Arena::create(dir, &name("lookup"), &config, Prefault::Off)?;
        let mut local = arena.local()?;
        let blocks = 10_000;
        let mut all: Vec<Handle> = (0..segments * 60).map_while(|_| local.alloc(4096).ok()).collect();
        let mut seed = 12_345_u64;
        let mut random = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            usize::try_from(seed >> 33).unwrap_or(0)
        };
        for at in (1..all.len()).rev() {
            all.swap(at, random() % (at + 1));
        }
        let handles: Vec<Handle> = (0..blocks).map(|at| all[at % all.len()]).collect();
        let mut at = 0;
        let independent = chunks(|| {
            black_box(arena.address(handles[at]).expect("held"));
            at = if at + 1 == handles.len() { 0 } else { at + 1 };
        });
        let mut next = 0_usize;
        let dependent = chunks(|| {
            let address = arena.address(handles[next]).expect("held").as_ptr() as usize;
            next = if next + 1 + (address & 1) >= handles.len() { 0 } else { next + 1 + (address & 1) };
        });
        black_box(next);
        writeln!(out, "lookup in {segments} segments: {independent:.2} ns independent, {dependent:.2} ns dependent")?;
        drop(local);
        drop(arena);
        Arena::unlink(dir, &name("lookup"))?;
    }
    Ok(())
}

fn recovery(dir: &RuntimeDir, out: &mut impl Write) -> Result<(), Box<dyn std::error::Error>> {
    let bytes = Bytes::gib(4);
    let config = ArenaConfig { segment: Bytes::mib(256), limit: bytes, initial: bytes, ..ArenaConfig::default() };
    let survivor = Arena::create(dir, &name("dead"), &config, Prefault::Off)?;
    let mut samples = Vec::new();
    let mut count = 0;
    for _ in 0..9 {
        let other = Arena::attach(dir, &name("dead"), Prefault::Off)?;
        let mut local = other.local()?;
        count = (0..1_000_000).map_while(|_| local.alloc(4096).ok()).count();
        drop(local);
        let start = Instant::now();
        drop(other);
        samples.push(start.elapsed().as_secs_f64() * 1e3);
    }
    samples.sort_by(f64::total_cmp);
    writeln!(out, "leaving with {count} blocks: {:.2} ms, at best {:.2} ms", samples[4], samples[0])?;
    drop(survivor);
    Arena::unlink(dir, &name("dead"))?;
    Ok(())
}
