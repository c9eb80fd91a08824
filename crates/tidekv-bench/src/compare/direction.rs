//! Which way is better: read from the name of a figure, by one rule.
//!
//! A figure is named by its path in `summary`, such as `layouts.slab.map_page_us_p50`. The path is read from
//! its end to its beginning, and the first part that says something decides. A part is split at `_` into
//! words, and the first line of this table that fits is what it says:
//!
//! | the part has                                                        | better  | examples |
//! |---------------------------------------------------------------------|---------|----------|
//! | the word `speedup`, `throughput`, `goodput` or `accuracy`           | higher  | `speedup_slab_over_per_layer` |
//! | the word `over` and no unit at the end: x divided by y, and the name does not say which of the two ought to be small | neither | `largest_over_smallest_pool` |
//! | `per` and then a unit of time; or a unit of bytes and then `s`; or `gibps` | higher | `blocks_per_s`, `copy_gib_s`, `ours_gibps` |
//! | before any `per`: a unit of time `ns us ms s`, or of bytes `bytes kib mib gib` | lower | `init_ms`, `map_us_per_gib`, `held_bytes` |
//! | before any `per`: a cost `waste calls error errors failed wrong lag growth`, or `ratio_to_raw`, `ratio_to_floor` | lower  | `driver_calls_per_page`, `map_ratio_to_raw` |
//! | before any `per`: a latency of a server `ttft tpot itl e2e e2el`    | lower   | `ttft_p50` |
//!
//! Everything else, `p50`, `k16` and numbers among it, says nothing. A figure whose whole path says nothing is
//! neutral: it is shown and never fails a comparison. So a benchmark that wants a figure guarded gives it a
//! name that says what it is.

use std::fmt;

use serde::Serialize;

/// Which way a figure is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// Times, bytes, waste.
    Lower,
    /// Rates and speed-ups.
    Higher,
    /// Neither: the figure describes.
    Neutral,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Lower => "lower",
            Self::Higher => "higher",
            Self::Neutral => "neutral",
        })
    }
}

const TIME_UNITS: [&str; 4] = ["ns", "us", "ms", "s"];
const BYTE_UNITS: [&str; 4] = ["bytes", "kib", "mib", "gib"];
const GAINS: [&str; 4] = ["speedup", "throughput", "goodput", "accuracy"];
const COSTS: [&str; 13] =
    ["waste", "calls", "error", "errors", "failed", "wrong", "lag", "growth", "ttft", "tpot", "itl", "e2e", "e2el"];

/// The direction of the figure at `path`.
pub fn of_path(path: &[String]) -> Direction {
    path.iter().rev().find_map(|part| of_part(part)).unwrap_or(Direction::Neutral)
}

/// What one part of a path says, or `None` when it says nothing.
fn of_part(part: &str) -> Option<Direction> {
    let words: Vec<&str> = part.split('_').collect();
    let any_of = |words: &[&str], list: &[&str]| words.iter().any(|word| list.contains(word));
    if any_of(&words, &GAINS) {
        return Some(Direction::Higher);
    }
    // `over_budget_bytes` is a size, not a ratio.
    let is_measured = words.last().is_some_and(|word| TIME_UNITS.contains(word) || BYTE_UNITS.contains(word));
    if words.contains(&"over") && !is_measured {
        return Some(Direction::Neutral);
    }
    let is_rate = words.windows(2).any(|pair| {
        (pair[0] == "per" && TIME_UNITS.contains(&pair[1])) || (BYTE_UNITS.contains(&pair[0]) && pair[1] == "s")
    });
    let is_rate = is_rate || words.contains(&"gibps");
    if is_rate {
        return Some(Direction::Higher);
    }
    // `map_us_per_gib` is a time, not a size: what stands behind `per` is what it is counted in.
    let counted = words.split(|word| *word == "per").next().unwrap_or_default();
    let is_ratio = counted.windows(3).any(|three| matches!(three, ["ratio", "to", "raw" | "floor"]));
    let is_cost = any_of(counted, &TIME_UNITS) || any_of(counted, &BYTE_UNITS) || any_of(counted, &COSTS);
    (is_cost || is_ratio).then_some(Direction::Lower)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn direction(path: &str) -> Direction {
        of_path(&path.split('.').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn names_of_our_benchmarks() {
        for (path, expected) in [
            ("alloc_free_ns.k16.p50", Direction::Lower),
            ("map_ratio_to_raw", Direction::Lower),
            ("cadence.ratio_to_floor", Direction::Lower),
            ("layouts.slab.map_page_us_p50", Direction::Lower),
            ("layouts.slab.map_us_per_gib", Direction::Lower),
            ("layouts.slab.driver_calls_per_page", Direction::Lower),
            ("layouts.per-layer.init_ms", Direction::Lower),
            ("send_lag_ms.p99", Direction::Lower),
            ("startup_s", Direction::Lower),
            ("held_bytes", Direction::Lower),
            ("waste", Direction::Lower),
            ("bytes_per_token", Direction::Lower),
            ("blocks_per_s", Direction::Higher),
            ("copy_gib_s.p50", Direction::Higher),
            ("sizes.3.ours_gibps", Direction::Higher),
            ("sizes.3.kb", Direction::Neutral),
            ("wrong", Direction::Lower),
            ("growth_10_to_10000", Direction::Lower),
            ("request_throughput", Direction::Higher),
            ("slab.speedup", Direction::Higher),
            ("speedup_slab_over_per_layer", Direction::Higher),
            ("largest_over_smallest_pool.k16", Direction::Neutral),
            ("pools.1000.k16.p50", Direction::Neutral),
            ("core_alloc_free_ns.k16.p50", Direction::Lower),
            ("share_error", Direction::Lower),
            ("over_budget_bytes", Direction::Lower),
            ("grant_ms.p99", Direction::Lower),
            ("threads8_over_1", Direction::Neutral),
            ("pages", Direction::Neutral),
            ("completed", Direction::Neutral),
            ("failed", Direction::Lower),
            ("ttft_p50", Direction::Lower),
            ("p99.9_e2el_ms", Direction::Lower),
            ("max_output_tokens_per_s", Direction::Higher),
            ("ttft_mean_speedup", Direction::Higher),
            ("ci.ttft_p99_speedup.0", Direction::Higher),
            ("models.model-1.ttft_p99_speedup", Direction::Higher),
            ("elastic_over_unlimited.ttft_mean_ratio", Direction::Lower),
            ("rates.0.ttft_p50_ratio", Direction::Lower),
            ("rates.0.throughput_ratio", Direction::Higher),
            ("duration", Direction::Neutral),
        ] {
            assert_eq!(direction(path), expected, "{path}");
        }
    }

    #[test]
    fn the_part_nearest_to_the_figure_decides() {
        assert_eq!(direction("serve_ms.tokens_per_s"), Direction::Higher);
        assert_eq!(direction("rates_per_s.setup_ms"), Direction::Lower);
        assert_eq!(direction("times_ns.largest_over_smallest"), Direction::Neutral);
        assert_eq!(direction("times_ns.0.3"), Direction::Lower, "elements of an array say nothing");
    }

    #[test]
    fn a_unit_is_a_whole_word() {
        for name in ["columns", "models", "status", "gibberish", "class"] {
            assert_eq!(direction(name), Direction::Neutral, "{name}");
        }
    }
}
