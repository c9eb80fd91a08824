//! `kvctl limit` and `kvctl limit-percent`.

use tidekv_core::units::{Bytes, GroupId};

use crate::common::{GIB, Victim, World, words};

const UPDATED: &str = "Updated kv cache limit for ours to 512.00 MB (536870912 bytes)\n";
const WARNING: &str = "No enough free space to decrease for the new kv_cache_limit for ours\n";

#[test]
fn bytes_to_the_segment_bytes_and_revision_to_the_entry() {
    let world = World::new();
    let pool = world.pool("ours", Bytes::gib(1));
    pool.uses(Bytes::mib(100), Bytes::mib(2));
    for (revision, size) in [(1, "512M"), (2, "512mb"), (3, "0.5GiB"), (4, "536,870,912")] {
        assert_eq!(world.kvctl(&["limit", "ours", size]).quiet(), (0, UPDATED), "{size}");
        let entry = world.entry("ours");
        assert_eq!((entry.limit, entry.limit_revision), (Bytes::mib(512), revision));
        assert_eq!(words(&world.path("ours")), [512 << 20, 100 << 20, 2 << 20]);
    }
}

#[test]
fn a_limit_below_use_is_accepted_with_a_warning_and_code_3() {
    let world = World::new();
    let pool = world.pool("ours", Bytes::gib(1));
    pool.uses(Bytes::mib(600), Bytes::ZERO);
    let ran = world.kvctl(&["limit", "ours", "512M"]);
    assert_eq!(ran.quiet(), (3, format!("{WARNING}{UPDATED}").as_str()));
    assert_eq!(world.entry("ours").limit, Bytes::mib(512));
}

#[test]
fn waiting_ends_when_the_pool_has_applied_it() {
    let world = World::new();
    let pool = world.pool("ours", Bytes::gib(1));
    pool.uses(Bytes::mib(600), Bytes::ZERO);
    let applies = |entry: &mut tidekv_shm::LedgerEntry| {
        let asked = entry.limit_revision > entry.applied_revision;
        if asked {
            entry.reserved = entry.limit;
            entry.applied_revision = entry.limit_revision;
        }
        asked
    };
    let ran = pool.answering(applies, || world.kvctl(&["limit", "ours", "512M", "--wait", "60s"]));
    assert_eq!(ran.quiet(), (0, format!("{WARNING}{UPDATED}").as_str()));
}

#[test]
fn waiting_ends_at_its_deadline_with_code_3() {
    let world = World::new();
    let pool = world.pool("ours", Bytes::gib(1));
    pool.uses(Bytes::mib(100), Bytes::ZERO);
    let ran = world.kvctl(&["limit", "ours", "512M", "--wait", "20ms"]);
    let expected = format!("{UPDATED}Still draining: ours still holds 100 MiB on host.\n");
    assert_eq!(ran.quiet(), (3, expected.as_str()));
}

#[test]
fn waiting_ends_when_the_pool_ends() {
    let world = World::new();
    let victim = Victim::spawn(&world, "ours");
    let ledger = world.ledger();
    let watch = ledger.watch().unwrap();
    let waiting = world
        .command(&["limit", "ours", "512M", "--wait", "60s"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let revision = || ledger.read().unwrap().by_name("ours", GroupId(0)).unwrap().limit_revision;
    while revision() == 0 {
        assert!(watch.wait(std::time::Duration::from_secs(60)).unwrap());
    }
    victim.kill();
    let output = waiting.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "ours on host ended before it applied the limit.\n");
}

#[test]
fn limits_of_kvcached_pools() {
    let world = World::new();
    let path = world.kvcached_segment("theirs", [i64::try_from(GIB).unwrap(), 600 << 20, 7]);
    let ran = world.kvctl(&["limit", "theirs", "2G"]);
    assert_eq!(ran.quiet(), (0, "Updated kv cache limit for theirs to 2.00 GB (2147483648 bytes)\n"));
    assert_eq!(words(&path), [2 << 30, 600 << 20, 7]);
    let ran = world.kvctl(&["limit", "theirs", "512M", "--wait", "60s"]);
    assert_eq!(ran.code, 3, "used is above it, and nobody will say when it no longer is");
    assert!(ran.stderr.contains("does not say when"), "{ran:?}");
    assert_eq!(words(&path)[0], 512 << 20);
    assert!(world.kvctl(&["limit", "theirs", "0"]).error().contains("ignores a limit of 0"));
    assert_eq!(words(&path)[0], 512 << 20);
}

#[test]
fn unknown_names_and_dead_owners_are_a_no() {
    let world = World::new();
    assert_eq!(world.kvctl(&["limit", "ours", "1G"]).stderr, "Error: IPC 'ours' not found.\n");
    let _pool = world.pool("kvcached_vLLM_12", Bytes::gib(1));
    let ran = world.kvctl(&["limit", "kvcached_vllm_12", "1G"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (1, ""));
    assert!(ran.stderr.contains("Did you mean 'kvcached_vLLM_12'?"), "{ran:?}");
    Victim::spawn(&world, "victim").kill();
    let ran = world.kvctl(&["limit", "victim", "1M"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (1, ""));
    assert!(ran.stderr.contains("no living owner"), "{ran:?}");
    assert_eq!(words(&world.path("victim"))[0], 1 << 30, "unchanged");
    assert_eq!(world.files().iter().filter(|name| name.starts_with("ours")).count(), 0, "nothing is created");
}

#[test]
fn sizes_that_are_none_change_nothing() {
    let world = World::new();
    let _pool = world.pool("ours", Bytes::gib(1));
    for size in ["-1G", "G", "lots", "1.2.3G", "8E", "99999P", ""] {
        world.kvctl(&["limit", "ours", size]).error();
    }
    world.kvctl(&["limit", "ours", "1G", "--wait", "-1s"]).error();
    assert_eq!((words(&world.path("ours"))[0], world.entry("ours").limit_revision), (1 << 30, 0));
}

#[test]
fn a_ledger_lock_that_nobody_gives_back_is_an_error_within_seconds() {
    let world = World::new();
    let pool = world.pool("ours", Bytes::gib(1));
    let ran = pool.holding_the_lock(|| world.kvctl(&["limit", "ours", "512M", "--wait", "60s"]));
    let error = ran.error();
    assert!(error.contains("the segment of ours has the new limit") && error.contains("may be stopped"), "{error}");
    assert_eq!(words(&world.path("ours"))[0], 512 << 20, "the pool finds it there");
}

#[test]
fn percent_of_the_device() {
    let world = World::new();
    let _pool = world.pool("ours", Bytes::gib(4));
    assert!(world.kvctl(&["limit-percent", "ours", "50"]).error().contains("does not say how large"));
    world.device(Bytes::gib(1), Bytes::gib(1));
    assert_eq!(world.kvctl(&["limit-percent", "ours", "50"]).quiet(), (0, UPDATED));
    assert_eq!(world.kvctl(&["limit-percent", "ours", "12.5%", "--wait", "0"]).code, 3);
    assert_eq!(world.entry("ours").limit, Bytes::mib(128));
    for percent in ["-1", "101", "half"] {
        world.kvctl(&["limit-percent", "ours", percent]).error();
    }
    assert_eq!(world.entry("ours").limit, Bytes::mib(128));
    world.kvcached_segment("theirs", [1 << 30, 0, 0]);
    assert!(world.kvctl(&["limit-percent", "theirs", "50"]).error().contains("no ledger says"));
    assert_eq!(world.kvctl(&["limit-percent", "nobody", "50"]).code, 1);
}
