//! What can go wrong with blocks. Fields for programs, messages for people, and whether waiting can help.

use super::AllocPlan;
use crate::pages::StaleClaim;
use crate::units::BlockIndex;

/// A pool cannot have this shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{page_count} pages of {blocks_per_page} blocks: a pool has from 1 to 2^31 - 1 blocks, as kernel ids are 32 bits"
)]
pub struct ShapeError {
    /// Pages asked for.
    pub page_count: u32,
    /// Blocks per page asked for.
    pub blocks_per_page: u32,
}

/// The mapped pages do not have enough free blocks. Nothing was leased.
///
/// Not a failure: it says to take the slow path, [`plan_alloc`](super::BlockAllocator::plan_alloc).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("mapped memory is {pages} pages short: plan the allocation and map them, or free blocks")]
pub struct NeedsPages {
    /// Pages that would have to be mapped.
    pub pages: u32,
}

/// An allocation that cannot be planned. Nothing was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// The limit leaves too little right now.
    #[error(
        "{wanted_blocks} blocks wanted, {available_blocks} available with {held_pages} of at most {limit_pages} pages \
         held: free blocks, evict, or raise the limit"
    )]
    Exhausted {
        /// Blocks asked for.
        wanted_blocks: u32,
        /// Blocks that could have been had.
        available_blocks: u32,
        /// Pages held at that moment.
        held_pages: u32,
        /// The limit at that moment.
        limit_pages: u32,
    },
    /// More than the pool has blocks, even when nothing is in use.
    #[error(
        "{wanted_blocks} blocks wanted of a pool that has {pool_blocks}: split the request or reserve a larger pool"
    )]
    NeverFits {
        /// Blocks asked for.
        wanted_blocks: u32,
        /// Blocks that can ever be leased at once.
        pool_blocks: u32,
    },
    /// The null block must be block 0, and block 0 may have been handed out.
    #[error("the null block must be reserved first of all, but page 0 may be in use ({held_pages} pages are held)")]
    NotFresh {
        /// Pages held at that moment.
        held_pages: u32,
    },
}

impl AllocError {
    /// Whether the same request can succeed later.
    pub const fn is_transient(&self) -> bool {
        matches!(self, Self::Exhausted { .. })
    }
}

/// A plan that was not committed. Nothing was leased; the plan comes back.
///
/// Unmap what the driver mapped for the plan, then [`abort`](super::BlockAllocator::abort) it.
#[derive(Debug, thiserror::Error)]
#[error("the plan can no longer be committed: unmap its pages and abort it")]
pub struct CommitError {
    /// The plan, unchanged.
    pub plan: AllocPlan,
    /// What came between.
    #[source]
    pub why: CommitRefusal,
}

/// What came between a plan and its commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommitRefusal {
    /// Someone reported a page of the plan as mapped or refused on their own.
    #[error(transparent)]
    Stale(StaleClaim),
    /// The limit was lowered, and leaves fewer pages or blocks than the plan takes.
    #[error(transparent)]
    Limit(AllocError),
}

/// A free that named something else than blocks in use. Nothing was freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FreeError {
    /// Not a block of this pool.
    #[error("block {block} is not of this pool, whose blocks are 0..{pool_blocks}: nothing was freed")]
    Foreign {
        /// The block named.
        block: BlockIndex,
        /// Blocks of the pool; the last is one less.
        pool_blocks: u32,
    },
    /// Freed before, or never leased.
    #[error("block {block} is not leased (double free?): nothing was freed")]
    NotLeased {
        /// The block named.
        block: BlockIndex,
    },
    /// The block was freed before and is leased to someone else by now.
    #[error(
        "lease {lease_generation} of block {block} has ended, lease {current_generation} is in force: nothing was freed"
    )]
    Stale {
        /// The block named.
        block: BlockIndex,
        /// The lease that was used.
        lease_generation: u32,
        /// The lease in force.
        current_generation: u32,
    },
    /// Named twice in one call.
    #[error("block {block} is named twice, at {first} and {second} of the batch: nothing was freed")]
    Repeated {
        /// The block named.
        block: BlockIndex,
        /// Where it comes first.
        first: usize,
        /// Where it comes again.
        second: usize,
    },
    /// Block 0 pads block tables and is never given back.
    #[error("block 0 is the null block and stays for the life of the pool: nothing was freed")]
    NullBlock,
}

impl FreeError {
    /// The block that spoiled the batch.
    pub const fn block(&self) -> BlockIndex {
        match *self {
            Self::Foreign { block, .. }
            | Self::NotLeased { block }
            | Self::Stale { block, .. }
            | Self::Repeated { block, .. } => block,
            Self::NullBlock => BlockIndex(0),
        }
    }

    /// Never: each of these is a mistake of the caller, and the same call fails again.
    pub const fn is_transient(&self) -> bool {
        false
    }
}

/// More blocks wanted than were set aside. Nothing was leased.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{wanted_blocks} set-aside blocks wanted, {reserved_blocks} are: reserve more first")]
pub struct NotReserved {
    /// Blocks asked for.
    pub wanted_blocks: u32,
    /// Blocks set aside.
    pub reserved_blocks: u32,
}
