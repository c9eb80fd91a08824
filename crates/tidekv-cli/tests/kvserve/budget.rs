//! Who decides what all pools of a device may hold.

use std::sync::Arc;

use tidekv_core::units::Bytes;
use tidekv_shm::{DeviceName, Ledger, LedgerHeader, RuntimeDir};

use crate::process::Server;

fn header(server: &Server) -> LedgerHeader {
    let ledger = Ledger::open_existing(&RuntimeDir::at(server.dir.path()), &DeviceName::host()).unwrap();
    ledger.expect("the servers' ledger").read().unwrap().header
}

/// Seen: the default of the second server, 1 GiB, became the budget of all, for as long as anybody was there.
#[test]
fn a_server_without_a_budget_leaves_the_one_that_another_was_given() {
    let given = Server::start(&["--kv-budget", "256M", "--pool-name", "given"]);
    assert_eq!(header(&given).budget, Bytes::mib(256));
    let bare = Server::start_bare_in(Arc::clone(&given.dir));
    assert_eq!(header(&bare).budget, Bytes::mib(256));
    drop(given);
    assert_eq!(header(&bare).budget, Bytes::mib(256), "it holds for as long as the device has pools");
}

/// A default says how much one server takes, and nothing about its neighbours.
#[test]
fn the_budget_of_servers_without_one_is_the_devices() {
    let first = Server::start_bare_in(Arc::new(tempfile::tempdir().unwrap()));
    let alone = header(&first);
    assert!(!alone.explicit_budget, "{alone:?}");
    assert!(alone.budget > Bytes::ZERO && alone.budget < alone.total, "{alone:?}");
    let second = Server::start_in(Arc::clone(&first.dir), &["--kv-budget", "96M"], |_| ());
    assert_eq!((header(&second).budget, header(&second).explicit_budget), (Bytes::mib(96), true));
}
