//! kvbench: every tidekv benchmark, the one result format they share, and the comparison of two results.
//!
//! ```text
//!   cli ──> vmm, alloc ──> stats ──> result ──> output ──> table or JSON on stdout, file
//!                                      │
//!           compare <── two files ─────┘
//!
//!   cli       the command line            stats     percentiles from raw samples
//!   list      `2M,16M,128M`               result    the object that every benchmark writes
//!   vmm       map and unmap pages         host      the machine and the build a result came from
//!   alloc     lease and free blocks       table     figures for people
//!   compare   two results, one verdict    progress  a bar on a terminal, else nothing
//!   exit      outcome -> exit code        output    the only module that writes to stdout
//! ```
//!
//! A benchmark is one module with an `Args` type for clap and one `run`; it measures into
//! [`Samples`](stats::Samples), puts its figures into a [`BenchResult`](result::BenchResult) and hands both
//! to [`Output`](output::Output). It never prints.

#![forbid(unsafe_code)]

pub mod alloc;
pub mod cli;
pub mod compare;
pub mod exit;
pub mod host;
pub mod list;
pub mod output;
pub mod progress;
pub mod result;
pub mod stats;
pub mod table;
pub mod vmm;
