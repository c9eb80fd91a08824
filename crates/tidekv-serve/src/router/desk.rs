//! Where the router looks at pools and changes them. It knows neither ledgers nor segments: whoever starts it brings a [`Desk`].
//!
//! Calls may wait for a lock of somebody else, a second at most, and are made on threads that may wait.

use serde::Serialize;
use tidekv_core::units::Bytes;

/// All pools and devices at one moment.
#[derive(Clone, Debug, Default)]
pub struct DeskView {
    /// Living pools.
    pub pools: Vec<PoolSight>,
    /// Devices that pools are on.
    pub devices: Vec<DeviceSight>,
}

/// A pool, as `/api/pools` shows it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PoolSight {
    /// The name of its segment.
    pub name: String,
    /// Of which device.
    pub device: String,
    /// Whose it is; none for a pool of kvcached's own.
    pub pid: Option<u32>,
    /// What its running requests need.
    pub needed_bytes: u64,
    /// What its engine only keeps in case: a neighbour that waits may have it.
    pub cached_bytes: u64,
    /// What it holds with nothing in it. The three are all that it holds.
    pub idle_bytes: u64,
    /// The limit that holds for it; none if nobody set one.
    pub limit_bytes: Option<u64>,
    /// What it could hold at most: its limit, or all that pools may hold together.
    pub capacity_bytes: u64,
    /// Its fair part of what pools may hold together, 0 to 1.
    pub share: f64,
    /// Its weight against the others.
    pub weight: u32,
    /// What is kept for it.
    pub floor_bytes: u64,
    /// What it asked for and did not get.
    pub demand_bytes: u64,
    /// How it stands against its share: `within-share`, `above-share`, `gives-back`, `waits`.
    pub standing: &'static str,
    /// Why, in a sentence, where there is something to say.
    pub why: Option<String>,
    /// The model that it belongs to.
    pub model: Option<String>,
}

/// A device, as `/api/status` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceSight {
    /// Its name.
    pub name: String,
    /// All its memory.
    pub total_bytes: u64,
    /// What is used of it, by pools and by others.
    pub used_bytes: u64,
    /// What others than pools use of it.
    pub others_bytes: u64,
    /// What nobody has.
    pub device_free_bytes: u64,
    /// What of it pools may still take, under their budget.
    pub free_bytes: u64,
    /// What pools hold of it.
    pub pools_bytes: u64,
    /// What pools may hold of it together.
    pub budget_bytes: u64,
}

/// Terms of sharing to change; what is none stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShareTerms {
    /// At least 1.
    pub weight: Option<u32>,
    /// What is kept for the pool.
    pub floor: Option<Bytes>,
}

/// Why a pool was not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeskError {
    /// There is none of this name.
    #[error("there is no pool {name:?}; there are: {known}")]
    NoSuchPool {
        /// As asked for.
        name: String,
        /// Those that there are.
        known: String,
    },
    /// It cannot be so.
    #[error("{0}")]
    Refused(String),
    /// A file or a lock.
    #[error("{0}")]
    Failed(String),
}

/// Looks at pools and changes them.
pub trait Desk: Send + Sync + 'static {
    /// Everything, now.
    ///
    /// # Errors
    /// [`DeskError::Failed`].
    fn look(&self) -> Result<DeskView, DeskError>;

    /// Sets a pool's limit.
    ///
    /// # Errors
    /// Nothing has changed.
    fn set_limit(&self, pool: &str, limit: Bytes) -> Result<(), DeskError>;

    /// Sets how a pool shares.
    ///
    /// # Errors
    /// Nothing has changed.
    fn set_share(&self, pool: &str, terms: ShareTerms) -> Result<(), DeskError>;

    /// Whether a process is a part of an instance: the instance's own, or one that it started.
    fn belongs_to(&self, pid: u32, instance: u32) -> bool;
}
