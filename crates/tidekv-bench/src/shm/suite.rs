//! `kvbench shm`: the three benchmarks, one after the other, and one table of what they say.
//!
//! ```text
//!   --output-dir DIR    allocation.txt  allocation.json
//!                       lookup.txt      lookup.json
//!                       transfer.txt    transfer.json
//! ```
//!
//! Files appear whole or not at all, each when its benchmark is done. `kvbench compare` takes two such folders.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use serde_json::{Value, json};
use tidekv_cli::exit::Outcome;

use super::alloc::{self, AllocFlags};
use super::lookup::{self, LookupFlags};
use super::transfer::{self, TransferFlags};
use super::{CommonArgs, Report, host, repeats};
use crate::output::OutputArgs;
use crate::result::{BenchResult, PendingFile};
use crate::table::{Table, format_figure, format_ns};

/// Arguments of `kvbench shm`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES, args_override_self = true)]
pub struct ShmArgs {
    /// Also write the text and the result of each benchmark to DIR
    #[arg(long, value_name = "DIR")]
    pub output_dir: Option<PathBuf>,

    /// Of shm-alloc.
    #[command(flatten)]
    pub alloc: AllocFlags,

    /// Of shm-lookup.
    #[command(flatten)]
    pub lookup: LookupFlags,

    /// Of shm-transfer.
    #[command(flatten)]
    pub transfer: TransferFlags,

    /// Shared by the three.
    #[command(flatten)]
    pub common: CommonArgs,

    /// Where the result goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

const EXAMPLES: &str = "\
Examples:
  kvbench shm
  kvbench shm --num_iterations=100 --num_lookups=1000 --num_transfers=100 --output-dir baseline
  kvbench compare baseline later --fail-above 10%   # two such folders

Exit status: 0 done, 2 a wrong result or a failed call.";

/// Measures all three, prints and keeps the results.
pub fn run(args: &ShmArgs) -> anyhow::Result<Outcome> {
    let alloc = alloc::Plan::of(&args.alloc, &args.common)?;
    let lookup = lookup::Plan::of(&args.lookup, &args.common)?;
    let transfer = transfer::Plan::of(&args.transfer, &args.common)?;
    let output = args.output.open()?;
    if let Some(dir) = &args.output_dir {
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    let host = host(args.output.quiet);
    let repeat = args.common.repeat;
    let progress = output.progress(u64::from(repeat) * (alloc::STEPS + lookup::STEPS + transfer.steps()));
    let keep = |name: &str, report: Report| -> anyhow::Result<Report> {
        if let Some(dir) = &args.output_dir {
            write(dir, name, &report)?;
        }
        report.verdict()?;
        Ok(report)
    };
    let allocation = repeats::measure(repeat, |_| alloc::measure(&alloc, host.clone(), &progress))?;
    let allocation = keep("allocation", allocation)?;
    let looked_up = keep("lookup", repeats::measure(repeat, |_| lookup::measure(&lookup, host.clone(), &progress))?)?;
    let transferred = repeats::measure(repeat, |_| transfer::measure(&transfer, host.clone(), &progress))?;
    let transferred = keep("transfer", transferred)?;
    drop(progress);

    let all = [("allocation", &allocation), ("lookup", &looked_up), ("transfer", &transferred)];
    let plans = json!({"allocation": allocation.result.args, "lookup": looked_up.result.args,
                       "transfer": transferred.result.args});
    let mut result = BenchResult::new("shm", &plans, host)?;
    let mut text = String::new();
    for (name, report) in all {
        result.summary.insert(name.to_owned(), Value::Object(report.result.summary.clone()));
        text += &report.text;
    }
    text += &closing(&allocation.result, &looked_up.result, &transferred.result);
    output.emit(&result, &text)?;
    Ok(Outcome::Done)
}

fn write(dir: &Path, name: &str, report: &Report) -> anyhow::Result<()> {
    let (text, json) = (dir.join(format!("{name}.txt")), dir.join(format!("{name}.json")));
    let written = PendingFile::create(&text).and_then(|file| file.commit(report.text.as_bytes()));
    written.with_context(|| format!("cannot write {}", text.display()))?;
    report.result.write(&json).with_context(|| format!("cannot write {}", json.display()))
}

/// The last lines: what was gained, and where nothing was to be gained.
fn closing(allocation: &BenchResult, lookup: &BenchResult, transfer: &BenchResult) -> String {
    let mut table = Table::new(&["Operation", "Baseline", "Ours", "Speedup"]);
    let figure = |result: &BenchResult, key: &str| result.summary.get(key).and_then(Value::as_f64);
    let mut times = |operation: String, baseline: Option<f64>, ours: Option<f64>| {
        let cell = |ns: Option<f64>| ns.map_or("-".to_owned(), format_ns);
        let speedup = baseline.zip(ours).map_or("-".to_owned(), |(a, b)| format!("{}x", format_figure(a / b)));
        table.row(&[operation, cell(baseline), cell(ours), speedup]);
    };
    times("SHM Allocation".to_owned(), figure(allocation, "syscall_pair_ns"), figure(allocation, "arena_pair_ns"));
    for key in ["64k", "1m"] {
        let side = |side: &str| allocation.summary.get("touched")?.get(key)?.get(side)?.as_f64();
        let size = if key == "64k" { "64 KiB" } else { "1 MiB" };
        times(format!("SHM Allocation, {size} touched"), side("syscall_pair_ns"), side("arena_pair_ns"));
    }
    let segments = lookup.args.get("num_segments").and_then(Value::as_u64).unwrap_or(0);
    times(format!("Address Lookup ({segments} segments)"), figure(lookup, "linear_ns"), figure(lookup, "ours_ns"));
    for temperature in ["hot", "cold"] {
        if let Some((memcpy, ours)) = transfer_row(transfer, temperature) {
            let rate = |gibps: f64| format!("{} GiB/s", format_figure(gibps));
            let speedup = format!("{}x", format_figure(ours / memcpy));
            table.row(&[format!("Memory Transfer (1 MiB, {temperature})"), rate(memcpy), rate(ours), speedup]);
        }
    }
    format!(
        "\n=== Summary ===\n{}\nCopying is not the bottleneck: shared memory is copied at the speed of memory. What an \
         arena saves is allocation and lookup.\n",
        table.render()
    )
}

/// `memcpy` and ours for blocks of 1 MiB.
fn transfer_row(transfer: &BenchResult, temperature: &str) -> Option<(f64, f64)> {
    let rows = transfer.summary.get("sizes")?.as_array()?;
    let row = rows.iter().find(|row| row["kb"] == json!(1024) && row["temperature"] == json!(temperature))?;
    Some((row["memcpy_gibps"].as_f64()?, row["ours_gibps"].as_f64()?))
}
