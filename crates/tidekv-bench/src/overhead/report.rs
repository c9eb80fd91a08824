//! Figures and tables.

use serde_json::{Map, Value, json};

use super::judge::{CellVerdict, FIGURES, Figures, Judgement};
use super::measure::{Block, Measured, Pair};
use super::plan::{Plan, Point};
use crate::compare::judge::{Judged, Verdict};
use crate::compare::ratios::{add_ratios, ratio_cell, worst};
use crate::result::BenchResult;
use crate::servers::drive::Answers;
use crate::servers::memory::MemorySummary;
use crate::stats::{Samples, to_f64};
use crate::table::{Table, Tone, format_figure, format_ns};

/// All slices of one side at one point, the first or the second.
pub(crate) fn together<'a>(pairs: impl IntoIterator<Item = &'a Pair>, side: usize) -> Answers {
    all_of(pairs.into_iter().map(|pair| &pair.sides[side]))
}

/// Several slices as if they were one.
pub(crate) fn all_of<'a>(slices: impl IntoIterator<Item = &'a Answers>) -> Answers {
    let (mut all, mut memory) = (Answers::default(), Vec::new());
    for slice in slices {
        all.extend(slice);
        memory.extend(slice.memory);
    }
    all.memory = MemorySummary::over(memory.into_iter());
    all
}

pub(super) fn fill(result: &mut BenchResult, plan: &Plan, measured: &Measured, judged: &Judgement) {
    let mut profiles: Vec<Value> = Vec::new();
    for (index, profile) in plan.profiles.iter().enumerate() {
        let cells = judged.cells.iter().zip(&measured.cells).filter(|(cell, _)| cell.cell.profile == index);
        let rates: Vec<Value> = cells.map(|(cell, blocks)| point(plan, cell, blocks)).collect();
        profiles.push(json!({"name": profile.name, "lengths": profile.lengths, "rates": rates}));
    }
    result.set_more("sweep", sweep(plan, measured, judged));
    if let Some(first) = profiles.first() {
        result.summary.insert("rates".to_owned(), first["rates"].clone());
    }
    result.summary.insert("profiles".to_owned(), profiles.into());
    result.set_figure("failed", to_f64(judged.failed as u64));
    result.set_figure("starts", f64::from(measured.starts));
    result.set_figure("elapsed_s", measured.elapsed.as_secs_f64());
    result.set_text("verdict", &judged.verdict());
    for (cell, blocks) in judged.cells.iter().zip(&measured.cells) {
        for (side, name) in plan.names.iter().enumerate() {
            let all = together(blocks.iter().flatten(), side);
            let place = format!("{}.{}.{name}", plan.profiles[cell.cell.profile].name, label(cell.cell.point));
            for (figure, times) in [("ttft", &all.ttft), ("itl", &all.mean_itl), ("e2e", &all.e2e)] {
                result.add_times(format!("{place}.{figure}"), times);
            }
        }
    }
}

/// One row for each round and side: what `kvbench report` plots.
fn sweep(plan: &Plan, measured: &Measured, judged: &Judgement) -> Vec<Value> {
    let mut rows = Vec::new();
    for (cell, blocks) in judged.cells.iter().zip(&measured.cells) {
        for (side, name) in plan.names.iter().enumerate() {
            for (repeat, block) in blocks.iter().enumerate() {
                let slice = together(block, side);
                let mut row = Map::from_iter([
                    ("profile".to_owned(), plan.profiles[cell.cell.profile].name.into()),
                    ("arm".to_owned(), (*name).into()),
                    ("repeat".to_owned(), repeat.into()),
                ]);
                row.insert("request_rate".to_owned(), request_rate(cell.cell.point));
                row.extend(slice.requests_per_s().map(|value| ("throughput".to_owned(), value.into())));
                for (figure, times, percent) in [
                    ("ttft_p50", &slice.ttft, 50),
                    ("ttft_p99", &slice.ttft, 99),
                    ("itl_p50", &slice.mean_itl, 50),
                    ("e2e_p50", &slice.e2e, 50),
                ] {
                    row.extend(times.percentile(percent).map(|ns| (figure.to_owned(), (to_f64(ns) / 1e6).into())));
                }
                rows.push(row.into());
            }
        }
    }
    rows
}

/// One row for each pair of slices: the times of its requests with A and with B, the same request at the same place.
pub(super) fn pairs(plan: &Plan, measured: &Measured) -> Vec<Value> {
    // To the microsecond: more is noise, and takes twice the room.
    let ms = |times: &Samples| times.values_ns().iter().map(|&ns| to_f64(ns / 1000) / 1e3).collect::<Vec<f64>>();
    let times = |slice: &Answers| {
        json!({"ttft_ms": ms(&slice.ttft), "itl_mean_ms": ms(&slice.mean_itl), "e2e_ms": ms(&slice.e2e),
               "seconds": slice.duration.as_secs_f64()})
    };
    let mut rows = Vec::new();
    for (cell, blocks) in plan.cells().into_iter().zip(&measured.cells) {
        for (round, block) in blocks.iter().enumerate() {
            for (place, pair) in block.iter().enumerate() {
                let [a, b] = &pair.sides;
                rows.push(json!({
                    "profile": plan.profiles[cell.profile].name, "request_rate": request_rate(cell.point),
                    "round": round, "pair": place, "first": plan.names[pair.first.index()],
                    plan.names[0]: times(a), plan.names[1]: times(b),
                }));
            }
        }
    }
    rows
}

fn request_rate(point: Point) -> Value {
    match point {
        Point::Rate(rate) => rate.into(),
        Point::Saturated(_) => "inf".into(),
    }
}

fn label(point: Point) -> String {
    match point {
        Point::Rate(rate) => rate.to_string(),
        Point::Saturated(_) => "inf".to_owned(),
    }
}

/// One entry of `rates`.
fn point(plan: &Plan, cell: &CellVerdict, blocks: &[Block]) -> Value {
    let mut entry = Map::new();
    match cell.cell.point {
        Point::Rate(rate) => entry.insert("rate".to_owned(), rate.into()),
        Point::Saturated(under_way) => {
            entry.insert("concurrency".to_owned(), under_way.into());
            entry.insert("rate".to_owned(), "inf".into())
        }
    };
    entry.insert("rounds".to_owned(), blocks.len().into());
    entry.insert("pairs".to_owned(), blocks.iter().map(Vec::len).sum::<usize>().into());
    add_ratios(&mut entry, named(&cell.figures));
    for (place, name) in plan.names.iter().enumerate() {
        entry.insert((*name).to_owned(), side(&together(blocks.iter().flatten(), place)));
    }
    entry.into()
}

/// A side's own figures.
pub(crate) fn side(all: &Answers) -> Value {
    let mut figures = Map::new();
    let mut set = |name: &str, value: Option<f64>| {
        if let Some(value) = value.filter(|value| value.is_finite()) {
            figures.insert(name.to_owned(), value.into());
        }
    };
    set("requests_per_s", all.requests_per_s());
    set("tokens_per_s", all.tokens_per_s());
    for (name, times) in [("ttft", &all.ttft), ("itl", &all.mean_itl), ("e2e", &all.e2e)] {
        let Some(percentiles) = times.percentiles() else { continue };
        set(&format!("{name}_p50_ms"), Some(to_f64(percentiles.p50) / 1e6));
        set(&format!("{name}_p99_ms"), Some(to_f64(percentiles.p99) / 1e6));
    }
    if let Some(memory) = all.memory {
        set("kv_used_mean_bytes", Some(memory.mean.used));
        set("kv_used_peak_bytes", Some(memory.peak.used));
        set("kv_held_mean_bytes", Some(memory.mean.held));
        set("kv_held_peak_bytes", Some(memory.peak.held));
        set("kv_utilization", memory.utilization());
    }
    figures.into()
}

/// A table for each profile, and the verdict.
pub(super) fn tables(plan: &Plan, measured: &Measured, judged: &Judgement) -> String {
    let mut text = format!("A {} ({}), B {} ({})\n", plan.names[0], plan.a, plan.names[1], plan.b);
    for (index, profile) in plan.profiles.iter().enumerate() {
        let lengths = profile.lengths;
        text += &format!("\n{}: {} tokens in, {} out\n\n", profile.name, lengths.input, lengths.output);
        let cells = || judged.cells.iter().zip(&measured.cells).filter(|(cell, _)| cell.cell.profile == index);
        text += &ratios(plan, &mut cells());
        text += "\n";
        text += &values(plan, &mut cells());
    }
    let pairs: usize = measured.cells.iter().flatten().map(Vec::len).sum();
    text += &format!(
        "\nB over A: the median of the requests, each compared with itself, and its 95 % interval by signed ranks of the rounds.\n\
         {pairs} pairs of slices in {:.0} s; servers were started {} times.\nVerdict: {}\n",
        measured.elapsed.as_secs_f64(),
        measured.starts,
        judged.verdict()
    );
    text
}

type Cells<'a> = dyn Iterator<Item = (&'a CellVerdict, &'a Vec<Block>)> + 'a;

fn ratios(plan: &Plan, cells: &mut Cells<'_>) -> String {
    let header = format!("{} / {}", plan.names[1], plan.names[0]);
    let mut table = Table::new(&[header.as_str(), "throughput", "TTFT p50", "ITL p50", "E2E p50", "verdict"]);
    for (cell, _) in cells {
        let mut row = vec![point_name(cell.cell.point)];
        row.extend(cell.figures.map(ratio_cell));
        let (word, tone) = row_verdict(&cell.figures);
        row.push(word.to_owned());
        table.coloured_row(&row, tone);
    }
    table.render()
}

/// The figures with their names, as results have them.
pub(crate) fn named(figures: &Figures) -> impl Iterator<Item = (&'static str, Option<Judged>)> {
    FIGURES.iter().map(|figure| figure.name).zip(*figures)
}

/// The last cell of a row, and its colour.
pub(crate) fn row_verdict(figures: &Figures) -> (&'static str, Option<Tone>) {
    match worst(figures) {
        Verdict::Worse => ("overhead", Some(Tone::Bad)),
        Verdict::Underpowered => ("underpowered", None),
        _ => ("none", Some(Tone::Good)),
    }
}

fn values(plan: &Plan, cells: &mut Cells<'_>) -> String {
    let mut table = Table::new(&VALUE_HEADER);
    for (cell, blocks) in cells {
        for (side, name) in plan.names.iter().enumerate() {
            let all = together(blocks.iter().flatten(), side);
            table.row(&value_row(point_name(cell.cell.point), name, &all));
        }
    }
    table.render()
}

/// Above [`value_row`].
pub(crate) const VALUE_HEADER: [&str; 10] =
    ["", "side", "req/s", "tok/s", "TTFT p50", "ITL p50", "E2E p50", "E2E p99", "KV used / held (mean)", "(peak)"];

/// A side's own figures, as a table has them.
pub(crate) fn value_row(place: String, side: &str, all: &Answers) -> [String; VALUE_HEADER.len()] {
    let missing = || "-".to_owned();
    let figure = |value: Option<f64>| value.map_or_else(missing, format_figure);
    let time = |times: &Samples, percent| times.percentile(percent).map_or_else(missing, |ns| format_ns(to_f64(ns)));
    let [mean, peak] = memory_cells(all.memory);
    [
        place,
        side.to_owned(),
        figure(all.requests_per_s()),
        figure(all.tokens_per_s()),
        time(&all.ttft, 50),
        time(&all.mean_itl, 50),
        time(&all.e2e, 50),
        time(&all.e2e, 99),
        mean,
        peak,
    ]
}

/// Used over held in MiB, mean and peak.
fn memory_cells(memory: Option<MemorySummary>) -> [String; 2] {
    let Some(memory) = memory else { return ["-", "-"].map(str::to_owned) };
    let mib = |bytes: f64| format_figure(bytes / f64::from(1 << 20));
    let percent = memory.utilization().map_or_else(String::new, |part| format!(" ({:.0} %)", part * 100.0));
    [
        format!("{} / {} MiB{percent}", mib(memory.mean.used), mib(memory.mean.held)),
        format!("{} / {} MiB", mib(memory.peak.used), mib(memory.peak.held)),
    ]
}

fn point_name(point: Point) -> String {
    match point {
        Point::Rate(rate) => format!("{rate}/s"),
        Point::Saturated(under_way) => format!("saturated ({under_way})"),
    }
}
