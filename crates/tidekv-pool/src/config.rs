//! Everything a pool is told when it is opened: one value, no globals, so two pools fit into one process.
//!
//! | variable                        | field           | unset                                              |
//! |---------------------------------|-----------------|----------------------------------------------------|
//! | `KVCACHED_IPC_NAME`             | `name`          | as given to [`PoolConfig::new`]                    |
//! | `KVCACHED_RUNTIME_DIR`          | `runtime_dir`   | `/dev/shm`                                         |
//! | `KVCACHED_PAGE_SIZE_MB`         | `geometry.chunk`| as given                                           |
//! | `KVCACHED_HOST_BUDGET`          | `budget`        | machine or control group (host back-end alone)     |
//! | `KVCACHED_GPU_UTILIZATION`      | `utilization`   | 0.95                                               |
//! | `KVCACHED_MIN_RESERVED_PAGES`, `KVCACHED_MAX_RESERVED_PAGES` | `reserve` | automatic; one alone completes the other with kvcached's 5 or 10 |
//! | `KVCACHED_PAGE_PREALLOC_ENABLED`| `reserve`       | true; false maps nothing ahead (limits still work) |
//!
//! Sizes are written as everywhere (`20G`, `1.5GiB`), truth as `true`/`false`/`1`/`0` in any case.

use std::sync::Arc;
use std::time::Duration;

use tidekv_core::geometry::{ChunkChoice, GeometryConfig, GeometryError};
use tidekv_core::size::SizeError;
use tidekv_core::units::{Bytes, GroupId};
use tidekv_mem::{Backend, Reservation, UnmappedReads};
use tidekv_shm::{DeviceName, NameError, PoolName, RuntimeDir};

use crate::fleet::FleetGroup;
use crate::reserve::ReservePolicy;

/// How long pages stay idle before they are given back, unless told otherwise.
pub const DEFAULT_DECAY: Duration = Duration::from_secs(2);

/// Most tokens that an engine keeps for prompts that begin alike, unless told otherwise: kvcached's default.
pub const DEFAULT_MAX_CACHED_TOKENS: u64 = 16_000;

/// `KVCACHED_MAX_CACHED_TOKENS`, which engines read: their prefix caches are not the pool's. `None` for no bound (below 0), 0 to keep
/// nothing, the default where it is not set.
///
/// # Errors
/// [`ConfigError::Variable`] where it is not a whole number.
pub fn max_cached_tokens(value: Option<&str>) -> Result<Option<u64>, ConfigError> {
    const NAME: &str = "KVCACHED_MAX_CACHED_TOKENS";
    match value.map(str::trim).filter(|text| !text.is_empty()) {
        None => Ok(Some(DEFAULT_MAX_CACHED_TOKENS)),
        Some(text) => {
            let tokens: i64 = text.parse().map_err(|_| bad(NAME, text, "a number of tokens"))?;
            Ok(u64::try_from(tokens).ok())
        }
    }
}

const KVCACHED_MIN_RESERVED: u32 = 5;
const KVCACHED_MAX_RESERVED: u32 = 10;

/// A pool's part of the device when neighbours want it too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Always kept free for this pool, whether it uses it or not.
    pub floor: Bytes,
    /// Never more than this; `None` for no ceiling.
    pub ceiling: Option<Bytes>,
    /// Part of what is contended, relative to the others of the same priority. At least 1.
    pub weight: u32,
    /// Higher ones are served first.
    pub priority: i32,
}

impl Default for Share {
    fn default() -> Self {
        Self { floor: Bytes::ZERO, ceiling: None, weight: 1, priority: 0 }
    }
}

/// Where a pool's memory comes from.
#[derive(Clone, Debug)]
pub enum MemorySource {
    /// A device of this process.
    Backend(Arc<dyn Backend>),
    /// Pages of a reservation that others know too, such as tensors. It has the placement of the pool's geometry, and its
    /// pages are the pool's alone until the pool is gone.
    Reservation(Arc<Reservation>),
    /// The workers of a fleet, each on its own device. This process needs none.
    Fleet(FleetGroup),
}

/// How to open a pool.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Its name. When a living pool has it already, a number is added.
    pub name: PoolName,
    /// Layers that share block ids: groups above 0 have their own segment and ledger entry.
    pub group: GroupId,
    /// Where memory comes from.
    pub memory: MemorySource,
    /// Whose ledger to use; `None` for the back-end's own.
    pub device: Option<DeviceName>,
    /// Sizes and layout.
    pub geometry: GeometryConfig,
    /// Use the first so many pages alone, of a reservation that others made larger; `None` for all. Ids stay below what
    /// that many pages have.
    pub usable_pages: Option<u32>,
    /// What reads of unmapped addresses do.
    pub unmapped_reads: UnmappedReads,
    /// Folder of segments and ledgers.
    pub runtime_dir: RuntimeDir,
    /// What all pools of the device may hold together; `None` for what others or an operator gave, else `total x utilization` less
    /// what no pool holds. Of two pools that give one the later counts, and an operator's counts above both.
    pub budget: Option<Bytes>,
    /// Part of the device that pools may use where nobody gave a budget, above 0 and at most 1; `None` for what others say,
    /// else [`DEFAULT_UTILIZATION`](crate::DEFAULT_UTILIZATION).
    pub utilization: Option<f64>,
    /// Limit at the start; `None` for the whole reservation.
    pub limit: Option<Bytes>,
    /// Part of the device under contention.
    pub share: Share,
    /// Idle pages to keep.
    pub reserve: ReservePolicy,
    /// Pages idle for this long are given back, except the reserve.
    pub decay: Duration,
    /// How long [`KvPool::alloc`](crate::KvPool::alloc) may wait for neighbours; zero for not at all.
    pub wait: Duration,
    /// Keep block 0 as padding that is never handed out.
    pub null_block: bool,
    /// kvcached's flag: the engine calls from several threads. Every pool may be called so; kept for its users.
    pub async_sched: bool,
}

/// A setting that makes no sense.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A variable that is not what it should be.
    #[error("{variable}={value:?} is not {wanted}")]
    Variable {
        /// Which.
        variable: &'static str,
        /// As set.
        value: String,
        /// What it should be.
        wanted: &'static str,
    },
    /// A variable that should be a size.
    #[error("{variable} is not a size")]
    Size {
        /// Which.
        variable: &'static str,
        /// Why not.
        #[source]
        source: SizeError,
    },
    /// `KVCACHED_PAGE_SIZE_MB`.
    #[error(transparent)]
    PageSize(#[from] GeometryError),
    /// A name that nothing usable is left of.
    #[error(transparent)]
    Name(#[from] NameError),
    /// Not a part of the device.
    #[error("a utilization of {value} is not above 0 and at most 1")]
    Utilization {
        /// As given.
        value: f64,
    },
    /// The reservation was made for other pages than the geometry has.
    #[error(
        "the reservation has {have} pages of {have_bytes} and the geometry {want} of {want_bytes}, or they lie otherwise: \
         make both from the same numbers"
    )]
    Placement {
        /// Pages of the reservation.
        have: u32,
        /// What one of them costs.
        have_bytes: Bytes,
        /// Pages of the geometry.
        want: u32,
        /// What one of them costs.
        want_bytes: Bytes,
    },
    /// Somebody else mapped pages of the reservation.
    #[error("{pages} pages of the reservation are mapped already: unmap them before a pool is opened over it")]
    PagesInUse {
        /// How many.
        pages: u32,
    },
    /// A weight of zero would mean a pool that never gets anything.
    #[error("a weight of 0 is not a share: give at least 1, or a ceiling of 0 to take the pool's memory away")]
    Weight,
    /// The reserve's bounds are the wrong way round.
    #[error("a reserve of at least {min} and at most {max} pages: the first must not exceed the second")]
    Reserve {
        /// Least idle pages.
        min: u32,
        /// Most idle pages.
        max: u32,
    },
}

impl PoolConfig {
    /// The defaults: automatic reserve, whole reservation as limit, weight 1, no floor, no null block.
    pub fn new(name: PoolName, backend: Arc<dyn Backend>, geometry: GeometryConfig) -> Self {
        Self::with_memory(name, GroupId(0), MemorySource::Backend(backend), geometry)
    }

    /// The same for a pool whose pages lie on the workers of a fleet. Each worker has a share of its own on its device;
    /// `budget`, `utilization` and `share` here are about the pool's own ledger, which it has alone.
    pub fn on_fleet(name: PoolName, group: FleetGroup, geometry: GeometryConfig) -> Self {
        Self::with_memory(name, group.id(), MemorySource::Fleet(group), geometry)
    }

    fn with_memory(name: PoolName, group: GroupId, memory: MemorySource, geometry: GeometryConfig) -> Self {
        Self {
            name,
            group,
            memory,
            device: None,
            geometry,
            usable_pages: None,
            unmapped_reads: UnmappedReads::default(),
            runtime_dir: RuntimeDir::from_env(),
            budget: None,
            utilization: None,
            limit: None,
            share: Share::default(),
            reserve: ReservePolicy::Auto,
            decay: DEFAULT_DECAY,
            wait: Duration::ZERO,
            null_block: false,
            async_sched: false,
        }
    }

    /// Lets the environment decide what it speaks about: `KVCACHED_IPC_NAME`, `KVCACHED_RUNTIME_DIR`,
    /// `KVCACHED_PAGE_SIZE_MB`, `KVCACHED_HOST_BUDGET`, `KVCACHED_GPU_UTILIZATION`, `KVCACHED_MIN_RESERVED_PAGES`,
    /// `KVCACHED_MAX_RESERVED_PAGES` and `KVCACHED_PAGE_PREALLOC_ENABLED`.
    ///
    /// # Errors
    /// [`ConfigError`] names the variable that is malformed.
    pub fn with_env(self) -> Result<Self, ConfigError> {
        self.with_variables(|name| std::env::var(name).ok())
    }

    /// [`with_env`](Self::with_env) with another source of variables.
    ///
    /// # Errors
    /// As there.
    pub fn with_variables(mut self, variable: impl Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        let get = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        if let Some(name) = get("KVCACHED_IPC_NAME") {
            self.name = PoolName::new(&name)?;
        }
        if let Some(path) = get("KVCACHED_RUNTIME_DIR") {
            self.runtime_dir = RuntimeDir::at(path);
        }
        if let Some(text) = get("KVCACHED_PAGE_SIZE_MB") {
            self.geometry.chunk = ChunkChoice::from_page_size_mb(Some(&text))?;
        }
        if let Some(text) = get("KVCACHED_HOST_BUDGET").filter(|_| self.has_host_memory()) {
            let bytes = text.parse();
            self.budget = Some(bytes.map_err(|source| ConfigError::Size { variable: "KVCACHED_HOST_BUDGET", source })?);
        }
        if let Some(text) = get("KVCACHED_GPU_UTILIZATION") {
            let parsed = text.trim().parse().ok().filter(|&part| is_part(part));
            let parsed =
                parsed.ok_or_else(|| bad("KVCACHED_GPU_UTILIZATION", &text, "a number above 0 and at most 1"))?;
            self.utilization = Some(parsed);
        }
        self.reserve = self.reserve.with_variables(get)?;
        Ok(self)
    }

    fn has_host_memory(&self) -> bool {
        match &self.memory {
            MemorySource::Backend(backend) => backend.capabilities().name != "cuda",
            MemorySource::Reservation(reservation) => reservation.backend().capabilities().name != "cuda",
            MemorySource::Fleet(_) => false,
        }
    }

    /// Checks what types alone do not.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        if let Some(value) = self.utilization.filter(|&value| !is_part(value)) {
            return Err(ConfigError::Utilization { value });
        }
        if self.share.weight == 0 {
            return Err(ConfigError::Weight);
        }
        match self.reserve {
            ReservePolicy::Fixed { min, max } if min > max => Err(ConfigError::Reserve { min, max }),
            _ => Ok(()),
        }
    }
}

fn is_part(value: f64) -> bool {
    value > 0.0 && value <= 1.0
}

fn bad(variable: &'static str, value: &str, wanted: &'static str) -> ConfigError {
    ConfigError::Variable { variable, value: value.to_owned(), wanted }
}

impl ReservePolicy {
    /// Lets `KVCACHED_MIN_RESERVED_PAGES`, `KVCACHED_MAX_RESERVED_PAGES` and `KVCACHED_PAGE_PREALLOC_ENABLED` decide what
    /// they speak about.
    ///
    /// # Errors
    /// [`ConfigError`] names the variable that is malformed.
    pub fn with_variables(self, variable: impl Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        let get = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        let pages = |variable: &'static str| -> Result<Option<u32>, ConfigError> {
            let Some(text) = get(variable) else { return Ok(None) };
            text.trim().parse().map(Some).map_err(|_| bad(variable, &text, "a number of pages"))
        };
        let min = pages("KVCACHED_MIN_RESERVED_PAGES")?;
        let max = pages("KVCACHED_MAX_RESERVED_PAGES")?;
        let prealloc = match get("KVCACHED_PAGE_PREALLOC_ENABLED") {
            None => true,
            Some(text) => match text.trim().to_ascii_lowercase().as_str() {
                "true" | "1" | "yes" | "on" => true,
                "false" | "0" | "no" | "off" => false,
                _ => return Err(bad("KVCACHED_PAGE_PREALLOC_ENABLED", &text, "true or false")),
            },
        };
        let policy = match (min, max) {
            (None, None) => self,
            (Some(min), None) => ReservePolicy::Fixed { min, max: KVCACHED_MAX_RESERVED.max(min) },
            (None, Some(max)) => ReservePolicy::Fixed { min: KVCACHED_MIN_RESERVED.min(max), max },
            (Some(min), Some(max)) if min > max => return Err(ConfigError::Reserve { min, max }),
            (Some(min), Some(max)) => ReservePolicy::Fixed { min, max },
        };
        Ok(match policy {
            _ if prealloc => policy,
            ReservePolicy::Fixed { max, .. } => ReservePolicy::Fixed { min: 0, max },
            ReservePolicy::Auto => ReservePolicy::Fixed { min: 0, max: 1 },
        })
    }
}

#[cfg(test)]
mod tests {
    use tidekv_core::geometry::{Capacity, KvShape, Layout};
    use tidekv_mem::fake::FakeBackend;

    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<PoolConfig, ConfigError> {
        let geometry = GeometryConfig {
            shape: KvShape::heads(2, 2, 64, 2, 16),
            layout: Layout::Slab,
            granularity: Bytes::kib(4),
            chunk: ChunkChoice::Auto,
            capacity: Capacity::Pages(8),
        };
        let name = PoolName::new("given").unwrap();
        let config = PoolConfig::new(name, Arc::new(FakeBackend::default()), geometry);
        config.with_variables(|name| variables.iter().find(|pair| pair.0 == name).map(|pair| pair.1.to_owned()))
    }

    #[test]
    fn the_environment_decides_what_it_speaks_about() {
        let untouched = read(&[]).unwrap();
        assert_eq!(untouched.name.as_str(), "given");
        assert_eq!((untouched.utilization, untouched.reserve), (None, ReservePolicy::Auto));

        let set = read(&[
            ("KVCACHED_IPC_NAME", "my pool"),
            ("KVCACHED_RUNTIME_DIR", "/tmp/elsewhere"),
            ("KVCACHED_PAGE_SIZE_MB", "4"),
            ("KVCACHED_HOST_BUDGET", "1.5GiB"),
            ("KVCACHED_GPU_UTILIZATION", "0.8"),
        ])
        .unwrap();
        assert_eq!(set.name.as_str(), "my-pool");
        assert_eq!(set.runtime_dir, RuntimeDir::at("/tmp/elsewhere"));
        assert_eq!(set.geometry.chunk, ChunkChoice::Bytes(Bytes::mib(4)));
        assert_eq!((set.budget, set.utilization), (Some(Bytes(3 << 29)), Some(0.8)));
    }

    #[test]
    fn the_reserve_has_kvcacheds_names_and_defaults() {
        let (min, max, prealloc) =
            ("KVCACHED_MIN_RESERVED_PAGES", "KVCACHED_MAX_RESERVED_PAGES", "KVCACHED_PAGE_PREALLOC_ENABLED");
        let reserve = |variables: &[(&str, &str)]| read(variables).unwrap().reserve;
        assert_eq!(reserve(&[(min, "3")]), ReservePolicy::Fixed { min: 3, max: 10 });
        assert_eq!(reserve(&[(max, "2")]), ReservePolicy::Fixed { min: 2, max: 2 });
        assert_eq!(reserve(&[(min, "1"), (max, "2")]), ReservePolicy::Fixed { min: 1, max: 2 });
        assert_eq!(reserve(&[(prealloc, "FALSE")]), ReservePolicy::Fixed { min: 0, max: 1 });
        assert_eq!(reserve(&[(prealloc, "0"), (max, "7")]), ReservePolicy::Fixed { min: 0, max: 7 });
        assert_eq!(reserve(&[(prealloc, "true")]), ReservePolicy::Auto);
    }

    #[test]
    fn malformed_variables_are_named() {
        for (variable, value) in [
            ("KVCACHED_GPU_UTILIZATION", "0"),
            ("KVCACHED_GPU_UTILIZATION", "ninety"),
            ("KVCACHED_HOST_BUDGET", "lots"),
            ("KVCACHED_MIN_RESERVED_PAGES", "-1"),
            ("KVCACHED_PAGE_PREALLOC_ENABLED", "maybe"),
        ] {
            let error = read(&[(variable, value)]).unwrap_err();
            assert!(error.to_string().contains(variable), "{error}");
        }
        assert!(matches!(read(&[("KVCACHED_PAGE_SIZE_MB", "2.5")]), Err(ConfigError::PageSize(_))));
        let crossed = read(&[("KVCACHED_MIN_RESERVED_PAGES", "9"), ("KVCACHED_MAX_RESERVED_PAGES", "3")]);
        assert_eq!(crossed.unwrap_err(), ConfigError::Reserve { min: 9, max: 3 });
    }
}
