//! What there is to see: every segment of the folder beside every entry of this user's ledgers.
//!
//! ```text
//!   segment (24 bytes)     ledger entry       it is
//!   yes                    owner alive        a pool of ours
//!   no, or its limit is 0  owner alive        a pool of ours that kvcached's tools do not see
//!   yes                    no                 a pool of kvcached's own, or a file left behind
//!   any                    owner gone         left behind: `kvctl gc`
//! ```
//!
//! A pool that runs on several devices under one name has one segment and an entry on each; it is listed once for each.

use std::path::PathBuf;

use tidekv_core::share::{MemoryUse, Standing, fair_shares, owed_with_cached, standing};
use tidekv_core::units::Bytes;
use tidekv_shm::segment::Segments;
use tidekv_shm::{
    DeviceName, EntryState, Ledger, LedgerEntry, LedgerError, LedgerHeader, LedgerView, PoolName, RuntimeDir,
    SegmentView, UNLIMITED,
};

use crate::command::DeviceMemory;
use crate::console::Console;
use crate::exit::Outcome;
use crate::text::nearest;

/// What the names of pools begin with that nobody named, or that `kvctl up` named. People may leave it out.
pub const PREFIX: &str = "kvcached_";

/// All pools at one moment.
#[derive(Debug)]
pub struct Scene {
    /// Where they were looked for.
    pub dir: RuntimeDir,
    /// One for each pool and device, by name.
    pub pools: Vec<Pool>,
    /// One for each ledger that could be read, by name: also those that have no pool now.
    pub devices: Vec<Device>,
    /// Ledgers that could not be read.
    pub unreadable: Vec<(DeviceName, LedgerError)>,
}

/// A device whose memory pools share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its name.
    pub name: DeviceName,
    /// What its ledger says of it.
    pub header: LedgerHeader,
    /// What all pools hold of it, and what that is good for.
    pub usage: MemoryUse,
}

impl Device {
    /// What it has free and what others than pools use: of the host as the kernel says now, else as its pools last saw it.
    pub(crate) fn memory(&self) -> DeviceMemory {
        let Device { name, header, usage } = self;
        let read = if *name == DeviceName::host() { DeviceMemory::read_host(usage.held()) } else { None };
        let used = usage.held().0.saturating_add(header.non_pool.0);
        read.unwrap_or(DeviceMemory { free: header.total.saturating_sub(Bytes(used)), others: header.non_pool })
    }

    /// What pools may still take: of their budget, where there is one, and no more than `free` of the device.
    pub(crate) fn free_for_pools(&self, free: Bytes) -> Bytes {
        if self.header.budget == Bytes::ZERO {
            free
        } else {
            free.min(self.header.budget.saturating_sub(self.usage.held()))
        }
    }
}

/// One pool on one device.
#[derive(Clone, Debug)]
pub struct Pool {
    /// The name of its segment: with the group, where that is not 0.
    pub name: String,
    /// What stands in the segment.
    pub segment: Option<SegmentView>,
    /// Its place in a ledger; a pool of kvcached's own has none.
    pub place: Option<Place>,
}

/// A pool's entry and what follows from it.
#[derive(Clone, Debug)]
pub struct Place {
    /// Of which device.
    pub device: DeviceName,
    /// The ledger, to change the entry or to wait for it.
    pub ledger: Ledger,
    /// What the ledger says of the device.
    pub header: LedgerHeader,
    /// The entry.
    pub entry: LedgerEntry,
    /// Whether a process owns it now.
    pub alive: bool,
    /// What it should hold.
    pub fair: Bytes,
    /// What it should give back now.
    pub owed: Bytes,
    /// How it stands against its share.
    pub standing: Standing,
    /// Why, in a sentence, where there is something to say.
    pub why: Option<String>,
}

impl Scene {
    /// Looks at everything, without waiting for anybody.
    pub fn look(dir: &RuntimeDir) -> Result<Self, LedgerError> {
        Self::look_again(dir, &mut Segments::default())
    }

    /// The same for whoever looks again and again: foreign files that have not changed are not read again.
    pub fn look_again(dir: &RuntimeDir, segments: &mut Segments) -> Result<Self, LedgerError> {
        let mut pools = Vec::new();
        let mut devices = Vec::new();
        let mut unreadable = Vec::new();
        for name in Ledger::list(dir)? {
            match look_at_ledger(dir, &name) {
                Ok(Some((header, places))) => {
                    let usage = places.iter().map(Place::usage).fold(MemoryUse::default(), MemoryUse::plus);
                    devices.push(Device { name, header, usage });
                    let pool = |place: Place| Pool { name: file_name(&place.entry), segment: None, place: Some(place) };
                    pools.extend(places.into_iter().map(pool));
                }
                Ok(None) => {}
                Err(error) => unreadable.push((name, error)),
            }
        }
        for (name, segment) in segments.look(dir) {
            let mut known = false;
            for pool in pools.iter_mut().filter(|pool| pool.name == name) {
                pool.segment = Some(segment);
                known = true;
            }
            if !known {
                pools.push(Pool { name, segment: Some(segment), place: None });
            }
        }
        pools.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Self { dir: dir.clone(), pools, devices, unreadable })
    }

    /// The pools of this name, in full or without `kvcached_`: one for each device that it is on, empty if there is none.
    pub fn named(&self, name: &str) -> Vec<&Pool> {
        let name = self.full_name(name);
        self.pools.iter().filter(|pool| pool.name == name).collect()
    }

    /// The whole name of a pool that was asked for: `kvcached_chat` for `chat`, where no pool is called `chat`.
    pub fn full_name(&self, name: &str) -> String {
        let is_there = |name: &str| self.pools.iter().any(|pool| pool.name == name);
        let full = format!("{PREFIX}{name}");
        if !is_there(name) && is_there(&full) { full } else { name.to_owned() }
    }

    /// Whether a pool is one of those that were asked for; with no names, all are.
    pub fn is_wanted(&self, pool: &Pool, names: &[String]) -> bool {
        names.is_empty() || names.iter().any(|name| self.full_name(name) == pool.name)
    }

    /// Where a pool's segment lies.
    pub fn segment_path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// ` Did you mean 'x'?`, where a pool has a name like this one; else nothing.
    pub fn suggestion(&self, name: &str) -> String {
        let names = self.pools.iter().map(|pool| pool.name.as_str());
        let short = names.clone().filter_map(|name| name.strip_prefix(PREFIX));
        let nearest = nearest(name, names.chain(short));
        nearest.map(|nearest| format!(" Did you mean '{nearest}'?")).unwrap_or_default()
    }

    /// Says on stderr that there is no such pool, and which there are.
    pub fn say_unknown(&self, name: &str, console: &mut Console) -> Outcome {
        let mut names: Vec<&str> = self.pools.iter().map(|pool| pool.name.as_str()).collect();
        names.dedup();
        let line = format!("Error: IPC '{name}' not found.{}", self.suggestion(name));
        console.note(line);
        if !names.is_empty() {
            console.note(format_args!("Active IPC names: {}", names.join(", ")));
        }
        self.say_unreadable(console);
        Outcome::Negative
    }

    /// Says on stderr which ledgers could not be read.
    pub fn say_unreadable(&self, console: &mut Console) {
        for (device, error) in &self.unreadable {
            console.note(format_args!("warning: pools on {device} are not shown in full: {error}"));
        }
    }
}

impl Place {
    /// What it holds and what that is good for. What a dead owner held is needed until it is back.
    pub fn usage(&self) -> MemoryUse {
        if self.alive { self.entry.usage() } else { MemoryUse::all_needed(self.entry.reserved) }
    }
}

impl Pool {
    /// The limit as kvcached's tools see it.
    pub fn limit(&self) -> i64 {
        match (&self.segment, &self.place) {
            (Some(segment), _) => segment.limit,
            (None, Some(place)) => saturate(place.entry.limit.min(place.header.total)),
            (None, None) => 0,
        }
    }

    /// What it uses, as kvcached's tools see it.
    pub fn used(&self) -> i64 {
        match (&self.segment, &self.place) {
            (Some(segment), _) => segment.used,
            (None, Some(place)) => saturate(place.entry.usage().used()),
            (None, None) => 0,
        }
    }

    /// What it holds beyond that, as kvcached's tools see it.
    pub fn prealloc(&self) -> i64 {
        match (&self.segment, &self.place) {
            (Some(segment), _) => segment.prealloc,
            (None, Some(place)) => saturate(place.entry.usage().idle),
            (None, None) => 0,
        }
    }

    /// Its place in a ledger, if its owner lives.
    pub fn live_place(&self) -> Option<&Place> {
        self.place.as_ref().filter(|place| place.alive)
    }

    /// In a word.
    pub fn state(&self) -> State {
        match &self.place {
            None => State::Kvcached,
            Some(place) if place.entry.state == EntryState::Returning => State::Returning,
            Some(place) if !place.alive => State::Dead,
            Some(place) if place.entry.applied_revision < place.entry.limit_revision => State::Draining,
            Some(_) => State::Live,
        }
    }
}

/// A pool's state in a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Its owner lives.
    Live,
    /// Its owner lives and has not yet carried out the latest limit.
    Draining,
    /// Its owner is gone, and nobody has noticed yet.
    Dead,
    /// Its owner is gone, its memory is on the way back.
    Returning,
    /// It has no entry in a ledger: kvcached's own.
    Kvcached,
}

impl State {
    /// The word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Draining => "draining",
            Self::Dead => "dead",
            Self::Returning => "returning",
            Self::Kvcached => "kvcached",
        }
    }
}

/// What a pool's segment is called.
pub fn file_name(entry: &LedgerEntry) -> String {
    match PoolName::new(&entry.name) {
        Ok(name) => name.with_group(entry.group).as_str().to_owned(),
        // No pool registers without a name; an entry that says so is shown as it is.
        Err(_) => entry.name.clone(),
    }
}

/// A size for people, or `none` for the absence of a bound.
pub fn bound(bytes: Bytes) -> String {
    if bytes == UNLIMITED { "none".to_owned() } else { bytes.to_string() }
}

/// A ledger's header and the places of its pools; none if the ledger has gone meanwhile.
fn look_at_ledger(dir: &RuntimeDir, device: &DeviceName) -> Result<Option<(LedgerHeader, Vec<Place>)>, LedgerError> {
    let Some(ledger) = Ledger::open_existing(dir, device)? else { return Ok(None) };
    let view = ledger.read()?;
    let alive: Vec<bool> = view.entries.iter().map(|entry| is_alive(&view, entry)).collect();
    let mut as_claimed = view.clone();
    for (entry, &alive) in as_claimed.entries.iter_mut().zip(&alive) {
        // What nobody noticed yet holds for the arithmetic already.
        if !alive {
            entry.state = EntryState::Returning;
        }
    }
    let claims = as_claimed.pool_claims();
    let fair = fair_shares(view.header.budget, &claims);
    let (budget, is_given) = (view.header.budget, view.header.explicit_budget);
    let names: Vec<String> = view.entries.iter().map(file_name).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let places = view.entries.into_iter().enumerate().map(|(index, entry)| {
        // Before a pool has looked at the device nobody has a share.
        let (standing, why) = if budget == Bytes::ZERO {
            (Standing::Within, None)
        } else {
            standing(budget, is_given, &claims, &names, index)
        };
        Place {
            device: device.clone(),
            ledger: ledger.clone(),
            header: view.header,
            entry,
            alive: alive[index],
            fair: fair[index],
            owed: owed_with_cached(budget, &claims, index, is_given),
            standing,
            why,
        }
    });
    Ok(Some((view.header, places.collect())))
}

/// Whether a process owns this entry now.
pub fn is_alive(view: &LedgerView, entry: &LedgerEntry) -> bool {
    entry.state == EntryState::Live && view.is_owner_alive(entry.slot)
}

fn saturate(bytes: Bytes) -> i64 {
    i64::try_from(bytes.0).unwrap_or(i64::MAX)
}
