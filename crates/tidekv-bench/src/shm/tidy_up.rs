//! Names that others see: gone when the benchmark ends, also when it is interrupted.
//!
//! ```text
//!   Undisturbed    while it lives, no interrupt is heard: for names that live for microseconds, and for making one
//!   Named          an interrupt removes it: for names that live longer
//! ```
//!
//! A thread of its own waits for SIGINT, SIGTERM and SIGHUP. It takes the list of names, which nobody gets again,
//! removes what is on it, and lets the signal do what it always does. Nothing is done inside a signal handler but
//! writing to a pipe.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

static NAMED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn named() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    NAMED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A time without interrupts.
#[derive(Debug)]
#[must_use = "interrupts are heard again when it is dropped"]
pub(super) struct Undisturbed(MutexGuard<'static, BTreeSet<PathBuf>>);

impl Undisturbed {
    pub(super) fn begin() -> Self {
        static WATCH: Once = Once::new();
        WATCH.call_once(watch);
        Self(named())
    }

    /// From now on an interrupt removes this file.
    pub(super) fn note(mut self, path: impl Into<PathBuf>) -> Named {
        let path = path.into();
        self.0.insert(path.clone());
        Named(path)
    }
}

/// A file that an interrupt removes, until this is dropped.
#[derive(Debug)]
#[must_use = "dropping it at once protects nothing"]
pub(super) struct Named(PathBuf);

impl Drop for Named {
    fn drop(&mut self) {
        named().remove(&self.0);
    }
}

/// Without the thread an interrupt leaves files behind, which `kvctl gc` removes: no reason not to measure.
fn watch() {
    let Ok(mut signals) = Signals::new([SIGINT, SIGTERM, SIGHUP]) else { return };
    let _ = thread::Builder::new().name("tidy-up".to_owned()).spawn(move || {
        if let Some(signal) = signals.forever().next() {
            let named = named();
            for path in &*named {
                let _ = fs::remove_file(path);
            }
            let _ = emulate_default_handler(signal);
            drop(named);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_noted_until_its_note_is_dropped() {
        let path = PathBuf::from("never-made");
        let note = Undisturbed::begin().note(&path);
        assert!(named().contains(&path));
        drop(note);
        assert!(!named().contains(&path));
    }
}
