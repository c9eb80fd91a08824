//! `kvctl list`.

use serde_json::Value;
use tidekv_core::units::Bytes;

use crate::common::{GIB, Victim, World};

fn json(world: &World, names: &[&str]) -> Vec<Value> {
    let ran = world.kvctl(&[&["list", "--json"], names].concat());
    let (code, text) = ran.quiet();
    assert_eq!(code, 0);
    serde_json::from_str::<Value>(text).unwrap().as_array().unwrap().clone()
}

#[test]
fn nothing_there() {
    let world = World::new();
    assert_eq!(world.kvctl(&["list"]).quiet(), (0, "No active KVCached segments found.\n"));
    assert_eq!(world.kvctl(&["list", "--json"]).quiet(), (0, "[]\n"));
}

#[test]
fn rows_begin_as_kvcached_prints_them() {
    let world = World::new();
    let pool = world.pool("ours", Bytes::gib(1));
    pool.uses(Bytes::mib(512), Bytes::mib(2));
    world.kvcached_segment("theirs", [i64::try_from(2 * GIB).unwrap(), 0, 0]);
    let ran = world.kvctl(&["list"]);
    let (code, text) = ran.quiet();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!((code, lines.len()), (0, 3));
    assert!(lines[0].starts_with("IPC                             Limit         Used      % "), "{text}");
    assert!(lines[1].starts_with("ours                          1.00 GB    512.00 MB  50.0 % "), "{text}");
    assert!(lines[2].starts_with("theirs                        2.00 GB       0.00 B   0.0 % "), "{text}");
    let ours: Vec<&str> = lines[1].split_whitespace().skip(7).collect();
    let pid = std::process::id().to_string();
    assert_eq!(
        ours,
        ["live", &pid, "514.00", "MB", "512.00", "MB", "0.00", "B", "2.00", "MB", "0.00", "B", "0.00", "B", "host"]
    );
    assert!(lines[2].contains(" kvcached "), "{text}");
    assert!(!text.contains('\x1b'), "no colour outside a terminal");
}

#[test]
fn json_has_kvcached_keys_first_and_then_ours() {
    let world = World::new();
    let pool = world.pool("ours", Bytes::gib(1));
    world.device(Bytes::gib(8), Bytes::gib(4));
    pool.uses(Bytes::mib(512), Bytes::mib(2));
    pool.change(|entry| {
        entry.demand = Bytes::mib(4);
        entry.limit_revision = 3;
        entry.applied_revision = 2;
        entry.counters.maps = 7;
    });
    world.kvcached_segment("theirs", [i64::try_from(2 * GIB).unwrap(), 5, 6]);
    let rows = json(&world, &[]);
    assert_eq!(rows.len(), 2);
    let keys: Vec<&str> = rows[0].as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(keys[..4], ["ipc", "limit_bytes", "used_bytes", "prealloc_bytes"]);
    for (key, value) in [
        ("ipc", Value::from("ours")),
        ("limit_bytes", Value::from(GIB)),
        ("used_bytes", Value::from(512u64 << 20)),
        ("prealloc_bytes", Value::from(2u64 << 20)),
        ("state", Value::from("draining")),
        ("device", Value::from("host")),
        ("group", Value::from(0)),
        ("pid", Value::from(std::process::id())),
        ("owner_alive", Value::from(true)),
        ("reserved_bytes", Value::from(514u64 << 20)),
        ("needed_bytes", Value::from(512u64 << 20)),
        ("cached_bytes", Value::from(0)),
        ("idle_bytes", Value::from(2u64 << 20)),
        ("demand_bytes", Value::from(4u64 << 20)),
        ("weight", Value::from(1)),
        ("floor_bytes", Value::from(0)),
        ("ceiling_bytes", Value::Null),
        ("fair_bytes", Value::from(518u64 << 20)),
        ("owed_bytes", Value::from(0)),
        ("limit_applied", Value::from(false)),
    ] {
        assert_eq!(rows[0][key], value, "{key}");
    }
    assert_eq!(rows[0]["counters"]["maps"], 7);
    let theirs = &rows[1];
    assert_eq!((&theirs["used_bytes"], &theirs["prealloc_bytes"]), (&Value::from(5), &Value::from(6)));
    assert_eq!((&theirs["state"], &theirs["pid"]), (&Value::from("kvcached"), &Value::Null));
}

#[test]
fn a_line_says_who_waits_and_who_gives_back() {
    let world = World::new();
    let (chat, batch) = (world.pool("chat", Bytes::gib(1)), world.pool("batch", Bytes::gib(1)));
    let _idle = world.pool("idle", Bytes::ZERO);
    world.device(Bytes::gib(8), Bytes::mib(256));
    chat.uses(Bytes::mib(64), Bytes::ZERO);
    batch.uses(Bytes::mib(192), Bytes::ZERO);
    assert!(!world.kvctl(&["list"]).quiet().1.contains("waits"));
    chat.change(|entry| entry.demand = Bytes::mib(64));
    let whys = [
        "batch is 64 MiB above its share and gives back: chat waits for 64 MiB",
        "chat waits for 64 MiB: batch is 64 MiB above its share and gives back",
    ];
    let ran = world.kvctl(&["list"]);
    let lines: Vec<&str> = ran.quiet().1.lines().collect();
    assert_eq!(lines[4..], whys);
    let rows = json(&world, &[]);
    assert_eq!([&rows[0]["why"], &rows[1]["why"], &rows[2]["why"]], [&whys[0].into(), &whys[1].into(), &Value::Null]);
    let words = [0, 1, 2].map(|at| rows[at]["standing"].as_str().unwrap().to_owned());
    assert_eq!(words, ["gives-back", "waits", "within-share"]);
}

#[test]
fn names_select_and_unknown_ones_are_named() {
    let world = World::new();
    let _pools = [world.pool("alpha", Bytes::gib(1)), world.pool("beta", Bytes::gib(1))];
    assert_eq!(json(&world, &["beta"]).len(), 1);
    assert_eq!(json(&world, &["/dev/shm/beta"]).len(), 1, "a path stands for its last part");
    let ran = world.kvctl(&["list", "alpha", "betta"]);
    assert_eq!(ran.code, 1);
    assert!(ran.stdout.contains("alpha") && !ran.stdout.contains("beta"), "{ran:?}");
    assert_eq!(ran.stderr, "Error: IPC 'betta' not found. Did you mean 'beta'?\nActive IPC names: alpha, beta\n");
}

#[test]
fn a_pool_that_kvcached_would_not_list_is_listed() {
    let world = World::new();
    let pool = world.pool("zero", Bytes::gib(1));
    pool.uses(Bytes::ZERO, Bytes::mib(2));
    assert_eq!(world.kvctl(&["limit", "zero", "0"]).code, 0);
    let rows = json(&world, &["zero"]);
    assert_eq!((&rows[0]["limit_bytes"], &rows[0]["prealloc_bytes"]), (&Value::from(0), &Value::from(2u64 << 20)));
    std::fs::remove_file(world.path("zero")).unwrap();
    assert_eq!(json(&world, &[]).len(), 1, "its segment was deleted");
}

#[test]
fn a_dead_owner_is_seen_at_once() {
    let world = World::new();
    let victim = Victim::spawn(&world, "victim");
    assert_eq!(json(&world, &[])[0]["pid"], victim.pid());
    assert_eq!(json(&world, &[])[0]["owner_alive"], true);
    victim.kill();
    let rows = json(&world, &[]);
    assert_eq!((&rows[0]["owner_alive"], &rows[0]["state"]), (&Value::from(false), &Value::from("dead")));
    assert_eq!(rows[0]["reserved_bytes"], 80 << 20, "its bytes still count");
}

#[test]
fn a_stopped_pool_does_not_stop_a_list() {
    let world = World::new();
    let pool = world.pool("ours", Bytes::gib(1));
    pool.holding_the_lock(|| assert_eq!(json(&world, &[]).len(), 1));
}

#[test]
fn what_is_no_segment_is_not_listed_and_a_broken_ledger_hides_nothing() {
    let world = World::new();
    std::fs::write(world.path("notes.txt"), "x").unwrap();
    std::fs::write(world.path("zeros"), [0; 24]).unwrap();
    world.kvcached_segment("theirs", [1 << 20, 0, 0]);
    let pool = world.pool("ours", Bytes::gib(1));
    let ledger = pool.entry.ledger().path().to_owned();
    std::fs::write(ledger, "not a ledger").unwrap();
    let ran = world.kvctl(&["list", "--json"]);
    let rows: Value = serde_json::from_str(&ran.stdout).unwrap();
    let names: Vec<&str> = rows.as_array().unwrap().iter().map(|row| row["ipc"].as_str().unwrap()).collect();
    assert_eq!((ran.code, names), (0, vec!["ours", "theirs"]));
    assert!(ran.stderr.starts_with("warning: pools on host are not shown in full: "), "{ran:?}");
}
