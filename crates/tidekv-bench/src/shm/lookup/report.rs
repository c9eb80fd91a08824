//! From times to figures and lines.

use super::Plan;
use super::handles::{Growth, HandleTimes};
use super::strategies::Search;
use crate::result::BenchResult;
use crate::shm::chunks::{Chunks, Figure, mark};
use crate::table::{Table, format_figure, format_ns};

/// Puts samples and figures into the result, and answers the lines.
pub(super) fn fill(
    result: &mut BenchResult,
    plan: &Plan,
    searches: &[Search],
    ours: &HandleTimes,
    growth: &Growth,
    wrong: u64,
) -> String {
    for search in searches {
        result.add_times(format!("{}.batch", search.key), search.chunks.samples());
        set(result, &format!("{}_ns", search.key), &search.chunks);
    }
    result.add_times("ours.batch", ours.independent.samples());
    result.add_times("ours_dependent.batch", ours.dependent.samples());
    set(result, "ours_ns", &ours.independent);
    set(result, "ours_dependent_ns", &ours.dependent);
    set(result, "ours_10_ns", &growth.few.independent);
    if let Ok(many) = &growth.many {
        set(result, "ours_10000_ns", &many.independent);
    }
    if let Some(speedup) = linear_over_ours(searches, ours) {
        result.set_figure("speedup", speedup);
    }
    if let Some(factor) = growth.factor() {
        result.set_figure("growth_10_to_10000", factor);
    }
    result.summary.insert("wrong".to_owned(), wrong.into());
    lines(plan, searches, ours, growth, wrong)
}

fn set(result: &mut BenchResult, path: &str, chunks: &Chunks) {
    if let Some(figure) = chunks.figure() {
        result.set_figure(path, figure.p50_ns);
    }
}

fn linear_over_ours(searches: &[Search], ours: &HandleTimes) -> Option<f64> {
    let linear = searches.iter().find(|search| search.key == "linear")?.chunks.figure()?;
    Some(linear.p50_ns / ours.independent.figure()?.p50_ns)
}

fn lines(plan: &Plan, searches: &[Search], ours: &HandleTimes, growth: &Growth, wrong: u64) -> String {
    let Plan { num_segments, num_lookups, segment_size_mb, .. } = plan;
    let mut text = format!(
        "\n=== SHM Address Lookup Benchmark ===\nNumber of segments: {num_segments}\nNumber of lookups: {num_lookups}\n\
         Segment size: {segment_size_mb} MB\n"
    );
    for search in searches {
        if let Some(figure) = search.chunks.figure() {
            text += &section(search.heading, search.found, *num_lookups, figure);
        }
    }
    if let Some(figure) = ours.independent.figure() {
        text += &section("Arena Handle (O(1), validity checked)", ours.found, *num_lookups, figure);
    }
    if let Some(figure) = ours.dependent.figure() {
        text += &format!("Each waiting for the one before: {:.2} ns{}\n", figure.p50_ns, mark(figure.resolved));
    }
    text += &summary(searches, ours, growth);
    text + &format!("every lookup was checked: {wrong} wrong\n")
}

fn section(heading: &str, found: u64, lookups: u32, figure: Figure) -> String {
    let total_ms = figure.p50_ns * f64::from(lookups) / 1e6;
    format!(
        "\n--- {heading} ---\nFound: {found} / {lookups}\nTotal time: {total_ms:.2} ms\n\
         Avg time per lookup: {:.2} ns{}\nThroughput: {:.2} lookups/sec\n",
        figure.p50_ns,
        mark(figure.resolved),
        1e9 / figure.p50_ns
    )
}

fn summary(searches: &[Search], ours: &HandleTimes, growth: &Growth) -> String {
    let linear = searches.iter().find(|search| search.key == "linear").and_then(|search| search.chunks.figure());
    let mut table = Table::new(&["strategy", "p10", "p50", "p99", "linear / this"]);
    let mut add = |name: String, chunks: &Chunks| {
        let Some(figure) = chunks.figure() else { return };
        let over = linear.map_or("-".to_owned(), |linear| format!("{}x", format_figure(linear.p50_ns / figure.p50_ns)));
        let [p10, p50, p99] = [figure.p10_ns, figure.p50_ns, figure.p99_ns].map(format_ns);
        table.row(&[name, p10, p50 + mark(figure.resolved), p99, over]);
    };
    for search in searches {
        add(search.key.to_owned(), &search.chunks);
    }
    add("handle".to_owned(), &ours.independent);
    add("handle, dependent".to_owned(), &ours.dependent);
    for times in [&growth.few].into_iter().chain(&growth.many) {
        add(format!("handle, {} segments", times.segments), &times.independent);
    }
    let mut text = format!("\n--- Summary ---\n{}", table.render());
    if let Some(speedup) = linear_over_ours(searches, ours) {
        text += &format!("Measured speedup over the linear scan: {}x\n", format_figure(speedup));
    }
    let factor = growth.factor().map_or("-".to_owned(), |factor| format!("{factor:.2}"));
    let factor = growth.many.as_ref().map_or_else(|reason| format!("not measured: {reason}"), |_| factor);
    text + &format!("Growth from 10 to 10000 segments (the same number of blocks): {factor}\n")
}
