//! Arenas that anybody of the same user may have damaged. Whatever stands in the file, attaching gives an error or an
//! arena in which every call returns: no panic, no hang, no address outside.
//!
//! The first byte of an input chooses what the rest is: the first bytes of a file; or a list of patches (three bytes of
//! place, one of length, then bytes) to the tables of an arena that two processes used, made before attaching or after.

#![no_main]

use std::os::unix::fs::FileExt;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tidekv_core::units::Bytes;
use tidekv_shm::RuntimeDir;
use tidekv_shm::arena::{Arena, ArenaConfig, ArenaName, Handle, LocalArena, Prefault};

/// Head, members, caches and, of four small segments, slot words, bitmaps and block words.
const TABLES: usize = 16_384 + 4096 + 4096 + 4096;

/// Then the number of the process. A fuzzer does not end in a way that lets it clean up, so the next one does.
const FOLDER: &str = "/dev/shm/kvcached-fuzz-arena-";

struct World {
    dir: RuntimeDir,
    name: ArenaName,
    tables: Vec<u8>,
    handles: Vec<Handle>,
}

/// An arena that was used by somebody who is gone and by somebody who left: made once, its tables put back every time.
static WORLD: LazyLock<World> = LazyLock::new(|| {
    remove_earlier();
    let dir = RuntimeDir::at(format!("{FOLDER}{}", std::process::id()));
    let name = ArenaName::new("fuzz").expect("a name");
    let size = Bytes::kib(1024);
    let config = ArenaConfig { segment: Bytes::kib(256), limit: size, initial: size, ..ArenaConfig::default() };
    let arena = Arena::create(&dir, &name, &config, Prefault::Off).expect("an arena");
    let mut local = arena.local().expect("a cache");
    let handles: Vec<Handle> =
        [4096, 4096, 20_000, 300_000, 70_000].map(|bytes| local.alloc(bytes).ok()).into_iter().flatten().collect();
    local.share(handles[1]).expect("held");
    let mut tables = vec![0; TABLES];
    std::fs::File::open(arena.path()).and_then(|file| file.read_exact_at(&mut tables, 0)).expect("the file");
    World { dir, name, tables, handles }
});

fuzz_target!(|data: &[u8]| {
    let world = &*WORLD;
    let file = std::fs::File::options().write(true).open(path(world)).expect("the file");
    let put = |bytes: &[u8]| file.write_all_at(bytes, 0).expect("a write");
    put(&world.tables);
    match data {
        [0, bytes @ ..] => {
            put(&bytes[..bytes.len().min(TABLES)]);
            attach(world, |_| {});
        }
        [1, patches @ ..] => {
            put(&patched(&world.tables, patches));
            attach(world, |_| {});
        }
        [2, patches @ ..] => attach(world, |_| {
            let mut now = vec![0; TABLES];
            let reader = std::fs::File::open(path(world)).expect("the file");
            reader.read_exact_at(&mut now, 0).expect("a read");
            put(&patched(&now, patches));
        }),
        _ => {}
    }
});

fn remove_earlier() {
    for entry in std::fs::read_dir("/dev/shm").into_iter().flatten().flatten() {
        let path = entry.path();
        let pid = path.to_str().and_then(|path| path.strip_prefix(FOLDER));
        if pid.is_some_and(|pid| !std::path::Path::new("/proc").join(pid).exists()) {
            let _ = std::fs::remove_dir_all(path);
        }
    }
}

fn path(world: &World) -> std::path::PathBuf {
    let uid = std::fs::metadata("/proc/self").map(|me| std::os::unix::fs::MetadataExt::uid(&me)).unwrap_or(0);
    world.dir.path().join(format!("kvcached-arena-{uid}-{}", world.name))
}

fn patched(tables: &[u8], mut patches: &[u8]) -> Vec<u8> {
    let mut bytes = tables.to_vec();
    while let [low, middle, high, length, rest @ ..] = patches {
        let at = u32::from_le_bytes([*low, *middle, *high, 0]) as usize % (TABLES - 256);
        let (new, rest) = rest.split_at(rest.len().min(usize::from(*length)));
        bytes[at..at + new.len()].copy_from_slice(new);
        patches = rest;
    }
    bytes
}

fn attach(world: &World, damage: impl Fn(&Arena)) {
    let arena = match Arena::attach(&world.dir, &world.name, Prefault::Off) {
        Ok(arena) => arena,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let Ok(mut local) = arena.local() else { return };
    let mut held: Vec<Handle> = [1, 30_000, 400_000].iter().filter_map(|bytes| local.alloc(*bytes).ok()).collect();
    damage(&arena);
    use_all(world, &arena, &mut local, &mut held);
    let _ = arena.recover();
    let _ = arena.verify();
    drop(local);
    let _ = arena.verify();
}

fn use_all(world: &World, arena: &Arena, local: &mut LocalArena, held: &mut Vec<Handle>) {
    for handle in world.handles.iter().chain(&*held) {
        if let Ok(block) = arena.block(*handle) {
            // Every byte that it claims to have is there.
            let mut last = [0];
            block.copy_out(block.len() - 1, &mut last).expect("inside");
            block.copy_in(0, &last).expect("inside");
        }
        let _ = local.retain(*handle);
        let _ = local.release(*handle);
    }
    for bytes in [4096, 16_384, 65_536, 200_000] {
        held.extend((0..5).map_while(|_| local.alloc(bytes).ok()));
    }
    for handle in held.drain(..).chain(world.handles.iter().copied()) {
        let handle = local.resize(handle, 50_000).unwrap_or(handle);
        let _ = local.free(handle);
    }
}
