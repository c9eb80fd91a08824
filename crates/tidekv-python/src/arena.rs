//! `Arena`: blocks shared between processes.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use tidekv_core::units::Bytes;
use tidekv_fork::Birth;
use tidekv_shm::RuntimeDir;
use tidekv_shm::arena::{Arena as ShmArena, ArenaConfig, ArenaName, Handle, LocalArena, Prefault};

use crate::dlpack;
use crate::error::{Refused, not_picklable};
use crate::layout::dtype_named;
use crate::strided::Strided;
use crate::view::View;

/// An attachment, and the cache that this object allocates through.
struct Attached {
    // Before the arena, of which it is a part.
    local: LocalArena,
    arena: Arc<ShmArena>,
}

/// Memory that many processes allocate from.
#[pyclass(module = "tidekv._native", frozen, weakref)]
pub(crate) struct Arena {
    attached: Mutex<Option<Attached>>,
    path: PathBuf,
    segment: Bytes,
    limit: Bytes,
    birth: Birth,
}

fn dir_of(runtime_dir: Option<String>) -> RuntimeDir {
    runtime_dir.map_or_else(RuntimeDir::from_env, RuntimeDir::at)
}

fn handle_of(bits: u64) -> Result<Handle, Refused> {
    Handle::from_bits(bits).ok_or_else(|| {
        Refused::new("StaleHandle", format!("{bits} is not a handle that an arena gave")).number("handle", bits)
    })
}

impl Arena {
    fn lock(&self) -> Result<MutexGuard<'_, Option<Attached>>, Refused> {
        if self.birth.is_foreign() {
            return Err(Refused::forked("arena"));
        }
        // The cache is consistent between any two of its calls.
        Ok(self.attached.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Runs without the interpreter: any of these may have to add a segment, or wait for another thread that does.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        bits: Option<u64>,
        call: impl Send + FnOnce(&mut Attached) -> Result<T, Refused>,
    ) -> Result<T, Refused> {
        let done = py.detach(|| {
            let mut place = self.lock()?;
            call(place.as_mut().ok_or_else(|| Refused::closed("arena"))?)
        });
        match bits {
            Some(bits) => done.map_err(|refused| refused.number("handle", bits)),
            None => done,
        }
    }

    fn arena(&self) -> Result<Arc<ShmArena>, Refused> {
        let place = self.lock()?;
        Ok(Arc::clone(&place.as_ref().ok_or_else(|| Refused::closed("arena"))?.arena))
    }
}

#[pymethods]
impl Arena {
    #[new]
    #[pyo3(signature = (name, *, create = true, segment_bytes = 64 << 20, limit_bytes = 64 << 30, grain_bytes = 4096,
        runtime_dir = None))]
    fn new(
        py: Python<'_>,
        name: &str,
        create: bool,
        segment_bytes: u64,
        limit_bytes: u64,
        grain_bytes: u64,
        runtime_dir: Option<String>,
    ) -> Result<Self, Refused> {
        let (dir, name) = (dir_of(runtime_dir), ArenaName::new(name)?);
        let config = ArenaConfig {
            grain: Bytes(grain_bytes),
            segment: Bytes(segment_bytes),
            limit: Bytes(limit_bytes),
            initial: Bytes(segment_bytes),
            ..ArenaConfig::default()
        };
        py.detach(|| {
            let arena = if create {
                ShmArena::open_or_create(&dir, &name, &config, Prefault::Off)?
            } else {
                ShmArena::attach(&dir, &name, Prefault::Off)?
            };
            let local = arena.local()?;
            Ok(Self {
                path: arena.path().to_owned(),
                segment: arena.segment_bytes(),
                limit: arena.limit(),
                attached: Mutex::new(Some(Attached { local, arena: Arc::new(arena) })),
                birth: Birth::here(),
            })
        })
    }

    #[getter]
    fn path(&self) -> String {
        self.path.display().to_string()
    }

    #[getter]
    fn segments(&self) -> Result<u32, Refused> {
        Ok(self.arena()?.segments())
    }

    #[getter]
    fn segment_bytes(&self) -> u64 {
        self.segment.0
    }

    #[getter]
    fn limit_bytes(&self) -> u64 {
        self.limit.0
    }

    #[pyo3(signature = (nbytes, *, align = None))]
    fn alloc(&self, py: Python<'_>, nbytes: usize, align: Option<usize>) -> Result<u64, Refused> {
        self.with(py, None, |attached| {
            let handle = match align {
                Some(align) => attached.local.alloc_aligned(nbytes, align)?,
                None => attached.local.alloc(nbytes)?,
            };
            Ok(handle.to_bits())
        })
    }

    fn free(&self, py: Python<'_>, handle: u64) -> Result<(), Refused> {
        let block = handle_of(handle)?;
        self.with(py, Some(handle), |attached| Ok(attached.local.free(block)?))
    }

    fn share(&self, py: Python<'_>, handle: u64) -> Result<(), Refused> {
        let block = handle_of(handle)?;
        self.with(py, Some(handle), |attached| Ok(attached.local.share(block)?))
    }

    fn retain(&self, py: Python<'_>, handle: u64) -> Result<(), Refused> {
        let block = handle_of(handle)?;
        self.with(py, Some(handle), |attached| Ok(attached.local.retain(block)?))
    }

    fn release(&self, py: Python<'_>, handle: u64) -> Result<(), Refused> {
        let block = handle_of(handle)?;
        self.with(py, Some(handle), |attached| Ok(attached.local.release(block)?))
    }

    fn nbytes(&self, py: Python<'_>, handle: u64) -> Result<usize, Refused> {
        let block = handle_of(handle)?;
        self.with(py, Some(handle), |attached| Ok(attached.arena.block(block)?.len()))
    }

    #[pyo3(signature = (handle, offset = 0, nbytes = None))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        handle: u64,
        offset: usize,
        nbytes: Option<usize>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let block = handle_of(handle)?;
        let bytes = self.with(py, Some(handle), |attached| {
            let block = attached.arena.block(block)?;
            let wanted = nbytes.unwrap_or_else(|| block.len().saturating_sub(offset));
            // Looked at before memory for it is taken.
            if offset.checked_add(wanted).is_none_or(|end| end > block.len()) {
                return Err(Refused::argument(format!("the block has {} bytes: read less", block.len())));
            }
            let mut bytes = vec![0; wanted];
            block.copy_out(offset, &mut bytes)?;
            Ok(bytes)
        })?;
        Ok(PyBytes::new(py, &bytes))
    }

    #[pyo3(signature = (handle, data, offset = 0))]
    fn write(&self, py: Python<'_>, handle: u64, data: Vec<u8>, offset: usize) -> Result<(), Refused> {
        let block = handle_of(handle)?;
        self.with(py, Some(handle), |attached| Ok(attached.arena.block(block)?.copy_in(offset, &data)?))
    }

    #[pyo3(signature = (handle, dtype = "uint8", shape = None))]
    fn view(&self, handle: u64, dtype: &str, shape: Option<Vec<i64>>) -> Result<View, Refused> {
        let dtype = dtype_named(dtype)?;
        let arena = self.arena()?;
        let with_handle = |refused: Refused| refused.number("handle", handle);
        let block = arena.block(handle_of(handle)?).map_err(|error| with_handle(error.into()))?;
        let (address, bytes) = (block.as_ptr() as u64, block.len() as u64);
        let elements = i64::try_from(bytes / u64::from(dtype.bytes)).unwrap_or(i64::MAX);
        let strided = Strided::within(bytes, 0, dtype, shape.unwrap_or_else(|| vec![elements]), None);
        let strided = strided.map_err(Refused::argument)?;
        Ok(View::new(strided, address, dlpack::Device::CPU, arena))
    }

    fn verify<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let report = self.with(py, None, |attached| Ok(attached.arena.verify()?))?;
        let dict = PyDict::new(py);
        for (name, number) in [
            ("segments", u64::from(report.segments)),
            ("unused_bytes", report.unused.0),
            ("damaged_bytes", report.damaged.0),
            ("spans", report.spans),
            ("live_blocks", report.live),
            ("shared_blocks", report.shared),
            ("freed_blocks", report.freed),
            ("held_bytes", report.held.0),
            ("members", report.members.len() as u64),
            ("problems", report.problems.len() as u64),
        ] {
            dict.set_item(name, number)?;
        }
        Ok(dict)
    }

    /// Views keep the memory mapped; blocks of this process alone are freed with the last of them.
    fn close(&self, py: Python<'_>) -> Result<(), Refused> {
        let attached = self.lock()?.take();
        py.detach(|| drop(attached));
        Ok(())
    }

    #[staticmethod]
    #[pyo3(signature = (name, *, runtime_dir = None))]
    fn unlink(py: Python<'_>, name: &str, runtime_dir: Option<String>) -> Result<bool, Refused> {
        let (dir, name) = (dir_of(runtime_dir), ArenaName::new(name)?);
        Ok(py.detach(|| ShmArena::unlink(&dir, &name))?)
    }

    #[staticmethod]
    #[pyo3(signature = (*, runtime_dir = None))]
    fn names(py: Python<'_>, runtime_dir: Option<String>) -> Result<Vec<String>, Refused> {
        let dir = dir_of(runtime_dir);
        let names = py.detach(|| ShmArena::list(&dir))?;
        Ok(names.iter().map(|name| name.as_str().to_owned()).collect())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("Arena", "attach to it by its name in the other process, and send handles"))
    }
}
