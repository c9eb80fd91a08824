//! `kvbench compare A B`: what changed from one result to another, and whether that is a failure.
//!
//! ```text
//!   two files ──read──> two results ──pair figures──> Comparison ──> table or JSON, exit code
//!                                       │
//!              direction: which way is better, by name        judge: two values to a verdict
//! ```
//!
//! A comparison fails only when `--fail-above` is given, and then for two reasons: a figure whose name says a
//! direction got worse by more than that, or a figure of A is missing in B, because a regression must not pass
//! by no longer being measured. Figures that only B has are named and are no failure.
//!
//! A and B are two files, or two [`folders`] of files.

pub mod direction;
pub mod figures;
pub mod folders;
pub mod judge;
mod report;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::host::HostInfo;
use crate::output;
use crate::result::BenchResult;
use direction::Direction;
use figures::Figure;
use folders::FolderComparison;
use judge::{Tolerance, Verdict, judge, ratio};
use tidekv_cli::exit::Outcome;

/// Arguments of `kvbench compare`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct CompareArgs {
    /// The result to measure by, or a folder of results
    #[arg(value_name = "A")]
    pub a: PathBuf,

    /// The result that is measured, or a folder of results
    #[arg(value_name = "B")]
    pub b: PathBuf,

    /// Exit with 1 when a figure is worse by more than this share of A (10% or 0.1), or missing in B
    #[arg(long, value_name = "SHARE")]
    pub fail_above: Option<Tolerance>,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

const EXAMPLES: &str = "\
Examples:
  kvbench compare before.json after.json
  kvbench compare before.json after.json --fail-above 10%   # for CI: exit 1 on a regression
  kvbench compare before/ after/ --fail-above 10%           # two folders of `kvbench shm --output-dir`
  kvbench compare before.json after.json --json | jq '.figures[] | select(.verdict == \"worse\")'

Which way is better is read from the name of a figure: times, bytes and costs ought to be low
(map_us, held_bytes, driver_calls, ..._ratio_to_raw), rates and speed-ups high (blocks_per_s,
copy_gib_s, speedup). Other figures are shown and never fail.

Exit status: 0 done, 1 worse than --fail-above allows, 2 error.";

/// Reads both files, prints the comparison and answers whether it holds.
pub fn run(args: &CompareArgs) -> anyhow::Result<Outcome> {
    match (args.a.is_dir(), args.b.is_dir()) {
        (true, true) => return run_folders(args),
        (false, false) => {}
        _ => bail!(
            "{} and {} cannot be compared: one is a folder and the other is not",
            args.a.display(),
            args.b.display()
        ),
    }
    let (a, b) = (read(&args.a)?, read(&args.b)?);
    let comparison = Comparison::of(&a, &b, args.fail_above)
        .with_context(|| format!("{} and {} cannot be compared", args.a.display(), args.b.display()))?;
    for warning in &comparison.warnings {
        output::warn(warning);
    }
    output::print(&if args.json { comparison.to_json()? } else { comparison.to_text() })?;
    Ok(if comparison.failed { Outcome::Negative } else { Outcome::Done })
}

fn run_folders(args: &CompareArgs) -> anyhow::Result<Outcome> {
    let comparison = FolderComparison::of(&args.a, &args.b, args.fail_above)?;
    for (name, of_file) in &comparison.results {
        of_file.warnings.iter().for_each(|warning| output::warn(&format!("{name}: {warning}")));
    }
    output::print(&if args.json { comparison.to_json()? } else { comparison.to_text() })?;
    Ok(if comparison.failed { Outcome::Negative } else { Outcome::Done })
}

fn read(path: &Path) -> anyhow::Result<BenchResult> {
    BenchResult::read(path).with_context(|| format!("cannot use {}", path.display()))
}

/// Two results of one benchmark, figure by figure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    schema: &'static str,
    /// The benchmark.
    pub name: String,
    #[serde(skip)]
    tolerance: Tolerance,
    /// The share given by `--fail-above`.
    pub fail_above: Option<f64>,
    /// Whether a figure is worse, or gone, where failing was asked for.
    pub failed: bool,
    /// Figures that both results have, in the order of A.
    pub figures: Vec<Compared>,
    /// Paths of figures that only B has.
    pub missing_in_a: Vec<String>,
    /// Paths of figures that only A has.
    pub missing_in_b: Vec<String>,
    /// Why the two may differ for other reasons than the code.
    pub warnings: Vec<String>,
}

/// One figure in both results.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// Path in `summary`, joined by dots.
    pub path: String,
    /// Which way is better.
    pub better: Direction,
    /// Value in A.
    pub a: f64,
    /// Value in B.
    pub b: f64,
    /// B over A, or `None` where that is not a number.
    pub ratio: Option<f64>,
    /// What B is, measured by A.
    pub verdict: Verdict,
}

impl Comparison {
    /// Compares `b` with `a`. Results of different benchmarks have nothing to compare.
    pub fn of(a: &BenchResult, b: &BenchResult, fail_above: Option<Tolerance>) -> anyhow::Result<Self> {
        if a.name != b.name {
            bail!("the first is a result of `{}` and the second of `{}`", a.name, b.name);
        }
        let tolerance = fail_above.unwrap_or(Tolerance::OF_ONE_RUN);
        let (figures_a, figures_b) = (figures::of_summary(&a.summary), figures::of_summary(&b.summary));
        let (by_path_a, by_path_b) = (by_path(&figures_a), by_path(&figures_b));
        let in_both = |of_a: &Figure| Some(compare_figure(of_a, *by_path_b.get(&of_a.path[..])?, tolerance));
        let figures: Vec<Compared> = figures_a.iter().filter_map(in_both).collect();
        let (missing_in_a, missing_in_b) = (not_in(&by_path_a, &figures_b), not_in(&by_path_b, &figures_a));
        let any_worse = figures.iter().any(|figure| figure.verdict == Verdict::Worse);
        Ok(Self {
            schema: "tidekv.compare.v1",
            name: a.name.clone(),
            tolerance,
            fail_above: fail_above.map(Tolerance::share),
            failed: fail_above.is_some() && (any_worse || !missing_in_b.is_empty()),
            figures,
            missing_in_a,
            missing_in_b,
            warnings: warnings(a, b),
        })
    }
}

fn compare_figure(a: &Figure, b: f64, tolerance: Tolerance) -> Compared {
    let (path, better, a) = (a.path.join("."), direction::of_path(&a.path), a.value);
    Compared { path, better, a, b, ratio: ratio(a, b), verdict: judge(better, a, b, tolerance) }
}

fn by_path(figures: &[Figure]) -> HashMap<&[String], f64> {
    figures.iter().map(|figure| (&figure.path[..], figure.value)).collect()
}

fn not_in(there: &HashMap<&[String], f64>, here: &[Figure]) -> Vec<String> {
    let missing = here.iter().filter(|figure| !there.contains_key(&figure.path[..]));
    missing.map(|figure| figure.path.join(".")).collect()
}

/// Differences that make figures differ whatever the code does. Commit and date are meant to differ.
fn warnings(a: &BenchResult, b: &BenchResult) -> Vec<String> {
    let mut warnings = Vec::new();
    let hosts = differing(&comparable_host(&a.host), &comparable_host(&b.host));
    if !hosts.is_empty() {
        warnings.push(format!("the results are from different machines or builds: {hosts}"));
    }
    let args = differing(&a.args, &b.args);
    if !args.is_empty() {
        warnings.push(format!("the benchmark ran with different arguments: {args}"));
    }
    warnings
}

fn comparable_host(host: &HostInfo) -> Map<String, Value> {
    let Ok(Value::Object(mut fields)) = serde_json::to_value(host) else {
        return Map::new();
    };
    fields.retain(|field, _| field != "commit" && field != "date");
    fields
}

/// `cores 2 and 64, gpu null and "H200"`: the fields that differ, each with both values.
fn differing(a: &Map<String, Value>, b: &Map<String, Value>) -> String {
    let keys = a.keys().chain(b.keys().filter(|key| !a.contains_key(*key)));
    let differing = keys.filter(|key| a.get(*key) != b.get(*key));
    let value = |map: &Map<String, Value>, key: &str| map.get(key).map_or("none".to_owned(), Value::to_string);
    let named: Vec<String> = differing.map(|key| format!("{key} {} and {}", value(a, key), value(b, key))).collect();
    named.join(", ")
}

#[cfg(test)]
mod tests;
