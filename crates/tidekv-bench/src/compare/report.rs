//! A comparison as people read it, and as programs do.
//!
//! ```text
//!   Throughput: 99.42%
//!   TTFT: 104.10%
//!
//!   serve: B over A, medians of 5 and 5 runs
//!
//!   | figure         | better |   A |   B |   B/A | 95 % interval  | noise A, B   |       verdict |
//!   |----------------|--------|-----|-----|-------|----------------|--------------|---------------|
//!   | median_ttft_ms |  lower | 100 | 104 | 1.041 | 1.022 to 1.058 | 0.9 %, 1.1 % |         worse |
//!
//!   1 compared: 0 better, 1 worse, ...
//! ```
//!
//! With one run a side there are no intervals and no columns for them.

use std::fmt::Write;

use super::comparison::{Compared, Comparison, RunEvidence};
use super::judge::Verdict;
use crate::result::{self, ResultError};
use crate::table::{Table, Tone, format_figure};

/// More runs than this are no advice: what helps is less noise.
const MAX_RUNS: usize = 200;

/// How many figures that could not be judged get a line of advice each.
const MAX_ADVICE: usize = 5;

impl Comparison {
    /// One JSON object. A ratio that is not a number is `null`.
    pub fn to_json(&self) -> Result<String, ResultError> {
        result::render(self)
    }

    /// The table and what follows from it.
    pub fn to_text(&self) -> String {
        let mut text = self.headline_lines();
        text += &match self.runs {
            [1, 1] => format!("{}: B over A\n\n", self.name),
            [a, b] => format!("{}: B over A, medians of {a} and {b} runs\n\n", self.name),
        };
        if !self.figures.is_empty() {
            text += &self.table().render();
            text += "\n";
        }
        text += &self.missing_lines();
        text += &self.last_lines();
        text
    }

    fn headline_lines(&self) -> String {
        let Some(headline) = self.headline else {
            return String::new();
        };
        let line = |name, ratio: Option<f64>| ratio.map(|ratio| format!("{name}: {:.2}%\n", ratio * 100.0));
        let lines = [line("Throughput", headline.throughput), line("TTFT", headline.ttft)];
        let lines: String = lines.into_iter().flatten().collect();
        if lines.is_empty() { lines } else { lines + "\n" }
    }

    fn table(&self) -> Table {
        let confidence = self.confidence.map(percent).unwrap_or_default();
        let mut table = if self.has_intervals() {
            let interval = format!("{confidence} interval");
            Table::new(&["figure", "better", "A", "B", "B/A", &interval, "noise A, B", "verdict"])
        } else {
            Table::new(&["figure", "better", "A", "B", "B/A", "verdict"])
        };
        for figure in &self.figures {
            let tone = match figure.verdict {
                Verdict::Better => Some(Tone::Good),
                Verdict::Worse => Some(Tone::Bad),
                Verdict::Same | Verdict::Changed | Verdict::NoDifference | Verdict::Underpowered => None,
            };
            table.coloured_row(&row(figure), tone);
        }
        table
    }

    fn missing_lines(&self) -> String {
        let line = |paths: &[String], side| match paths {
            [] => String::new(),
            paths => format!("missing in {side}: {}\n", paths.join(", ")),
        };
        line(&self.missing_in_b, "B") + &line(&self.missing_in_a, "A")
    }

    fn last_lines(&self) -> String {
        let tolerance = percent(self.tolerance);
        let counts =
            [(Verdict::Better, "better"), (Verdict::Worse, "worse"), (Verdict::Changed, "changed without a direction")]
                .map(|(verdict, words)| format!("{} {words}", self.count(verdict)));
        let mut text = format!("{} compared: {}, ", self.figures.len(), counts.join(", "));
        // Writing to a string cannot fail.
        let _ = if self.has_intervals() {
            let (none, open) = (self.count(Verdict::NoDifference), self.count(Verdict::Underpowered));
            writeln!(text, "{none} without a difference above {tolerance}, {open} underpowered")
        } else {
            writeln!(text, "{} the same within {tolerance}", self.count(Verdict::Same))
        };
        text += &self.advice();
        if self.failed && self.has_intervals() {
            let (open, missing) = (self.count_not_passed(), self.missing_in_b.len());
            let _ = writeln!(text, "FAILED: {open} may be worse by more than {tolerance}, {missing} missing in B");
        } else if self.failed {
            let (worse, missing) = (self.count(Verdict::Worse), self.missing_in_b.len());
            let _ = writeln!(text, "FAILED: {worse} worse by more than {tolerance}, {missing} missing in B");
        }
        text
    }

    /// What it would take to know more.
    fn advice(&self) -> String {
        if !self.has_intervals() {
            let is_measured =
                self.headline.is_some() && self.figures.iter().any(|figure| figure.verdict != Verdict::Same);
            let advice =
                "One run a side says nothing about noise: give several, A1.json A2.json ... -- B1.json B2.json ...\n";
            return if is_measured { advice.to_owned() } else { String::new() };
        }
        let open = self.figures.iter().filter(|figure| figure.verdict == Verdict::Underpowered);
        let lines: Vec<String> = open.filter_map(|figure| advice_for(figure, self.tolerance)).collect();
        let more = lines.len().saturating_sub(MAX_ADVICE);
        let mut text: String = lines.into_iter().take(MAX_ADVICE).collect();
        if more > 0 {
            let _ =
                writeln!(text, "... and {more} more that are underpowered; --only NAME looks at some figures alone");
        }
        text
    }
}

fn advice_for(figure: &Compared, tolerance: f64) -> Option<String> {
    let RunEvidence { detectable, runs_needed, .. } = figure.evidence?;
    let mut line = format!("{}: ", figure.path);
    match detectable.filter(|share| *share > 0.0) {
        Some(share) => line += &format!("with this noise so many runs show changes from about {} on", percent(share)),
        None => line += "too few runs to tell",
    }
    match runs_needed.filter(|&runs| runs <= MAX_RUNS) {
        Some(runs) => line += &format!("; {} takes about {runs} runs a side\n", percent(tolerance)),
        None => line += "; measure longer runs, or on a quieter machine\n",
    }
    Some(line)
}

fn row(figure: &Compared) -> Vec<String> {
    let [a, b] = [figure.a, figure.b].map(format_figure);
    let ratio = figure.ratio.map_or("-".to_owned(), format_ratio);
    let mut cells = vec![figure.path.clone(), figure.better.to_string(), a, b, ratio];
    if let Some(evidence) = figure.evidence {
        let ends = |format: fn(f64) -> String| {
            evidence.interval.map(|interval| format!("{} to {}", format(interval.low), format(interval.high)))
        };
        let interval = if evidence.is_difference { ends(|end| format!("{:+.3}", end)) } else { ends(format_ratio) };
        let noise = evidence.noise.map(|share| share.map_or("-".to_owned(), percent));
        cells.extend([interval.unwrap_or("-".to_owned()), noise.join(", ")]);
    }
    cells.push(figure.verdict.to_string());
    cells
}

/// Three decimals, because ratios of interest are near 1.
fn format_ratio(ratio: f64) -> String {
    if (0.01..1000.0).contains(&ratio.abs()) { format!("{ratio:.3}") } else { format_figure(ratio) }
}

/// A share with at most two digits behind the point: `3 %`, `0.25 %`.
fn percent(share: f64) -> String {
    let hundredths = (share * 1e4).round() / 1e2;
    format!("{hundredths} %")
}
