//! kvbench: every tidekv benchmark, the one result format they share, and the comparison of two results.
//!
//! ```text
//!   cli ──> vmm, alloc, frag, idle, ...   ──> stats ──> result ──> output ──> table or JSON on stdout, file
//!                                                         │
//!           compare <── two files ────────────────────────┘
//!
//!   cli           the command line                 stats     percentiles from raw samples
//!   list          `2M,16M,128M`                    result    the object that every benchmark writes
//!   vmm           map and unmap pages              host      the machine and the build a result came from
//!   alloc         lease and free blocks            table     figures for people
//!   frag          what retained blocks pin         progress  a bar on a terminal, else nothing
//!   idle          what an idle model holds         output    the only module that writes to stdout
//!   share         processes that share a budget    subprocess  workers, spoken to in lines of JSON
//!   map_parallel  processes that map at once
//!   tp_ipc        a scheduler and its workers
//!   shm           blocks in shared memory: allocate, look up, copy
//!   prepare_batch block tables and attention metadata of a step
//!   hold          a pool to look at                compare   two results, one verdict
//!   generate      completions and man pages
//!
//!   lab           private directories and shapes of pools       prefix_cache   stand-in for an engine's
//!   crew          worker processes with a pool each             random         the same in every run
//!   ranks         worker processes with a KV cache each
//! ```
//!
//! A benchmark is one module with an `Args` type for clap and one `run`; it measures into
//! [`Samples`](stats::Samples), puts its figures into a [`BenchResult`](result::BenchResult) and hands both
//! to [`Output`](output::Output). It never prints.

#![forbid(unsafe_code)]

pub mod alloc;
pub mod cli;
pub mod compare;
pub mod crew;
pub mod frag;
pub mod generate;
pub mod hold;
pub mod host;
pub mod idle;
pub mod lab;
pub mod list;
pub mod map_parallel;
pub mod output;
pub mod prefix_cache;
pub mod prepare_batch;
pub mod progress;
pub mod random;
mod ranks;
pub mod result;
pub mod share;
pub mod shm;
pub mod stats;
mod subprocess;
pub mod table;
pub mod tp_ipc;
pub mod vmm;
