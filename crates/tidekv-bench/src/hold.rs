//! `kvbench hold`: something alive to look at, with kvctl and with everything else that watches pools.
//!
//! ```text
//!   constant   bytes ┤▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔
//!   sawtooth   bytes ┤  ▁▂▃▄▅▆▇█  ▁▂▃▄▅▆▇█      a period of eight steps, each a second
//! ```
//!
//! It is an ordinary pool in the ordinary runtime directory, under the name given, with `KVCACHED_*` as everywhere. It
//! gives memory back when it is asked to and takes it again when there is some. After `--for`, SIGTERM or Ctrl-C it ends
//! and leaves nothing behind, however often it is told. After SIGKILL its memory is gone and its segment stays, without an
//! owner, until `kvctl gc` or the next pool takes it away.

use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::{Args, ValueEnum};
use jiff::SignedDuration;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use tidekv_core::units::Bytes;
use tidekv_mem::BackendName;
use tidekv_pool::{KvPool, PoolConfig, Share};
use tidekv_shm::PoolName;

use crate::crew::holding::{Grower, Holding};
use crate::lab::small_pages;
use crate::output::print;
use tidekv_cli::exit::Outcome;

/// Steps of one tooth, and how long each of them lasts.
const TOOTH_STEPS: u32 = 8;
const STEP: Duration = Duration::from_secs(1);

const BLOCKS_PER_PAGE: u32 = 16;

/// Arguments of `kvbench hold`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct HoldArgs {
    /// Name of the pool
    #[arg(long, value_name = "NAME")]
    pub name: String,

    /// Memory to hold, at most
    #[arg(long, value_name = "SIZE")]
    pub bytes: Bytes,

    /// How much of it is held when
    #[arg(long, value_enum, default_value_t = HoldPattern::Constant)]
    pub pattern: HoldPattern,

    /// When to end
    #[arg(long = "for", value_name = "DURATION", default_value = "1h")]
    pub length: SignedDuration,

    /// Bytes of one page
    #[arg(long, value_name = "SIZE", default_value = "2M")]
    pub page_size: Bytes,

    /// Weight of the pool's share
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub weight: u32,

    /// Memory that is the pool's whenever it wants it
    #[arg(long, value_name = "SIZE", default_value = "0")]
    pub floor: Bytes,

    /// Memory behind the pool: host, cuda, fake, or auto (cuda where there is a GPU)
    #[arg(long, value_name = "NAME", default_value_t = BackendName::Auto)]
    pub backend: BackendName,

    /// CUDA device number
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub device: u32,

    /// Say nothing
    #[arg(long, short)]
    pub quiet: bool,
}

const EXAMPLES: &str = "\
Examples:
  kvbench hold --name kvcached_demo --bytes 1G --for 5m &
  kvctl list
  kvbench hold --name kvcached_tide --bytes 512M --pattern sawtooth --backend host
  KVCACHED_RUNTIME_DIR=/tmp/pools kvbench hold --name a --bytes 64M --weight 2";

/// How much is held when.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HoldPattern {
    /// All of it, always
    Constant,
    /// More and more in eight steps, then little again
    Sawtooth,
}

impl HoldPattern {
    /// Blocks to hold at the n-th step, out of `all`.
    fn blocks(self, step: u32, all: u32) -> u32 {
        match self {
            Self::Constant => all,
            Self::Sawtooth => {
                let eighths = u64::from(step % TOOTH_STEPS + 1);
                u32::try_from(u64::from(all) * eighths / u64::from(TOOTH_STEPS)).unwrap_or(all)
            }
        }
    }
}

/// What the loop waits for.
enum Event {
    /// A neighbour wants memory.
    AskedBack,
    /// A signal says that the time is over.
    Signal(i32),
}

/// Holds memory until the time is over.
pub fn run(args: &HoldArgs) -> anyhow::Result<Outcome> {
    let (sender, events) = mpsc::channel();
    // Before there is a pool to leave behind.
    send_signals(sender.clone()).context("signals cannot be caught")?;
    if let Some(signal) = hold(args, sender, &events)? {
        // Whoever waits for this process sees what ended it.
        emulate_default_handler(signal)?;
    }
    Ok(Outcome::Done)
}

/// Signals become events. Those that come while the pool is being closed change nothing.
fn send_signals(events: Sender<Event>) -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for signal in signals.forever() {
            if events.send(Event::Signal(signal)).is_err() {
                return;
            }
        }
    })?;
    Ok(())
}

/// Says which signal ended it, if one did. By then the pool is closed.
fn hold(args: &HoldArgs, sender: Sender<Event>, events: &Receiver<Event>) -> anyhow::Result<Option<i32>> {
    let pool = open(args)?;
    pool.on_reclaim(move |_| {
        // Nobody listens any more once the time is over.
        let _ = sender.send(Event::AskedBack);
    });
    let all = pool.geometry().block_count();
    if !args.quiet {
        let (pid, name) = (std::process::id(), &args.name);
        print(&format!("pool {name} of process {pid} holds up to {} for {:#}\n", args.bytes, args.length))?;
    }
    let holding = Holding::new(pool);
    let grower = Grower::start(&holding, |_| {})?;
    let end = Instant::now() + Duration::try_from(args.length).context("--for is below zero")?;
    let mut step = 0;
    let mut next_step = Instant::now();
    let mut ended_by = None;
    while ended_by.is_none() && Instant::now() < end {
        if Instant::now() >= next_step {
            holding.want(args.pattern.blocks(step, all), &[])?;
            step = step.wrapping_add(1);
            next_step += STEP;
        }
        let left = end.min(next_step).saturating_duration_since(Instant::now());
        match events.recv_timeout(left) {
            Ok(Event::Signal(signal)) => ended_by = Some(signal),
            Ok(Event::AskedBack) | Err(RecvTimeoutError::Timeout) => holding.obey()?,
            Err(RecvTimeoutError::Disconnected) => break,
        }
        if let Some(reason) = holding.failure() {
            anyhow::bail!(reason);
        }
    }
    drop(grower);
    Ok(ended_by)
}

fn open(args: &HoldArgs) -> anyhow::Result<KvPool> {
    ensure!(args.page_size > Bytes::ZERO, "--page-size is 0");
    ensure!(args.weight > 0, "--weight is 0: give at least 1");
    ensure!(args.bytes >= args.page_size, "--bytes is {}: give at least one page of {}", args.bytes, args.page_size);
    let pages = u32::try_from(args.bytes.0.div_ceil(args.page_size.0)).context("--bytes is too many pages")?;
    let backend = tidekv_mem::open(args.backend, args.device)?;
    let geometry = small_pages(&*backend, args.page_size, BLOCKS_PER_PAGE, pages)?;
    let mut config = PoolConfig::new(PoolName::new(&args.name)?, backend, geometry).with_env()?;
    config.name = PoolName::new(&args.name)?;
    config.share = Share { floor: args.floor, weight: args.weight, ..config.share };
    Ok(KvPool::open(config)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tooth_rises_in_eight_steps_and_falls_at_once() {
        let blocks: Vec<u32> = (0..9).map(|step| HoldPattern::Sawtooth.blocks(step, 80)).collect();
        assert_eq!(blocks, [10, 20, 30, 40, 50, 60, 70, 80, 10]);
        assert_eq!(HoldPattern::Constant.blocks(5, 80), 80);
    }
}
