//! What happened on a device lately, and why: a bounded ring of events beside the ledger.
//!
//! ```text
//!   pool       view.note(slot, ..)    inside an update       ─┐
//!              entry.note(..)         without the lock        ├─> journal ──> log ──> file      under the ledger's lock
//!   ledger     what an update changed of others' entries     ─┘   storms
//!                                                                 become few
//!   tools      EventReader, EventsWatch: pread and inotify, no lock
//! ```
//!
//! Events are written by the ledger itself, at the end of an update and under its lock; nothing else can write them, so
//! there is one writer at a time and no further lock. An update without news does not touch the file. Telling is a
//! courtesy: where it fails (no space, a damaged file that cannot be replaced) the events are dropped and counted, and
//! the update stands.
//!
//! The file goes with the ledger: the last pool that leaves in order takes both away. After a crash both stay, and with
//! them the story of it, until `kvctl gc`.

mod error;
mod event;
mod format;
mod journal;
mod log;
mod reader;
mod watch;

#[cfg(test)]
mod tests;

pub use error::EventsError;
pub use event::{Event, EventKind, Note, PoolRef, Reason};
pub use format::{FormatError, parse};
pub use reader::{Batch, EventReader};
pub use watch::EventsWatch;

pub(crate) use journal::{Happened, Journal};
pub(crate) use log::EventLog;

use crate::{DeviceName, RuntimeDir};

/// The devices of which this user has events. A folder that is not there or cannot be read has none.
pub fn list(dir: &RuntimeDir) -> Vec<DeviceName> {
    let prefix = crate::names::events_prefix();
    let Ok(entries) = std::fs::read_dir(dir.path()) else { return Vec::new() };
    let device = |name: String| DeviceName::new(name.strip_prefix(&prefix)?).ok();
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut devices: Vec<DeviceName> = names.filter_map(device).collect();
    devices.sort();
    devices
}
