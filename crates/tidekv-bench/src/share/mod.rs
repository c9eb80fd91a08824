//! `kvbench share`: when several processes want more memory than there is, does each get its share, how soon, and is
//! there ever too much handed out?
//!
//! ```text
//!   full       all want everything; then one of them wants nothing for a while, and everything again; then the next
//!   sawtooth   each wants a quarter, a half, three quarters, all of it, in turn, and each at another time
//! ```
//!
//! Every phase lasts `--phase` (2 s); the shares are judged in its last second. A worker's floor is half of its share
//! under full demand: so much it can have at any time, whatever the others do.
//!
//! | figure of `summary`            | meaning                                                                      |
//! |--------------------------------|------------------------------------------------------------------------------|
//! | `share_error`                  | max over workers of abs(held - fair) / fair, mean over the last second of a phase; the worst phase |
//! | `share_error_mean`             | the same, mean of all phases                                                 |
//! | `grant_ms.p50`, `.p99`         | from wanting more to holding the floor, for a worker that was below it       |
//! | `share_ms.p50`, `.p99`         | from wanting more to holding 95 % of the fair share                          |
//! | `over_budget_bytes`            | the most that all memory files held together, beyond the budget; host memory only |
//! | `moments`                      | how many times that sum was taken                                            |
//! | `exhausted`                    | refused allocations (each is asked for again)                                |
//! | `reclaims`                     | requests to give memory back that workers followed                           |

mod fair;
mod phases;
mod report;

use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::{Args, ValueEnum};
use jiff::SignedDuration;
use serde::Serialize;
use tidekv_core::units::Bytes;
use tidekv_mem::BackendName;

use crate::host::HostInfo;
use crate::lab::Lab;
use crate::output::OutputArgs;
use crate::result::BenchResult;
use tidekv_cli::exit::Outcome;

const DEFAULT_CYCLES: u32 = 10;
const QUICK_CYCLES: u32 = 3;
const MAX_CYCLES: u32 = 10_000;
const MAX_WORKERS: usize = 64;
const MAX_WEIGHT: u32 = 1000;
const MAX_PAGES: u32 = 1_000_000;

/// What is judged is the last second of a phase; before that there must be time to settle.
const MIN_PHASE: Duration = Duration::from_millis(1500);

/// Arguments of `kvbench share`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct ShareArgs {
    /// One process for each weight
    #[arg(long, value_name = "W,...", default_value = "1,1,2,4")]
    pub weights: Weights,

    /// What all of them may hold together, in pages
    #[arg(long, value_name = "N", default_value_t = 400)]
    pub budget_pages: u32,

    /// Bytes of one page
    #[arg(long, value_name = "SIZE", default_value = "64K")]
    pub page_size: Bytes,

    /// How demand changes
    #[arg(long, value_enum, default_value_t = Pattern::Full)]
    pub pattern: Pattern,

    /// Changes of demand, two phases each [default: 10, with --quick 3]
    #[arg(long, value_name = "N")]
    pub cycles: Option<u32>,

    /// Length of a phase
    #[arg(long, value_name = "DURATION", default_value = "2s")]
    pub phase: SignedDuration,

    /// Memory behind the pools: host, or fake (nobody but the workers can then say what they hold)
    #[arg(long, value_name = "NAME", default_value_t = BackendName::Host)]
    pub backend: BackendName,

    /// Where the result goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

const EXAMPLES: &str = "\
Examples:
  kvbench share                                       # four processes, weights 1:1:2:4
  kvbench share --quick --weights 1,1
  kvbench share --pattern sawtooth --cycles 20
  kvbench share --budget-pages 2000 --page-size 2M    # up to 4 GiB of host memory";

/// How demand changes from phase to phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pattern {
    /// All want everything, and one at a time pauses
    Full,
    /// Each wants more and more and then little again, at different times
    Sawtooth,
}

/// Weights of the workers. Unlike other lists it may have a value twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weights(Vec<u32>);

impl FromStr for Weights {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let weight = |part: &str| match part.trim().parse() {
            Ok(weight @ 1..=MAX_WEIGHT) => Ok(weight),
            _ => Err(format!("{part:?} is not a weight: give 1 to {MAX_WEIGHT}, such as 1,1,2,4")),
        };
        let weights: Vec<u32> = text.split(',').map(weight).collect::<Result<_, _>>()?;
        if weights.len() > MAX_WORKERS { Err(format!("at most {MAX_WORKERS} workers")) } else { Ok(Self(weights)) }
    }
}

/// Measures, prints and keeps the result.
pub fn run(args: &ShareArgs) -> anyhow::Result<Outcome> {
    let plan = Plan::of(args)?;
    let output = args.output.open()?;
    let mut result = BenchResult::new("share", &plan, HostInfo::current())?;
    let lab = Lab::new()?;
    let program = tidekv_cli::program::named_path().context("finding kvbench itself, to start workers")?;
    let progress = output.progress(plan.phases().len() as u64);
    let outcome = phases::measure(&plan, &lab, &program, &progress)?;
    drop(progress);
    report::fill(&mut result, &outcome);
    output.emit(&result, &report::table(&plan, &outcome))?;
    Ok(Outcome::Done)
}

/// The validated arguments: what is measured, and what `args` of the result says.
#[derive(Clone, Debug, Serialize)]
struct Plan {
    weights: Vec<u32>,
    budget_pages: u32,
    page_bytes: u64,
    pattern: Pattern,
    cycles: u32,
    phase_ms: u64,
    backend: &'static str,
}

impl Plan {
    fn of(args: &ShareArgs) -> anyhow::Result<Self> {
        let default_cycles = if args.output.quick { QUICK_CYCLES } else { DEFAULT_CYCLES };
        let phase = Duration::try_from(args.phase).ok().filter(|&phase| phase >= MIN_PHASE);
        let phase = phase.with_context(|| format!("--phase is too short: give at least {MIN_PHASE:?}"))?;
        let plan = Self {
            weights: args.weights.0.clone(),
            budget_pages: args.budget_pages,
            page_bytes: args.page_size.0,
            pattern: args.pattern,
            cycles: args.cycles.unwrap_or(default_cycles),
            phase_ms: u64::try_from(phase.as_millis()).context("--phase is too long")?,
            backend: args.backend.name(),
        };
        let weights: u32 = plan.weights.iter().sum();
        ensure!(
            (2 * weights..=MAX_PAGES).contains(&plan.budget_pages),
            "--budget-pages is {}: give {} to {MAX_PAGES}, so that every worker has a floor",
            plan.budget_pages,
            2 * weights
        );
        ensure!((1..=MAX_CYCLES).contains(&plan.cycles), "--cycles is {}: give 1 to {MAX_CYCLES}", plan.cycles);
        ensure!(args.page_size > Bytes::ZERO, "--page-size is 0");
        Ok(plan)
    }

    fn phase(&self) -> Duration {
        Duration::from_millis(self.phase_ms)
    }

    /// Half of a worker's share under full demand, in pages.
    fn floor(&self, worker: usize) -> u32 {
        let all: u64 = self.weights.iter().map(|&weight| u64::from(weight)).sum();
        let half = u64::from(self.budget_pages) * u64::from(self.weights[worker]) / all / 2;
        u32::try_from(half).unwrap_or(u32::MAX)
    }

    /// What each worker wants in each phase, in pages.
    fn phases(&self) -> Vec<Vec<u32>> {
        let workers = self.weights.len();
        let mut phases = vec![vec![self.budget_pages; workers]];
        for cycle in 0..self.cycles {
            let turn = usize::try_from(cycle).unwrap_or(0);
            match self.pattern {
                Pattern::Full => {
                    let mut one_pauses = phases[0].clone();
                    one_pauses[turn % workers] = 0;
                    phases.extend([one_pauses, phases[0].clone()]);
                }
                Pattern::Sawtooth => {
                    let tooth = |worker: usize, step: usize| {
                        let quarters = u32::try_from((2 * turn + step + worker) % 4).unwrap_or(0) + 1;
                        self.budget_pages * quarters / 4
                    };
                    phases.extend([0, 1].map(|step| (0..workers).map(|worker| tooth(worker, step)).collect()));
                }
            }
        }
        phases
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(pattern: Pattern) -> Plan {
        let weights = "1,1,2,4".parse::<Weights>().unwrap().0;
        let (budget_pages, page_bytes) = (400, 65536);
        Plan { weights, budget_pages, page_bytes, pattern, cycles: 2, phase_ms: 2000, backend: "host" }
    }

    #[test]
    fn weights_may_repeat_and_are_positive() {
        assert_eq!("1, 1,2,4".parse::<Weights>().unwrap().0, [1, 1, 2, 4]);
        for bad in ["", "1,,2", "0", "1001", "-1", "x"] {
            assert!(bad.parse::<Weights>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn one_at_a_time_pauses_under_full_demand() {
        let phases = plan(Pattern::Full).phases();
        assert_eq!(phases[..3], [[400, 400, 400, 400], [0, 400, 400, 400], [400, 400, 400, 400]]);
        assert_eq!((phases[3][1], phases.len()), (0, 5));
    }

    #[test]
    fn teeth_are_out_of_step() {
        let phases = plan(Pattern::Sawtooth).phases();
        assert_eq!(phases[1..3], [[100, 200, 300, 400], [200, 300, 400, 100]]);
    }

    #[test]
    fn floors_are_half_of_the_shares() {
        let plan = plan(Pattern::Full);
        assert_eq!([0, 1, 2, 3].map(|worker| plan.floor(worker)), [25, 25, 50, 100]);
    }
}
