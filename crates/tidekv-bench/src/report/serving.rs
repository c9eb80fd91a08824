//! Servers under load: latency against rate, and memory beside latency on one axis of time.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::html::{Grid, Html};
use super::plot::axis::{Axis, Unit};
use super::plot::{Line, MAX_LINES, NARROW, Panel, Plot, Point, Style, WIDE};
use super::{Numbering, run_label, variants};
use crate::runs::Run;
use crate::statistics::median;
use crate::table::format_figure;

/// Metrics that are plotted against the rate: title, unit factor, and the names under which a file may have them.
const AGAINST_RATE: [(&str, Unit, f64, &[&str]); 6] = [
    ("Time to first token, median", Unit::Time, 1e6, &["ttft_p50", "median_ttft_ms"]),
    ("Time to first token, p99", Unit::Time, 1e6, &["ttft_p99", "p99_ttft_ms"]),
    ("Time between tokens, median", Unit::Time, 1e6, &["itl_p50", "median_itl_ms"]),
    ("Whole request, median", Unit::Time, 1e6, &["e2e_p50", "median_e2el_ms"]),
    ("Requests completed in a second", Unit::Number, 1.0, &["throughput", "request_throughput"]),
    ("Tokens made in a second", Unit::Number, 1.0, &["output_throughput"]),
];

/// The figures of a server that a table shows.
const HEADLINES: [(&str, &[&str]); 9] = [
    ("requests/s", &["throughput", "request_throughput"]),
    ("tokens/s", &["output_throughput"]),
    ("TTFT p50 (ms)", &["ttft_p50", "median_ttft_ms"]),
    ("TTFT p99 (ms)", &["ttft_p99", "p99_ttft_ms"]),
    ("ITL p50 (ms)", &["itl_p50", "median_itl_ms"]),
    ("ITL p99 (ms)", &["itl_p99", "p99_itl_ms"]),
    ("E2E p50 (ms)", &["e2e_p50", "median_e2el_ms"]),
    ("completed", &["completed"]),
    ("failed", &["failed"]),
];

/// Runs whose time axis is shown.
const MAX_TIMELINES: usize = 4;
/// Dots of one panel: more are one stain.
const MAX_DOTS: usize = 1500;

/// Everything about servers in these runs.
pub(super) fn html(runs: &[&Run], numbering: &mut Numbering) -> Html {
    let mut out = Html::new();
    if runs.iter().any(|run| run.is_serving()) {
        out.push(&headlines(runs).html());
    }
    let rates = against_rate(&sweep_points(runs));
    if !rates.is_empty() {
        out.element("h3", &[], &Html::text("Latency against rate"));
        out.open("div", &[("class", "plots")]);
        for plot in &rates {
            out.push(&plot.html(&numbering.next_id()));
        }
        out.close("div");
        out.push(&points_table(&rates).folded("The numbers behind these plots"));
    }
    for run in runs {
        out.push(&ratios(run, numbering));
    }
    out.push(&timelines(runs, numbering));
    out
}

/// The time axes of some runs: the first repeat of each variant, the highest rates first.
fn timelines(runs: &[&Run], numbering: &mut Numbering) -> Html {
    let mut firsts: Vec<(f64, &Run)> =
        variants::of(runs).iter().map(|variant| (variant.rate.unwrap_or(f64::INFINITY), variant.runs[0])).collect();
    firsts.sort_by(|a, b| b.0.total_cmp(&a.0));
    let with_axis: Vec<(&Run, Plot)> = firsts.into_iter().filter_map(|(_, run)| Some((run, timeline(run)?))).collect();
    let mut out = Html::new();
    if with_axis.is_empty() {
        return out;
    }
    out.element("h3", &[], &Html::text("Memory and latency over time"));
    for (run, plot) in with_axis.iter().take(MAX_TIMELINES) {
        out.push(&plot.html(&numbering.next_id()));
        out.push(&timeline_table(run, plot).folded("The numbers behind this plot, in ten steps"));
    }
    let all = runs.iter().filter(|run| run.extra.contains_key("timeline")).count();
    let left_out = all.saturating_sub(with_axis.len().min(MAX_TIMELINES));
    if left_out > 0 {
        let text = format!(
            "{left_out} more runs, repeats and lower rates, have a time axis and are left out: make a page of them alone."
        );
        out.element("p", &[("class", "note")], &Html::text(text));
    }
    out
}

fn headlines(runs: &[&Run]) -> Grid {
    let mut header = vec!["run", "KV memory", "rate"];
    header.extend(HEADLINES.map(|(name, _)| name));
    let mut grid = Grid::new("Figures of each run", &header);
    for run in runs.iter().filter(|run| run.is_serving()) {
        let rate = variants::rate_words(run);
        let mut row = vec![run_label(run), run.kv_mode().unwrap_or("-").to_owned(), rate.unwrap_or("-".to_owned())];
        row.extend(HEADLINES.map(|(_, names)| run.number(names).map_or("-".to_owned(), format_figure)));
        grid.row(row);
    }
    grid
}

/// A measurement at one rate.
struct SweepPoint {
    arm: String,
    rate: f64,
    fields: Map<String, Value>,
}

/// From runs at several rates, and from results that hold a whole sweep.
fn sweep_points(runs: &[&Run]) -> Vec<SweepPoint> {
    let mut points = Vec::new();
    for run in runs {
        if let (true, Some(rate)) = (run.is_serving(), variants::rate(run)) {
            let mut fields = run.serving.clone();
            let numbers = run.extra.iter().filter(|(_, value)| value.is_number());
            fields.extend(numbers.map(|(key, value)| (key.clone(), value.clone())));
            points.push(SweepPoint { arm: variants::arm(run, runs), rate, fields });
        }
        let rows = run.extra.get("sweep").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let profiles_differ = rows.windows(2).any(|pair| pair[0].get("profile") != pair[1].get("profile"));
        for row in rows {
            if let (Some(fields), Some(rate)) = (row.as_object(), row.get("request_rate").and_then(Value::as_f64)) {
                let mut arm = row.get("arm").map_or_else(|| run_label(run), super::words);
                if let (true, Some(profile)) = (profiles_differ, row.get("profile")) {
                    arm += &format!(", {}", super::words(profile));
                }
                points.push(SweepPoint { arm, rate, fields: fields.clone() });
            }
        }
    }
    points
}

/// One plot for each metric that has points at two rates or more; repeats become their median and what they span.
fn against_rate(points: &[SweepPoint]) -> Vec<Plot> {
    let mut arms: Vec<&str> = Vec::new();
    for point in points {
        if !arms.contains(&point.arm.as_str()) {
            arms.push(&point.arm);
        }
    }
    let plot = |(title, unit, factor, names): &(&str, Unit, f64, &[&str])| {
        let line = |(colour, arm): (usize, &&str)| {
            let mut by_rate: BTreeMap<u64, (f64, Vec<f64>)> = BTreeMap::new();
            for point in points.iter().filter(|point| point.arm == **arm && point.rate > 0.0 && point.rate.is_finite())
            {
                let value = names.iter().find_map(|name| point.fields.get(*name)?.as_f64());
                // Positive numbers are in the order of their bits.
                let place = by_rate.entry(point.rate.to_bits()).or_insert((point.rate, Vec::new()));
                place.1.extend(value.map(|value| value * factor));
            }
            let points = by_rate.values().filter_map(|(rate, values)| {
                let (low, high) = values.iter().fold((f64::MAX, f64::MIN), |(l, h), &v| (l.min(v), h.max(v)));
                Some(Point { x: *rate, y: median(values)?, range: Some((low, high)) })
            });
            Line { name: (*arm).to_owned(), points: points.collect(), style: Style::Points, colour }
        };
        let lines: Vec<Line> =
            arms.iter().take(MAX_LINES).enumerate().map(line).filter(|line| line.points.len() > 1).collect();
        let y = if *unit == Unit::Time { Axis::log("", *unit) } else { Axis::linear("", *unit) };
        (!lines.is_empty()).then(|| Plot {
            title: (*title).to_owned(),
            description: described(&lines, *unit, "requests a second"),
            x: rate_axis(&lines),
            panels: vec![Panel::new(y, lines)],
            width: NARROW,
        })
    };
    AGAINST_RATE.iter().filter_map(plot).collect()
}

/// With ticks at the rates that were measured, as long as they are few.
fn rate_axis(lines: &[Line]) -> Axis {
    let mut rates: Vec<f64> = lines.iter().flat_map(|line| &line.points).map(|point| point.x).collect();
    rates.sort_unstable_by(f64::total_cmp);
    rates.dedup();
    let mut axis = Axis::log("requests sent in a second", Unit::Number);
    // Not so near to each other that their names meet.
    let are_apart = rates.windows(2).all(|pair| pair[1] / pair[0] > 1.2);
    if rates.len() <= 10 && are_apart {
        axis.at = rates;
    }
    axis
}

/// The ends of each line in words.
fn described(lines: &[Line], unit: Unit, of_x: &str) -> String {
    let words = lines.iter().filter_map(|line| {
        let (first, last) = (line.points.first()?, line.points.last()?);
        let [from, to] =
            [first, last].map(|point| format!("{} at {} {of_x}", unit.format(point.y), format_figure(point.x)));
        Some(format!("{}: {from}, {to}.", line.name))
    });
    words.collect::<Vec<_>>().join(" ")
}

fn points_table(plots: &[Plot]) -> Grid {
    let mut grid =
        Grid::new("Medians of the repeats, and what they span", &["metric, arm", "rate", "median", "least", "most"]);
    for plot in plots {
        for line in plot.panels.iter().flat_map(|panel| &panel.lines) {
            let unit = plot.panels[0].y.unit;
            for point in &line.points {
                let (low, high) = point.range.unwrap_or((point.y, point.y));
                let mut row = vec![format!("{}, {}", plot.title, line.name), format_figure(point.x)];
                row.extend([point.y, low, high].map(|value| unit.format(value)));
                grid.row(row);
            }
        }
    }
    grid
}

/// `summary.rates[]` of an A/B benchmark: the ratio of the two arms with its interval, against the rate.
fn ratios(run: &Run, numbering: &mut Numbering) -> Html {
    let Some(rows) = run.summary.get("rates").and_then(Value::as_array) else {
        return Html::new();
    };
    let mut by_metric: BTreeMap<String, Vec<Point>> = BTreeMap::new();
    for row in rows.iter().filter_map(Value::as_object) {
        let Some(rate) = row.get("rate").and_then(Value::as_f64).filter(|rate| *rate > 0.0) else {
            continue;
        };
        for (key, value) in row {
            let (Some(metric), Some(y)) = (key.strip_suffix("_ratio"), value.as_f64()) else {
                continue;
            };
            let ends = row.get("ci").and_then(|ci| ci.get(metric)).and_then(Value::as_array);
            let range = ends.and_then(|ends| Some((ends.first()?.as_f64()?, ends.get(1)?.as_f64()?)));
            by_metric.entry(metric.to_owned()).or_default().push(Point { x: rate, y, range });
        }
    }
    let line =
        |(colour, (name, points)): (usize, (String, Vec<Point>))| Line { name, points, style: Style::Points, colour };
    let lines: Vec<Line> = by_metric.into_iter().take(MAX_LINES).enumerate().map(line).collect();
    if lines.is_empty() {
        return Html::new();
    }
    let mut grid = Grid::new("Ratios and their intervals", &["metric", "rate", "ratio", "low", "high"]);
    for line in &lines {
        for point in &line.points {
            let (low, high) = point.range.unwrap_or((point.y, point.y));
            let mut row = vec![line.name.clone(), format_figure(point.x)];
            row.extend([point.y, low, high].map(|value| format!("{value:.3}")));
            grid.row(row);
        }
    }
    let mut panel = Panel::new(Axis::around("second arm over first", Unit::Number), lines);
    panel.band = Some((0.97, 1.03));
    let plot = Plot {
        title: format!("{}: ratio of the two arms against rate", run_label(run)),
        description: format!(
            "The band is 3 % on both sides of 1. {}",
            described(&panel.lines, Unit::Number, "requests a second")
        ),
        x: rate_axis(&panel.lines),
        panels: vec![panel],
        width: WIDE,
    };
    let mut out = Html::new();
    out.push(&plot.html(&numbering.next_id())).push(&grid.folded("The numbers behind this plot"));
    out
}

/// What was sampled over time, a panel for each unit, and the latency of requests below on the same axis.
fn timeline(run: &Run) -> Option<Plot> {
    let mut panels = Vec::new();
    if let Some(timeline) = run.extra.get("timeline") {
        let times: Vec<Option<f64>> = numbers(timeline.get("t_s")?);
        let columns = timeline.get("columns").and_then(Value::as_object)?;
        for (unit, label) in [(Unit::Bytes, "memory"), (Unit::Percent, "percent"), (Unit::Number, "count")] {
            let of_unit = columns.iter().filter(|(name, _)| unit_of(name) == unit);
            let line = |(colour, (name, values)): (usize, (&String, &Value))| {
                let pairs =
                    times.iter().zip(numbers(values)).filter_map(|(t, value)| Some(Point::at((*t)? * 1e9, value?)));
                Line { name: name.clone(), points: pairs.collect(), style: Style::Steps, colour }
            };
            let moves = |line: &Line| line.points.iter().any(|point| point.y != 0.0);
            let lines: Vec<Line> = of_unit.enumerate().map(line).filter(moves).take(MAX_LINES).collect();
            if !lines.is_empty() {
                let mut panel = Panel::new(Axis::linear(label, unit), recoloured(lines));
                panel.height = if unit == Unit::Bytes { 220.0 } else { 110.0 };
                panels.push(panel);
            }
        }
    }
    let latency = request_dots(run);
    // Requests alone are what the distributions show already.
    if panels.is_empty() {
        return None;
    }
    if !latency.is_empty() {
        panels.push(Panel::new(Axis::log("time to first token", Unit::Time), latency));
    }
    let said =
        panels.iter().flat_map(|panel| panel.lines.iter().map(|line| (panel.y.unit, line))).map(|(unit, line)| {
            let (low, high) =
                line.points.iter().fold((f64::MAX, f64::MIN), |(l, h), point| (l.min(point.y), h.max(point.y)));
            format!("{}: {} to {}.", line.name, unit.format(low), unit.format(high))
        });
    Some(Plot {
        title: format!("{}: memory, and the time to the first token of each request", run_label(run)),
        description: said.collect::<Vec<_>>().join(" "),
        x: Axis::linear("since the first request", Unit::Time),
        panels,
        width: WIDE,
    })
}

fn recoloured(mut lines: Vec<Line>) -> Vec<Line> {
    lines.iter_mut().enumerate().for_each(|(colour, line)| line.colour = colour);
    lines
}

/// A dot for each request, a colour for each model.
fn request_dots(run: &Run) -> Vec<Line> {
    let Some(requests) = run.extra.get("requests").and_then(Value::as_object) else {
        return Vec::new();
    };
    let column = |name: &str| requests.get(name).map(numbers).unwrap_or_default();
    let (sent, ttft) = (column("intended_s"), column("ttft_ms"));
    let models = requests.get("model").and_then(Value::as_array);
    let every = sent.len().div_ceil(MAX_DOTS).max(1);
    let mut by_model: BTreeMap<String, Vec<Point>> = BTreeMap::new();
    for (row, (sent, ttft)) in sent.iter().zip(&ttft).enumerate().step_by(every) {
        let model = models.and_then(|models| models.get(row)).map_or_else(|| "requests".to_owned(), super::words);
        if let (Some(sent), Some(ttft)) = (sent, ttft) {
            by_model.entry(model).or_default().push(Point::at(sent * 1e9, ttft * 1e6));
        }
    }
    let line = |(colour, (model, points)): (usize, (String, Vec<Point>))| Line {
        name: format!("TTFT {model}"),
        points,
        style: Style::Dots,
        colour,
    };
    by_model.into_iter().take(MAX_LINES).enumerate().map(line).collect()
}

/// Ten moments of a time axis: what each line was at or before them.
fn timeline_table(run: &Run, plot: &Plot) -> Grid {
    let lines: Vec<(Unit, &Line)> =
        plot.panels.iter().flat_map(|panel| panel.lines.iter().map(|line| (panel.y.unit, line))).collect();
    let mut header = vec!["time"];
    header.extend(lines.iter().map(|(_, line)| line.name.as_str()));
    let mut grid = Grid::new(format!("{} over time", run_label(run)), &header);
    let end = lines.iter().flat_map(|(_, line)| &line.points).map(|point| point.x).fold(0.0, f64::max);
    for step in 0..=10 {
        let moment = end * f64::from(step) / 10.0;
        let mut row = vec![Unit::Time.format(moment)];
        row.extend(lines.iter().map(|(unit, line)| {
            let before = line.points.iter().rev().find(|point| point.x <= moment);
            before.map_or("-".to_owned(), |point| unit.format(point.y))
        }));
        grid.row(row);
    }
    grid
}

/// By the end of the name, as figures are named.
fn unit_of(name: &str) -> Unit {
    if name.ends_with("_bytes") {
        Unit::Bytes
    } else if name.ends_with("_percent") || name.ends_with("_perc") {
        Unit::Percent
    } else {
        Unit::Number
    }
}

fn numbers(list: &Value) -> Vec<Option<f64>> {
    list.as_array().into_iter().flatten().map(Value::as_f64).collect()
}
