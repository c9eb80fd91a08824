//! What kvtop knows and what the person at the keys has chosen. Looks and keys go in; nothing comes out but itself.
//!
//! ```text
//!   observe(sample, at) ──> live picture: pools, histories, changes
//!                             │  p freezes a copy; sampling goes on behind it, so that nothing is missing afterwards
//!                             v
//!   key(event) ──────────> choices: order, filter, selection, view ──> visible(): the rows, in order
//! ```
//!
//! There is neither a clock nor a terminal in here: time is what the caller says it is.
//!
//! | a pool | is shown as |
//! | --- | --- |
//! | in the latest look | its state's word |
//! | not in it any more | `gone`, with its last figures, for [`GONE_FOR`]; then it is removed |

#[cfg(test)]
mod tests;

use std::cmp::Ordering;
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use tidekv_core::units::Bytes;

use super::collect::{PoolSample, Sample};
use crate::change::{Change, Changes, PoolKey};
use crate::request::{SortKey, TopRequest};
use crate::scene::PREFIX;

/// How long a pool that is gone stays on the screen.
pub const GONE_FOR: Duration = Duration::from_secs(5);
/// How many looks a sparkline remembers: more than the widest screen shows.
pub const HISTORY: usize = 256;
/// How far Page Up and Page Down go.
const PAGE: usize = 10;

/// All of it.
#[derive(Clone, Debug)]
pub struct State {
    live: Picture,
    frozen: Option<Picture>,
    choices: Choices,
}

/// What there was to see at one moment.
#[derive(Clone, Debug, Default)]
pub struct Picture {
    /// The time of day, as it is shown.
    pub clock: String,
    /// Devices and troubles of the latest look. Its pools are in `tracks`.
    pub sample: Sample,
    /// Pools of the latest look, and those that are gone since a short while.
    pub tracks: Vec<Track>,
    changes: Changes,
}

/// A pool over time.
#[derive(Clone, Debug)]
pub struct Track {
    /// Its latest figures.
    pub pool: PoolSample,
    /// What happened since the look before.
    pub change: Option<Change>,
    /// What it had in use, oldest first.
    pub history: VecDeque<Bytes>,
    /// When it was first missing.
    pub gone_since: Option<Duration>,
}

/// What the person at the keys has chosen.
#[derive(Clone, Debug)]
pub struct Choices {
    /// Only these pools were asked for; all if empty.
    pub names: Vec<String>,
    /// The time between two looks, as it is shown.
    pub refresh: Duration,
    /// The order.
    pub sort: SortKey,
    /// Whether it is turned round.
    pub reverse: bool,
    /// Only names that contain this, in any case.
    pub filter: String,
    /// Whether the filter is being typed.
    pub typing: bool,
    /// What fills the screen.
    pub view: View,
    selected: Option<PoolKey>,
    /// Where the selection was, for when the selected pool disappears.
    selected_at: usize,
}

/// What fills the screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// All pools.
    Pools,
    /// The selected pool.
    Details,
    /// The keys, over all pools.
    Help,
}

/// What a key asks for beyond a change of the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Go on.
    Stay,
    /// Leave.
    Leave,
    /// Stop the process, as Ctrl-Z does.
    Suspend,
}

impl State {
    /// Nothing seen yet.
    pub fn new(request: &TopRequest) -> Self {
        let choices = Choices {
            names: request.names.clone(),
            refresh: request.refresh,
            sort: request.sort,
            reverse: false,
            filter: request.filter.clone(),
            typing: false,
            view: View::Pools,
            selected: None,
            selected_at: 0,
        };
        Self { live: Picture::default(), frozen: None, choices }
    }

    /// Takes a look in. `at` is any clock that only goes forward, `clock` the time of day.
    pub fn observe(&mut self, sample: Sample, at: Duration, clock: String) {
        self.live.observe(sample, at, clock);
        self.settle_selection();
    }

    /// Takes in that a look failed: what is known stays, and why it is not newer is said.
    pub fn observe_failure(&mut self, sentence: String, clock: String) {
        (self.live.sample.troubles, self.live.clock) = (vec![sentence], clock);
    }

    /// Takes a key in.
    pub fn key(&mut self, key: KeyEvent) -> Flow {
        if key.kind == KeyEventKind::Release {
            return Flow::Stay;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return match key.code {
                KeyCode::Char('c') => Flow::Leave,
                KeyCode::Char('z') => Flow::Suspend,
                KeyCode::Char('u') if self.choices.typing => self.type_filter(|filter| filter.clear()),
                _ => Flow::Stay,
            };
        }
        if self.choices.typing { self.typing_key(key.code) } else { self.command_key(key.code) }
    }

    fn typing_key(&mut self, code: KeyCode) -> Flow {
        match code {
            KeyCode::Char(character) => self.type_filter(|filter| filter.push(character)),
            KeyCode::Backspace => self.type_filter(|filter| filter.truncate(filter.len() - last_len(filter))),
            KeyCode::Enter => self.choose(|choices| choices.typing = false),
            KeyCode::Esc => {
                self.choices.typing = false;
                self.type_filter(String::clear)
            }
            _ => Flow::Stay,
        }
    }

    fn command_key(&mut self, code: KeyCode) -> Flow {
        match code {
            KeyCode::Char('q') => Flow::Leave,
            KeyCode::Char('h' | '?') => self.choose(|choices| {
                choices.view = if choices.view == View::Help { View::Pools } else { View::Help };
            }),
            KeyCode::Char('s') => self.choose(|choices| choices.sort = step(choices.sort, 1)),
            KeyCode::Char('S') => self.choose(|choices| choices.sort = step(choices.sort, SortKey::ALL.len() - 1)),
            KeyCode::Char('r') => self.choose(|choices| choices.reverse = !choices.reverse),
            KeyCode::Char('/') => self.choose(|choices| (choices.typing, choices.view) = (true, View::Pools)),
            KeyCode::Char('p' | ' ') => self.pause(),
            KeyCode::Enter => self.choose(|choices| {
                choices.view = if choices.view == View::Pools { View::Details } else { View::Pools };
            }),
            KeyCode::Esc if self.choices.view != View::Pools => self.choose(|choices| choices.view = View::Pools),
            KeyCode::Esc => self.type_filter(String::clear),
            KeyCode::Up | KeyCode::Char('k') => self.select(|at, _| at.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.select(|at, _| at + 1),
            KeyCode::PageUp => self.select(|at, _| at.saturating_sub(PAGE)),
            KeyCode::PageDown => self.select(|at, _| at + PAGE),
            KeyCode::Home | KeyCode::Char('g') => self.select(|_, _| 0),
            KeyCode::End | KeyCode::Char('G') => self.select(|_, last| last),
            _ => Flow::Stay,
        }
    }

    /// Moves the selection by so many rows, down if positive: for the wheel.
    pub fn scroll(&mut self, rows: isize) {
        self.select(|at, _| at.saturating_add_signed(rows));
    }

    /// Selects the visible row of this index, if there is one: for a click. A second click opens it.
    pub fn click(&mut self, index: usize) {
        let Some(key) = self.visible().get(index).map(|track| track.pool.key.clone()) else { return };
        if self.choices.selected.as_ref() == Some(&key) {
            self.choices.view = View::Details;
        }
        (self.choices.selected, self.choices.selected_at) = (Some(key), index);
    }

    fn choose(&mut self, change: impl FnOnce(&mut Choices)) -> Flow {
        change(&mut self.choices);
        self.settle_selection();
        Flow::Stay
    }

    fn type_filter(&mut self, change: impl FnOnce(&mut String)) -> Flow {
        self.choose(|choices| change(&mut choices.filter))
    }

    fn pause(&mut self) -> Flow {
        self.frozen = match self.frozen.take() {
            Some(_) => None,
            None => Some(self.live.clone()),
        };
        self.settle_selection();
        Flow::Stay
    }

    fn select(&mut self, to: impl FnOnce(usize, usize) -> usize) -> Flow {
        let visible = self.visible();
        if let Some(last) = visible.len().checked_sub(1) {
            let at = to(self.selected_index().unwrap_or(0), last).min(last);
            let key = visible[at].pool.key.clone();
            (self.choices.selected, self.choices.selected_at) = (Some(key), at);
        }
        Flow::Stay
    }

    /// Keeps the selection on its pool; if that is not visible any more, on what stands in its place.
    fn settle_selection(&mut self) {
        let visible = self.visible();
        let at = visible.iter().position(|track| Some(&track.pool.key) == self.choices.selected.as_ref());
        let at = at.unwrap_or_else(|| self.choices.selected_at.min(visible.len().saturating_sub(1)));
        let key = visible.get(at).map(|track| track.pool.key.clone());
        (self.choices.selected, self.choices.selected_at) = (key, at);
    }

    /// What is shown: the latest picture, or the one at which it was paused.
    pub fn picture(&self) -> &Picture {
        self.frozen.as_ref().unwrap_or(&self.live)
    }

    /// What was chosen.
    pub fn choices(&self) -> &Choices {
        &self.choices
    }

    /// Whether the picture stands still.
    pub fn is_paused(&self) -> bool {
        self.frozen.is_some()
    }

    /// The rows, in order.
    pub fn visible(&self) -> Vec<&Track> {
        let wanted = self.choices.filter.to_lowercase();
        let matches = |track: &&Track| track.pool.label.to_lowercase().contains(&wanted);
        let mut rows: Vec<&Track> = self.picture().tracks.iter().filter(matches).collect();
        rows.sort_by(|a, b| {
            let order = compare(self.choices.sort, a, b);
            let order = if self.choices.reverse { order.reverse() } else { order };
            order.then_with(|| a.pool.key.cmp(&b.pool.key))
        });
        rows
    }

    /// Where in [`State::visible`] the selection is.
    pub fn selected_index(&self) -> Option<usize> {
        let selected = self.choices.selected.as_ref()?;
        self.visible().iter().position(|track| track.pool.key == *selected)
    }

    /// The selected pool.
    pub fn selected(&self) -> Option<&Track> {
        let selected = self.choices.selected.as_ref()?;
        self.picture().tracks.iter().find(|track| track.pool.key == *selected)
    }

    /// Names that were asked for and of which there is no pool.
    pub fn missing(&self) -> Vec<&str> {
        let is = |known: &str, name: &str| known == name || known.strip_prefix(PREFIX) == Some(name);
        let is_there = |name: &str| self.picture().tracks.iter().any(|track| is(&track.pool.key.name, name));
        self.choices.names.iter().map(String::as_str).filter(|name| !is_there(name)).collect()
    }
}

impl Picture {
    fn observe(&mut self, mut sample: Sample, at: Duration, clock: String) {
        let pools = std::mem::take(&mut sample.pools);
        self.changes.observe(at, pools.iter().map(|pool| (pool.key.clone(), pool.reading())));
        let before = std::mem::take(&mut self.tracks).into_iter();
        let mut before: HashMap<PoolKey, Track> = before.map(|track| (track.pool.key.clone(), track)).collect();
        for pool in pools {
            let mut history = before.remove(&pool.key).map(|track| track.history).unwrap_or_default();
            if history.len() == HISTORY {
                history.pop_front();
            }
            history.push_back(pool.in_use);
            let change = self.changes.of(&pool.key).copied();
            self.tracks.push(Track { pool, change, history, gone_since: None });
        }
        for mut track in before.into_values() {
            let since = *track.gone_since.get_or_insert(at);
            if at.saturating_sub(since) < GONE_FOR {
                track.change = None;
                self.tracks.push(track);
            }
        }
        (self.sample, self.clock) = (sample, clock);
    }
}

impl Track {
    /// Its state in a word.
    pub fn word(&self) -> &'static str {
        if self.gone_since.is_some() { "gone" } else { self.pool.state.word() }
    }

    fn rate(&self) -> f64 {
        self.change.and_then(|change| change.rates).map_or(0.0, |rates| rates.sum())
    }
}

/// How many bytes the last character takes.
fn last_len(text: &str) -> usize {
    text.chars().next_back().map_or(0, char::len_utf8)
}

fn step(sort: SortKey, by: usize) -> SortKey {
    let at = SortKey::ALL.iter().position(|&key| key == sort).unwrap_or(0);
    SortKey::ALL[(at + by) % SortKey::ALL.len()]
}

/// Names from A on, everything else the most first.
fn compare(sort: SortKey, a: &Track, b: &Track) -> Ordering {
    let most_first = |figure: fn(&PoolSample) -> Bytes| figure(&b.pool).cmp(&figure(&a.pool));
    match sort {
        SortKey::Name => a.pool.label.cmp(&b.pool.label),
        SortKey::Used => most_first(|pool| pool.in_use),
        SortKey::Held => most_first(PoolSample::held),
        SortKey::Demand => most_first(PoolSample::demand),
        SortKey::Share => most_first(|pool| pool.fair().unwrap_or(Bytes::ZERO)),
        SortKey::Rate => b.rate().total_cmp(&a.rate()),
        SortKey::Pressure => compare_pressure(&b.pool, &a.pool),
    }
}

/// `used / limit` without a division: nothing is rounded. Something used of a limit of 0 is above all limits; nothing
/// used is nothing, whatever the limit.
fn compare_pressure(a: &PoolSample, b: &PoolSample) -> Ordering {
    let is_endless = |pool: &PoolSample| pool.limit == Bytes::ZERO && pool.in_use != Bytes::ZERO;
    let cross = |used: &PoolSample, limit: &PoolSample| u128::from(used.in_use.0) * u128::from(limit.limit.0.max(1));
    is_endless(a).cmp(&is_endless(b)).then_with(|| cross(a, b).cmp(&cross(b, a)))
}
