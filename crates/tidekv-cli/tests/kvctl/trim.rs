//! `kvctl trim`.

use tidekv_core::units::Bytes;
use tidekv_shm::LedgerEntry;

use crate::common::{Victim, World};

#[test]
fn asked_and_not_waited_for() {
    let world = World::new();
    let pool = world.pool("ours", Bytes::gib(1));
    let ran = world.kvctl(&["trim", "ours"]);
    assert_eq!(ran.quiet(), (0, "Asked ours to give back 0 B of idle memory.\n"));
    pool.uses(Bytes::mib(10), Bytes::mib(6));
    let ran = world.kvctl(&["trim", "ours"]);
    assert_eq!(ran.quiet(), (3, "Asked ours to give back 6 MiB of idle memory.\n"));
    assert_eq!(world.entry("ours").trim_request, 2);
}

#[test]
fn waited_for_until_it_is_done() {
    let world = World::new();
    let pool = world.pool("ours", Bytes::gib(1));
    pool.uses(Bytes::mib(10), Bytes::mib(6));
    let gives = |entry: &mut LedgerEntry| {
        let asked = entry.trim_request > entry.trim_done;
        if asked {
            (entry.reserved, entry.idle) = (Bytes::mib(10), Bytes::ZERO);
            entry.trim_done = entry.trim_request;
        }
        asked
    };
    let ran = pool.answering(gives, || world.kvctl(&["trim", "ours", "--wait", "60s"]));
    assert_eq!(ran.quiet(), (0, "ours gave back 6 MiB and holds 10 MiB.\n"));
}

#[test]
fn cached_prefixes_are_asked_for_by_name() {
    let world = World::new();
    let pool = world.pool("ours", Bytes::gib(1));
    pool.uses(Bytes::mib(10), Bytes::ZERO);
    pool.change(|entry| entry.cached = Bytes::mib(8));
    assert_eq!(world.kvctl(&["trim", "ours"]).quiet(), (0, "Asked ours to give back 0 B of idle memory.\n"));
    assert_eq!(world.entry("ours").trim_cached, 0, "a plain trim leaves them");
    let ran = world.kvctl(&["trim", "ours", "--cached"]);
    assert_eq!(ran.quiet(), (3, "Asked ours to give back 0 B of idle memory and 8 MiB of cached prefixes.\n"));
    let asked = world.entry("ours");
    assert_eq!((asked.trim_request, asked.trim_cached), (2, 2));
    let ran = world.kvctl(&["trim", "ours", "--cached", "--wait", "10ms"]);
    assert_eq!(ran.quiet(), (3, "Still draining: ours holds 10 MiB (0 B idle, 8 MiB cached).\n"));
    let gives = |entry: &mut LedgerEntry| {
        let asked = entry.trim_cached == 4;
        if asked {
            (entry.reserved, entry.in_use, entry.cached) = (Bytes::mib(2), Bytes::mib(2), Bytes::ZERO);
            entry.trim_done = entry.trim_request;
        }
        asked
    };
    let ran = pool.answering(gives, || world.kvctl(&["trim", "ours", "--cached", "--wait", "60s"]));
    assert_eq!(ran.quiet(), (0, "ours gave back 8 MiB and holds 2 MiB.\n"));
}

#[test]
fn not_done_in_time() {
    let world = World::new();
    let pool = world.pool("ours", Bytes::gib(1));
    pool.uses(Bytes::mib(10), Bytes::mib(6));
    let ran = world.kvctl(&["trim", "ours", "--wait", "10ms"]);
    assert_eq!(ran.quiet(), (3, "Still draining: ours holds 16 MiB (6 MiB idle).\n"));
}

#[test]
fn who_cannot_be_asked() {
    let world = World::new();
    assert_eq!(world.kvctl(&["trim", "nobody"]).code, 1);
    world.kvcached_segment("theirs", [1 << 30, 0, 0]);
    assert!(world.kvctl(&["trim", "theirs"]).error().contains("kvcached's own"));
    Victim::spawn(&world, "victim").kill();
    assert_eq!(world.kvctl(&["trim", "victim"]).code, 1);
    world.kvctl(&["trim", "victim", "--wait", "soon"]).error();
}
