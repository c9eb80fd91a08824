//! Lists of numbers in and out of Python, quickly: they are on the path of every allocation.
//!
//! A number of Python's may be any. So room is made for as many as were found to be there, not for as many as were asked for:
//! memory that is not there would end the process.

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::types::PyList;
use tidekv_core::units::PageId;

use crate::error::Refused;

/// How many of something.
pub(crate) fn count(given: &Bound<'_, PyAny>) -> PyResult<u32> {
    given.extract().map_err(|error| explain(given.py(), error, "a count"))
}

/// A number that is out of range is an argument that makes no sense, whichever way.
fn explain(py: Python<'_>, error: PyErr, what: &str) -> PyErr {
    if error.is_instance_of::<PyOverflowError>(py) {
        return Refused::argument(format!("{what} is a whole number from 0 to 4294967295: nothing was changed")).into();
    }
    error
}

/// So many bytes, or `OutOfMemory`: Rust's own vectors end the process where there is no memory.
pub(crate) fn room(nbytes: usize) -> Result<Vec<u8>, Refused> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(nbytes).map_err(|_| {
        Refused::new(
            "OutOfMemory",
            format!("{nbytes} bytes of host memory for a copy are not there: copy less at once"),
        )
        .number("needed_bytes", nbytes as u64)
    })?;
    bytes.resize(nbytes, 0);
    Ok(bytes)
}

/// Block or page ids: from a list without detours, from anything else that has numbers in it.
pub(crate) fn ids(given: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let read: PyResult<Vec<u32>> = match given.cast::<PyList>() {
        Ok(list) => list.iter().map(|item| item.extract::<u32>()).collect(),
        Err(_) => given.try_iter()?.map(|item| item?.extract::<u32>()).collect(),
    };
    read.map_err(|error| explain(given.py(), error, "an id"))
}

pub(crate) fn pages(given: &Bound<'_, PyAny>) -> PyResult<Vec<PageId>> {
    Ok(ids(given)?.into_iter().map(PageId).collect())
}
