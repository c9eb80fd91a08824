//! What is still open when the interpreter ends is closed then: segments, sockets and ledger entries go with it, as they
//! would with a Rust program.

use std::sync::{Mutex, PoisonError, Weak};

use pyo3::prelude::*;

/// Something that leaves traces in the system while it is open.
pub(crate) trait Closes: Send + Sync {
    fn close(&self);
}

static OPEN: Mutex<Vec<Weak<dyn Closes>>> = Mutex::new(Vec::new());

/// From now on it is closed at the end, unless it is gone by then.
pub(crate) fn remember(open: Weak<dyn Closes>) {
    let mut all = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|open| open.strong_count() > 0);
    all.push(open);
}

/// Called by Python's `atexit`, latest first: a pool on a fleet goes before the fleet does.
#[pyfunction]
pub(crate) fn _close_all(py: Python<'_>) {
    py.detach(|| {
        // A lock that a fork caught is not waited for: in a child there is nothing to close.
        let all = OPEN.try_lock().map(|mut all| std::mem::take(&mut *all)).unwrap_or_default();
        all.iter().rev().filter_map(Weak::upgrade).for_each(|open| open.close());
    });
}
