//! Histories as small charts: a column for each look, the latest at the right, as high as the value is of the whole.

use std::collections::VecDeque;

use tidekv_core::units::Bytes;

const BLOCKS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// A chart of so many columns and rows, from its top row down. Where nothing was seen yet there is nothing; what was
/// seen has at least the lowest block, so that zero can be told from not having looked.
pub(super) fn chart(history: &VecDeque<Bytes>, whole: Bytes, columns: usize, rows: usize) -> Vec<String> {
    let shown = history.len().min(columns);
    let heights: Vec<usize> =
        history.iter().skip(history.len() - shown).map(|&value| height(value, whole, rows)).collect();
    let row = |index: usize| {
        let below = (rows - 1 - index) * 8;
        let blocks = heights.iter().map(|height| BLOCKS[height.saturating_sub(below).min(8)]);
        std::iter::repeat_n(' ', columns - shown).chain(blocks).collect()
    };
    (0..rows).map(row).collect()
}

/// In eighths of a row.
fn height(value: Bytes, whole: Bytes, rows: usize) -> usize {
    let most = rows * 8;
    if whole == Bytes::ZERO {
        return 1;
    }
    let height = u128::from(value.0) * most as u128 / u128::from(whole.0);
    usize::try_from(height).unwrap_or(most).clamp(1, most.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_is_at_the_right_and_as_high_as_it_should_be() {
        let history: VecDeque<Bytes> = [0, 25, 50, 100, 200].map(Bytes).into();
        assert_eq!(chart(&history, Bytes(100), 7, 1), ["  ▁▂▄██"]);
        assert_eq!(chart(&history, Bytes(100), 3, 1), ["▄██"], "the oldest go first");
        assert_eq!(chart(&history, Bytes(100), 5, 2), ["   ██", "▁▄███"]);
        assert_eq!(chart(&history, Bytes(0), 5, 1), ["▁▁▁▁▁"]);
        assert_eq!(chart(&VecDeque::new(), Bytes(1), 3, 1), ["   "]);
        assert!(chart(&history, Bytes(1), 5, 0).is_empty());
    }
}
