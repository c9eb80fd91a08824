//! The engine: one thread that decides, step by step, who is computed, in which blocks, and which token comes out.
//!
//! ```text
//!   api threads                    the engine's thread
//!   ───────────                    ───────────────────
//!   Front::submit ── Command ───>  Worker: waiting ──admit──> running ──step──> tokens, ends
//!   Generation <──── Event ──────            ^───── preempt ─────┘
//!                                     │
//!   stats <── Counters, KvGauge ──  Blocks: pool <-> rows of the batch <-> cache of prefixes
//! ```
//!
//! | file       | it                                                                              |
//! |------------|---------------------------------------------------------------------------------|
//! | `start`    | opens everything an engine needs, or says what is missing                       |
//! | `front`    | what other threads see: checks requests, hands them over, counts                |
//! | `worker`   | the loop: commands, memory that is asked back, one step, again                  |
//! | `sleeping` | memory and weights given back, and taken again                                  |
//! | `step`     | one step: places, arithmetic, the next tokens                                   |
//! | `blocks`   | where every block is, and what happens when memory is short                     |
//! | `room`, `schedule`, `prefix`, `sampling`, `giving_way` | pure decisions                      |
//! | `sequence` | one request                                                                     |
//!
//! **When memory is short.** A row that cannot have its next block first gets cached ones that nobody reads; then the
//! youngest request gives its blocks up and goes back to the queue, to be computed again later; the oldest one is
//! never stopped by a younger one, so something always ends. The same order answers the pool when a neighbour or a lowered limit wants
//! memory back. Where several engines wait for each other, the first to lose patience gives way (`giving_way`). On the
//! processor results do not depend on who else is in a step ([`compute`](crate::compute)), so none of it shows in the text; on a
//! GPU it may where two tokens are all but equally likely.
//!
//! **What goes wrong** stays where it is: a step that fails, or panics, fails the requests that were in it, with a
//! reason. A device that is lost ([`ComputeError::is_device_lost`](crate::compute::ComputeError::is_device_lost)) fails everybody: the engine
//! says so from then on, and computes nothing. Should the thread itself end, every request hears [`EngineGone`](crate::handle::GenerateError::EngineGone).

mod blocks;
mod front;
mod giving_way;
mod prefix;
mod room;
mod sampling;
mod schedule;
mod sequence;
mod sleeping;
mod start;
mod step;
#[cfg(test)]
mod tests;
mod worker;

pub use start::{StartError, start};
