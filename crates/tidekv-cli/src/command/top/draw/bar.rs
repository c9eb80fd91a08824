//! Bars: lengths in proportion, and a mark.
//!
//! ```text
//!   [############====++------|---]      kvcached's characters: # in use, = reserve, - free
//!    in use      idle wanted free       and ours: + wanted, | the mark, > more than the whole
//! ```
//!
//! Each part ends where the sum of all parts up to it ends, rounded: no part is off by more than half a cell, and the
//! parts together never are either.

use ratatui::style::Style;
use ratatui::text::Span;
use tidekv_core::units::Bytes;

use super::theme::Theme;

/// A bar in the making.
#[derive(Debug)]
pub(super) struct Bar {
    cells: Vec<(char, Style)>,
    whole: Bytes,
    filled: u128,
    end: usize,
    free: (char, Style),
}

impl Bar {
    /// An empty bar of so many columns, brackets included, that stands for `whole`.
    pub(super) fn new(columns: usize, whole: Bytes, theme: Theme) -> Self {
        let free = ('-', theme.free());
        Self { cells: vec![free; columns.saturating_sub(2)], whole, filled: 0, end: 0, free }
    }

    /// Appends a part.
    pub(super) fn part(mut self, bytes: Bytes, character: char, style: Style) -> Self {
        self.filled += u128::from(bytes.0);
        let end = self.place_rounded(self.filled);
        for cell in &mut self.cells[self.end.min(end)..end] {
            *cell = (character, style);
        }
        self.end = end;
        self
    }

    /// A part at the right end; what is there already goes first.
    pub(super) fn part_from_right(mut self, bytes: Bytes, character: char, style: Style) -> Self {
        let start = self.cells.len() - self.place_rounded(u128::from(bytes.0));
        for cell in self.cells[start..].iter_mut().filter(|cell| **cell == self.free) {
            *cell = (character, style);
        }
        self
    }

    /// A `|` where `at` is; at the end if that is beyond it.
    pub(super) fn mark(mut self, at: Bytes, style: Style) -> Self {
        let place = self.place(u128::from(at.0)).min(self.cells.len().saturating_sub(1));
        if self.whole != Bytes::ZERO
            && let Some(cell) = self.cells.get_mut(place)
        {
            *cell = ('|', style);
        }
        self
    }

    /// Says with a `>` at the end if `bytes` are more than the whole.
    pub(super) fn overflow(mut self, bytes: Bytes, style: Style) -> Self {
        if bytes > self.whole
            && let Some(cell) = self.cells.last_mut()
        {
            *cell = ('>', style);
        }
        self
    }

    /// As it is drawn, with brackets.
    pub(super) fn spans(self) -> Vec<Span<'static>> {
        let mut spans = vec![Span::raw("[")];
        for run in self.cells.chunk_by(|a, b| a.1 == b.1) {
            spans.push(Span::styled(run.iter().map(|(character, _)| character).collect::<String>(), run[0].1));
        }
        spans.push(Span::raw("]"));
        spans
    }

    fn place_rounded(&self, bytes: u128) -> usize {
        self.scaled(bytes, u128::from(self.whole.0) / 2)
    }

    fn place(&self, bytes: u128) -> usize {
        self.scaled(bytes, 0)
    }

    fn scaled(&self, bytes: u128, rounding: u128) -> usize {
        let whole = u128::from(self.whole.0);
        let cells = self.cells.len();
        if whole == 0 {
            return 0;
        }
        usize::try_from((bytes.min(whole) * cells as u128 + rounding) / whole).unwrap_or(cells).min(cells)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(bar: Bar) -> String {
        bar.spans().iter().map(|span| span.content.as_ref()).collect()
    }

    fn bar(columns: usize, whole: u64) -> Bar {
        Bar::new(columns, Bytes(whole), Theme { colour: false })
    }

    const PLAIN: Style = Style::new();

    #[test]
    fn parts_marks_and_overflow() {
        let parts = |bar: Bar| bar.part(Bytes(40), '#', PLAIN).part(Bytes(20), '=', PLAIN);
        assert_eq!(text(parts(bar(12, 100))), "[####==----]");
        assert_eq!(text(parts(bar(12, 100)).mark(Bytes(80), PLAIN)), "[####==--|-]");
        assert_eq!(text(parts(bar(12, 100)).mark(Bytes(1000), PLAIN)), "[####==---|]");
        assert_eq!(text(parts(bar(12, 100)).part_from_right(Bytes(20), 'o', PLAIN)), "[####==--oo]");
        assert_eq!(text(parts(bar(12, 50)).overflow(Bytes(60), PLAIN)), "[########=>]");
        assert_eq!(text(parts(bar(12, 0)).mark(Bytes(1), PLAIN)), "[----------]");
        assert_eq!([text(parts(bar(2, 1))), text(parts(bar(0, 1)))], ["[]", "[]"]);
    }

    proptest! {
        #[test]
        fn no_part_is_off_by_more_than_a_cell(
            columns in 3..200usize, whole in 1..u64::MAX, used: u64, idle: u64, mark: u64
        ) {
            let shown = text(bar(columns, whole).part(Bytes(used), '#', PLAIN).part(Bytes(idle), '=', PLAIN));
            prop_assert_eq!(shown.len(), columns);
            #[expect(clippy::cast_precision_loss, reason = "a tolerance of a cell")]
            let exact = |bytes: f64| (bytes.min(whole as f64)) * (columns - 2) as f64 / whole as f64;
            #[expect(clippy::cast_precision_loss, reason = "a tolerance of a cell")]
            let (used, idle) = (used as f64, idle as f64);
            #[expect(clippy::cast_precision_loss, reason = "a tolerance of a cell")]
            let count = |wanted: char| shown.chars().filter(|&c| c == wanted).count() as f64;
            prop_assert!((count('#') - exact(used)).abs() <= 0.51, "{}", shown);
            prop_assert!((count('#') + count('=') - exact(used + idle)).abs() <= 0.51, "{}", shown);
            let marked = text(bar(columns, whole).mark(Bytes(mark), PLAIN));
            prop_assert_eq!(marked.len(), columns);
            prop_assert_eq!(marked.matches('|').count(), 1);
        }
    }
}
