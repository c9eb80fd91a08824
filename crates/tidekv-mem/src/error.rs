//! What can go wrong below us, as values. One enum for calls, two for batches of pages.

use std::fmt;

use tidekv_core::geometry::GeometryError;
use tidekv_core::units::{Bytes, PageId};

use crate::meter::Call;

/// CUresults behind which a context is of no use: `DEINITIALIZED`, `ECC_UNCORRECTABLE`, `NVLINK_UNCORRECTABLE`, `ILLEGAL_ADDRESS`,
/// `LAUNCH_TIMEOUT`, `CONTEXT_IS_DESTROYED`, `ASSERT`, `HARDWARE_STACK_ERROR`, `ILLEGAL_INSTRUCTION`, `MISALIGNED_ADDRESS`,
/// `INVALID_ADDRESS_SPACE`, `INVALID_PC`, `LAUNCH_FAILED`, `CONTAINED`, `UNKNOWN`.
const LOST: [i32; 15] = [4, 214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 999];

/// A call that did not do what it was asked to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemError {
    /// There is no memory for this now; another owner giving some back can help.
    #[error("out of memory: {wanted} wanted, {}", FreeText(*.free))]
    OutOfMemory {
        /// What was asked for.
        wanted: Bytes,
        /// What was free, where that is known.
        free: Option<Bytes>,
    },
    /// The back-end cannot be used on this machine.
    #[error("the {backend} back-end cannot be used: {reason}")]
    Unavailable {
        /// Which one.
        backend: &'static str,
        /// What is missing and what to do about it.
        reason: String,
    },
    /// A device number that does not exist.
    #[error("CUDA device {device} does not exist: {}", DeviceRange(*.count))]
    NoSuchDevice {
        /// As asked for.
        device: u32,
        /// How many there are.
        count: u32,
    },
    /// The device or the system lacks an optional capability that was asked for.
    #[error("{option} is not supported here: leave the option off")]
    Unsupported {
        /// Which option.
        option: &'static str,
    },
    /// A handle's size must be a positive multiple of the granularity.
    #[error(
        "a page size of {bytes} is not usable: give a positive multiple of {granularity}, the granularity of the {backend} back-end"
    )]
    PageSize {
        /// As asked for.
        bytes: Bytes,
        /// What it must be a multiple of.
        granularity: Bytes,
        /// Whose granularity.
        backend: &'static str,
    },
    /// The CUDA driver refused a call.
    #[error("{function} failed with {name} ({code}): {meaning}")]
    Driver {
        /// The driver's function.
        function: &'static str,
        /// The CUresult.
        code: i32,
        /// Its name, as the driver gives it.
        name: String,
        /// Its meaning, as the driver gives it.
        meaning: String,
    },
    /// The operating system refused a call.
    #[error("{call} failed while {doing}")]
    System {
        /// The system call.
        call: &'static str,
        /// What it was for, and where known what to change.
        doing: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The reservation belongs to the process that made it.
    #[error("this reservation was made before a fork and belongs to the parent process: open a new one in the child")]
    Forked,
    /// A test asked for this call to fail.
    #[error("injected failure of {call}")]
    Injected {
        /// Which kind of call.
        call: Call,
    },
    /// A range that does not lie inside one mapped handle.
    #[error("bytes {offset}..{end} do not lie inside one mapped page of this reservation")]
    NotMapped {
        /// First byte.
        offset: u64,
        /// One past the last byte.
        end: u64,
    },
    /// A page that another call had for as long as a copy waits. Nothing was copied.
    #[error("page {page} is in the middle of another call: try again")]
    Busy {
        /// The id.
        page: PageId,
    },
    /// The sizes make no sense together.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
}

impl MemError {
    /// Whether waiting, or someone giving memory back, can make the same call succeed.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Busy { .. }) || self.is_out_of_memory()
    }

    /// Whether memory ran out, whichever system said so.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. })
    }

    /// Whether the driver said that the device, or this process's context on it, is lost: every later call answers the same, and only a
    /// new process can use the device again.
    pub fn is_device_lost(&self) -> bool {
        matches!(self, Self::Driver { code, .. } if LOST.contains(code))
    }

    pub(crate) fn system(call: &'static str, doing: &'static str, source: rustix::io::Errno) -> Self {
        Self::System { call, doing, source: source.into() }
    }
}

struct FreeText(Option<Bytes>);

impl fmt::Display for FreeText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(free) => write!(f, "{free} free"),
            None => f.write_str("the driver has no more"),
        }
    }
}

struct DeviceRange(u32);

impl fmt::Display for DeviceRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str("this machine has none, use the host back-end"),
            1 => f.write_str("this machine has one, number 0"),
            n => write!(f, "this machine has {n}, numbered 0 to {}", n - 1),
        }
    }
}

/// A batch of pages was not mapped. All its pages are as they were before, except those counted in `stuck`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// The reservation belongs to the process that made it. Nothing was tried.
    #[error("this reservation was made before a fork and belongs to the parent process: open a new one in the child")]
    Forked,
    /// A page id outside the reservation. Nothing was tried.
    #[error("page {page} is outside this reservation: valid page ids are 0..={last}")]
    OutOfRange {
        /// The id.
        page: PageId,
        /// The largest valid one.
        last: PageId,
    },
    /// A page that already has memory. Nothing was tried.
    #[error("page {page} is already mapped: unmap it first, or leave it out of the batch")]
    AlreadyMapped {
        /// The id.
        page: PageId,
    },
    /// A page that another call is changing, or that the batch names twice. Nothing was tried.
    #[error("page {page} is in the middle of another call, or named twice in this one")]
    Busy {
        /// The id.
        page: PageId,
    },
    /// A page whose memory could not be given back earlier. Nothing was tried.
    #[error("page {page} still holds memory that could not be given back: unmap it again before mapping it")]
    Stuck {
        /// The id.
        page: PageId,
    },
    /// The system below refused; the batch was rolled back.
    #[error("mapping page {page} failed; the batch was undone{}", StuckText(*.stuck))]
    Refused {
        /// The page that could not be mapped.
        page: PageId,
        /// Pages that could not be rolled back: they hold memory and are counted as stuck.
        stuck: u32,
        /// Why.
        #[source]
        source: MemError,
    },
}

impl MapError {
    /// Whether the same batch can succeed later without the caller changing it.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Busy { .. } => true,
            Self::Refused { source, .. } => source.is_transient(),
            _ => false,
        }
    }

    /// Whether memory ran out.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Refused { source, .. } if source.is_out_of_memory())
    }
}

/// A batch of pages was not unmapped, or not all of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UnmapError {
    /// A page id outside the reservation. Nothing was tried.
    #[error("page {page} is outside this reservation: valid page ids are 0..={last}")]
    OutOfRange {
        /// The id.
        page: PageId,
        /// The largest valid one.
        last: PageId,
    },
    /// The reservation belongs to the process that made it. Nothing was tried.
    #[error("this reservation was made before a fork and belongs to the parent process")]
    Forked,
    /// A page without memory. Nothing was tried.
    #[error("page {page} is not mapped: nothing was unmapped")]
    NotMapped {
        /// The id.
        page: PageId,
    },
    /// A page that another call is changing, or that the batch names twice. Nothing was tried.
    #[error("page {page} is in the middle of another call, or named twice in this one")]
    Busy {
        /// The id.
        page: PageId,
    },
    /// The system below would not take some pages back. The others of the batch are unmapped; these keep their
    /// memory, are counted as stuck, and may be unmapped again.
    #[error("{} of the batch's pages could not be given back (first: page {}); they are kept and may be unmapped again", .stuck.len(), .stuck[0])]
    Stuck {
        /// Which pages, at least one.
        stuck: Vec<PageId>,
        /// Why the first of them stayed.
        #[source]
        source: MemError,
    },
}

struct StuckText(u32);

impl fmt::Display for StuckText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            n => write!(f, ", but {n} pages could not be given back and are counted as stuck"),
        }
    }
}
