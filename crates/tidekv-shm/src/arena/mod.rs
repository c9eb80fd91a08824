//! The arena: memory that many processes allocate from, and hand to each other as 64-bit handles.
//!
//! ```text
//!   process A                                       process B, at other addresses
//!   local.alloc(64 KiB) -> handle   ---- 8 bytes ---->   arena.block(handle) -> pointer
//!        |                                                    |
//!        v                                                    v
//!   one file:  head | members, caches | slots | bitmaps | words || segment 0 | segment 1 | ... up to a limit
//! ```
//!
//! | module | |
//! | --- | --- |
//! | `handle`, `class`, `geometry`, `format` | pure arithmetic: what a handle is, which sizes there are, what lies where |
//! | `word`, `slot` | the two state machines in shared memory; checked by loom in `model` |
//! | `file`, `window`, `tables`, `attachment` | getting hold of the file; becoming a member; growing |
//! | `local`, `span`, `refill`, `big`, `share` | allocating and freeing |
//! | `recovery`, `verify` | what the dead left behind; whether everything fits together |
//! | `prefault`, `block` | pages touched ahead of use; the bytes |
//!
//! What makes it fast: a thread owns whole spans of blocks and keeps their bitmaps in private memory, so allocating and
//! freeing are one store each to shared memory. What makes it safe to kill anybody at any instruction: that one store
//! is the whole truth about a block, every other word in shared memory names who answers for it, and whether he lives the
//! kernel knows, by a file lock. Nobody waits for anybody, except to add a segment, with a deadline.
//!
//! All who can open the file are one trust domain: they are of one user, and can do worse to each other than corrupt an
//! arena. Within it, stale, foreign and invented handles are errors, never wild addresses; and a word that was written
//! over costs the span or block that it belongs to (`tables`), which is set aside and counted.

#![allow(
    clippy::cast_possible_truncation,
    reason = "numbers here are fields of words, whose widths tests hold, and places on a machine of 64 bits"
)]

mod attachment;
mod big;
mod block;
mod class;
mod config;
mod error;
mod file;
mod format;
mod geometry;
mod handle;
mod holds;
mod local;
#[cfg(test)]
#[cfg(loom)]
mod model;
mod name;
mod prefault;
mod recovery;
mod refill;
mod share;
mod slot;
mod span;
mod tables;
mod verify;
mod window;
mod word;

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use tidekv_core::units::Bytes;

use attachment::Attachment;
use file::Place;
use prefault::Prefaulter;
use tables::Tables;

pub use block::Block;
pub use config::{ArenaConfig, HugePages, Pages, Prefault};
pub use error::{AllocError, ArenaError, HandleError};
pub use format::{ArenaId, VERSION};
pub use handle::{Handle, MAX_SEGMENTS};
pub use local::LocalArena;
pub use name::ArenaName;
pub use recovery::Recovered;
pub use verify::{MemberState, Report};
pub(crate) use word::Atomic;

use crate::RuntimeDir;

const _: () = assert!(usize::BITS == 64, "an arena needs the address space of a 64-bit machine");

/// How often opening or creating starts over while others create and delete.
const TRIES: u32 = 16;

/// An attachment to an arena. Clones are the same attachment.
#[derive(Clone, Debug)]
pub struct Arena {
    // Before the attachment, which it uses.
    prefaulter: Option<Arc<Prefaulter>>,
    attachment: Arc<Attachment>,
}

impl Arena {
    /// Makes an arena and attaches to it. It is an error if there is one of this name.
    pub fn create(
        dir: &RuntimeDir,
        name: &ArenaName,
        config: &ArenaConfig,
        prefault: Prefault,
    ) -> Result<Self, ArenaError> {
        Place::new(dir, name).create(config)?;
        Self::attach(dir, name, prefault)
    }

    /// Attaches to an arena that exists. What dead processes left in the place that this one takes is taken back.
    pub fn attach(dir: &RuntimeDir, name: &ArenaName, prefault: Prefault) -> Result<Self, ArenaError> {
        let place = Place::new(dir, name);
        let (file, head) = place.open()?;
        let attachment = Arc::new(Attachment::new(place, file, head)?);
        if prefault == Prefault::Now {
            for segment in 0..attachment.mapped() {
                if !prefault::populate(&attachment, segment, || false) {
                    break;
                }
            }
        }
        let prefaulter = if prefault == Prefault::Off { None } else { Prefaulter::start(&attachment).map(Arc::new) };
        Ok(Self { prefaulter, attachment })
    }

    /// Attaches to the arena of this name, or makes it.
    pub fn open_or_create(
        dir: &RuntimeDir,
        name: &ArenaName,
        config: &ArenaConfig,
        prefault: Prefault,
    ) -> Result<Self, ArenaError> {
        for _ in 0..TRIES {
            match Self::attach(dir, name, prefault) {
                Err(ArenaError::NotFound { .. }) => {}
                other => return other,
            }
            match Place::new(dir, name).create(config) {
                Ok(()) | Err(ArenaError::Exists { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Err(ArenaError::Unsettled { path: Place::new(dir, name).path().to_owned(), tries: TRIES })
    }

    /// This user's arenas in a folder.
    pub fn list(dir: &RuntimeDir) -> Result<Vec<ArenaName>, ArenaError> {
        Ok(file::file_names(dir)?.iter().filter_map(|name| ArenaName::of_file(name)).collect())
    }

    /// Takes an arena's name away, whoever is attached: those keep it until they detach, and nobody else can attach.
    /// Says whether there was one.
    pub fn unlink(dir: &RuntimeDir, name: &ArenaName) -> Result<bool, ArenaError> {
        Place::new(dir, name).unlink()
    }

    /// The same only if nobody is attached, also of one that is damaged. Says whether it is gone.
    pub fn unlink_if_unused(dir: &RuntimeDir, name: &ArenaName) -> Result<bool, ArenaError> {
        let place = Place::new(dir, name);
        let file = match place.open_any() {
            Ok(file) => file,
            Err(ArenaError::NotFound { .. }) => return Ok(true),
            Err(error) => return Err(error),
        };
        place.unlink_if_unused(file.as_fd())
    }

    /// Removes what processes left behind that were killed while they made an arena, and says what.
    pub fn remove_leftovers(dir: &RuntimeDir) -> Result<Vec<PathBuf>, ArenaError> {
        let names = file::file_names(dir)?;
        let paths = names.iter().filter(|name| name::is_unfinished(name)).map(|name| dir.path().join(name));
        Ok(paths.filter(|path| file::remove_unfinished(path)).collect())
    }

    /// Looks at an arena without attaching to it: for tools.
    pub fn inspect(dir: &RuntimeDir, name: &ArenaName) -> Result<Report, ArenaError> {
        let place = Place::new(dir, name);
        let (file, head) = place.open()?;
        let tables = Tables::map(file.as_fd(), head.geometry).map_err(place.os("mmap"))?;
        Ok(verify::verify(&tables, &head, file.as_fd(), None))
    }

    /// A cache for one thread: what it allocates and frees through.
    pub fn local(&self) -> Result<LocalArena, ArenaError> {
        LocalArena::new(&self.attachment)
    }

    /// The address of a block in this process, if the handle is good: its segment exists, it lies inside, and the block is
    /// held under the handle's generation. One load, no lock.
    #[inline]
    pub fn address(&self, handle: Handle) -> Result<NonNull<u8>, HandleError> {
        self.attachment.find(handle).map(|grain| self.attachment.address(grain))
    }

    /// The bytes of a block.
    pub fn block(&self, handle: Handle) -> Result<Block<'_>, HandleError> {
        self.attachment.block(handle)
    }

    /// Holds a shared block (once more), as [`LocalArena::retain`] does, for a thread that has no cache.
    pub fn retain(&self, handle: Handle) -> Result<(), HandleError> {
        self.attachment.retain(handle)
    }

    /// Gives one hold of a shared block back, as [`LocalArena::release`] does, for a thread that has no cache.
    pub fn release(&self, handle: Handle) -> Result<(), HandleError> {
        self.attachment.release(handle)
    }

    /// Shares a block that nobody but this process has had so far.
    pub(crate) fn share_first(&self, handle: Handle) -> Result<(), HandleError> {
        match self.attachment.share(handle)? {
            false => Ok(()),
            true => Err(HandleError::AlreadyShared),
        }
    }

    /// The word of the head that leads to the arena's exchange.
    pub(crate) fn exchange_word(&self) -> Result<&AtomicU64, HandleError> {
        if self.attachment.is_foreign() { Err(HandleError::Forked) } else { Ok(self.attachment.tables.exchange()) }
    }

    /// Takes back what dead processes left behind. Allocation does the same when memory is short; nobody needs to call it.
    pub fn recover(&self) -> Result<Recovered, ArenaError> {
        self.attachment.recover()
    }

    /// Adds a segment.
    pub fn grow(&self) -> Result<(), ArenaError> {
        self.attachment.grow(self.attachment.segments())
    }

    /// Whether everything in the arena fits together, and what is in it.
    pub fn verify(&self) -> Result<Report, ArenaError> {
        if self.attachment.is_foreign() {
            return Err(ArenaError::Forked);
        }
        let attachment = &self.attachment;
        let file = attachment.file().as_fd();
        Ok(verify::verify(&attachment.tables, &attachment.head, file, Some(attachment.member)))
    }

    /// Which arena it is; another of the same name is another.
    pub fn id(&self) -> ArenaId {
        self.attachment.head.id
    }

    /// Which of its 32 places this process has.
    pub fn member(&self) -> u32 {
        self.attachment.member
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        self.attachment.place.path()
    }

    /// How many segments there are.
    pub fn segments(&self) -> u32 {
        self.attachment.segments()
    }

    /// What it grows by.
    pub fn segment_bytes(&self) -> Bytes {
        self.attachment.head.geometry.segment_bytes()
    }

    /// What it never grows beyond.
    pub fn limit(&self) -> Bytes {
        self.attachment.head.geometry.limit()
    }

    /// What sizes are counted in.
    pub fn grain(&self) -> Bytes {
        Bytes(self.attachment.head.geometry.grain_bytes())
    }

    /// What pages this attachment got.
    pub fn pages(&self) -> Pages {
        self.attachment.pages()
    }

    /// How many segments the thread of [`Prefault::Background`] has populated; all, if there is none.
    pub fn prefaulted(&self) -> u32 {
        self.prefaulter.as_ref().map_or_else(|| self.attachment.mapped(), |_| self.attachment.wake.done())
    }
}
