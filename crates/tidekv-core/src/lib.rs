//! tidekv-core DECIDES: which page a block lives on, where its bytes are, which pages to map next and which
//! to give back. It does nothing itself: no operating system, no clock, no threads, no GPU, no `unsafe`.
//! `tidekv-mem` acts on what is decided here, so every path of this crate runs under proptest and Miri.
//!
//! ```text
//!   units      a type for every quantity
//!   size       sizes as people write them
//!   geometry   block <-> kernel id <-> byte offset, for the three layouts
//!   pages      the life of a page: Reserved, Mapping, Idle, InUse, Draining, Unmapping
//!   blocks     the block allocator over the page table
//!   share      who may hold how much of a device: fair shares, floors, what is owed
//! ```

#![forbid(unsafe_code)]

pub mod blocks;
pub mod geometry;
pub mod pages;
pub mod share;
pub mod size;
pub mod units;

mod list;
