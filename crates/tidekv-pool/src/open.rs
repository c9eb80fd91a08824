//! Opening a pool. What was taken when a later step fails goes back by itself: everything here is a value that gives
//! itself back when it is dropped.
//!
//! ```text
//!   geometry -> address space, or a group of the fleet -> ledger entry -> segment (its lock makes the name ours) -> null block -> thread
//! ```

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidekv_core::blocks::BlockAllocator;
use tidekv_core::geometry::Geometry;
use tidekv_core::units::Bytes;
use tidekv_fork::Birth;
use tidekv_mem::{MemoryInfo, RegionOptions, Reservation};
use tidekv_shm::{DeviceName, EntrySpec, PoolName, PoolSegment, SegmentError, UNLIMITED};

use crate::account::Account;
use crate::config::{ConfigError, MemorySource, PoolConfig};
use crate::entry::Terms;
use crate::error::PoolError;
use crate::grow::{Progress, Purpose};
use crate::inner::Inner;
use crate::keeper::Runner;
use crate::limits::Limits;
use crate::memory::{OwnPages, PoolMemory};
use crate::reclaim::Mailbox;
use crate::reserve::Reserve;
use crate::steps::Steps;
use crate::table::TableLock;
use crate::wake::Bell;

/// How long the null block may wait for a neighbour's memory.
const NULL_BLOCK_WAIT: Duration = Duration::from_secs(1);
/// The last number that is tried after a name that is taken.
const NAMES: u32 = 99;

pub(crate) fn open(config: PoolConfig) -> Result<(Arc<Inner>, Runner), PoolError> {
    config.check()?;
    let geometry = Geometry::new(&config.geometry)?;
    let memory = match &config.memory {
        MemorySource::Backend(backend) => {
            let options = RegionOptions { unmapped_reads: config.unmapped_reads };
            let reservation = Reservation::new(Arc::clone(backend), *geometry.placement(), options)?;
            PoolMemory::Own(OwnPages::new(Arc::new(reservation)))
        }
        MemorySource::Reservation(reservation) => {
            check_fits(reservation, &geometry)?;
            PoolMemory::Own(OwnPages::new(Arc::clone(reservation)))
        }
        MemorySource::Fleet(group) => PoolMemory::Fleet(group.open(geometry.page_count()).map_err(PoolError::Fleet)?),
    };
    let page_count = config.usable_pages.map_or(geometry.page_count(), |pages| pages.min(geometry.page_count()));
    let limit = config.limit.unwrap_or_else(|| capacity(&geometry, page_count));

    let (name, account, segment) = take_name(&config, &geometry, limit)?;
    let inner = Arc::new(Inner {
        memory,
        account,
        segment,
        name,
        group: config.group,
        geometry,
        page_count,
        table: TableLock::new(BlockAllocator::new(page_count, geometry.blocks_per_page())?),
        limits: Mutex::new(Limits::new(limit)),
        segment_limit: Mutex::new(()),
        ceiling: AtomicU64::new(config.share.ceiling.unwrap_or(UNLIMITED).0),
        bell: Bell::new().map_err(PoolError::system("eventfd"))?,
        progress: Progress::default(),
        mailbox: Mailbox::new().map_err(PoolError::system("eventfd"))?,
        steps: Steps::default(),
        evictable_blocks: AtomicU32::new(0),
        trimmed: AtomicBool::new(false),
        stopping: AtomicBool::new(false),
        birth: Birth::here(),
    });
    inner.apply_limit();
    inner.account.maintain().map_err(PoolError::Ledger)?;
    inner.note_headroom();
    if config.null_block {
        inner.grow(1, Purpose::NullBlock, config.wait.max(NULL_BLOCK_WAIT), &mut Vec::new())?;
    }
    let reserve = Reserve::new(config.reserve, page_count, geometry.page_bytes(), config.decay);
    let runner = Runner::start(Arc::clone(&inner), reserve)?;
    Ok((inner, runner))
}

/// Entry and segment under the name asked for, or under the next numbered one that no living pool has.
///
/// The entry comes first: after a kill at any moment it proves that the segment was ours, and nothing else would. So the name
/// is looked at before, and the entry goes back by itself if another pool takes the name meanwhile.
fn take_name(
    config: &PoolConfig,
    geometry: &Geometry,
    limit: Bytes,
) -> Result<(PoolName, Account, PoolSegment), PoolError> {
    let mut number = 1;
    loop {
        let name = if number == 1 { config.name.clone() } else { config.name.numbered(number) };
        let file = name.with_group(config.group);
        let taken = match PoolSegment::check(&config.runtime_dir, &file) {
            Ok(()) => {
                let account = take_entry(config, &name, geometry, limit)?;
                PoolSegment::create(&config.runtime_dir, &file, limit).map(|segment| (account, segment))
            }
            Err(error) => Err(error),
        };
        match taken {
            Err(SegmentError::InUse { .. }) if number < NAMES => number += 1,
            Err(error) => return Err(PoolError::Segment(error)),
            Ok((account, segment)) => {
                if number > 1 {
                    tracing::warn!(asked = %config.name, %name, "another living pool has this name");
                }
                return Ok((name, account, segment));
            }
        }
    }
}

fn take_entry(config: &PoolConfig, name: &PoolName, geometry: &Geometry, limit: Bytes) -> Result<Account, PoolError> {
    let spec = EntrySpec {
        floor: config.share.floor,
        ceiling: config.share.ceiling.unwrap_or(UNLIMITED),
        weight: config.share.weight,
        priority: config.share.priority,
        limit,
        ..EntrySpec::new(name.clone(), config.group, geometry.page_bytes())
    };
    let named = |id: &str| DeviceName::new(id).map_err(ConfigError::Name);
    let capacity = capacity(geometry, geometry.page_count());
    let (device, memory, backend, utilization) = match &config.memory {
        MemorySource::Backend(backend) => {
            let memory = backend.memory()?;
            (named(&backend.capabilities().id)?, memory, Some(Arc::clone(backend)), config.utilization)
        }
        MemorySource::Reservation(reservation) => {
            let backend = reservation.backend();
            (named(&backend.capabilities().id)?, backend.memory()?, Some(Arc::clone(backend)), config.utilization)
        }
        // No device of ours: a ledger of this pool alone, so that limits, counters and tools are as everywhere. All of it is the
        // pool's.
        MemorySource::Fleet(_) => {
            let memory = MemoryInfo { total: capacity, free: capacity };
            (named(&fleet_device(&name.with_group(config.group)))?, memory, None, Some(1.0))
        }
    };
    let device = config.device.clone().unwrap_or(device);
    let (runtime_dir, budget) = (&config.runtime_dir, config.budget);
    let terms = Terms { runtime_dir, device, memory, backend, budget, utilization, has_table: true };
    terms.register(spec).map_err(PoolError::Ledger)
}

/// Whether a pool with this geometry can have a reservation that somebody else made.
fn check_fits(reservation: &Reservation, geometry: &Geometry) -> Result<(), ConfigError> {
    let (have, want) = (reservation.placement(), geometry.placement());
    if have != want {
        return Err(ConfigError::Placement {
            have: have.page_count(),
            have_bytes: have.page_bytes(),
            want: want.page_count(),
            want_bytes: want.page_bytes(),
        });
    }
    match reservation.mapped_pages() + reservation.stuck_pages() {
        0 => Ok(()),
        pages => Err(ConfigError::PagesInUse { pages }),
    }
}

fn capacity(geometry: &Geometry, page_count: u32) -> Bytes {
    Bytes(geometry.page_bytes().0 * u64::from(page_count))
}

/// `fleet-<pool>`. Longer names than a device may have are told apart by a number made of the whole.
fn fleet_device(pool: &PoolName) -> String {
    const LONGEST: usize = 64;
    let name = format!("fleet-{pool}");
    if name.len() <= LONGEST {
        return name;
    }
    let fold = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    let number = format!("-{:08x}", name.bytes().fold(0x811c_9dc5, fold));
    let stem: String = name.chars().take(LONGEST - number.len()).collect();
    stem + &number
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_with_long_names_have_ledgers_of_their_own() {
        let device = |name: &str| fleet_device(&PoolName::new(name).unwrap());
        assert_eq!(device("llama"), "fleet-llama");
        let (one, two) = ("x".repeat(63) + "1", "x".repeat(63) + "2");
        assert_ne!(device(&one), device(&two));
        assert_eq!(device(&one).len(), 64);
    }
}
