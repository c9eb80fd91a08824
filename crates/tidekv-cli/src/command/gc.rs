//! `kvctl gc`: what killed processes left behind.
//!
//! | found                                         | known by                                   | then             |
//! |-----------------------------------------------|--------------------------------------------|------------------|
//! | entry whose owner is gone                     | the owner's lock is free                   | removed          |
//! | ledger without entries                        | looked at under its lock                   | removed          |
//! | events without a ledger                       | its name                                   | removed          |
//! | folder of sockets whose workers are gone      | nobody listens at any of them              | removed          |
//! | ledger or arena that its maker did not finish | its name                                   | removed          |
//! | what a killed `kvctl up` left running         | its lock is free, and the processes carry its mark | ended, removed |
//! | arena that nobody uses                        | all its members' locks are free            | removed          |
//! | segment of ours without owner                 | mode 0600, its owner's lock is free        | removed          |
//! | the same, but our umask makes all files 0600  | only by an entry of that name, now removed | else left, named |
//! | segment of ours that its maker did not finish | shorter, `kvcached_*`, unchanged for 1 s   | removed          |
//! | segment of kvcached's own                     | another mode                               | left, and named  |
//! | segment that kvbench was asked to leave       | its name; no process has its maker's number | removed         |
//! | `mooncake_bench_*`, of another benchmark      | its name                                   | left, and named  |
//! | other users' files, anything else             | uid, size                                  | not looked at    |
//!
//! The bytes of a dead owner on a GPU may still be on their way back; their entry is removed a second after the owner was
//! found dead, for which gc waits. Host memory is back when the owner's lock is free.

use std::collections::BTreeSet;
use std::fs::{self, DirEntry};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, bail};
use rustix::process::geteuid;
use serde::Serialize;
use tidekv_core::units::Bytes;
use tidekv_ipc::address::{self, StaleDir};
use tidekv_shm::arena::Arena;
use tidekv_shm::baseline;
use tidekv_shm::segment::{self, SEGMENT_BYTES};
use tidekv_shm::{DeviceName, EntryState, Ledger, LedgerEntry, LedgerError, LedgerView, RuntimeDir, events, now_ms};

use super::lock_deadline;
use crate::console::Console;
use crate::exit::Outcome;
use crate::launch::house;
use crate::scene::{file_name, is_alive};

/// How long a device may take to have a dead process's memory back; measured: 65 to 300 ms on an H200.
const GRACE: Duration = Duration::from_secs(1);

/// How long a half-made segment must have been left alone.
const HALF_MADE: Duration = Duration::from_secs(1);

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
    let mut sweep = Sweep { dir, dry_run, tell, dead: BTreeSet::new(), alive: BTreeSet::new() };
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
    /// Names of segments whose pool was found dead, and of those found alive.
    dead: BTreeSet<String>,
    alive: BTreeSet<String>,
}

/// A dead owner's entry.
pub(crate) struct Dead {
    slot: u32,
    pub(crate) name: String,
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
        let dead = if self.dry_run { dead_entries(&view) } else { remove_dead(&ledger, device)? };
        for Dead { name, pid, reserved, .. } in &dead {
            self.dead.insert(name.clone());
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
        let entries = match fs::read_dir(self.dir.path()) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", self.dir.path().display())),
        };
        let mut entries: Vec<DirEntry> = entries.filter_map(Result::ok).collect();
        entries.sort_by_key(DirEntry::file_name);
        for entry in entries {
            // Gone since the folder was read, or not a name that pools have.
            let (Ok(metadata), Ok(name)) = (entry.metadata(), entry.file_name().into_string()) else { continue };
            if !metadata.is_file() || metadata.uid() != geteuid().as_raw() || self.alive.contains(&name) {
                continue;
            }
            let whole = metadata.len() == SEGMENT_BYTES as u64;
            let outcome =
                if whole { self.segment(&entry, &name, metadata.mode()) } else { self.stump(&entry, &name, &metadata) };
            if let Err(error) = outcome {
                self.failed(format!("segment {name}"), &error)?;
            }
        }
        Ok(())
    }

    /// A file of 24 bytes of this user, without a living entry.
    fn segment(&mut self, entry: &DirEntry, name: &str, mode: u32) -> anyhow::Result<()> {
        let path = entry.path();
        if segment::has_owner(&path)? {
            return Ok(());
        }
        if !self.dead.contains(name) {
            let is_pool = segment::read(&path)?.is_some();
            if mode & 0o777 != 0o600 {
                // Not even kvcached takes it for a pool: something else that happens to have 24 bytes.
                if !is_pool {
                    return Ok(());
                }
                return self.left(name, "kvcached's own, which do not say whether they are in use");
            }
            if umask_hides_others()? {
                return self.left(name, "under this umask kvcached's own look the same");
            }
        }
        if self.dry_run || segment::delete(&path)? {
            self.stale(format!("segment {name}: it has no owner"))?;
        }
        Ok(())
    }

    /// A file of this user that is too short, or too long, for a segment.
    fn stump(&mut self, entry: &DirEntry, name: &str, metadata: &fs::Metadata) -> anyhow::Result<()> {
        let ours = name.starts_with("kvcached_") && metadata.mode() & 0o777 == 0o600;
        let age = metadata.modified().ok().and_then(|time| SystemTime::now().duration_since(time).ok());
        let left_alone = age.is_some_and(|age| age >= HALF_MADE);
        if !ours || metadata.len() > SEGMENT_BYTES as u64 || !left_alone {
            return Ok(());
        }
        if !self.dry_run {
            fs::remove_file(entry.path())?;
        }
        self.stale(format!("segment {name}: its maker did not finish it"))
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
    let watch = ledger.watch()?;
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
            Some(wait_ms) if Instant::now() < deadline => watch.wait(Duration::from_millis(wait_ms))?,
            _ => return Ok(removed),
        };
    }
}

/// Whether files that kvcached makes for everybody come out as private as ours.
fn umask_hides_others() -> anyhow::Result<bool> {
    let status = fs::read_to_string("/proc/self/status").context("cannot read /proc/self/status")?;
    let umask = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    let umask = umask.and_then(|text| u32::from_str_radix(text.trim(), 8).ok());
    // A kernel that does not say: assume the worst.
    Ok(umask.is_none_or(|umask| 0o666 & !umask == 0o600))
}
