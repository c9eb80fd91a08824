//! tidekv-batch PREPARES STEPS: which blocks the tokens of the next step live in, and the arrays with which an
//! attention kernel finds them.
//!
//! ```text
//!   pool --lend--> lease ring --pop--> block table [rows, stride] --pack--> slot_mapping, seq_lens, context_lens,
//!        <-remove- (FIFO)    <-release-  row = batch slot                   query_start_loc, seq_start_loc
//! ```
//!
//! | module     | it                                                                       |
//! |------------|--------------------------------------------------------------------------|
//! | `config`   | checks what a batch may be and derives the sizes of all arrays            |
//! | `ids`      | sequences, runs of block ids, the set of ids that somebody here holds     |
//! | `ring`     | the free ids, first in, first out                                         |
//! | `rows`     | the block table and the words of each row; sequences lie densely in it    |
//! | `tables`   | [`BlockTables`]: every operation, checked first, then done                |
//! | `metadata` | [`Metadata`]: the arrays of one step, reused by the next                  |
//! | `changes`  | what anything but a step changed, for whoever keeps a replica             |
//!
//! The ids are kernel ids ([`KernelId`](tidekv_core::units::KernelId)): sparse in the slab layout, and what the
//! attention kernel multiplies with its stride. Nothing is allocated after [`BlockTables::new`] by a step.
//!
//! ```
//! use tidekv_batch::{BatchConfig, BlockTables, IdRun, Metadata, Padding, SeqId, Work};
//! use tidekv_core::units::KernelId;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = BatchConfig {
//!     block_tokens: 16,
//!     max_rows: 8,
//!     max_row_tokens: 4096,
//!     max_step_tokens: 2048,
//!     max_ids: 1024,
//! };
//! let mut tables = BlockTables::new(config)?;
//! let mut step = Metadata::new(tables.shape())?;
//! tables.lend(&[IdRun { first: KernelId(0), count: 64 }])?;
//!
//! tables.admit(SeqId(7), 0, &[])?;
//! tables.step(Work::Rows(&[20]), Padding::NONE, &mut step)?; // the prompt: 20 tokens in blocks 0 and 1
//! assert_eq!(step.slot_mapping[19], 19);
//! tables.step(Work::Decode, Padding::NONE, &mut step)?; // one token more
//! assert_eq!((step.seq_lens[0], step.slot_mapping[0]), (21, 20));
//!
//! let mut out = Vec::new();
//! tables.release(SeqId(7), &mut out)?; // its blocks serve the next sequence
//! # Ok(())
//! # }
//! ```

#![deny(unsafe_code)]

#[allow(unsafe_code, reason = "launches, pinned memory and reading back; scripts/tidy names this folder")]
pub mod cuda;

mod changes;
mod config;
mod error;
mod ids;
mod metadata;
mod ring;
mod rows;
mod tables;

pub use changes::{CellRun, Changes, RowWords};
pub use config::{BatchConfig, BatchShape, ConfigError};
pub use error::{BatchError, LeaseError};
pub use ids::{IdRun, SeqId};
pub use metadata::{Metadata, Padding, TableView};
pub use tables::{BlockTables, Counts, Left, Update, Work};
