//! Memory handed to torch and numpy without copying: DLPack capsules, the old kind and the versioned one.
//!
//! ```text
//!   View --> capsule "dltensor_versioned" (or "dltensor" for consumers that know no other)
//!               |  taken: renamed by the consumer, whose tensor calls `deleter` when it ends
//!               |  not taken: the capsule's end calls `deleter`
//!            Managed { tensor, shape, strides, keep }      `keep` holds the address range
//! ```
//!
//! The only room of this crate with `unsafe`. A deleter runs on any thread, without the interpreter, also after the driver
//! was shut down: it drops one `Arc` and says nothing.

#![allow(unsafe_code, reason = "DLPack is a C interface: structs behind pointers, and functions that free them")]

use std::any::Any;
use std::ffi::{CStr, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use pyo3::{Bound, ffi};

use crate::dtype::Dtype;

/// What keeps the memory's addresses.
pub(crate) type Keep = Arc<dyn Any + Send + Sync>;

/// A device in DLPack's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Device {
    pub(crate) kind: i32,
    pub(crate) index: i32,
}

impl Device {
    pub(crate) const CPU: Self = Self { kind: 1, index: 0 };

    pub(crate) const fn cuda(index: i32) -> Self {
        Self { kind: 2, index }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct ManagedTensor {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedTensor)>,
}

#[repr(C)]
struct ManagedTensorVersioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedTensorVersioned)>,
    flags: u64,
    tensor: Tensor,
}

/// One of the two structs, and what its pointers point at. It lies in a box until its deleter runs.
#[repr(C)]
struct Managed<T> {
    // First, so that a pointer to it is a pointer to the whole.
    face: T,
    shape: Box<[i64]>,
    strides: Box<[i64]>,
    _keep: Keep,
}

/// What a consumer is told.
#[derive(Clone, Debug)]
pub(crate) struct Described {
    pub(crate) address: u64,
    pub(crate) device: Device,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<i64>,
    pub(crate) strides: Vec<i64>,
}

/// A kind of capsule.
trait Face: Sized {
    const NAME: &'static CStr;
    fn new(tensor: Tensor) -> Self;
    fn tensor(&mut self) -> &mut Tensor;
}

impl Face for ManagedTensor {
    const NAME: &'static CStr = c"dltensor";

    fn new(tensor: Tensor) -> Self {
        Self { tensor, context: std::ptr::null_mut(), deleter: Some(delete::<Self>) }
    }

    fn tensor(&mut self) -> &mut Tensor {
        &mut self.tensor
    }
}

impl Face for ManagedTensorVersioned {
    const NAME: &'static CStr = c"dltensor_versioned";

    fn new(tensor: Tensor) -> Self {
        Self { major: 1, minor: 0, context: std::ptr::null_mut(), deleter: Some(delete::<Self>), flags: 0, tensor }
    }

    fn tensor(&mut self) -> &mut Tensor {
        &mut self.tensor
    }
}

/// A capsule for a consumer that knows versions up to `max_version`.
pub(crate) fn capsule<'py>(
    py: Python<'py>,
    described: Described,
    keep: Keep,
    max_version: Option<(u32, u32)>,
) -> PyResult<Bound<'py, PyCapsule>> {
    match max_version {
        Some((1.., _)) => capsule_of::<ManagedTensorVersioned>(py, described, keep),
        _ => capsule_of::<ManagedTensor>(py, described, keep),
    }
}

fn capsule_of<'py, F: Face>(py: Python<'py>, described: Described, keep: Keep) -> PyResult<Bound<'py, PyCapsule>> {
    let Described { address, device, dtype, shape, strides } = described;
    let ndim = i32::try_from(shape.len()).map_err(|_| PyBufferError::new_err("a tensor has too many dimensions"))?;
    let tensor = Tensor {
        data: address as *mut c_void,
        device,
        ndim,
        dtype: DataType { code: dtype.code, bits: dtype.bits(), lanes: 1 },
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let mut managed =
        Box::new(Managed { face: F::new(tensor), shape: shape.into(), strides: strides.into(), _keep: keep });
    // The boxed slices keep their places when the box around them becomes a pointer.
    let (shape, strides) = (managed.shape.as_mut_ptr(), managed.strides.as_mut_ptr());
    let tensor = managed.face.tensor();
    (tensor.shape, tensor.strides) = (shape, strides);
    let managed = Box::into_raw(managed);
    // SAFETY: the name lives for ever, and the pointer until `delete` is called once, by the consumer or by `abandon`.
    let made = unsafe { ffi::PyCapsule_New(managed.cast(), F::NAME.as_ptr(), Some(abandon::<F>)) };
    if made.is_null() {
        // SAFETY: no capsule has it, so it is still ours alone.
        drop(unsafe { Box::from_raw(managed) });
        return Err(PyErr::fetch(py));
    }
    // SAFETY: a new reference to a Python object, and not null.
    let capsule = unsafe { Bound::from_owned_ptr(py, made) };
    capsule.cast_into::<PyCapsule>().map_err(PyErr::from)
}

/// The consumer, or a capsule that nobody took, is done with the tensor.
///
/// # Safety
/// `face` is one that [`capsule_of`] made, and this is the only call for it.
unsafe extern "C" fn delete<F: Face>(face: *mut F) {
    if face.is_null() {
        return;
    }
    // SAFETY: `face` is the first field of a `Managed` that came out of a box of the same type.
    let managed = unsafe { Box::from_raw(face.cast::<Managed<F>>()) };
    // Whoever calls is C, and may be anywhere: nothing may pass through it.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(managed)));
}

/// A capsule ends. One that was taken has another name by then.
///
/// # Safety
/// Called by Python with a capsule that [`capsule_of`] made.
unsafe extern "C" fn abandon<F: Face>(capsule: *mut ffi::PyObject) {
    // SAFETY: `capsule` is a capsule, and asking for its name changes nothing.
    if unsafe { ffi::PyCapsule_IsValid(capsule, F::NAME.as_ptr()) } == 0 {
        return;
    }
    // SAFETY: it was just said to be valid under this name.
    let face = unsafe { ffi::PyCapsule_GetPointer(capsule, F::NAME.as_ptr()) };
    // SAFETY: nobody took it, so nobody else deletes it.
    unsafe { delete::<F>(face.cast()) };
}
