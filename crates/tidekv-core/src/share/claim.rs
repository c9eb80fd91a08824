//! One pool as the ledger shows it to the others.

use crate::units::Bytes;

/// What one pool holds, uses and wants, and the terms on which it shares.
///
/// The default is a pool that holds and wants nothing, of weight 1, without floor or ceiling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolClaim {
    /// Reserved in the ledger: mapped, or about to be.
    pub held: Bytes,
    /// The part of `held` that cannot be given back without evicting something.
    pub in_use: Bytes,
    /// The part of `in_use` that its engine only keeps in case. Counts in [`owed_with_cached`](super::owed_with_cached) alone.
    pub cached: Bytes,
    /// What it will want soon. Counts in [`owed_with_cached`](super::owed_with_cached) alone.
    pub wish: Bytes,
    /// What the pool waits for beyond `held`. Zero unless somebody waits: others evict for it.
    pub demand: Bytes,
    /// Set aside for this pool whether it uses it or not.
    pub floor: Bytes,
    /// Never to be passed: the lower of the pool's own ceiling and the operator's limit.
    pub ceiling: Bytes,
    /// Pools of one class share as their weights. Zero counts as one.
    pub weight: u32,
    /// Higher classes are served first.
    pub priority: i32,
    /// The least that this pool can take or give. Zero counts as one byte.
    pub page: Bytes,
}

impl Default for PoolClaim {
    fn default() -> Self {
        Self {
            held: Bytes::ZERO,
            in_use: Bytes::ZERO,
            cached: Bytes::ZERO,
            wish: Bytes::ZERO,
            demand: Bytes::ZERO,
            floor: Bytes::ZERO,
            ceiling: Bytes(u64::MAX),
            weight: 1,
            priority: 0,
            page: Bytes(1),
        }
    }
}

impl PoolClaim {
    /// Memory of an owner that died: it counts until the device has it back, and nobody can give it sooner.
    pub fn returning(held: Bytes) -> Self {
        Self { held, in_use: held, floor: held, ceiling: held, priority: i32::MAX, ..Self::default() }
    }

    /// What this pool would hold if memory were free, in whole pages. Idle memory is not wanted, unless the pool
    /// waits for more: then what it holds does not serve (pages on their way out, say), and it says what it needs
    /// *beyond* it.
    pub fn wants(&self) -> Bytes {
        let wanted = if self.demand == Bytes::ZERO { self.in_use.0 } else { self.held.0.saturating_add(self.demand.0) };
        self.below_ceiling(wanted)
    }

    /// The floor as it can be kept: in whole pages, and no higher than the ceiling.
    pub fn kept_floor(&self) -> Bytes {
        self.below_ceiling(self.floor.0)
    }

    /// Pages that cover `bytes`, or all that fit below the ceiling.
    fn below_ceiling(&self, bytes: u64) -> Bytes {
        Bytes(self.pages_covering(bytes).min(self.whole_pages(self.ceiling.0)))
    }

    /// `bytes` in whole pages, rounded down.
    pub(super) fn whole_pages(&self, bytes: u64) -> u64 {
        bytes - bytes % self.page.0.max(1)
    }

    /// `bytes` in whole pages, rounded up.
    pub(super) fn pages_covering(&self, bytes: u64) -> u64 {
        let page = self.page.0.max(1);
        bytes.div_ceil(page).saturating_mul(page)
    }
}
