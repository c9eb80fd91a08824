//! `kvctl budget`, and what the other commands say of a budget.

use serde_json::Value;
use tidekv_core::units::Bytes;
use tidekv_shm::{BudgetAuthor, BudgetRight, DEFAULT_UTILIZATION, LedgerHeader};

use crate::common::{World, patience};

fn header(world: &World) -> LedgerHeader {
    world.ledger().read().unwrap().header
}

/// As a pool does that was given one.
fn a_pool_gives(world: &World, budget: Bytes) {
    let author = BudgetAuthor { pid: 12, ..BudgetAuthor::here(BudgetRight::Pool, "chat") };
    world.ledger().update(patience(), |view| view.header.decide_budget(Some(budget), author)).unwrap();
}

#[test]
fn shown_with_who_decided_it() {
    let world = World::new();
    assert_eq!(world.kvctl(&["budget"]).quiet(), (0, "No pool uses a device.\n"));
    let pool = world.pool("chat", Bytes::gib(1));
    pool.uses(Bytes::mib(100), Bytes::mib(20));
    let derived = |header: &mut LedgerHeader| {
        (header.total, header.non_pool) = (Bytes::gib(4), Bytes::gib(1));
        header.derive_budget();
    };
    world.ledger().update(patience(), |view| derived(&mut view.header)).unwrap();
    let budget = Bytes::gib(4).part(DEFAULT_UTILIZATION).saturating_sub(Bytes::gib(1));
    let line = format!("host: {budget}, derived: 95 % of 4 GiB less 1 GiB that no pool holds; pools hold 120 MiB\n");
    assert_eq!(world.kvctl(&["budget", "host"]).quiet(), (0, line.as_str()));
    a_pool_gives(&world, Bytes::mib(256));
    let line = "host: 256 MiB, given by chat (pid 12); pools hold 120 MiB\n";
    assert_eq!(world.kvctl(&["budget"]).quiet(), (0, line));
    assert!(world.kvctl(&["list"]).quiet().1.ends_with("\nBudget of host: 256 MiB, given by chat (pid 12)\n"));
    assert!(world.kvctl(&["share", "chat"]).stdout.contains("256 MiB for all pools of host, given by chat (pid 12)\n"));
    assert!(world.kvctl(&["doctor"]).stdout.contains("budget of host: 256 MiB, given by chat (pid 12)"));

    let ran = world.kvctl(&["budget", "hots"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (1, ""));
    assert!(ran.stderr.contains("Did you mean 'host'?") && ran.stderr.contains("Devices: host"), "{ran:?}");
}

#[test]
fn an_operators_size_holds_until_auto() {
    let world = World::new();
    let pool = world.pool("chat", Bytes::gib(1));
    let known = |header: &mut LedgerHeader| (header.total, header.refreshed_ms) = (Bytes::gib(4), 1);
    world.ledger().update(patience(), |view| known(&mut view.header)).unwrap();
    a_pool_gives(&world, Bytes::mib(256));
    let ran = world.kvctl(&["budget", "host", "1G"]);
    let (code, text) = ran.quiet();
    assert!(
        code == 0 && text.starts_with("Updated the budget of host: 256 MiB -> 1 GiB, set by kvctl (pid "),
        "{ran:?}"
    );
    a_pool_gives(&world, Bytes::gib(2));
    assert_eq!((header(&world).budget, header(&world).is_operators()), (Bytes::gib(1), true));

    let ran = world.kvctl(&["budget", "host", "2G", "--json"]);
    let rows: Vec<Value> = serde_json::from_str(ran.quiet().1).unwrap();
    let words = ["device", "source", "author"].map(|key| rows[0][key].as_str().unwrap());
    assert_eq!((words, &rows[0]["budget_bytes"]), (["host", "operator", "kvctl"], &Value::from(2_u64 << 30)));
    assert_eq!(rows[0]["revision"], 3);

    let ran = world.kvctl(&["budget", "host", "auto"]);
    assert!(ran.quiet().1.contains("2 GiB -> 3.79 GiB, derived: 95 % of 4 GiB"), "{ran:?}");
    a_pool_gives(&world, Bytes::mib(256));
    assert_eq!(header(&world).budget, Bytes::mib(256), "an operator who says auto leaves it to pools");

    let events = world.kvctl(&["events"]);
    for part in ["256 MiB for all pools, by a pool", "256 MiB -> 1 GiB for all pools, by kvctl (pid ", "1 GiB -> 2 GiB"]
    {
        assert!(events.stdout.contains(part), "{part}: {events:?}");
    }
    drop(pool);
    assert_eq!(world.files(), [] as [&str; 0], "it lasts for as long as the device has pools");
}

#[test]
fn pools_that_hold_more_are_waited_for() {
    let world = World::new();
    let pool = world.pool("chat", Bytes::gib(1));
    pool.uses(Bytes::mib(600), Bytes::ZERO);
    assert_eq!(world.kvctl(&["budget", "host", "512M"]).code, 3);
    let ran = world.kvctl(&["budget", "host", "512M", "--wait", "20ms"]);
    let (code, text) = ran.quiet();
    assert!(code == 3 && text.ends_with("\nStill draining: pools of host hold 600 MiB.\n"), "{text}");
    let ledger = world.ledger();
    let gives = |entry: &mut tidekv_shm::LedgerEntry| {
        let is_told = ledger.read().unwrap().header.budget == Bytes::mib(256);
        if is_told {
            (entry.in_use, entry.reserved) = (Bytes::mib(200), Bytes::mib(200));
        }
        is_told
    };
    let ran = pool.answering(gives, || world.kvctl(&["budget", "host", "256M", "--wait", "60s"]));
    assert_eq!(ran.quiet().0, 0);
}

#[test]
fn sizes_that_are_probably_not_meant_are_warned_of() {
    let world = World::new();
    let _pool = world.pool("chat", Bytes::gib(1));
    world.device(Bytes::gib(4), Bytes::gib(4));
    let warned = |args: &[&str]| {
        let ran = world.kvctl(args);
        assert!(ran.code == 0 && ran.stderr.lines().count() <= 1, "{ran:?}");
        ran.stderr
    };
    assert!(warned(&["budget", "host", "0"]).starts_with("warning: with a budget of 0 no pool of host"));
    assert!(warned(&["budget", "host", "5G"]).starts_with("warning: host has 4 GiB in all"));
    assert_eq!(warned(&["budget", "host", "512M"]), "");
    assert_eq!(warned(&["limit", "chat", "512M"]), "");
    assert!(
        warned(&["limit", "chat", "1G"]).starts_with("warning: all pools of host together have 512 MiB: chat never")
    );
    assert_eq!(warned(&["limit", "chat", "0"]), "warning: with a limit of 0 chat can hold nothing.\n");
    assert!(warned(&["limit-percent", "chat", "0"]).starts_with("warning: with a limit of 0"));
    // Of what was given; of the device where nothing was.
    assert_eq!(warned(&["limit-percent", "chat", "50"]), "");
    assert_eq!(world.entry("chat").limit, Bytes::mib(256));
    assert_eq!(warned(&["budget", "host", "auto"]), "");
    assert_eq!(warned(&["limit-percent", "chat", "50"]), "");
    assert_eq!(world.entry("chat").limit, Bytes::gib(2));
}
