//! `kvbench router`: how much later does the first token come when `kvctl up`'s router stands before the engine?
//!
//! ```text
//!   kvbench ──────────────────────────> upstream      an engine that answers at once, in a process of its own
//!           ──> kvctl up (router) ────>
//!
//!   rounds of --round (1 s), direct and routed in turn, each at --rate requests a second in open loop; then --streams
//!   answers are begun through the router, held open together, and ended together
//! ```
//!
//! Both ways have the same client, the same upstream and the same moments of the machine, so that what differs is the router. A
//! request is sent at its appointed time by one of a few threads, each with a connection that it keeps.
//!
//! | figure of `summary`              | meaning                                                             |
//! |----------------------------------|---------------------------------------------------------------------|
//! | `added_ttft_ms.p50`, `.p99`      | routed less direct, of all rounds together                          |
//! | `direct_ttft_ms.*`, `routed_ttft_ms.*` | from sending a request to the first piece of its answer       |
//! | `streams_held`                   | answers that were open through the router at the same time          |
//! | `send_lag_ms.p99`                | how late the client itself was                                      |

mod client;
mod stand;
mod upstream;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Args;
use jiff::SignedDuration;
use serde::Serialize;

use crate::host::HostInfo;
use crate::output::OutputArgs;
use crate::result::BenchResult;
use crate::stats::{Samples, to_f64};
use crate::table::{Table, format_ns};
use client::Timed;
use stand::Stand;
use tidekv_cli::exit::Outcome;

pub use upstream::{UpstreamArgs, run as run_upstream};

const DEFAULT_ROUNDS: u32 = 30;
const QUICK_ROUNDS: u32 = 2;
const MAX_RATE: u32 = 2000;
const MAX_STREAMS: u32 = 20_000;

/// Arguments of `kvbench router`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct RouterArgs {
    /// Requests in a second
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub rate: u32,

    /// Rounds each way [default: 30, with --quick 2]
    #[arg(long, value_name = "N")]
    pub rounds: Option<u32>,

    /// Length of a round
    #[arg(long, value_name = "DURATION", default_value = "1s")]
    pub round: SignedDuration,

    /// Pieces of an answer, a millisecond apart
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub pieces: u32,

    /// Answers that are held open together
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub streams: u32,

    /// The kvctl whose router is measured [default: beside kvbench, else on PATH]
    #[arg(long, value_name = "FILE")]
    pub kvctl: Option<PathBuf>,

    /// Where the result goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

const EXAMPLES: &str = "\
Examples:
  kvbench router                               # a minute: 200 requests a second, then 1,000 streams
  kvbench router --quick
  kvbench router --rate 500 --rounds 60 --output router.json
  kvbench router --kvctl ./other/kvctl         # another build

Exit status: 0 measured, 2 error: a request failed, a stream was lost, there is no kvctl.";

/// The validated arguments.
#[derive(Clone, Debug, Serialize)]
struct Plan {
    rate: u32,
    rounds: u32,
    round_ms: u64,
    pieces: u32,
    streams: u32,
}

impl Plan {
    fn of(args: &RouterArgs) -> anyhow::Result<Self> {
        let round = Duration::try_from(args.round).ok().filter(|round| *round >= Duration::from_millis(100));
        let round = round.context("--round is too short: give at least 100ms")?;
        let usual = if args.output.quick { QUICK_ROUNDS } else { DEFAULT_ROUNDS };
        let plan = Self {
            rate: args.rate,
            rounds: args.rounds.unwrap_or(usual),
            round_ms: u64::try_from(round.as_millis()).context("--round is too long")?,
            pieces: args.pieces,
            streams: args.streams,
        };
        ensure!((1..=MAX_RATE).contains(&plan.rate), "--rate is {}: give 1 to {MAX_RATE}", plan.rate);
        ensure!((1..=100_000).contains(&plan.rounds), "--rounds is {}: give 1 or more", plan.rounds);
        ensure!((1..=1000).contains(&plan.pieces), "--pieces is {}: give 1 to 1000", plan.pieces);
        ensure!(plan.streams <= MAX_STREAMS, "--streams is {}: give at most {MAX_STREAMS}", plan.streams);
        Ok(plan)
    }

    fn round(&self) -> Duration {
        Duration::from_millis(self.round_ms)
    }
}

/// Measures, prints and keeps the result.
pub fn run(args: &RouterArgs) -> anyhow::Result<Outcome> {
    let plan = Plan::of(args)?;
    let output = args.output.open()?;
    let mut result = BenchResult::new("router", &plan, HostInfo::current())?;
    let stand = Stand::build(args.kvctl.as_deref())?;
    let progress = output.progress(u64::from(plan.rounds) + 1);
    let (mut direct, mut routed, mut lag) = (Samples::new(), Samples::new(), Samples::new());
    // Connections are made and code is warm before anything counts.
    for address in [stand.upstream(), stand.router()] {
        client::round(address, &plan)?;
    }
    for _ in 0..plan.rounds {
        for (address, times) in [(stand.upstream(), &mut direct), (stand.router(), &mut routed)] {
            let Timed { first_piece, send_lag } = client::round(address, &plan)?;
            times.extend(&first_piece);
            lag.extend(&send_lag);
        }
        progress.step();
    }
    let held = client::hold(stand.router(), stand.upstream(), plan.streams)?;
    progress.step();
    drop(progress);
    stand.take_down()?;
    fill(&mut result, &direct, &routed, &lag, held);
    output.emit(&result, &table(&direct, &routed, held))?;
    Ok(Outcome::Done)
}

fn fill(result: &mut BenchResult, direct: &Samples, routed: &Samples, lag: &Samples, held: u32) {
    result.add_times("direct_ttft", direct);
    result.add_times("routed_ttft", routed);
    for percent in [50, 99] {
        let ms = |samples: &Samples| samples.percentile(percent).map(|time| to_f64(time) / 1e6);
        if let (Some(direct), Some(routed)) = (ms(direct), ms(routed)) {
            result.set_figure(&format!("added_ttft_ms.p{percent}"), routed - direct);
            result.set_figure(&format!("direct_ttft_ms.p{percent}"), direct);
            result.set_figure(&format!("routed_ttft_ms.p{percent}"), routed);
        }
    }
    if let Some(lag) = lag.percentile(99) {
        result.set_figure("send_lag_ms.p99", to_f64(lag) / 1e6);
    }
    result.set_figure("streams_held", f64::from(held));
}

fn table(direct: &Samples, routed: &Samples, held: u32) -> String {
    let mut table = Table::new(&["to the first piece", "p50", "p90", "p99", "requests"]);
    for (name, samples) in [("direct", direct), ("through the router", routed)] {
        let cell = |percent| samples.percentile(percent).map_or_else(String::new, |time| format_ns(to_f64(time)));
        table.row(&[name.to_owned(), cell(50), cell(90), cell(99), samples.len().to_string()]);
    }
    let added = |percent| {
        let of = |samples: &Samples| samples.percentile(percent).map_or(0.0, to_f64);
        (of(routed) - of(direct)) / 1e6
    };
    format!(
        "{}\nThe router adds {:.3} ms (p99 {:.3} ms) to the first piece; it held {held} streams at once.\n",
        table.render(),
        added(50),
        added(99)
    )
}
