//! What a scheduler orders and what a worker answers, as values.

use tidekv_core::units::{Bytes, GroupId, PageId, Step};

/// One order to one worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// Grows with every message of a connection's scheduler; the answer repeats it, so that a late answer is known as such.
    pub sequence: u64,
    /// The operation that this message is part of: a map and the abort that undoes it have the same.
    pub epoch: u64,
    /// Every operation up to here is settled everywhere: nobody will abort it, the worker may forget it.
    pub settled: u64,
    /// Which cache of the worker.
    pub group: GroupId,
    /// Pages of the group that the scheduler could give back now without losing anything, those of this order aside.
    pub spare_pages: u32,
    /// Pages of the group that hold only what the engine keeps in case it is asked for again.
    pub evictable_pages: u32,
    /// What to do.
    pub deed: Deed,
}

/// What every order says beside its deed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heading {
    /// See [`Order`].
    pub epoch: u64,
    /// See [`Order`].
    pub settled: u64,
    /// See [`Order`].
    pub group: GroupId,
    /// See [`Order`].
    pub spare_pages: u32,
    /// See [`Order`].
    pub evictable_pages: u32,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Deed {
    /// First on every connection: who speaks, and whom it takes the worker for.
    Hello {
        /// Pipeline stage.
        stage: u32,
        /// Rank in the stage.
        rank: u32,
    },
    /// Put memory behind these pages, all or none.
    Map {
        /// Which.
        pages: Vec<PageId>,
        /// Nobody waits for them: they refill the reserve. A worker refuses rather than compete with neighbours that
        /// wait, and asks nobody to make room.
        ahead: bool,
    },
    /// Give the memory of these pages back, after a step where one is named, else after all work of the device.
    Unmap {
        /// Which.
        pages: Vec<PageId>,
        /// The step that may still read them.
        after: Option<Step>,
    },
    /// Undo what the order's epoch mapped, if anything. May come twice, or for an epoch never heard of.
    Abort,
    /// Which pages have memory.
    Held,
    /// Nothing: is anybody there?
    Ping,
}

/// What a worker answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Of the order that this answers.
    pub sequence: u64,
    /// Of the order that this answers.
    pub epoch: u64,
    /// Drawn anew by each start of a worker: another one means that its pages are gone.
    pub instance: u64,
    /// How the group stands on the worker's device.
    pub balance: Balance,
    /// How it went.
    pub verdict: Verdict,
}

/// How a worker's group stands against its neighbours on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Balance {
    /// Pages of the group that neighbours on the worker's device are owed: the scheduler should free as many.
    pub owed_pages: u32,
    /// The part of them that is owed even if running requests must make room; the rest is asked for only because the order
    /// said that as much could be evicted.
    pub firm_pages: u32,
    /// Pages of the group that the ledger of the worker's device would grant now; `u32::MAX` where nobody knows.
    pub grantable_pages: u32,
}

impl Default for Balance {
    /// Nobody is owed anything, and nobody knows what could be had.
    fn default() -> Self {
        Self { owed_pages: 0, firm_pages: 0, grantable_pages: u32::MAX }
    }
}

/// How an order went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Done.
    Done,
    /// The pages with memory, sorted.
    Held(Vec<PageId>),
    /// Not done; nothing has changed on this worker unless the refusal says so.
    Refused(Refusal),
}

/// Why a worker did not do it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// For programs.
    pub kind: RefusalKind,
    /// What was asked for, where it is about memory.
    pub wanted: Bytes,
    /// What could have been had.
    pub grantable: Bytes,
    /// For people, at most [`REASON_BYTES`] long.
    pub reason: String,
}

/// The longest reason in UTF-8.
pub const REASON_BYTES: usize = 400;

/// The most pages in one order.
pub const PAGES_MAX: usize = 16_000;

/// Sorts of refusals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalKind {
    /// The ledger of the worker's device has too little left: a miss, try later.
    Exhausted,
    /// The device has too little, although the ledger granted it: try later.
    Device,
    /// The ledger could not be used in time.
    Ledger,
    /// The driver refused for another reason.
    Driver,
    /// A page beyond the reservation, or one that is not in the state the order needs.
    BadPage,
    /// The worker has no such group (yet).
    UnknownGroup,
    /// The step that an unmap must wait for did not end in time.
    StepTimeout,
    /// An unmap left pages behind that the driver will not take back; they are named in the reason and retried.
    Stuck,
    /// The order makes no sense to this worker: wrong rank, or no hello before it.
    Protocol,
    /// Another scheduler is connected to this worker.
    Busy,
}
