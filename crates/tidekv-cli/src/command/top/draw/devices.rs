//! A line for each device.
//!
//! ```text
//!   GPU-1f0c3a7e   [########%%%===-------------] pools 24.1G  other 10.2G  free 39.9G of 64.0G
//!                   needed  cached idle  free
//! ```
//!
//! The bar stands for the budget, where there is one. Else it stands for the device, with what others use at the right end.

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};
use tidekv_core::share::MemoryUse;
use tidekv_core::units::Bytes;

use super::bar::Bar;
use super::theme::Theme;
use crate::command::table::Pressure;
use crate::command::top::collect::DeviceSample;
use crate::command::top::state::State;
use crate::text::{compact_size, cut_middle, fit};

/// From this width on all figures are shown.
const WIDE: u16 = 110;
/// From this width on a GPU's name is whole.
const WIDEST: u16 = 180;

fn name_width(width: u16) -> usize {
    if width < WIDEST { 14 } else { 42 }
}

pub(super) fn draw(state: &State, theme: Theme, frame: &mut Frame<'_>, area: Rect) {
    let devices = &state.picture().sample.devices;
    let shown = if devices.len() > usize::from(area.height) {
        usize::from(area.height).saturating_sub(1)
    } else {
        devices.len()
    };
    let several = devices.len() > 1;
    for (index, (device, row)) in devices.iter().zip(area.rows()).enumerate().take(shown) {
        let number = if several { format!("{index} ") } else { String::new() };
        frame.render_widget(line(&number, device, theme, area.width), row);
    }
    if let Some(row) = area.rows().nth(shown) {
        let hidden = devices.len() - shown;
        frame.render_widget(Line::raw(format!("... {hidden} more devices")), row);
    }
}

fn line(number: &str, device: &DeviceSample, theme: Theme, width: u16) -> Line<'static> {
    let room = name_width(width);
    let name = fit(&format!("{number}{}", cut_middle(device.name.as_str(), room.saturating_sub(number.len()))), room);
    let figures = figures(device, width);
    let columns = usize::from(width).saturating_sub(room + 1 + 1 + figures.len());
    let whole = device.whole();
    let pressure = Pressure::of_bytes(device.usage.needed, whole);
    let others = if device.budget == Bytes::ZERO { device.non_pool } else { Bytes::ZERO };
    let bar = Bar::new(columns, whole, theme)
        .part(device.usage.needed, '#', theme.pressure(pressure))
        .part(device.usage.cached, '%', theme.idle())
        .part(device.usage.idle, '=', theme.idle())
        .part_from_right(others, 'o', theme.other())
        .overflow(device.held(), theme.alert());
    let mut spans = vec![Span::styled(name, theme.key()), Span::raw(" ")];
    spans.extend(bar.spans());
    spans.push(Span::raw(format!(" {figures}")));
    Line::from(spans)
}

fn figures(device: &DeviceSample, width: u16) -> String {
    let size = |bytes: Bytes| compact_size(bytes.0);
    let held = size(device.held());
    let MemoryUse { needed, cached, idle } = device.usage;
    let [needed, cached, idle, other] = [needed, cached, idle, device.non_pool].map(size);
    let [free, whole] = [device.free, device.whole()].map(size);
    match () {
        () if device.whole() == Bytes::ZERO => format!("pools {held:>5}  of a size not known yet"),
        () if width < WIDE => format!("pools {held:>5}  other {other:>5}  free {free:>5} of {whole:>5}"),
        () => format!(
            "needed {needed:>5}  cached {cached:>5}  idle {idle:>5}  other {other:>5}  free {free:>5} of {whole:>5}"
        ),
    }
}
