//! What a running `kvctl up` leaves on disk, so that `kvctl ps`, `down`, `logs` and `gc` find it.
//!
//! ```text
//!   <root>/kvcached-up-<uid>/            0700, ours, no link        root: the folder of shared files, or /tmp for /dev/shm
//!       4711-a1b2c3d4/                   one for each supervisor: process number and a number that no other run has
//!           lock                         held by the supervisor as long as it lives: the kernel drops it with it
//!           state.json                   what it is doing, replaced whole
//!           1-name.log  1-name.log.1     what an instance wrote, and what it wrote before
//! ```
//!
//! Every process that a supervisor starts has [`MARK`] in its environment, and so have those that it starts in turn. That is how whoever
//! cleans up knows them, whatever process group or parent they have by then.

#[cfg(feature = "serve")]
mod own;

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, geteuid, getpgid, kill_process, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use tidekv_ipc::address::socket_root;
use tidekv_shm::RuntimeDir;

use crate::scene::{Pool, Scene};

#[cfg(feature = "serve")]
pub(crate) use own::OwnHouse;

/// The variable that says which supervisor a process belongs to.
pub(crate) const MARK: &str = "KVCACHED_UP_ID";
/// The variable that says which of its instances.
pub(crate) const INSTANCE_MARK: &str = "KVCACHED_UP_INSTANCE";
/// How long what was killed may take to be gone.
const PATIENCE: Duration = Duration::from_secs(10);
const LOCK: &str = "lock";
const STATE: &str = "state.json";

/// What a supervisor does, as it last said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct State {
    pub(crate) pid: u32,
    /// The file it was started with.
    pub(crate) config: Option<PathBuf>,
    /// Where its router listens.
    pub(crate) router: Option<String>,
    pub(crate) instances: Vec<InstanceState>,
}

/// One instance, as its supervisor last said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InstanceState {
    pub(crate) name: String,
    pub(crate) model: String,
    pub(crate) engine: String,
    pub(crate) state: String,
    pub(crate) pid: Option<u32>,
    pub(crate) address: Option<String>,
    pub(crate) restarts: u32,
    pub(crate) log: PathBuf,
    /// What its pool is to be called. Older supervisors do not say.
    #[serde(default)]
    pub(crate) pool: Option<String>,
}

impl InstanceState {
    /// The pools that it has now.
    pub(crate) fn pools<'a>(&self, scene: &'a Scene) -> Vec<&'a Pool> {
        pools_of(scene, self.pid, self.pool.as_deref().unwrap_or_default())
    }
}

/// The pools of an instance that runs: those of its process group, and one of kvcached's own by its name alone.
pub(crate) fn pools_of<'a>(scene: &'a Scene, pid: Option<u32>, name: &str) -> Vec<&'a Pool> {
    let Some(pid) = pid else { return Vec::new() };
    let is_its = |pool: &&Pool| match &pool.place {
        Some(place) => place.alive && belongs_to(place.entry.pid, pid),
        None => pool.name == name,
    };
    scene.pools.iter().filter(is_its).collect()
}

/// Whether a process is of an instance, which leads a process group. What it starts stays in it.
pub(crate) fn belongs_to(pid: u32, instance: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let group = pid.and_then(|pid| getpgid(Some(pid)).ok());
    group.is_some_and(|group| u32::try_from(group.as_raw_nonzero().get()) == Ok(instance))
}

/// A supervisor's folder, found by somebody else.
#[derive(Debug)]
pub(crate) struct House {
    pub(crate) path: PathBuf,
    pub(crate) id: String,
    pub(crate) is_alive: bool,
    /// None if it did not come to write it, or was killed in the middle.
    pub(crate) state: Option<State>,
}

/// Where the supervisors of this user are, for a folder of shared files.
fn street(dir: &RuntimeDir) -> PathBuf {
    socket_root(dir).join(format!("kvcached-up-{}", geteuid().as_raw()))
}

/// All supervisors of this user, dead ones too, the oldest first.
pub(crate) fn houses(dir: &RuntimeDir) -> anyhow::Result<Vec<House>> {
    let street = street(dir);
    match private_folder(&street) {
        Ok(true) => {}
        Ok(false) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(&street).with_context(|| format!("cannot read {}", street.display()))? {
        let Ok(entry) = entry else { continue };
        let (path, Ok(id)) = (entry.path(), entry.file_name().into_string()) else { continue };
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let state = fs::read(path.join(STATE)).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let born = entry.metadata().ok().and_then(|metadata| metadata.created().or_else(|_| metadata.modified()).ok());
        found.push((born, House { is_alive: is_locked(&path.join(LOCK)), path, id, state }));
    }
    found.sort_by(|a, b| (a.0, &a.1.id).cmp(&(b.0, &b.1.id)));
    Ok(found.into_iter().map(|(_, house)| house).collect())
}

impl House {
    /// Sends a signal to the supervisor, if it still lives.
    pub(crate) fn signal(&self, signal: Signal) -> io::Result<bool> {
        let pid = self.state.as_ref().and_then(|state| i32::try_from(state.pid).ok()).and_then(Pid::from_raw);
        // The number is its own for as long as it holds the lock.
        match pid {
            Some(pid) if is_locked(&self.path.join(LOCK)) => match kill_process(pid, signal) {
                Ok(()) => Ok(true),
                Err(Errno::SRCH) => Ok(false),
                Err(error) => Err(error.into()),
            },
            _ => Ok(false),
        }
    }

    /// Waits until it is gone with its folder.
    pub(crate) fn wait_until_gone(&self, deadline: Instant) -> bool {
        while is_locked(&self.path.join(LOCK)) {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        true
    }

    /// Ends what a dead supervisor started and removes its folder; says which processes those were.
    pub(crate) fn clear(&self) -> anyhow::Result<Vec<u32>> {
        let ended = end_marked(&self.id, None)?;
        if let Some(state) = &self.state {
            wait_for_ending(state);
        }
        remove_house(&self.path).with_context(|| format!("cannot remove {}", self.path.display()))?;
        leave_street(&self.path);
        Ok(ended)
    }
}

/// The processes of this user that belong to a supervisor, or to one of its instances.
fn marked(id: &str, instance: Option<&str>) -> Vec<u32> {
    let own = std::process::id();
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    numbers.filter(|&pid| pid != own && is_marked(pid, id, instance)).collect()
}

fn is_marked(pid: u32, id: &str, instance: Option<&str>) -> bool {
    // Others' cannot be read, and what has ended has nothing to read.
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let has = |name: &str, value: &str| {
        environment.split(|&byte| byte == 0).any(|pair| pair == format!("{name}={value}").as_bytes())
    };
    has(MARK, id) && instance.is_none_or(|name| has(INSTANCE_MARK, name))
}

/// Kills what belongs to a supervisor, children that are born meanwhile included, and waits until it is gone.
pub(crate) fn end_marked(id: &str, instance: Option<&str>) -> anyhow::Result<Vec<u32>> {
    let deadline = Instant::now() + PATIENCE;
    let mut ended = Vec::new();
    loop {
        let left = marked(id, instance);
        if left.is_empty() {
            return Ok(ended);
        }
        for pid in left {
            // Gone meanwhile.
            let Some(target) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { continue };
            let Ok(handle) = pidfd_open(target, PidfdFlags::empty()) else { continue };
            // From here on it is this one that is meant, and not whoever gets its number: so it is looked at once more.
            if !is_marked(pid, id, instance) {
                continue;
            }
            let _ = pidfd_send_signal(&handle, Signal::KILL);
            if !wait_until_over(&handle, deadline) {
                bail!(
                    "process {pid} of supervisor {id} does not end: `ps -o pid,stat,wchan {pid}` says what it waits for"
                );
            }
            ended.push(pid);
        }
    }
}

/// Waits for the end of a process. Its memory goes first (and its mark with it), its locks later: until then its pools have
/// an owner.
fn wait_until_over(handle: &OwnedFd, deadline: Instant) -> bool {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(handle, PollFlags::IN)];
        match poll(&mut fds, Timespec::try_from(left).ok().as_ref()) {
            Err(Errno::INTR) => {}
            outcome => return outcome.is_ok_and(|count| count > 0),
        }
    }
}

/// Waits for those of a supervisor's instances that are ending on their own, and have lost their mark already.
fn wait_for_ending(state: &State) {
    let deadline = Instant::now() + PATIENCE;
    for pid in state.instances.iter().filter_map(|one| one.pid) {
        let target = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let Some(Ok(handle)) = target.map(|target| pidfd_open(target, PidfdFlags::empty())) else { continue };
        // One that has an environment is somebody else's, who got the number since.
        let is_ending = match fs::read(format!("/proc/{pid}/environ")) {
            Ok(environment) => environment.is_empty(),
            Err(error) => error.raw_os_error() == Some(Errno::SRCH.raw_os_error()),
        };
        if is_ending {
            wait_until_over(&handle, deadline);
        }
    }
}

/// Removes a supervisor's folder: its files by their own names, and nothing below.
fn remove_house(path: &Path) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            fs::remove_file(entry.path())?;
        }
    }
    fs::remove_dir(path)
}

/// The last one out takes the street with it. Where others live it is not empty, and stays.
fn leave_street(house: &Path) {
    if let Some(street) = house.parent() {
        let _ = fs::remove_dir(street);
    }
}

fn is_locked(path: &Path) -> bool {
    let Ok(file) = File::open(path) else { return false };
    matches!(flock(&file, FlockOperation::NonBlockingLockShared), Err(Errno::WOULDBLOCK))
}

/// Whether the folder is there; an error if it is anybody else's too.
fn private_folder(path: &Path) -> anyhow::Result<bool> {
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error).with_context(|| format!("cannot look at {}", path.display())),
    };
    let is_ours =
        metadata.is_dir() && metadata.uid() == geteuid().as_raw() && metadata.permissions().mode() & 0o077 == 0;
    if !is_ours {
        bail!(
            "{} is not a folder of yours alone: remove it, or choose another with KVCACHED_RUNTIME_DIR",
            path.display()
        );
    }
    Ok(true)
}
