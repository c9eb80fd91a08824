//! The rings of all devices, read as one.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use tidekv_shm::events::{self, EventsWatch};
use tidekv_shm::{DeviceName, Event, EventReader, EventsError, RuntimeDir};

use crate::console::Console;

/// How long a file that is being made may take; it is a matter of microseconds, unless its maker has to wait for a core.
const MAKING: Duration = Duration::from_millis(250);

/// Something to show.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) device: DeviceName,
    pub(super) news: News,
}

/// What there is to show of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum News {
    Event(Box<Event>),
    /// So many were overwritten before we looked.
    Missed(u64),
}

/// All rings of a folder, and how far each was read.
pub(super) struct Tapes {
    dir: RuntimeDir,
    readers: BTreeMap<DeviceName, EventReader>,
    /// Whether one was opened since somebody asked.
    opened: bool,
    /// Rings that could not be read, which is said once.
    unreadable: BTreeMap<DeviceName, String>,
}

impl Tapes {
    pub(super) fn new(dir: &RuntimeDir) -> Self {
        Self { dir: dir.clone(), readers: BTreeMap::new(), opened: false, unreadable: BTreeMap::new() }
    }

    /// Everything that is new, by time. Events that were told late, as one of several, are where they happened last.
    pub(super) fn read(&mut self, console: &mut Console) -> Vec<Told> {
        let mut told = Vec::new();
        for device in events::list(&self.dir) {
            if !self.readers.contains_key(&device) {
                self.open(&device, console);
            }
        }
        for device in self.readers.keys().cloned().collect::<Vec<_>>() {
            told.extend(self.read_device(&device, console));
        }
        by_time(told)
    }

    /// Watches the files that are being read. Says whether one of them is new: it may have got events before this.
    pub(super) fn watch(&mut self, watch: &EventsWatch) -> Result<bool, EventsError> {
        let is_new = std::mem::take(&mut self.opened);
        if is_new {
            for reader in self.readers.values() {
                watch.add(reader.path())?;
            }
        }
        Ok(is_new)
    }

    fn open(&mut self, device: &DeviceName, console: &mut Console) {
        match self.open_when_made(device) {
            Ok(Some(reader)) => {
                self.readers.insert(device.clone(), reader);
                self.opened = true;
            }
            Ok(None) => {}
            Err(error) => self.say_unreadable(device, &error, console),
        }
    }

    fn open_when_made(&self, device: &DeviceName) -> Result<Option<EventReader>, EventsError> {
        let deadline = Instant::now() + MAKING;
        loop {
            match EventReader::open(&self.dir, device) {
                // One that was said to be damaged is not waited for again.
                Err(EventsError::HalfBuilt { .. })
                    if Instant::now() < deadline && !self.unreadable.contains_key(device) =>
                {
                    thread::sleep(MAKING / 50);
                }
                outcome => return outcome,
            }
        }
    }

    fn read_device(&mut self, device: &DeviceName, console: &mut Console) -> Vec<Told> {
        let mut told = Vec::new();
        // A file that was made again is another one, which is read from its start.
        loop {
            let Some(reader) = self.readers.get_mut(device) else { return told };
            // Asked before it is read: of a file that has no name then, this was the last.
            let is_last = !reader.is_linked();
            match reader.read() {
                Ok(batch) => {
                    if batch.overwritten > 0 {
                        told.push(Told { device: device.clone(), news: News::Missed(batch.overwritten) });
                    }
                    let news = batch.events.into_iter().map(|event| News::Event(Box::new(event)));
                    told.extend(news.map(|news| Told { device: device.clone(), news }));
                    self.unreadable.remove(device);
                }
                Err(error) => self.say_unreadable(device, &error, console),
            }
            if !is_last {
                return told;
            }
            self.readers.remove(device);
            self.open(device, console);
        }
    }

    fn say_unreadable(&mut self, device: &DeviceName, error: &EventsError, console: &mut Console) {
        let text = error.to_string();
        if self.unreadable.get(device) != Some(&text) {
            console.note(format_args!("warning: events of {device} are not shown: {text}"));
            self.unreadable.insert(device.clone(), text);
        }
    }
}

/// By time; what happened in the same millisecond stays in the order of its device.
fn by_time(mut told: Vec<Told>) -> Vec<Told> {
    told.sort_by_key(|told| match &told.news {
        // What was missed came before all that is left.
        News::Missed(_) => 0,
        News::Event(event) => event.at_ms,
    });
    told
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::events::line::tests::event;

    fn missed(device: &str, count: u64) -> Told {
        Told { device: DeviceName::new(device).unwrap(), news: News::Missed(count) }
    }

    #[test]
    fn devices_are_woven_by_time() {
        let at = |device: &str, at_ms: u64, sequence: u64| {
            let event = Event { at_ms, sequence, ..event() };
            Told { device: DeviceName::new(device).unwrap(), news: News::Event(Box::new(event)) }
        };
        let a = [missed("a", 3), at("a", 5, 1), at("a", 5, 2), at("a", 4, 3)];
        let b = [at("b", 1, 1), at("b", 5, 2)];
        let told: Vec<Told> = a.iter().chain(&b).cloned().collect();
        let order: Vec<Told> = [&a[0], &b[0], &a[3], &a[1], &a[2], &b[1]].map(Clone::clone).into();
        assert_eq!(by_time(told), order);
    }
}
