//! Signals that end or continue the process while a screen is up.
//!
//! | signal | what happens |
//! | --- | --- |
//! | `SIGTERM`, `SIGHUP`, `SIGINT`, `SIGQUIT` | the terminal is put back, then the process ends by that very signal |
//! | `SIGCONT` | noted, so that the screen is taken and drawn again |

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

static CONTINUED: AtomicBool = AtomicBool::new(false);

/// Starts the thread that reads signals, once for the process.
pub(super) fn watch() -> io::Result<()> {
    static WATCHED: Mutex<bool> = Mutex::new(false);
    let mut watched = WATCHED.lock().unwrap_or_else(PoisonError::into_inner);
    if *watched {
        return Ok(());
    }
    let mut signals = Signals::new([SIGTERM, SIGHUP, SIGINT, SIGQUIT, SIGCONT])?;
    let name = "kvctl-signals".to_owned();
    thread::Builder::new().name(name).spawn(move || signals.forever().for_each(act))?;
    *watched = true;
    Ok(())
}

fn act(signal: i32) {
    if signal == SIGCONT {
        CONTINUED.store(true, Ordering::SeqCst);
        return;
    }
    super::put_back();
    // Ends the process. Should that fail, the next signal tries again.
    let _ = emulate_default_handler(signal);
}

/// Whether the process was continued since the last question.
pub(super) fn was_continued() -> bool {
    CONTINUED.swap(false, Ordering::SeqCst)
}
