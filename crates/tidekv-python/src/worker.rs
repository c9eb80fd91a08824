//! `Worker`: one rank, served by a thread of its own that never needs the interpreter.
//!
//! That thread holds the worker's locks while it waits for the device. So every method lets go of the interpreter before it takes
//! one, or a look at a worker would stop all threads of Python for as long as a kernel runs.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use pyo3::prelude::*;
use tidekv_core::units::{Bytes, GroupId};
use tidekv_fork::Birth;
use tidekv_ipc::server::Stopper;
use tidekv_ipc::{IpcError, SocketDir};
use tidekv_pool::{RankId, Share, Worker as PoolWorker, WorkerConfig, WorkerGroupConfig, WorkerGroups};
use tidekv_shm::{PoolName, RuntimeDir};

use crate::at_exit::{self, Closes};
use crate::convert;
use crate::error::{Refused, not_picklable, sentence};
use crate::region::{Owned, Region};

/// A worker that has its place.
struct Placed {
    /// Until it is started.
    worker: Option<PoolWorker>,
    thread: Option<JoinHandle<Result<(), IpcError>>>,
    stopper: Stopper,
    groups: WorkerGroups,
    // After the groups, which map in these regions.
    _owned: Vec<Owned>,
}

struct State {
    placed: Mutex<Option<Placed>>,
    birth: Birth,
}

impl State {
    fn placed(&self) -> MutexGuard<'_, Option<Placed>> {
        self.placed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Closes for State {
    fn close(&self) {
        if self.birth.is_foreign() {
            return;
        }
        let Some(mut placed) = self.placed().take() else { return };
        placed.stopper.stop();
        if let Some(Err(error)) = placed.thread.take().and_then(|thread| thread.join().ok()) {
            tell(&error);
        }
    }
}

/// A worker whose socket failed has nobody to tell but the person who reads the log.
fn tell(error: &IpcError) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "tidekv: a worker ended: {}", sentence(error));
}

impl Drop for State {
    fn drop(&mut self) {
        if self.birth.is_foreign() {
            // The thread is not in this process, and its handle would wait for it.
            std::mem::forget(self.placed().take());
            return;
        }
        self.close();
    }
}

/// One rank.
#[pyclass(module = "tidekv._native", frozen, weakref)]
pub(crate) struct Worker {
    state: Arc<State>,
    socket_path: PathBuf,
}

impl Worker {
    fn check_birth(&self) -> Result<(), Refused> {
        if self.state.birth.is_foreign() { Err(Refused::forked("worker")) } else { Ok(()) }
    }
}

#[pymethods]
impl Worker {
    #[new]
    #[pyo3(signature = (pool, rank, *, stage = 0, socket_root = None, runtime_dir = None, fence_timeout = 5.0))]
    fn new(
        py: Python<'_>,
        pool: &str,
        rank: u32,
        stage: u32,
        socket_root: Option<String>,
        runtime_dir: Option<String>,
        fence_timeout: f64,
    ) -> Result<Self, Refused> {
        crate::tools::start_logging();
        let pool = PoolName::new(pool)?;
        let root = socket_root.map(PathBuf::from);
        let dir = root.clone().map_or_else(|| SocketDir::from_env(&pool), |root| SocketDir::new(root, &pool));
        let mut config = WorkerConfig::new(pool, RankId { stage, rank });
        config.socket_root = root;
        if let Some(dir) = runtime_dir {
            config.runtime_dir = RuntimeDir::at(dir);
        }
        config.fence_patience = convert::duration("fence_timeout", fence_timeout)?;
        let worker = py.detach(|| PoolWorker::new(config))?;
        let placed = Placed {
            stopper: worker.stopper(),
            groups: worker.groups(),
            worker: Some(worker),
            thread: None,
            _owned: Vec::new(),
        };
        let state = Arc::new(State { placed: Mutex::new(Some(placed)), birth: Birth::here() });
        let weak = Arc::downgrade(&state);
        at_exit::remember(weak);
        Ok(Self { state, socket_path: dir.socket_path(stage, rank)? })
    }

    #[getter]
    fn socket_path(&self) -> String {
        self.socket_path.display().to_string()
    }

    #[getter]
    fn running(&self, py: Python<'_>) -> bool {
        let is_running = |placed: &Placed| placed.thread.as_ref().is_some_and(|thread| !thread.is_finished());
        !self.state.birth.is_foreign() && py.detach(|| self.state.placed().as_ref().is_some_and(is_running))
    }

    #[pyo3(signature = (group, region, *, budget = None, utilization = None, floor = 0, ceiling = None, weight = 1,
        priority = 0))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn add_group(
        &self,
        py: Python<'_>,
        group: u32,
        region: &Bound<'_, Region>,
        budget: Option<u64>,
        utilization: Option<f64>,
        floor: u64,
        ceiling: Option<u64>,
        weight: u32,
        priority: i32,
    ) -> Result<(), Refused> {
        self.check_birth()?;
        let region = Arc::clone(&region.get().state);
        let config = WorkerGroupConfig {
            budget: budget.map(Bytes),
            utilization,
            share: Share { floor: Bytes(floor), ceiling: ceiling.map(Bytes), weight, priority },
            ..WorkerGroupConfig::new(GroupId(group), Arc::clone(&region.reservation))
        };
        py.detach(|| {
            let mut place = self.state.placed();
            let placed = place.as_mut().ok_or_else(|| Refused::closed("worker"))?;
            if placed.groups.ids().contains(&GroupId(group)) {
                return Err(Refused::argument(format!(
                    "this worker has a group {group} already: choose another number"
                )));
            }
            let owned = region.own("worker")?;
            placed.groups.add(config)?;
            placed._owned.push(owned);
            Ok(())
        })
    }

    fn groups(&self, py: Python<'_>) -> Result<Vec<u32>, Refused> {
        self.check_birth()?;
        py.detach(|| {
            let place = self.state.placed();
            let placed = place.as_ref().ok_or_else(|| Refused::closed("worker"))?;
            Ok(placed.groups.ids().into_iter().map(|group| group.0).collect())
        })
    }

    fn start(&self, py: Python<'_>) -> Result<(), Refused> {
        self.check_birth()?;
        py.detach(|| {
            let mut place = self.state.placed();
            let placed = place.as_mut().ok_or_else(|| Refused::closed("worker"))?;
            let Some(mut worker) = placed.worker.take() else { return Ok(()) };
            let spawned = thread::Builder::new().name("tidekv-worker".to_owned()).spawn(move || worker.run());
            let refused = |error| Refused::new("FileProblem", format!("no thread could be started: {error}"));
            placed.thread = Some(spawned.map_err(refused)?);
            Ok(())
        })
    }

    fn stop(&self, py: Python<'_>) {
        py.detach(|| self.state.close());
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        format!("Worker({:?}, running={})", self.socket_path.display(), self.running(py))
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("Worker", "it serves in this process; make one in the process of the rank"))
    }
}
