//! Opening a pool. What was taken when a later step fails goes back by itself: everything here is a value that gives
//! itself back when it is dropped.
//!
//! ```text
//!   geometry -> address space -> segment (its lock makes the name ours) -> ledger entry -> null block -> thread
//! ```

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tidekv_core::blocks::BlockAllocator;
use tidekv_core::geometry::Geometry;
use tidekv_core::units::Bytes;
use tidekv_fork::Birth;
use tidekv_mem::{RegionOptions, Reservation};
use tidekv_shm::{DeviceName, EntrySpec, Ledger, PoolName, PoolSegment, Reason, SegmentError, UNLIMITED, now_ms};

use crate::account::{Account, note_budget};
use crate::config::{ConfigError, PoolConfig};
use crate::error::PoolError;
use crate::grow::{Progress, Purpose};
use crate::inner::Inner;
use crate::keeper::Runner;
use crate::limits::Limits;
use crate::reclaim::Mailbox;
use crate::reserve::Reserve;
use crate::returning::refresh_budget;
use crate::table::TableLock;
use crate::wake::Bell;

/// How long opening waits for the ledger's lock.
const OPEN_PATIENCE: Duration = Duration::from_secs(2);
/// How long the null block may wait for a neighbour's memory.
const NULL_BLOCK_WAIT: Duration = Duration::from_secs(1);
/// The last number that is tried after a name that is taken.
const NAMES: u32 = 99;

pub(crate) fn open(config: PoolConfig) -> Result<(Arc<Inner>, Runner), PoolError> {
    config.check()?;
    let geometry = Geometry::new(&config.geometry)?;
    let options = RegionOptions { unmapped_reads: config.unmapped_reads };
    let reservation = Reservation::new(Arc::clone(&config.backend), *geometry.placement(), options)?;
    let capacity = Bytes(geometry.page_bytes().0 * u64::from(geometry.page_count()));
    let limit = config.limit.unwrap_or(capacity);

    let (name, segment) = take_name(&config, limit)?;
    let account = take_entry(&config, &name, &geometry, limit)?;
    let inner = Arc::new(Inner {
        reservation,
        account,
        segment,
        name,
        group: config.group,
        geometry,
        table: TableLock::new(BlockAllocator::new(geometry.page_count(), geometry.blocks_per_page())?),
        limits: Mutex::new(Limits::new(limit)),
        ceiling: AtomicU64::new(config.share.ceiling.unwrap_or(UNLIMITED).0),
        bell: Bell::new().map_err(PoolError::system("eventfd"))?,
        progress: Progress::default(),
        mailbox: Mailbox::new().map_err(PoolError::system("eventfd"))?,
        completed_step: AtomicU64::new(0),
        awaited_step: AtomicU64::new(u64::MAX),
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
    let reserve = Reserve::new(config.reserve, geometry.page_count(), geometry.page_bytes(), config.decay);
    let runner = Runner::start(Arc::clone(&inner), reserve)?;
    Ok((inner, runner))
}

/// The segment under the name asked for, or under the next numbered one that no living pool has.
fn take_name(config: &PoolConfig, limit: Bytes) -> Result<(PoolName, PoolSegment), PoolError> {
    let mut number = 1;
    loop {
        let name = if number == 1 { config.name.clone() } else { config.name.numbered(number) };
        match PoolSegment::create(&config.runtime_dir, &name.with_group(config.group), limit) {
            Err(SegmentError::InUse { .. }) if number < NAMES => number += 1,
            Err(error) => return Err(PoolError::Segment(error)),
            Ok(segment) => {
                if number > 1 {
                    tracing::warn!(asked = %config.name, %name, "another living pool has this name");
                }
                return Ok((name, segment));
            }
        }
    }
}

fn take_entry(config: &PoolConfig, name: &PoolName, geometry: &Geometry, limit: Bytes) -> Result<Account, PoolError> {
    let device = match &config.device {
        Some(device) => device.clone(),
        None => DeviceName::new(&config.backend.capabilities().id).map_err(ConfigError::Name)?,
    };
    let ledger = Ledger::open(&config.runtime_dir, &device).map_err(PoolError::Ledger)?;
    let spec = EntrySpec {
        floor: config.share.floor,
        ceiling: config.share.ceiling.unwrap_or(UNLIMITED),
        weight: config.share.weight,
        priority: config.share.priority,
        limit,
        ..EntrySpec::new(name.clone(), config.group, geometry.page_bytes())
    };
    let deadline = Instant::now() + OPEN_PATIENCE;
    let entry = ledger.register(deadline, spec).map_err(PoolError::Ledger)?;
    let memory = config.backend.memory()?;
    entry
        .update(deadline, |view, me| match config.budget {
            Some(budget) => {
                let header = &mut view.header;
                let news = header.budget != budget;
                if header.explicit_budget && header.budget != budget {
                    tracing::warn!(was = %header.budget, now = %budget, "another pool gave the device another budget");
                }
                (header.budget, header.explicit_budget, header.total) = (budget, true, memory.total);
                if news {
                    note_budget(view, me, Reason::Given);
                }
            }
            None => {
                if refresh_budget(view, memory, config.utilization, now_ms()) {
                    note_budget(view, me, Reason::OtherUsers);
                }
            }
        })
        .map_err(PoolError::Ledger)?;
    Ok(Account::new(entry, Arc::clone(&config.backend), config.utilization))
}
