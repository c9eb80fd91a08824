//! What is known of the machine, as plain data: read here, judged elsewhere.
//!
//! ```text
//!   Sources    thread      deadline   may hang on
//!   root       kernel      5 s        /proc and /sys of a container (a file system in user space there)
//!   dir        folder      5 s        a dead file server
//!   dir        ledgers     5 s        the same, or locks that a stopped process holds
//!   root, dir  processes   5 s        the open files of a process whose file server is dead
//!   gpus       gpus        20 s       a GPU that fell off the bus; a driver that starts its GPUs first
//!   python     python      7 s        anything: it is a foreign program, killed after 5 s
//! ```
//!
//! All run at once. A thread that does not answer in time is left behind; it ends with the process.

mod control_group;
mod deadline;
mod elsewhere;
mod folder;
mod kernel;
mod python;

use std::env;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tidekv_core::units::Bytes;
use tidekv_shm::RuntimeDir;

use super::quoted;
use crate::command::budget::decided_by;
use crate::command::gc::{self, Found};
use crate::gpu::{GpuError, GpuReader, GpuReport};
use crate::scene::Scene;
use deadline::Pending;

pub(super) use control_group::{ControlGroup, Level};
pub(super) use elsewhere::Elsewhere;
pub(super) use folder::{Files, Filesystem, Folder, FolderState, Space};
pub(super) use kernel::{Governor, HostMemory, Kernel, Limit};
pub(super) use python::{Interpreter, PACKAGES, Python};
#[cfg(test)]
pub(super) use {control_group::CpuQuota, kernel::CpuCounts};

/// A fact, or why it is not known.
pub(super) type Probe<T> = Result<T, String>;

/// What a GPU's driver is asked with.
type AskGpus = fn() -> Result<GpuReport, GpuError>;

/// How long each source may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadlines {
    pub(super) files: Duration,
    pub(super) gpus: Duration,
    /// For the interpreter itself; the thread that looks after it has [`PYTHON_END`] more.
    pub(super) python: Duration,
}

/// How long it may take until an interpreter that was killed is gone.
const PYTHON_END: Duration = Duration::from_secs(2);

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            files: Duration::from_secs(5),
            // Without persistence each GPU takes a second or two to start, and a machine may have eight.
            gpus: Duration::from_secs(20),
            python: Duration::from_secs(5),
        }
    }
}

/// Where facts come from. Tests put others here.
#[derive(Clone, Debug)]
pub(super) struct Sources {
    /// Under which `proc` and `sys` are.
    pub(super) root: PathBuf,
    pub(super) dir: RuntimeDir,
    pub(super) interpreter: Interpreter,
    pub(super) environment: Vec<(String, String)>,
    pub(super) gpus: AskGpus,
    pub(super) deadlines: Deadlines,
}

impl Sources {
    pub(super) fn of_this_machine(dir: &RuntimeDir, python: Option<&Path>) -> Self {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned())
        };
        Self {
            root: PathBuf::from("/"),
            dir: dir.clone(),
            interpreter: Interpreter::choose(python, env::var_os("VIRTUAL_ENV")),
            environment: env::vars_os().map(text).collect(),
            gpus: || GpuReader::open()?.look(),
            deadlines: Deadlines::default(),
        }
    }
}

/// Everything that judgements are made of.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    pub(super) gpus: Probe<Result<GpuReport, GpuError>>,
    pub(super) pools: Probe<Pools>,
    /// Pools that share nothing with those of this folder.
    pub(super) elsewhere: Probe<Vec<Elsewhere>>,
    /// What `kvctl gc` would find.
    pub(super) left_behind: Probe<Vec<Found>>,
    pub(super) folder: Probe<Folder>,
    pub(super) kernel: Kernel,
    pub(super) environment: Vec<(String, String)>,
    pub(super) python: Probe<Python>,
    /// `kvctl gc`, as it must be typed for this folder.
    pub(super) gc_command: String,
}

/// What the ledgers say.
#[derive(Clone, Debug, Default)]
pub(super) struct Pools {
    /// Pools whose owner lives.
    pub(super) live: Vec<LivePool>,
    /// Ledgers that could not be read, each with the reason.
    pub(super) unreadable: Vec<String>,
    /// Budgets that somebody gave, each with its device and who that was.
    pub(super) budgets: Vec<String>,
}

/// A pool with a living owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LivePool {
    pub(super) name: String,
    pub(super) device: String,
    pub(super) pid: u32,
    pub(super) reserved: Bytes,
}

impl Facts {
    /// Reads everything, for at most the longest of the deadlines.
    pub(super) fn gather(sources: &Sources) -> Self {
        let Sources { root, dir, interpreter, environment, gpus, deadlines } = sources.clone();
        let Deadlines { files, gpus: for_gpus, python: for_python } = deadlines;
        let gpus = Pending::start("the NVIDIA driver", for_gpus, gpus);
        let python = Pending::start("the interpreter", for_python + PYTHON_END, move || interpreter.ask(for_python));
        let (of_folder, of_elsewhere) = (dir.clone(), (root.clone(), dir.clone()));
        let kernel = Pending::start("the kernel", files, move || Kernel::read(&root));
        let folder = Pending::start("the folder", files, move || Folder::read(&of_folder));
        let elsewhere =
            Pending::start("the processes", files, move || elsewhere::look(&of_elsewhere.0, &of_elsewhere.1));
        let of_pools = dir.clone();
        let pools = Pending::start("the folder", files, move || look_at_pools(&of_pools));
        let of_gc = dir.clone();
        let left_behind =
            Pending::start("the folder", files, move || gc::look(&of_gc).map_err(|error| format!("{error:#}")));
        Self {
            gc_command: gc_command(&dir),
            environment,
            folder: folder.get(),
            pools: pools.get().and_then(|answer| answer),
            elsewhere: elsewhere.get(),
            left_behind: left_behind.get().and_then(|answer| answer),
            kernel: kernel.get().unwrap_or_else(|why| Kernel::unknown(&why)),
            python: python.get().and_then(|answer| answer),
            gpus: gpus.get(),
        }
    }
}

fn look_at_pools(dir: &RuntimeDir) -> Probe<Pools> {
    let scene = Scene::look(dir).map_err(|error| error.to_string())?;
    let live = scene.pools.iter().filter_map(|pool| {
        let place = pool.live_place()?;
        Some(LivePool {
            name: pool.name.clone(),
            device: place.device.as_str().to_owned(),
            pid: place.entry.pid,
            reserved: place.entry.reserved,
        })
    });
    let unreadable = scene.unreadable.iter().map(|(device, error)| format!("{device}: {error}"));
    let given = scene.devices.iter().filter(|device| device.header.explicit_budget);
    let budgets = given
        .map(|device| format!("budget of {}: {}, {}", device.name, device.header.budget, decided_by(&device.header)));
    Ok(Pools { live: live.collect(), unreadable: unreadable.collect(), budgets: budgets.collect() })
}

fn gc_command(dir: &RuntimeDir) -> String {
    if *dir == RuntimeDir::from_env() {
        "kvctl gc".to_owned()
    } else {
        format!("kvctl --dir {} gc", quoted(dir.path()))
    }
}
