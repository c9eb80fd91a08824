//! What can happen, why, and how it is told.
//!
//! ```text
//!   kind            told by             bytes                     reasons
//!   joined          its owner           its floor                 -
//!   left            its owner           what it held              -
//!   died            who finds it dead   what it held              -
//!   returned        who strikes it out  what is back              -
//!   granted         its owner           what it may map           need, ahead
//!   undone          its owner           a grant taken back        device
//!   asked           its owner           what it waits for         need, ahead
//!   refused         its owner           what was not given        limit ceiling held floors waiters device
//!                                                                 driver lock-timeout never-fits
//!   evict-asked     its owner           what the engine must free neighbours, over-budget, limit
//!   reclaimed       its owner           what it gave back         neighbours, over-budget
//!   shrunk          its owner           what it gave back         limit
//!   trim-asked      who asks            what was idle             operator
//!   trimmed         its owner           what it gave back         operator, engine
//!   decayed         its owner           what it gave back         idle
//!   limit-set       who sets it         the limit                 operator, engine, kvcached
//!   limit-applied   its owner           the limit                 -
//!   share-set       who sets it         the floor                 operator
//!   budget          who changes it      what others use           given, operator, other-users
//! ```
//!
//! An owner tells its own story; what is changed about a pool by somebody else (an operator, a neighbour that finds it
//! dead) is told by whoever changes it, and the ledger sees to that by itself.

use tidekv_core::units::{Bytes, GroupId};

macro_rules! words {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $number:literal $word:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum $name { $($(#[$doc])* $variant = $number,)* }

        impl $name {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The word for people and programs: it does not change.
            pub const fn word(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }

            /// The number in the file.
            pub(super) const fn number(self) -> u16 {
                self as u16
            }

            pub(super) const fn from_number(number: u16) -> Option<Self> {
                match number { $($number => Some(Self::$variant),)* _ => None }
            }
        }
    };
}

words! {
    /// What happened.
    EventKind {
        /// A pool took its place.
        Joined = 1 "joined",
        /// A pool ended in order.
        Left = 2 "left",
        /// A pool's owner is gone without a word; its bytes stay counted.
        Died = 3 "died",
        /// The device has a dead pool's bytes back.
        Returned = 4 "returned",
        /// A pool may map more.
        Granted = 5 "granted",
        /// A grant was taken back, because the device did not have the memory.
        Undone = 6 "undone",
        /// A pool posted a demand, or a larger one: neighbours that hold more than their share are to give.
        Asked = 7 "asked",
        /// An allocation was refused.
        Refused = 8 "refused",
        /// A pool asked its engine to free memory.
        EvictAsked = 9 "evict-asked",
        /// A pool gave back memory that others are owed.
        Reclaimed = 10 "reclaimed",
        /// A pool gave back memory above its limit.
        Shrunk = 11 "shrunk",
        /// An operator asked a pool to give back what is idle.
        TrimAsked = 12 "trim-asked",
        /// A pool gave back what was idle because it was asked to.
        Trimmed = 13 "trimmed",
        /// A pool gave back what had been idle for long.
        Decayed = 14 "decayed",
        /// A pool has a new limit.
        LimitSet = 15 "limit-set",
        /// A pool holds no more than its limit allows.
        LimitApplied = 16 "limit-applied",
        /// A pool shares on new terms.
        ShareSet = 17 "share-set",
        /// What all pools of the device together may hold has changed.
        Budget = 18 "budget",
    }
}

words! {
    /// Why it happened.
    Reason {
        /// The kind says it all.
        None = 0 "none",
        /// An allocation needed it.
        Need = 1 "need",
        /// Mapped or asked for ahead of need.
        Ahead = 2 "ahead",
        /// The pool's limit.
        Limit = 3 "limit",
        /// The pool's ceiling.
        Ceiling = 4 "ceiling",
        /// Others hold the rest of the budget.
        Held = 5 "held",
        /// The rest of the budget is set aside as others' floors.
        Floors = 6 "floors",
        /// What is free is for neighbours that wait and are below their share.
        Waiters = 7 "waiters",
        /// The device had less memory than the ledger thought.
        Device = 8 "device",
        /// The driver refused for another reason than memory.
        Driver = 9 "driver",
        /// The ledger was locked all the time.
        LockTimeout = 10 "lock-timeout",
        /// More than the pool can ever hold.
        NeverFits = 11 "never-fits",
        /// Neighbours are owed it.
        Neighbours = 12 "neighbours",
        /// More is held than the budget allows, though nobody waits.
        OverBudget = 13 "over-budget",
        /// An operator, through our tools or the ledger.
        Operator = 14 "operator",
        /// The engine that uses the pool.
        Engine = 15 "engine",
        /// A word that kvcached's tools wrote into the segment.
        Kvcached = 16 "kvcached",
        /// It was idle for long.
        Idle = 17 "idle",
        /// Somebody gave it.
        Given = 18 "given",
        /// What others than pools use of the device has changed.
        OtherUsers = 19 "other-users",
    }
}

impl EventKind {
    /// Whether memory moved: several of these in a row add up. Of the others the last one holds.
    pub(super) const fn adds_up(self) -> bool {
        use EventKind::{Decayed, Granted, Reclaimed, Returned, Shrunk, Trimmed, Undone};
        matches!(self, Granted | Undone | Reclaimed | Shrunk | Trimmed | Decayed | Returned)
    }
}

/// One pool, as events name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolRef {
    /// Its name without its group, at most 64 characters of it.
    pub name: String,
    /// Its group.
    pub group: GroupId,
}

/// Something that happened, with all that explains it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Counts the events of a file from 1.
    pub sequence: u64,
    /// When it happened, as [`now_ms`](crate::now_ms); the last time, where it happened `count` times.
    pub at_ms: u64,
    /// The same in milliseconds since 1970.
    pub wall_ms: u64,
    /// What happened.
    pub kind: EventKind,
    /// Why.
    pub reason: Reason,
    /// How often it happened since the last event of this sort, which is this often told as one.
    pub count: u32,
    /// To whom; nobody where it concerns the device.
    pub pool: Option<PoolRef>,
    /// Its owner's process.
    pub pid: u32,
    /// Its place in the ledger.
    pub slot: u32,
    /// How much; of what, the kind says.
    pub bytes: Bytes,
    /// What the pool holds now; all pools together, where it concerns the device.
    pub held: Bytes,
    /// What it waits for now.
    pub demand: Bytes,
    /// Its fair share now.
    pub share: Bytes,
    /// What all pools may hold.
    pub budget: Bytes,
    /// What this pool may hold at most: the lower of its limit and its ceiling.
    pub limit: Bytes,
    /// What could have been given, where something was asked or refused; the budget before, where that changed.
    pub free: Bytes,
    /// Its weight.
    pub weight: u32,
    /// Its priority.
    pub priority: i32,
    /// The neighbour for whom it was done: the one that waits for most. Where a pool's settings changed the budget, that pool.
    pub peer: Option<PoolRef>,
}

/// What a pool says of itself; the ledger adds the rest when it writes the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Note {
    /// What happened.
    pub kind: EventKind,
    /// Why.
    pub reason: Reason,
    /// How much.
    pub bytes: Bytes,
    /// What could have been given; the budget before.
    pub free: Bytes,
    /// The slot of the neighbour for whom it was done.
    pub peer: Option<u32>,
}

impl Note {
    /// Something about so many bytes.
    pub fn new(kind: EventKind, reason: Reason, bytes: Bytes) -> Self {
        Self { kind, reason, bytes, free: Bytes::ZERO, peer: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_numbers_are_one_to_one() {
        for (at, kind) in (1..).zip(EventKind::ALL) {
            assert_eq!((kind.number(), EventKind::from_number(at)), (at, Some(*kind)));
            assert!(kind.word().bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-'));
        }
        for (at, reason) in (0..).zip(Reason::ALL) {
            assert_eq!((reason.number(), Reason::from_number(at)), (at, Some(*reason)));
        }
        assert_eq!(
            (EventKind::from_number(0), EventKind::from_number(19), Reason::from_number(20)),
            (None, None, None)
        );
    }
}
