//! What an idle server holds, as each place says it: needed by requests, cached, idle.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tidekv_core::share::MemoryUse;
use tidekv_core::units::{Bytes, GroupId};
use tidekv_shm::{DeviceName, Ledger, LedgerEntry, RuntimeDir};

use crate::process::{Server, kvctl};

/// Long enough that only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(60);
const TEXT: &str = "/v1/completions";

/// A server whose requests have ended: their prefixes are all that it holds, once what was mapped ahead is given back.
fn idle_with_a_full_cache() -> Server {
    let server = Server::start_with(&["--kv-budget", "16M"], |command| {
        command.env("KVCACHED_MAX_CACHED_TOKENS", "100000").env("KVCACHED_MAX_RESERVED_PAGES", "0");
    });
    for word in ["one ", "two ", "three "] {
        server.good("POST", TEXT, &json!({"prompt": word.repeat(100), "max_tokens": 2}));
    }
    server.wait_for_metric("vllm:num_requests_running", 0.0);
    server
}

fn ledger(server: &Server) -> Ledger {
    Ledger::open_existing(&RuntimeDir::at(server.dir.path()), &DeviceName::host()).unwrap().expect("it serves")
}

fn entry(ledger: &Ledger) -> LedgerEntry {
    let view = ledger.read().unwrap();
    assert_eq!((view.entries.len(), view.entries[0].group), (1, GroupId(0)));
    view.entries[0].clone()
}

/// Waits until the ledger says that all is cached, which is as soon as the pool's own thread has looked.
fn until_all_is_cached(ledger: &Ledger) -> LedgerEntry {
    let (watch, deadline) = (ledger.watch().unwrap(), Instant::now() + PATIENCE);
    loop {
        let now = entry(ledger);
        if now.idle == Bytes::ZERO && now.reserved > Bytes::ZERO && now.usage().cached == now.reserved {
            return now;
        }
        assert!(Instant::now() < deadline, "{} held, {} in use: {:?}", now.reserved, now.in_use, now.usage());
        watch.wait(Duration::from_millis(200)).unwrap();
    }
}

fn listed(server: &Server) -> (Value, MemoryUse) {
    let list = kvctl(server.dir.path(), &["list", "--json"]);
    let row = serde_json::from_slice::<Value>(&list.stdout).unwrap()[0].clone();
    let bytes = |name: &str| Bytes(row[name].as_u64().unwrap_or_else(|| panic!("no {name} in {row}")));
    let usage = MemoryUse { needed: bytes("needed_bytes"), cached: bytes("cached_bytes"), idle: bytes("idle_bytes") };
    assert_eq!(usage.held(), bytes("reserved_bytes"), "{row}");
    (row, usage)
}

#[test]
fn an_idle_server_needs_nothing_of_what_its_cache_holds() {
    let server = idle_with_a_full_cache();
    let usage = until_all_is_cached(&ledger(&server)).usage();
    assert_eq!(usage.needed, Bytes::ZERO);
    let (row, shown) = listed(&server);
    assert_eq!(shown, usage);
    assert_eq!(row["used_bytes"], usage.cached.0, "kvcached's word counts it as used");
    let metric = |name: &str| server.metric(&format!("kvcached_kv_cache_pool_{name}_bytes"));
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    let cached = usage.cached.0 as f64;
    let said = ["needed", "cached", "idle", "used", "mapped"].map(metric);
    assert!(said.iter().zip([0.0, cached, 0.0, cached, cached]).all(|(a, b)| (a - b).abs() < 0.5), "{said:?}");
    let name = row["ipc"].as_str().unwrap();
    let share = kvctl(server.dir.path(), &["share", name]);
    let share = String::from_utf8_lossy(&share.stdout).into_owned();
    assert!(share.contains(&format!("{0}: 0 B needed, {0} cached, 0 B idle", usage.cached)), "{share}");
}

#[test]
fn trim_gives_cached_prefixes_back_when_asked_for_them() {
    let server = idle_with_a_full_cache();
    let ledger = ledger(&server);
    let before = until_all_is_cached(&ledger).reserved;
    let name = listed(&server).0["ipc"].as_str().unwrap().to_owned();
    let plain = kvctl(server.dir.path(), &["trim", &name, "--wait", "60s"]);
    assert_eq!(plain.status.code(), Some(0), "{plain:?}");
    assert_eq!(entry(&ledger).reserved, before, "a plain trim leaves the cache alone");
    let ran = kvctl(server.dir.path(), &["trim", &name, "--cached", "--wait", "60s"]);
    assert_eq!(ran.status.code(), Some(0), "{ran:?}");
    assert_eq!(String::from_utf8_lossy(&ran.stdout), format!("{name} gave back {before} and holds 0 B.\n"));
    // It goes on as before.
    server.good("POST", TEXT, &json!({"prompt": "one ".repeat(100), "max_tokens": 2}));
}
