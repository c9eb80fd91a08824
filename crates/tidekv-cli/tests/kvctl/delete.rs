//! `kvctl delete`.

use tidekv_core::units::Bytes;

use crate::common::{Victim, World};

#[test]
fn a_living_pool_needs_force_and_comes_back() {
    let world = World::new();
    let pool = world.pool("ours", Bytes::gib(1));
    pool.uses(Bytes::mib(4), Bytes::ZERO);
    let ran = world.kvctl(&["delete", "ours"]);
    assert!(ran.error().contains(&format!("ours is alive (pid {})", std::process::id())));
    assert!(world.path("ours").exists());

    let ran = world.kvctl(&["delete", "ours", "--force"]);
    assert_eq!(ran.quiet(), (0, "Deleted IPC 'ours'.\n"));
    assert!(!world.path("ours").exists());
    assert_eq!(world.entry("ours").reserved, Bytes::mib(4), "the pool keeps its memory");
    let ran = world.kvctl(&["delete", "ours", "--force"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (1, "IPC 'ours' has no segment.\n"));
    assert!(pool.segment.heal().unwrap());
    assert!(world.kvctl(&["list"]).stdout.contains("1.00 GB"));
}

#[test]
fn segments_that_nobody_owns() {
    let world = World::new();
    world.kvcached_segment("theirs", [1 << 30, 0, 0]);
    assert_eq!(world.kvctl(&["delete", "theirs"]).quiet(), (0, "Deleted IPC 'theirs'.\n"));
    Victim::spawn(&world, "victim").kill();
    assert_eq!(world.kvctl(&["delete", "victim"]).quiet(), (0, "Deleted IPC 'victim'.\n"));
    let ran = world.kvctl(&["delete", "victim"]);
    assert!(ran.code == 1 && ran.stderr.contains("`kvctl gc`"), "{ran:?}");
}

#[test]
fn what_is_no_pool_is_not_deleted() {
    let world = World::new();
    std::fs::write(world.path("notes.txt"), "x").unwrap();
    let ran = world.kvctl(&["delete", "notes.txt"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (1, "Error: IPC 'notes.txt' not found.\n"));
    assert!(world.path("notes.txt").exists());
}
