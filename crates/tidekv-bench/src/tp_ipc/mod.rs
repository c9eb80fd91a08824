//! `kvbench tp-ipc`: how long does a scheduler take to map and to unmap pages on all of its workers, and how much of
//! that is the message?
//!
//! ```text
//!   scheduler (this process)  ── map {pages} ──>  worker 0 ── ledger, Reservation ── device 0
//!      Broadcaster, strategy  ── map {pages} ──>  worker 1 ── ledger, Reservation ── device 1      real processes
//!                             <── done, done ──
//!                             ── unmap ... ──>                                                      one iteration
//!
//!   floor:  the bare echo that the strategy is built on, between the same processes, of messages of the same size
//! ```
//!
//! Strategy and floor take turns in short blocks (floor, strategy, strategy, floor, ...), so that whatever slows the
//! machine for a while slows both. First back to back, which is what a loaded scheduler sees, then at a cadence, which
//! is what a decoding one sees: its workers have gone to sleep in between. Of the message alone (`--noop`) a long run is
//! made of up to 40 batches with new workers, because some sets of workers answer faster than others.
//!
//! | figure of `summary`                     | meaning                                                            |
//! |-----------------------------------------|--------------------------------------------------------------------|
//! | `impl`                                  | the strategy                                                       |
//! | `map_us.{p50,p99}`, `unmap_us.{p50,p99}`| one broadcast, until the last worker has answered                  |
//! | `floor_us.{p50,p99}`                    | one bare echo by all workers                                       |
//! | `ratio_to_floor`                        | the slower of the two medians / the floor's; with `--noop` the price of the protocol |
//! | `cadence.*`                             | the same with one broadcast every `cadence.period_ms`              |
//! | `impls.<name>.*`                        | all of these for each strategy, with `--all-impls`                 |
//!
//! | file        | it                                                                     |
//! |-------------|------------------------------------------------------------------------|
//! | `worker`    | the process of one rank: the pool's own worker                         |
//! | `scheduler` | the two orders of an iteration, and a broadcaster to send them with    |
//! | `echo`      | the worker's other half: bare echoes over a socket and over a futex    |
//! | `floor`     | the scheduler's half of those echoes, one for each way of broadcasting |
//! | `batch`     | parts of a run with workers of their own, and why                      |
//! | `measure`   | blocks that take turns                                                 |
//! | `report`    | the table                                                              |

mod batch;
mod echo;
mod floor;
mod measure;
mod report;
mod scheduler;
mod worker;

use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Args;
use jiff::SignedDuration;
use serde::Serialize;
use tidekv_ipc::broadcast::{STRATEGIES, StrategyEntry, strategy};
use tidekv_ipc::message::PAGES_MAX;

use crate::host::HostInfo;
use crate::output::{OutputArgs, warn};
use crate::ranks::cache::{CacheArgs, CacheFacts, CacheSpec};
use crate::ranks::devices::{DeviceMap, DeviceMode};
use crate::result::BenchResult;
use tidekv_cli::exit::Outcome;

pub use worker::{TpWorkerArgs, run as run_worker};

const DEFAULT_ITERS: u32 = 20;
const QUICK_ITERS: u32 = 10;
const MAX_ITERS: u32 = 1_000_000;
const MAX_TP: u32 = 64;
const MAX_CADENCE: Duration = Duration::from_secs(1);

/// Arguments of `kvbench tp-ipc`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct TpIpcArgs {
    /// Tensor-parallel workers, a process each
    #[arg(long, value_name = "N")]
    pub tp_size: u32,

    /// Pages mapped and unmapped again in each iteration
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub pages_per_iter: u32,

    /// Iterations [default: 20, with --quick 10]
    #[arg(long, value_name = "N")]
    pub iters: Option<u32>,

    /// Broadcast strategy: seq, thread, async, ring, or one of your own (docs/adding-a-strategy.md)
    #[arg(long, value_name = "NAME", default_value = "seq")]
    pub map_impl: String,

    /// Every strategy there is, one after the other
    #[arg(long, conflicts_with = "map_impl")]
    pub all_impls: bool,

    /// Where the workers map
    #[arg(long, value_enum, value_name = "MODE", default_value_t = DeviceMode::PerRank)]
    pub device_map: DeviceMode,

    /// First page id
    #[arg(long, value_name = "ID", default_value_t = 50)]
    pub base_page: u32,

    /// The messages alone: workers answer without mapping anything. They are replaced after every 100 iterations, in long
    /// runs 39 times, because some sets of workers answer faster than others
    #[arg(long)]
    pub noop: bool,

    /// kvcached's async_sched, an engine that schedules ahead of its device: unmap orders name no finished step, so every
    /// worker waits for all work of its device before it unmaps
    #[arg(long)]
    pub async_sched: bool,

    /// Measure once more with one broadcast in each period of this length, 0s to leave that out
    #[arg(long, value_name = "DURATION", default_value = "1ms")]
    pub cadence: SignedDuration,

    /// Print every iteration
    #[arg(long, short)]
    pub verbose: bool,

    /// The cache.
    #[command(flatten)]
    pub cache: CacheArgs,

    /// Where the result goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

const EXAMPLES: &str = "\
Examples:
  kvbench tp-ipc --tp-size 4 --pages-per-iter 1 --iters 20 --map-impl async    # 4 workers on GPU 0 to 3
  kvbench tp-ipc --tp-size 4 --all-impls --noop --iters 2000    # what each strategy costs beside its bare echo
  kvbench tp-ipc --tp-size 4 --device-map same --layout per-layer
  kvbench tp-ipc --tp-size 2 --backend host --quick -v

Page ids are base-page to base-page + pages-per-iter - 1, below memory / layers / 2 / page size.
KVCACHED_IPC_TIMEOUT (60 seconds) bounds every broadcast.";

/// Measures, prints and keeps the result.
pub fn run(args: &TpIpcArgs) -> anyhow::Result<Outcome> {
    let (plan, facts) = Plan::of(args)?;
    let output = args.output.open()?;
    if let Some(warning) = plan.map.device_warning.as_ref().filter(|_| !args.output.quiet) {
        warn(warning);
    }
    let mut result = BenchResult::new("tp-ipc", &plan, HostInfo::with_backend(&facts.capabilities))?;
    let program = tidekv_cli::program::named_path().context("finding kvbench itself, to start its workers")?;
    let progress = output.progress(measure::steps(&plan));
    let measured = measure::measure(&plan, &program, &progress)?;
    drop(progress);
    report::fill(&mut result, &plan, &measured);
    output.emit(&result, &report::text(&plan, &facts, &measured, args.verbose))?;
    Ok(Outcome::Done)
}

/// The validated arguments: what is measured, and what `args` of the result says.
#[derive(Clone, Debug, Serialize)]
struct Plan {
    tp_size: u32,
    pages_per_iter: u32,
    iters: u32,
    /// Parts that the iterations are measured in, each with new workers.
    batches: u32,
    impls: Vec<&'static str>,
    #[serde(skip)]
    strategies: Vec<&'static StrategyEntry>,
    all_impls: bool,
    device_map: DeviceMode,
    base_page: u32,
    noop: bool,
    async_sched: bool,
    /// Between the beginnings of two broadcasts; `None` for back to back alone.
    cadence_ns: Option<u64>,
    #[serde(flatten)]
    cache: CacheSpec,
    #[serde(flatten)]
    map: DeviceMap,
}

impl Plan {
    fn of(args: &TpIpcArgs) -> anyhow::Result<(Self, CacheFacts)> {
        let within = |flag, value, most| {
            ensure!((1..=most).contains(&value), "{flag} is {value}: give 1 to {most}");
            Ok(value)
        };
        let strategies: Vec<&StrategyEntry> =
            if args.all_impls { STRATEGIES.iter().collect() } else { vec![strategy(&args.map_impl)?] };
        let tp_size = within("--tp-size", args.tp_size, MAX_TP)?;
        let default_iters = if args.output.quick { QUICK_ITERS } else { DEFAULT_ITERS };
        let cadence = Duration::try_from(args.cadence).ok().filter(|cadence| *cadence <= MAX_CADENCE);
        let cadence = cadence.with_context(|| format!("--cadence is {:#}: give 0s to 1s", args.cadence))?;
        let iters = within("--iters", args.iters.unwrap_or(default_iters), MAX_ITERS)?;
        let cache = CacheSpec::of(&args.cache)?;
        let plan = Self {
            tp_size,
            pages_per_iter: within("--pages-per-iter", args.pages_per_iter, u32::MAX)?,
            iters,
            batches: batch::count(iters, args.noop),
            impls: strategies.iter().map(|entry| entry.name).collect(),
            strategies,
            all_impls: args.all_impls,
            device_map: args.device_map,
            base_page: args.base_page,
            noop: args.noop,
            async_sched: args.async_sched,
            cadence_ns: u64::try_from(cadence.as_nanos()).ok().filter(|ns| *ns > 0),
            map: DeviceMap::new(args.device_map, "--device-map", tp_size, cache.backend_name()?)?,
            cache,
        };
        let pages = u64::from(plan.pages_per_iter);
        let facts = plan.cache.look(&plan.map, |ranks| if plan.noop { 0 } else { ranks.len() as u64 * pages })?;
        facts.check_pages("--pages-per-iter", plan.pages_per_iter, plan.base_page)?;
        ensure!(
            usize::try_from(plan.pages_per_iter).is_ok_and(|pages| pages <= PAGES_MAX),
            "--pages-per-iter is {}: one order has at most {PAGES_MAX} pages",
            plan.pages_per_iter
        );
        Ok((plan, facts))
    }

    fn cadence(&self) -> Option<Duration> {
        self.cadence_ns.map(Duration::from_nanos)
    }
}
