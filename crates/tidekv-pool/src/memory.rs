//! Where a pool's pages are: in this process, or on every rank of a fleet. The one seam between the pool and either.
//!
//! | question                   | own memory                       | fleet                                               |
//! |----------------------------|----------------------------------|-----------------------------------------------------|
//! | map                        | one batch of the driver          | two phases over all ranks                           |
//! | unmap                      | the device is known to be done   | each worker waits for its own device first          |
//! | synchronise                | the device                       | nothing here: the orders to unmap say it            |
//! | held without use           | pages that the driver keeps      | pages in quarantine                                 |
//! | owed, and still to be had  | the ledger of the device says    | also what the ranks say of their devices            |
//! | idle and evictable pages   | the ledger of the device is told | the ranks are told as well                          |

use std::sync::Arc;
use std::time::Duration;

use tidekv_core::pages::Fence;
use tidekv_core::units::{Bytes, PageId};
use tidekv_mem::{MapError, MemError, PageUse, Reservation, UnmapError};

use crate::error::PoolError;
use crate::fleet::{FleetError, IdlePages, Kept, OpenGroup, RankId};
use crate::owed::Owed;

#[derive(Debug)]
pub(crate) enum PoolMemory {
    Own(OwnPages),
    Fleet(OpenGroup),
}

/// A reservation whose addresses others may know; its pages are the pool's.
#[derive(Debug)]
pub(crate) struct OwnPages(Arc<Reservation>);

impl OwnPages {
    pub(crate) fn new(reservation: Arc<Reservation>) -> Self {
        Self(reservation)
    }

    pub(crate) fn shared(&self) -> &Arc<Reservation> {
        &self.0
    }
}

impl std::ops::Deref for OwnPages {
    type Target = Reservation;

    fn deref(&self) -> &Reservation {
        &self.0
    }
}

impl Drop for OwnPages {
    /// Tensors may keep the addresses for long; the memory goes with the pool.
    fn drop(&mut self) {
        // Of a reservation that nobody else knows, its own end does the same.
        let stuck = if Arc::strong_count(&self.0) > 1 { self.0.unmap_all() } else { 0 };
        if stuck > 0 {
            tracing::warn!(stuck, "pages that the driver will not take back stay until their addresses are gone");
        }
    }
}

/// Why pages were not mapped. None of them is, except those that are held without use.
#[derive(Debug)]
pub(crate) enum MapFailure {
    Own(MapError),
    Fleet(FleetError),
}

/// Why pages were not unmapped, or not all.
#[derive(Debug)]
pub(crate) enum UnmapFailure {
    Own(UnmapError),
    Fleet(Kept),
}

impl PoolMemory {
    /// Puts memory behind all of these pages, or behind none.
    pub(crate) fn map_pages(&self, pages: &[PageId]) -> Result<(), MapFailure> {
        match self {
            Self::Own(reservation) => reservation.map_pages(pages).map_err(MapFailure::Own),
            Self::Fleet(group) => group.map(pages).map_err(MapFailure::Fleet),
        }
    }

    /// The same for pages that nobody waits for.
    pub(crate) fn map_pages_ahead(&self, pages: &[PageId]) -> Result<(), MapFailure> {
        match self {
            Self::Own(reservation) => reservation.map_pages(pages).map_err(MapFailure::Own),
            Self::Fleet(group) => group.map_ahead(pages).map_err(MapFailure::Fleet),
        }
    }

    /// Gives the memory of these pages back. `fence` says what each of them was freed behind.
    pub(crate) fn unmap_pages(&self, pages: &[PageId], fence: impl Fn(PageId) -> Fence) -> Result<(), UnmapFailure> {
        match self {
            Self::Own(reservation) => reservation.unmap_pages(pages).map_err(UnmapFailure::Own),
            Self::Fleet(group) => group.unmap(pages, fence).map_err(UnmapFailure::Fleet),
        }
    }

    /// Waits for the device, where it is ours.
    pub(crate) fn synchronise(&self) -> Result<(), MemError> {
        match self {
            Self::Own(reservation) => reservation.backend().synchronise(),
            Self::Fleet(_) => Ok(()),
        }
    }

    /// Whether a page whose map failed has memory all the same.
    pub(crate) fn is_stuck(&self, page: PageId) -> bool {
        match self {
            Self::Own(reservation) => reservation.page_use(page) == Some(PageUse::Stuck),
            Self::Fleet(group) => group.is_quarantined(page),
        }
    }

    /// Lets others know which pages the pool could do without, where its own ledger is not theirs.
    pub(crate) fn tell_idle(&self, idle: impl FnOnce() -> IdlePages) {
        if let Self::Fleet(group) = self {
            group.note_idle(idle());
        }
    }

    /// Pages that neighbours are owed beyond what the pool's own ledger says.
    pub(crate) fn owed(&self, spare_pages: impl FnOnce() -> u32) -> Owed {
        match self {
            Self::Own(_) => Owed::default(),
            Self::Fleet(group) => group.owed(spare_pages()),
        }
    }

    /// Pages that could be had, whatever the pool's own ledger says.
    pub(crate) fn grantable_pages(&self) -> u32 {
        match self {
            Self::Own(_) => u32::MAX,
            Self::Fleet(group) => group.grantable_pages(),
        }
    }

    /// Does what is due now and then. Says when to come again, where that is soon.
    pub(crate) fn tend(&self) -> Option<Duration> {
        match self {
            Self::Own(_) => None,
            Self::Fleet(group) => Some(group.tend()),
        }
    }

    pub(crate) fn reservation(&self) -> Option<&Arc<Reservation>> {
        match self {
            Self::Own(pages) => Some(pages.shared()),
            Self::Fleet(_) => None,
        }
    }
}

impl MapFailure {
    /// Where there is too little memory now: what could be had, and on which rank.
    pub(crate) fn as_miss(&self) -> Option<Miss> {
        match self {
            Self::Own(error) => error.is_out_of_memory().then_some(Miss { at: None, grantable: Bytes::ZERO }),
            Self::Fleet(error) => {
                let (at, refusal) = error.as_miss()?;
                Some(Miss { at: Some(at), grantable: refusal.grantable })
            }
        }
    }
}

/// A device that has too little.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Miss {
    pub(crate) at: Option<RankId>,
    pub(crate) grantable: Bytes,
}

impl From<MapFailure> for PoolError {
    fn from(failure: MapFailure) -> Self {
        match failure {
            MapFailure::Own(error) => Self::Map(error),
            MapFailure::Fleet(error) => Self::Fleet(error),
        }
    }
}

impl UnmapFailure {
    /// Which of the batch's pages still hold memory.
    pub(crate) fn kept<'a>(&'a self, batch: &'a [PageId]) -> &'a [PageId] {
        match self {
            Self::Own(UnmapError::Stuck { stuck, .. }) => stuck,
            Self::Own(_) => batch,
            Self::Fleet(kept) => &kept.pages,
        }
    }
}

impl std::fmt::Display for UnmapFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Own(error) => error.fmt(f),
            Self::Fleet(kept) => write!(f, "{} pages are kept: {}", kept.pages.len(), kept.error),
        }
    }
}

impl std::fmt::Display for MapFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Own(error) => error.fmt(f),
            Self::Fleet(error) => error.fmt(f),
        }
    }
}

impl From<UnmapFailure> for PoolError {
    fn from(failure: UnmapFailure) -> Self {
        match failure {
            UnmapFailure::Own(error) => Self::Unmap(error),
            UnmapFailure::Fleet(kept) => Self::Fleet(kept.error),
        }
    }
}
