//! `kvctl list`: kvcached's table and JSON, and what we know besides. Rows are printed by [`super::table`].

use anyhow::Context;
use serde::Serialize;
use tidekv_shm::{RuntimeDir, UNLIMITED};

use super::budget::decided_by;
use super::table::{STANDING, Table};
use crate::console::Console;
use crate::exit::Outcome;
use crate::scene::{Pool, Scene, State};

pub(super) fn run(dir: &RuntimeDir, names: &[String], json: bool, console: &mut Console) -> anyhow::Result<Outcome> {
    let scene = Scene::look(dir)?;
    let shown: Vec<&Pool> = if names.is_empty() {
        scene.pools.iter().collect()
    } else {
        names.iter().flat_map(|name| scene.named(name)).collect()
    };
    if json {
        let rows: Vec<PoolJson<'_>> = shown.iter().map(|pool| PoolJson::new(pool)).collect();
        console.line(serde_json::to_string_pretty(&rows).context("cannot write JSON")?)?;
    } else if shown.is_empty() && names.is_empty() {
        console.line("No active KVCached segments found.")?;
    } else if !shown.is_empty() {
        Table::new(shown.into_iter().map(Into::into).collect(), STANDING, console.width()).print(console)?;
        for device in scene.devices.iter().filter(|device| device.header.explicit_budget) {
            let header = &device.header;
            console.line(format_args!("Budget of {}: {}, {}", device.name, header.budget, decided_by(header)))?;
        }
    }
    scene.say_unreadable(console);

    let mut outcome = Outcome::Done;
    for name in names.iter().filter(|name| scene.named(name).is_empty()) {
        outcome = scene.say_unknown(name, console);
    }
    Ok(outcome)
}

/// A pool in JSON: kvcached's three keys first (its `used` is what is needed and what is cached). `reserved_bytes` is
/// the sum of needed, cached and idle. What only a ledger says is null for pools of kvcached's own.
#[derive(Serialize)]
pub(super) struct PoolJson<'a> {
    ipc: &'a str,
    limit_bytes: i64,
    used_bytes: i64,
    prealloc_bytes: i64,
    state: State,
    device: Option<&'a str>,
    group: Option<u32>,
    pid: Option<u32>,
    owner_alive: Option<bool>,
    reserved_bytes: Option<u64>,
    needed_bytes: Option<u64>,
    cached_bytes: Option<u64>,
    idle_bytes: Option<u64>,
    demand_bytes: Option<u64>,
    reclaim_bytes: Option<u64>,
    page_bytes: Option<u64>,
    weight: Option<u32>,
    priority: Option<i32>,
    floor_bytes: Option<u64>,
    /// Null as well where there is no ceiling.
    ceiling_bytes: Option<u64>,
    fair_bytes: Option<u64>,
    owed_bytes: Option<u64>,
    standing: Option<&'static str>,
    why: Option<&'a str>,
    limit_revision: Option<u64>,
    applied_revision: Option<u64>,
    limit_applied: Option<bool>,
    counters: Option<CountersJson>,
}

#[derive(Serialize)]
struct CountersJson {
    maps: u64,
    unmaps: u64,
    waits: u64,
    reclaims: u64,
    failures: u64,
}

impl<'a> PoolJson<'a> {
    pub(super) fn new(pool: &'a Pool) -> Self {
        let place = pool.place.as_ref();
        let entry = place.map(|place| &place.entry);
        Self {
            ipc: &pool.name,
            limit_bytes: pool.limit(),
            used_bytes: pool.used(),
            prealloc_bytes: pool.prealloc(),
            state: pool.state(),
            device: place.map(|place| place.device.as_str()),
            group: entry.map(|entry| entry.group.0),
            pid: entry.map(|entry| entry.pid),
            owner_alive: place.map(|place| place.alive),
            reserved_bytes: entry.map(|entry| entry.reserved.0),
            needed_bytes: place.map(|place| place.usage().needed.0),
            cached_bytes: place.map(|place| place.usage().cached.0),
            idle_bytes: place.map(|place| place.usage().idle.0),
            demand_bytes: entry.map(|entry| entry.demand.0),
            reclaim_bytes: entry.map(|entry| entry.reclaim.0),
            page_bytes: entry.map(|entry| entry.page_bytes.0),
            weight: entry.map(|entry| entry.weight),
            priority: entry.map(|entry| entry.priority),
            floor_bytes: entry.map(|entry| entry.floor.0),
            ceiling_bytes: entry.filter(|entry| entry.ceiling != UNLIMITED).map(|entry| entry.ceiling.0),
            fair_bytes: place.map(|place| place.fair.0),
            owed_bytes: place.map(|place| place.owed.0),
            standing: place.map(|place| place.standing.word()),
            why: place.and_then(|place| place.why.as_deref()),
            limit_revision: entry.map(|entry| entry.limit_revision),
            applied_revision: entry.map(|entry| entry.applied_revision),
            limit_applied: entry.map(|entry| entry.applied_revision >= entry.limit_revision),
            counters: entry.map(|entry| CountersJson {
                maps: entry.counters.maps,
                unmaps: entry.counters.unmaps,
                waits: entry.counters.waits,
                reclaims: entry.counters.reclaims,
                failures: entry.counters.failures,
            }),
        }
    }
}
