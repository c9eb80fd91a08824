//! One process's attachment to an arena: its lock, its view of the tables, its window.
//!
//! ```text
//!   Arena (cloned) ---> Attachment <--- LocalArena, one for each thread that allocates
//!                        | file     one descriptor; holds the lock of one member for life
//!                        | tables   mapped whole
//!                        | window   segments appear in it when they are first met
//! ```
//!
//! A member is a byte of the file whose lock this process holds. The kernel drops the lock when the process is gone, after
//! its last thread has left its memory, so whoever gets the lock of a member that is still on record can be sure that
//! nothing of it is going on any more.

use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::mm::Advice;
use tidekv_fork::{Birth, ClosedInChild};

use super::block::Block;
use super::config::{HugePages, Pages};
use super::error::{ArenaError, HandleError};
use super::file::{Place, is_hugetlbfs, member_lock};
use super::format::Head;
use super::geometry::{HUGE, MEMBERS};
use super::handle::Handle;
use super::holds::Holds;
use super::prefault::Wake;
use super::recovery::{Reaper, Recovered};
use super::tables::{Member, Tables};
use super::window::Window;
use super::word::{self, Word};
use crate::ledger::turn::Turn;
use crate::lock::{try_lock_byte, unlock_byte};
use crate::{now_ms, process};

/// How long adding a segment waits for somebody who is adding one. That takes milliseconds, unless he is stopped.
const GROW_WAIT: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(super) struct Attachment {
    pub(super) tables: Tables,
    pub(super) window: Window,
    /// Segments that are mapped here; only grows.
    mapped: AtomicU32,
    grain_bits: u32,
    grain_shift: u32,
    pub(super) birth: Birth,
    pub(super) member: u32,
    pub(super) head: Head,
    pub(super) holds: Holds,
    pub(super) place: Place,
    pub(super) wake: Wake,
    mapping: Mutex<()>,
    /// Growth and recovery, one thread of this process at a time: threads share a descriptor and thus its locks.
    turn: Turn<()>,
    file: ClosedInChild,
}

impl Attachment {
    /// Becomes a member of an arena that was opened.
    pub(super) fn new(place: Place, file: ClosedInChild, head: Head) -> Result<Self, ArenaError> {
        let geometry = head.geometry;
        let tables = Tables::map(file.as_fd(), geometry).map_err(place.os("mmap"))?;
        let bytes = usize::try_from(geometry.limit().0).unwrap_or(usize::MAX);
        let window = Window::reserve(bytes, HUGE as usize).map_err(place.os("mmap"))?;
        let member = join(&place, &file, &tables)?;
        let attachment = Self {
            tables,
            window,
            mapped: AtomicU32::new(0),
            grain_bits: geometry.grain_bits(),
            grain_shift: geometry.grain_shift,
            birth: Birth::here(),
            member,
            head,
            holds: Holds::default(),
            place,
            wake: Wake::default(),
            mapping: Mutex::new(()),
            turn: Turn::new(()),
            file,
        };
        attachment.map_existing()?;
        Ok(attachment)
    }

    /// The number of a handle's grain among all grains, if it lies in a segment that exists. No word is looked at.
    #[inline]
    pub(super) fn locate(&self, handle: Handle) -> Result<usize, HandleError> {
        let (segment, block) = (handle.segment(), handle.block());
        // Acquire: what is mapped is there before it is used.
        if segment >= self.mapped.load(Ordering::Acquire) || block >> self.grain_bits != 0 {
            return self.locate_unmapped(handle);
        }
        Ok(self.grain_of(handle))
    }

    /// The same for a handle that this cache made.
    #[inline]
    pub(super) fn grain_of(&self, handle: Handle) -> usize {
        (handle.segment() as usize) << self.grain_bits | handle.block() as usize
    }

    /// The same for a segment that somebody else may have added.
    #[cold]
    fn locate_unmapped(&self, handle: Handle) -> Result<usize, HandleError> {
        let known = |segments| handle.segment() < segments && handle.block() >> self.grain_bits == 0;
        // A failure to map leaves the segment unusable here, which is what the answer says.
        if !known(self.segments()) || self.is_foreign() || !known(self.map_existing().unwrap_or(0)) {
            return Err(HandleError::OutOfRange);
        }
        Ok(self.grain_of(handle))
    }

    /// A held block's grain: the word has the handle's generation and is not free.
    #[inline]
    pub(super) fn find(&self, handle: Handle) -> Result<usize, HandleError> {
        let grain = self.locate(handle)?;
        if self.is_foreign() {
            return Err(HandleError::Forked);
        }
        // SAFETY: `locate` gives grains of segments that exist, and there are words for all of these.
        let word = unsafe { self.tables.words().get_unchecked(grain) };
        if Word(word.load(Ordering::Acquire)).is_held(handle.generation()) {
            Ok(grain)
        } else {
            Err(HandleError::Stale)
        }
    }

    /// The address of a grain that [`Self::locate`] gave.
    #[inline]
    pub(super) fn address(&self, grain: usize) -> NonNull<u8> {
        // SAFETY: the grain lies in a segment that exists, and the window has room for all that can.
        unsafe { self.window.start().add(grain << self.grain_shift) }
    }

    /// A held block.
    pub(super) fn block(&self, handle: Handle) -> Result<Block<'_>, HandleError> {
        let grain = self.find(handle)?;
        Ok(Block::new(self.address(grain), self.block_bytes(grain)?))
    }

    #[inline]
    pub(super) fn is_foreign(&self) -> bool {
        self.birth.is_foreign()
    }

    /// Segments that can be used here without asking anybody.
    pub(super) fn mapped(&self) -> u32 {
        self.mapped.load(Ordering::Acquire)
    }

    /// How many segments exist.
    pub(super) fn segments(&self) -> u32 {
        let (said, mapped) = (self.tables.segments(self.file.as_fd()), self.mapped());
        if said < mapped {
            self.tables.segments_at_least(mapped);
        }
        said.max(mapped)
    }

    /// Maps every segment that exists, and says how many there are.
    pub(super) fn map_existing(&self) -> Result<u32, ArenaError> {
        let exist = self.segments();
        if self.mapped() >= exist {
            return Ok(self.mapped());
        }
        let _mapping = self.mapping.lock().unwrap_or_else(PoisonError::into_inner);
        let (first, exist) = (self.mapped(), self.segments());
        if first < exist {
            let shift = self.head.geometry.segment_shift;
            let (at, bytes) = ((first as usize) << shift, ((exist - first) as usize) << shift);
            let offset = self.head.geometry.data_at() + at as u64;
            self.window.map(at, bytes, self.file.as_fd(), offset).map_err(self.place.os("mmap"))?;
            if self.head.huge_pages != HugePages::Off && !is_hugetlbfs(self.file.as_fd()) {
                // Advice: where the kernel has no huge pages for files it is refused, and `pages` says so.
                let _ = self.window.advise(at, bytes, Advice::LinuxHugepage);
            }
            self.mapped.store(exist, Ordering::Release);
            // Whoever added them: they are new to this process.
            self.wake.ring();
        }
        Ok(exist)
    }

    /// Adds a segment unless there are more than `seen` already.
    pub(super) fn grow(&self, seen: u32) -> Result<(), ArenaError> {
        if self.is_foreign() {
            return Err(ArenaError::Forked);
        }
        let deadline = Instant::now() + GROW_WAIT;
        let _turn = self.turn.take(deadline).map_err(|waited| self.place.locked(waited))?;
        let lock = self.place.lock_growth(self.file.as_fd(), deadline)?;
        let segments = self.segments();
        if segments <= seen {
            let geometry = self.head.geometry;
            if segments >= geometry.max_segments {
                return Err(ArenaError::AtLimit { limit: geometry.limit() });
            }
            // Who dies before the count is written leaves memory that the next one puts to use.
            self.place.back_segment(self.file.as_fd(), geometry, segments)?;
            self.tables.set_segments(segments + 1);
        }
        drop(lock);
        self.map_existing()?;
        Ok(())
    }

    /// Takes back what members left behind that are dead.
    pub(super) fn recover(&self) -> Result<Recovered, ArenaError> {
        if self.is_foreign() {
            return Err(ArenaError::Forked);
        }
        let mut total = Recovered::default();
        // Another thread of this process is at it: what it finds helps us too.
        let deadline = Instant::now() + GROW_WAIT;
        let _turn = self.turn.take(deadline).map_err(|waited| self.place.locked(waited))?;
        for member in (0..MEMBERS).filter(|member| *member != self.member) {
            if self.tables.member(member).is_none() {
                continue;
            }
            // Held by the living, or by another who recovers it just now.
            if !try_lock_byte(self.file.as_fd(), member_lock(member)).map_err(self.place.os("fcntl"))? {
                continue;
            }
            if self.tables.member(member).is_some() {
                total += Reaper::new(&self.tables, self.segments(), member).run();
            }
            unlock_byte(self.file.as_fd(), member_lock(member)).map_err(self.place.os("fcntl"))?;
        }
        Ok(total)
    }

    pub(super) fn file(&self) -> &ClosedInChild {
        &self.file
    }

    pub(super) fn pages(&self) -> Pages {
        match self.head.huge_pages {
            HugePages::Off => Pages::Small,
            HugePages::Hugetlb if is_hugetlbfs(self.file.as_fd()) => Pages::Hugetlb,
            HugePages::Thp | HugePages::Hugetlb => {
                let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
                let gives = ["[advise]", "[always]", "[within_size]", "[force]"];
                let given = setting.is_ok_and(|text| gives.iter().any(|word| text.contains(word)));
                if given { Pages::ThpAdvised } else { Pages::Small }
            }
        }
    }

    /// A block's word; `grain` is one that [`Self::locate`] gave.
    pub(super) fn word(&self, grain: usize) -> Word {
        word::load(&self.tables.words()[grain])
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        if self.is_foreign() {
            return;
        }
        // As if we had died, but at once: blocks that are ours alone come back, those that others hold stay.
        Reaper::new(&self.tables, self.segments(), self.member).run();
        // Not left to closing the descriptor: a process that is being spawned has a copy of it until it execs. What fails
        // here happens with the last copy.
        let _ = unlock_byte(self.file.as_fd(), member_lock(self.member));
    }
}

/// Takes the lock of a member that nobody is. What a dead one left behind is taken back first.
fn join(place: &Place, file: &ClosedInChild, tables: &Tables) -> Result<u32, ArenaError> {
    for member in 0..MEMBERS {
        if !try_lock_byte(file.as_fd(), member_lock(member)).map_err(place.os("fcntl"))? {
            continue;
        }
        if !place.is_linked(file.as_fd())? {
            return Err(ArenaError::NotFound { path: place.path().to_owned() });
        }
        if tables.member(member).is_some() {
            Reaper::new(tables, tables.segments(file.as_fd()), member).run();
        }
        let (pid, started) = (std::process::id(), process::started());
        tables.set_member(member, Some(Member { pid, started, attached_ms: now_ms() }));
        return Ok(member);
    }
    // Whoever deletes the arena holds all of them for a moment.
    match place.is_linked(file.as_fd())? {
        true => Err(ArenaError::TooManyMembers { path: place.path().to_owned(), limit: MEMBERS }),
        false => Err(ArenaError::NotFound { path: place.path().to_owned() }),
    }
}
