//! tidekv-ipc TALKS: one scheduler orders many workers, one on each tensor-parallel rank.
//!
//! ```text
//!   scheduler                                                    worker of rank r
//!   ---------                                                    ----------------
//!   Broadcaster --- Strategy --- Lane r  === socket, ring ===  WorkerServer --- Handler
//!                   seq            frames, sequence numbers      one connection, one order at a time,
//!                   thread         what is late is dropped       in the order received
//!                   async
//!                   ring           <root>/kvcached-tp-<pool>-<hex>/[pp<stage>/]w<rank>.sock
//!
//!   message     orders and answers as values              frame      the same as bytes: docs/formats/control.md
//!   address     where the sockets lie, and who may be there
//!   server      the worker's side                         broadcast  the scheduler's side, one file per strategy
//! ```
//!
//! What this protects: a scheduler that waits for N workers ends every wait at its deadline, whatever a worker does
//! (killed, stopped, answers rubbish, answers late), and a worker knows at once when its scheduler is gone. Whoever is
//! on the other side has our uid, or is not spoken to.

#![forbid(unsafe_code)]

pub mod address;
pub mod broadcast;
pub mod frame;
pub mod message;
pub mod server;

mod error;
mod link;
mod peer;
mod timeout;

pub use address::SocketDir;
pub use error::{IpcError, LaneError, NotOurs};
pub use frame::FrameError;
pub use timeout::ipc_timeout_from_env;
