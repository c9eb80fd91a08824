//! A living arena in which words are written over: steps of several members in one process, and what must hold whatever
//! the words are. Used by the test `arena_words` and by the fuzz target of the same name.
//!
//! ```text
//!   members 0 and 1     live: each has a cache, allocates, frees, shares, leaves, joins
//!   members 2 and 3     dead: they left spans, runs and shared blocks behind; members 0 and 1 recover them
//!   damage              any word of head, members, caches, slots, bitmaps and block words becomes any value
//! ```
//!
//! What holds: every call returns and none panics; no block reaches outside of its segment; and a block that has nothing
//! to do with a damaged word is held, has its bytes, overlaps no other such block, and can be freed. A word has to do
//! with: its block, its span or run, or all spans of its cache. A slot that was damaged once stays suspect.

#![allow(clippy::cast_possible_truncation, reason = "numbers of words and slots, on a machine of 64 bits")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;

use tidekv_core::units::Bytes;
use tidekv_shm::RuntimeDir;
use tidekv_shm::arena::{Arena, ArenaConfig, ArenaName, Handle, LocalArena, Prefault};
use tidekv_shm::exchange::{Exchange, ExchangeConfig, Key, Meta, PublishOptions};

const SEGMENT: u64 = 4 << 20;
const SEGMENTS: usize = 4;
const INITIAL: u32 = 2;
const SLOTS_OF_SEGMENT: usize = 16;
const SLOT_GRAINS: usize = 64;
const GRAIN: usize = 4096;
const SLOTS: usize = SEGMENTS * SLOTS_OF_SEGMENT;
/// What blocks are asked for: of one slot, of spans of several, and runs of their own.
const SIZES: [usize; 8] = [1, 4096, 10_000, 60_000, 200_000, 500_000, 1_000_000, 1_500_000];
/// The parts of the tables: the first word, and how many. As in `docs/formats/arena.md`.
pub(crate) const HEAD: (usize, usize) = (0, 33);
pub(crate) const MEMBERS: (usize, usize) = (4096 / 8, 32 * 16);
pub(crate) const CACHES: (usize, usize) = (8192 / 8, 1024);
pub(crate) const SLOT_WORDS: (usize, usize) = (16_384 / 8, SLOTS);
pub(crate) const BITMAPS: (usize, usize) = (20_480 / 8, SLOTS);
pub(crate) const BLOCK_WORDS: (usize, usize) = (24_576 / 8, SLOTS * SLOT_GRAINS);
const TABLES: usize = 24_576 + SLOTS * SLOT_GRAINS * 8;
const PARTS: [(usize, usize); 8] = [HEAD, MEMBERS, CACHES, SLOT_WORDS, SLOT_WORDS, SLOT_WORDS, BITMAPS, BLOCK_WORDS];

/// What a step does; its first byte modulo their number.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Do {
    Alloc,
    AllocToo,
    Free,
    FreeToo,
    Share,
    Resize,
    Recover,
    Verify,
    Rejoin,
    NewCache,
    FreeAny,
    Damage,
    DamageToo,
    Exchange,
    Grow,
}

const DEEDS: [Do; 15] = [
    Do::Alloc,
    Do::AllocToo,
    Do::Free,
    Do::FreeToo,
    Do::Share,
    Do::Resize,
    Do::Recover,
    Do::Verify,
    Do::Rejoin,
    Do::NewCache,
    Do::FreeAny,
    Do::Damage,
    Do::DamageToo,
    Do::Exchange,
    Do::Grow,
];

/// A step that is no damage.
pub(crate) fn step(what: Do, member: u8, which: u8) -> [u8; 3] {
    [what as u8, member, which]
}

/// A step that writes a value over a word, given by its place among all words of the tables.
pub(crate) fn damage(word: usize, value: u64) -> Vec<u8> {
    let part = PARTS.iter().position(|(first, count)| (*first..first + count).contains(&word)).expect("in the tables");
    let at = u16::try_from(word - PARTS[part].0).expect("few").to_le_bytes();
    let mut bytes = vec![Do::Damage as u8, u8::try_from(part).expect("few"), 0, at[0], at[1]];
    bytes.extend(value.to_le_bytes());
    bytes
}

/// An arena, and its tables as the dead left them.
pub(crate) struct World {
    dir: RuntimeDir,
    name: ArenaName,
    file: File,
    tables: Vec<u8>,
    dead: Vec<Handle>,
}

impl World {
    pub(crate) fn new(dir: &RuntimeDir) -> Self {
        let name = ArenaName::new("words").expect("a name");
        let config = ArenaConfig {
            segment: Bytes(SEGMENT),
            limit: Bytes(SEGMENT * SEGMENTS as u64),
            initial: Bytes(SEGMENT * u64::from(INITIAL)),
            ..ArenaConfig::default()
        };
        let mut arenas = vec![Arena::create(dir, &name, &config, Prefault::Off).expect("an arena")];
        arenas.extend((1..4).map(|_| Arena::attach(dir, &name, Prefault::Off).expect("an arena")));
        let file = File::options().read(true).write(true).open(arenas[0].path()).expect("the file");
        let mut dying: Vec<LocalArena> = arenas[2..].iter().map(|arena| arena.local().expect("a cache")).collect();
        let mut dead = Vec::new();
        for (at, bytes) in SIZES.iter().cycle().take(20).enumerate() {
            let Ok(handle) = dying[at % 2].alloc(*bytes) else { continue };
            if at % 3 == 0 {
                dying[at % 2].share(handle).expect("ours");
                arenas[2 + (at + 1) % 2].retain(handle).expect("shared");
            }
            dead.push(handle);
        }
        // Freed from afar, and not collected.
        dying[0].free(dead[1]).expect("held");
        arenas.drain(..2);
        let mut tables = vec![0; TABLES];
        file.read_exact_at(&mut tables, 0).expect("the tables");
        Self { dir: dir.clone(), name, file, tables, dead }
    }

    /// The word at a place, as every run begins with it.
    #[allow(dead_code, reason = "the fuzz target chooses blindly")]
    pub(crate) fn word(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.tables[at * 8..at * 8 + 8].try_into().expect("eight"))
    }

    /// Does the steps; panics if something does not hold.
    pub(crate) fn run(&self, mut steps: &[u8]) {
        self.file.write_all_at(&self.tables, 0).expect("a write");
        let mut run = Run {
            world: self,
            members: Vec::new(),
            held: BTreeMap::new(),
            suspect_slots: BTreeSet::new(),
            suspect_words: BTreeSet::new(),
            suspect_caches: BTreeSet::new(),
            suspect_segments: false,
            known: self.dead.clone(),
        };
        run.members = (0..2).map(|_| run.join()).collect();
        while let [what, member, which, rest @ ..] = steps {
            steps = rest;
            match DEEDS[usize::from(*what) % DEEDS.len()] {
                Do::Damage | Do::DamageToo => {
                    let Some((bytes, rest)) = steps.split_first_chunk::<10>() else { break };
                    steps = rest;
                    run.damage(usize::from(*member), *which, bytes);
                }
                deed => run.step(deed, usize::from(*member), usize::from(*which)),
            }
        }
        run.end();
    }
}

struct Member {
    arena: Arena,
    local: LocalArena,
}

/// A block that nothing damaged has to do with.
struct Held {
    member: usize,
    start: usize,
    grains: usize,
}

struct Run<'a> {
    world: &'a World,
    members: Vec<Option<Member>>,
    held: BTreeMap<Handle, Held>,
    suspect_slots: BTreeSet<usize>,
    suspect_words: BTreeSet<usize>,
    suspect_caches: BTreeSet<u16>,
    /// The number of segments: one who has not met a later one does not know it before one who has puts it right.
    suspect_segments: bool,
    /// Handles that anybody may have.
    known: Vec<Handle>,
}

fn grain_of(handle: Handle) -> usize {
    handle.segment() as usize * SLOTS_OF_SEGMENT * SLOT_GRAINS + handle.block() as usize
}

fn slots_of(start: usize, grains: usize) -> std::ops::RangeInclusive<usize> {
    start / SLOT_GRAINS..=(start + grains - 1) / SLOT_GRAINS
}

impl Run<'_> {
    fn join(&self) -> Option<Member> {
        match Arena::attach(&self.world.dir, &self.world.name, Prefault::Off) {
            Ok(arena) => arena.local().ok().map(|local| Member { arena, local }),
            Err(error) => {
                assert!(!error.to_string().is_empty());
                None
            }
        }
    }

    fn word(&self, at: usize) -> u64 {
        let mut bytes = [0; 8];
        self.world.file.read_exact_at(&mut bytes, at as u64 * 8).expect("a read");
        u64::from_le_bytes(bytes)
    }

    fn step(&mut self, deed: Do, member: usize, which: usize) {
        let at = member % self.members.len();
        if let Do::Rejoin = deed {
            self.leave(at);
            self.members[at] = self.join();
            return;
        }
        let Some(mut member) = self.members[at].take() else { return };
        match deed {
            Do::Alloc | Do::AllocToo => {
                let bytes = SIZES[which % SIZES.len()];
                let align = 1 << (which / SIZES.len() % 22);
                let align = if which < 128 { 1 } else { align };
                if let Ok(handle) = member.local.alloc_aligned(bytes, align) {
                    self.add(at, &member, handle, bytes);
                }
            }
            Do::Free | Do::FreeToo => {
                if let Some(handle) = self.held.keys().nth(which % self.held.len().max(1)).copied() {
                    self.check(&member, handle);
                    member.local.free(handle).expect("held and sound");
                    self.held.remove(&handle);
                }
            }
            Do::Share => {
                let ours = self.held.iter().filter(|(_, held)| held.member == at).map(|(handle, _)| *handle);
                let ours: Vec<Handle> = ours.collect();
                if let Some(handle) = ours.get(which % ours.len().max(1)) {
                    member.local.share(*handle).expect("ours");
                    for other in self.members.iter_mut().flatten() {
                        other.local.retain(*handle).expect("shared and sound");
                        other.local.release(*handle).expect("retained");
                    }
                    self.check(&member, *handle);
                    member.local.release(*handle).expect("the last");
                    self.held.remove(handle);
                }
            }
            Do::Resize => {
                let handle = self.known[which % self.known.len()];
                let bytes = SIZES[which / 7 % SIZES.len()];
                if let Ok(new) = member.local.resize(handle, bytes) {
                    self.held.remove(&handle);
                    self.add(at, &member, new, bytes);
                }
            }
            Do::Recover => drop(member.arena.recover()),
            Do::Verify => {
                // A look that finds something wrong looks again and gives way in between, so one is enough.
                if which.is_multiple_of(2) {
                    member.arena.verify().expect("a report");
                } else {
                    let _ = Arena::inspect(&self.world.dir, &self.world.name);
                }
            }
            Do::NewCache => {
                if let Ok(local) = member.arena.local() {
                    member.local = local;
                }
            }
            Do::FreeAny => {
                let handle = self.known[which % self.known.len()];
                let (_, _) = (member.local.retain(handle), member.local.release(handle));
                if member.local.free(handle).is_ok() {
                    self.held.remove(&handle);
                }
            }
            Do::Exchange => exchange(&mut member),
            Do::Grow => drop(member.arena.grow()),
            Do::Rejoin | Do::Damage | Do::DamageToo => {}
        }
        self.members[at] = Some(member);
    }

    fn leave(&mut self, at: usize) {
        self.members[at] = None;
        // What was its alone goes with it.
        self.held.retain(|_, held| held.member != at);
    }

    /// A block that was handed out. It lies inside of its segment, whatever was damaged; and if nothing that it has to do
    /// with was, it overlaps no other such block.
    fn add(&mut self, at: usize, member: &Member, handle: Handle, bytes: usize) {
        let (start, grains) = (grain_of(handle), bytes.div_ceil(GRAIN).max(1));
        let in_segment = handle.block() as usize + grains <= SLOTS_OF_SEGMENT * SLOT_GRAINS;
        assert!(handle.segment() < member.arena.segments() && in_segment, "{handle:?} of {bytes} bytes is outside");
        self.known.push(handle);
        if let Ok(block) = member.arena.block(handle) {
            let end = handle.block() as usize * GRAIN + block.len();
            assert!(end as u64 <= SEGMENT, "{handle:?} has {} bytes", block.len());
            block.copy_out(block.len() - 1, &mut [0]).expect("inside");
        }
        if self.suspect_caches.contains(&member.local.id()) {
            let slots: Vec<usize> = slots_of(start, grains).flat_map(|slot| self.run_of(slot)).collect();
            self.suspect_slots.extend(slots);
        }
        let suspect = (self.suspect_segments && handle.segment() >= INITIAL)
            || self.suspect_words.contains(&start)
            || slots_of(start, grains).any(|slot| self.suspect_slots.contains(&slot));
        if suspect {
            return;
        }
        let block = member.arena.block(handle).expect("handed out, and sound");
        assert!(block.len() >= bytes, "{handle:?} has {} of {bytes} bytes", block.len());
        for (other, held) in &self.held {
            let apart = start + grains <= held.start || held.start + held.grains <= start;
            assert!(apart, "{handle:?} of {bytes} bytes overlaps {other:?}");
        }
        block.copy_in(0, &handle.to_bits().to_le_bytes()).expect("inside");
        block.copy_in(grains * GRAIN - 8, &handle.to_bits().to_le_bytes()).expect("inside");
        self.held.insert(handle, Held { member: at, start, grains });
    }

    /// A sound block is held and has its bytes.
    fn check(&self, member: &Member, handle: Handle) {
        let held = &self.held[&handle];
        let block = member.arena.block(handle).unwrap_or_else(|error| panic!("{handle:?} is sound: {error}"));
        for at in [0, held.grains * GRAIN - 8] {
            let mut bytes = [0; 8];
            block.copy_out(at, &mut bytes).expect("inside");
            assert_eq!(u64::from_le_bytes(bytes), handle.to_bits(), "somebody wrote to {handle:?} at {at}");
        }
    }

    /// The slots of the run that a slot is part of, as the words say.
    fn run_of(&self, slot: usize) -> Vec<usize> {
        let word = |slot: usize| self.word(SLOT_WORDS.0 + slot);
        let reach = |word: u64| word as usize & 0xffff;
        let now = word(slot);
        let head = if now >> 61 == 3 { slot.saturating_sub(reach(now)) } else { slot };
        let end = head / SLOTS_OF_SEGMENT * SLOTS_OF_SEGMENT + SLOTS_OF_SEGMENT;
        let slots = if matches!(word(head) >> 61, 1 | 2 | 4) { reach(word(head)) } else { 1 };
        (head..(head + slots.max(1)).min(end)).chain([slot]).collect()
    }

    fn damage(&mut self, part: usize, kind: u8, bytes: &[u8; 10]) {
        let (first, count) = PARTS[part % PARTS.len()];
        let [low, high, value @ ..] = *bytes;
        let at = usize::from(u16::from_le_bytes([low, high])) % count;
        let value = u64::from_le_bytes(value);
        let now = self.word(first + at);
        let value = match kind % 4 {
            0 => value,
            1 => now ^ 1 << (value % 64),
            // A word that is right elsewhere.
            2 => self.word(first + value as usize % count),
            // Small numbers in one of the fields of a slot word.
            _ => now & !(0xffff << (value % 4 * 16)) | (value >> 8 & 0x3f) << (value % 4 * 16),
        };
        match PARTS[part % PARTS.len()] {
            SLOT_WORDS => {
                let run = self.run_of(at);
                self.suspect_slots.extend(run);
            }
            BLOCK_WORDS => drop(self.suspect_words.insert(at)),
            CACHES => {
                self.suspect_caches.insert(at as u16 + 1);
                let owner = |slot: &usize| self.word(SLOT_WORDS.0 + slot) >> 40 & 0xffff;
                let owned: Vec<usize> = (0..SLOTS).filter(|slot| owner(slot) == at as u64 + 1).collect();
                let owned: Vec<usize> = owned.into_iter().flat_map(|slot| self.run_of(slot)).collect();
                self.suspect_slots.extend(owned);
            }
            HEAD if at == 16 => self.suspect_segments = true,
            _ => {}
        }
        let sound = |held: &Held| {
            let known = !self.suspect_segments || held.start < INITIAL as usize * SLOTS_OF_SEGMENT * SLOT_GRAINS;
            known
                && !self.suspect_words.contains(&held.start)
                && slots_of(held.start, held.grains).all(|slot| !self.suspect_slots.contains(&slot))
        };
        self.held.retain(|_, held| sound(held));
        self.world.file.write_all_at(&value.to_le_bytes(), (first + at) as u64 * 8).expect("a write");
    }

    fn end(mut self) {
        for at in 0..self.members.len() {
            let Some(mut member) = self.members[at].take() else { continue };
            member.arena.recover().expect("recovery");
            for handle in self.held.keys() {
                self.check(&member, *handle);
            }
            let ours: Vec<Handle> =
                self.held.iter().filter(|(_, held)| held.member == at).map(|(handle, _)| *handle).collect();
            for handle in ours {
                member.local.free(handle).expect("held and sound");
                self.held.remove(&handle);
            }
            for bytes in SIZES {
                if let Ok(handle) = member.local.alloc(bytes) {
                    self.add(at, &member, handle, bytes);
                }
            }
            drop(member);
            self.leave(at);
        }
        // The head as it was, so that somebody can look what is left.
        self.world.file.write_all_at(&self.world.tables[..80], 0).expect("a write");
        let report = Arena::inspect(&self.world.dir, &self.world.name).expect("a report");
        assert!(report.unused.0 <= SEGMENT * SEGMENTS as u64);
        let member = self.join().expect("nobody else is attached");
        member.arena.recover().expect("recovery");
    }
}

/// Publishes a block, takes it, and subscribes. What fails because of damage says so.
fn exchange(member: &mut Member) {
    let Ok(exchange) = Exchange::open(&member.arena, &ExchangeConfig { entries: 64 }) else { return };
    let subscription = exchange.subscribe();
    let mut publisher = exchange.publisher(PublishOptions::default());
    if let Ok(handle) = member.local.alloc(5000) {
        match publisher.publish(Key(7), handle, Meta::of_bytes(5000)) {
            Ok(()) => drop(exchange.take(Key(7))),
            Err(_) => drop(member.local.free(handle)),
        }
    }
    if let Ok(mut subscription) = subscription {
        let _ = subscription.poll();
    }
}
