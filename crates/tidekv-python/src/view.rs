//! `View`: a strided part of memory that tensor libraries take over without copying.

use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple};

use crate::dlpack::{self, Described, Device, Keep};
use crate::strided::Strided;

/// A strided part of a reservation or of an arena.
#[pyclass(module = "tidekv._native", frozen)]
pub(crate) struct View {
    strided: Strided,
    base: u64,
    device: Device,
    keep: Keep,
}

impl View {
    pub(crate) fn new(strided: Strided, base: u64, device: Device, keep: Keep) -> Self {
        Self { strided, base, device, keep }
    }
}

#[pymethods]
impl View {
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.strided.shape)
    }

    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.strided.strides)
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.strided.dtype.name
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.strided.element_bytes()
    }

    #[getter]
    fn address(&self) -> u64 {
        self.base + self.strided.offset
    }

    #[getter]
    fn device(&self) -> String {
        match self.device {
            Device::CPU => "cpu".to_owned(),
            Device { index, .. } => format!("cuda:{index}"),
        }
    }

    /// No stream is waited for: nothing of ours ever writes to this memory.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        drop(stream);
        if copy == Some(true) {
            return Err(PyBufferError::new_err("this memory is handed over without copying: copy the tensor instead"));
        }
        if dl_device.is_some_and(|wanted| wanted != self.__dlpack_device__()) {
            let message = format!("this memory is on {} and is not moved: copy the tensor instead", self.device());
            return Err(PyBufferError::new_err(message));
        }
        let described = Described {
            address: self.address(),
            device: self.device,
            dtype: self.strided.dtype,
            shape: self.strided.shape.clone(),
            strides: self.strided.strides.clone(),
        };
        dlpack::capsule(py, described, self.keep.clone(), max_version)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        (self.device.kind, self.device.index)
    }

    fn __repr__(&self) -> String {
        let Strided { shape, strides, dtype, .. } = &self.strided;
        format!("View({}, shape={shape:?}, strides={strides:?}, device={:?})", dtype.name, self.device())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(crate::error::not_picklable("View", "it is memory of this process; send the bytes, or use an Arena"))
    }
}
