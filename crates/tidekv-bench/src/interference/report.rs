//! Figures and tables.

use serde_json::{Map, Value, json};
use tidekv_core::units::Bytes;

use super::MapRate;
use super::judge::{FIGURES, Judgement, RateVerdict};
use super::plan::Plan;
use crate::compare::judge::Verdict;
use crate::compare::ratios::{add_ratios, ratio_cell};
use crate::result::BenchResult;
use crate::servers::drive::Answers;
use crate::stats::{Samples, to_f64};
use crate::table::{Table, Tone, format_figure, format_ns};

/// The sides, as results call them.
const SIDES: [&str; 2] = ["quiet", "mapping"];

pub(super) fn fill(result: &mut BenchResult, plan: &Plan, judged: &Judgement) {
    let rates: Vec<Value> = judged.rates.iter().map(|rate| of_rate(plan, rate)).collect();
    result.summary.insert("rates".to_owned(), rates.into());
    result.set_figure("failed", to_f64(judged.failed as u64));
    result.set_text("verdict", &judged.verdict());
    result.set_partial(judged.is_partial);
    for rate in &judged.rates {
        let place = match rate.rate {
            MapRate::Pages(pages) => format!("rate{pages}"),
            MapRate::Max => "max".to_owned(),
        };
        for (side, [medians, tails]) in SIDES.iter().zip(&rate.slices) {
            result.add_times(format!("{place}.{side}.itl_p50"), medians);
            result.add_times(format!("{place}.{side}.itl_p99"), tails);
        }
        result.add_times(format!("{place}.map"), &rate.neighbour.map);
        result.add_times(format!("{place}.unmap"), &rate.neighbour.unmap);
    }
}

fn of_rate(plan: &Plan, rate: &RateVerdict) -> Value {
    let mut entry = Map::from_iter([("map_rate".to_owned(), json!(rate.rate))]);
    add_ratios(&mut entry, FIGURES.iter().map(|figure| figure.name).zip(rate.figures));
    for (name, answers) in SIDES.iter().zip(&rate.sides) {
        entry.insert((*name).to_owned(), side(answers));
    }
    let per_s = rate.neighbour.pages_per_s;
    entry.insert("mapped_pages_per_s".to_owned(), per_s.into());
    entry.insert("mapped_gib_per_s".to_owned(), gib_per_s(plan, per_s).into());
    for (name, times) in [("map_us", &rate.neighbour.map), ("unmap_us", &rate.neighbour.unmap)] {
        if let Some(found) = times.percentiles() {
            entry.insert(name.to_owned(), json!({"p50": to_f64(found.p50) / 1e3, "p99": to_f64(found.p99) / 1e3}));
        }
    }
    entry.into()
}

fn gib_per_s(plan: &Plan, pages_per_s: f64) -> f64 {
    pages_per_s * to_f64(plan.page_bytes) / to_f64(Bytes::gib(1).0)
}

fn side(answers: &Answers) -> Value {
    let mut figures = Map::new();
    if let Some(found) = answers.itl.percentiles() {
        figures.insert("itl_p50_ms".to_owned(), (to_f64(found.p50) / 1e6).into());
        figures.insert("itl_p99_ms".to_owned(), (to_f64(found.p99) / 1e6).into());
    }
    if let Some(per_s) = answers.tokens_per_s() {
        figures.insert("tokens_per_s".to_owned(), per_s.into());
    }
    figures.into()
}

/// Ratios, sides, and what the neighbour did.
pub(super) fn tables(plan: &Plan, judged: &Judgement) -> String {
    let mut ratios = Table::new(&["pages mapped", "ITL p50", "ITL p99", "tokens/s", "interference"]);
    let mut sides = Table::new(&["pages mapped", "side", "ITL p50", "ITL p99", "tokens/s"]);
    let mut neighbour =
        Table::new(&["pages mapped", "pages/s", "GiB/s", "map p50", "map p99", "unmap p50", "unmap p99"]);
    for rate in &judged.rates {
        let mut row = vec![rate.rate.to_string()];
        row.extend(rate.figures.map(ratio_cell));
        let (word, tone) = match rate.verdict() {
            Verdict::Worse => ("yes", Some(Tone::Bad)),
            Verdict::Underpowered => ("underpowered", None),
            _ => ("none", Some(Tone::Good)),
        };
        row.push(word.to_owned());
        ratios.coloured_row(&row, tone);
        for (name, answers) in SIDES.iter().zip(&rate.sides) {
            let tokens = answers.tokens_per_s().map_or_else(|| "-".to_owned(), format_figure);
            let name = (*name).to_owned();
            sides.row(&[rate.rate.to_string(), name, time(&answers.itl, 50), time(&answers.itl, 99), tokens]);
        }
        let done = &rate.neighbour;
        neighbour.row(&[
            rate.rate.to_string(),
            format_figure(done.pages_per_s),
            format_figure(gib_per_s(plan, done.pages_per_s)),
            time(&done.map, 50),
            time(&done.map, 99),
            time(&done.unmap, 50),
            time(&done.unmap, 99),
        ]);
    }
    format!(
        "{} on {}: {} streams of {} tokens, beside pages of {}, {} at a time{}\n\n{}\n{}\n{}\n\
         Mapping over quiet: {} pairs of slices and the 95 % interval over pairs.\nVerdict: {}\n",
        plan.model,
        plan.backend.name(),
        plan.streams,
        plan.lengths.output,
        Bytes(plan.page_bytes),
        plan.map_batch,
        if plan.touch { ", written" } else { "" },
        ratios.render(),
        sides.render(),
        neighbour.render(),
        plan.pairs,
        judged.verdict()
    )
}

fn time(times: &Samples, percent: usize) -> String {
    times.percentile(percent).map_or_else(|| "-".to_owned(), |ns| format_ns(to_f64(ns)))
}
