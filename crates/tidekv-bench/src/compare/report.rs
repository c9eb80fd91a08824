//! A comparison as people read it, and as programs do.
//!
//! ```text
//!   alloc: B over A
//!
//!   | figure                | better |  A |   B |  B/A | verdict |
//!   |-----------------------|--------|----|-----|------|---------|
//!   | alloc_free_ns.k16.p50 |  lower | 90 | 112 | 1.24 |   worse |
//!
//!   1 figure: 0 better, 1 worse, 0 same within 10 %.
//! ```

use std::fmt::Write;

use super::judge::Verdict;
use super::{Compared, Comparison};
use crate::result::{self, ResultError};
use crate::table::{Table, Tone, format_figure};

impl Comparison {
    /// One JSON object. A ratio that is not a number is `null`.
    pub fn to_json(&self) -> Result<String, ResultError> {
        result::render(self)
    }

    /// The table and what follows from it.
    pub fn to_text(&self) -> String {
        let mut text = format!("{}: B over A\n\n", self.name);
        if !self.figures.is_empty() {
            text += &self.table().render();
            text += "\n";
        }
        text += &self.missing_lines();
        text += &self.last_lines();
        text
    }

    fn table(&self) -> Table {
        let mut table = Table::new(&["figure", "better", "A", "B", "B/A", "verdict"]);
        for figure in &self.figures {
            let tone = match figure.verdict {
                Verdict::Better => Some(Tone::Good),
                Verdict::Worse => Some(Tone::Bad),
                Verdict::Same | Verdict::Changed => None,
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
        let count = |verdict| self.figures.iter().filter(|figure| figure.verdict == verdict).count();
        let mut text = format!(
            "{} compared: {} better, {} worse, {} changed without a direction, {} the same within {}\n",
            self.figures.len(),
            count(Verdict::Better),
            count(Verdict::Worse),
            count(Verdict::Changed),
            count(Verdict::Same),
            self.tolerance,
        );
        if self.failed {
            let (worse, missing) = (count(Verdict::Worse), self.missing_in_b.len());
            // Writing to a string cannot fail.
            let _ = writeln!(text, "FAILED: {worse} worse by more than {}, {missing} missing in B", self.tolerance);
        }
        text
    }
}

fn row(figure: &Compared) -> [String; 6] {
    // Three decimals, because ratios of interest are near 1; `-` where there is no ratio.
    let ratio = match figure.ratio {
        Some(ratio) if (0.01..1000.0).contains(&ratio.abs()) => format!("{ratio:.3}"),
        Some(ratio) => format_figure(ratio),
        None => "-".to_owned(),
    };
    let [a, b] = [figure.a, figure.b].map(format_figure);
    [figure.path.clone(), figure.better.to_string(), a, b, ratio, figure.verdict.to_string()]
}
