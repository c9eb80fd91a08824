//! A thread's own part of the arena: where blocks are allocated and freed.
//!
//! ```text
//!   LocalArena                       private                                shared
//!     bins[class].ready              handles of free blocks, last in first  words of these blocks: FREE
//!     bins[class].partial, .full     Span { bits, first }, for the rest     slot words that name this cache
//! ```
//!
//! Which blocks of its spans are free, a cache knows from lists and bitmaps of its own, which die with it; they say nothing
//! that the words do not. So allocating is a handle taken from a private list and one release store to its block's word,
//! and freeing at home is the same in reverse: the handle goes back with the next generation. No lock, no
//! read-modify-write, and nothing is ever half done: before the store the block is free, after it it is held.
//!
//! Freeing what lies in another's span is one compare-and-swap and one `fetch_or`. Everything else, from a new span to a
//! new segment, is in `refill.rs`.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tidekv_core::units::Bytes;
use tidekv_fork::Birth;

use super::attachment::Attachment;
use super::block::copy_between;
use super::class::{CLASS_OF, CLASSES, LARGEST, SIZES, SLOT_GRAINS};
use super::error::{AllocError, ArenaError, HandleError};
use super::geometry::CACHES;
use super::handle::Handle;
use super::slot::Slot;
use super::span::{Bin, Span};
use super::word::{State, Word};

/// The largest alignment there is.
const ALIGN_MAX: usize = 2 << 20;

/// A thread's part of an [`Arena`](super::Arena). It can be sent to another thread but not shared between two.
pub struct LocalArena {
    pub(super) bins: [Bin; CLASSES],
    /// Bytes of the largest class; above it blocks are runs of their own.
    largest: usize,
    grain_shift: u32,
    member: u32,
    pub(super) id: u16,
    birth: Birth,
    pub(super) attachment: Arc<Attachment>,
    pub(super) spans: Vec<Option<Span>>,
    /// Places in `spans` that can be used again.
    pub(super) spare: Vec<u32>,
    /// No slot below this one was free when we last looked.
    pub(super) cursor: usize,
    /// When each class last looked for spans without owner and found none.
    pub(super) orphans_seen: [u64; CLASSES],
    not_sync: PhantomData<Cell<()>>,
}

impl fmt::Debug for LocalArena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalArena").field("id", &self.id).field("spans", &self.spans.len()).finish_non_exhaustive()
    }
}

impl LocalArena {
    pub(super) fn new(attachment: &Arc<Attachment>) -> Result<Self, ArenaError> {
        if attachment.is_foreign() {
            return Err(ArenaError::Forked);
        }
        let id = match take_cache(attachment) {
            Some(id) => id,
            None => {
                attachment.recover()?;
                take_cache(attachment).ok_or(ArenaError::TooManyCaches { limit: CACHES })?
            }
        };
        let bin = |shape: super::class::Shape| {
            let ready_max = shape.blocks as usize;
            Bin { ready: Vec::with_capacity(ready_max), ready_max, ..Bin::default() }
        };
        let grain_shift = attachment.head.geometry.grain_shift;
        Ok(Self {
            bins: attachment.tables.shapes.map(bin),
            largest: (LARGEST as usize) << grain_shift,
            grain_shift,
            member: attachment.member,
            id,
            birth: attachment.birth,
            attachment: Arc::clone(attachment),
            spans: Vec::new(),
            spare: Vec::new(),
            cursor: 0,
            orphans_seen: [u64::MAX; CLASSES],
            not_sync: PhantomData,
        })
    }

    /// Allocates a block of at least this many bytes, aligned to the arena's grain. Its bytes are whatever was there.
    #[inline]
    pub fn alloc(&mut self, bytes: usize) -> Result<Handle, AllocError> {
        if bytes <= self.largest && !self.birth.is_foreign() {
            let class = CLASS_OF[bytes.wrapping_add((1 << self.grain_shift) - 1) >> self.grain_shift];
            if let Some(handle) = self.bins[usize::from(class)].ready.pop() {
                self.allot(handle);
                return Ok(handle);
            }
        }
        self.alloc_slowly(bytes)
    }

    /// Makes a block LIVE that was ready.
    #[inline]
    fn allot(&self, handle: Handle) {
        let grain = self.attachment.grain_of(handle);
        // SAFETY: what is ready lies in a segment that exists, so there is a word for it.
        let word = unsafe { self.attachment.tables.words().get_unchecked(grain) };
        word.store(Word::live(handle.generation(), self.member).0, Ordering::Release);
    }

    /// Allocates a block whose address, in every process, is a multiple of `align`: a power of two up to 2 MiB.
    pub fn alloc_aligned(&mut self, bytes: usize, align: usize) -> Result<Handle, AllocError> {
        let geometry = self.attachment.head.geometry;
        let refuse = AllocError::Alignment { align: align as u64 };
        if !align.is_power_of_two() || align > ALIGN_MAX || align as u64 > geometry.segment_bytes().0 {
            return Err(refuse);
        }
        if align <= 1 << self.grain_shift {
            return self.alloc(bytes);
        }
        let grains = bytes.div_ceil(1 << self.grain_shift);
        let slot_bytes = geometry.slot_bytes() as usize;
        if align <= slot_bytes && grains <= LARGEST as usize {
            // Spans begin at slots, so a class whose size is a multiple of the alignment has only aligned blocks.
            let first = usize::from(CLASS_OF[grains]);
            let fits = |class: &usize| ((SIZES[*class] as usize) << self.grain_shift).is_multiple_of(align);
            let usable = |class: &usize| fits(class) && self.attachment.tables.shapes[*class].blocks > 0;
            if let Some(class) = (first..CLASSES).find(usable) {
                return self.alloc_class(class, Bytes(bytes as u64));
            }
        }
        self.alloc_big(bytes, align.div_ceil(slot_bytes))
    }

    #[cold]
    #[inline(never)]
    fn alloc_slowly(&mut self, bytes: usize) -> Result<Handle, AllocError> {
        if bytes > self.largest {
            return self.alloc_big(bytes, 1);
        }
        let class = usize::from(CLASS_OF[bytes.div_ceil(1 << self.grain_shift)]);
        if self.attachment.tables.shapes[class].blocks == 0 {
            return self.alloc_big(bytes, 1);
        }
        self.alloc_class(class, Bytes(bytes as u64))
    }

    fn alloc_class(&mut self, class: usize, wanted: Bytes) -> Result<Handle, AllocError> {
        if self.birth.is_foreign() {
            return Err(AllocError::Forked);
        }
        if self.bins[class].ready.is_empty() {
            self.refill(class, wanted)?;
        }
        let handle = self.bins[class].ready.pop().expect("refill leaves a block ready");
        self.allot(handle);
        Ok(handle)
    }

    /// Frees a block, whoever allocated it. Of a shared block this gives back one hold of this process.
    #[inline]
    pub fn free(&mut self, handle: Handle) -> Result<(), HandleError> {
        let grain = self.attachment.locate(handle)?;
        if self.birth.is_foreign() {
            return Err(HandleError::Forked);
        }
        // SAFETY: `locate` gives grains of segments that exist, and there are words for all of these.
        let word = unsafe { self.attachment.tables.words().get_unchecked(grain) };
        let now = Word(word.load(Ordering::Acquire));
        if !now.is_live(handle.generation()) {
            return self.free_otherwise(handle, grain, now);
        }
        // SAFETY: as above; every 64 grains have a slot. Relaxed: only we write our own number there.
        let slot = unsafe { self.attachment.tables.slots().get_unchecked(grain / SLOT_GRAINS as usize) };
        let slot = Slot(slot.load(Ordering::Relaxed));
        if slot.owner() != self.id {
            return self.free_from_afar(handle, grain);
        }
        // Others may have written the word: it says where to look, and what is ours we know by ourselves.
        let class = match self.spans.get(slot.index()) {
            Some(Some(span)) if span.has_block_at(grain) => usize::from(span.class),
            _ => return self.free_from_afar(handle, grain),
        };
        word.store(now.free().0, Ordering::Release);
        if self.bins[class].ready.len() == self.bins[class].ready_max {
            self.make_room_for_ready(class);
        }
        self.bins[class].ready.push(handle.next());
        Ok(())
    }

    /// Not LIVE: shared, or stale.
    #[cold]
    fn free_otherwise(&mut self, handle: Handle, grain: usize, now: Word) -> Result<(), HandleError> {
        if now.is_held(handle.generation()) && now.state() == State::Shared {
            return self.release_at(handle, grain);
        }
        Err(HandleError::Stale)
    }

    /// Changes a block's size: in place where it can be, otherwise by moving its bytes to a new block. Gives the handle
    /// that is good from now on. On an error the block is as it was. Only for blocks that are not shared.
    pub fn resize(&mut self, handle: Handle, bytes: usize) -> Result<Handle, AllocError> {
        let grain = self.attachment.find(handle)?;
        let now = self.attachment.word(grain);
        if now.state() != State::Live || now.who() != self.member {
            return Err(HandleError::NotHolder.into());
        }
        let has = self.attachment.block_bytes(grain)?;
        if bytes <= has {
            self.shrink_big(grain, bytes);
            return Ok(handle);
        }
        if self.extend_big(grain, bytes) {
            return Ok(handle);
        }
        let new = self.alloc(bytes)?;
        copy_between(self.attachment.block(handle)?, self.attachment.block(new)?, has);
        // It was held a moment ago; if somebody else freed it since, it is gone either way.
        let _ = self.free(handle);
        Ok(new)
    }

    /// The arena's number for this cache, for people who look at it.
    pub fn id(&self) -> u16 {
        self.id
    }

    pub(super) fn member(&self) -> u32 {
        self.member
    }
}

impl Drop for LocalArena {
    fn drop(&mut self) {
        if self.birth.is_foreign() {
            return;
        }
        self.leave();
        // Unless it was written over, and is another's by now.
        let cache = &self.attachment.tables.caches()[usize::from(self.id) - 1];
        let _ = cache.compare_exchange(u64::from(self.member) + 1, 0, Ordering::Release, Ordering::Relaxed);
    }
}

/// A cache number that nobody has: 1 to 1024.
fn take_cache(attachment: &Attachment) -> Option<u16> {
    let caches = attachment.tables.caches();
    let mine = u64::from(attachment.member) + 1;
    let take = |cache: &AtomicU64| cache.compare_exchange(0, mine, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    // At most 1024.
    caches.iter().position(take).map(|at| at as u16 + 1)
}
