//! tidekv for Python: the native module `tidekv._native`, on which the packages `tidekv` and `kvcached` are written.
//!
//! ```text
//!   layout        Layout, Geometry, LayerView        numbers alone
//!   region        Region                             pages mapped by hand
//!   pool, open    Pool                               elastic blocks
//!   block_table   BlockTable                         a pool's decisions without memory
//!   fleet worker  Fleet, FleetGroup, Worker          several processes
//!   arena         Arena                              blocks shared between processes
//!   batch         Batch                              block tables and attention metadata of the next step
//!   view, dlpack  View                               tensors without copying; strided checks that they stay inside
//!   files tools   segments, names, sizes; kvctl, kvtop and kvbench
//!
//!   error         every refusal as an exception with fields       at_exit   what is open is closed with the interpreter
//!   convert numbers dtype device                                   between Python's values and ours
//! ```
//!
//! What the module promises: the GIL is released around whatever can wait, no thread of ours ever calls Python, and objects
//! that a forked child or a closed owner touches raise instead of doing harm. It decides nothing: policy is in the crates
//! below. Its signatures are `python/tidekv/_native.pyi`.

#![deny(unsafe_code)]

mod arena;
mod at_exit;
mod batch;
mod block_table;
mod convert;
mod device;
mod dlpack;
mod dtype;
mod error;
mod files;
mod fleet;
mod layout;
mod numbers;
mod open;
mod pool;
mod region;
mod strided;
mod tools;
mod view;
mod worker;

/// The native half of the package `tidekv`.
#[pyo3::pymodule(name = "_native")]
mod native {
    use pyo3::prelude::*;
    use pyo3::types::PyTuple;
    use tidekv_ipc::broadcast::STRATEGIES;

    #[pymodule_export]
    use crate::arena::Arena;
    #[pymodule_export]
    use crate::at_exit::_close_all;
    #[pymodule_export]
    use crate::batch::Batch;
    #[pymodule_export]
    use crate::block_table::BlockTable;
    #[pymodule_export]
    use crate::device::{device_count, device_memory};
    #[pymodule_export]
    use crate::files::{
        default_pool_name, format_size, group_by_page, ipc_timeout, parse_size, runtime_dir, sanitise_name,
        segment_create, segment_delete, segment_names, segment_owned, segment_path, segment_read, segment_set_limit,
        segment_set_usage, socket_dir, socket_path,
    };
    #[pymodule_export]
    use crate::fleet::{Fleet, FleetGroup};
    #[pymodule_export]
    use crate::layout::{Geometry, LayerView, Layout};
    #[pymodule_export]
    use crate::pool::Pool;
    #[pymodule_export]
    use crate::region::Region;
    #[pymodule_export]
    use crate::tools::run_tool;
    #[pymodule_export]
    use crate::view::View;
    #[pymodule_export]
    use crate::worker::Worker;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let py = module.py();
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("DEFAULT_MAX_CACHED_TOKENS", tidekv_pool::DEFAULT_MAX_CACHED_TOKENS)?;
        module.add("STRATEGIES", PyTuple::new(py, STRATEGIES.iter().map(|strategy| strategy.name))?)?;
        py.import("atexit")?.call_method1("register", (module.getattr("_close_all")?,))?;
        Ok(())
    }
}
