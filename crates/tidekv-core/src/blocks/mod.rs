//! The block allocator: which block of which page a request gets, and when a page is empty again.
//!
//! ```text
//!                        alloc_mapped / plan_alloc          free
//!                               |                             |
//!   BlockAllocator   leases, plans, set-aside blocks, null block
//!     Generations    one word per block: odd = leased, even = not; a stale lease never matches again
//!     Places         one stack and one watermark per page: which places of the page are free
//!       Buckets      partly used pages by number of free blocks: best fit without a search
//!       PageTable    the life of each page, the limit, the fences
//! ```
//!
//! A block is in one of these hands, and [`BlockAllocator::check_invariants`] counts them:
//!
//! | hand      | its page holds the place | its generation is odd | comes back with                             |
//! |-----------|--------------------------|-----------------------|---------------------------------------------|
//! | free      | no                       | no                    |                                             |
//! | a plan    | yes                      | no                    | [`abort`](BlockAllocator::abort)            |
//! | set aside | yes                      | no                    | [`free_reserved`](BlockAllocator::free_reserved) |
//! | a lease   | yes                      | yes                   | [`free`](BlockAllocator::free)              |
//! | null      | yes                      | no                    | never                                       |
//!
//! So only a lease can be freed; a plan or a set-aside block cannot be lost to a caller who frees a wrong id.
//!
//! Steady serving calls [`alloc_mapped`](BlockAllocator::alloc_mapped) and [`free`](BlockAllocator::free) alone.
//! When those run out of mapped memory, decide, then do:
//!
//! ```
//! use tidekv_core::blocks::{AllocError, BlockAllocator};
//! # fn driver_maps(_: &[tidekv_core::pages::PageClaim]) -> bool { true }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut blocks = BlockAllocator::new(8, 16)?;
//! let mut leases = Vec::new();
//! if blocks.alloc_mapped(20, &mut leases).is_err() {
//!     let plan = blocks.plan_alloc(20)?;
//!     if driver_maps(plan.claims()) {
//!         blocks.commit(plan, &mut leases)?;
//!     } else {
//!         blocks.abort(plan);
//!     }
//! }
//! assert_eq!(leases.len(), 20);
//! assert_eq!(blocks.free_mapped_blocks(), 12);
//! # Ok(())
//! # }
//! ```

mod allocator;
mod buckets;
mod error;
mod generations;
mod places;
mod plan;

pub use allocator::{BlockAllocator, BlockCounts, FreeReport};
pub use error::{AllocError, CommitError, CommitRefusal, FreeError, NeedsPages, NotReserved, ShapeError};
pub use generations::BlockLease;
pub use plan::{AllocPlan, ShrinkPlan};

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
