//! tidekv-mem HOLDS BYTES: address ranges that are reserved once, and the physical memory behind them that comes
//! and goes page by page.
//!
//! ```text
//!        Reservation              safe: page states, all-or-nothing batches, rollback, stuck pages
//!             |
//!          Region                 one address range; puts memory behind a handle's bytes and takes it away
//!        /    |    \
//!    host   cuda   fake           memfd + MAP_FIXED  |  cuMemCreate + cuMemMap  |  plain vectors
//!        \    |    /
//!        CallMeter                counts every call to the system below and can make the n-th one fail
//! ```
//!
//! A back-end is chosen once ([`open`]); after that, all code is the same for the three of them. Nothing in this crate
//! ends the process: every refusal of the operating system or the driver is a [`MemError`].
//!
//! This crate is one of the few that may use `unsafe`.

pub mod cuda;
pub mod fake;
pub mod host;

mod backend;
mod error;
mod heap;
mod meter;
mod raw;
mod reservation;
mod select;

pub use backend::{Backend, Capabilities, MemoryInfo, Region, RegionOptions, UnmappedReads};
pub use error::{MapError, MemError, UnmapError};
pub use heap::{release_freed_heap, return_large_blocks_at_once};
pub use meter::{Call, CallMeter};
pub use raw::RawPages;
pub use reservation::{PageUse, Reservation};
pub use select::{BackendName, device_count, open};

/// The README's example must compile and run.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct ReadmeExample;
