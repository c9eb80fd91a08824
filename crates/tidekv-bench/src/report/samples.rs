//! Distributions: how many of all measurements were at most so long.

use std::collections::BTreeMap;

use super::html::{Grid, Html};
use super::plot::axis::{Axis, Unit};
use super::plot::{Line, MAX_LINES, NARROW, Panel, Plot, Point, Style};
use super::{Numbering, run_label, variants};
use crate::result::Series;
use crate::runs::Run;
use crate::stats::{Samples, to_f64};

/// The most plots of one benchmark: the table has the rest.
const MAX_PLOTS: usize = 8;
/// Points of a curve. More could not be told apart.
const MAX_POINTS: usize = 240;
/// The name of a batch of operations, which is no part of what was measured.
const BATCH: &str = ".batch";

/// All distributions of some runs of one benchmark: plots, and a table of every series.
pub(super) fn html(runs: &[&Run], numbering: &mut Numbering) -> Html {
    let mut out = Html::new();
    let table = percentiles(runs);
    if table.rows.is_empty() {
        return out;
    }
    out.element("h3", &[], &Html::text("Distributions"));
    let plots = if runs.len() > 1 { across_variants(runs) } else { within_a_run(runs) };
    let left_out = plots.len().saturating_sub(MAX_PLOTS);
    out.open("div", &[("class", "plots")]);
    for plot in plots.iter().take(MAX_PLOTS) {
        out.push(&plot.html(&numbering.next_id()));
    }
    out.close("div");
    if left_out > 0 {
        out.element(
            "p",
            &[("class", "note")],
            &Html::text(format!("{left_out} more plots are left out; the table has their figures.")),
        );
    }
    out.push(&table.folded(&format!("Percentiles of all {} series", table.rows.len())));
    out
}

/// Several runs: a plot for each series, a line for each variant. Repeats are one sample.
fn across_variants(runs: &[&Run]) -> Vec<Plot> {
    let mut by_series: BTreeMap<&str, Vec<(String, Series)>> = BTreeMap::new();
    for variant in variants::of(runs) {
        for name in variant.runs[0].samples.keys() {
            let repeats: Vec<&Series> = variant.runs.iter().filter_map(|run| run.samples.get(name)).collect();
            by_series.entry(name).or_default().extend(pooled(&repeats).map(|series| (variant.label.clone(), series)));
        }
    }
    by_series.iter().filter_map(|(name, lines)| plot(name, lines)).collect()
}

/// All values of some repeats.
fn pooled(repeats: &[&Series]) -> Option<Series> {
    let (first, rest) = repeats.split_first()?;
    if rest.is_empty() {
        return Some((*first).clone());
    }
    let all: Samples = repeats.iter().flat_map(|series| series.values.iter().copied()).collect();
    Series::of_times(&all).map(|series| Series { unit: first.unit.clone(), ..series })
}

/// One run: series that differ in the last part of their names share a plot.
fn within_a_run(runs: &[&Run]) -> Vec<Plot> {
    let mut by_place: BTreeMap<&str, Vec<(String, Series)>> = BTreeMap::new();
    for (name, series) in runs.iter().flat_map(|run| &run.samples) {
        let short = name.strip_suffix(BATCH).unwrap_or(name);
        let (place, last) = short.rsplit_once('.').unwrap_or(("", short));
        by_place.entry(place).or_default().push((last.to_owned(), series.clone()));
    }
    by_place.iter().filter_map(|(place, lines)| plot(place, lines)).collect()
}

fn plot(name: &str, series: &[(String, Series)]) -> Option<Plot> {
    let unit = &series.first()?.1.unit;
    let same_unit: Vec<&(String, Series)> = series.iter().filter(|(_, series)| series.unit == *unit).collect();
    let lines = same_unit.iter().take(MAX_LINES).enumerate().map(|(colour, (name, series))| Line {
        name: name.clone(),
        points: curve(series),
        style: Style::Steps,
        colour,
    });
    let lines: Vec<Line> = lines.filter(|line| line.points.len() > 1).collect();
    if lines.is_empty() {
        return None;
    }
    let name = if name.is_empty() { "all operations" } else { name };
    let left_out = same_unit.len().saturating_sub(MAX_LINES);
    let title =
        if left_out == 0 { name.to_owned() } else { format!("{name} (first {MAX_LINES} of {})", same_unit.len()) };
    let said = lines.iter().zip(&same_unit).map(|(line, (_, series))| {
        let [p50, p99] = [series.percentiles.p50, series.percentiles.p99].map(|value| format_value(series, value));
        format!("{}: half at most {p50}, 99 of 100 at most {p99}.", line.name)
    });
    let x = if unit == "ns" { Axis::log("time", Unit::Time) } else { Axis::log(unit, Unit::Number) };
    Some(Plot {
        title,
        description: format!("Share of measurements at or below a value. {}", said.collect::<Vec<_>>().join(" ")),
        x,
        panels: vec![Panel::new(Axis::linear("at most so long", Unit::Percent), lines)],
        width: NARROW,
    })
}

/// The share of all values at or below each of some of them.
fn curve(series: &Series) -> Vec<Point> {
    let mut sorted: Vec<u64> = series.values.iter().copied().filter(|&value| value > 0).collect();
    sorted.sort_unstable();
    let Some(last) = sorted.len().checked_sub(1) else {
        return Vec::new();
    };
    let points = sorted.len().min(MAX_POINTS);
    let rank = |i: usize| if points == 1 { 0 } else { i * last / (points - 1) };
    let count = |rank: usize| to_f64(u64::try_from(rank + 1).unwrap_or(u64::MAX));
    let at = |rank: usize| Point::at(to_f64(sorted[rank]), count(rank) / count(last) * 100.0);
    std::iter::once(Point::at(to_f64(sorted[0]), 0.0)).chain((0..points).map(|i| at(rank(i)))).collect()
}

fn percentiles(runs: &[&Run]) -> Grid {
    let mut grid =
        Grid::new("Percentiles of every series", &["series", "count", "min", "mean", "p50", "p90", "p99", "max"]);
    for run in runs {
        for (name, series) in &run.samples {
            let p = series.percentiles;
            let name = if runs.len() > 1 { format!("{}: {name}", run_label(run)) } else { name.clone() };
            let unit = if series.unit == "ns" { Unit::Time } else { Unit::Number };
            let mut row = vec![name, p.count.to_string(), format_value(series, p.min), unit.format(p.avg)];
            row.extend([p.p50, p.p90, p.p99, p.max].map(|value| format_value(series, value)));
            grid.row(row);
        }
    }
    grid
}

fn format_value(series: &Series, value: u64) -> String {
    if series.unit == "ns" { Unit::Time.format(to_f64(value)) } else { format!("{value} {}", series.unit) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_goes_from_nothing_to_all() {
        let series = Series::of_times(&(1..=1000).rev().collect::<Samples>()).unwrap();
        let curve = curve(&series);
        assert_eq!((curve[0], curve[curve.len() - 1]), (Point::at(1.0, 0.0), Point::at(1000.0, 100.0)));
        assert!(curve.len() <= MAX_POINTS + 1);
        assert!(curve.windows(2).all(|pair| pair[0].x <= pair[1].x && pair[0].y <= pair[1].y));
        let middle = curve.iter().find(|point| point.y >= 50.0).unwrap();
        assert!((495.0..=505.0).contains(&middle.x), "{middle:?}");
    }
}
