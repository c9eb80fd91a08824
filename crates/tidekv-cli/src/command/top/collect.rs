//! Everything at one moment, as plain numbers.
//!
//! ```text
//!   Scene (files, locks, handles)  ──Sample::of──>  Sample (numbers)  ──>  state, print, json
//! ```
//!
//! Looking opens and reads each file once and takes no lock, so no pool ever waits for kvtop, not even while kvtop is
//! stopped. A sample holds no handle either: state and drawing are tested with samples that no file ever held.

use tidekv_core::share::{MemoryUse, Standing};
use tidekv_core::units::Bytes;
use tidekv_shm::{Counters, DeviceName};

use crate::change::{PageCounts, PoolKey, Reading};
use crate::command::table::Pressure;
use crate::scene::{self, Device, Pool, Scene, State};
use crate::text::printable;

/// Everything at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// Devices with a ledger, by name.
    pub devices: Vec<DeviceSample>,
    /// Pools, by name.
    pub pools: Vec<PoolSample>,
    /// What could not be read, in sentences.
    pub troubles: Vec<String>,
}

/// A device's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceSample {
    /// Its name.
    pub name: DeviceName,
    /// All memory.
    pub total: Bytes,
    /// What pools hold, and what that is good for.
    pub usage: MemoryUse,
    /// What others than pools use.
    pub non_pool: Bytes,
    /// What nobody has.
    pub device_free: Bytes,
    /// What pools may still take.
    pub free: Bytes,
    /// What all pools together may hold.
    pub budget: Bytes,
}

/// A pool's figures. Numbers of foreign segments below zero are zero here.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolSample {
    /// Which pool.
    pub key: PoolKey,
    /// Its name as it may be shown.
    pub label: String,
    /// Its state in a word.
    pub state: State,
    /// What it may hold.
    pub limit: Bytes,
    /// What it uses in kvcached's sense: needed by requests or only kept.
    pub in_use: Bytes,
    /// What it holds beyond that, with nothing in it.
    pub idle: Bytes,
    /// What only a ledger says.
    pub place: Option<PlaceSample>,
}

/// What a ledger says of a pool.
#[derive(Clone, Debug, PartialEq)]
pub struct PlaceSample {
    /// On which device.
    pub device: DeviceName,
    /// The owner.
    pub pid: u32,
    /// All that it holds.
    pub held: Bytes,
    /// What it wants beyond that and did not get.
    pub demand: Bytes,
    /// The part of what it uses that its engine only keeps in case.
    pub cached: Bytes,
    /// What it should hold.
    pub fair: Bytes,
    /// How it stands against that.
    pub standing: Standing,
    /// In a sentence, where there is something to say.
    pub why: Option<String>,
    /// What it should give back now.
    pub owed: Bytes,
    /// What it is giving back now.
    pub reclaim: Bytes,
    /// What it can always have.
    pub floor: Bytes,
    /// What it never takes more than.
    pub ceiling: Bytes,
    /// Its part of what is shared.
    pub weight: u32,
    /// Higher ones are served first.
    pub priority: i32,
    /// What one page costs.
    pub page: Bytes,
    /// The latest limit, and the latest that was carried out.
    pub revisions: (u64, u64),
    /// How often things happened to it.
    pub counters: Counters,
}

impl Sample {
    /// The numbers of a scene; only the pools of these names, or all.
    pub fn of(scene: &Scene, names: &[String]) -> Self {
        let wanted = |pool: &&Pool| scene.is_wanted(pool, names);
        let trouble = |(device, error): &(DeviceName, _)| {
            printable(&format!("pools on {device} are not shown in full: {error}")).into_owned()
        };
        Self {
            devices: scene.devices.iter().map(device_sample).collect(),
            pools: scene.pools.iter().filter(wanted).map(PoolSample::of).collect(),
            troubles: scene.unreadable.iter().map(trouble).collect(),
        }
    }
}

/// Sums over all pools of the device, those that are not shown included: a bar that left some out would lie.
fn device_sample(device: &Device) -> DeviceSample {
    let Device { name, header, usage } = device;
    let memory = device.memory();
    DeviceSample {
        name: name.clone(),
        total: header.total,
        usage: *usage,
        non_pool: memory.others,
        device_free: memory.free,
        free: device.free_for_pools(memory.free),
        budget: header.budget,
    }
}

impl DeviceSample {
    /// What pools hold.
    pub fn held(&self) -> Bytes {
        self.usage.held()
    }

    /// What bars stand against: the budget, where there is one.
    pub fn whole(&self) -> Bytes {
        if self.budget == Bytes::ZERO { self.total } else { self.budget }
    }
}

impl PoolSample {
    fn of(pool: &Pool) -> Self {
        let [limit, used, prealloc] =
            [pool.limit(), pool.used(), pool.prealloc()].map(|bytes| Bytes(u64::try_from(bytes).unwrap_or(0)));
        let (in_use, idle) = match &pool.place {
            // The segment of a pool on several devices has the figures of only one of them; the entry has its own.
            Some(place) => (place.usage().used(), place.usage().idle),
            None => (used, prealloc),
        };
        Self {
            key: PoolKey::of(pool),
            label: printable(&pool.name).into_owned(),
            state: pool.state(),
            limit,
            in_use,
            idle,
            place: pool.place.as_ref().map(PlaceSample::of),
        }
    }

    /// All that it holds.
    pub fn held(&self) -> Bytes {
        Bytes(self.in_use.0.saturating_add(self.idle.0))
    }

    /// What it may still take.
    pub fn free(&self) -> Bytes {
        self.limit.saturating_sub(self.held())
    }

    /// What its colour says.
    pub(super) fn pressure(&self) -> Pressure {
        let by_limit = Pressure::of_bytes(self.in_use, self.limit);
        self.place.as_ref().map_or(by_limit, |place| by_limit.max(Pressure::of_standing(place.standing)))
    }

    /// What it wants and did not get.
    pub fn demand(&self) -> Bytes {
        self.place.as_ref().map_or(Bytes::ZERO, |place| place.demand)
    }

    /// What it should hold.
    pub fn fair(&self) -> Option<Bytes> {
        self.place.as_ref().map(|place| place.fair)
    }

    /// What is compared with the look before.
    pub fn reading(&self) -> Reading {
        let pages = |place: &PlaceSample| PageCounts { maps: place.counters.maps, unmaps: place.counters.unmaps };
        Reading { used: self.in_use, held: self.held(), pages: self.place.as_ref().map(pages) }
    }
}

impl PlaceSample {
    fn of(place: &scene::Place) -> Self {
        let entry = &place.entry;
        Self {
            device: place.device.clone(),
            pid: entry.pid,
            held: entry.reserved,
            demand: entry.demand,
            cached: place.usage().cached,
            fair: place.fair,
            standing: place.standing,
            why: place.why.clone().filter(|_| place.alive),
            owed: place.owed,
            reclaim: entry.reclaim,
            floor: entry.floor,
            ceiling: entry.ceiling,
            weight: entry.weight,
            priority: entry.priority,
            page: entry.page_bytes,
            revisions: (entry.limit_revision, entry.applied_revision),
            counters: entry.counters,
        }
    }
}
