//! `kvctl events`: who was granted, asked, refused or gave back what, when and why.
//!
//! ```text
//!   rings of all devices ──> tapes ──> filter ──> line    a sentence for people
//!                              │                  json    an object per line for programs
//!                            follow   wakes when there is more, until Ctrl-C or until nobody reads
//! ```
//!
//! Reading takes no lock and waits for nobody.

mod follow;
mod json;
mod line;
mod tapes;

use std::collections::BTreeSet;

use tidekv_shm::events::PoolRef;
use tidekv_shm::{Event, PoolName, RuntimeDir};

use crate::console::Console;
use crate::exit::Outcome;
use crate::scene::{PREFIX, Scene};
use crate::text::nearest;
use line::Layout;
use tapes::{News, Tapes, Told};

pub(super) fn run(
    dir: &RuntimeDir,
    names: &[String],
    follow: bool,
    last: usize,
    json: bool,
    console: &mut Console,
) -> anyhow::Result<Outcome> {
    // Before the first look, so that nothing falls between it and the wait after it.
    let watch = if follow { Some(follow::Wait::new(dir)?) } else { None };
    let mut tapes = Tapes::new(dir);
    let past = tapes.read(console);
    let wanted = Filter(names);
    let matching: Vec<&Told> = past.iter().filter(|told| wanted.admits(told)).collect();
    let unknown: Vec<&String> =
        names.iter().filter(|name| !matching.iter().any(|told| Filter::is_about(told, name))).collect();
    let mut outcome = Outcome::Done;
    if !unknown.is_empty() {
        let word = if follow { "warning" } else { "Error" };
        outcome = say_unknown(dir, &unknown, &past, word, console)?;
    }

    let mut layout = Layout::new(json);
    let shown = &matching[matching.len().saturating_sub(last)..];
    layout.fit(shown.iter().copied());
    for told in shown {
        layout.show(told, console)?;
    }
    if past.is_empty() && !follow && !json {
        console.line("No events: no pool of tidekv has been here since the last one left in order.")?;
    }
    match watch {
        // Who follows may wait for a pool that is still to come.
        Some(wait) => follow::run(wait, &mut tapes, &wanted, &mut layout, console),
        None => Ok(outcome),
    }
}

/// Whose events are shown.
struct Filter<'a>(&'a [String]);

impl Filter<'_> {
    fn admits(&self, told: &Told) -> bool {
        self.0.is_empty()
            || matches!(told.news, News::Missed(_))
            || self.0.iter().any(|name| Self::is_about(told, name))
    }

    /// Whether something happened to the pool of this name, or for it.
    fn is_about(told: &Told, name: &str) -> bool {
        let News::Event(event) = &told.news else { return false };
        let pools = [&event.pool, &event.peer].into_iter().flatten();
        pools.map(shown_name).any(|pool| pool == name || pool.strip_prefix(PREFIX) == Some(name))
    }
}

/// What the pool is called in lists: with its group, where that is not 0.
fn shown_name(pool: &PoolRef) -> String {
    match PoolName::new(&pool.name) {
        Ok(name) => name.with_group(pool.group).as_str().to_owned(),
        Err(_) => pool.name.clone(),
    }
}

/// Says which of these names neither an event nor a pool has. A pool that lives and has no events is no error.
fn say_unknown(
    dir: &RuntimeDir,
    names: &[&String],
    past: &[Told],
    word: &str,
    console: &mut Console,
) -> anyhow::Result<Outcome> {
    let scene = Scene::look(dir)?;
    let event = |told: &Told| match &told.news {
        News::Event(event) => event.pool.as_ref().map(shown_name),
        News::Missed(_) => None,
    };
    let known: BTreeSet<String> =
        past.iter().filter_map(event).chain(scene.pools.iter().map(|pool| pool.name.clone())).collect();
    let mut outcome = Outcome::Done;
    for name in names {
        if known.contains(*name) || known.contains(&format!("{PREFIX}{name}")) {
            console.note(format_args!("No events of '{name}' are left."));
            continue;
        }
        let hint = nearest(name, known.iter().map(String::as_str));
        let hint = hint.map_or_else(String::new, |nearest| format!(" Did you mean '{nearest}'?"));
        console.note(format_args!("{word}: IPC '{name}' not found among events and pools.{hint}"));
        outcome = Outcome::Negative;
    }
    Ok(outcome)
}

/// When it happened, in this machine's time zone.
fn local_time(event: &Event) -> jiff::Zoned {
    let milliseconds = i64::try_from(event.wall_ms).unwrap_or(i64::MAX);
    let timestamp = jiff::Timestamp::from_millisecond(milliseconds).unwrap_or(jiff::Timestamp::MAX);
    timestamp.to_zoned(jiff::tz::TimeZone::system())
}
