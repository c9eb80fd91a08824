//! A progress bar on stderr, and only where someone is looking at it.
//!
//! The bar is drawn by the caller's own `step`, between measurements: no thread ticks beside the code that is
//! being timed. Piped, redirected, with `--json` or with `--quiet` there is no bar and not a byte on stderr.

use std::borrow::Cow;
use std::io::{self, IsTerminal};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Progress over a known number of steps. The bar disappears when this is dropped.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar of `steps` on a terminal; silence elsewhere, and wherever `wanted` is false.
    pub fn new(steps: u64, wanted: bool) -> Self {
        if wanted && io::stderr().is_terminal() { Self::on_terminal(steps) } else { Self::hidden() }
    }

    /// No bar, whatever stderr is.
    pub fn hidden() -> Self {
        Self { bar: ProgressBar::hidden() }
    }

    fn on_terminal(steps: u64) -> Self {
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} ({eta} left)")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
        Self { bar: bar.with_style(style) }
    }

    /// There are so many steps after all.
    pub fn expect(&self, steps: u64) {
        self.bar.set_length(steps);
    }

    /// Says what is measured next.
    pub fn now(&self, what: impl Into<Cow<'static, str>>) {
        self.bar.set_message(what);
    }

    /// One more step is over.
    pub fn step(&self) {
        self.bar.inc(1);
    }

    /// So many steps are over.
    pub fn at(&self, steps: u64) {
        self.bar.set_position(steps);
    }

    /// Whether anything is drawn at all.
    pub fn is_hidden(&self) -> bool {
        self.bar.is_hidden()
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        // Cleared also when a benchmark fails half-way: its error must not share a line with the bar.
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unwanted_bar_is_hidden_even_on_a_terminal() {
        assert!(Progress::new(10, false).is_hidden());
        let hidden = Progress::hidden();
        hidden.now("mapping");
        hidden.step();
    }
}
