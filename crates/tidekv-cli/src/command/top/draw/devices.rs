//! A line for each device.
//!
//! ```text
//!   GPU-1f0c3a7e   [########===----------|---ooooooo] pools 24.1G  other 10.2G  free 45.7G  of 80.0G
//!                   in use  idle  free   budget  others, from the right
//! ```
//!
//! Others stand at the right end, so that the mark of the budget, counted from the left, is where pools must stop.

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};
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
    let pressure = Pressure::of_bytes(device.in_use, budget_or_total(device));
    let bar = Bar::new(columns, device.total, theme)
        .part(device.in_use, '#', theme.pressure(pressure))
        .part(device.idle, '=', theme.idle())
        .part_from_right(device.non_pool, 'o', theme.other())
        .mark(device.budget, theme.mark());
    let mut spans = vec![Span::styled(name, theme.key()), Span::raw(" ")];
    spans.extend(bar.spans());
    spans.push(Span::raw(format!(" {figures}")));
    Line::from(spans)
}

fn figures(device: &DeviceSample, width: u16) -> String {
    let size = |bytes: Bytes| compact_size(bytes.0);
    let held = size(device.held());
    let [in_use, idle, other] = [device.in_use, device.idle, device.non_pool].map(size);
    let [free, total, budget] = [device.free(), device.total, device.budget].map(size);
    match () {
        () if device.total == Bytes::ZERO => format!("pools {held:>5}  of a size not known yet"),
        () if width < WIDE => format!("pools {held:>5}  other {other:>5}  free {free:>5} of {total:>5}"),
        () => format!(
            "in use {in_use:>5}  idle {idle:>5}  other {other:>5}  free {free:>5} of {total:>5}  budget {budget:>5}"
        ),
    }
}

fn budget_or_total(device: &DeviceSample) -> Bytes {
    if device.budget == Bytes::ZERO { device.total } else { device.budget }
}
