//! Ctrl-C, the same in every benchmark that takes a while.
//!
//! ```text
//!   first SIGINT, SIGTERM or SIGHUP    the load stops, servers are stopped, what was measured is written: exit code 130
//!   second                             the process ends at once, as it would have; guards stop the servers
//! ```

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use tidekv_cli::exit::Outcome;

use crate::load::Cancel;

/// What a shell says of a program that Ctrl-C has ended.
const INTERRUPTED: u8 = 130;

/// Whether somebody wants this to end. Clones hear the same signals.
#[derive(Clone, Debug)]
pub struct Interrupt {
    cancel: Cancel,
}

impl Interrupt {
    /// Listens from now on. Once in a process: a handler cannot be taken away again.
    ///
    /// # Errors
    /// When signals cannot be caught, or there is no thread to be had.
    pub fn catch() -> io::Result<Self> {
        let interrupt = Self::never();
        let cancel = interrupt.cancel.clone();
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
        thread::Builder::new().name("signals".to_owned()).spawn(move || {
            for signal in signals.forever() {
                if cancel.is_cancelled() {
                    let _ = emulate_default_handler(signal);
                }
                cancel.cancel();
            }
        })?;
        Ok(interrupt)
    }

    /// One that no signal reaches: for tests.
    pub fn never() -> Self {
        Self { cancel: Cancel::new() }
    }

    /// What ends a run early.
    pub fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    /// Whether it was pressed.
    pub fn is_pressed(&self) -> bool {
        self.cancel.is_cancelled()
    }

    /// Waits; `false` if it was pressed first.
    pub fn wait(&self, time: Duration) -> bool {
        self.cancel.wait_until(Instant::now() + time)
    }

    /// What a benchmark ends with: `outcome`, unless it was interrupted.
    pub fn outcome(&self, outcome: Outcome) -> Outcome {
        if self.is_pressed() { Outcome::Code(INTERRUPTED) } else { outcome }
    }
}
