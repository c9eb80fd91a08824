//! From samples to figures and tables.

use super::elastic::{AVAILABLE_BATCH, ElasticTimes, SLOW_PAGE, THREADS_K};
use super::{BATCH, Measurement, Side};
use crate::result::BenchResult;
use crate::stats::{Samples, median_ratio, to_f64};
use crate::table::{Table, format_figure, format_ns};

/// Times of one pair.
#[derive(Clone, Copy, Debug, PartialEq)]
struct PairTimes {
    p50_ns: f64,
    p99_ns: f64,
}

impl PairTimes {
    /// Percentiles of batches, divided by the pairs of a batch. `None` where nothing was measured.
    fn of(batches: &Samples) -> Option<Self> {
        Self::of_batches(batches, BATCH)
    }

    fn of_batches(batches: &Samples, batch: u32) -> Option<Self> {
        let percentiles = batches.percentiles()?;
        let per_pair = |batch_ns| to_f64(batch_ns) / f64::from(batch);
        Some(Self { p50_ns: per_pair(percentiles.p50), p99_ns: per_pair(percentiles.p99) })
    }

    /// The slower of two, percentile by percentile.
    fn worse(self, other: Self) -> Self {
        Self { p50_ns: self.p50_ns.max(other.p50_ns), p99_ns: self.p99_ns.max(other.p99_ns) }
    }
}

/// Puts samples and figures into the result.
pub(super) fn fill(result: &mut BenchResult, measurements: &[Measurement], elastic: &ElasticTimes) {
    fill_side(result, measurements, Side::Pool, "");
    fill_elastic(result, elastic);
    fill_side(result, measurements, Side::Core, "core_");
}

fn fill_side(result: &mut BenchResult, measurements: &[Measurement], side: Side, prefix: &str) {
    let measurements: Vec<&Measurement> = measurements.iter().filter(|measured| measured.side == side).collect();
    for Measurement { blocks, k, alloc_free, replace, .. } in &measurements {
        result.add_times(format!("{prefix}blocks{blocks}.k{k}.alloc_free_batch"), alloc_free);
        result.add_times(format!("{prefix}blocks{blocks}.k{k}.replace_batch"), replace);
    }
    let worst_of = |k, samples: fn(&Measurement) -> &Samples| {
        let of_k = measurements.iter().filter(|measurement| measurement.k == k);
        of_k.filter_map(|measurement| PairTimes::of(samples(measurement))).reduce(PairTimes::worse)
    };
    let mut sizes_of_request: Vec<u32> = measurements.iter().map(|measurement| measurement.k).collect();
    sizes_of_request.dedup();
    for &k in &sizes_of_request {
        set(result, &format!("{prefix}alloc_free_ns.k{k}"), worst_of(k, |measurement| &measurement.alloc_free));
    }
    for &k in &sizes_of_request {
        set(result, &format!("{prefix}replace_ns.k{k}"), worst_of(k, |measurement| &measurement.replace));
    }
    for Measurement { blocks, k, alloc_free, replace, .. } in &measurements {
        set(result, &format!("{prefix}pools.{blocks}.k{k}"), PairTimes::of(alloc_free));
        set(result, &format!("{prefix}pools.{blocks}.replace_k{k}"), PairTimes::of(replace));
    }
    for &k in &sizes_of_request {
        if let Some(ratio) = largest_over_smallest(&measurements, k) {
            result.set_figure(&format!("{prefix}largest_over_smallest_pool.k{k}"), ratio);
        }
    }
}

fn fill_elastic(result: &mut BenchResult, elastic: &ElasticTimes) {
    result.add_times("available_batch", &elastic.available);
    result.add_times("slow_path", &elastic.slow_path);
    set(result, "available_ns", PairTimes::of_batches(&elastic.available, AVAILABLE_BATCH));
    for rate in &elastic.rates {
        result.set_figure(&format!("threads.{}.pairs_per_s", rate.threads), rate.pairs_per_s);
        if let Some(ratio) = elastic.over_one(rate) {
            result.set_figure(&format!("threads{}_over_1", rate.threads), ratio);
        }
    }
    if let Some(percentiles) = elastic.slow_path.percentiles() {
        result.set_figure("slow_path_us.p50", to_f64(percentiles.p50) / 1e3);
        result.set_figure("slow_path_us.p99", to_f64(percentiles.p99) / 1e3);
    }
}

fn set(result: &mut BenchResult, path: &str, times: Option<PairTimes>) {
    if let Some(times) = times {
        result.set_figure(&format!("{path}.p50"), times.p50_ns);
        result.set_figure(&format!("{path}.p99"), times.p99_ns);
    }
}

/// `None` for a single pool: one is not larger than itself.
fn largest_over_smallest(measurements: &[&Measurement], k: u32) -> Option<f64> {
    let of_k = || measurements.iter().filter(|measurement| measurement.k == k);
    let largest = of_k().max_by_key(|measurement| measurement.blocks)?;
    let smallest = of_k().min_by_key(|measurement| measurement.blocks)?;
    let several = largest.blocks > smallest.blocks;
    several.then(|| median_ratio(&largest.alloc_free, &smallest.alloc_free))?
}

/// One row for each pool and k, and a line for every other question.
pub(super) fn tables(measurements: &[Measurement], elastic: &ElasticTimes) -> String {
    let mut text = String::new();
    for (side, title) in [(Side::Pool, "KvPool"), (Side::Core, "the bare allocator inside it")] {
        text += &format!("{title}\n{}\n", side_table(measurements, side));
    }
    text += &format!("Time of one pair, from batches of {BATCH}.\n");
    if let Some(times) = PairTimes::of_batches(&elastic.available, AVAILABLE_BATCH) {
        text += &format!("\navailable(): {} (p99 {})\n", format_ns(times.p50_ns), format_ns(times.p99_ns));
    }
    for rate in &elastic.rates {
        let ratio = elastic.over_one(rate).map_or(String::new(), |ratio| format!(" (x{})", format_figure(ratio)));
        let plural = if rate.threads == 1 { "" } else { "s" };
        let pairs = format_figure(rate.pairs_per_s / 1e6);
        text +=
            &format!("{} thread{plural}: {pairs} million pairs of {THREADS_K} blocks a second{ratio}\n", rate.threads);
    }
    if let Some(percentiles) = elastic.slow_path.percentiles() {
        let [p50, p99] = [percentiles.p50, percentiles.p99].map(|time| format_ns(to_f64(time)));
        text += &format!("an allocation that maps a page of {SLOW_PAGE}: {p50} (p99 {p99})\n");
    }
    text
}

fn side_table(measurements: &[Measurement], side: Side) -> String {
    let mut table = Table::new(&["pool, k", "alloc+free p50", "p99", "replace p50", "p99"]);
    for Measurement { blocks, k, alloc_free, replace, .. } in
        measurements.iter().filter(|measured| measured.side == side)
    {
        let [pair, replaced] = [alloc_free, replace].map(|batches| {
            let absent = || ["-".to_owned(), "-".to_owned()];
            PairTimes::of(batches).map_or_else(absent, |times| [format_ns(times.p50_ns), format_ns(times.p99_ns)])
        });
        let [[pair_p50, pair_p99], [replaced_p50, replaced_p99]] = [pair, replaced];
        let name = format!("{blocks} blocks, k = {k}");
        table.row(&[name, pair_p50, pair_p99, replaced_p50, replaced_p99]);
    }
    table.render()
}
