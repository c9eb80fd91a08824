//! What can go wrong with a batch. Every refusal comes before anything was changed, and names the sequence or
//! the id that it is about.

use tidekv_core::units::KernelId;

use crate::ids::SeqId;

/// An operation on sequences, or a step, that was refused. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BatchError {
    /// The ring has too few ids.
    #[error("{needed} blocks needed, {free} free: lend more, release or preempt a sequence, and try again")]
    Shortage {
        /// Blocks that the whole operation takes.
        needed: u32,
        /// Blocks in the ring.
        free: u32,
    },
    /// Every row is taken.
    #[error("sequence {seq} finds all {max_rows} rows taken: release a sequence, and try again")]
    BatchFull {
        /// Who wanted in.
        seq: SeqId,
        /// Rows of the batch.
        max_rows: u32,
    },
    /// No row holds this sequence.
    #[error("sequence {seq} is not in the batch: it was never admitted, or has left")]
    UnknownSequence {
        /// Who was named.
        seq: SeqId,
    },
    /// A sequence has one row.
    #[error("sequence {seq} is in the batch already: release it first, or use another number")]
    DuplicateSequence {
        /// Who wanted in again.
        seq: SeqId,
    },
    /// The row cannot hold so many tokens.
    #[error("sequence {seq} would hold {tokens} tokens, a row has room for {max_row_tokens}: end or truncate it")]
    SequenceTooLong {
        /// Whose row.
        seq: SeqId,
        /// Tokens after the operation.
        tokens: u64,
        /// Tokens that fit.
        max_row_tokens: u32,
    },
    /// Prefix sums over the batch are 32 bits for the kernels.
    #[error("the batch would hold {tokens} tokens in all, attention kernels count to 2^31 - 1: release a sequence")]
    TotalTooLong {
        /// Tokens after the operation.
        tokens: u64,
    },
    /// More query tokens than a step may have.
    #[error("a step of {tokens} query tokens, at most {max_step_tokens} are prepared for: compute prompts in chunks")]
    StepTooLarge {
        /// Query tokens of the step.
        tokens: u64,
        /// Query tokens that fit.
        max_step_tokens: u32,
    },
    /// One query length for each row, in the order of the rows.
    #[error("{given} query lengths for a batch of {rows} rows: give one for each row, 0 where it has nothing to do")]
    WrongRowCount {
        /// Lengths given.
        given: usize,
        /// Rows of the batch.
        rows: u32,
    },
    /// Padding beyond what the arrays were made for.
    #[error("padding to {rows} rows and {tokens} tokens, the arrays have {max_rows} and {max_step_tokens}")]
    PaddingTooLarge {
        /// Rows asked for.
        rows: u32,
        /// Tokens asked for.
        tokens: u32,
        /// Rows there are.
        max_rows: u32,
        /// Tokens there are.
        max_step_tokens: u32,
    },
    /// The rows changed since the last update, or there was none.
    #[error("there is no step to pack: the batch changed after its block table was updated; update it first")]
    NothingToPack,
    /// Shared blocks are full blocks of tokens that the sequence holds.
    #[error("sequence {seq} holds {tokens} tokens, {blocks} full blocks of {block_tokens} cannot be shared")]
    SharedTooLong {
        /// Whose prefix.
        seq: SeqId,
        /// Blocks asked for.
        blocks: usize,
        /// Tokens held.
        tokens: u32,
        /// Tokens per block.
        block_tokens: u32,
    },
    /// The block belongs to the ring or to one row alone.
    #[error("block {id} cannot be shared with sequence {seq}: it is free or another row's own; share it there first")]
    NotShared {
        /// Who wanted it.
        seq: SeqId,
        /// The block.
        id: KernelId,
    },
    /// The same block twice in one prefix, or an id that kernels cannot use.
    #[error("block {id} cannot stand in the prefix of sequence {seq}: it stands there already, or exceeds 2^31 - 1")]
    BadPrefix {
        /// Whose prefix.
        seq: SeqId,
        /// The block.
        id: KernelId,
    },
    /// A row is cut to fewer tokens than it holds, and not inside what it shares.
    #[error("sequence {seq} cannot be cut to {tokens} tokens: it holds {held}, and shares the first {shared}")]
    BadCut {
        /// Whose row.
        seq: SeqId,
        /// Tokens that should stay.
        tokens: u32,
        /// Tokens held.
        held: u32,
        /// Tokens in shared blocks.
        shared: u32,
    },
}

impl BatchError {
    /// Whether the same call can succeed later, once somebody else gave something back.
    pub const fn is_transient(&self) -> bool {
        matches!(self, Self::Shortage { .. } | Self::BatchFull { .. })
    }
}

/// Ids that could not be lent or taken back. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// An id has one place.
    #[error("block {id} is here already: free, in a row, or shared; an id is lent once until it was given back")]
    AlreadyLent {
        /// The first such id.
        id: KernelId,
    },
    /// The ring is made for so many.
    #[error("{asked} ids on top of {lent}: at most {max_ids} can be lent; raise max_ids or lend fewer")]
    TooMany {
        /// Ids in the call.
        asked: u64,
        /// Ids lent before.
        lent: u32,
        /// Ids that can be.
        max_ids: u32,
    },
    /// Attention kernels index with an `i32`.
    #[error("{count} ids from {first} on do not fit 31 bits, which attention kernels index with")]
    IdTooLarge {
        /// The first id of the run.
        first: KernelId,
        /// Ids of the run.
        count: u32,
    },
    /// Some of them hold tokens.
    #[error("{in_use} of {asked} ids are in use: release or preempt their sequences, and try again")]
    InUse {
        /// Ids that rows hold.
        in_use: u32,
        /// Ids in the call.
        asked: u64,
    },
    /// Nobody lent it.
    #[error("block {id} is not here: it was never lent, was given back, or is named twice")]
    NotLent {
        /// The first such id.
        id: KernelId,
    },
}

impl LeaseError {
    /// Whether the same call can succeed later, once somebody else gave something back.
    pub const fn is_transient(&self) -> bool {
        matches!(self, Self::InUse { .. })
    }
}
