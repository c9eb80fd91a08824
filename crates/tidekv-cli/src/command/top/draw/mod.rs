//! The screen as a function of the state. Nothing here remembers, waits or reads; [`draw`] is called with any state at
//! any size.
//!
//! ```text
//!   header     KVCache Memory Usage  14:03:12  3 pools  sort: name  every 1s
//!   devices    host            [####===-----|--oooo] pools 24.1G ...          at most a third of the screen
//!   titles      Name           State     Bar ...
//!   pools      >kvcached_vLLM  live      [########====---|---] ...            scrolled so that the selection is seen
//!   notices    what could not be read, which pools are waited for
//!   footer     Press 'q' to quit  h help ...                                  or the filter while it is typed
//! ```

mod bar;
mod columns;
mod details;
mod devices;
mod help;
mod pools;
mod spark;
mod theme;

#[cfg(test)]
mod tests;

use std::path::Path;
use std::time::Duration;

use ratatui::Frame;
use ratatui::layout::{Constraint, Rect};
use ratatui::text::{Line, Span};

use super::state::{State, View};
use crate::text::{cut, printable};

pub use theme::Theme;

/// What drawing needs besides the state.
#[derive(Clone, Copy, Debug)]
pub struct Style<'a> {
    /// Whether there is colour.
    pub theme: Theme,
    /// The folder that is looked at, to be named where it holds nothing.
    pub folder: &'a Path,
}

/// What the header has room for of a filter.
const FILTER: usize = 16;

/// Draws the state.
pub fn draw(state: &State, style: Style<'_>, frame: &mut Frame<'_>) {
    let plan = Plan::new(frame.area(), state);
    frame.render_widget(header(state, style.theme), plan.header);
    match (state.choices().view, state.selected()) {
        (View::Details, Some(track)) => {
            details::draw(track, state, style.theme, frame, plan.body);
        }
        _ => {
            devices::draw(state, style.theme, frame, plan.devices);
            pools::draw(state, style, frame, plan.titles, plan.pools);
            for (line, row) in notices(state).into_iter().zip(plan.notices.rows()) {
                frame.render_widget(Line::styled(line, style.theme.alert()), row);
            }
        }
    }
    frame.render_widget(footer(state, style.theme), plan.footer);
    if state.choices().view == View::Help {
        help::draw(style.theme, frame, plan.body);
    }
}

/// Which visible row is drawn at this place, for clicks.
pub fn row_at(area: Rect, state: &State, column: u16, row: u16) -> Option<usize> {
    let pools = Plan::new(area, state).pools;
    let is_inside = state.choices().view == View::Pools && pools.contains((column, row).into());
    let index = pools::first_row(state, pools.height) + usize::from(row.checked_sub(pools.y)?);
    (is_inside && index < state.visible().len()).then_some(index)
}

/// Where everything goes. Parts for which there is no room have no height.
#[derive(Debug)]
struct Plan {
    header: Rect,
    body: Rect,
    devices: Rect,
    titles: Rect,
    pools: Rect,
    notices: Rect,
    footer: Rect,
}

impl Plan {
    fn new(area: Rect, state: &State) -> Self {
        let [header, body, footer] = area.layout(&ratatui::layout::Layout::vertical([
            Constraint::Max(1),
            Constraint::Fill(1),
            Constraint::Max(1),
        ]));
        let mut rest = body;
        let mut take = |rows: usize| {
            let rows = u16::try_from(rows).unwrap_or(u16::MAX).min(rest.height);
            let taken = Rect { height: rows, ..rest };
            rest = Rect { y: rest.y + rows, height: rest.height - rows, ..rest };
            taken
        };
        let third = usize::from(body.height / 3);
        let roomy = usize::from(body.height >= 18);
        take(roomy);
        let devices = take(state.picture().sample.devices.len().min(third));
        take(roomy);
        let titles = take(usize::from(body.height > 4));
        let notices = notices(state).len().min(usize::from(rest.height / 3));
        let notices = u16::try_from(notices).unwrap_or(0);
        let pools = Rect { height: rest.height - notices, ..rest };
        let notices = Rect { y: pools.y + pools.height, height: notices, ..rest };
        Self { header, body, devices, titles, pools, notices, footer }
    }
}

fn header(state: &State, theme: Theme) -> Line<'static> {
    let choices = state.choices();
    let (shown, all) = (state.visible().len(), state.picture().tracks.len());
    let count = match (shown, all) {
        (1, 1) => "1 pool".to_owned(),
        (shown, all) if shown == all => format!("{all} pools"),
        (shown, all) => format!("{shown} of {all} pools"),
    };
    let order = if choices.reverse { " reversed" } else { "" };
    // What is easily forgotten comes first: a narrow screen cuts the end.
    let mut line = Line::from(Span::styled("KVCache Memory Usage", theme.title()));
    let mut add = |text: String, style| line.extend([Span::raw("  "), Span::styled(text, style)]);
    let plain = ratatui::style::Style::new();
    add(state.picture().clock.clone(), plain);
    if state.is_paused() {
        add("PAUSED".to_owned(), theme.alert());
    }
    add(count, plain);
    if !choices.filter.is_empty() {
        add(format!("filter: {}", cut(&printable(&choices.filter), FILTER)), plain);
    }
    add(format!("sort: {}{order}", choices.sort.name()), plain);
    add(format!("every {}", interval(choices.refresh)), plain);
    line
}

fn footer(state: &State, theme: Theme) -> Line<'static> {
    let choices = state.choices();
    if choices.typing {
        return Line::from(vec![
            Span::styled("filter: ", theme.key()),
            Span::raw(printable(&choices.filter).into_owned()),
            Span::styled("_", theme.key()),
            Span::raw("   Enter keeps it, Esc clears it"),
        ]);
    }
    let keys: &[(&str, &str)] = match choices.view {
        View::Details => &[("h", "help"), ("p", "pause"), ("Up/Down", "other pools"), ("Esc", "back")],
        View::Help => &[("h", "back")],
        View::Pools => {
            &[("h", "help"), ("s", "sort"), ("r", "reverse"), ("/", "filter"), ("p", "pause"), ("Enter", "details")]
        }
    };
    let mut spans = vec![Span::raw("Press 'q' to quit")];
    for (key, what) in keys {
        spans.extend([Span::raw("  "), Span::styled(*key, theme.key()), Span::raw(format!(" {what}"))]);
    }
    Line::from(spans)
}

/// What else there is to say, in lines.
fn notices(state: &State) -> Vec<String> {
    let mut lines = state.picture().sample.troubles.clone();
    let pools = state.picture().tracks.iter();
    let whys = pools.filter_map(|track| track.pool.place.as_ref()?.why.as_deref());
    lines.extend(whys.map(|why| printable(why).into_owned()));
    let missing = state.missing();
    if !missing.is_empty() && !state.picture().tracks.is_empty() {
        lines.push(format!("Waiting for {}: not there yet.", printable(&missing.join(", "))));
    }
    lines
}

fn interval(interval: Duration) -> String {
    if interval.subsec_nanos() == 0 {
        format!("{}s", interval.as_secs())
    } else {
        format!("{}ms", interval.as_millis())
    }
}
