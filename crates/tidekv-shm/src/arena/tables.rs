//! The tables of an arena in this process: where each word lies, and which slots make a run.
//!
//! The mapping covers the tables of every segment that there can ever be, so no index below the limit leads outside it;
//! memory is behind those of the segments that exist, and callers keep to these.
//!
//! Anybody may have written over any word. So what decides an index, a count or a length is checked here: how many
//! segments exist ([`Tables::segments`]), and which slots a head reaches ([`Tables::run`], [`Tables::block_at`]). A slot
//! belongs to the run that its own word names, so a damaged word reaches no slot of another run.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::slice;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::fs::fstat;
use rustix::io::Errno;
use rustix::mm::Advice;

use super::class::{BIG, CLASSES, SLOT_GRAINS, Shape};
use super::file::is_tmpfs;
use super::format::{EXCHANGE_AT, ORPHANS_AT, SEGMENTS_AT};
use super::geometry::{CACHES, CACHES_AT, Geometry, HUGE, MEMBER_BYTES, MEMBERS, MEMBERS_AT};
use super::slot::{self, Slot, SlotState};
use super::window::Window;

const PAGE: usize = 4096;

/// Words of a member's record.
const STATE: usize = 0;
const PID: usize = 1;
const STARTED: usize = 2;
const ATTACHED: usize = 3;

/// A process that is attached, or was when it died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Member {
    pub(super) pid: u32,
    pub(super) started: u64,
    pub(super) attached_ms: u64,
}

#[derive(Debug)]
pub(super) struct Tables {
    slots: NonNull<[AtomicU64]>,
    bitmaps: NonNull<[AtomicU64]>,
    words: NonNull<[AtomicU64]>,
    pub(super) geometry: Geometry,
    pub(super) shapes: [Shape; CLASSES],
    /// So many segments are known to have memory.
    backed: AtomicU32,
    map: Window,
}

// SAFETY: the pointers lead into `map`, where there are only atomics.
unsafe impl Send for Tables {}
// SAFETY: as above.
unsafe impl Sync for Tables {}

impl Tables {
    pub(super) fn map(file: BorrowedFd<'_>, geometry: Geometry) -> Result<Self, Errno> {
        let bytes = usize::try_from(geometry.data_at()).map_err(|_| Errno::NOMEM)?;
        let map = Window::reserve(bytes, HUGE as usize)?;
        map.map(0, bytes, file, 0)?;
        let part = |at: u64, count: usize| {
            assert!(at.is_multiple_of(8) && at + count as u64 * 8 <= geometry.data_at(), "outside the tables");
            // SAFETY: inside the mapping, as was just checked.
            let first = unsafe { map.start().add(at as usize) };
            NonNull::slice_from_raw_parts(first.cast::<AtomicU64>(), count)
        };
        let slot_count = (geometry.max_segments as usize) << geometry.slot_bits();
        let slots = part(geometry.slots_at(), slot_count);
        let bitmaps = part(geometry.bitmaps_at(), slot_count);
        let words = part(geometry.words_at(), slot_count * SLOT_GRAINS as usize);
        let (shapes, backed) = (geometry.shapes(), AtomicU32::new(0));
        Ok(Self { slots, bitmaps, words, geometry, shapes, backed, map })
    }

    /// The part of the file before the tables of the segments.
    fn fixed_part(&self) -> &[AtomicU64] {
        let words = self.geometry.fixed_part().1 as usize / 8;
        // SAFETY: the mapping begins with the fixed part, at a page, and atomics may be shared with anybody.
        unsafe { slice::from_raw_parts(self.map.start().cast().as_ptr(), words) }
    }

    fn fixed(&self, at: usize) -> &AtomicU64 {
        &self.fixed_part()[at / 8]
    }

    /// The first 80 bytes, for whoever makes the file: all but the magic, then the magic.
    pub(super) fn write_head(&self, bytes: &[u8]) {
        let words = self.fixed_part();
        let word = |chunk: &[u8]| chunk.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
        for (at, chunk) in bytes.chunks(8).enumerate().skip(1) {
            words[at].store(word(chunk), Ordering::Relaxed);
        }
        words[0].store(word(&bytes[..8]), Ordering::Release);
    }

    /// How many segments exist: what the head says, but no more than have memory. Where there is none a write would take
    /// memory that nobody reserved, and a full file system would end the writer.
    pub(super) fn segments(&self, file: BorrowedFd<'_>) -> u32 {
        let said = self.fixed(SEGMENTS_AT).load(Ordering::Acquire);
        let said = u32::try_from(said).unwrap_or(u32::MAX).min(self.geometry.max_segments);
        if said <= self.backed.load(Ordering::Relaxed) {
            return said;
        }
        let known = said.min(self.segments_with_memory(file));
        self.backed.fetch_max(known, Ordering::Relaxed);
        known
    }

    /// Segments for which the file has enough blocks. Only tmpfs counts them to the byte; elsewhere the head is trusted.
    fn segments_with_memory(&self, file: BorrowedFd<'_>) -> u32 {
        let Some(state) = fstat(file).ok().filter(|_| is_tmpfs(file)) else { return self.geometry.max_segments };
        let bytes = u64::try_from(state.st_blocks).unwrap_or(0).saturating_mul(512);
        let each: u64 = self.geometry.parts_of_segment(0).iter().map(|(_, bytes)| bytes).sum();
        u32::try_from(bytes.saturating_sub(self.geometry.fixed_part().1) / each).unwrap_or(u32::MAX)
    }

    /// The number of segments was damaged if it is below what somebody has used already.
    pub(super) fn segments_at_least(&self, segments: u32) {
        self.fixed(SEGMENTS_AT).fetch_max(u64::from(segments), Ordering::AcqRel);
    }

    pub(super) fn set_segments(&self, segments: u32) {
        self.fixed(SEGMENTS_AT).store(u64::from(segments), Ordering::Release);
    }

    pub(super) fn orphans(&self) -> u64 {
        self.fixed(ORPHANS_AT).load(Ordering::Acquire)
    }

    pub(super) fn add_orphan(&self) {
        self.fixed(ORPHANS_AT).fetch_add(1, Ordering::Release);
    }

    /// The handle of the exchange's directory, or 0.
    pub(super) fn exchange(&self) -> &AtomicU64 {
        self.fixed(EXCHANGE_AT)
    }

    pub(super) fn member(&self, member: u32) -> Option<Member> {
        let record = self.member_record(member);
        if record[STATE].load(Ordering::Acquire) == 0 {
            return None;
        }
        Some(Member {
            pid: u32::try_from(record[PID].load(Ordering::Relaxed)).unwrap_or(0),
            started: record[STARTED].load(Ordering::Relaxed),
            attached_ms: record[ATTACHED].load(Ordering::Relaxed),
        })
    }

    /// Under the member's lock.
    pub(super) fn set_member(&self, member: u32, value: Option<Member>) {
        let record = self.member_record(member);
        if let Some(value) = value {
            record[PID].store(u64::from(value.pid), Ordering::Relaxed);
            record[STARTED].store(value.started, Ordering::Relaxed);
            record[ATTACHED].store(value.attached_ms, Ordering::Relaxed);
        }
        record[STATE].store(u64::from(value.is_some()), Ordering::Release);
    }

    fn member_record(&self, member: u32) -> &[AtomicU64] {
        assert!(member < MEMBERS, "no such member");
        let first = (MEMBERS_AT + member as usize * MEMBER_BYTES) / 8;
        &self.fixed_part()[first..first + MEMBER_BYTES / 8]
    }

    /// For each cache, the member that has it plus one, or 0.
    pub(super) fn caches(&self) -> &[AtomicU64] {
        &self.fixed_part()[CACHES_AT / 8..CACHES_AT / 8 + CACHES as usize]
    }

    /// The slot words, up to the limit.
    #[inline]
    pub(super) fn slots(&self) -> &[AtomicU64] {
        // SAFETY: inside the mapping, which lives as long as `self`; atomics may be shared with anybody.
        unsafe { self.slots.as_ref() }
    }

    /// The bitmaps of what others freed, by the slot of the span's head.
    #[inline]
    pub(super) fn bitmaps(&self) -> &[AtomicU64] {
        // SAFETY: as `slots`.
        unsafe { self.bitmaps.as_ref() }
    }

    /// The words of all grains, up to the limit.
    #[inline]
    pub(super) fn words(&self) -> &[AtomicU64] {
        // SAFETY: as `slots`.
        unsafe { self.words.as_ref() }
    }

    /// Touches the tables of a segment without changing them.
    pub(super) fn populate(&self, segment: u32) -> Result<(), Errno> {
        let [slots, bitmaps, words, _data] = self.geometry.parts_of_segment(segment);
        for (at, bytes) in [slots, bitmaps, words] {
            let start = at as usize / PAGE * PAGE;
            let end = (at + bytes) as usize;
            self.map.advise(start, (end - start).next_multiple_of(PAGE), Advice::LinuxPopulateWrite)?;
        }
        Ok(())
    }

    /// The slot words of a run that the caller claimed, or whose owner it is.
    pub(super) fn own_run(&self, head: usize, slots: usize) -> &[AtomicU64] {
        &self.slots()[head..head + slots]
    }

    /// As many slots as a word claims to reach, if they lie in one segment.
    pub(super) fn reached(&self, head: usize, now: Slot) -> Option<&[AtomicU64]> {
        let per_segment = self.geometry.segment_slots() as usize;
        let slots = usize::from(now.reach());
        let fits = (1..=per_segment - head % per_segment).contains(&slots);
        self.slots().get(head..head + slots).filter(|_| fits)
    }

    /// The same of a head of the shape of its class: a span's, or a large block's.
    pub(super) fn headed(&self, head: usize, now: Slot) -> Option<&[AtomicU64]> {
        let fits = match now.state() {
            SlotState::Head => {
                let shape = self.shapes.get(usize::from(now.class()))?;
                shape.blocks > 0 && shape.slots == u32::from(now.reach())
            }
            SlotState::Big => now.class() == BIG,
            _ => false,
        };
        self.reached(head, now).filter(|_| fits)
    }

    /// The slot words of the span or run whose head is `now`, if each slot that it reaches says that it is a part of it.
    pub(super) fn run(&self, head: usize, now: Slot) -> Option<&[AtomicU64]> {
        self.headed(head, now).filter(|run| slot::are_tails(run, 1, now))
    }

    /// The head of the span or run in which a block begins at a grain, and which block it is, if the slots that the block
    /// covers say so too.
    pub(super) fn block_at(&self, grain: usize) -> Option<(usize, Slot, u32)> {
        let at = grain / SLOT_GRAINS as usize;
        let own = slot::load(self.slots().get(at)?);
        let distance = if own.state() == SlotState::Tail { usize::from(own.reach()) } else { 0 };
        let head = at.checked_sub(distance)?;
        let now = if distance == 0 { own } else { slot::load(&self.slots()[head]) };
        let run = self.headed(head, now)?;
        let offset = grain - head * SLOT_GRAINS as usize;
        let (block, end) = match self.shapes.get(usize::from(now.class())) {
            Some(shape) => {
                // `block_at` is right inside of a span.
                let block = if distance < run.len() { shape.block_at(offset as u32) } else { return None };
                let begins = block < shape.blocks && (block * shape.grains) as usize == offset;
                (begins.then_some(block)?, (offset + shape.grains as usize).div_ceil(SLOT_GRAINS as usize))
            }
            None => ((offset == 0).then_some(0)?, run.len()),
        };
        let whole = slot::are_tails(&run[..end], distance.max(1), now);
        whole.then_some((head, now, block))
    }
}
