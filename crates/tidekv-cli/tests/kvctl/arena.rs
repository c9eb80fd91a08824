//! `kvctl arena`, and arenas in `kvctl gc`.

use tidekv_core::units::Bytes;
use tidekv_shm::arena::{Arena, ArenaConfig, ArenaName, Prefault};

use crate::common::World;

fn arena(world: &World, name: &str) -> Arena {
    let size = Bytes::mib(8);
    let config = ArenaConfig { segment: size, limit: Bytes::mib(32), initial: size, ..ArenaConfig::default() };
    Arena::create(&world.dir(), &ArenaName::new(name).unwrap(), &config, Prefault::Off).unwrap()
}

#[test]
fn arenas_are_listed_checked_and_deleted() {
    let world = World::new();
    assert_eq!(world.kvctl(&["arena", "list", "--json"]).quiet(), (0, "[]\n"));
    let arena = arena(&world, "kv");
    let mut local = arena.local().unwrap();
    local.alloc(100_000).unwrap();
    let listed = world.kvctl(&["arena", "list"]);
    let row = listed.stdout.lines().nth(1).unwrap().split_whitespace().collect::<Vec<_>>();
    assert_eq!(
        (listed.code, row[0], *row.last().unwrap()),
        (0, "kv", std::process::id().to_string().as_str()),
        "{row:?}"
    );
    let json: serde_json::Value =
        serde_json::from_str(&world.kvctl(&["arena", "check", "kv", "--json"]).stdout).unwrap();
    assert_eq!(
        (&json["live_blocks"], &json["held_bytes"], &json["problems"][0]),
        (&1.into(), &114_688.into(), &().into())
    );
    let (code, text) = (0, "kv is sound: 1 segments");
    let ran = world.kvctl(&["arena", "check", "kv"]);
    assert!(ran.code == code && ran.stdout.starts_with(text), "{ran:?}");
    assert!(world.kvctl(&["arena", "delete", "kv"]).error().contains("kv is in use (pid "));
    drop((local, arena));
    assert_eq!(world.kvctl(&["arena", "delete", "kv"]).quiet(), (0, "Deleted arena 'kv'.\n"));
    for command in ["check", "delete"] {
        let ran = world.kvctl(&["arena", command, "kv"]);
        assert_eq!((ran.code, ran.stderr.as_str()), (1, "There is no arena 'kv'.\n"));
    }
    assert!(world.kvctl(&["arena", "check", "a/b"]).error().contains("cannot name an arena"));
}

#[test]
fn a_damaged_word_costs_its_run_and_is_shown() {
    use std::os::unix::fs::FileExt;
    let world = World::new();
    let arena = arena(&world, "kv");
    let mut local = arena.local().unwrap();
    local.alloc(100_000).unwrap();
    let file = std::fs::File::options().write(true).open(arena.path()).unwrap();
    // The first slot word: the head of a span of 8 slots.
    file.write_all_at(&[0xff; 8], 16_384).unwrap();
    let ran = world.kvctl(&["arena", "check", "kv"]);
    assert!(ran.code == 1 && ran.stdout.contains("kv is NOT SOUND"), "{ran:?}");
    let set_aside = ran.stdout.lines().find(|line| line.contains("are set aside: a word of theirs was damaged"));
    assert!(set_aside.is_some_and(|line| line.starts_with("2 MiB")), "{ran:?}");
    let listed: serde_json::Value = serde_json::from_str(&world.kvctl(&["arena", "list", "--json"]).stdout).unwrap();
    assert_eq!(listed[0]["damaged_bytes"], 2 << 20);
    let row = world.kvctl(&["arena", "list"]).stdout.lines().nth(1).unwrap().to_owned();
    assert!(row.contains(" 2 MiB "), "{row}");
    local.alloc(1 << 20).unwrap();
}

#[test]
fn a_damaged_arena_is_named_and_can_be_deleted() {
    let world = World::new();
    drop(arena(&world, "kv"));
    let path = std::fs::read_dir(world.path(".")).unwrap().next().unwrap().unwrap().path();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(4096).unwrap();
    assert!(world.kvctl(&["arena", "check", "kv"]).error().contains("cut short"));
    assert_eq!(world.kvctl(&["arena", "list"]).code, 2);
    assert_eq!(world.kvctl(&["arena", "delete", "kv"]).code, 0);
    assert!(world.files().is_empty());
}

#[test]
fn gc_removes_arenas_that_nobody_uses() {
    let world = World::new();
    let used = arena(&world, "used");
    drop(arena(&world, "left"));
    std::fs::write(used.path().with_extension("1-2-3"), b"").unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(used.path().with_extension("1-2-3"), mode).unwrap();
    assert_eq!(world.kvctl(&["gc", "--dry-run"]).quiet(), (0, "Would remove arena left: nobody uses it\n"));
    let ran = world.kvctl(&["gc"]);
    assert!(ran.stdout.contains("Removed arena left: nobody uses it\n"), "{ran:?}");
    assert!(ran.stdout.contains("an arena that its maker did not finish"), "{ran:?}");
    assert_eq!(world.files().len(), 1, "{:?}", world.files());
}
