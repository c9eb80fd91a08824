//! Everything about one pool, in kvcached's words where it has them.

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};
use tidekv_core::units::Bytes;

use super::pools::bar;
use super::spark::chart;
use super::theme::Theme;
use crate::command::table::rate;
use crate::command::top::collect::{PlaceSample, PoolSample};
use crate::command::top::state::{State, Track};
use crate::scene::bound;
use crate::text::{cut, kvcached_percent, kvcached_size, printable};

/// The width of what stands before a figure.
const LABEL: usize = 10;

pub(super) fn draw(track: &Track, state: &State, theme: Theme, frame: &mut Frame<'_>, area: Rect) {
    let pool = &track.pool;
    let width = usize::from(area.width);
    let mut lines = vec![
        Line::default(),
        Line::styled(cut(&format!("IPC: {}", pool.label), width).into_owned(), theme.title()),
        Line::from(bar(pool, width, theme).spans()),
        Line::raw(in_kvcached_words(pool)),
        Line::default(),
    ];
    lines.extend(
        figures(track).into_iter().map(|(label, text)| {
            Line::from(vec![Span::styled(format!("{label:<LABEL$}"), theme.key()), Span::raw(text)])
        }),
    );
    lines.push(Line::default());
    let looks = track.history.len().min(width);
    let every = super::interval(state.choices().refresh);
    lines.push(Line::raw(format!("In use, the last {looks} looks, one every {every}; full height is the limit:")));
    let rows = usize::from(area.height).saturating_sub(lines.len()).min(8);
    let pressure = theme.pressure(pool.pressure());
    lines.extend(chart(&track.history, pool.limit, width, rows).into_iter().map(|row| Line::styled(row, pressure)));
    for (line, row) in lines.into_iter().zip(area.rows()) {
        frame.render_widget(line, row);
    }
}

/// As kvcached's kvtop says it.
fn in_kvcached_words(pool: &PoolSample) -> String {
    let word = |bytes: Bytes| i64::try_from(bytes.0).unwrap_or(i64::MAX);
    let [idle, used, limit, free] = [pool.idle, pool.in_use, pool.limit, pool.free()].map(word);
    let percent = kvcached_percent(used, limit);
    let [idle, used, limit, free] = [idle, used, limit, free].map(kvcached_size);
    format!("Prealloc: {idle} | Used: {used} / {limit} ({percent}%) | Free: {free}")
}

fn figures(track: &Track) -> Vec<(&'static str, String)> {
    let word = track.word();
    match &track.pool.place {
        Some(place) => ledger_figures(track, word, place),
        None => vec![
            ("State", format!("{word}: it has no ledger entry, so no share, demand or rates")),
            ("Device", "not known: the segment does not say".to_owned()),
        ],
    }
}

fn ledger_figures(track: &Track, word: &str, place: &PlaceSample) -> Vec<(&'static str, String)> {
    let (latest, applied) = place.revisions;
    let limit = if applied < latest { "the pool is still carrying it out" } else { "applied" };
    let rates = track.change.and_then(|change| change.rates);
    let [maps, unmaps] = [rates.map(|rates| rates.maps), rates.map(|rates| rates.unmaps)].map(rate);
    let counters = &place.counters;
    vec![
        ("State", format!("{word}, pid {} on {}", place.pid, place.device)),
        ("Limit", format!("{}, revision {latest}: {limit}", track.pool.limit)),
        (
            "Held",
            format!(
                "{}, of it {} cached, {} idle, in pages of {}",
                place.held, place.cached, track.pool.idle, place.page
            ),
        ),
        ("Share", format!("{} fair, {} wanted beyond what it holds", place.fair, place.demand)),
        ("Why", place.why.as_deref().map_or("nothing waits and nothing is asked for".into(), printable).into_owned()),
        ("Gives", format!("{} owed to others, {} on the way back", place.owed, place.reclaim)),
        (
            "Terms",
            format!(
                "weight {}, priority {}, floor {}, ceiling {}",
                place.weight,
                place.priority,
                place.floor,
                bound(place.ceiling)
            ),
        ),
        ("Pages", format!("{} mapped ({maps}/s), {} unmapped ({unmaps}/s)", counters.maps, counters.unmaps)),
        (
            "Counts",
            format!(
                "{} waits for others, {} reclaims, {} failures since it began",
                counters.waits, counters.reclaims, counters.failures
            ),
        ),
    ]
}
