//! Handles from other processes: any 64 bits. Those of blocks that are held lead to them; all others are errors, and no
//! call with them changes anything.

#![no_main]

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::sync::Mutex;

use libfuzzer_sys::fuzz_target;
use tidekv_core::units::Bytes;
use tidekv_shm::RuntimeDir;
use tidekv_shm::arena::{Arena, ArenaConfig, ArenaName, Handle, LocalArena, Prefault};

struct World {
    arena: Arena,
    local: LocalArena,
    /// Held blocks and their lengths.
    held: BTreeMap<u64, usize>,
}

static WORLD: LazyLock<Mutex<World>> = LazyLock::new(|| {
    let dir = RuntimeDir::at(format!("/dev/shm/kvcached-fuzz-handle-{}", std::process::id()));
    let name = ArenaName::new("fuzz").expect("a name");
    let config =
        ArenaConfig { segment: Bytes::mib(1), limit: Bytes::mib(4), initial: Bytes::mib(2), ..ArenaConfig::default() };
    let arena = Arena::create(&dir, &name, &config, Prefault::Off).expect("an arena");
    std::fs::remove_dir_all(dir.path()).expect("our own folder");
    let mut local = arena.local().expect("a cache");
    let sizes = [4096, 8192, 20_000, 300_000, 70_000, 4096, 4096];
    let handles = sizes.map(|bytes| local.alloc(bytes).expect("room"));
    local.free(handles[5]).expect("held");
    let held = handles.iter().filter(|handle| arena.address(**handle).is_ok());
    let held = held.map(|handle| (handle.to_bits(), arena.block(*handle).expect("held").len())).collect();
    Mutex::new(World { arena, local, held })
});

fuzz_target!(|data: &[u8]| {
    let mut world = WORLD.lock().expect("one thread");
    let World { arena, local, held } = &mut *world;
    for chunk in data.chunks_exact(9) {
        let mut bits = u64::from_le_bytes(chunk[1..].try_into().expect("eight"));
        if chunk[0] % 2 == 1 {
            // Near one that is held: one field changed.
            let real = held.keys().nth(usize::from(chunk[0] / 2) % held.len()).copied().expect("some are held");
            let field = [0x3fff << 50, 0x3fff_ffff << 20, 0xf_ffff][usize::from(chunk[1]) % 3];
            bits = (real & !field) | (bits & field);
        }
        let Some(handle) = Handle::from_bits(bits) else { continue };
        assert_eq!(handle.to_bits(), bits);
        let known = held.get(&bits);
        assert_eq!(arena.address(handle).is_ok(), known.is_some(), "{handle:?}");
        assert_eq!(arena.block(handle).ok().map(|block| block.len()), known.copied(), "{handle:?}");
        if known.is_none() {
            assert!(local.free(handle).is_err() && local.share(handle).is_err() && local.retain(handle).is_err());
            assert!(local.release(handle).is_err() && local.resize(handle, 1).is_err());
        }
    }
    let report = arena.verify().expect("a report");
    assert_eq!((report.live, report.problems.len()), (held.len() as u64, 0));
});
