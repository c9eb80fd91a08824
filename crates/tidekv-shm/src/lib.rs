//! tidekv-shm SHARES BYTES: the small files through which processes on one machine know of each other, and the arena in
//! which they hand each other blocks of memory.
//!
//! ```text
//!   <dir>/kvcached_vLLM_4711                 pool segment: 24 bytes, as kvcached's own tools read and write them
//!   <dir>/kvcached-ledger-1000-GPU-8f...     ledger: one per device and user; who holds how much of it
//!   <dir>/kvcached-events-1000-GPU-8f...     events: what happened on that device lately, and why
//!   <dir>/kvcached-arena-1000-kv             arena: blocks of 4 KiB to some GiB, passed on as 64-bit handles
//!
//!   names      what these files are called, and where they lie
//!   segment    PoolSegment for the pool that owns one, functions for tools
//!   ledger     Ledger, OwnedEntry, Watch
//!   events     Event, Note, EventReader: a ring that is written under the ledger's lock and read without it
//!   arena      Arena, LocalArena, Handle
//!   exchange   Exchange: blocks of an arena published under a key, borrowed in place
//!   copy       bulk copies of KV blocks, by the fastest method of this machine
//!   baseline   what benchmarks measure the arena against: a shared-memory object for each block
//!   lock       locks that the kernel drops with their holder, always taken with a deadline
//!   ring       messages between two processes through memory that neither can take away
//! ```
//!
//! Ledgers, events and segments are never mapped into memory. A file in a shared folder can be truncated by anybody who
//! may write it, and touching a truncated mapping ends the process; `pread` of the same file is a short read. The few microseconds that
//! it costs are spent only around mapping and unmapping pages, never on the allocation path. The arena is mapped, because
//! reading blocks in place is what it is for; decision 0012 says what follows from that. So is a ring: its file has no name,
//! is passed from hand to hand and sealed against being cut short.
//!
//! Ownership is a file lock, so a process killed at any instruction leaves nothing that a neighbour cannot take back.
//! Every wait has a deadline: a neighbour that is stopped while it holds a lock costs us a typed timeout.
//!
//! This crate is one of the few that may use `unsafe`, and only `lock`, `ring`, `arena`, `exchange`, `copy` and `baseline` do.

pub mod arena;
pub mod baseline;
pub mod copy;
pub mod events;
pub mod exchange;
pub mod ledger;
pub mod ring;
pub mod segment;

mod checksum;
mod clock;
mod lock;
mod names;
mod private_file;
mod process;

pub use clock::now_ms;
pub use events::{Event, EventKind, EventReader, EventsError, Note, Reason};
pub use ledger::{
    AuthorName, BudgetAuthor, BudgetRight, BudgetSetting, Counters, DEFAULT_UTILIZATION, EntrySpec, EntryState,
    Foreign, Ledger, LedgerEntry, LedgerError, LedgerHeader, LedgerView, OwnedEntry, Reaped, UNLIMITED, Watch,
};
pub use names::{DeviceName, FolderError, NameError, PoolName, RuntimeDir};
pub use segment::{PoolSegment, SegmentError, SegmentView};
