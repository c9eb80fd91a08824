//! Whether everything in an arena fits together: the check behind `kvctl arena check` and after every killed process in
//! the tests.
//!
//! It only reads, and others may be at work meanwhile, so what looks wrong is looked at again: a problem is reported when
//! it is there each of a few times. In an arena that nobody uses just now every problem is real.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use tidekv_core::units::Bytes;

use super::class::SLOT_GRAINS;
use super::file::is_alive;
use super::format::{ArenaId, Head};
use super::geometry::{CACHES, MEMBERS};
use super::slot::{self, FOR_MEMBER, NOBODY, Slot, SlotState};
use super::tables::Tables;
use super::word::{self, State, Word};

/// How often something must look wrong.
const LOOKS: u32 = 4;
/// More problems than this say no more.
const PROBLEMS_MAX: usize = 100;

/// What is in an arena.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Which arena it is, as hexadecimal digits.
    pub id: String,
    /// Segments that exist.
    pub segments: u32,
    /// What one has.
    pub segment_bytes: Bytes,
    /// What all may have.
    pub limit: Bytes,
    /// What no span and no large block uses.
    pub unused: Bytes,
    /// What is set aside because a word of its slots was damaged: nobody uses it again.
    pub damaged: Bytes,
    /// Spans of blocks of one size.
    pub spans: u64,
    /// Those of them that nobody owns at the moment.
    pub orphans: u64,
    /// Blocks that one process has.
    pub live: u64,
    /// Blocks that are shared.
    pub shared: u64,
    /// Blocks that were freed from afar and not collected yet.
    pub freed: u64,
    /// The bytes of all blocks that are held.
    pub held: Bytes,
    /// The processes that are attached, or were when they died.
    pub members: Vec<MemberState>,
    /// What does not fit together; empty in a sound arena.
    pub problems: Vec<String>,
}

/// A process that is attached, or was when it died.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemberState {
    /// Which of the arena's places it has.
    pub member: u32,
    /// Its process number, for people.
    pub pid: u32,
    /// Whether it lives: it holds its lock. What the dead left is taken back by whoever needs memory next.
    pub alive: bool,
    /// When it attached, ms of `CLOCK_MONOTONIC`.
    pub attached_ms: u64,
    /// Thread caches that it has.
    pub caches: u32,
    /// Blocks that it holds, shared ones included.
    pub blocks: u64,
    /// What these have.
    pub held: Bytes,
}

/// Looks at everything. `own` is the asker's member, whose lock it cannot see.
pub(super) fn verify(tables: &Tables, head: &Head, file: BorrowedFd<'_>, own: Option<u32>) -> Report {
    let mut lasting: Option<BTreeSet<String>> = None;
    let (mut report, mut damaged) = (Report::default(), Bytes(u64::MAX));
    for _ in 0..LOOKS {
        let mut look = Look::new(tables, head, file, own);
        look.run();
        report = look.report;
        let found: BTreeSet<String> = report.problems.drain(..).collect();
        let both = match lasting {
            None => found,
            Some(before) => before.intersection(&found).cloned().collect(),
        };
        let sound = both.is_empty();
        damaged = damaged.min(report.damaged);
        lasting = Some(both);
        if sound {
            break;
        }
        std::thread::yield_now();
    }
    report.damaged = damaged;
    report.problems = lasting.unwrap_or_default().into_iter().take(PROBLEMS_MAX).collect();
    report
}

struct Look<'a> {
    tables: &'a Tables,
    head: &'a Head,
    /// For each member its place in the report.
    known: [Option<usize>; MEMBERS as usize],
    report: Report,
}

impl<'a> Look<'a> {
    fn new(tables: &'a Tables, head: &'a Head, file: BorrowedFd<'_>, own: Option<u32>) -> Self {
        let mut known = [None; MEMBERS as usize];
        let mut members = Vec::new();
        for member in 0..MEMBERS {
            let Some(record) = tables.member(member) else { continue };
            known[member as usize] = Some(members.len());
            let alive = own == Some(member) || is_alive(file, member).unwrap_or(true);
            let (pid, attached_ms) = (record.pid, record.attached_ms);
            members.push(MemberState { member, pid, alive, attached_ms, caches: 0, blocks: 0, held: Bytes(0) });
        }
        let ArenaId(id) = head.id;
        let id = id.iter().fold(String::new(), |mut text, byte| {
            // Writing to a string does not fail.
            let _ = write!(text, "{byte:02x}");
            text
        });
        let geometry = head.geometry;
        let report = Report {
            id,
            segments: tables.segments(file),
            segment_bytes: geometry.segment_bytes(),
            limit: geometry.limit(),
            members,
            ..Report::default()
        };
        Self { tables, head, known, report }
    }

    fn problem(&mut self, text: String) {
        if self.report.problems.len() < PROBLEMS_MAX {
            self.report.problems.push(text);
        }
    }

    fn run(&mut self) {
        self.caches();
        let end = (self.report.segments as usize) << self.head.geometry.slot_bits();
        let mut at = 0;
        while at < end {
            let now = slot::load(&self.tables.slots()[at]);
            at += match (now.state(), self.tables.run(at, now)) {
                (SlotState::Free, _) => {
                    self.report.unused.0 += self.head.geometry.slot_bytes();
                    self.all_free(at, 1);
                    1
                }
                (SlotState::Head, Some(run)) => {
                    self.span(at, now);
                    run.len()
                }
                (SlotState::Big, Some(run)) => {
                    self.big(at, now);
                    run.len()
                }
                (SlotState::Claimed, _) => {
                    self.owner(at, now);
                    1
                }
                (SlotState::Tail, _) => {
                    self.tail_alone(at, now);
                    1
                }
                (SlotState::Head | SlotState::Big | SlotState::Damaged, _) => {
                    match self.tables.headed(at, now) {
                        Some(_) => self.tails(at, now),
                        None => self.problem(format!("slot {at}: {now:?} cannot be")),
                    }
                    self.set_aside();
                    1
                }
            };
        }
    }

    fn set_aside(&mut self) {
        self.report.damaged.0 += self.head.geometry.slot_bytes();
    }

    fn caches(&mut self) {
        for (at, cache) in self.tables.caches().iter().enumerate() {
            let Some(member) = cache.load(Ordering::Acquire).checked_sub(1) else { continue };
            let known = usize::try_from(member).ok().and_then(|member| *self.known.get(member)?);
            match known {
                Some(place) => self.report.members[place].caches += 1,
                None => self.problem(format!("cache {}: member {member} is not attached", at + 1)),
            }
        }
    }

    /// Whether somebody answers for a slot.
    fn owner(&mut self, at: usize, now: Slot) {
        let owner = now.owner();
        let known = match owner {
            NOBODY => now.state() != SlotState::Claimed,
            member if member & FOR_MEMBER != 0 => {
                self.known.get(usize::from(member & !FOR_MEMBER)).is_some_and(Option::is_some)
            }
            cache => {
                let cache = self.tables.caches().get(usize::from(cache) - 1);
                u32::from(owner) <= CACHES && cache.is_some_and(|cache| cache.load(Ordering::Acquire) != 0)
            }
        };
        if !known {
            self.problem(format!("slot {at}: {now:?}, but there is no such owner"));
        }
    }

    /// A tail that the walk did not pass over with its head. Whoever makes, gives back or cuts a run has such tails for a
    /// moment, which is long where he is not given a processor: the run's head is claimed, or he is named as their owner.
    fn tail_alone(&mut self, at: usize, now: Slot) {
        let distance = usize::from(now.reach());
        let answers = at.checked_sub(distance).is_some_and(|head| {
            let head_now = slot::load(&self.tables.slots()[head]);
            let run = self.tables.run(head, head_now);
            let reached = run.map_or(usize::from(head_now.reach()), <[AtomicU64]>::len) > distance;
            (run.is_some() || head_now.state() == SlotState::Claimed) && (reached || now.owner() != NOBODY)
        });
        if answers {
            self.owner(at, now);
        } else {
            self.problem(format!("slot {at}: {now:?}, but no head reaches it"));
            self.set_aside();
        }
    }

    fn span(&mut self, head: usize, now: Slot) {
        let shape = self.tables.shapes[usize::from(now.class())];
        self.report.spans += 1;
        self.report.orphans += u64::from(now.owner() == NOBODY);
        self.owner(head, now);
        self.tails(head, now);
        let first = head * SLOT_GRAINS as usize;
        let words = self.words(first, usize::from(now.reach()) * SLOT_GRAINS as usize);
        let bitmap = self.tables.bitmaps()[head].load(Ordering::Acquire);
        let bytes = Bytes(u64::from(shape.grains) << self.head.geometry.grain_shift);
        for (at, word) in words.iter().enumerate() {
            let now = word::load(word);
            let block = at / shape.grains as usize;
            if at % shape.grains as usize != 0 || block >= shape.blocks as usize {
                self.must_be_free(first + at, now);
                continue;
            }
            // Looked at again after the bitmap, which is written second.
            let announced =
                bitmap & (1 << block) != 0 || self.tables.bitmaps()[head].load(Ordering::Acquire) & (1 << block) != 0;
            if now.state() == State::Freed && !announced {
                self.problem(format!("grain {}: {now:?}, but its span was not told", first + at));
            }
            self.block(first + at, now, bytes);
        }
    }

    fn big(&mut self, head: usize, now: Slot) {
        self.tails(head, now);
        let (first, slots) = (head * SLOT_GRAINS as usize, usize::from(now.reach()));
        let word = word::load(&self.tables.words()[first]);
        if matches!(word.state(), State::Free) {
            self.problem(format!("slot {head}: {now:?}, but its block is free"));
        }
        self.block(first, word, Bytes(slots as u64 * self.head.geometry.slot_bytes()));
        for at in 1..slots * SLOT_GRAINS as usize {
            let now = word::load(&self.tables.words()[first + at]);
            self.must_be_free(first + at, now);
        }
    }

    fn tails(&mut self, head: usize, now: Slot) {
        for at in 1..usize::from(now.reach()) {
            let tail = slot::load(&self.tables.slots()[head + at]);
            let fits = tail.state() == SlotState::Tail && usize::from(tail.reach()) == at;
            if !fits || tail.class() != now.class() {
                self.problem(format!("slot {}: {tail:?} is not part of {now:?} at {head}", head + at));
            } else if now.state() == SlotState::Head && tail.owner() != now.owner() && tail.owner() != NOBODY {
                self.problem(format!("slot {}: {tail:?} has another owner than {now:?} at {head}", head + at));
            }
        }
    }

    /// The words of consecutive grains.
    fn words(&self, first: usize, grains: usize) -> &'a [AtomicU64] {
        &self.tables.words()[first..first + grains]
    }

    fn all_free(&mut self, slot: usize, slots: usize) {
        let first = slot * SLOT_GRAINS as usize;
        for (at, word) in self.words(first, slots * SLOT_GRAINS as usize).iter().enumerate() {
            self.must_be_free(first + at, word::load(word));
        }
    }

    fn must_be_free(&mut self, grain: usize, now: Word) {
        if now.state() != State::Free || now.who() != 0 {
            self.problem(format!("grain {grain}: {now:?}, but no block begins there"));
        }
    }

    fn block(&mut self, grain: usize, now: Word, bytes: Bytes) {
        let holders: u32 = match now.state() {
            State::Free => return,
            State::Freed => {
                self.report.freed += 1;
                return;
            }
            State::Live => {
                self.report.live += 1;
                1_u32.checked_shl(now.who()).unwrap_or(0)
            }
            State::Shared => {
                self.report.shared += 1;
                now.who()
            }
        };
        self.report.held.0 += bytes.0;
        if holders == 0 || now.generation() == 0 {
            self.problem(format!("grain {grain}: {now:?} is held by nobody"));
        }
        for member in (0..MEMBERS).filter(|member| holders & (1 << member) != 0) {
            match self.known[member as usize] {
                Some(place) => {
                    self.report.members[place].blocks += 1;
                    self.report.members[place].held.0 += bytes.0;
                }
                None => self.problem(format!("grain {grain}: {now:?} is held by member {member}, who is not attached")),
            }
        }
    }
}
