//! Load: what is sent when, sending it, and what came back. A library; `kvbench serve` is its command.
//!
//! ```text
//!   Scenario ── plan(seed) ──> Schedule ── Client::run ──> Run { records } ── metrics ──> Metrics
//!   streams: endpoint, data,   pure: the same              one clock; every chunk timed    pure: vLLM's definitions, and
//!   arrivals, cap              byte for byte                                               the same from the intended time
//! ```
//!
//! ```text
//!   endpoint  where, and in which dialect        dialect   what a request says and an event means (pure)
//!   data/     prompts: made, given, from files   sse       events from bytes (pure, fuzzed)
//!   arrivals  when (pure)                        http      connections
//!   plan      the schedule (pure)                client    the clock, the cap, one task for each request
//!   record    the times of one request           cancel    stopping early
//!   metrics/  figures (pure)                     mock/     a server with known timing
//! ```
//!
//! A request is never skipped, and never sent again without being counted. One that the cap keeps back has its time all the
//! same: latency counts from when it was meant to be sent, which is what its user would see.

pub mod arrivals;
mod cancel;
mod client;
pub mod data;
mod dialect;
mod digest;
pub mod endpoint;
mod http;
pub mod metrics;
pub mod mock;
pub mod plan;
pub mod record;
pub mod sse;

pub use arrivals::{Arrivals, Course, RampStrategy};
pub use cancel::Cancel;
pub(crate) use client::FinestTimer;
pub use client::{Client, Control, Counters, PageError, ProbePlan, Run, RunError};
pub use data::{Dataset, Item, Prompt};
pub use endpoint::{Api, BaseUrl, Endpoint};
pub use metrics::{Metrics, MetricsRequest, metrics};
pub use plan::{Planned, Sampling, Scenario, Schedule, Stream, plan};
pub use record::{Chunk, ChunkKind, Failure, Record, Usage};
