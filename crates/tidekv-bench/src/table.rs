//! Tables for people.
//!
//! ```text
//!   | operation   |     avg |     p50 |     p90 |     p99 |     max |
//!   |-------------|---------|---------|---------|---------|---------|
//!   | map 2 MiB   | 33.1 us | 31.2 us | 35.0 us | 61.7 us | 1.20 ms |
//!   | unmap 2 MiB | 24.6 us | 24.0 us | 26.1 us | 40.2 us |  212 us |
//! ```
//!
//! The lines are Markdown: they read well in a terminal, survive a pipe, `grep` and a paste into an issue.
//! Times have three significant digits and the unit that keeps them short. Colour is used for verdicts only,
//! and only on a terminal without `NO_COLOR`.

use std::env;
use std::fmt;
use std::io::{self, IsTerminal};

use comfy_table::presets::ASCII_MARKDOWN;
use comfy_table::{Cell, CellAlignment, Color, ContentArrangement};

use crate::stats::{Percentiles, to_f64};

/// A table whose first column is text and whose other columns are figures.
#[derive(Debug)]
pub struct Table {
    inner: comfy_table::Table,
    columns: usize,
}

impl Table {
    /// An empty table under `header`.
    pub fn new<S: fmt::Display>(header: &[S]) -> Self {
        let mut inner = comfy_table::Table::new();
        inner.load_style(ASCII_MARKDOWN).set_content_arrangement(ContentArrangement::Disabled);
        inner.set_header(header.iter().map(Cell::new));
        for column in inner.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        if colour_wanted() {
            inner.enforce_styling();
        } else {
            inner.force_no_tty();
        }
        Self { inner, columns: header.len() }
    }

    /// Adds a row.
    pub fn row<S: fmt::Display>(&mut self, cells: &[S]) {
        self.coloured_row(cells, None);
    }

    /// Adds a row whose last cell has a tone where colour is used at all.
    pub fn coloured_row<S: fmt::Display>(&mut self, cells: &[S], tone: Option<Tone>) {
        debug_assert_eq!(cells.len(), self.columns, "a row has one cell for each column");
        let last = cells.len().saturating_sub(1);
        self.inner.add_row(cells.iter().enumerate().map(|(i, text)| {
            let cell = Cell::new(text);
            match tone {
                Some(Tone::Good) if i == last => cell.fg(Color::Green),
                Some(Tone::Bad) if i == last => cell.fg(Color::Red),
                _ => cell,
            }
        }));
    }

    /// The lines of the table, each ended by a newline.
    pub fn render(&self) -> String {
        self.inner.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
    }
}

/// What a coloured cell says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// Green.
    Good,
    /// Red.
    Bad,
}

/// The usual table of a benchmark: one operation a row, its percentiles beside it. Times are in nanoseconds.
pub fn latency_table<'a>(rows: impl IntoIterator<Item = (&'a str, Percentiles)>) -> Table {
    let mut table = Table::new(&["operation", "avg", "p50", "p90", "p99", "max"]);
    for (operation, times) in rows {
        let [p50, p90, p99, max] = [times.p50, times.p90, times.p99, times.max].map(|time| format_ns(to_f64(time)));
        table.row(&[operation.to_owned(), format_ns(times.avg), p50, p90, p99, max]);
    }
    table
}

/// A time with three significant digits (four where rounding to three would cut whole units) and its unit:
/// `0.750 ns`, `16.4 ns`, `842 ns`, `31.2 us`, `1.20 ms`, `2.50 s`, `3600 s`.
pub fn format_ns(nanoseconds: f64) -> String {
    const UNITS: [(&str, f64); 4] = [("ns", 1.0), ("us", 1e3), ("ms", 1e6), ("s", 1e9)];
    // The largest unit in which the time does not round below 1.
    let unit = UNITS.iter().rev().find(|(_, scale)| nanoseconds.abs() >= scale * 0.9995).unwrap_or(&UNITS[0]);
    format!("{} {}", format_figure(nanoseconds / unit.1), unit.0)
}

/// A number with three significant digits, and never fewer than its whole part has.
pub fn format_figure(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        m if !(0.000_999_5..1e9).contains(&m) => format!("{value:.2e}"),
        m if m < 0.009_995 => format!("{value:.5}"),
        m if m < 0.099_95 => format!("{value:.4}"),
        m if m < 0.9995 => format!("{value:.3}"),
        m if m < 9.995 => format!("{value:.2}"),
        m if m < 99.95 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

fn colour_wanted() -> bool {
    // https://no-color.org: present and not empty, whatever its value.
    let refused = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    !refused && io::stdout().is_terminal()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn times_as_people_read_them() {
        for (ns, text) in [
            (0.0, "0 ns"),
            (0.75, "0.750 ns"),
            (7.0, "7.00 ns"),
            (16.42, "16.4 ns"),
            (842.0, "842 ns"),
            (999.4, "999 ns"),
            (999.6, "1.00 us"),
            (31_240.0, "31.2 us"),
            (1_200_000.0, "1.20 ms"),
            (999_960_000.0, "1.00 s"),
            (2.5e9, "2.50 s"),
            (3.6e12, "3600 s"),
        ] {
            assert_eq!(format_ns(ns), text, "{ns}");
        }
    }

    #[test]
    fn figures_from_tiny_to_huge() {
        for (value, text) in [
            (0.0, "0"),
            (0.000_01, "1.00e-5"),
            (0.001, "0.00100"),
            (0.0312, "0.0312"),
            (0.5, "0.500"),
            (0.9996, "1.00"),
            (-1.25, "-1.25"),
            (9.996, "10.0"),
            (99.96, "100"),
            (1234.0, "1234"),
            (2e9, "2.00e9"),
        ] {
            assert_eq!(format_figure(value), text, "{value}");
        }
    }

    #[test]
    fn a_latency_table_is_markdown_and_fits_a_narrow_terminal() {
        let times = (1..=100u64).map(|i| i * 1000).collect::<crate::stats::Samples>().percentiles().unwrap();
        let text = latency_table([("map 2 MiB", times), ("unmap", times)]).render();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "| operation |     avg |     p50 |     p90 |     p99 |    max |");
        assert!(lines[1].starts_with("|----") && lines[1].ends_with("--|"), "{text}");
        assert_eq!(lines[2], "| map 2 MiB | 50.5 us | 50.0 us | 90.0 us | 99.0 us | 100 us |");
        assert_eq!(lines.len(), 4);
        assert!(!text.contains('\u{1b}'), "no colour codes outside a terminal");
    }

    proptest! {
        /// Three significant digits: what is printed is within half a percent of what was measured.
        #[test]
        fn printing_loses_no_more_than_half_a_percent(ns in 0.001..1e15f64) {
            let text = format_ns(ns);
            let (number, unit) = text.split_once(' ').unwrap();
            let scale = match unit { "ns" => 1.0, "us" => 1e3, "ms" => 1e6, "s" => 1e9, other => panic!("{other}") };
            let back = number.parse::<f64>().unwrap() * scale;
            prop_assert!((back - ns).abs() <= ns * 0.0051, "{} printed as {}", ns, text);
            prop_assert!(text.len() <= 10, "{}", text);
        }
    }
}
