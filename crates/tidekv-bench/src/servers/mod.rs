//! Servers that a benchmark starts, measures and stops.
//!
//! ```text
//!   Launch ── start ──> Server { url }  ── drop ──> stopped, and whatever it had started with it
//!     kvserve            │  waits until it answers, or says why it does not: its last lines
//!     command            └─ behind a guard, which ends it when the benchmark is killed
//!     url                   nothing is started and nothing is stopped
//! ```
//!
//! | written                                        | what is started                                                    |
//! |------------------------------------------------|--------------------------------------------------------------------|
//! | nothing                                        | `kvserve` on a port of the kernel's choice, in a folder of its own  |
//! | `--a-cmd "vllm serve m --port {port}"`         | that line by `sh`, with a free port in place of `{port}`            |
//! | `--a-url http://host:8001`                     | nothing                                                            |
//!
//! With the cargo feature `serve` this binary is kvserve too ([`kvserve`]); without it the `kvserve` on `PATH` is taken.

pub mod drive;
pub mod guard;
pub mod kvserve;
pub mod memory;
mod process;
pub mod session;
pub mod sides;
pub mod texts;

pub use process::{Launch, Server, ServerError};
