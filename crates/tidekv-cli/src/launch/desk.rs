//! The pools of this machine, as the router sees and changes them.

use tidekv_core::share::Standing;
use tidekv_core::units::Bytes;
use tidekv_serve::router::{Desk, DeskError, DeskView, DeviceSight, PoolSight, ShareTerms};
use tidekv_shm::{Ledger, RuntimeDir, UNLIMITED};

use super::config::PoolPlan;
use super::house;
use crate::command::{gc, limit, share};
use crate::request::ShareChange;
use crate::scene::{Place, Pool, Scene};

/// Ledgers and segments of a folder.
#[derive(Debug)]
pub(crate) struct PoolDesk {
    dir: RuntimeDir,
}

impl PoolDesk {
    pub(crate) fn new(dir: RuntimeDir) -> Self {
        Self { dir }
    }

    fn scene(&self) -> Result<Scene, DeskError> {
        Scene::look(&self.dir).map_err(|error| DeskError::Failed(error.to_string()))
    }
}

impl Desk for PoolDesk {
    fn look(&self) -> Result<DeskView, DeskError> {
        let scene = self.scene()?;
        let device = |device: &crate::scene::Device| {
            let (memory, held) = (device.memory(), device.usage.held());
            DeviceSight {
                name: device.name.to_string(),
                total_bytes: device.header.total.0,
                used_bytes: memory.others.0.saturating_add(held.0),
                others_bytes: memory.others.0,
                device_free_bytes: memory.free.0,
                free_bytes: device.free_for_pools(memory.free).0,
                pools_bytes: held.0,
                budget_bytes: device.header.budget.0,
            }
        };
        Ok(DeskView {
            pools: scene.pools.iter().filter_map(sight).collect(),
            devices: scene.devices.iter().map(device).collect(),
        })
    }

    fn set_limit(&self, pool: &str, bytes: Bytes) -> Result<(), DeskError> {
        let scene = self.scene()?;
        let pool = scene.full_name(pool);
        let pools = named(&scene, &pool)?;
        let is_ours = pools.iter().any(|pool| pool.place.is_some());
        let places: Vec<&Place> = pools.iter().filter_map(|pool| pool.live_place()).collect();
        if !is_ours && bytes == Bytes::ZERO {
            return Err(DeskError::Refused(format!("{pool} is kvcached's own: it ignores a limit of 0")));
        }
        limit::write(&scene, &pool, is_ours, &places, bytes)
            .map_err(|error| DeskError::Failed(format!("{error:#}")))?;
        Ok(())
    }

    fn set_share(&self, pool: &str, terms: ShareTerms) -> Result<(), DeskError> {
        let scene = self.scene()?;
        let change = ShareChange { weight: terms.weight, floor: terms.floor, ..ShareChange::default() };
        let pool = scene.full_name(pool);
        let pools = named(&scene, &pool)?;
        let places: Vec<&Place> = pools.iter().filter_map(|pool| pool.live_place()).collect();
        if places.is_empty() {
            let text =
                format!("{pool} is kvcached's own: it has no ledger entry, and shares as first come, first served");
            return Err(DeskError::Refused(text));
        }
        for place in places {
            share::apply(place, change).map_err(|error| DeskError::Refused(format!("{error:#}")))?;
        }
        Ok(())
    }

    fn belongs_to(&self, pid: u32, instance: u32) -> bool {
        house::belongs_to(pid, instance)
    }
}

/// Gives the pools of an instance that has just started their limit and share; what could not be done, in words. It is done before
/// the first request comes, because what that takes could not be taken back.
pub(crate) fn apply_terms(dir: &RuntimeDir, instance: u32, plan: &PoolPlan) -> Vec<String> {
    let scene = match Scene::look(dir) {
        Ok(scene) => scene,
        Err(error) => return vec![format!("its pools cannot be looked at: {error}")],
    };
    let pools = house::pools_of(&scene, Some(instance), plan.name.as_str());
    if pools.is_empty() && plan.has_terms() {
        return vec!["it has no pool: the limit and the share of the configuration are nobody's".to_owned()];
    }
    let mut troubles = Vec::new();
    if pools.iter().all(|pool| pool.name != plan.name.as_str()) {
        let names: Vec<&str> = pools.iter().map(|pool| pool.name.as_str()).collect();
        troubles.extend(names.first().map(|_| format!("its pool is called {}, not {}", names.join(", "), plan.name)));
    }
    for pool in pools {
        let places: Vec<&Place> = pool.live_place().into_iter().collect();
        if let Some(bytes) = plan.limit
            && let Err(error) = limit::write(&scene, &pool.name, !places.is_empty(), &places, bytes)
        {
            troubles.push(format!("its pool {} has no limit: {error:#}", pool.name));
        }
        // A floor may not fit: the rest holds all the same.
        let floor = ShareChange { floor: plan.share.floor, ..ShareChange::default() };
        let share = ShareChange { floor: None, ..plan.share };
        for (change, word) in [(share, "share of its own"), (floor, "floor")] {
            let outcome = match places.as_slice() {
                _ if change.is_empty() => Ok(()),
                [place, ..] => share::apply(place, change),
                [] => Err(anyhow::anyhow!("kvcached's own pools have no ledger entry")),
            };
            if let Err(error) = outcome {
                troubles.push(format!("its pool {} has no {word}: {error:#}", pool.name));
            }
        }
    }
    troubles
}

/// The living pools of this name.
fn named<'a>(scene: &'a Scene, name: &str) -> Result<Vec<&'a Pool>, DeskError> {
    let is_there = |pool: &&Pool| pool.place.is_none() || pool.live_place().is_some();
    let pools: Vec<&Pool> = scene.named(name).into_iter().filter(is_there).collect();
    if !pools.is_empty() {
        return Ok(pools);
    }
    let mut known: Vec<&str> = scene.pools.iter().filter(is_there).map(|pool| pool.name.as_str()).collect();
    known.dedup();
    Err(DeskError::NoSuchPool { name: name.to_owned(), known: known.join(", ") })
}

/// A pool that lives, or that nobody can tell about.
fn sight(pool: &Pool) -> Option<PoolSight> {
    let Some(place) = &pool.place else {
        let word = |value: i64| u64::try_from(value).unwrap_or(0);
        return Some(PoolSight {
            name: pool.name.clone(),
            device: "unknown".to_owned(),
            pid: None,
            needed_bytes: word(pool.used()),
            cached_bytes: 0,
            idle_bytes: word(pool.prealloc()),
            limit_bytes: Some(word(pool.limit())),
            capacity_bytes: word(pool.limit()),
            share: 0.0,
            weight: 1,
            floor_bytes: 0,
            demand_bytes: 0,
            standing: Standing::Within.word(),
            why: None,
            model: None,
        });
    };
    if !place.alive {
        return None;
    }
    let (entry, budget, usage) = (&place.entry, place.header.budget, place.usage());
    let limit = entry.limit.min(entry.ceiling);
    Some(PoolSight {
        name: pool.name.clone(),
        device: place.device.to_string(),
        pid: Some(entry.pid),
        needed_bytes: usage.needed.0,
        cached_bytes: usage.cached.0,
        idle_bytes: usage.idle.0,
        limit_bytes: (limit != UNLIMITED).then_some(limit.0),
        capacity_bytes: limit.min(budget).0,
        share: part(place.fair, budget),
        weight: entry.weight,
        floor_bytes: entry.floor.0,
        demand_bytes: entry.demand.0,
        standing: place.standing.word(),
        why: place.why.clone(),
        model: None,
    })
}

#[expect(clippy::cast_precision_loss, reason = "a part for people")]
fn part(of: Bytes, whole: Bytes) -> f64 {
    if whole == Bytes::ZERO { 0.0 } else { of.0 as f64 / whole.0 as f64 }
}

/// Has the ledgers of this folder find out who died, so that neighbours have the memory at once and not when they next look. With
/// their entries go their segments.
pub(crate) fn notice_deaths(dir: &RuntimeDir) {
    for device in Ledger::list(dir).unwrap_or_default() {
        let noticed = Ledger::open_existing(dir, &device)
            .and_then(|ledger| ledger.map_or(Ok(Vec::new()), |ledger| gc::remove_dead(&ledger, &device)));
        if let Err(error) = noticed {
            tracing::warn!("what died on {device} is noticed later: {error}");
        }
    }
}
