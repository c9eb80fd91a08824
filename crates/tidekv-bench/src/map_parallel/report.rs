//! From times to figures, to the tables, and to what they mean.

use std::num::NonZero;

use super::measure::{CaseTimes, Measured};
use super::{Case, Plan};
use crate::ranks::cache::CacheFacts;
use crate::result::BenchResult;
use crate::stats::{Samples, to_f64};
use crate::table::format_figure;

const NS_PER_MS: f64 = 1e6;

/// Below this much of a gain, and within this much of the ideal, nobody would see a difference.
const NO_GAIN: f64 = 1.1;
const ALMOST_IDEAL: f64 = 0.9;

/// What is printed of one case, in milliseconds.
#[derive(Clone, Copy, Debug)]
struct Wall {
    mean: f64,
    p50: f64,
    p95: f64,
    max: f64,
    min: f64,
}

impl Wall {
    fn of(samples: &Samples) -> Option<Self> {
        let all = samples.percentiles()?;
        let [p50, p95, max, min] =
            [all.p50, samples.percentile(95)?, all.max, all.min].map(|value| to_f64(value) / NS_PER_MS);
        Some(Self { mean: all.avg / NS_PER_MS, p50, p95, max, min })
    }
}

/// Puts samples and figures into the result.
pub(super) fn fill(result: &mut BenchResult, plan: &Plan, facts: &CacheFacts, measured: &Measured) {
    for case in Case::ALL {
        let times = measured.of(case);
        result.add_times(format!("{}.wall", case.name()), &times.wall);
        for (rank, samples) in times.ranks.iter().enumerate() {
            result.add_times(format!("{}.rank{rank}", case.name()), samples);
        }
        let Some(wall) = Wall::of(&times.wall) else { continue };
        let figures = [("mean", wall.mean), ("p50", wall.p50), ("p95", wall.p95), ("max", wall.max), ("min", wall.min)];
        for (name, value) in figures {
            result.set_figure(&format!("{}.wall_ms.{name}", case.name()), value);
        }
        if let Some(rate) = pages_per_s(plan, measured, case) {
            result.set_figure(&format!("{}.pages_per_s", case.name()), rate);
        }
    }
    if let Some(speedup) = ratio(measured, Case::Serial, Case::Parallel) {
        result.set_figure("speedup_parallel_over_serial", speedup);
    }
    if let Some(slowdown) = ratio(measured, Case::Parallel, Case::Single) {
        result.set_figure("parallel_over_single", slowdown);
    }
    result.set_figure("ideal_speedup", f64::from(plan.procs));
    result.set_figure("late_starts", to_f64(measured.late_starts));
    result.set_figure("page_bytes", to_f64(facts.geometry.page_bytes().0));
    result.set_figure("handles_per_page", f64::from(facts.geometry.placement().handles_per_page()));
}

/// The three blocks, the speed-up, and what it means.
pub(super) fn text(plan: &Plan, facts: &CacheFacts, measured: &Measured, verbose: bool) -> String {
    let mut text = String::new();
    for case in Case::ALL {
        text += &block(plan, case, measured.of(case), verbose);
    }
    let Some(speedup) = ratio(measured, Case::Serial, Case::Parallel) else { return text };
    text += &format!(
        "Speedup (parallel vs serial): mean x{speedup:.2}   (ideal being approximately {:.2} if perfect overlap)\n\n",
        f64::from(plan.procs)
    );
    let rates = Case::ALL.map(|case| {
        let rate = pages_per_s(plan, measured, case).map_or("-".to_owned(), format_figure);
        format!("{} {rate}", case.name())
    });
    text += &format!("Pages per second    : {}\n", rates.join(", "));
    text += &format!("One page            : {}\n", facts.page_in_words());
    if measured.late_starts > 0 {
        text += &format!(
            "Late starts         : {} iterations count although a rank was not ready in time\n",
            measured.late_starts
        );
    }
    let slowdown = ratio(measured, Case::Parallel, Case::Single).unwrap_or(1.0);
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let crowd = Crowd { procs: plan.procs, workers: plan.procs * plan.threads, cores };
    text + "\n" + &meaning(facts.capabilities.name, crowd, speedup, slowdown)
}

fn block(plan: &Plan, case: Case, times: &CaseTimes, verbose: bool) -> String {
    let title = match case {
        Case::Single => "Single Process case (1 proc maps N/P pages)".to_owned(),
        Case::Serial => "Serial case (1 proc maps N pages)".to_owned(),
        Case::Parallel => format!("Parallel case ({} procs map N/P each)", plan.procs),
    };
    let ranges = plan.ranges_of(case);
    let (pages, procs) = (plan.pages_of(case), ranges.len());
    let least = ranges.iter().map(|range| range.pages).min().unwrap_or(0);
    let uneven = ranges.iter().filter(|range| range.pages > least).count();
    let per_proc = match uneven {
        0 => least.to_string(),
        1 => format!("{least} (rank 0 maps {})", least + 1),
        _ => format!("{least} (ranks 0 to {} map {})", uneven - 1, least + 1),
    };
    let mut text = format!(
        "========== {title} ==========\n\
         Processes           : {procs}\n\
         Iterations          : {}\n\
         Pages total / iter  : {pages}\n\
         Pages per proc / iter: {per_proc}\n\n",
        plan.iters
    );
    let line = "+-----------------+-------------+\n";
    text += &format!("{line}| {:<15} | {:<11} |\n{line}", "Metric", "ms");
    if let Some(wall) = Wall::of(&times.wall) {
        let rows = [("mean wall", wall.mean), ("p95 wall", wall.p95), ("max wall", wall.max), ("min wall", wall.min)];
        for (name, value) in rows {
            text += &format!("| {name:<15} | {value:>11.3} |\n");
        }
    }
    text += line;
    if verbose {
        text += &iterations(times);
    }
    text + "\n"
}

/// A line for each iteration: the wall, and every rank's own time.
fn iterations(times: &CaseTimes) -> String {
    let in_ms = |ns: u64| to_f64(ns) / NS_PER_MS;
    let line = |(iteration, &wall): (usize, &u64)| {
        let ranks = times.ranks.iter().enumerate().filter_map(|(rank, samples)| {
            Some(format!("rank {rank} {:.3}", in_ms(*samples.values_ns().get(iteration)?)))
        });
        let ranks: Vec<String> = ranks.collect();
        format!("[iter {iteration:02}] wall {:.3} ms ({})\n", in_ms(wall), ranks.join(", "))
    };
    times.wall.values_ns().iter().enumerate().map(line).collect()
}

/// Who wants to run at the same time, and on what.
#[derive(Clone, Copy, Debug)]
struct Crowd {
    procs: u32,
    /// Threads of all processes.
    workers: u32,
    cores: usize,
}

/// What the figures say about the system below, in whole sentences.
fn meaning(backend: &str, crowd: Crowd, speedup: f64, slowdown: f64) -> String {
    let procs = f64::from(crowd.procs);
    let below = match backend {
        "cuda" => "the driver",
        "host" => "this machine",
        _ => {
            return "Fake memory makes no system call: this is our own bookkeeping, and how soon processes wake up.\n"
                .to_owned();
        }
    };
    if crowd.procs == 1 {
        return format!(
            "One process has nothing to overlap with: with --procs this shows whether {below} serialises.\n"
        );
    }
    let mut text = if speedup < NO_GAIN {
        format!("{below} serialises: {} processes together map no faster than one.\n", crowd.procs)
    } else if speedup >= ALMOST_IDEAL * procs {
        format!("{below} does not serialise: {} processes overlap almost perfectly.\n", crowd.procs)
    } else {
        format!(
            "{below} serialises in part: it is as if {:.0} % of the work were done for one process at a time.\n",
            serial_share(procs, speedup) * 100.0
        )
    };
    text[..1].make_ascii_uppercase();
    text += &format!(
        "A process takes x{slowdown:.2} as long for its N/P pages beside the others as alone (x1.00: they do not feel each \
         other, x{procs:.2}: they queue).\n"
    );
    if backend == "host" && usize::try_from(crowd.workers).is_ok_and(|workers| workers > crowd.cores) {
        text += &format!(
            "Host memory is zeroed by processors, and there are {} for {} workers: that alone makes them queue.\n",
            crowd.cores, crowd.workers
        );
    }
    text
}

/// The part of the work that only one process at a time can do, by Amdahl's law.
fn serial_share(procs: f64, speedup: f64) -> f64 {
    ((procs / speedup - 1.0) / (procs - 1.0)).clamp(0.0, 1.0)
}

/// Mean wall of one case over that of another one.
fn ratio(measured: &Measured, above: Case, below: Case) -> Option<f64> {
    let mean = |case| Some(measured.of(case).wall.percentiles()?.avg).filter(|&mean| mean > 0.0);
    Some(mean(above)? / mean(below)?)
}

fn pages_per_s(plan: &Plan, measured: &Measured, case: Case) -> Option<f64> {
    let mean_ns = measured.of(case).wall.percentiles()?.avg;
    (mean_ns > 0.0).then(|| f64::from(plan.pages_of(case)) / (mean_ns / 1e9))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOUR: Crowd = Crowd { procs: 4, workers: 4, cores: 64 };

    #[test]
    fn the_driver_serialises_wholly_in_part_or_not_at_all() {
        let wholly = meaning("cuda", FOUR, 1.04, 3.9);
        assert!(wholly.starts_with("The driver serialises: 4 processes together map no faster"), "{wholly}");
        // 1 / (s + (1 - s) / 4) = 1.32 for s = 0.68.
        let in_part = meaning("cuda", FOUR, 1.32, 3.04);
        assert!(in_part.contains("serialises in part") && in_part.contains("68 %"), "{in_part}");
        assert!(in_part.contains("takes x3.04 as long"), "{in_part}");
        let not = meaning("cuda", FOUR, 3.9, 1.02);
        assert!(not.starts_with("The driver does not serialise"), "{not}");
    }

    #[test]
    fn too_few_processors_are_named_where_they_matter() {
        let crowded = Crowd { cores: 2, ..FOUR };
        assert!(meaning("host", crowded, 1.9, 2.0).contains("there are 2 for 4 workers"));
        assert!(!meaning("cuda", crowded, 1.9, 2.0).contains("zeroed"));
        assert!(!meaning("host", FOUR, 1.9, 2.0).contains("zeroed"));
        assert!(meaning("host", Crowd { procs: 1, ..FOUR }, 1.0, 1.0).contains("nothing to overlap with"));
        assert!(meaning("fake", FOUR, 1.0, 1.0).contains("no system call"));
    }
}
