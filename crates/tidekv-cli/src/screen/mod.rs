//! The terminal as a whole: taken for a while, and put back as it was whatever happens.
//!
//! ```text
//!   Screen::open ──> raw mode, alternate screen, no cursor, the mouse if asked for
//!        │
//!        ├─ dropped: quit, error, --count             ─┐
//!        ├─ a panic, before its message is printed    ─┤
//!        ├─ SIGTERM, SIGHUP, SIGINT, SIGQUIT          ─┼─> put_back, at most once for each time it was taken
//!        └─ Ctrl-Z                                    ─┘   (and after the last two the signal takes its course)
//! ```
//!
//! Signals are read by a thread, not by the loop that draws: a terminal that hangs, or is gone, must not keep the
//! process from ending. For the same reason `put_back` writes to the descriptor and takes no lock of stdout. The
//! thread stays for the rest of the process, because a signal that once had a handler cannot safely get its default
//! action back; without a screen it does what the default would have done.

mod signals;

use std::io::{self, BufWriter, IsTerminal, Stdout, Write};
use std::panic;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use ratatui::crossterm::cursor::{Hide, Show};
use ratatui::crossterm::event::{self, DisableMouseCapture, EnableMouseCapture, Event};
use ratatui::crossterm::queue;
use ratatui::crossterm::style::ResetColor;
use ratatui::crossterm::terminal::{
    self, Clear, ClearType, EndSynchronizedUpdate, EnterAlternateScreen, LeaveAlternateScreen,
};

/// Whether a screen is up, for those who have to put it back from outside.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// How late a change from outside (the process was continued) may be noticed. Input wakes us at once.
const SLICE: Duration = Duration::from_millis(100);

/// The terminal, ours until this is dropped.
pub struct Screen {
    mouse: bool,
    previous_hook: Option<Arc<PanicHook>>,
}

type PanicHook = dyn Fn(&panic::PanicHookInfo<'_>) + Send + Sync;

/// What woke [`Screen::wait`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wake {
    /// A key, the mouse, another size.
    Event(Event),
    /// We were stopped and are running again: everything has to be drawn anew.
    Continued,
    /// It is time.
    Time,
}

impl Screen {
    /// Takes the terminal. `instead` says what to do where there is none.
    pub fn open(mouse: bool, instead: &str) -> anyhow::Result<Self> {
        if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
            bail!("there is no terminal to draw on: {instead}");
        }
        signals::watch().context("cannot watch signals")?;
        let previous_hook: Arc<PanicHook> = Arc::from(panic::take_hook());
        let hook = Arc::clone(&previous_hook);
        panic::set_hook(Box::new(move |info| {
            put_back();
            hook(info);
        }));
        let screen = Self { mouse, previous_hook: Some(previous_hook) };
        screen.take()?;
        // The first question makes crossterm listen for another size; one that came before would never be heard of.
        event::poll(Duration::ZERO).context("cannot read from the terminal")?;
        Ok(screen)
    }

    /// Where to draw: a whole picture in one write. To be flushed, and gone before the screen is.
    pub fn writer() -> BufWriter<Stdout> {
        BufWriter::with_capacity(1 << 16, io::stdout())
    }

    /// Columns and rows.
    pub fn size(&self) -> anyhow::Result<(u16, u16)> {
        terminal::size().context("cannot find out the size of the terminal")
    }

    /// Waits for something to happen, at most until `until`.
    pub fn wait(&self, until: Instant) -> anyhow::Result<Wake> {
        loop {
            if signals::was_continued() {
                // The shell may have changed the terminal's modes meanwhile.
                self.take_again()?;
                return Ok(Wake::Continued);
            }
            let left = until.saturating_duration_since(Instant::now());
            // Before input, so that a key that is held down does not keep the time from passing.
            if left.is_zero() {
                return Ok(Wake::Time);
            }
            if event::poll(left.min(SLICE)).context("cannot read from the terminal")? {
                return Ok(Wake::Event(event::read().context("cannot read from the terminal")?));
            }
        }
    }

    /// Gives the terminal back, stops this job as the terminal would have for Ctrl-Z, and takes it again afterwards.
    pub fn suspend(&self) -> anyhow::Result<()> {
        put_back();
        // The whole job, as the terminal does it: there may be a script around us.
        rustix::process::kill_current_process_group(rustix::process::Signal::TSTP)
            .context("cannot stop this process")?;
        // Here we are running again, or nobody could have continued us and the signal was ignored.
        signals::was_continued();
        self.take_again()
    }

    fn take_again(&self) -> anyhow::Result<()> {
        put_back();
        self.take()
    }

    fn take(&self) -> anyhow::Result<()> {
        TAKEN.store(true, Ordering::SeqCst);
        terminal::enable_raw_mode().context("cannot switch the terminal to raw mode")?;
        let mut bytes = Vec::new();
        queue!(bytes, EnterAlternateScreen, Hide, Clear(ClearType::All))?;
        if self.mouse {
            queue!(bytes, EnableMouseCapture)?;
        }
        io::stdout().write_all(&bytes).and_then(|()| io::stdout().flush()).context("cannot write to the terminal")
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        put_back();
        // A panicking thread may not change the hook; the process is about to end then.
        if !thread::panicking()
            && let Some(previous) = self.previous_hook.take()
        {
            drop(panic::take_hook());
            panic::set_hook(Box::new(move |info| previous(info)));
        }
    }
}

impl std::fmt::Debug for Screen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Screen").field("mouse", &self.mouse).finish_non_exhaustive()
    }
}

/// Puts the terminal back as it was, if it is taken. From any thread, at any time.
fn put_back() {
    if !TAKEN.swap(false, Ordering::SeqCst) {
        return;
    }
    let mut bytes = Vec::new();
    // Writing to a vector does not fail; and with the terminal gone there is nothing to put back.
    let _ = queue!(bytes, EndSynchronizedUpdate, DisableMouseCapture, ResetColor, LeaveAlternateScreen, Show);
    let mut rest = bytes.as_slice();
    while !rest.is_empty() {
        match rustix::io::write(rustix::stdio::stdout(), rest) {
            Ok(written) => rest = &rest[written..],
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => break,
        }
    }
    let _ = terminal::disable_raw_mode();
}
