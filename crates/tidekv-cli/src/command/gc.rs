//! `kvctl gc`: what killed processes left behind.
//!
//! | found                                         | known by                                   | then             |
//! |-----------------------------------------------|--------------------------------------------|------------------|
//! | entry whose owner is gone                     | the owner's lock is free                   | removed          |
//! | ledger without entries                        | looked at under its lock                   | removed          |
//! | events without a ledger                       | its name and our magic                     | removed          |
//! | folder of sockets whose workers are gone      | nobody listens at any of them              | removed          |
//! | ledger or arena that its maker did not finish | its name, and zeros or our magic; no lock on it | removed     |
//! | what a killed `kvctl up` left running         | its lock is free, and the processes carry its mark | ended, removed |
//! | arena that nobody uses                        | all its members' locks are free            | removed          |
//! | segment of a pool that was killed            | the entry of its name whose owner is gone; no lock on it   | removed   |
//! | 24 bytes like a segment's, without an entry   | a limit and a use that a pool can have; no lock on it      | left, and named |
//! | segment that kvbench was asked to leave       | its name; no process has its maker's number, and nobody a lock | removed |
//! | `mooncake_bench_*`, of another benchmark      | its name                                   | left, and named  |
//! | other users' files, anything else             | uid, size, content                         | left             |
//!
//! Segments have no magic, because kvcached's have none, and size, mode and name say nothing about whose a file is. So the
//! ledger is the only proof: a pool has its entry before it has its segment, and whoever removes the entry of a dead pool
//! removes its segment first. A segment without an entry is kvcached's own, or one whose ledger somebody removed.
//!
//! The bytes of a dead owner on a GPU may still be on their way back; their entry is removed a second after the owner was
//! found dead, for which gc waits. Host memory is back when the owner's lock is free.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde::Serialize;
use tidekv_core::units::Bytes;
use tidekv_ipc::address::{self, StaleDir};
use tidekv_shm::arena::Arena;
use tidekv_shm::baseline;
use tidekv_shm::{
    DeviceName, EntryState, Ledger, LedgerEntry, LedgerError, LedgerView, RuntimeDir, events, now_ms, segment,
};

use super::lock_deadline;
use crate::console::Console;
use crate::exit::Outcome;
use crate::launch::house;
use crate::scene::{file_name, is_alive};

/// How long a device may take to have a dead process's memory back; measured: 65 to 300 ms on an H200.
const GRACE: Duration = Duration::from_secs(1);

pub(super) fn run(dir: &RuntimeDir, dry_run: bool, json: bool, console: &mut Console) -> anyhow::Result<Outcome> {
    let (mut removed, mut failures) = (0u32, 0u32);
    let verb = if dry_run { "Would remove" } else { "Removed" };
    let mut rows = Vec::new();
    sweep(dir, dry_run, &mut |found| {
        match &found {
            Found::Stale { .. } => removed += 1,
            Found::Failed { what, error } => {
                failures += 1;
                console.note(format_args!("error: {what}: {error}"));
            }
            Found::Left { .. } | Found::Foreign { .. } => {}
        }
        if json {
            rows.push(Row::of(found, dry_run));
            return Ok(());
        }
        match found {
            Found::Stale { what } => console.line(format_args!("{verb} {what}"))?,
            Found::Left { name, why } => {
                console.line(format_args!("Left segment {name}: {why}; `kvctl delete {name}` removes it"))?;
            }
            Found::Foreign { path } => {
                console.line(format_args!("Left {path}: {FOREIGN}; `rm {path}`, if none of them runs"))?;
            }
            Found::Failed { .. } => {}
        }
        Ok(())
    })?;
    if json {
        console.line(serde_json::to_string_pretty(&rows)?)?;
    } else if removed == 0 && failures == 0 {
        console.line("Nothing to remove.")?;
    }
    if failures > 0 {
        bail!("{failures} of them could not be looked at or removed");
    }
    Ok(Outcome::Done)
}

/// Why it is not ours to remove.
const FOREIGN: &str = "Mooncake's benchmarks made it";

/// One thing that was found, as JSON.
#[derive(Debug, Serialize)]
struct Row {
    /// `removed`, `would remove`, `left` or `failed`.
    action: &'static str,
    /// A sentence about what was removed, or the name of what was left.
    what: String,
    /// Why it was left or could not be removed.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
}

impl Row {
    fn of(found: Found, dry_run: bool) -> Self {
        let removed = if dry_run { "would remove" } else { "removed" };
        match found {
            Found::Stale { what } => Self { action: removed, what, why: None },
            Found::Left { name, why } => Self { action: "left", what: name, why: Some(why.to_owned()) },
            Found::Foreign { path } => Self { action: "left", what: path, why: Some(FOREIGN.to_owned()) },
            Found::Failed { what, error } => Self { action: "failed", what, why: Some(error) },
        }
    }
}

/// What `kvctl gc` would find now. Changes nothing.
pub(super) fn look(dir: &RuntimeDir) -> anyhow::Result<Vec<Found>> {
    let mut all = Vec::new();
    sweep(dir, true, &mut |found| {
        all.push(found);
        Ok(())
    })?;
    Ok(all)
}

/// One thing that a sweep came across.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Nobody owns it: it was removed, or would be.
    Stale { what: String },
    /// A segment that may be in use, which only a person can know.
    Left { name: String, why: &'static str },
    /// A file of somebody else's benchmark.
    Foreign { path: String },
    /// It could not be looked at or removed.
    Failed { what: String, error: String },
}

/// Goes through the folder and tells of each thing as it is found.
fn sweep(dir: &RuntimeDir, dry_run: bool, tell: &mut Tell<'_>) -> anyhow::Result<()> {
    let mut sweep = Sweep { dir, dry_run, tell, abandoned: BTreeSet::new(), alive: BTreeSet::new() };
    // First of all: what is still running of it has pools of its own.
    sweep.supervisors()?;
    for device in Ledger::list(dir)? {
        if let Err(error) = sweep.ledger(&device) {
            sweep.failed(format!("ledger of {device}"), &error)?;
        }
    }
    sweep.leftovers()?;
    sweep.events()?;
    sweep.sockets()?;
    sweep.arenas()?;
    sweep.benchmarks()?;
    sweep.segments()
}

type Tell<'a> = dyn FnMut(Found) -> anyhow::Result<()> + 'a;

struct Sweep<'a> {
    dir: &'a RuntimeDir,
    dry_run: bool,
    tell: &'a mut Tell<'a>,
    /// Names of segments whose pool was found dead and that nobody uses, and of pools found alive.
    abandoned: BTreeSet<String>,
    alive: BTreeSet<String>,
}

/// A dead owner's entry.
pub(crate) struct Dead {
    slot: u32,
    name: String,
    pid: u32,
    reserved: Bytes,
}

impl Sweep<'_> {
    fn stale(&mut self, what: String) -> anyhow::Result<()> {
        (self.tell)(Found::Stale { what })
    }

    fn left(&mut self, name: &str, why: &'static str) -> anyhow::Result<()> {
        (self.tell)(Found::Left { name: name.to_owned(), why })
    }

    fn failed(&mut self, what: String, error: &anyhow::Error) -> anyhow::Result<()> {
        (self.tell)(Found::Failed { what, error: format!("{error:#}") })
    }

    fn ledger(&mut self, device: &DeviceName) -> anyhow::Result<()> {
        let Some(ledger) = Ledger::open_existing(self.dir, device)? else { return Ok(()) };
        let view = ledger.read()?;
        self.alive.extend(view.entries.iter().filter(|entry| is_alive(&view, entry)).map(file_name));
        let of_dead = dead_entries(&view).into_iter().map(|dead| dead.name);
        let is_abandoned = |name: &String| segment::is_abandoned(&self.dir.path().join(name)).unwrap_or(false);
        self.abandoned.extend(of_dead.filter(is_abandoned));
        let dead = if self.dry_run { dead_entries(&view) } else { remove_dead(&ledger, device)? };
        for Dead { name, pid, reserved, .. } in &dead {
            self.stale(format!("entry of {name} on {device}: pid {pid} is gone, {reserved} were counted for it"))?;
        }
        let empties = if self.dry_run {
            view.entries.len() == dead.len() && view.torn.is_empty()
        } else {
            ledger.remove_if_empty(lock_deadline())?
        };
        if empties {
            self.stale(format!("ledger {}: it has no entries", ledger.path().display()))?;
        }
        Ok(())
    }

    /// Supervisors that were killed, with what they had started.
    fn supervisors(&mut self) -> anyhow::Result<()> {
        let houses = match house::houses(self.dir) {
            Ok(houses) => houses,
            Err(error) => return self.failed("supervisors".to_owned(), &error),
        };
        for house in houses.into_iter().filter(|house| !house.is_alive) {
            match if self.dry_run { Ok(Vec::new()) } else { house.clear() } {
                Ok(ended) => {
                    let ended =
                        if ended.is_empty() { String::new() } else { format!("; ended its processes {ended:?}") };
                    self.stale(format!("{}: its supervisor is gone{ended}", house.path.display()))?;
                }
                Err(error) => self.failed(format!("supervisor {}", house.id), &error)?,
            }
        }
        Ok(())
    }

    fn leftovers(&mut self) -> anyhow::Result<()> {
        // Only whoever removes them can tell that nobody is making them now.
        if self.dry_run {
            return Ok(());
        }
        for path in Ledger::remove_leftovers(self.dir)? {
            self.stale(format!("{}: a ledger that its maker did not finish", path.display()))?;
        }
        Ok(())
    }

    /// Events whose ledger is gone. Under the lock of a ledger made for it, nobody else makes one beside us.
    fn events(&mut self) -> anyhow::Result<()> {
        let ledgers = Ledger::list(self.dir).unwrap_or_default();
        for device in events::list(self.dir).into_iter().filter(|device| !ledgers.contains(device)) {
            let outcome = if self.dry_run {
                Ok(true)
            } else {
                Ledger::open(self.dir, &device).and_then(|ledger| ledger.remove_if_empty(lock_deadline()))
            };
            let path = self.dir.events_path(&device);
            match outcome {
                Ok(true) if self.dry_run || !path.exists() => {
                    self.stale(format!("events {}: they have no ledger", path.display()))?;
                }
                // A pool came meanwhile, or it is no file of ours.
                Ok(_) => {}
                Err(error) => self.failed(format!("events of {device}"), &error.into())?,
            }
        }
        Ok(())
    }

    /// Folders of sockets whose workers are gone. They lie where workers put them for this folder.
    fn sockets(&mut self) -> anyhow::Result<()> {
        let root = address::socket_root(self.dir);
        let stale = match address::stale_dirs(&root) {
            Ok(stale) => stale,
            Err(error) => return self.failed(format!("sockets in {}", root.display()), &error.into()),
        };
        for StaleDir { path, pool, sockets } in stale {
            match if self.dry_run { Ok(true) } else { address::remove_stale_dir(&path) } {
                Ok(true) => {
                    self.stale(format!("{}: {sockets} sockets of workers of {pool} that are gone", path.display()))?;
                }
                // A worker came meanwhile.
                Ok(false) => {}
                Err(error) => self.failed(format!("sockets {}", path.display()), &error.into())?,
            }
        }
        Ok(())
    }

    fn arenas(&mut self) -> anyhow::Result<()> {
        for name in Arena::list(self.dir)? {
            let unused = match self.dry_run {
                true => Arena::inspect(self.dir, &name).is_ok_and(|report| !report.members.iter().any(|one| one.alive)),
                false => Arena::unlink_if_unused(self.dir, &name)?,
            };
            if unused {
                self.stale(format!("arena {name}: nobody uses it"))?;
            }
        }
        if !self.dry_run {
            for path in Arena::remove_leftovers(self.dir)? {
                self.stale(format!("{}: an arena that its maker did not finish", path.display()))?;
            }
        }
        Ok(())
    }

    /// What benchmarks left. There is nothing of theirs to ask but the number of a process, so a number that was given
    /// again keeps a segment.
    fn benchmarks(&mut self) -> anyhow::Result<()> {
        let folder = self.dir.path();
        let unreadable = || format!("cannot read {}", folder.display());
        for left in baseline::left_behind(folder).with_context(unreadable)?.into_iter().filter(|left| !left.running) {
            let outcome = if self.dry_run { Ok(()) } else { fs::remove_file(&left.path) };
            let what = format!("{}: {} that a benchmark left", left.path.display(), Bytes(left.bytes));
            match outcome {
                Ok(()) => self.stale(what)?,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => self.failed(left.path.display().to_string(), &error.into())?,
            }
        }
        for path in baseline::foreign_benchmarks(folder).with_context(unreadable)? {
            (self.tell)(Found::Foreign { path: path.display().to_string() })?;
        }
        Ok(())
    }

    fn segments(&mut self) -> anyhow::Result<()> {
        let abandoned = std::mem::take(&mut self.abandoned);
        for name in &abandoned {
            let path = self.dir.path().join(name);
            // Gone with its entry, unless the ledger could not be written.
            match if self.dry_run { Ok(true) } else { segment::remove_abandoned(&path) } {
                Ok(removed) if removed || !path.exists() => {
                    self.stale(format!("segment {name}: it has no owner"))?;
                }
                // A new pool of this name has taken it over.
                Ok(_) => {}
                Err(error) => self.failed(format!("segment {name}"), &error.into())?,
            }
        }
        for (name, view) in segment::list(self.dir) {
            let path = self.dir.path().join(&name);
            let known = abandoned.contains(&name) || self.alive.contains(&name);
            if view.is_plausible() && !known && segment::is_abandoned(&path).unwrap_or(false) {
                self.left(
                    &name,
                    "kvcached's own, or a pool's that no ledger knows: nothing says whether it is in use",
                )?;
            }
        }
        Ok(())
    }
}

fn dead_entries(view: &LedgerView) -> Vec<Dead> {
    let dead = view.entries.iter().filter(|entry| !is_alive(view, entry));
    dead.map(|entry| Dead { slot: entry.slot, name: file_name(entry), pid: entry.pid, reserved: entry.reserved })
        .collect()
}

/// Removes the entries of dead owners, the last of them at most [`GRACE`] from now.
pub(crate) fn remove_dead(ledger: &Ledger, device: &DeviceName) -> Result<Vec<Dead>, LedgerError> {
    let grace = if *device == DeviceName::host() { Duration::ZERO } else { GRACE };
    let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
    let deadline = Instant::now() + grace * 2;
    let mut watch = None;
    let mut removed: Vec<Dead> = Vec::new();
    loop {
        let (gone, wait_ms) = ledger.update(lock_deadline(), |view| {
            let dead = dead_entries(view);
            let now = now_ms();
            view.reap(now);
            let left_ms = |entry: &LedgerEntry| grace_ms.saturating_sub(entry.returning_for_ms(now));
            view.entries.retain(|entry| entry.state == EntryState::Live || left_ms(entry) > 0);
            let gone: Vec<Dead> = dead.into_iter().filter(|dead| view.by_slot(dead.slot).is_none()).collect();
            let returning = view.entries.iter().filter(|entry| entry.state == EntryState::Returning);
            (gone, returning.map(left_ms).max())
        })?;
        removed.extend(gone);
        match wait_ms {
            Some(wait_ms) if Instant::now() < deadline => {
                let watch = if let Some(watch) = &watch { watch } else { watch.insert(ledger.watch()?) };
                watch.wait(Duration::from_millis(wait_ms))?
            }
            _ => return Ok(removed),
        };
    }
}
