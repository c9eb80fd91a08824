//! What a fleet can answer instead of doing what it was asked. Whatever it is, no page is half mapped: the pages are as
//! they were, or they are quarantined and counted.
//!
//! | error, fault        | transient | what happened                                     | what helps                          |
//! |---------------------|-----------|---------------------------------------------------|-------------------------------------|
//! | Refused, a miss     | yes       | too little memory on that rank's device           | later; demand is posted there       |
//! | Refused, otherwise  | no        | the worker could not or would not                 | the reason says                     |
//! | TimedOut, Late      | yes       | no answer in time, or none since                  | the worker answers again            |
//! | Lost, Rejoining     | yes       | its connection broke; it is looked for, remapped  | it comes back within the patience   |
//! | Excluded            | no        | it did not, or somebody excluded it               | `Fleet::readmit`                    |
//! | PageOutOfRange, ... | no        | the order makes no sense; nothing was sent        | the caller                          |

use std::fmt;
use std::time::Duration;

use tidekv_core::units::{GroupId, PageId};
use tidekv_ipc::LaneError;
use tidekv_ipc::broadcast::UnknownStrategy;
use tidekv_ipc::message::{Refusal, RefusalKind};

/// One worker: a rank of a pipeline stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RankId {
    /// Pipeline stage.
    pub stage: u32,
    /// Tensor-parallel rank inside it.
    pub rank: u32,
}

impl fmt::Display for RankId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of stage {}", self.rank, self.stage)
    }
}

/// An operation that a fleet did not carry out, on any rank.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FleetError {
    /// One rank stood in the way. Where several did, the gravest counts, then the first.
    #[error("{at} {fault}")]
    Rank {
        /// Which.
        at: RankId,
        /// What was wrong with it.
        fault: RankFault,
    },
    /// A page id outside the pool. Nothing was sent.
    #[error("page {page} is outside the pool: valid page ids are 0..={last}")]
    PageOutOfRange {
        /// The id.
        page: PageId,
        /// The largest valid one.
        last: PageId,
    },
    /// A page that is not in the state that the operation needs, or that the batch names twice. Nothing was sent.
    #[error("page {page} is {state}: it cannot be {wanted}")]
    PageState {
        /// The id.
        page: PageId,
        /// What it is.
        state: PageMark,
        /// What was to be done with it.
        wanted: &'static str,
    },
    /// The fleet has no such stage.
    #[error("stage {stage} does not exist: the fleet has {stages}")]
    NoSuchStage {
        /// As asked for.
        stage: u32,
        /// How many there are.
        stages: usize,
    },
    /// The fleet has no such rank.
    #[error("there is no {at} in this fleet")]
    NoSuchRank {
        /// As asked for.
        at: RankId,
    },
    /// Another pool of this process uses the group, or left pages in it that some rank has not given back yet.
    #[error("group {group} of the fleet is in use: close its pool first, or give this one another group")]
    GroupInUse {
        /// Which.
        group: GroupId,
    },
    /// A pool that was not opened, or is closed.
    #[error("group {group} of the fleet is not open")]
    GroupNotOpen {
        /// Which.
        group: GroupId,
    },
    /// No strategy of this name.
    #[error(transparent)]
    Strategy(#[from] UnknownStrategy),
    /// A fleet without ranks maps nothing anywhere.
    #[error("a fleet needs at least one rank in every stage, {stages:?} has none somewhere")]
    NoRanks {
        /// Ranks for each stage, as given.
        stages: Vec<u32>,
    },
    /// The connections belong to the process that made them.
    #[error("this fleet was connected before a fork and belongs to the parent process: connect a new one in the child")]
    Forked,
}

/// What is wrong with one rank.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RankFault {
    /// It answered that it could not, or would not.
    #[error("refused: {}", .0.reason)]
    Refused(Refusal),
    /// It did not answer this order in time. Its part is undone as soon as it answers again.
    #[error("did not answer within {waited:?} (KVCACHED_IPC_TIMEOUT)")]
    TimedOut {
        /// How long we waited.
        waited: Duration,
    },
    /// It has not answered an earlier order yet: nothing new is sent to anybody until it does.
    #[error("has not answered for {silent:?}")]
    Late {
        /// Since when.
        silent: Duration,
    },
    /// Its connection is gone; the pool's background thread looks for it.
    #[error("is lost: {cause}")]
    Lost {
        /// How the connection ended, or why there is none.
        cause: LaneError,
    },
    /// It came back without its pages, which are being mapped again.
    #[error("is rejoining the fleet")]
    Rejoining,
    /// It no longer counts: the fleet maps nothing until it is readmitted.
    #[error("is excluded: {reason}")]
    Excluded {
        /// Why.
        reason: String,
    },
}

/// What a page of a group is, over all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PageMark {
    /// No rank of the group has memory for it.
    #[default]
    Free,
    /// Every rank has.
    Mapped,
    /// An operation is under way, or some rank has not said that it is over.
    Open,
}

impl fmt::Display for PageMark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Free => "not mapped",
            Self::Mapped => "mapped",
            Self::Open => "in the middle of another operation",
        })
    }
}

impl FleetError {
    /// Whether the same call can succeed later without the caller changing it.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Rank { fault, .. } if fault.is_transient())
    }

    /// The rank's refusal, where it has too little memory now: a miss and no fault.
    pub fn as_miss(&self) -> Option<(RankId, &Refusal)> {
        match self {
            Self::Rank { at, fault: RankFault::Refused(refusal) } if is_miss(refusal.kind) => Some((*at, refusal)),
            _ => None,
        }
    }
}

impl RankFault {
    /// Whether time alone can help.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Refused(refusal) => {
                is_miss(refusal.kind)
                    || matches!(refusal.kind, RefusalKind::Ledger | RefusalKind::StepTimeout | RefusalKind::Stuck)
            }
            Self::TimedOut { .. } | Self::Late { .. } | Self::Lost { .. } | Self::Rejoining => true,
            Self::Excluded { .. } => false,
        }
    }
}

fn is_miss(kind: RefusalKind) -> bool {
    matches!(kind, RefusalKind::Exhausted | RefusalKind::Device)
}
