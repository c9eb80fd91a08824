//! From the keywords of `Pool(...)` to an open pool.

use std::sync::Arc;

use tidekv_core::geometry::{Capacity, Geometry as CoreGeometry};
use tidekv_core::units::{Bytes, GroupId};
use tidekv_pool::{Fleet, KvPool, MemorySource, PoolConfig, ReservePolicy, Scope, Share};
use tidekv_shm::{PoolName, RuntimeDir};

use crate::convert;
use crate::device::{Device, DeviceName};
use crate::error::Refused;
use crate::layout::{Geometry, Layout, capacity_of};
use crate::pool::Open;
use crate::region::{RegionState, unmapped_reads_named};

/// The keywords, as they were given.
pub(crate) struct OpenArgs<'a> {
    pub(crate) layout: Layout,
    pub(crate) name: Option<String>,
    pub(crate) device: &'a str,
    pub(crate) pages: Option<u32>,
    pub(crate) capacity: Option<u64>,
    pub(crate) group: u32,
    pub(crate) limit: Option<u64>,
    pub(crate) budget: Option<u64>,
    pub(crate) utilization: Option<f64>,
    pub(crate) floor: u64,
    pub(crate) ceiling: Option<u64>,
    pub(crate) weight: u32,
    pub(crate) priority: i32,
    pub(crate) reserve: Option<(u32, u32)>,
    pub(crate) decay: f64,
    pub(crate) wait: f64,
    pub(crate) null_block: bool,
    pub(crate) unmapped_reads: &'a str,
    pub(crate) runtime_dir: Option<String>,
    pub(crate) region: Option<Arc<RegionState>>,
    pub(crate) fleet: Option<Fleet>,
    pub(crate) stage: Option<u32>,
    pub(crate) env: bool,
}

/// What came of them.
pub(crate) struct Opened {
    pub(crate) open: Open,
    pub(crate) geometry: Geometry,
    pub(crate) device: Option<Device>,
}

/// Where the pages are, and how many of them the reservation has.
struct Source {
    memory: MemorySource,
    device: Option<Device>,
    granularity: Bytes,
    capacity: Capacity,
    chunk: Option<u64>,
}

pub(crate) fn open(args: OpenArgs<'_>) -> Result<Opened, Refused> {
    crate::tools::start_logging();
    if args.region.is_some() && args.fleet.is_some() {
        return Err(Refused::argument("a pool has a region or a fleet, not both"));
    }
    if args.stage.is_some() && args.fleet.is_none() {
        return Err(Refused::argument("a stage is one of a fleet: give `fleet` too"));
    }
    let owned = args.region.as_ref().map(|region| region.own("pool")).transpose()?;
    let source = source(&args)?;
    let has_region = args.region.is_some();
    let name = match &args.name {
        Some(name) => PoolName::new(name)?,
        None => PoolName::default_for("proc"),
    };
    let geometry = args.layout.config(source.capacity, source.granularity, source.chunk);
    let has_chunk = has_region || args.layout.chunk.is_some();
    let mut config = match source.memory {
        MemorySource::Backend(backend) => PoolConfig::new(name, backend, geometry),
        MemorySource::Fleet(group) => PoolConfig::on_fleet(name, group, geometry),
        MemorySource::Reservation(reservation) => PoolConfig {
            memory: MemorySource::Reservation(Arc::clone(&reservation)),
            ..PoolConfig::new(name, Arc::clone(reservation.backend()), geometry)
        },
    };
    if args.env {
        // What was said here is not asked of the environment.
        let said = |variable: &str| match variable {
            "KVCACHED_IPC_NAME" => args.name.is_some(),
            "KVCACHED_RUNTIME_DIR" => args.runtime_dir.is_some(),
            "KVCACHED_PAGE_SIZE_MB" => has_chunk,
            "KVCACHED_HOST_BUDGET" => args.budget.is_some(),
            "KVCACHED_GPU_UTILIZATION" => args.utilization.is_some(),
            "KVCACHED_MIN_RESERVED_PAGES" | "KVCACHED_MAX_RESERVED_PAGES" | "KVCACHED_PAGE_PREALLOC_ENABLED" => {
                args.reserve.is_some()
            }
            _ => false,
        };
        config = config.with_variables(|name| if said(name) { None } else { std::env::var(name).ok() })?;
    }
    if let Some(dir) = &args.runtime_dir {
        config.runtime_dir = RuntimeDir::at(dir);
    }
    config.utilization = args.utilization.or(config.utilization);
    if let Some((min, max)) = args.reserve {
        config.reserve = ReservePolicy::Fixed { min, max };
    }
    config.budget = args.budget.map(Bytes).or(config.budget);
    config.group = GroupId(args.group);
    config.limit = args.limit.map(Bytes);
    config.share = Share {
        floor: Bytes(args.floor),
        ceiling: args.ceiling.map(Bytes),
        weight: args.weight,
        priority: args.priority,
    };
    config.decay = convert::duration("decay", args.decay)?;
    config.wait = convert::duration("wait", args.wait)?;
    config.null_block = args.null_block;
    config.usable_pages = args.pages.filter(|_| has_region);
    config.unmapped_reads = unmapped_reads_named(args.unmapped_reads)?;
    let pool = KvPool::open(config)?;
    let geometry = Geometry { layout: args.layout, geometry: *pool.geometry() };
    Ok(Opened { open: Open { pool, _owned: owned }, geometry, device: source.device })
}

fn source(args: &OpenArgs<'_>) -> Result<Source, Refused> {
    let asked = capacity_of(args.pages, args.capacity)?;
    if let Some(region) = &args.region {
        if args.capacity.is_some()
            || args.pages.is_some_and(|pages| pages > region.reservation.placement().page_count())
        {
            let advice = "leave `capacity` out, and ask for at most the region's pages";
            return Err(Refused::argument(format!("a pool over a region has the region's size: {advice}")));
        }
        if args.layout.chunk.is_some_and(|chunk| chunk != region.chunk) {
            let advice = "make both from the same number";
            return Err(Refused::argument(format!(
                "the layout's chunks differ from the region's {}: {advice}",
                region.chunk
            )));
        }
        return Ok(Source {
            memory: MemorySource::Reservation(Arc::clone(&region.reservation)),
            device: Some(region.device.clone()),
            granularity: region.reservation.backend().capabilities().granularity,
            capacity: Capacity::Pages(region.reservation.placement().page_count()),
            chunk: Some(region.chunk),
        });
    }
    let name = DeviceName::parse(args.device)?;
    if let Some(fleet) = &args.fleet {
        let scope = args.stage.map_or(Scope::AllStages, Scope::Stage);
        let capacity = asked.ok_or_else(|| {
            Refused::argument("a pool on a fleet has no device to ask how large it is: give `pages` or `capacity`")
        })?;
        return Ok(Source {
            memory: MemorySource::Fleet(fleet.group(GroupId(args.group), scope)),
            device: None,
            granularity: name.granularity()?,
            capacity,
            chunk: None,
        });
    }
    let device = name.open()?;
    let capacity = match asked {
        Some(capacity) => capacity,
        None => Capacity::Budget(whole_device(args, &device)?),
    };
    Ok(Source {
        memory: MemorySource::Backend(Arc::clone(&device.backend)),
        granularity: device.backend.capabilities().granularity,
        device: Some(device),
        capacity,
        chunk: None,
    })
}

/// Address space for all of the device, as far as ids of this layout reach.
fn whole_device(args: &OpenArgs<'_>, device: &Device) -> Result<Bytes, Refused> {
    let mut bytes = device.backend.memory()?.total;
    let granularity = device.backend.capabilities().granularity;
    // Kernels index in 31 bits: a large device and a small model meet that bound before the memory's end.
    while bytes.0 > 1 << 30 {
        let config = args.layout.config(Capacity::Budget(bytes), granularity, None);
        if CoreGeometry::new(&config).is_ok() {
            break;
        }
        bytes.0 /= 2;
    }
    Ok(bytes)
}
