//! `kvbench compare A B`: what changed from one side to the other, and whether that is a failure.
//!
//! ```text
//!   files, folders ──runs──> two sides ──groups──> pairs of repeats ──> Comparison ──> table or JSON, exit code
//!                                                                           │
//!                     direction: which way is better, by name               │
//!                     judge: two values, or two lists of runs, to a verdict ┘
//! ```
//!
//! A side is one run or several. With several every figure has an interval, and one that could be either is called
//! underpowered: see [`judge`]. The arithmetic is in [`statistics`](crate::statistics).
//!
//! A comparison fails only when `--fail-above` is given, and then for two reasons: a figure whose name says a
//! direction got worse by more than that (with several runs: is not shown to be no worse than that), or a figure of A is
//! missing in B, because a regression must not pass by no longer being measured. Figures that only B has are named and
//! are no failure.

mod comparison;
pub mod direction;
pub mod figures;
mod groups;
pub mod judge;
pub(crate) mod ratios;
mod report;
mod sets;
mod warnings;

use std::path::PathBuf;

use anyhow::bail;
use clap::Args;

use crate::output;
use crate::runs::{Run, read_all};
use crate::statistics::Confidence;
use judge::Tolerance;
use tidekv_cli::exit::Outcome;

pub use comparison::{Compared, Comparison, Headline, RunEvidence, Terms};
pub(crate) use groups::workload;
pub use sets::SetComparison;
pub(crate) use warnings::said_by_all;

/// Arguments of `kvbench compare`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES, override_usage = "kvbench compare [OPTIONS] A B\n       kvbench compare [OPTIONS] A... -- B...")]
pub struct CompareArgs {
    /// The result to measure by, and the one that is measured; or, before `--`, all runs of the first side.
    /// A folder stands for the results in it
    #[arg(value_name = "A B", required = true, num_args = 1..)]
    pub files: Vec<PathBuf>,

    /// All runs of the second side
    #[arg(value_name = "B", last = true)]
    pub b_files: Vec<PathBuf>,

    /// Exit with 1 when a figure is, or with several runs may be, worse by more than this share of A (10% or 0.1), or
    /// missing in B
    #[arg(long, value_name = "SHARE", conflicts_with = "tolerance")]
    pub fail_above: Option<Tolerance>,

    /// What is no difference, where nothing is to fail [default: 5% for one run a side, 3% for several]
    #[arg(long, value_name = "SHARE")]
    pub tolerance: Option<Tolerance>,

    /// How sure the intervals of several runs are
    #[arg(long, value_name = "SHARE", default_value = "95%")]
    pub confidence: Confidence,

    /// The n-th run of A belongs to the n-th of B: what moved both of them does not count
    #[arg(long)]
    pub paired: bool,

    /// Only figures with this in their name; may be given several times
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,

    /// Print one JSON object instead of tables
    #[arg(long)]
    pub json: bool,
}

const EXAMPLES: &str = "\
Examples:
  kvbench compare before.json after.json
  kvbench compare before.json after.json --fail-above 10%   # for CI: exit 1 on a regression
  kvbench compare --fail-above 3% A1.json A2.json A3.json A4.json -- B1.json B2.json B3.json B4.json
  kvbench compare static/ elastic/ --only ttft              # two folders of runs
  kvbench compare before/ after/ --fail-above 10%           # two folders of `kvbench shm --output-dir`
  kvbench compare vllm.json sglang.jsonl                    # results of vLLM, SGLang and aiperf are read too
  kvbench compare before.json after.json --json | jq '.figures[] | select(.verdict == \"worse\")'

Which way is better is read from the name of a figure: times, bytes and costs ought to be low
(map_us, held_bytes, driver_calls, ..._ratio_to_raw), rates and speed-ups high (blocks_per_s,
copy_gib_s, speedup). Other figures are shown and never fail.

Several runs a side give every figure an interval over the runs. Verdicts: better, worse, no
difference (all of the interval is within the tolerance), underpowered (it could be either: more
or quieter runs are needed, and that is not a pass). At 95 % it takes at least 4 runs a side.

Exit status: 0 done, 1 not shown to be within --fail-above, 2 error.";

/// Reads both sides, prints the comparison and answers whether it holds.
pub fn run(args: &CompareArgs) -> anyhow::Result<Outcome> {
    let (a_paths, b_paths) = sides(args)?;
    let are_folders = a_paths.iter().chain(b_paths).all(|path| path.is_dir());
    let (a, b) = (read_all(a_paths)?, read_all(b_paths)?);
    let terms = args.terms();
    if !are_folders && a.len() == 1 && b.len() == 1 {
        return show_one(&a, &b, &terms, args);
    }
    let by_file = are_folders && !groups::has_repeats(&a) && !groups::has_repeats(&b);
    let pairs = if by_file { groups::by_file(a, b) } else { groups::by_workload(a, b) };
    let is_one = !by_file && pairs.missing_in_a.is_empty() && pairs.missing_in_b.is_empty();
    if let (true, [pair]) = (is_one, &pairs.pairs[..]) {
        return show_one(&pair.a, &pair.b, &terms, args);
    }
    if pairs.pairs.is_empty() {
        let (a, b) = (pairs.missing_in_b.join("; "), pairs.missing_in_a.join("; "));
        bail!("the two sides have nothing in common: A has {a}, and B has {b}");
    }
    let comparison = SetComparison::of(pairs, &terms)?;
    for (name, of_one) in &comparison.results {
        of_one.warnings.iter().for_each(|warning| output::warn(&format!("{name}: {warning}")));
    }
    output::print(&if args.json { comparison.to_json()? } else { comparison.to_text() })?;
    Ok(if comparison.failed { Outcome::Negative } else { Outcome::Done })
}

fn show_one(a: &[Run], b: &[Run], terms: &Terms, args: &CompareArgs) -> anyhow::Result<Outcome> {
    let comparison = Comparison::of(a, b, terms).map_err(|error| match (a.first(), b.first()) {
        (Some(a), Some(b)) => error.context(format!("{} and {} cannot be compared", a.source, b.source)),
        _ => error,
    })?;
    comparison.warnings.iter().for_each(|warning| output::warn(warning));
    output::print(&if args.json { comparison.to_json()? } else { comparison.to_text() })?;
    Ok(if comparison.failed { Outcome::Negative } else { Outcome::Done })
}

/// Which paths are A and which B: two without `--`, or what stands on either side of it.
fn sides(args: &CompareArgs) -> anyhow::Result<(&[PathBuf], &[PathBuf])> {
    let (a, b) = match (&args.files[..], &args.b_files[..]) {
        ([a, b], []) => (std::slice::from_ref(a), std::slice::from_ref(b)),
        (_, []) => bail!("write A B, or several runs a side with -- between them: A1.json A2.json -- B1.json B2.json"),
        (a, b) => (a, b),
    };
    if let ([a], [b]) = (a, b)
        && a.is_dir() != b.is_dir()
        && args.b_files.is_empty()
    {
        bail!("{} and {} cannot be compared: one is a folder and the other is not", a.display(), b.display());
    }
    Ok((a, b))
}

impl CompareArgs {
    fn terms(&self) -> Terms {
        Terms {
            tolerance: self.fail_above.or(self.tolerance),
            may_fail: self.fail_above.is_some(),
            confidence: self.confidence,
            paired: self.paired,
            only: self.only.clone(),
        }
    }
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
