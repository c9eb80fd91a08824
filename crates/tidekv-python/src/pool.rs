//! `Pool`: elastic blocks for Python.
//!
//! The hot calls are one call each into Rust: `alloc` and `try_alloc` take mapped memory with the GIL held (one lock, no
//! wait, no system call) and release it only to grow; `free` never waits. Ids cross the border as kernel ids.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use tidekv_core::blocks::BlockLease;
use tidekv_core::geometry::Geometry as CoreGeometry;
use tidekv_core::pages::Fence;
use tidekv_core::units::{BlockIndex, ByteOffset, Bytes, LayerIndex, PageId, Step};
use tidekv_fork::Birth;
use tidekv_mem::{MemError, PageUse, Reservation};
use tidekv_pool::{KvPool, PoolError};

use crate::at_exit::{self, Closes};
use crate::convert;
use crate::device::Device;
use crate::error::{Refused, not_picklable};
use crate::fleet::Fleet;
use crate::layout::{Converter, Geometry, Layout, dtype_named, refused_free};
use crate::numbers;
use crate::open::{OpenArgs, Opened, open};
use crate::region::{Owned, Region};
use crate::strided::Strided;
use crate::view::View;

/// A pool that is open. The pool goes before the right to its region.
pub(crate) struct Open {
    pub(crate) pool: KvPool,
    pub(crate) _owned: Option<Owned>,
}

#[derive(Default)]
struct State(RwLock<Option<Arc<Open>>>);

impl Closes for State {
    fn close(&self) {
        let open = self.0.write().unwrap_or_else(PoisonError::into_inner).take();
        drop(open);
    }
}

/// An elastic pool of KV-cache blocks.
#[pyclass(module = "tidekv._native", subclass, frozen, weakref)]
pub(crate) struct Pool {
    state: Arc<State>,
    geometry: Geometry,
    device: Option<Device>,
    region: Option<Py<Region>>,
    name: String,
    group: u32,
    has_null_block: bool,
    /// Blocks that are set aside, as far as this object did it: 0 spares the look.
    set_aside: AtomicU32,
    birth: Birth,
}

impl Pool {
    fn open(&self) -> Result<Arc<Open>, Refused> {
        if self.birth.is_foreign() {
            return Err(Refused::forked("pool"));
        }
        self.state.0.read().unwrap_or_else(PoisonError::into_inner).clone().ok_or_else(|| Refused::closed("pool"))
    }

    fn core(&self) -> &CoreGeometry {
        &self.geometry.geometry
    }

    fn list<'py>(&self, py: Python<'py>, leases: &[BlockLease]) -> PyResult<Bound<'py, PyList>> {
        let mut converter = Converter::new(self.core());
        PyList::new(py, leases.iter().map(|lease| converter.id(lease.block)))
    }

    fn indices(&self, blocks: &Bound<'_, PyAny>) -> PyResult<Vec<BlockIndex>> {
        let mut converter = Converter::new(self.core());
        numbers::ids(blocks)?.into_iter().map(|block| Ok(converter.index(block)?)).collect()
    }

    /// Says the kernel id where the pool knows the dense index.
    fn refused_free(&self, error: PoolError) -> Refused {
        match error {
            PoolError::Free(error) => refused_free(self.core(), error),
            other => other.into(),
        }
    }

    /// Takes blocks that were set aside, and the rest where they do not suffice; all or none.
    fn alloc_with_reserved(&self, pool: &KvPool, count: u32, leases: &mut Vec<BlockLease>) -> Result<(), PoolError> {
        let mut reserved = self.set_aside.load(Relaxed).min(count);
        if reserved > 0 && pool.alloc_reserved(reserved, leases).is_err() {
            reserved = 0;
        }
        if reserved < count
            && let Err(error) = pool.alloc_within(count - reserved, Duration::ZERO, leases)
        {
            // As it was: their memory is mapped, so setting them aside again needs no growth.
            pool.free(leases, Fence::Step(Step(0)))?;
            leases.clear();
            if reserved > 0 {
                pool.reserve(reserved)?;
            }
            return Err(error);
        }
        self.set_aside.fetch_sub(reserved, Relaxed);
        Ok(())
    }

    fn block_place(&self, block: u32, layer: u32, value: bool) -> Result<(u64, u64), Refused> {
        let buffer = self.geometry.layout.check_buffer(value)?;
        let offset = self.core().byte_offset(self.geometry.index_of(block)?, LayerIndex(layer), buffer)?;
        let bytes = self.geometry.layout.shape.block_bytes(buffer)?;
        Ok((offset.0, bytes.0))
    }
}

fn fence_of(step: Option<u64>) -> Fence {
    step.map_or(Fence::Unknown, |step| Fence::Step(Step(step)))
}

fn about_block(error: MemError, block: u32) -> Refused {
    match error {
        MemError::NotMapped { offset, end } => {
            let advice = "it is not leased, or its page was given back";
            Refused::new("Unmapped", format!("block {block} has no memory: {advice}"))
                .number("offset", offset)
                .number("end", end)
                .about_block(block)
        }
        other => other.into(),
    }
}

/// Opening and looking.
#[pymethods]
impl Pool {
    #[new]
    #[pyo3(signature = (layout, *, name = None, device = "auto", pages = None, capacity = None, group = 0, limit = None,
        budget = None, utilization = None, floor = 0, ceiling = None, weight = 1, priority = 0, reserve = None, decay = 2.0,
        wait = 0.0, null_block = false, unmapped_reads = "fault", runtime_dir = None, region = None, fleet = None,
        stage = None, env = true))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        py: Python<'_>,
        layout: Layout,
        name: Option<String>,
        device: &str,
        pages: Option<u32>,
        capacity: Option<u64>,
        group: u32,
        limit: Option<u64>,
        budget: Option<u64>,
        utilization: Option<f64>,
        floor: u64,
        ceiling: Option<u64>,
        weight: u32,
        priority: i32,
        reserve: Option<(u32, u32)>,
        decay: f64,
        wait: f64,
        null_block: bool,
        unmapped_reads: &str,
        runtime_dir: Option<String>,
        region: Option<Py<Region>>,
        fleet: Option<Py<Fleet>>,
        stage: Option<u32>,
        env: bool,
    ) -> Result<Self, Refused> {
        let args = OpenArgs {
            layout,
            name,
            device,
            pages,
            capacity,
            group,
            limit,
            budget,
            utilization,
            floor,
            ceiling,
            weight,
            priority,
            reserve,
            decay,
            wait,
            null_block,
            unmapped_reads,
            runtime_dir,
            region: region.as_ref().map(|region| Arc::clone(&region.get().state)),
            fleet: fleet.map(|fleet| fleet.get().fleet()).transpose()?,
            stage,
            env,
        };
        let Opened { open, geometry, device } = py.detach(|| open(args))?;
        let name = open.pool.name().as_str().to_owned();
        let state = Arc::new(State(RwLock::new(Some(Arc::new(open)))));
        let weak = Arc::downgrade(&state);
        at_exit::remember(weak);
        Ok(Self {
            state,
            geometry,
            device,
            region,
            name,
            group,
            has_null_block: null_block,
            set_aside: AtomicU32::new(0),
            birth: Birth::here(),
        })
    }

    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    #[getter]
    fn group(&self) -> u32 {
        self.group
    }

    #[getter]
    fn device(&self) -> String {
        self.device.as_ref().map_or_else(|| "fleet".to_owned(), Device::name)
    }

    #[getter]
    fn geometry(&self) -> Geometry {
        self.geometry.clone()
    }

    #[getter]
    fn region(&self, py: Python<'_>) -> Option<Py<Region>> {
        self.region.as_ref().map(|region| region.clone_ref(py))
    }

    #[getter]
    fn null_block(&self) -> Option<u32> {
        self.has_null_block.then_some(0)
    }

    #[getter]
    fn closed(&self) -> bool {
        self.state.0.read().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    #[getter]
    fn mapped_bytes(&self) -> Result<u64, Refused> {
        Ok(self.open()?.pool.snapshot().mapped_bytes.0)
    }

    fn available(&self) -> Result<u32, Refused> {
        Ok(self.open()?.pool.available())
    }

    fn occupancy(&self, pages: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        Ok(self.open()?.pool.occupancy(&numbers::pages(pages)?))
    }

    fn pages_of(&self, blocks: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        let per_page = self.core().blocks_per_page();
        Ok(self.indices(blocks)?.into_iter().map(|index| index.0 / per_page).collect())
    }

    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        convert::snapshot(py, &self.open()?.pool.snapshot())
    }

    // ---- blocks ----

    #[pyo3(signature = (count, *, wait = None))]
    fn alloc<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = numbers::count)] count: u32,
        wait: Option<f64>,
    ) -> PyResult<Bound<'py, PyList>> {
        let open = self.open()?;
        let mut leases = Vec::new();
        if !open.pool.alloc_mapped(count, &mut leases).map_err(Refused::from)? {
            let wait = wait.map(|seconds| convert::duration("wait", seconds)).transpose()?;
            py.detach(|| match wait {
                Some(wait) => open.pool.alloc_within(count, wait, &mut leases),
                None => open.pool.alloc(count, &mut leases),
            })
            .map_err(Refused::from)?;
        }
        self.list(py, &leases)
    }

    fn try_alloc<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = numbers::count)] count: u32,
    ) -> PyResult<Option<Bound<'py, PyList>>> {
        let open = self.open()?;
        let mut leases = Vec::new();
        let at_once =
            self.set_aside.load(Relaxed) == 0 && open.pool.alloc_mapped(count, &mut leases).map_err(Refused::from)?;
        if !at_once {
            match py.detach(|| self.alloc_with_reserved(&open.pool, count, &mut leases)) {
                Ok(()) => {}
                Err(PoolError::Exhausted { .. } | PoolError::NeverFits { .. }) => return Ok(None),
                // A neighbour that holds the ledger too long: a miss like any other.
                Err(PoolError::Ledger(error)) if error.is_transient() => return Ok(None),
                Err(error) => return Err(Refused::from(error).into()),
            }
        }
        self.list(py, &leases).map(Some)
    }

    #[pyo3(signature = (blocks, *, step = None))]
    fn free(&self, blocks: &Bound<'_, PyAny>, step: Option<u64>) -> PyResult<()> {
        let open = self.open()?;
        let indices = self.indices(blocks)?;
        Ok(open.pool.free_blocks(&indices, fence_of(step)).map_err(|error| self.refused_free(error))?)
    }

    fn step_completed(&self, step: u64) -> Result<(), Refused> {
        self.open()?.pool.step_completed(Step(step));
        Ok(())
    }

    fn reserve(&self, py: Python<'_>, #[pyo3(from_py_with = numbers::count)] count: u32) -> Result<(), Refused> {
        let open = self.open()?;
        py.detach(|| open.pool.reserve(count))?;
        self.set_aside.fetch_add(count, Relaxed);
        Ok(())
    }

    fn try_reserve(&self, py: Python<'_>, #[pyo3(from_py_with = numbers::count)] count: u32) -> Result<bool, Refused> {
        let open = self.open()?;
        match py.detach(|| open.pool.reserve(count)) {
            Ok(()) => {
                self.set_aside.fetch_add(count, Relaxed);
                Ok(true)
            }
            Err(PoolError::Exhausted { .. } | PoolError::NeverFits { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn alloc_reserved<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = numbers::count)] count: u32,
    ) -> PyResult<Bound<'py, PyList>> {
        let open = self.open()?;
        let mut leases = Vec::new();
        open.pool.alloc_reserved(count, &mut leases).map_err(Refused::from)?;
        self.set_aside.fetch_sub(count, Relaxed);
        self.list(py, &leases)
    }

    fn free_reserved(&self) -> Result<(), Refused> {
        self.open()?.pool.free_reserved()?;
        self.set_aside.store(0, Relaxed);
        Ok(())
    }

    fn reserved_blocks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let blocks = self.open()?.pool.reserved_blocks();
        PyList::new(py, blocks.into_iter().map(|block| self.core().kernel_id(block).map_or(0, |id| id.0)))
    }

    fn reserved(&self) -> Result<u32, Refused> {
        self.open()?;
        Ok(self.set_aside.load(Relaxed))
    }

    fn clear(&self, py: Python<'_>) -> Result<u32, Refused> {
        let open = self.open()?;
        let freed = py.detach(|| open.pool.clear())?;
        self.set_aside.store(0, Relaxed);
        Ok(freed)
    }

    // ---- limits ----

    fn trim(&self, py: Python<'_>) -> Result<u64, Refused> {
        let open = self.open()?;
        Ok(py.detach(|| open.pool.trim())?.0)
    }

    fn resize<'py>(&self, py: Python<'py>, limit: u64) -> PyResult<Bound<'py, PyDict>> {
        let open = self.open()?;
        let state = py.detach(|| open.pool.resize(Bytes(limit))).map_err(Refused::from)?;
        convert::limit_state(py, &state)
    }

    #[pyo3(signature = (limit, *, revision))]
    fn set_limit<'py>(&self, py: Python<'py>, limit: u64, revision: u64) -> PyResult<Bound<'py, PyDict>> {
        let open = self.open()?;
        let state = py.detach(|| open.pool.set_limit(Bytes(limit), revision)).map_err(Refused::from)?;
        convert::limit_state(py, &state)
    }

    fn limit_state<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        convert::limit_state(py, &self.open()?.pool.limit_state())
    }

    fn set_evictable(&self, #[pyo3(from_py_with = numbers::count)] blocks: u32) -> Result<(), Refused> {
        self.open()?.pool.set_evictable(blocks);
        Ok(())
    }

    fn reclaim_requested<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        convert::reclaim(py, self.open()?.pool.reclaim_requested())
    }

    fn reclaim_fileno(&self) -> Result<i32, Refused> {
        Ok(self.open()?.pool.reclaim_fd().as_raw_fd())
    }

    // ---- bytes ----

    #[pyo3(signature = (layer, value = false, *, dtype = None))]
    fn view(&self, layer: u32, value: bool, dtype: Option<&str>) -> Result<View, Refused> {
        let own = self.geometry.layout.dtype;
        let dtype = dtype.map(dtype_named).transpose()?.unwrap_or(own);
        if dtype.bytes != own.bytes {
            let (wanted, own) = (dtype.name, own.name);
            return Err(Refused::argument(format!("{wanted} and {own} differ in size: view the tensor instead")));
        }
        let layer = self.geometry.layer_view(layer, value, dtype)?;
        let open = self.open()?;
        let (reservation, device) = self.memory(&open.pool)?;
        let limit = reservation.placement().reservation_bytes().0;
        let strided = Strided::within(limit, layer.offset, layer.dtype, layer.shape, Some(layer.strides));
        let strided = strided.map_err(Refused::argument)?;
        Ok(View::new(strided, reservation.base_address(), device.in_dlpack(), reservation))
    }

    #[pyo3(signature = (block, layer, value = false))]
    fn read_block<'py>(&self, py: Python<'py>, block: u32, layer: u32, value: bool) -> PyResult<Bound<'py, PyBytes>> {
        let (offset, bytes) = self.block_place(block, layer, value)?;
        let open = self.open()?;
        let (reservation, _) = self.memory(&open.pool)?;
        let bytes = py.detach(|| {
            let mut data = numbers::room(usize::try_from(bytes).unwrap_or(usize::MAX))?;
            let read = reservation.read(ByteOffset(offset), &mut data);
            read.map(|()| data).map_err(|error| about_block(error, block))
        })?;
        Ok(PyBytes::new(py, &bytes))
    }

    fn write_block(&self, py: Python<'_>, block: u32, layer: u32, value: bool, data: Vec<u8>) -> Result<(), Refused> {
        let (offset, bytes) = self.block_place(block, layer, value)?;
        if data.len() as u64 != bytes {
            return Err(Refused::argument(format!(
                "{} bytes for a block of {bytes}: give the whole block",
                data.len()
            )));
        }
        let open = self.open()?;
        let (reservation, _) = self.memory(&open.pool)?;
        py.detach(|| reservation.write(ByteOffset(offset), &data)).map_err(|error| about_block(error, block))
    }

    fn is_mapped(&self, block: u32) -> Result<bool, Refused> {
        let page = self.core().page_of(self.geometry.index_of(block)?)?;
        let open = self.open()?;
        let (reservation, _) = self.memory(&open.pool)?;
        Ok(matches!(reservation.page_use(PageId(page.0)), Some(PageUse::Mapped)))
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.state.close());
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(&self, py: Python<'_>, _kind: Bound<'_, PyAny>, _error: Bound<'_, PyAny>, _trace: Bound<'_, PyAny>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        let state = if self.closed() { "closed" } else { "open" };
        format!("Pool({:?}, {}, {}, {state})", self.name, self.device(), self.geometry.layout.layout.name())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("Pool", "it belongs to this process; open one in the other, or send block ids"))
    }
}

impl Pool {
    fn memory(&self, pool: &KvPool) -> Result<(Arc<Reservation>, Device), Refused> {
        match (pool.reservation(), &self.device) {
            (Some(reservation), Some(device)) => Ok((Arc::clone(reservation), device.clone())),
            _ => Err(Refused::argument("the memory of a pool on a fleet is its workers': look at their regions")),
        }
    }
}
