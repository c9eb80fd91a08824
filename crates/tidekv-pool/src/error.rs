//! What a pool can answer instead of doing what it was asked. Fields for programs, one sentence for people, and
//! [`PoolError::is_transient`] for schedulers: try the same call again later, or not.
//!
//! | error       | transient | what happened                                           | what is left behind         |
//! |-------------|-----------|---------------------------------------------------------|-----------------------------|
//! | Exhausted   | yes       | limit, shared budget or device leave too little now     | nothing; demand is posted   |
//! | NeverFits   | no        | more than the pool can ever give                        | nothing                     |
//! | Free        | no        | the caller freed something else than its own blocks     | nothing was freed           |
//! | NotReserved | no        | fewer blocks are set aside                              | nothing                     |
//! | Map         | no        | the driver refused for another reason than memory       | nothing; the batch is undone|
//! | Unmap       | yes       | the driver would not take memory back                   | pages kept, counted, retried|
//! | Fleet       | sometimes | a rank refused, is late, lost or excluded: it is named  | nothing, or pages in quarantine |
//! | Ledger      | sometimes | a neighbour holds the lock too long, or the file is bad | nothing                     |
//! | Forked      | no        | the pool belongs to the parent process                  | nothing                     |

use std::fmt;

use tidekv_core::blocks::{AllocError, FreeError, NotReserved, ShapeError};
use tidekv_core::geometry::GeometryError;
use tidekv_core::units::Bytes;
use tidekv_mem::{MapError, MemError, UnmapError};
use tidekv_shm::{LedgerError, SegmentError};

use crate::config::ConfigError;
use crate::fleet::{FleetError, RankId};

/// A call to a pool that did not do what it was asked to. The pool is as it was before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// There is too little memory now: a miss for the scheduler, not a fault.
    #[error("{wanted_blocks} blocks wanted, {available_blocks} available: {shortage}")]
    Exhausted {
        /// Blocks asked for.
        wanted_blocks: u32,
        /// Blocks that could have been had without growing past what is short.
        available_blocks: u32,
        /// What is short.
        shortage: Shortage,
    },
    /// More than the pool has blocks, even when nothing is in use.
    #[error("{wanted_blocks} blocks wanted of a pool that has {pool_blocks}: split the request or open a larger pool")]
    NeverFits {
        /// Blocks asked for.
        wanted_blocks: u32,
        /// Blocks that can ever be leased at once.
        pool_blocks: u32,
    },
    /// The caller freed something else than blocks it holds.
    #[error(transparent)]
    Free(#[from] FreeError),
    /// More set-aside blocks wanted than there are.
    #[error(transparent)]
    NotReserved(#[from] NotReserved),
    /// The driver refused to map, for another reason than memory.
    #[error("the pool could not grow")]
    Map(#[source] MapError),
    /// The driver would not take memory back. Those pages stay counted and are tried again.
    #[error("the pool could not give everything back")]
    Unmap(#[source] UnmapError),
    /// A rank of the fleet stood in the way. Nothing is mapped on any rank; what a rank has not undone yet is counted.
    #[error("the fleet could not do it on every rank")]
    Fleet(#[source] FleetError),
    /// The device's ledger could not be used.
    #[error("the ledger of the device could not be used")]
    Ledger(#[source] LedgerError),
    /// The pool's segment could not be made.
    #[error("the segment of the pool could not be made")]
    Segment(#[source] SegmentError),
    /// The pool belongs to the process that opened it.
    #[error("this pool was opened before a fork and belongs to the parent process: open a new one in the child")]
    Forked,
    /// A setting makes no sense.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The sizes make no sense together.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// The geometry has more blocks than ids.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The back-end could not reserve addresses, or the device failed.
    #[error(transparent)]
    Mem(#[from] MemError),
    /// The operating system refused a descriptor or a thread.
    #[error("{call} failed while opening the pool")]
    System {
        /// Which call.
        call: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// What was short in a [`PoolError::Exhausted`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shortage {
    /// The pool's own limit or ceiling: freeing, evicting or a raised limit can help.
    Limit {
        /// Pages held.
        held_pages: u32,
        /// Pages allowed.
        limit_pages: u32,
    },
    /// The budget that the pools of the device share: the missing bytes are posted as demand.
    Budget {
        /// What had to be reserved.
        wanted: Bytes,
        /// What could have been reserved.
        grantable: Bytes,
    },
    /// The device itself, although the ledger granted it: somebody outside the ledger is quicker, or a dead
    /// neighbour's memory is still on its way back.
    Device {
        /// What could not be mapped.
        wanted: Bytes,
    },
    /// The device of one rank of the fleet; its neighbours there were asked to give back.
    Rank {
        /// Which.
        at: RankId,
        /// What could not be mapped, in bytes of this pool.
        wanted: Bytes,
        /// What that worker could have had, in bytes of its own.
        grantable: Bytes,
    },
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Limit { held_pages, limit_pages } => {
                write!(f, "{held_pages} pages are held of at most {limit_pages}; free, evict or raise the limit")
            }
            Self::Budget { wanted, grantable } => {
                write!(f, "{wanted} more needed and {grantable} left for this pool; neighbours were asked to give back")
            }
            Self::Rank { at, wanted, grantable } => {
                write!(
                    f,
                    "{at} has no room for {wanted}, {grantable} are left there; its neighbours were asked to give back"
                )
            }
            Self::Device { wanted } => write!(f, "the device has no {wanted} left; memory may be on its way back"),
        }
    }
}

impl PoolError {
    /// Whether the same call can succeed later without the caller changing it.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Exhausted { .. } | Self::Unmap(_) => true,
            Self::Map(error) => error.is_transient(),
            Self::Fleet(error) => error.is_transient(),
            Self::Ledger(error) => error.is_transient(),
            Self::Mem(error) => error.is_transient(),
            _ => false,
        }
    }

    /// Whether this is a miss: too little memory now.
    pub fn is_exhausted(&self) -> bool {
        matches!(self, Self::Exhausted { .. })
    }

    pub(crate) fn system(call: &'static str) -> impl Fn(std::io::Error) -> Self {
        move |source| Self::System { call, source }
    }
}

impl From<AllocError> for PoolError {
    fn from(error: AllocError) -> Self {
        match error {
            AllocError::Exhausted { wanted_blocks, available_blocks, held_pages, limit_pages } => Self::Exhausted {
                wanted_blocks,
                available_blocks,
                shortage: Shortage::Limit { held_pages, limit_pages },
            },
            AllocError::NeverFits { wanted_blocks, pool_blocks } => Self::NeverFits { wanted_blocks, pool_blocks },
            // `NotFresh`, which only a second null block gives.
            other => unreachable_plan(other),
        }
    }
}

/// A plan that this crate never makes. As a miss it is at least an answer and no panic in somebody's engine.
fn unreachable_plan(error: AllocError) -> PoolError {
    tracing::error!(%error, "a plan failed that cannot fail");
    let shortage = Shortage::Limit { held_pages: 0, limit_pages: 0 };
    PoolError::Exhausted { wanted_blocks: 0, available_blocks: 0, shortage }
}
