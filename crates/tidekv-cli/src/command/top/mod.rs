//! `kvtop`, which is also `kvctl kvtop`: pools and devices, live.
//!
//! ```text
//!   collect   what there is, as numbers        Scene ──> Sample
//!   state     what is known and chosen         Sample, keys, time ──> State
//!   draw      the screen                       State ──> cells
//!   print     --once                           one table
//!   json      --json                           an object per line
//!
//!   loop      wait for a key or for the time; look when it is time; draw
//! ```
//!
//! Only the loop in here knows the clock and the terminal. A look never waits for a pool, and no pool for a look.

pub mod collect;
pub mod draw;
#[cfg(test)]
mod fixture;
mod json;
mod print;
pub mod state;

use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use jiff::{Timestamp, Zoned};
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::event::{Event, MouseButton, MouseEvent, MouseEventKind};
use ratatui::layout::Rect;
use tidekv_shm::RuntimeDir;
use tidekv_shm::segment::Segments;

use super::next_look;
use crate::change::{Changes, PoolKey};
use crate::console::Console;
use crate::exit::Outcome;
use crate::request::{TopOutput, TopRequest};
use crate::scene::{Pool, Scene};
use crate::screen::{Screen, Wake};
use crate::text::printable;
use collect::Sample;
use state::{Flow, State};

/// Shows pools and devices, live.
pub fn run(dir: &RuntimeDir, request: &TopRequest, console: &mut Console) -> anyhow::Result<Outcome> {
    match request.output {
        TopOutput::Screen => on_screen(dir, request, console),
        TopOutput::Once => once(dir, request, console),
        TopOutput::Json => as_json(dir, request, console),
    }
}

fn once(dir: &RuntimeDir, request: &TopRequest, console: &mut Console) -> anyhow::Result<Outcome> {
    let scene = Scene::look(dir)?;
    let sample = Sample::of(&scene, &request.names);
    let missing = |name: &&String| scene.named(name).is_empty();
    if request.names.is_empty() || !request.names.iter().all(|name| missing(&name)) {
        print::print(&sample, &in_order(&scene, &sample, request), console)?;
    }
    scene.say_unreadable(console);
    let mut outcome = Outcome::Done;
    for name in request.names.iter().filter(missing) {
        outcome = scene.say_unknown(name, console);
    }
    Ok(outcome)
}

fn as_json(dir: &RuntimeDir, request: &TopRequest, console: &mut Console) -> anyhow::Result<Outcome> {
    let start = Instant::now();
    let mut next = start;
    let mut changes = Changes::default();
    let (mut looks, mut segments) = (0, Segments::default());
    loop {
        let scene = Scene::look_again(dir, &mut segments)?;
        let at = start.elapsed();
        let sample = Sample::of(&scene, &request.names);
        changes.observe(at, sample.pools.iter().map(|pool| (pool.key.clone(), pool.reading())));
        let pools = in_order(&scene, &sample, request);
        console.line(json::line(&sample, &pools, &changes, Timestamp::now()).context("cannot write JSON")?)?;
        looks += 1;
        if request.count == Some(looks) || console.is_reader_gone() {
            return Ok(Outcome::Done);
        }
        next = next_look(next, request.refresh);
        thread::sleep(next.saturating_duration_since(Instant::now()));
    }
}

/// The scene's pools, chosen and ordered as the request says.
fn in_order<'a>(scene: &'a Scene, sample: &Sample, request: &TopRequest) -> Vec<&'a Pool> {
    let mut state = State::new(request);
    state.observe(sample.clone(), Duration::ZERO, String::new());
    let visible = state.visible();
    visible.iter().filter_map(|track| scene.pools.iter().find(|pool| PoolKey::of(pool) == track.pool.key)).collect()
}

fn on_screen(dir: &RuntimeDir, request: &TopRequest, console: &mut Console) -> anyhow::Result<Outcome> {
    let style = draw::Style { theme: draw::Theme { colour: console.has_colour() }, folder: dir.path() };
    // Looked at before the terminal is taken, so that a folder that cannot be read is an ordinary error.
    let mut segments = Segments::default();
    let first = Scene::look_again(dir, &mut segments)?;
    let screen = Screen::open(request.mouse, "use --once for a table or --json for a stream of samples")?;
    let mut terminal =
        Terminal::new(CrosstermBackend::new(Screen::writer())).context("cannot draw on this terminal")?;
    let start = Instant::now();
    let mut state = State::new(request);
    state.observe(Sample::of(&first, &request.names), Duration::ZERO, clock());
    let mut looks = 1;
    let mut next = next_look(start, request.refresh);
    loop {
        terminal.draw(|frame| draw::draw(&state, style, frame)).context("cannot draw on the terminal")?;
        match screen.wait(next)? {
            Wake::Time => {
                if request.count == Some(looks) {
                    return Ok(Outcome::Done);
                }
                match Scene::look_again(dir, &mut segments) {
                    Ok(scene) => state.observe(Sample::of(&scene, &request.names), start.elapsed(), clock()),
                    // What hinders a look may pass; whoever watches for hours wants to see that too.
                    Err(error) => {
                        state.observe_failure(printable(&format!("cannot look: {error}")).into_owned(), clock())
                    }
                }
                looks += 1;
                next = next_look(next, request.refresh);
            }
            Wake::Continued => terminal.clear().context("cannot draw on the terminal")?,
            Wake::Event(Event::Key(key)) => match state.key(key) {
                Flow::Stay => {}
                Flow::Leave => return Ok(Outcome::Done),
                Flow::Suspend => {
                    screen.suspend()?;
                    terminal.clear().context("cannot draw on the terminal")?;
                }
            },
            Wake::Event(Event::Mouse(mouse)) => {
                let area = terminal.get_frame().area();
                on_mouse(&mut state, area, mouse);
            }
            // Another size: the terminal is asked for it before each drawing.
            Wake::Event(_) => {}
        }
    }
}

fn on_mouse(state: &mut State, area: Rect, mouse: MouseEvent) {
    match mouse.kind {
        MouseEventKind::ScrollUp => state.scroll(-1),
        MouseEventKind::ScrollDown => state.scroll(1),
        MouseEventKind::Down(MouseButton::Left) => {
            if let Some(index) = draw::row_at(area, state, mouse.column, mouse.row) {
                state.click(index);
            }
        }
        _ => {}
    }
}

fn clock() -> String {
    Zoned::now().strftime("%H:%M:%S").to_string()
}
