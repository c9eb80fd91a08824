//! Many models from one command: what `kvctl up` starts, watches and leaves behind.
//!
//! ```text
//!   config     FILE.yaml ──> Plan, or what is wrong with it and where
//!   instance   one thread for each: start ──> well? ──> ready ──> ended ──> backoff ──> start ...
//!   lines      what instances write: prefixed on the screen, whole in a file of bounded size; tail reads it
//!   desk       the pools of this machine, for the router
//!   house      the folder by which ps, down, logs and gc find a supervisor, dead or alive
//! ```
//!
//! An instance has a process group of its own and is told to end when the thread that started it is gone, so that it ends with
//! its supervisor whatever that one died of. What an engine starts beside itself carries the supervisor's mark, and is
//! ended by it, in the last resort by `kvctl gc`.

#[cfg(feature = "serve")]
mod backoff;
#[cfg(feature = "serve")]
pub(crate) mod config;
#[cfg(feature = "serve")]
pub(crate) mod desk;
pub(crate) mod house;
#[cfg(feature = "serve")]
pub(crate) mod instance;
#[cfg(feature = "serve")]
mod lines;
#[cfg(feature = "serve")]
mod probe;
pub(crate) mod tail;
