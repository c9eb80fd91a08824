//! Other processes on the same arena.
//!
//! ```text
//!   this process                      kvbench shm-peer
//!   start              ──────────>    attaches, says `ready`
//!   `go`               ──────────>    both allocate and free for the same quarter of a second
//!   reads its times    <──────────    one line: the nanoseconds of each chunk
//! ```
//!
//! A peer that cannot do its part says why on stderr and ends; that ends the benchmark. A peer whose standard input is
//! closed ends by itself, so none outlives this process.

use std::io::{self, BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::Args;
use tidekv_cli::exit::Outcome;
use tidekv_shm::RuntimeDir;
use tidekv_shm::arena::{Arena, ArenaName, LocalArena, Prefault};
use tidekv_shm::baseline::{Touch, arena_pairs};

use super::Plan;
use crate::output::print;
use crate::random::Random;
use crate::shm::chunks::Chunks;

/// How long all of them allocate and free.
const WINDOW: Duration = Duration::from_millis(250);
/// Chunks that are kept; a process that is done earlier goes on without being timed, so that the others have company.
const MAX_CHUNKS: usize = 20_000;

/// Arguments of the hidden `kvbench shm-peer`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  kvbench shm-alloc --procs 4   # starts them")]
pub struct PeerArgs {
    /// Runtime directory of the arena
    #[arg(long)]
    pub dir: PathBuf,

    /// Name of the arena
    #[arg(long)]
    pub arena: String,

    /// Smallest block
    #[arg(long)]
    pub min_kb: u32,

    /// Largest block
    #[arg(long)]
    pub max_kb: u32,

    /// Pairs in one chunk
    #[arg(long)]
    pub chunk: usize,

    /// Order of the sizes
    #[arg(long)]
    pub seed: u64,
}

/// A peer's whole life.
pub fn run(args: &PeerArgs) -> anyhow::Result<Outcome> {
    let arena = Arena::attach(&RuntimeDir::at(&args.dir), &ArenaName::new(&args.arena)?, Prefault::Now)?;
    let mut local = arena.local()?;
    let sizes = mixed(args);
    arena_pairs(&arena, &mut local, &sizes, Touch::Nothing)?;
    print("ready\n")?;
    let mut order = String::new();
    io::stdin().lock().read_line(&mut order)?;
    if order.trim() != "go" {
        // Whoever started us is gone.
        return Ok(Outcome::Done);
    }
    let mut chunks = Chunks::new(args.chunk, 0.0);
    hammer(&arena, &mut local, &sizes, &mut chunks)?;
    print(&(serde_json::to_string(chunks.samples().values_ns())? + "\n"))?;
    Ok(Outcome::Done)
}

fn mixed(args: &PeerArgs) -> Vec<usize> {
    let doubled = std::iter::successors(Some(args.min_kb.max(1)), |kb| kb.checked_mul(2));
    let sizes: Vec<usize> = doubled.take_while(|kb| *kb <= args.max_kb).map(super::bytes).collect();
    let mut mixed: Vec<usize> = sizes.into_iter().cycle().take(args.chunk).collect();
    Random::seeded(args.seed).shuffle(&mut mixed);
    mixed
}

/// Allocates and frees until the time is over.
pub(super) fn hammer(
    arena: &Arena,
    local: &mut LocalArena,
    sizes: &[usize],
    chunks: &mut Chunks,
) -> anyhow::Result<()> {
    let end = Instant::now() + WINDOW;
    while Instant::now() < end {
        if chunks.samples().len() < MAX_CHUNKS {
            chunks.time(|| arena_pairs(arena, local, sizes, Touch::Nothing))?;
        } else {
            arena_pairs(arena, local, sizes, Touch::Nothing)?;
        }
    }
    Ok(())
}

/// The peers of this process.
#[derive(Debug)]
pub(super) struct Peers(Vec<Peer>);

#[derive(Debug)]
struct Peer {
    child: Child,
    orders: Option<ChildStdin>,
    words: BufReader<ChildStdout>,
}

impl Peers {
    /// Starts all but one of the processes that were asked for; they are ready when this returns.
    pub(super) fn start(dir: &RuntimeDir, name: &ArenaName, plan: &Plan, chunk: usize) -> anyhow::Result<Self> {
        let program = tidekv_cli::program::named_path().context("this program cannot find itself")?;
        let mut peers = Self(Vec::new());
        for number in 1..plan.procs {
            let mut child = Command::new(&program)
                .arg("shm-peer")
                .arg("--dir")
                .arg(dir.path())
                .args(["--arena", name.as_str()])
                .args(["--min-kb", &plan.min_size_kb.to_string(), "--max-kb", &plan.max_size_kb.to_string()])
                .args(["--chunk", &chunk.to_string()])
                .args(["--seed", &plan.seed.wrapping_add(u64::from(number)).to_string()])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .context("a second process cannot be started")?;
            let (orders, words) = (child.stdin.take(), child.stdout.take().context("a peer has no output")?);
            peers.0.push(Peer { child, orders, words: BufReader::new(words) });
        }
        for peer in &mut peers.0 {
            ensure!(peer.line()?.trim() == "ready", "a peer of this benchmark failed to start");
        }
        Ok(peers)
    }

    pub(super) fn go(&mut self) -> anyhow::Result<()> {
        for peer in &mut self.0 {
            peer.orders.as_mut().context("a peer has no input")?.write_all(b"go\n").context("a peer ended early")?;
        }
        Ok(())
    }

    /// The times of each, once all are done.
    pub(super) fn finish(mut self) -> anyhow::Result<Vec<Vec<u64>>> {
        let mut all = Vec::new();
        for peer in &mut self.0 {
            let times: Vec<u64> = serde_json::from_str(&peer.line()?).context("a peer of this benchmark failed")?;
            let status = peer.child.wait()?;
            if !status.success() {
                bail!("a peer of this benchmark ended with {status}");
            }
            all.push(times);
        }
        Ok(all)
    }
}

impl Peer {
    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.words.read_line(&mut line).context("a peer cannot be heard")?;
        Ok(line)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Closed, its input tells it to end; it holds nothing that is worth a longer wait.
        drop(self.orders.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
