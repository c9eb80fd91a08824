//! From samples to figures and tables.

use super::{BATCH, Measurement};
use crate::result::BenchResult;
use crate::stats::{Samples, median_ratio, to_f64};
use crate::table::{Table, format_ns};

/// Times of one pair.
#[derive(Clone, Copy, Debug, PartialEq)]
struct PairTimes {
    p50_ns: f64,
    p99_ns: f64,
}

impl PairTimes {
    /// Percentiles of batches, divided by the pairs of a batch. `None` where nothing was measured.
    fn of(batches: &Samples) -> Option<Self> {
        let percentiles = batches.percentiles()?;
        let per_pair = |batch_ns| to_f64(batch_ns) / f64::from(BATCH);
        Some(Self { p50_ns: per_pair(percentiles.p50), p99_ns: per_pair(percentiles.p99) })
    }

    /// The slower of two, percentile by percentile.
    fn worse(self, other: Self) -> Self {
        Self { p50_ns: self.p50_ns.max(other.p50_ns), p99_ns: self.p99_ns.max(other.p99_ns) }
    }
}

/// Puts samples and figures into the result.
pub(super) fn fill(result: &mut BenchResult, measurements: &[Measurement]) {
    for Measurement { blocks, k, alloc_free, replace } in measurements {
        result.add_times(format!("blocks{blocks}.k{k}.alloc_free_batch"), alloc_free);
        result.add_times(format!("blocks{blocks}.k{k}.replace_batch"), replace);
    }
    let worst_of = |k, samples: fn(&Measurement) -> &Samples| {
        let of_k = measurements.iter().filter(|measurement| measurement.k == k);
        of_k.filter_map(|measurement| PairTimes::of(samples(measurement))).reduce(PairTimes::worse)
    };
    let mut sizes_of_request: Vec<u32> = measurements.iter().map(|measurement| measurement.k).collect();
    sizes_of_request.dedup();
    for &k in &sizes_of_request {
        set(result, &format!("alloc_free_ns.k{k}"), worst_of(k, |measurement| &measurement.alloc_free));
    }
    for &k in &sizes_of_request {
        set(result, &format!("replace_ns.k{k}"), worst_of(k, |measurement| &measurement.replace));
    }
    for Measurement { blocks, k, alloc_free, replace } in measurements {
        set(result, &format!("pools.{blocks}.k{k}"), PairTimes::of(alloc_free));
        set(result, &format!("pools.{blocks}.replace_k{k}"), PairTimes::of(replace));
    }
    for &k in &sizes_of_request {
        if let Some(ratio) = largest_over_smallest(measurements, k) {
            result.set_figure(&format!("largest_over_smallest_pool.k{k}"), ratio);
        }
    }
}

fn set(result: &mut BenchResult, path: &str, times: Option<PairTimes>) {
    if let Some(times) = times {
        result.set_figure(&format!("{path}.p50"), times.p50_ns);
        result.set_figure(&format!("{path}.p99"), times.p99_ns);
    }
}

/// `None` for a single pool: one is not larger than itself.
fn largest_over_smallest(measurements: &[Measurement], k: u32) -> Option<f64> {
    let of_k = || measurements.iter().filter(|measurement| measurement.k == k);
    let largest = of_k().max_by_key(|measurement| measurement.blocks)?;
    let smallest = of_k().min_by_key(|measurement| measurement.blocks)?;
    let several = largest.blocks > smallest.blocks;
    several.then(|| median_ratio(&largest.alloc_free, &smallest.alloc_free))?
}

/// One row for each pool and k.
pub(super) fn tables(measurements: &[Measurement]) -> String {
    let mut table = Table::new(&["pool, k", "alloc+free p50", "p99", "replace p50", "p99"]);
    for Measurement { blocks, k, alloc_free, replace } in measurements {
        let [pair, replaced] = [alloc_free, replace].map(|batches| {
            let absent = || ["-".to_owned(), "-".to_owned()];
            PairTimes::of(batches).map_or_else(absent, |times| [format_ns(times.p50_ns), format_ns(times.p99_ns)])
        });
        let [[pair_p50, pair_p99], [replaced_p50, replaced_p99]] = [pair, replaced];
        let name = format!("{blocks} blocks, k = {k}");
        table.row(&[name, pair_p50, pair_p99, replaced_p50, replaced_p99]);
    }
    format!("{}\nTime of one pair, from batches of {BATCH}.\n", table.render())
}
