//! The table of pools, and what stands there while there are none.

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style;
use ratatui::text::{Line, Span};
use tidekv_core::units::Bytes;

use super::bar::Bar;
use super::columns::{Columns, DEVICE, PERCENT, RATES, STATE, USED};
use super::spark::chart;
use super::theme::Theme;
use super::{Style, columns};
use crate::command::table::Pressure;
use crate::command::top::collect::PoolSample;
use crate::command::top::state::{State, Track};
use crate::text::{compact_size, cut_middle, fit, printable, width, wrap};

pub(super) fn draw(state: &State, style: Style<'_>, frame: &mut Frame<'_>, titles: Rect, area: Rect) {
    let visible = state.visible();
    if visible.is_empty() {
        let down = area.height / 3;
        let area = Rect { y: area.y + down, height: area.height - down, ..area };
        // Wrapped here: a Paragraph that wraps wide characters may write outside of its area, which panics.
        let wrapped = nothing(state, style).into_iter().flat_map(|(text, style)| {
            wrap(&text, usize::from(area.width)).into_iter().map(move |line| Line::styled(line, style).centered())
        });
        for (line, row) in wrapped.zip(area.rows()) {
            frame.render_widget(line, row);
        }
        return;
    }
    let devices = &state.picture().sample.devices;
    let longest = visible.iter().map(|track| width(&track.pool.label)).max().unwrap_or(0);
    let columns = Columns::new(usize::from(area.width), longest, devices.len() > 1);
    frame.render_widget(Line::styled(title(&columns), style.theme.title()), titles);
    let selected = state.selected_index();
    let first = first_row(state, area.height);
    for (index, (track, row)) in visible.iter().skip(first).zip(area.rows()).enumerate() {
        let is_selected = selected == Some(first + index);
        let number = track.pool.place.as_ref().and_then(|place| devices.iter().position(|d| d.name == place.device));
        let mut line = line(track, &columns, number, is_selected, style.theme);
        if is_selected {
            line = line.patch_style(style.theme.selected());
        } else if track.gone_since.is_some() {
            line = line.patch_style(style.theme.gone());
        }
        frame.render_widget(line, row);
    }
}

/// The first row that is drawn: the selection is kept in the middle, as far as there is something to scroll.
pub(super) fn first_row(state: &State, height: u16) -> usize {
    let (rows, height) = (state.visible().len(), usize::from(height));
    let selected = state.selected_index().unwrap_or(0);
    selected.saturating_sub(height / 2).min(rows.saturating_sub(height))
}

fn title(columns: &Columns) -> String {
    let mut line = format!(" {}", fit("Name", columns.name));
    if columns.has_device {
        line += &format!(" {:<DEVICE$}", "D");
    }
    line += &format!(" {:<STATE$} {}", "State", fit(legend(columns.bar), columns.bar));
    line += &format!(" {:>USED$} {:>PERCENT$} {:>RATES$}", "Used/Limit", "% ", "Map/Unmap");
    line += &format!(" {}", fit("Trend", columns.spark));
    for extra in columns.extras {
        line += &format!(" {:>width$}", extra.title, width = extra.width);
    }
    line
}

/// What the characters of the bar mean, as far as there is room; the rest is in the help.
fn legend(room: usize) -> &'static str {
    let legends = ["# used = idle + wanted | share", "#used =idle |share", "#used =idle"];
    legends.into_iter().find(|legend| legend.len() <= room).unwrap_or("")
}

fn line(track: &Track, columns: &Columns, device: Option<usize>, is_selected: bool, theme: Theme) -> Line<'static> {
    let pool = &track.pool;
    let pressure = theme.pressure(pool.pressure());
    let cursor = if is_selected { ">" } else { " " };
    let mut spans = vec![Span::raw(cursor), Span::raw(fit(&cut_middle(&pool.label, columns.name), columns.name))];
    if columns.has_device {
        let number = device.map_or_else(|| "-".to_owned(), |number| number.to_string());
        spans.push(Span::raw(format!(" {number:<DEVICE$}")));
    }
    spans.push(Span::raw(format!(" {:<STATE$} ", track.word())));
    spans.extend(bar(pool, columns.bar, theme).spans());
    let used = format!("{}/{}", compact_size(pool.in_use.0), compact_size(pool.limit.0));
    spans.push(Span::raw(format!(" {used:>USED$} ")));
    spans.push(Span::styled(format!("{:>PERCENT$}", percent(pool)), pressure));
    spans.push(Span::raw(format!(" {:>RATES$} ", rates(track))));
    spans.extend(chart(&track.history, pool.limit, columns.spark, 1).pop().map(|chart| Span::styled(chart, pressure)));
    spans.extend(columns.extras.iter().map(|extra| extra_cell(extra, track)));
    Line::from(spans)
}

fn extra_cell(extra: &columns::Extra, track: &Track) -> Span<'static> {
    Span::raw(format!(" {:>width$}", cut_middle(&(extra.text)(track), extra.width), width = extra.width))
}

/// What the pool holds of its limit, what it wants besides, and where its share ends.
pub(super) fn bar(pool: &PoolSample, columns: usize, theme: Theme) -> Bar {
    let pressure = pool.pressure();
    let bar = Bar::new(columns, pool.limit, theme)
        .part(pool.in_use, '#', theme.pressure(pressure))
        .part(pool.idle, '=', theme.idle())
        .part(pool.demand(), '+', theme.wanted());
    // A share of nothing: the device's size is not known yet.
    let bar = match pool.fair().filter(|&fair| fair != Bytes::ZERO) {
        Some(fair) => bar.mark(fair, theme.mark()),
        None => bar,
    };
    bar.overflow(pool.held(), theme.alert())
}

/// In use of the limit. From 80 % on with a `!`, for those who see no red.
fn percent(pool: &PoolSample) -> String {
    let mark = if pool.pressure() == Pressure::High { '!' } else { ' ' };
    let (used, limit) = (u128::from(pool.in_use.0), u128::from(pool.limit.0));
    match (used * 100).checked_div(limit) {
        Some(percent) if percent <= 999 => format!("{percent}%{mark}"),
        None if pool.in_use == Bytes::ZERO => format!("0%{mark}"),
        _ => ">999%".to_owned(),
    }
}

/// Pages mapped and unmapped per second: `25/0`, `-` where nobody counts them or there was no look before.
fn rates(track: &Track) -> String {
    match track.change.and_then(|change| change.rates) {
        Some(rates) => format!("{}/{}", short_rate(rates.maps), short_rate(rates.unmaps)),
        None => "-".to_owned(),
    }
}

/// At most four columns.
fn short_rate(rate: f64) -> String {
    match rate {
        0.0 => "0".to_owned(),
        rate if rate < 9.95 => format!("{rate:.1}"),
        rate if rate < 999.5 => format!("{rate:.0}"),
        rate if rate < 999_500.0 => format!("{:.0}k", rate / 1e3),
        rate if rate < 999_500_000.0 => format!("{:.0}M", rate / 1e6),
        _ => "lots".to_owned(),
    }
}

/// What to say where there is no row.
fn nothing(state: &State, style: Style<'_>) -> Vec<(String, style::Style)> {
    let choices = state.choices();
    let hidden = state.picture().tracks.len();
    let title = |text: String| (text, style.theme.title());
    let plain = |text: String| (text, style::Style::default());
    if hidden > 0 {
        return vec![
            title(format!("No pool's name contains '{}'.", printable(&choices.filter))),
            plain(format!("{hidden} are there. Esc clears the filter, / changes it.")),
        ];
    }
    if !choices.names.is_empty() {
        let names = choices.names.join(", ");
        return vec![
            title(format!("Waiting for {}: not there yet.", printable(&names))),
            plain("It appears here as soon as there is a pool of that name.".to_owned()),
        ];
    }
    let folder = style.folder.display().to_string();
    vec![
        title("No active KVCached segments found.".to_owned()),
        plain(format!("Pools appear here as soon as an engine makes one in {}.", printable(&folder))),
        plain("Another folder: --dir, or KVCACHED_RUNTIME_DIR. Something wrong: kvctl doctor.".to_owned()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_short() {
        for (rate, text) in
            [(0.0, "0"), (0.5, "0.5"), (9.96, "10"), (999.0, "999"), (1000.0, "1k"), (123_456.0, "123k"), (2e6, "2M")]
        {
            assert_eq!(short_rate(rate), text);
        }
        assert!([0.0, 5.5, 999.4, 999_499.0, 9e8, f64::MAX].iter().all(|&rate| short_rate(rate).len() <= 4));
    }
}
