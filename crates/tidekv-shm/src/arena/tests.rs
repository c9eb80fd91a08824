//! One process: what the calls do, what is refused, and that nothing is lost whatever the order.

use super::class::BIG;
use super::slot::{NOBODY, Slot};
use super::*;

fn folder() -> (tempfile::TempDir, RuntimeDir) {
    let folder = tempfile::tempdir().unwrap();
    let dir = RuntimeDir::at(folder.path());
    (folder, dir)
}

fn name() -> ArenaName {
    ArenaName::new("test").unwrap()
}

fn small() -> ArenaConfig {
    ArenaConfig { segment: Bytes::mib(8), limit: Bytes::mib(32), initial: Bytes::mib(8), ..ArenaConfig::default() }
}

fn arena() -> (tempfile::TempDir, RuntimeDir, Arena) {
    let (folder, dir) = folder();
    let arena = Arena::create(&dir, &name(), &small(), Prefault::Off).unwrap();
    (folder, dir, arena)
}

fn sound(arena: &Arena) -> Report {
    let report = arena.verify().unwrap();
    assert_eq!(report.problems, Vec::<String>::new());
    report
}

#[test]
fn a_block_is_written_read_and_gone() {
    let (_folder, _dir, arena) = arena();
    let mut local = arena.local().unwrap();
    let handle = local.alloc(65_000).unwrap();
    let block = arena.block(handle).unwrap();
    assert_eq!(block.len(), 65_536);
    block.copy_in(13, b"some bytes that are not aligned").unwrap();
    let mut back = [0; 31];
    block.copy_out(13, &mut back).unwrap();
    assert_eq!(&back, b"some bytes that are not aligned");
    assert_eq!(block.copy_in(65_530, &[0; 7]), Err(HandleError::BeyondEnd));
    assert_eq!((sound(&arena).live, sound(&arena).held), (1, Bytes(65_536)));
    local.free(handle).unwrap();
    assert_eq!(arena.block(handle).unwrap_err(), HandleError::Stale);
    assert_eq!(local.free(handle), Err(HandleError::Stale));
    assert_eq!(sound(&arena).live, 0);
}

#[test]
fn a_run_that_somebody_is_making_or_giving_back_is_no_problem() {
    let (_folder, _dir, arena) = arena();
    let local = arena.local().unwrap();
    let run = local.attachment.tables.own_run(0, 8);
    assert!(slot::claim_run(run, local.id));
    slot::write_tails(run, 1, local.id, Slot::big(8));
    sound(&arena);
    // Half of it is given back.
    slot::store(&run[0], Slot::claimed(local.id, BIG, 8));
    (1..4).for_each(|at| assert!(slot::free_tail(&run[at], at)));
    sound(&arena);
    // Nobody answers for what is left.
    slot::store(&run[0], Slot::FREE);
    (4..8).for_each(|at| slot::store(&run[at], slot::load(&run[at]).owned_by(NOBODY, 0)));
    let problems = arena.verify().unwrap().problems;
    assert!(
        problems.len() == 4 && problems.iter().all(|problem| problem.contains("no head reaches it")),
        "{problems:?}"
    );
    run.iter().for_each(|slot| slot::store(slot, Slot::FREE));
}

#[test]
fn every_class_and_runs_come_and_go() {
    let (_folder, _dir, arena) = arena();
    let mut local = arena.local().unwrap();
    for grains in [1_usize, 2, 3, 5, 8, 9, 16, 17, 64, 65, 100, 255, 256, 257, 300, 2048] {
        for bytes in [grains * 4096 - 4095, grains * 4096] {
            let handle = local.alloc(bytes).unwrap();
            let block = arena.block(handle).unwrap();
            assert!(block.len() >= bytes && block.len() <= (bytes * 5 / 4).next_multiple_of(4096).max(4096), "{bytes}");
            block.copy_in(block.len() - 1, &[7]).unwrap();
            sound(&arena);
            local.free(handle).unwrap();
        }
    }
    let none = local.alloc(0).unwrap();
    assert_eq!(arena.block(none).unwrap().len(), 4096, "even nothing has a place");
    assert!(matches!(local.alloc((8 << 20) + 1), Err(AllocError::TooLarge { .. })));
    drop(local);
    assert_eq!(sound(&arena).spans, 1, "the block that is still held");
}

#[test]
fn blocks_are_aligned_as_asked_at_every_address() {
    let (_folder, dir, arena) = arena();
    let other = Arena::attach(&dir, &name(), Prefault::Off).unwrap();
    let mut local = arena.local().unwrap();
    for shift in 0..=21 {
        for bytes in [1, 5000, 70_000, 300_000, 1_500_000] {
            let handle = local.alloc_aligned(bytes, 1 << shift).unwrap();
            for arena in [&arena, &other] {
                assert_eq!(arena.address(handle).unwrap().as_ptr() as usize % (1 << shift), 0, "{bytes} at 2^{shift}");
            }
            assert!(arena.block(handle).unwrap().len() >= bytes);
            local.free(handle).unwrap();
        }
    }
    assert_ne!(arena.attachment.window.start(), other.attachment.window.start());
    for align in [0, 3, 4 << 20] {
        assert!(matches!(local.alloc_aligned(1, align), Err(AllocError::Alignment { .. })), "{align}");
    }
}

#[test]
fn it_grows_to_its_limit_and_says_so() {
    let (_folder, _dir, arena) = arena();
    let mut local = arena.local().unwrap();
    let blocks: Vec<Handle> = (0..).map_while(|_| local.alloc(1 << 20).ok()).collect();
    assert_eq!((blocks.len(), arena.segments()), (32, 4));
    let error = local.alloc(4096).unwrap_err();
    assert!(error.is_transient() && matches!(error, AllocError::Exhausted { .. }), "{error}");
    local.free(blocks[7]).unwrap();
    // The span of the freed block has three others, so it serves its own class.
    local.alloc(1 << 20).unwrap();
    drop(local);
    assert_eq!(sound(&arena).live, 32);
}

#[test]
fn memory_moves_between_classes() {
    let (_folder, _dir, arena) = arena();
    let mut local = arena.local().unwrap();
    for bytes in [4096, 1 << 20, 20_000, 3 << 20, 100_000] {
        let blocks: Vec<Handle> = (0..).map_while(|_| local.alloc(bytes).ok()).collect();
        let got: usize = blocks.iter().map(|block| arena.block(*block).unwrap().len()).sum();
        assert!(got >= 24 << 20, "{got} bytes in blocks of {bytes}");
        sound(&arena);
        blocks.into_iter().for_each(|block| local.free(block).unwrap());
    }
}

#[test]
fn resizing_stays_in_place_where_it_can() {
    let (_folder, _dir, arena) = arena();
    let mut local = arena.local().unwrap();
    let small = local.alloc(9 * 4096).unwrap();
    assert_eq!(local.resize(small, 10 * 4096).unwrap(), small, "its class has room");
    arena.block(small).unwrap().copy_in(0, b"kept").unwrap();
    let moved = local.resize(small, 200_000).unwrap();
    assert_ne!(moved, small);
    let mut bytes = [0; 4];
    arena.block(moved).unwrap().copy_out(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"kept");
    assert_eq!(arena.address(small), Err(HandleError::Stale));
    let big = local.alloc(2 << 20).unwrap();
    assert_eq!(local.resize(big, 4 << 20).unwrap(), big, "the slots behind it are free");
    assert_eq!(arena.block(big).unwrap().len(), 4 << 20);
    assert_eq!(local.resize(big, 1_200_000).unwrap(), big);
    assert_eq!(arena.block(big).unwrap().len(), 5 * (256 << 10));
    sound(&arena);
    local.share(big).unwrap();
    assert!(matches!(local.resize(big, 1), Err(AllocError::Handle(HandleError::NotHolder))));
}

#[test]
fn sharing_counts_in_this_process_and_across() {
    let (_folder, dir, arena) = arena();
    let other = Arena::attach(&dir, &name(), Prefault::Off).unwrap();
    let (mut ours, mut theirs) = (arena.local().unwrap(), other.local().unwrap());
    let handle = ours.alloc(5000).unwrap();
    assert_eq!(theirs.retain(handle), Err(HandleError::NotShared));
    assert_eq!(theirs.share(handle), Err(HandleError::NotHolder));
    ours.share(handle).unwrap();
    ours.share(handle).unwrap();
    assert_eq!(theirs.release(handle), Err(HandleError::NotHolder));
    theirs.retain(handle).unwrap();
    theirs.retain(handle).unwrap();
    ours.free(handle).unwrap();
    assert_eq!(ours.free(handle), Err(HandleError::NotHolder), "theirs is not ours to give back");
    theirs.release(handle).unwrap();
    assert!(arena.address(handle).is_ok(), "they hold it once more");
    theirs.free(handle).unwrap();
    assert_eq!(arena.address(handle), Err(HandleError::Stale));
    drop((ours, theirs));
    assert_eq!(sound(&arena).spans, 0);
}

#[test]
fn whoever_detaches_leaves_only_what_others_hold() {
    let (_folder, dir, arena) = arena();
    let other = Arena::attach(&dir, &name(), Prefault::Off).unwrap();
    let (mut ours, mut theirs) = (arena.local().unwrap(), other.local().unwrap());
    let handles: Vec<Handle> = (0..200).map(|_| theirs.alloc(30_000).unwrap()).collect();
    theirs.share(handles[3]).unwrap();
    ours.retain(handles[3]).unwrap();
    ours.free(handles[4]).unwrap();
    drop((theirs, other));
    let report = sound(&arena);
    assert_eq!((report.live, report.shared, report.members.len()), (0, 1, 1));
    ours.release(handles[3]).unwrap();
    assert_eq!(sound(&arena).held, Bytes(0));
}

#[test]
fn bad_handles_are_errors() {
    let (_folder, _dir, arena) = arena();
    let mut local = arena.local().unwrap();
    let good = local.alloc(20_000).unwrap();
    let forge = |segment: u64, block: u64, generation: u64| {
        Handle::from_bits(segment << 50 | generation << 20 | block).unwrap()
    };
    assert_eq!(arena.address(forge(1, 0, 1)), Err(HandleError::OutOfRange), "a segment that is not there yet");
    assert_eq!(arena.address(forge(16_383, 0, 1)), Err(HandleError::OutOfRange));
    assert_eq!(arena.address(forge(0, 2048, 1)), Err(HandleError::OutOfRange), "beyond the segment");
    assert_eq!(arena.address(forge(0, 1, 1)), Err(HandleError::Stale), "inside a block");
    assert_eq!(arena.address(forge(0, u64::from(good.block()), 2)), Err(HandleError::Stale), "another generation");
    assert_eq!(local.free(forge(0, 2047, 9)), Err(HandleError::Stale));
    assert_eq!(local.free(forge(3, 9999, 9)), Err(HandleError::OutOfRange));
    sound(&arena);
}

#[test]
fn names_are_taken_once_and_arenas_found_listed_and_gone() {
    let (_folder, dir, arena) = arena();
    assert!(matches!(Arena::create(&dir, &name(), &small(), Prefault::Off), Err(ArenaError::Exists { .. })));
    let other = ArenaName::new("other").unwrap();
    assert!(matches!(Arena::attach(&dir, &other, Prefault::Off), Err(ArenaError::NotFound { .. })));
    let second = Arena::open_or_create(&dir, &other, &small(), Prefault::Background).unwrap();
    let again = Arena::open_or_create(&dir, &other, &small(), Prefault::Off).unwrap();
    assert_eq!(second.id(), again.id());
    assert_ne!(second.id(), arena.id());
    assert_eq!(Arena::list(&dir).unwrap(), [other.clone(), name()]);
    assert!(!Arena::unlink_if_unused(&dir, &other).unwrap(), "in use");
    drop((second, again));
    assert!(Arena::unlink_if_unused(&dir, &other).unwrap() && Arena::unlink_if_unused(&dir, &other).unwrap());
    assert!(Arena::unlink(&dir, &name()).unwrap() && !Arena::unlink(&dir, &name()).unwrap());
    let mut local = arena.local().unwrap();
    assert!(local.alloc(4096).is_ok(), "whoever is attached keeps it");
    assert_eq!(Arena::list(&dir).unwrap(), []);
}

#[test]
fn the_file_is_private_whatever_the_umask() {
    use std::os::unix::fs::PermissionsExt;
    let (_folder, dir, arena) = arena();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(arena.path()), 0o600);
    std::fs::set_permissions(arena.path(), std::fs::Permissions::from_mode(0o644)).unwrap();
    let error = Arena::attach(&dir, &name(), Prefault::Off).unwrap_err();
    assert!(error.to_string().contains("its mode is 644"), "{error}");
}

#[test]
fn damaged_and_foreign_files_are_refused_in_words() {
    let (_folder, dir, arena) = arena();
    let path = arena.path().to_owned();
    let whole = std::fs::read(&path).unwrap();
    drop(arena);
    std::fs::remove_file(&path).unwrap();
    let refuse = |bytes: &[u8], expected: &str| {
        std::fs::write(&path, bytes).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let error = Arena::attach(&dir, &name(), Prefault::Off).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(Arena::inspect(&dir, &name()).is_err());
        assert!(Arena::unlink_if_unused(&dir, &name()).unwrap(), "what is damaged can be deleted");
    };
    refuse(&[], "cut short");
    refuse(&[0; 5000], "cut short");
    refuse(&[9; 5000], "its contents are something else");
    refuse(&whole[..whole.len() - 1], "cut short");
    let mut newer = whole.clone();
    newer[8] = 2;
    refuse(&newer, "has format 2, ours is 1");
    newer[8] = 1;
    newer[44] ^= 1;
    refuse(&newer, "wrong checksum");
    std::os::unix::fs::symlink("/dev/null", &path).unwrap();
    let error = Arena::attach(&dir, &name(), Prefault::Off).unwrap_err().to_string();
    assert!(error.contains("not a regular file"), "{error}");
}

#[test]
fn sizes_that_do_not_fit_are_refused_and_leave_nothing() {
    let (folder, dir) = folder();
    let refuse = |change: fn(&mut ArenaConfig)| {
        let mut config = small();
        change(&mut config);
        assert!(matches!(Arena::create(&dir, &name(), &config, Prefault::Off), Err(ArenaError::Config { .. })));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    };
    refuse(|config| config.grain = Bytes(5000));
    refuse(|config| config.grain = Bytes::kib(2));
    refuse(|config| config.segment = Bytes::kib(128));
    refuse(|config| config.segment = Bytes::gib(8));
    refuse(|config| config.limit = Bytes::gib(8 * 16_384));
    refuse(|config| config.limit = Bytes(0));
}

#[test]
fn a_full_file_system_is_an_error_and_leaves_nothing() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let dir = RuntimeDir::at(folder.path());
    let config = ArenaConfig {
        segment: Bytes::gib(4),
        limit: Bytes::gib(16 << 10),
        initial: Bytes::gib(16 << 10),
        ..ArenaConfig::default()
    };
    // The kernel gives back what it had found when it finds no more; memory is put behind one segment at a time, so ask
    // for one that is larger than the file system.
    let space = rustix::fs::statvfs("/dev/shm").unwrap();
    let config = ArenaConfig { grain: Bytes::mib(1), segment: Bytes::gib(1 << 10), ..config };
    if space.f_blocks * space.f_frsize >= config.segment.0 {
        return;
    }
    let error = Arena::create(&dir, &name(), &config, Prefault::Off).unwrap_err();
    assert!(matches!(error, ArenaError::NoSpace { .. }), "{error}");
    assert!(error.is_transient() && error.to_string().contains("file system is full"), "{error}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn places_for_processes_run_out_in_words() {
    let (_folder, dir, arena) = arena();
    let others: Vec<Arena> = (1..32).map(|_| Arena::attach(&dir, &name(), Prefault::Off).unwrap()).collect();
    let error = Arena::attach(&dir, &name(), Prefault::Off).unwrap_err();
    assert!(matches!(error, ArenaError::TooManyMembers { limit: 32, .. }), "{error}");
    drop(others);
    assert_eq!(sound(&arena).members.len(), 1);
    assert!(Arena::attach(&dir, &name(), Prefault::Off).is_ok());
}

#[test]
fn pages_are_touched_ahead() {
    let (_folder, dir) = folder();
    let config = ArenaConfig { huge_pages: HugePages::Thp, ..small() };
    let arena = Arena::create(&dir, &name(), &config, Prefault::Background).unwrap();
    arena.grow().unwrap();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while arena.prefaulted() < 2 {
        assert!(std::time::Instant::now() < deadline, "{} of 2 segments", arena.prefaulted());
        std::thread::yield_now();
    }
    assert!(matches!(arena.pages(), Pages::Small | Pages::ThpAdvised));
    drop(arena);
    let arena = Arena::attach(&dir, &name(), Prefault::Now).unwrap();
    assert_eq!(arena.segments(), 2);
}

/// They were touched by whoever used them first, until this process added one itself.
#[test]
fn segments_that_others_add_are_touched_ahead_too() {
    let (_folder, dir, other) = arena();
    let arena = Arena::attach(&dir, &name(), Prefault::Background).unwrap();
    let mut local = other.local().unwrap();
    let handle = loop {
        let handle = local.alloc(3 << 20).unwrap();
        if handle.segment() == 1 {
            break handle;
        }
    };
    assert_eq!(arena.block(handle).unwrap().len(), 3 << 20);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while arena.prefaulted() < 2 {
        assert!(std::time::Instant::now() < deadline, "{} of 2 segments", arena.prefaulted());
        std::thread::yield_now();
    }
}

#[test]
fn the_verifier_finds_what_is_wrong() {
    use std::sync::atomic::Ordering;
    let (_folder, dir, arena) = arena();
    let mut local = arena.local().unwrap();
    let handle = local.alloc(100_000).unwrap();
    let tables = &arena.attachment.tables;
    let grain = arena.attachment.locate(handle).unwrap();
    let spoil = |word: &std::sync::atomic::AtomicU64, value: u64, expected: &str| {
        let kept = word.swap(value, Ordering::SeqCst);
        let report = Arena::inspect(&dir, &name()).unwrap();
        assert!(report.problems.iter().any(|problem| problem.contains(expected)), "{expected}: {:?}", report.problems);
        word.store(kept, Ordering::SeqCst);
        sound(&arena);
    };
    spoil(&tables.words()[grain], 5 << 34 | 1 << 32 | 9, "member 9, who is not attached");
    spoil(&tables.words()[grain], 5 << 34 | 2 << 32, "held by nobody");
    spoil(&tables.words()[grain], 5 << 34 | 3 << 32, "was not told");
    spoil(&tables.words()[grain + 1], 5 << 34 | 1 << 32, "no block begins there");
    spoil(&tables.slots()[grain / 64], u64::MAX, "cannot be");
    spoil(&tables.slots()[grain / 64 + 1], 0, "is not part of");
    spoil(&tables.slots()[grain / 64], slot::Slot::claimed(700, 0, 0).0, "no such owner");
    spoil(&tables.caches()[900], 8, "member 7 is not attached");
}

#[test]
fn a_damaged_run_is_set_aside_and_the_rest_lives() {
    use std::sync::atomic::Ordering;
    let (_folder, dir, arena) = arena();
    let other = Arena::attach(&dir, &name(), Prefault::Off).unwrap();
    let mut theirs = other.local().unwrap();
    let (damaged, sound) = (theirs.alloc(100_000).unwrap(), theirs.alloc(20_000).unwrap());
    let slot = other.attachment.locate(damaged).unwrap() / 64;
    other.attachment.tables.slots()[slot].store(u64::MAX, Ordering::SeqCst);
    assert_eq!(other.block(damaged).unwrap_err(), HandleError::Stale, "nobody knows how long it is");
    other.block(sound).unwrap();
    drop((theirs, other));
    let (mut local, report) = (arena.local().unwrap(), arena.verify().unwrap());
    // A span of 8 slots: 18 blocks of 28 grains.
    assert_eq!((report.damaged, report.live), (Bytes::mib(2), 0));
    assert!(report.problems.iter().any(|problem| problem.contains("cannot be")), "{:?}", report.problems);
    let blocks = (0..).map_while(|_| local.alloc(4096).ok()).count();
    assert_eq!(blocks, (4 * 32 - 8) * 64, "everything else");
    assert_eq!(arena.verify().unwrap().damaged, Bytes::mib(2));
}

#[test]
fn segments_that_were_never_added_are_not_used() {
    use std::os::unix::fs::{FileExt, MetadataExt};
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let dir = RuntimeDir::at(folder.path());
    let arena = Arena::create(&dir, &name(), &small(), Prefault::Off).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(arena.path()).unwrap();
    let before = file.metadata().unwrap().blocks();
    file.write_all_at(&u64::MAX.to_le_bytes(), 128).unwrap();
    let other = Arena::attach(&dir, &name(), Prefault::Off).unwrap();
    for arena in [&arena, &other] {
        assert_eq!((arena.segments(), arena.verify().unwrap().segments), (1, 1));
        arena.recover().unwrap();
    }
    assert_eq!(file.metadata().unwrap().blocks(), before, "memory that nobody reserved");
    // Adding one puts it right.
    other.grow().unwrap();
    assert_eq!((arena.segments(), other.segments()), (2, 2));
    // A number that is too small takes nothing away.
    file.write_all_at(&[0; 8], 128).unwrap();
    let mut local = arena.local().unwrap();
    assert_eq!((0..).map_while(|_| local.alloc(1 << 20).ok()).count(), 32);
}

mod model {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Alloc { cache: usize, bytes: usize, align: u32 },
        Free { cache: usize, which: usize },
        Resize { cache: usize, which: usize, bytes: usize },
        Share { cache: usize, which: usize },
        NewCache { cache: usize },
        NewMember,
    }

    fn step() -> impl Strategy<Value = Step> {
        let bytes = || prop_oneof![6 => 0_usize..40_000, 2 => 0_usize..1_000_000, 1 => 1_000_000_usize..5_000_000];
        let cache = || 0_usize..3;
        let which = || 0_usize..1000;
        prop_oneof![
            8 => (cache(), bytes(), 0_u32..22).prop_map(|(cache, bytes, align)| Step::Alloc { cache, bytes, align }),
            7 => (cache(), which()).prop_map(|(cache, which)| Step::Free { cache, which }),
            2 => (cache(), which(), bytes()).prop_map(|(cache, which, bytes)| Step::Resize { cache, which, bytes }),
            1 => (cache(), which()).prop_map(|(cache, which)| Step::Share { cache, which }),
            1 => cache().prop_map(|cache| Step::NewCache { cache }),
            1 => Just(Step::NewMember),
        ]
    }

    /// Caches 0 and 1 are one member's, cache 2 another's.
    struct World {
        dir: RuntimeDir,
        arena: Arena,
        other: Arena,
        caches: Vec<LocalArena>,
        /// Where each held block begins, how many bytes it has at least, and whether it is `other`'s.
        held: BTreeMap<Handle, (usize, usize, bool)>,
        gone: Vec<Handle>,
    }

    impl World {
        fn new(dir: RuntimeDir) -> Self {
            let arena = Arena::create(&dir, &name(), &small(), Prefault::Off).unwrap();
            let other = Arena::attach(&dir, &name(), Prefault::Off).unwrap();
            let caches = [&arena, &arena, &other].map(|arena| arena.local().unwrap()).into();
            Self { dir, arena, other, caches, held: BTreeMap::new(), gone: Vec::new() }
        }

        fn pick(&self, which: usize) -> Option<Handle> {
            self.held.keys().nth(which % self.held.len().max(1)).copied()
        }

        fn add(&mut self, handle: Handle, bytes: usize, is_others: bool) {
            let block = self.arena.block(handle).unwrap();
            let start = self.arena.attachment.locate(handle).unwrap() * 4096;
            assert!(block.len() >= bytes);
            for (start_of_other, len, _) in self.held.values() {
                let apart = start + block.len() <= *start_of_other || start_of_other + len <= start;
                assert!(apart, "{handle:?} overlaps another block");
            }
            self.held.insert(handle, (start, block.len(), is_others));
        }

        fn step(&mut self, step: &Step) {
            match *step {
                Step::Alloc { cache, bytes, align } => match self.caches[cache].alloc_aligned(bytes, 1 << align) {
                    Ok(handle) => {
                        assert_eq!(self.arena.address(handle).unwrap().as_ptr() as usize % (1 << align), 0);
                        self.add(handle, bytes, cache == 2);
                    }
                    Err(error) => assert!(error.is_transient(), "{error}"),
                },
                Step::Free { cache, which } => {
                    let Some(handle) = self.pick(which) else { return };
                    self.caches[cache].free(handle).unwrap();
                    self.held.remove(&handle);
                    self.gone.push(handle);
                }
                Step::Resize { cache, which, bytes } => {
                    let Some(handle) = self.pick(which) else { return };
                    let (_, _, is_others) = self.held[&handle];
                    match self.caches[cache].resize(handle, bytes) {
                        Ok(new) => {
                            assert_eq!(is_others, cache == 2, "only its holder resizes a block");
                            self.held.remove(&handle);
                            if new != handle {
                                self.gone.push(handle);
                            }
                            self.add(new, bytes, is_others);
                        }
                        Err(AllocError::Handle(HandleError::NotHolder)) => assert_ne!(is_others, cache == 2),
                        Err(error) => assert!(error.is_transient(), "{error}"),
                    }
                }
                Step::Share { cache, which } => {
                    let Some(handle) = self.pick(which) else { return };
                    if self.held[&handle].2 != (cache == 2) {
                        return;
                    }
                    self.caches[cache].share(handle).unwrap();
                    let another = 2 * usize::from(cache != 2);
                    self.caches[another].retain(handle).unwrap();
                    self.caches[cache].release(handle).unwrap();
                    assert!(self.arena.address(handle).is_ok());
                    self.caches[another].release(handle).unwrap();
                    self.held.remove(&handle);
                    self.gone.push(handle);
                }
                Step::NewCache { cache } => {
                    let arena = if cache == 2 { &self.other } else { &self.arena };
                    self.caches[cache] = arena.local().unwrap();
                }
                Step::NewMember => {
                    self.caches.truncate(2);
                    // Detaching is like dying: what was this member's alone comes back.
                    self.other = Arena::attach(&self.dir, &name(), Prefault::Off).unwrap();
                    self.caches.push(self.other.local().unwrap());
                    let lost: Vec<Handle> =
                        self.held.iter().filter(|(_, held)| held.2).map(|(handle, _)| *handle).collect();
                    self.held.retain(|_, held| !held.2);
                    self.gone.extend(lost);
                }
            }
        }

        fn check(&mut self) {
            let report = sound(&self.arena);
            assert_eq!(report.live, self.held.len() as u64);
            assert_eq!(report.held.0, self.held.values().map(|(_, len, _)| *len as u64).sum::<u64>());
            for handle in self.held.keys() {
                assert!(self.arena.address(*handle).is_ok() && self.other.address(*handle).is_ok());
            }
            for handle in &self.gone {
                assert_eq!(self.arena.address(*handle), Err(HandleError::Stale));
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

        /// Any sequence of calls does what a table of held blocks says, and the verifier finds nothing after each.
        #[test]
        fn the_arena_does_what_a_table_says(steps in prop::collection::vec(step(), 1..60)) {
            let (_folder, dir) = folder();
            let mut world = World::new(dir);
            for step in &steps {
                world.step(step);
                world.check();
            }
            world.caches.clear();
            for handle in world.held.keys() {
                prop_assert!(world.arena.address(*handle).is_ok());
            }
        }
    }
}
