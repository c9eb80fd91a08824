//! Figures and tables.

use serde_json::{Value, json};
use tidekv_core::geometry::Layout;
use tidekv_core::units::Bytes;

use super::measure::{CellTimes, LayoutTimes, Measured};
use crate::result::BenchResult;
use crate::table::{Table, format_figure};

/// Slab chunks up to this size are promised to be alike.
const ALIKE: Bytes = Bytes::kib(512);
/// The chunk that is reported apart.
const LARGE: Bytes = Bytes::mib(2);

pub(super) fn fill(result: &mut BenchResult, measured: &Measured) {
    for cell in &measured.cells {
        for layout in &cell.layouts {
            let place = format!("{}x{}.{}", cell.cell.batch, cell.cell.context, key(layout));
            for (name, times) in [("attention", &layout.attention), ("read", &layout.read), ("copy", &layout.copy)] {
                result.add_times(format!("{place}.{name}"), times);
            }
        }
    }
    result.summary.insert("cells".to_owned(), measured.cells.iter().map(of_cell).collect::<Vec<_>>().into());
    let left_out: Vec<Value> = measured.left_out.iter().map(|cell| cell.to_string().into()).collect();
    result.summary.insert("left_out".to_owned(), left_out.into());
    let Some(largest) = measured.cells.iter().max_by_key(|cell| cell.kv_bytes) else { return };
    result.set_figure("read_gb_per_s", largest.plain(|layout| &layout.read));
    let slowest = largest.layouts.iter().map(|layout| largest.share_of_read(layout)).reduce(f64::min);
    for (name, figure) in
        [("share_of_read", slowest), ("chunk_spread", spread(largest)), ("slab_2m_share_of_read", large(largest))]
    {
        if let Some(figure) = figure {
            result.set_figure(name, figure);
        }
    }
}

fn of_cell(cell: &CellTimes) -> Value {
    let layout = |layout: &LayoutTimes| {
        json!({
            "name": layout.variant.to_string(),
            "layout": layout.variant.layout.name(),
            "chunk_bytes": layout.variant.chunk.0,
            "page_bytes": layout.page_bytes.0,
            "gb_per_s": cell.gb_per_s(layout),
            "share_of_read": cell.share_of_read(layout),
            "time_over_copy": cell.time_over_copy(layout),
        })
    };
    let mut entry = json!({
        "batch": cell.cell.batch,
        "context": cell.cell.context,
        "kv_bytes": cell.kv_bytes.0,
        "read_gb_per_s": cell.plain(|layout| &layout.read),
        "copy_gb_per_s": cell.plain(|layout| &layout.copy),
        "layouts": cell.layouts.iter().map(layout).collect::<Vec<_>>(),
    });
    if let Some(spread) = spread(cell) {
        entry["chunk_spread"] = spread.into();
    }
    entry
}

/// Fastest over slowest, less 1, of the slab's smaller chunks; `None` for fewer than two of them.
fn spread(cell: &CellTimes) -> Option<f64> {
    let is_small = |layout: &&LayoutTimes| layout.variant.layout == Layout::Slab && layout.variant.chunk <= ALIKE;
    let speeds: Vec<f64> = cell.layouts.iter().filter(is_small).map(|layout| cell.gb_per_s(layout)).collect();
    let (slowest, fastest) = (speeds.iter().copied().reduce(f64::min)?, speeds.iter().copied().reduce(f64::max)?);
    (speeds.len() > 1).then_some(fastest / slowest - 1.0)
}

fn large(cell: &CellTimes) -> Option<f64> {
    let is_large = |layout: &&LayoutTimes| layout.variant.layout == Layout::Slab && layout.variant.chunk == LARGE;
    cell.layouts.iter().find(is_large).map(|layout| cell.share_of_read(layout))
}

/// `slab-128K`: a name for a series.
fn key(layout: &LayoutTimes) -> String {
    layout.variant.to_string().replace(' ', "-")
}

/// A table for each cell.
pub(super) fn tables(measured: &Measured) -> String {
    let mut text = String::new();
    for cell in &measured.cells {
        let gb = format_figure(cell.kv_bytes.0 as f64 / 1e9);
        let (read, copy) = (cell.plain(|layout| &layout.read), cell.plain(|layout| &layout.copy));
        text += &format!(
            "{}: {gb} GB of keys and values; read alone {} GB/s, copied {} GB/s\n\n",
            cell.cell,
            format_figure(read),
            format_figure(copy)
        );
        let mut table = Table::new(&["layout", "page", "GB/s", "of reading", "time / copy's"]);
        for layout in &cell.layouts {
            table.row(&[
                layout.variant.to_string(),
                layout.page_bytes.to_string(),
                format_figure(cell.gb_per_s(layout)),
                format!("{:.1} %", cell.share_of_read(layout) * 100.0),
                format_figure(cell.time_over_copy(layout)),
            ]);
        }
        text += &table.render();
        if let Some(spread) = spread(cell) {
            text += &format!("\nslab chunks up to {ALIKE}: {:.1} % from the slowest to the fastest\n", spread * 100.0);
        }
        text += "\n";
    }
    text.truncate(text.trim_end().len());
    text + "\n"
}
