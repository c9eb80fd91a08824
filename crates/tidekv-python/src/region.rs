//! `Region`: one address range whose pages are mapped by hand, by a pool, or by a worker; by one of them at a time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tidekv_core::geometry::Placement;
use tidekv_core::units::{ByteOffset, Bytes, PageId};
use tidekv_mem::{PageUse, RegionOptions, Reservation, UnmappedReads};

use crate::device::{Device, DeviceName};
use crate::error::{Refused, not_picklable};
use crate::layout::dtype_named;
use crate::numbers;
use crate::strided::Strided;
use crate::view::View;

/// What a region is made of, shared with the pool or worker that has it.
#[derive(Debug)]
pub(crate) struct RegionState {
    pub(crate) reservation: Arc<Reservation>,
    pub(crate) device: Device,
    pub(crate) chunk: u64,
    chunks: u32,
    pub(crate) contiguous: bool,
    closed: AtomicBool,
    /// Who maps: nobody means whoever has the object.
    owner: Mutex<Option<&'static str>>,
}

impl RegionState {
    fn owner(&self) -> MutexGuard<'_, Option<&'static str>> {
        self.owner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_open(&self) -> Result<(), Refused> {
        if self.closed.load(Ordering::Acquire) { Err(Refused::closed("region")) } else { Ok(()) }
    }

    /// The region is open and nobody else maps in it.
    fn check_free(&self) -> Result<(), Refused> {
        self.check_open()?;
        match *self.owner() {
            Some(owner) => Err(Refused::argument(format!(
                "a {owner} maps the pages of this region: close it first, or allocate through it"
            ))),
            None => Ok(()),
        }
    }

    /// Makes a pool or worker the only one that maps here.
    pub(crate) fn own(self: &Arc<Self>, owner: &'static str) -> Result<Owned, Refused> {
        self.check_open()?;
        let mut place = self.owner();
        if let Some(other) = *place {
            return Err(Refused::argument(format!("a {other} has this region already: close it first")));
        }
        *place = Some(owner);
        drop(place);
        Ok(Owned(Arc::clone(self)))
    }
}

/// The right to map in a region. Dropping it gives it up.
#[derive(Debug)]
pub(crate) struct Owned(Arc<RegionState>);

impl Drop for Owned {
    fn drop(&mut self) {
        *self.0.owner() = None;
    }
}

pub(crate) fn unmapped_reads_named(name: &str) -> Result<UnmappedReads, Refused> {
    match name {
        "fault" => Ok(UnmappedReads::Fault),
        "zeros" => Ok(UnmappedReads::Zeros),
        _ => Err(Refused::argument(format!("{name:?} is not what reads can do: use fault or zeros"))),
    }
}

/// One address range whose pages come and go.
#[pyclass(module = "tidekv._native", frozen)]
pub(crate) struct Region {
    pub(crate) state: Arc<RegionState>,
}

#[pymethods]
impl Region {
    #[new]
    #[pyo3(signature = (device, *, pages, chunk_bytes, chunks = 1, contiguous = true, unmapped_reads = "fault"))]
    fn new(
        py: Python<'_>,
        device: &str,
        pages: u32,
        chunk_bytes: u64,
        chunks: u32,
        contiguous: bool,
        unmapped_reads: &str,
    ) -> Result<Self, Refused> {
        let device = DeviceName::parse(device)?;
        let options = RegionOptions { unmapped_reads: unmapped_reads_named(unmapped_reads)? };
        let placement = if contiguous {
            let page = chunk_bytes.checked_mul(u64::from(chunks));
            Placement::uniform(
                Bytes(page.ok_or_else(|| Refused::argument("a page is larger than all memory"))?),
                pages,
            )?
        } else {
            Placement::regions(Bytes(chunk_bytes), pages, chunks)?
        };
        py.detach(|| {
            let device = device.open()?;
            let reservation = Reservation::new(Arc::clone(&device.backend), placement, options)?;
            let state = RegionState {
                reservation: Arc::new(reservation),
                device,
                chunk: chunk_bytes,
                chunks,
                contiguous,
                closed: AtomicBool::new(false),
                owner: Mutex::new(None),
            };
            Ok(Self { state: Arc::new(state) })
        })
    }

    #[getter]
    fn device(&self) -> String {
        self.state.device.name()
    }

    #[getter]
    fn base_address(&self) -> u64 {
        self.state.reservation.base_address()
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.state.reservation.placement().reservation_bytes().0
    }

    #[getter]
    fn page_count(&self) -> u32 {
        self.state.reservation.placement().page_count()
    }

    #[getter]
    fn page_bytes(&self) -> u64 {
        self.state.reservation.placement().page_bytes().0
    }

    #[getter]
    fn chunk_bytes(&self) -> u64 {
        self.state.chunk
    }

    #[getter]
    fn chunks(&self) -> u32 {
        self.state.chunks
    }

    #[getter]
    fn contiguous(&self) -> bool {
        self.state.contiguous
    }

    #[getter]
    fn mapped_pages(&self) -> u32 {
        self.state.reservation.mapped_pages()
    }

    #[getter]
    fn closed(&self) -> bool {
        self.state.closed.load(Ordering::Acquire)
    }

    fn is_mapped(&self, page: u32) -> bool {
        self.state.reservation.page_use(PageId(page)) == Some(PageUse::Mapped)
    }

    fn map(&self, py: Python<'_>, pages: &Bound<'_, PyAny>) -> PyResult<()> {
        let pages = numbers::pages(pages)?;
        self.state.check_free()?;
        Ok(py.detach(|| self.state.reservation.map_pages(&pages).map_err(Refused::from))?)
    }

    #[pyo3(signature = (pages, *, synchronise = true))]
    fn unmap(&self, py: Python<'_>, pages: &Bound<'_, PyAny>, synchronise: bool) -> PyResult<()> {
        let pages = numbers::pages(pages)?;
        self.state.check_free()?;
        let reservation = &self.state.reservation;
        Ok(py.detach(|| {
            if synchronise && reservation.backend().capabilities().needs_fence {
                reservation.backend().synchronise()?;
            }
            reservation.unmap_pages(&pages).map_err(Refused::from)
        })?)
    }

    fn page_of_offset(&self, offset: u64) -> Result<u32, Refused> {
        let stride = self.page_stride();
        let page = u32::try_from(offset / stride).ok().filter(|&page| page < self.page_count());
        match page {
            Some(page) if offset.is_multiple_of(stride) => Ok(page),
            _ => Err(Refused::argument(format!(
                "offset {offset} is not that of a page: give a multiple of {stride} below {}",
                stride * u64::from(self.page_count())
            ))),
        }
    }

    fn offset_of_page(&self, page: u32) -> Result<u64, Refused> {
        if page >= self.page_count() {
            let last = self.page_count() - 1;
            return Err(Refused::argument(format!("page {page} is outside this region: valid pages are 0 to {last}")));
        }
        Ok(u64::from(page) * self.page_stride())
    }

    #[pyo3(signature = (dtype, shape, *, offset = 0, strides = None))]
    fn view(&self, dtype: &str, shape: Vec<i64>, offset: u64, strides: Option<Vec<i64>>) -> Result<View, Refused> {
        self.state.check_open()?;
        let strided = Strided::within(self.nbytes(), offset, dtype_named(dtype)?, shape, strides);
        let strided = strided.map_err(Refused::argument)?;
        let keep = Arc::clone(&self.state.reservation);
        Ok(View::new(strided, self.base_address(), self.state.device.in_dlpack(), keep))
    }

    fn read<'py>(&self, py: Python<'py>, offset: u64, nbytes: usize) -> PyResult<Bound<'py, PyBytes>> {
        self.state.check_open()?;
        let bytes = py.detach(|| {
            // Looked at before memory for it is taken.
            self.state.reservation.check_range(ByteOffset(offset), nbytes as u64)?;
            let mut bytes = numbers::room(nbytes)?;
            self.state.reservation.read(ByteOffset(offset), &mut bytes).map(|()| bytes).map_err(Refused::from)
        })?;
        Ok(PyBytes::new(py, &bytes))
    }

    fn write(&self, py: Python<'_>, offset: u64, data: Vec<u8>) -> Result<(), Refused> {
        self.state.check_open()?;
        Ok(py.detach(|| self.state.reservation.write(ByteOffset(offset), &data))?)
    }

    /// Unmaps everything; the addresses stay taken until the last tensor is gone.
    fn close(&self, py: Python<'_>) -> Result<(), Refused> {
        if self.closed() {
            return Ok(());
        }
        self.state.check_free()?;
        self.state.closed.store(true, Ordering::Release);
        py.detach(|| self.state.reservation.unmap_all());
        Ok(())
    }

    fn __repr__(&self) -> String {
        let (pages, bytes) = (self.page_count(), self.page_bytes());
        format!("Region({:?}, {pages} pages of {bytes} bytes, {} mapped)", self.device(), self.mapped_pages())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("Region", "it is an address range of this process; make one in the other"))
    }
}

impl Region {
    /// kvcached's offsets count whole pages where a page is one piece, and one chunk of it where it is not.
    fn page_stride(&self) -> u64 {
        if self.state.contiguous { self.page_bytes() } else { self.state.chunk }
    }
}
