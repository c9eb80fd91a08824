//! From times to figures, to the table, and to what the message alone costs.

use super::Plan;
use super::measure::{Measured, Times};
use crate::ranks::cache::CacheFacts;
use crate::result::BenchResult;
use crate::stats::{Percentiles, Samples, to_f64};
use crate::table::format_ns;

const NS_PER_US: f64 = 1e3;
const NS_PER_MS: f64 = 1e6;

const EDGE: &str = "+---------------+-----------+------------+\n";
const RULE: &str = "|---------------|-----------|------------|\n";

/// Puts samples and figures into the result.
pub(super) fn fill(result: &mut BenchResult, plan: &Plan, all: &[Measured]) {
    for measured in all {
        let name = measured.strategy.name;
        let [figures, series] = if plan.all_impls {
            [format!("impls.{name}."), format!("{name}.")]
        } else {
            [String::new(), String::new()]
        };
        result.set_text(&format!("{figures}impl"), name);
        fill_times(result, &figures, &series, &measured.back_to_back);
        if let Some(times) = &measured.at_cadence {
            fill_times(result, &format!("{figures}cadence."), &format!("{series}cadence."), times);
            let period = plan.cadence_ns.map_or(0.0, to_f64);
            result.set_figure(&format!("{figures}cadence.period_ms"), period / NS_PER_MS);
        }
    }
}

fn fill_times(result: &mut BenchResult, figures: &str, series: &str, times: &Times) {
    for (name, samples) in [("map", &times.map), ("unmap", &times.unmap), ("floor", &times.floor)] {
        result.add_times(format!("{series}{name}"), samples);
        if let Some(percentiles) = samples.percentiles() {
            for (percent, value) in [("p50", percentiles.p50), ("p99", percentiles.p99)] {
                result.set_figure(&format!("{figures}{name}_us.{percent}"), to_f64(value) / NS_PER_US);
            }
        }
    }
    if let Some(ratio) = ratio_to_floor(times) {
        result.set_figure(&format!("{figures}ratio_to_floor"), ratio);
    }
}

/// A block for each strategy.
pub(super) fn text(plan: &Plan, facts: &CacheFacts, all: &[Measured], verbose: bool) -> String {
    let blocks: Vec<String> = all.iter().map(|measured| block(plan, facts, measured, verbose)).collect();
    blocks.join("\n")
}

fn block(plan: &Plan, facts: &CacheFacts, measured: &Measured, verbose: bool) -> String {
    let times = &measured.back_to_back;
    let mut text = String::new();
    if verbose {
        text += &iterations(times);
        text += "\n";
    }
    text += &format!(
        "=== IPC Benchmark Summary ===\n\
         Broadcast impl       : {} ({})\n\
         TP size                 : {}\n\
         Iterations              : {}\n\
         Pages Per Iteration     : {}\n\n",
        measured.strategy.name, measured.strategy.file, plan.tp_size, plan.iters, plan.pages_per_iter
    );
    if let Some(table) = table(plan, times) {
        text += &table;
    }
    text += "\n";
    let mapped = if plan.noop { "nothing is mapped (--noop)".to_owned() } else { facts.page_in_words() };
    text += &format!("One page                : {mapped}\n");
    if plan.batches > 1 {
        text += &format!("New workers             : {} times\n", plan.batches);
    }
    text += &format!("Bare echo               : {}: {}\n", measured.floor_in_words, beside_floor(plan, times));
    if let Some(times) = &measured.at_cadence {
        let period = format_ns(plan.cadence_ns.map_or(0.0, to_f64));
        let p50 = |samples: &Samples| samples.percentiles().map_or("-".to_owned(), |all| format_ns(to_f64(all.p50)));
        text += &format!(
            "One every {period:<14}: map {}, unmap {}, bare echo {}\n",
            p50(&times.map),
            p50(&times.unmap),
            beside_floor(plan, times)
        );
    }
    text
}

fn table(plan: &Plan, times: &Times) -> Option<String> {
    let sides = [&times.map, &times.unmap];
    let all = [sides[0].percentiles()?, sides[1].percentiles()?];
    let p95 = [sides[0].percentile(95)?, sides[1].percentile(95)?];
    let row = |name: &str, ns: [f64; 2]| {
        format!("| {name:<13} | {:>9.4} | {:>10.4} |\n", ns[0] / NS_PER_MS, ns[1] / NS_PER_MS)
    };
    let of = |pick: fn(&Percentiles) -> u64| [pick(&all[0]), pick(&all[1])].map(to_f64);
    let means = all.map(|side| side.avg);
    let mut text = format!("{EDGE}| Metric        |  Map (ms) | Unmap (ms) |\n{RULE}");
    text += &row("mean", means);
    text += &row("p95", p95.map(to_f64));
    text += &row("max", of(|side| side.max));
    text += &row("min", of(|side| side.min));
    text += &row("p50", of(|side| side.p50));
    text += &row("p99", of(|side| side.p99));
    text += RULE;
    text += &row("per-page mean", means.map(|mean| mean / f64::from(plan.pages_per_iter)));
    Some(text + EDGE)
}

/// A line for each iteration.
fn iterations(times: &Times) -> String {
    let both = times.map.values_ns().iter().zip(times.unmap.values_ns());
    let in_ms = |ns: &u64| to_f64(*ns) / NS_PER_MS;
    both.enumerate()
        .map(|(iteration, (map, unmap))| {
            format!("[iter {iteration:02}] map={:.4} ms  unmap={:.4} ms\n", in_ms(map), in_ms(unmap))
        })
        .collect()
}

/// `57.1 us (p99 92.0 us); a broadcast takes x1.31 of it`.
fn beside_floor(plan: &Plan, times: &Times) -> String {
    let (Some(floor), Some(ratio)) = (times.floor.percentiles(), ratio_to_floor(times)) else { return "-".to_owned() };
    let [p50, p99] = [floor.p50, floor.p99].map(|time| format_ns(to_f64(time)));
    let included = if plan.noop { "" } else { ", mapping included" };
    format!("{p50} (p99 {p99}); a broadcast takes x{ratio:.2} of it{included}")
}

/// The slower of the two medians over the floor's.
fn ratio_to_floor(times: &Times) -> Option<f64> {
    let p50 = |samples: &Samples| samples.percentiles().map(|all| to_f64(all.p50));
    let floor = p50(&times.floor).filter(|&floor| floor > 0.0)?;
    Some(p50(&times.map)?.max(p50(&times.unmap)?) / floor)
}
