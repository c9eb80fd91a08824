//! kvbench: every tidekv benchmark, the one result format they share, the comparison of results and their report.
//!
//! ```text
//!   cli ──> vmm, alloc, frag, idle, ...   ──> stats ──> result ──> output ──> table or JSON on stdout, file
//!                                                         │
//!           compare, report <── runs <── files ───────────┘
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
//!   load          schedules, a client that times every chunk, a mock engine (a library)
//!   serve         a server under load
//!   overhead      elastic beside static memory, at every rate      servers       what a benchmark starts and stops
//!   latency_benefit  models whose peaks do not meet                bench_config  the file of kvcached's guide
//!   multi_model   how many models fit                links     the names of scripts that people know
//!   attention, decode  what a GPU's memory lets attention and whole steps do
//!   interference  a model beside a neighbour that maps
//!   gsm8k, accuracy  right answers, and the same ones
//!   router        what a router before an engine adds
//!   hold          a pool to look at                compare   two results, one verdict
//!   generate      completions and man pages        report    a folder of results as one page
//!                                                  statistics  what may be concluded from several runs
//!
//!   lab           private directories and shapes of pools       prefix_cache   stand-in for an engine's
//!   crew          worker processes with a pool each             random         the same in every run
//!   ranks         worker processes with a KV cache each         yaml           scenarios, with line and key
//!   interrupt     Ctrl-C, once and twice
//! ```
//!
//! A benchmark is one module with an `Args` type for clap and one `run`; it measures into
//! [`Samples`](stats::Samples), puts its figures into a [`BenchResult`](result::BenchResult) and hands both
//! to [`Output`](output::Output). It never prints.

#![forbid(unsafe_code)]

pub mod accuracy;
pub mod alloc;
pub mod attention;
pub mod bench_config;
pub mod cli;
pub mod compare;
pub mod crew;
pub mod decode;
pub mod frag;
pub mod generate;
pub mod gsm8k;
pub mod hold;
pub mod host;
pub mod idle;
pub mod interference;
pub mod interrupt;
pub mod lab;
pub mod latency_benefit;
pub mod links;
pub mod list;
pub mod load;
pub mod map_parallel;
pub mod multi_model;
pub mod output;
pub mod overhead;
pub mod prefix_cache;
pub mod prepare_batch;
pub mod progress;
pub mod random;
mod ranks;
pub mod report;
pub mod result;
pub mod router;
pub mod runs;
pub mod serve;
pub mod servers;
pub mod share;
pub mod shm;
pub mod statistics;
pub mod stats;
mod subprocess;
pub mod table;
pub mod tp_ipc;
pub mod vmm;
pub mod yaml;
