//! Every refusal of the crates below as one of the exceptions of `tidekv.errors`, with its fields.
//!
//! ```text
//!   PoolError, MemError, FleetError, ...  -->  Refused { class, message, fields }  -->  PyErr, once the GIL is held
//! ```
//!
//! A [`Refused`] is plain data, so it can be made where the interpreter is not held.

use std::error::Error;
use std::path::Path;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tidekv_batch::{BatchError, ConfigError as BatchConfigError, LeaseError};
use tidekv_core::blocks::{FreeError, NotReserved, ShapeError};
use tidekv_core::geometry::GeometryError;
use tidekv_core::size::SizeError;
use tidekv_ipc::IpcError;
use tidekv_mem::{MapError, MemError, UnmapError};
use tidekv_pool::{ConfigError, FleetError, PoolError, RankFault, RankId, Shortage};
use tidekv_shm::arena::{AllocError, ArenaError, HandleError};
use tidekv_shm::{LedgerError, NameError, SegmentError};

/// An exception that is not raised yet.
#[derive(Debug)]
pub(crate) struct Refused {
    class: &'static str,
    message: String,
    fields: Vec<(&'static str, Field)>,
}

/// What a field can be.
#[derive(Debug)]
pub(crate) enum Field {
    Number(u64),
    Text(String),
    Truth(bool),
}

impl Refused {
    pub(crate) fn new(class: &'static str, message: impl Into<String>) -> Self {
        Self { class, message: message.into(), fields: Vec::new() }
    }

    /// An argument that makes no sense.
    pub(crate) fn argument(message: impl Into<String>) -> Self {
        Self::new("BadArgument", message)
    }

    pub(crate) fn closed(what: &str) -> Self {
        Self::new("Closed", format!("this {what} was closed: make a new one"))
    }

    pub(crate) fn forked(what: &str) -> Self {
        let advice = "belongs to the parent process: make a new one in the child, or start children with `spawn`";
        Self::new("Forked", format!("this {what} was made before a fork and {advice}"))
    }

    pub(crate) fn number(mut self, name: &'static str, value: impl Into<u64>) -> Self {
        self.fields.push((name, Field::Number(value.into())));
        self
    }

    pub(crate) fn text(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.fields.push((name, Field::Text(value.into())));
        self
    }

    fn truth(mut self, name: &'static str, value: bool) -> Self {
        self.fields.push((name, Field::Truth(value)));
        self
    }

    fn path(self, path: Option<&Path>) -> Self {
        match path {
            Some(path) => self.text("path", path.display().to_string()),
            None => self,
        }
    }

    /// For somebody who did not choose what was refused, but knows which block it was about.
    pub(crate) fn about_block(self, block: u32) -> Self {
        self.number("block", block)
    }

    fn raise(self, py: Python<'_>) -> PyResult<PyErr> {
        let class = py.import("tidekv.errors")?.getattr(self.class)?;
        let fields = PyDict::new(py);
        for (name, field) in self.fields {
            match field {
                Field::Number(number) => fields.set_item(name, number)?,
                Field::Text(text) => fields.set_item(name, text)?,
                Field::Truth(truth) => fields.set_item(name, truth)?,
            }
        }
        Ok(PyErr::from_value(class.call((self.message,), Some(&fields))?))
    }
}

impl From<Refused> for PyErr {
    fn from(refused: Refused) -> Self {
        // Where even the exception cannot be made, why not is what there is to say.
        Python::attach(|py| refused.raise(py).unwrap_or_else(|error| error))
    }
}

/// Why an object does not go into a pickle.
pub(crate) fn not_picklable(what: &str, advice: &str) -> PyErr {
    PyTypeError::new_err(format!("a {what} cannot be pickled: {advice}"))
}

/// An error and its causes in one line.
pub(crate) fn sentence(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
        cause = error.source();
    }
    line
}

impl From<PoolError> for Refused {
    fn from(error: PoolError) -> Self {
        let message = sentence(&error);
        match error {
            PoolError::Exhausted { wanted_blocks, available_blocks, shortage } => {
                exhausted(message, wanted_blocks, available_blocks, shortage)
            }
            PoolError::NeverFits { wanted_blocks, pool_blocks } => {
                Self::new("NeverFits", message).number("needed", wanted_blocks).number("pool_blocks", pool_blocks)
            }
            PoolError::Free(error) => error.into(),
            PoolError::NotReserved(error) => error.into(),
            PoolError::Map(error) => Self { message, ..error.into() },
            PoolError::Unmap(error) => Self { message, ..error.into() },
            PoolError::Fleet(error) => error.into(),
            PoolError::Ledger(error) => Self { message, ..error.into() },
            PoolError::Segment(error) => Self { message, ..error.into() },
            PoolError::Mem(error) => error.into(),
            PoolError::Forked => Self::forked("pool"),
            PoolError::Config(error) => error.into(),
            PoolError::Geometry(error) => error.into(),
            PoolError::Shape(error) => error.into(),
            PoolError::System { .. } => Self::new("FileProblem", message),
            _ => Self::new("TidekvError", message),
        }
    }
}

fn exhausted(message: String, needed: u32, available: u32, shortage: Shortage) -> Refused {
    let refused = Refused::new("PoolExhausted", message).number("needed", needed).number("available", available);
    match shortage {
        Shortage::Limit { .. } => refused.text("shortage", "limit"),
        Shortage::Budget { wanted, grantable } => {
            refused.text("shortage", "budget").number("needed_bytes", wanted.0).number("grantable_bytes", grantable.0)
        }
        Shortage::Device { wanted } => refused.text("shortage", "device").number("needed_bytes", wanted.0),
        Shortage::Rank { at, wanted, grantable } => refused
            .text("shortage", "rank")
            .number("needed_bytes", wanted.0)
            .number("grantable_bytes", grantable.0)
            .number("stage", at.stage)
            .number("rank", at.rank),
    }
}

impl From<FreeError> for Refused {
    /// The block here is a dense index: who knows kernel ids says those instead.
    fn from(error: FreeError) -> Self {
        Self::new("NotLeased", sentence(&error))
    }
}

impl From<MemError> for Refused {
    fn from(error: MemError) -> Self {
        let message = sentence(&error);
        match error {
            MemError::OutOfMemory { wanted, free } => {
                let refused = Self::new("OutOfMemory", message).number("needed_bytes", wanted.0);
                match free {
                    Some(free) => refused.number("free_bytes", free.0),
                    None => refused,
                }
            }
            MemError::Unavailable { .. } | MemError::NoSuchDevice { .. } | MemError::Unsupported { .. } => {
                Self::new("Unavailable", message)
            }
            MemError::PageSize { .. } | MemError::Geometry(_) => Self::argument(message),
            MemError::NotMapped { offset, end } => {
                Self::new("Unmapped", message).number("offset", offset).number("end", end)
            }
            MemError::Forked => Self::forked("region"),
            MemError::Busy { page } => Self::new("MapFailed", message).number("page", page.0).truth("transient", true),
            _ => Self::new("MapFailed", message),
        }
    }
}

impl From<MapError> for Refused {
    fn from(error: MapError) -> Self {
        let message = sentence(&error);
        let transient = error.is_transient();
        match error {
            MapError::Forked => Self::forked("region"),
            MapError::OutOfRange { .. } => Self::argument(message),
            MapError::Refused { source: MemError::OutOfMemory { wanted, .. }, .. } => {
                Self::new("OutOfMemory", message).number("needed_bytes", wanted.0)
            }
            MapError::Refused { page, stuck, .. } => Self::new("MapFailed", message)
                .number("page", page.0)
                .number("stuck", stuck)
                .truth("transient", transient),
            MapError::AlreadyMapped { page } | MapError::Busy { page } | MapError::Stuck { page } => {
                Self::new("MapFailed", message).number("page", page.0).truth("transient", transient)
            }
            _ => Self::new("MapFailed", message),
        }
    }
}

impl From<UnmapError> for Refused {
    fn from(error: UnmapError) -> Self {
        let message = sentence(&error);
        match error {
            UnmapError::Forked => Self::forked("region"),
            UnmapError::OutOfRange { .. } => Self::argument(message),
            UnmapError::NotMapped { page } | UnmapError::Busy { page } => {
                Self::new("MapFailed", message).number("page", page.0)
            }
            UnmapError::Stuck { stuck, .. } => Self::new("MapFailed", message)
                .number("page", stuck.first().map_or(0, |page| page.0))
                .number("stuck", stuck.len() as u64)
                .truth("transient", true),
            _ => Self::new("MapFailed", message),
        }
    }
}

impl From<FleetError> for Refused {
    fn from(error: FleetError) -> Self {
        let message = sentence(&error);
        let transient = error.is_transient();
        let refused = Self::new("WorkerFailed", message.clone()).truth("transient", transient);
        match error {
            FleetError::Rank { at: RankId { stage, rank }, fault } => {
                let word = match &fault {
                    RankFault::Refused(_) => "refused",
                    RankFault::TimedOut { .. } => "timed-out",
                    RankFault::Late { .. } => "late",
                    RankFault::Lost { .. } => "lost",
                    RankFault::Rejoining => "rejoining",
                    RankFault::Excluded { .. } => "excluded",
                    _ => "order",
                };
                let reason = sentence(&fault);
                refused.number("stage", stage).number("rank", rank).text("fault", word).text("reason", reason)
            }
            FleetError::Forked => Self::forked("fleet"),
            FleetError::Strategy(_) | FleetError::NoRanks { .. } => Self::argument(message),
            _ => refused.text("fault", "order").text("reason", message),
        }
    }
}

impl From<IpcError> for Refused {
    fn from(error: IpcError) -> Self {
        let message = sentence(&error);
        let transient = error.is_transient();
        let path = match &error {
            IpcError::PathTooLong { path, .. }
            | IpcError::NotOurs { path, .. }
            | IpcError::Taken { path }
            | IpcError::FolderBusy { path, .. }
            | IpcError::Os { path, .. } => Some(path.as_path()),
            IpcError::Forked => return Self::forked("worker"),
            _ => None,
        };
        Self::new("FileProblem", message).path(path).truth("transient", transient)
    }
}

impl From<LedgerError> for Refused {
    fn from(error: LedgerError) -> Self {
        Self::new("FileProblem", sentence(&error)).truth("transient", error.is_transient())
    }
}

impl From<SegmentError> for Refused {
    fn from(error: SegmentError) -> Self {
        let message = sentence(&error);
        let path = match &error {
            SegmentError::LockTimeout { path, .. }
            | SegmentError::InUse { path }
            | SegmentError::NotOurs { path }
            | SegmentError::Linked { path }
            | SegmentError::NotFound { path }
            | SegmentError::Ending { path }
            | SegmentError::Os { path, .. } => Some(path.as_path()),
            SegmentError::TooLarge { .. } => return Self::argument(message),
            _ => None,
        };
        Self::new("FileProblem", message).path(path).truth("transient", error.is_transient())
    }
}

impl From<ArenaError> for Refused {
    fn from(error: ArenaError) -> Self {
        let message = sentence(&error);
        match error {
            ArenaError::Name(_) | ArenaError::Config { .. } => Self::argument(message),
            ArenaError::Forked => Self::forked("arena"),
            other => Self::new("FileProblem", message).truth("transient", other.is_transient()),
        }
    }
}

impl From<AllocError> for Refused {
    fn from(error: AllocError) -> Self {
        let message = sentence(&error);
        match error {
            AllocError::TooLarge { .. } | AllocError::Alignment { .. } => Self::argument(message),
            AllocError::Exhausted { wanted, .. } => Self::new("OutOfMemory", message).number("needed_bytes", wanted.0),
            AllocError::Handle(error) => error.into(),
            AllocError::Forked => Self::forked("arena"),
            _ => Self::new("TidekvError", message),
        }
    }
}

impl From<HandleError> for Refused {
    fn from(error: HandleError) -> Self {
        match error {
            HandleError::Forked => Self::forked("arena"),
            HandleError::BeyondEnd => Self::argument(error.to_string()),
            _ => Self::new("StaleHandle", error.to_string()),
        }
    }
}

impl From<BatchError> for Refused {
    fn from(error: BatchError) -> Self {
        let message = sentence(&error);
        match error {
            BatchError::Shortage { needed, free } => Self::new("PoolExhausted", message)
                .number("needed", needed)
                .number("available", free)
                .text("shortage", "batch"),
            other => Self::argument(message).truth("transient", other.is_transient()),
        }
    }
}

/// Errors that are about an argument, and nothing else.
macro_rules! about_arguments {
    ($($error:ty),*) => {$(
        impl From<$error> for Refused {
            fn from(error: $error) -> Self {
                Self::argument(sentence(&error))
            }
        }
    )*};
}

about_arguments!(
    ConfigError,
    BatchConfigError,
    GeometryError,
    LeaseError,
    NameError,
    NotReserved,
    ShapeError,
    SizeError
);
