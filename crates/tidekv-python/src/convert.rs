//! The values of the crates below as Python's dictionaries.

use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tidekv_pool::{LimitState, PoolSnapshot, ReclaimRequest};

use crate::error::Refused;

/// What `inf` and `sys.maxsize` seconds come to: no clock counts so far, and nobody waits for longer.
const FOR_EVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Seconds as Python counts them.
pub(crate) fn duration(what: &str, seconds: f64) -> Result<Duration, Refused> {
    if seconds >= FOR_EVER.as_secs_f64() {
        return Ok(FOR_EVER);
    }
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| Refused::argument(format!("{what} is {seconds} seconds: give a number from 0 on")))
}

pub(crate) fn reclaim(py: Python<'_>, request: ReclaimRequest) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("bytes", request.bytes.0)?;
    dict.set_item("pages", request.pages)?;
    dict.set_item("firm_pages", request.firm_pages)?;
    dict.set_item("revision", request.revision)?;
    Ok(dict)
}

pub(crate) fn limit_state<'py>(py: Python<'py>, state: &LimitState) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("status", state.status.name())?;
    dict.set_item("pool_name", &state.pool_name)?;
    dict.set_item("group_id", state.group_id.0)?;
    dict.set_item("limit_bytes", state.limit_bytes.0)?;
    dict.set_item("effective_limit_bytes", state.effective_limit_bytes.0)?;
    dict.set_item("current_capacity_bytes", state.current_capacity_bytes.0)?;
    dict.set_item("revision", state.revision)?;
    dict.set_item("mapped_bytes", state.mapped_bytes.0)?;
    dict.set_item("remaining_bytes", state.remaining_bytes.0)?;
    dict.set_item("overage_bytes", state.overage_bytes.0)?;
    dict.set_item("reason", state.reason)?;
    Ok(dict)
}

pub(crate) fn snapshot<'py>(py: Python<'py>, pool: &PoolSnapshot) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("pool_name", &pool.pool_name)?;
    let numbers: [(&str, u64); 29] = [
        ("group_id", pool.group_id.into()),
        ("block_tokens", pool.block_tokens.into()),
        ("blocks_per_page", pool.blocks_per_page.into()),
        ("page_bytes", pool.page_bytes.0),
        ("total_blocks", pool.total_blocks.into()),
        ("available_blocks", pool.available_blocks.into()),
        ("allocated_blocks", pool.allocated_blocks.into()),
        ("reserved_blocks", pool.reserved_blocks.into()),
        ("free_mapped_blocks", pool.free_mapped_blocks.into()),
        ("virtual_bytes_per_layer", pool.virtual_bytes_per_layer.0),
        ("virtual_bytes_total", pool.virtual_bytes_total.0),
        ("mapped_bytes", pool.mapped_bytes.0),
        ("needed_bytes", pool.usage.needed.0),
        ("cached_bytes", pool.usage.cached.0),
        ("idle_bytes", pool.usage.idle.0),
        ("used_bytes", pool.used_bytes.0),
        ("prealloc_bytes", pool.prealloc_bytes.0),
        ("ledger_bytes", pool.ledger_bytes.0),
        ("total_pages", pool.total_pages.into()),
        ("free_pages", pool.free_pages.into()),
        ("inuse_pages", pool.inuse_pages.into()),
        ("reserved_pages", pool.reserved_pages.into()),
        ("mapping_pages", pool.mapping_pages.into()),
        ("leaving_pages", pool.leaving_pages.into()),
        ("refused_pages", pool.refused_pages.into()),
        ("available_physical_pages", pool.available_physical_pages.into()),
        ("limit_bytes", pool.limit_bytes.0),
        ("limit_revision", pool.limit_revision),
        ("limit_pages", pool.limit_pages.into()),
    ];
    for (name, number) in numbers {
        dict.set_item(name, number)?;
    }
    dict.set_item("witness_bytes", pool.witness_bytes.map(|bytes| bytes.0))?;
    dict.set_item("in_shrink", pool.in_shrink)?;
    dict.set_item("shrink_target_blocks", pool.shrink_target_blocks)?;
    dict.set_item("demand_bytes", pool.demand_bytes.0)?;
    dict.set_item("reclaim", reclaim(py, pool.reclaim)?)?;
    let counters = PyDict::new(py);
    for (name, count) in [
        ("maps", pool.counters.maps),
        ("unmaps", pool.counters.unmaps),
        ("waits", pool.counters.waits),
        ("reclaims", pool.counters.reclaims),
        ("failures", pool.counters.failures),
    ] {
        counters.set_item(name, count)?;
    }
    dict.set_item("counters", counters)?;
    Ok(dict)
}
