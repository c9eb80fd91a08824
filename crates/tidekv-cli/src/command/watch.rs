//! `kvctl watch`: the list again and again, with what changed.
//!
//! On a terminal it takes the alternate screen, so that what was on the screen before is there again afterwards, and
//! writes each list over the one before it: from the top, each line with blanks to its end, and only the rows below are
//! cleared. Nothing is ever blank in between, so nothing flickers. In a pipe the lists come one after another, each after a line with
//! the time, without a single code.

use std::io::{self, IsTerminal, Write};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use jiff::Zoned;
use ratatui::crossterm::cursor::MoveTo;
use ratatui::crossterm::event::{Event, KeyCode, KeyEvent, KeyModifiers};
use ratatui::crossterm::queue;
use ratatui::crossterm::style::Print;
use ratatui::crossterm::terminal::{BeginSynchronizedUpdate, Clear, ClearType, EndSynchronizedUpdate};
use tidekv_shm::RuntimeDir;
use tidekv_shm::segment::Segments;

use super::next_look;
use super::table::{CHANGING, Row, Table};
use crate::change::{Changes, PoolKey, Reading};
use crate::console::{Colour, Console};
use crate::exit::Outcome;
use crate::scene::{Pool, Scene};
use crate::screen::{Screen, Wake};
use crate::text::{fit, printable};

pub(super) fn run(
    dir: &RuntimeDir,
    names: &[String],
    interval: Duration,
    count: Option<u64>,
    console: &mut Console,
) -> anyhow::Result<Outcome> {
    let watched = Watched { dir, names, interval, count };
    if io::stdout().is_terminal() && io::stdin().is_terminal() {
        watched.on_screen(console)
    } else {
        watched.in_pipe(console)
    }
}

/// What is watched, and how.
struct Watched<'a> {
    dir: &'a RuntimeDir,
    names: &'a [String],
    interval: Duration,
    count: Option<u64>,
}

/// A look and what changed since the one before.
#[derive(Default)]
struct Look {
    start: Option<Instant>,
    number: u64,
    scene: Option<Scene>,
    segments: Segments,
    changes: Changes,
}

impl Look {
    fn again(&mut self, watched: &Watched<'_>) -> anyhow::Result<()> {
        let scene = Scene::look_again(watched.dir, &mut self.segments)?;
        let at = self.start.get_or_insert_with(Instant::now).elapsed();
        let readings = scene.pools.iter().map(|pool| (PoolKey::of(pool), Reading::of(pool)));
        self.changes.observe(at, readings);
        self.scene = Some(scene);
        self.number += 1;
        Ok(())
    }

    /// The list in lines, for a terminal of this width or for a pipe.
    fn lines(&self, watched: &Watched<'_>, width: Option<usize>) -> Vec<(String, Option<Colour>)> {
        let Some(scene) = &self.scene else { return Vec::new() };
        let wanted = |pool: &&Pool| scene.is_wanted(pool, watched.names);
        let row = |pool| Row { pool, change: self.changes.of(&PoolKey::of(pool)) };
        let rows: Vec<Row<'_>> = scene.pools.iter().filter(wanted).map(row).collect();
        let mut lines = Vec::new();
        if rows.is_empty() && watched.names.is_empty() {
            lines.push(("No active KVCached segments found.".to_owned(), None));
        } else if !rows.is_empty() {
            let table = Table::new(rows, CHANGING, width);
            let table = if width.is_some() { table.with_cut_names() } else { table };
            lines.push((table.header(), Some(Colour::BoldCyan)));
            lines.extend(table.lines().map(|(line, colour)| (line, Some(colour))));
        }
        for name in watched.names.iter().filter(|name| scene.named(name).is_empty()) {
            let line = format!("Waiting for {name}: not there yet.{}", scene.suggestion(name));
            lines.push((printable(&line).into_owned(), None));
        }
        for (device, error) in &scene.unreadable {
            let trouble = format!("warning: pools on {device} are not shown in full: {error}");
            lines.push((printable(&trouble).into_owned(), Some(Colour::Red)));
        }
        lines
    }
}

impl Watched<'_> {
    fn in_pipe(&self, console: &mut Console) -> anyhow::Result<Outcome> {
        let mut look = Look::default();
        let mut next = Instant::now();
        loop {
            look.again(self)?;
            console.line(now())?;
            for (line, _) in look.lines(self, None) {
                console.line(line)?;
            }
            if self.count == Some(look.number) || console.is_reader_gone() {
                return Ok(Outcome::Done);
            }
            next = next_look(next, self.interval);
            thread::sleep(next.saturating_duration_since(Instant::now()));
        }
    }

    fn on_screen(&self, console: &Console) -> anyhow::Result<Outcome> {
        let mut look = Look::default();
        // The first look comes before the terminal is taken, so that an error is an ordinary one.
        look.again(self)?;
        let screen = Screen::open(false, "use --count in a pipe")?;
        let mut next = Instant::now() + self.interval;
        loop {
            let (columns, rows) = screen.size()?;
            let picture = self.picture(&look, console, columns, rows);
            write_over(&picture, rows).context("cannot write to the terminal")?;
            match screen.wait(next)? {
                Wake::Time if self.count == Some(look.number) => return Ok(Outcome::Done),
                Wake::Time => {
                    look.again(self)?;
                    next = next_look(next, self.interval);
                }
                Wake::Event(Event::Key(key)) if leaves(key) => return Ok(Outcome::Done),
                Wake::Event(Event::Key(key)) if is_control(key, 'z') => screen.suspend()?,
                Wake::Event(_) | Wake::Continued => {}
            }
        }
    }

    /// The whole screen: a line that says what this is, then the list, cut to the screen.
    fn picture(&self, look: &Look, console: &Console, columns: u16, rows: u16) -> Vec<String> {
        let (columns, rows) = (usize::from(columns), usize::from(rows));
        let paint = |text: &str, colour: Option<Colour>| {
            // Blanks, and not a code that clears to the end of the line: behind a line that is just as wide as the
            // terminal that code takes the last character away.
            let text = fit(text, columns);
            colour.map_or_else(|| text.clone(), |colour| console.paint(&text, colour))
        };
        let title = format!("Every {}: kvctl list   {}   q leaves", seconds(self.interval), now());
        let lines = look.lines(self, Some(columns));
        let room = rows.saturating_sub(2);
        let shown = if lines.len() > room { room.saturating_sub(1) } else { lines.len() };
        let mut picture = vec![paint(&title, None), paint("", None)];
        picture.extend(lines[..shown].iter().map(|(line, colour)| paint(line, *colour)));
        if shown < lines.len() {
            picture.push(paint(&format!("... {} more", lines.len() - shown), None));
        }
        picture.truncate(rows);
        picture
    }
}

/// Writes lines over what is on the screen, in one write that terminals may show as one step.
fn write_over(lines: &[String], rows: u16) -> io::Result<()> {
    let mut bytes = Vec::new();
    queue!(bytes, BeginSynchronizedUpdate)?;
    for (row, line) in (0u16..).zip(lines) {
        queue!(bytes, MoveTo(0, row), Print(line))?;
    }
    if let Some(below) = u16::try_from(lines.len()).ok().filter(|&below| below < rows) {
        queue!(bytes, MoveTo(0, below), Clear(ClearType::FromCursorDown))?;
    }
    queue!(bytes, EndSynchronizedUpdate)?;
    let mut stdout = io::stdout().lock();
    stdout.write_all(&bytes)?;
    stdout.flush()
}

fn leaves(key: KeyEvent) -> bool {
    key.code == KeyCode::Char('q') || is_control(key, 'c')
}

fn is_control(key: KeyEvent, letter: char) -> bool {
    key.code == KeyCode::Char(letter) && key.modifiers.contains(KeyModifiers::CONTROL)
}

fn seconds(interval: Duration) -> String {
    format!("{}s", interval.as_secs_f64())
}

fn now() -> String {
    Zoned::now().strftime("%Y-%m-%d %H:%M:%S").to_string()
}
