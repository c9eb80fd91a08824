//! `kvctl gc`: processes are killed for real.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use tidekv_core::units::{Bytes, GroupId};
use tidekv_ipc::address::SocketDir;
use tidekv_shm::{DeviceName, EntryState, Ledger, PoolName};

use crate::common::{Victim, World};

#[test]
fn nothing_to_do() {
    let world = World::new();
    assert_eq!(world.kvctl(&["gc"]).quiet(), (0, "Nothing to remove.\n"));
    let _pool = world.pool("ours", Bytes::gib(1));
    let before = world.files();
    assert_eq!(world.kvctl(&["gc"]).quiet(), (0, "Nothing to remove.\n"));
    assert_eq!(world.files(), before);
}

#[test]
fn all_that_a_killed_process_left() {
    let world = World::new();
    let pid = Victim::spawn(&world, "victim").kill();
    let before = world.files();
    assert_eq!(before.len(), 3, "{before:?}");
    let dry = world.kvctl(&["gc", "--dry-run"]);
    assert_eq!(world.files(), before, "a dry run changes nothing");
    let ran = world.kvctl(&["gc"]);
    let (code, text) = ran.quiet();
    assert_eq!(code, 0);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], format!("Removed entry of victim on host: pid {pid} is gone, 80 MiB were counted for it"));
    assert!(lines[1].starts_with("Removed ledger ") && lines[2] == "Removed segment victim: it has no owner", "{text}");
    assert_eq!(dry.quiet().1.replace("Would remove", "Removed"), text);
    assert_eq!(world.files(), Vec::<String>::new());
}

#[test]
fn neighbours_of_a_killed_process_stay() {
    let world = World::new();
    let pool = world.pool("ours", Bytes::gib(1));
    pool.uses(Bytes::mib(8), Bytes::ZERO);
    let before = world.files();
    let mine = world.entry("ours");
    Victim::spawn(&world, "victim").kill();
    assert_eq!(world.kvctl(&["gc"]).quiet().1.lines().count(), 2);
    assert_eq!((world.files(), world.entry("ours")), (before, mine));
}

/// A neighbour found it dead first and removed its entry, and the file with it: nothing else proves whose it is.
#[test]
fn whoever_removes_a_dead_pools_entry_removes_its_segment() {
    let world = World::new();
    let _pool = world.pool("ours", Bytes::gib(1));
    Victim::spawn(&world, "victim").kill();
    let ledger = world.ledger();
    ledger.update(crate::common::patience(), |view| view.entries.retain(|entry| entry.name != "victim")).unwrap();
    assert!(!world.path("victim").exists());
    assert_eq!(world.kvctl(&["gc"]).quiet(), (0, "Nothing to remove.\n"));
}

/// A neighbour of an older release removes the entry alone.
#[test]
fn a_segment_that_no_entry_vouches_for_is_left_and_named() {
    let world = World::new();
    Victim::spawn(&world, "victim").kill();
    let ledger = world.ledger().path().to_owned();
    fs::remove_file(ledger).unwrap();
    let ran = world.kvctl(&["gc"]);
    assert!(ran.quiet().1.ends_with("`kvctl delete victim` removes it\n"), "{ran:?}");
    assert_eq!(world.kvctl(&["delete", "victim"]).quiet(), (0, "Deleted IPC 'victim'.\n"));
}

/// A pool between its segment and its entry, or one whose ledger was lost.
#[test]
fn a_segment_with_an_owner_and_no_entry_stays() {
    let world = World::new();
    let name = tidekv_shm::PoolName::new("ours").unwrap();
    let segment = tidekv_shm::PoolSegment::create(&world.dir(), &name, Bytes::gib(1)).unwrap();
    assert_eq!(world.kvctl(&["gc"]).quiet(), (0, "Nothing to remove.\n"));
    assert!(segment.path().exists());
    assert!(world.kvctl(&["delete", "ours"]).error().contains("ours is alive"));
}

#[test]
fn a_limit_of_zero_does_not_hide_a_dead_segment() {
    let world = World::new();
    let victim = Victim::spawn(&world, "victim");
    assert_eq!(world.kvctl(&["limit", "victim", "0"]).code, 3);
    victim.kill();
    world.kvctl(&["gc"]);
    assert_eq!(world.files(), Vec::<String>::new());
}

#[test]
fn what_may_be_kvcached_own_is_left_and_named() {
    let world = World::new();
    world.kvcached_segment("theirs", [1 << 30, 0, 0]);
    fs::write(world.path("zeros"), [0; 24]).unwrap();
    fs::write(world.path("notes.txt"), "x").unwrap();
    let before = world.files();
    let ran = world.kvctl(&["gc"]);
    let (code, text) = ran.quiet();
    assert!(code == 0 && text.starts_with("Left segment theirs: kvcached's own"), "{text}");
    assert_eq!(text.lines().count(), 2, "{text}");
    assert_eq!(world.files(), before);
}

/// Killed between making the file and writing it. Its entry is there already, and so the file is known.
#[test]
fn a_segment_that_was_never_finished() {
    let world = World::new();
    Victim::spawn(&world, "victim").kill();
    fs::write(world.path("victim"), "").unwrap();
    fs::write(world.path("kvcached_vLLM_2"), "").unwrap();
    let ran = world.kvctl(&["gc"]);
    assert!(ran.quiet().1.contains("Removed segment victim: it has no owner"), "{ran:?}");
    assert_eq!(world.files(), ["kvcached_vLLM_2"], "its maker may be about to write it");
}

/// GPU memory comes back a moment after its owner is gone: gc gives it that moment, and not more.
#[test]
fn bytes_on_a_gpu_get_their_grace() {
    let world = World::new();
    let device = DeviceName::new("GPU-1234").unwrap();
    let ledger = Ledger::open(&world.dir(), &device).unwrap();
    let name = tidekv_shm::PoolName::new("gone").unwrap();
    let spec = tidekv_shm::EntrySpec::new(name, GroupId(0), crate::common::PAGE);
    let owner = ledger.register(crate::common::patience(), spec).unwrap();
    let entry = owner
        .update(crate::common::patience(), |view, me| {
            view.entries[me].reserved = Bytes::gib(3);
            view.entries[me].clone()
        })
        .unwrap();
    drop(owner);
    // As a neighbour would have left it: returning since now, bytes still counted.
    let ledger = Ledger::open(&world.dir(), &device).unwrap();
    let start = Instant::now();
    ledger
        .update(crate::common::patience(), |view| {
            let since = tidekv_shm::now_ms();
            view.entries.push(tidekv_shm::LedgerEntry {
                state: EntryState::Returning,
                returning_since_ms: since,
                ..entry
            });
        })
        .unwrap();
    let ran = world.kvctl(&["gc"]);
    assert!(start.elapsed() >= Duration::from_secs(1), "{:?}", start.elapsed());
    assert!(ran.quiet().1.contains("Removed entry of gone on GPU-1234") && ran.stdout.contains("3 GiB"), "{ran:?}");
    assert_eq!(world.files(), Vec::<String>::new());
}

/// The clock begins anew with the machine: such an entry would have stayed for as long as the machine had run before.
#[test]
fn an_entry_from_before_a_reboot_is_removed() {
    let world = World::new();
    for device in [DeviceName::host(), DeviceName::new("GPU-1234").unwrap()] {
        let ledger = Ledger::open(&world.dir(), &device).unwrap();
        let name = tidekv_shm::PoolName::new("gone").unwrap();
        let spec = tidekv_shm::EntrySpec::new(name, GroupId(0), crate::common::PAGE);
        let since = tidekv_shm::now_ms() + 1_000_000_000;
        ledger
            .update(crate::common::patience(), |view| {
                view.entries.push(tidekv_shm::LedgerEntry {
                    state: EntryState::Returning,
                    reserved: Bytes::gib(3),
                    returning_since_ms: since,
                    ..tidekv_shm::LedgerEntry::new(0, &spec)
                });
            })
            .unwrap();
        let ran = world.kvctl(&["gc"]);
        assert!(ran.quiet().1.contains(&format!("Removed entry of gone on {device}")), "{ran:?}");
        assert_eq!(world.files(), Vec::<String>::new());
    }
}

#[test]
fn a_ledger_that_cannot_be_looked_at_is_an_error_and_the_rest_is_done() {
    let world = World::new();
    Victim::spawn(&world, "victim").kill();
    let ledger = world.ledger().path().to_owned();
    let other = ledger.with_file_name(ledger.file_name().unwrap().to_str().unwrap().replace("host", "GPU-1"));
    fs::write(&other, "not a ledger").unwrap();
    fs::set_permissions(&other, fs::Permissions::from_mode(0o600)).unwrap();
    let ran = world.kvctl(&["gc"]);
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.starts_with("error: ledger of GPU-1: "), "{ran:?}");
    assert!(ran.stdout.contains("Removed segment victim"), "{ran:?}");
}

/// A killed worker leaves its socket; a living one keeps its folder.
#[test]
fn sockets_of_workers_that_are_gone_are_removed() {
    let world = World::new();
    let listen = |pool: &str| {
        let dir = SocketDir::new(world.path(""), &PoolName::new(pool).unwrap());
        fs::create_dir(dir.path()).unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
        (dir.path().to_owned(), UnixListener::bind(dir.socket_path(0, 0).unwrap()).unwrap())
    };
    let (dead_folder, dead) = listen("dead");
    let (living_folder, _living) = listen("living");
    drop(dead);
    let line = format!("Would remove {}: 1 sockets of workers of dead that are gone\n", dead_folder.display());
    assert_eq!(world.kvctl(&["gc", "--dry-run"]).quiet(), (0, line.as_str()));
    assert!(dead_folder.exists());
    assert_eq!(world.kvctl(&["gc"]).quiet(), (0, line.replace("Would remove", "Removed").as_str()));
    assert!(!dead_folder.exists() && living_folder.join("w0.sock").exists());
    assert_eq!(world.kvctl(&["gc"]).quiet(), (0, "Nothing to remove.\n"));
}

/// A process number that nobody has: that of a child which was waited for.
fn dead_pid() -> u32 {
    let mut child = std::process::Command::new("true").spawn().unwrap();
    child.wait().unwrap();
    child.id()
}

#[test]
fn what_benchmarks_left_goes_and_what_is_not_ours_is_named() {
    let world = World::new();
    let (uid, alive, dead) = (rustix::process::geteuid().as_raw(), std::process::id(), dead_pid());
    let left = world.path(&format!("kvcached-bench-{uid}-{dead}-7"));
    let kept = [
        format!("kvcached-bench-{uid}-{alive}-0"),
        format!("kvcached-bench-{}-{dead}-0", uid + 1),
        format!("kvcached-bench-{uid}-{dead}"),
        "mooncake_bench_4711_3".to_owned(),
        "mooncake_bench_src".to_owned(),
    ];
    fs::write(&left, [0; 8192]).unwrap();
    kept.iter().for_each(|name| fs::write(world.path(name), [0; 4096]).unwrap());

    let dry = world.kvctl(&["gc", "--dry-run", "--json"]);
    let rows: serde_json::Value = serde_json::from_str(dry.quiet().1).unwrap();
    let actions: Vec<&str> = rows.as_array().unwrap().iter().map(|row| row["action"].as_str().unwrap()).collect();
    assert_eq!(actions, ["would remove", "left", "left"]);
    assert_eq!(rows[1]["what"], world.path("mooncake_bench_4711_3").display().to_string());
    assert!(left.exists());

    let ran = world.kvctl(&["gc"]);
    let text = ran.quiet().1;
    assert!(text.contains(&format!("Removed {}: 8 KiB that a benchmark left", left.display())), "{text}");
    let foreign = world.path("mooncake_bench_src");
    assert!(text.contains(&format!("Left {}: Mooncake's benchmarks made it", foreign.display())), "{text}");
    assert!(!left.exists() && kept.iter().all(|name| world.path(name).exists()), "{:?}", world.files());
    let again = world.kvctl(&["gc", "--json"]);
    assert_eq!(serde_json::from_str::<serde_json::Value>(again.quiet().1).unwrap().as_array().unwrap().len(), 2);
}
