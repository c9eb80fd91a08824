//! `kvtop --json`: an object per look and line.
//!
//! ```json
//! {"time":"2026-01-02T03:04:05.678Z","devices":[{"device":"host","total_bytes":…}],"pools":[{"ipc":"VLLM",…}],
//!  "unreadable":[]}
//! ```
//!
//! A pool has the keys of `kvctl list --json`, and then what changed since the look before: null in the first look, for
//! pools that were not there then, and rates for pools of kvcached's own, which count nothing.

use jiff::Timestamp;
use serde::Serialize;

use super::collect::{DeviceSample, Sample};
use crate::change::{Change, Changes, PoolKey};
use crate::command::list::PoolJson;
use crate::scene::Pool;

#[derive(Serialize)]
struct LookJson<'a> {
    time: String,
    devices: Vec<DeviceJson<'a>>,
    pools: Vec<ChangingJson<'a>>,
    unreadable: &'a [String],
}

#[derive(Serialize)]
struct DeviceJson<'a> {
    device: &'a str,
    total_bytes: u64,
    held_bytes: u64,
    needed_bytes: u64,
    cached_bytes: u64,
    idle_bytes: u64,
    non_pool_bytes: u64,
    /// What nobody has.
    device_free_bytes: u64,
    /// What of it pools may still take, under their budget.
    free_bytes: u64,
    budget_bytes: u64,
}

#[derive(Serialize)]
struct ChangingJson<'a> {
    #[serde(flatten)]
    pool: PoolJson<'a>,
    used_change_bytes: Option<i64>,
    held_change_bytes: Option<i64>,
    maps_per_second: Option<f64>,
    unmaps_per_second: Option<f64>,
}

/// The line of one look.
pub(super) fn line(sample: &Sample, pools: &[&Pool], changes: &Changes, time: Timestamp) -> serde_json::Result<String> {
    let look = LookJson {
        time: format!("{time:.3}"),
        devices: sample.devices.iter().map(device).collect(),
        pools: pools.iter().map(|pool| changing(pool, changes.of(&PoolKey::of(pool)))).collect(),
        unreadable: &sample.troubles,
    };
    serde_json::to_string(&look)
}

fn device(device: &DeviceSample) -> DeviceJson<'_> {
    DeviceJson {
        device: device.name.as_str(),
        total_bytes: device.total.0,
        held_bytes: device.held().0,
        needed_bytes: device.usage.needed.0,
        cached_bytes: device.usage.cached.0,
        idle_bytes: device.usage.idle.0,
        non_pool_bytes: device.non_pool.0,
        device_free_bytes: device.device_free.0,
        free_bytes: device.free.0,
        budget_bytes: device.budget.0,
    }
}

fn changing<'a>(pool: &'a Pool, change: Option<&Change>) -> ChangingJson<'a> {
    let bytes = |bytes: i128| i64::try_from(bytes).unwrap_or(if bytes < 0 { i64::MIN } else { i64::MAX });
    let rates = change.and_then(|change| change.rates);
    ChangingJson {
        pool: PoolJson::new(pool),
        used_change_bytes: change.map(|change| bytes(change.used_bytes)),
        held_change_bytes: change.map(|change| bytes(change.held_bytes)),
        maps_per_second: rates.map(|rates| rates.maps),
        unmaps_per_second: rates.map(|rates| rates.unmaps),
    }
}
