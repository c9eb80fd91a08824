//! What a parent and its workers say to each other: one JSON object a line, both ways.

use serde::{Deserialize, Serialize};

use crate::lab::PoolSpec;

/// From the parent to a worker. Orders are obeyed one after the other.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case")]
pub enum Order {
    /// Open the pool. The first order, and given once. Answered by [`Word::Opened`].
    Open(PoolSpec),
    /// Hold this many blocks from now on: lease what is missing, as it becomes available, and free what is too
    /// many. Answered by [`Word::Reached`] as soon as a mark is reached, once for each.
    Want {
        /// Blocks to hold.
        blocks: u32,
        /// Numbers of blocks that are worth a word, ascending.
        marks: Vec<u32>,
    },
    /// Try once to lease blocks at a given moment. Answered by [`Word::Grabbed`].
    Grab {
        /// Blocks to lease.
        blocks: u32,
        /// When: microseconds since 1970. In the past: at once.
        at_us: u64,
        /// How long to wait for neighbours to give memory back.
        wait_ms: u64,
    },
    /// Free whatever [`Order::Grab`] got and return its memory. Answered by [`Word::GaveBack`].
    GiveBack,
    /// Lease, free, trim and resize at random until the next order.
    Churn {
        /// Start of the random sequence.
        seed: u64,
        /// The deadline of every lease.
        wait_ms: u64,
    },
    /// Take the ledger's lock and keep it until the next order. Answered by [`Word::Locked`], then [`Word::Unlocked`].
    HoldLedgerLock,
}

/// From a worker to the parent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "word", rename_all = "snake_case")]
pub enum Word {
    /// The pool is open.
    Opened,
    /// Every 50 ms: what the worker holds.
    Report(Report),
    /// A mark of [`Order::Want`] was reached.
    Reached {
        /// The mark.
        mark: u32,
        /// Time since the order.
        us: u64,
    },
    /// The outcome of [`Order::Grab`].
    Grabbed {
        /// Why there was no lease, if there was none.
        refusal: Option<Refusal>,
        /// How long the call took.
        us: u64,
    },
    /// What was grabbed has been returned.
    GaveBack,
    /// The ledger's lock is taken.
    Locked,
    /// The ledger's lock has been released.
    Unlocked,
    /// The worker cannot go on, and ends.
    Failed {
        /// One sentence.
        reason: String,
    },
}

/// An error of a pool, as far as a parent is interested.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// Whether the same call may succeed later.
    pub transient: bool,
    /// The whole error, causes included.
    pub text: String,
}

/// What a worker holds, and what it met so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Memory that its back-end holds.
    pub held_bytes: u64,
    /// Blocks leased.
    pub leased_blocks: u32,
    /// Leases refused because there was no memory.
    pub exhausted: u64,
    /// Requests to give memory back that it followed.
    pub reclaims: u64,
    /// Leases, granted or refused.
    pub leases: u64,
    /// By how much the slowest call outlived its deadline.
    pub worst_overrun_us: u64,
}
