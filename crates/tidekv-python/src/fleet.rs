//! `Fleet` and `FleetGroup`: a scheduler's side of several workers.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use tidekv_core::pages::Fence;
use tidekv_core::units::{GroupId, Step};
use tidekv_fork::Birth;
use tidekv_pool::fleet::RankState;
use tidekv_pool::{Fleet as PoolFleet, FleetConfig, FleetPages, RankId, Scope};
use tidekv_shm::PoolName;

use crate::convert;
use crate::error::{Refused, not_picklable};
use crate::numbers;

/// The workers of one model as one memory.
#[pyclass(module = "tidekv._native", frozen, weakref)]
pub(crate) struct Fleet {
    fleet: Mutex<Option<PoolFleet>>,
    birth: Birth,
}

impl Fleet {
    pub(crate) fn fleet(&self) -> Result<PoolFleet, Refused> {
        if self.birth.is_foreign() {
            return Err(Refused::forked("fleet"));
        }
        let fleet = self.fleet.lock().unwrap_or_else(PoisonError::into_inner);
        fleet.clone().ok_or_else(|| Refused::closed("fleet"))
    }
}

fn scope_of(stage: Option<u32>) -> Scope {
    stage.map_or(Scope::AllStages, Scope::Stage)
}

#[pymethods]
impl Fleet {
    #[new]
    #[pyo3(signature = (pool, stages, *, strategy = "ring", timeout = None, start_timeout = 60.0, rejoin_timeout = 60.0,
        socket_root = None))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        py: Python<'_>,
        pool: &str,
        stages: Vec<u32>,
        strategy: &str,
        timeout: Option<f64>,
        start_timeout: f64,
        rejoin_timeout: f64,
        socket_root: Option<String>,
    ) -> Result<Self, Refused> {
        crate::tools::start_logging();
        let mut config = FleetConfig::new(PoolName::new(pool)?, stages);
        config.strategy = strategy.to_owned();
        if let Some(seconds) = timeout {
            config.timeout = Some(convert::duration("timeout", seconds)?).filter(|timeout| !timeout.is_zero());
        }
        config.start_patience = convert::duration("start_timeout", start_timeout)?;
        config.rejoin_patience = convert::duration("rejoin_timeout", rejoin_timeout)?;
        config.socket_root = socket_root.map(PathBuf::from);
        let fleet = py.detach(|| PoolFleet::connect(config))?;
        Ok(Self { fleet: Mutex::new(Some(fleet)), birth: Birth::here() })
    }

    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let fleet = self.fleet()?;
        let list = PyList::empty(py);
        for rank in py.detach(|| fleet.status()) {
            let (state, reason) = match rank.state {
                RankState::Member => ("member", None),
                RankState::Late { silent } => ("late", Some(format!("silent for {silent:?}"))),
                RankState::Lost { missing, cause } => ("lost", Some(format!("missing for {missing:?}: {cause}"))),
                RankState::Rejoining => ("rejoining", None),
                RankState::Excluded { reason } => ("excluded", Some(reason)),
                _ => ("lost", None),
            };
            let dict = PyDict::new(py);
            dict.set_item("stage", rank.at.stage)?;
            dict.set_item("rank", rank.at.rank)?;
            dict.set_item("state", state)?;
            dict.set_item("reason", reason)?;
            dict.set_item("instance", rank.instance)?;
            dict.set_item("rejoins", rank.rejoins)?;
            list.append(dict)?;
        }
        Ok(list)
    }

    #[pyo3(signature = (group, *, stage = None))]
    fn has_group(&self, py: Python<'_>, group: u32, stage: Option<u32>) -> Result<bool, Refused> {
        let fleet = self.fleet()?;
        Ok(py.detach(|| fleet.has_group(GroupId(group), scope_of(stage)))?)
    }

    #[pyo3(signature = (group, pages, *, stage = None))]
    fn group(&self, py: Python<'_>, group: u32, pages: u32, stage: Option<u32>) -> Result<FleetGroup, Refused> {
        let fleet = self.fleet()?;
        let pages = py.detach(|| fleet.group(GroupId(group), scope_of(stage)).take(pages))?;
        Ok(FleetGroup { pages: Mutex::new(Some(Arc::new(pages))), birth: Birth::here() })
    }

    fn held<'py>(&self, py: Python<'py>, group: u32) -> PyResult<Bound<'py, PyDict>> {
        let fleet = self.fleet()?;
        let held = py.detach(|| fleet.held(GroupId(group))).map_err(Refused::from)?;
        let dict = PyDict::new(py);
        for rank in held {
            let pages: Vec<u32> = rank.pages.map_err(Refused::from)?.into_iter().map(|page| page.0).collect();
            dict.set_item((rank.at.stage, rank.at.rank), pages)?;
        }
        Ok(dict)
    }

    fn quarantined(&self, group: u32) -> Result<usize, Refused> {
        Ok(self.fleet()?.quarantined(GroupId(group)))
    }

    #[pyo3(signature = (rank, *, stage = 0, reason = "excluded"))]
    fn exclude(&self, py: Python<'_>, rank: u32, stage: u32, reason: &str) -> Result<(), Refused> {
        let fleet = self.fleet()?;
        Ok(py.detach(|| fleet.exclude(RankId { stage, rank }, reason))?)
    }

    #[pyo3(signature = (rank, *, stage = 0))]
    fn readmit(&self, py: Python<'_>, rank: u32, stage: u32) -> Result<(), Refused> {
        let fleet = self.fleet()?;
        Ok(py.detach(|| fleet.readmit(RankId { stage, rank }))?)
    }

    /// The connections end with the last pool and group on it.
    fn close(&self, py: Python<'_>) {
        let fleet = self.fleet.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(fleet));
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("Fleet", "its connections belong to this process; one scheduler at a time has the workers"))
    }
}

/// Pages of one group on every rank, mapped by hand.
#[pyclass(module = "tidekv._native", frozen, weakref)]
pub(crate) struct FleetGroup {
    pages: Mutex<Option<Arc<FleetPages>>>,
    birth: Birth,
}

impl FleetGroup {
    /// Looks after the fleet on the way: there is no pool whose thread would.
    fn tended(&self) -> Result<Arc<FleetPages>, Refused> {
        if self.birth.is_foreign() {
            return Err(Refused::forked("group of a fleet"));
        }
        let pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let pages = pages.ok_or_else(|| Refused::closed("group of a fleet"))?;
        let _next: Duration = pages.tend();
        Ok(pages)
    }
}

#[pymethods]
impl FleetGroup {
    fn map(&self, py: Python<'_>, pages: &Bound<'_, PyAny>) -> PyResult<()> {
        let wanted = numbers::pages(pages)?;
        Ok(py.detach(|| self.tended()?.map(&wanted).map_err(Refused::from))?)
    }

    #[pyo3(signature = (pages, *, step = None))]
    fn unmap(&self, py: Python<'_>, pages: &Bound<'_, PyAny>, step: Option<u64>) -> PyResult<()> {
        let wanted = numbers::pages(pages)?;
        let fence = step.map_or(Fence::Unknown, |step| Fence::Step(Step(step)));
        Ok(py.detach(|| self.tended()?.unmap(&wanted, fence).map_err(Refused::from))?)
    }

    fn close(&self, py: Python<'_>) {
        let pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(pages));
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("FleetGroup", "its connections belong to this process"))
    }
}
