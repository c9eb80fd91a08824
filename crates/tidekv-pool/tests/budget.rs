//! Who decides what all pools of a device may hold, and that living pools obey.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::sync::{Arc, Mutex, mpsc};
use std::time::Instant;

use support::{BLOCKS, Device, NO_WORK, SOON, alloc, assert_balanced, pages};
use tidekv_core::units::Bytes;
use tidekv_mem::Backend;
use tidekv_pool::{DEFAULT_UTILIZATION, KvPool, PoolConfig, ReclaimRequest};
use tidekv_shm::{BudgetAuthor, BudgetRight, DeviceName, EventKind, EventReader, LedgerHeader, Reason};

fn header(device: &Device) -> LedgerHeader {
    device.ledger().read().unwrap().header
}

/// What `kvctl budget` does.
fn operator_sets(device: &Device, size: Option<Bytes>) {
    let author = BudgetAuthor::here(BudgetRight::Operator, "kvctl");
    device.ledger().update(Instant::now() + SOON, |view| view.header.decide_budget(size, author)).unwrap();
}

fn author(device: &Device) -> Option<String> {
    header(device).setting.author.map(|author| author.name.as_str().to_owned())
}

fn open(device: &Device, name: &str, budget: Option<Bytes>, utilization: Option<f64>) -> KvPool {
    KvPool::open(PoolConfig { budget, utilization, ..device.config(name) }).unwrap()
}

#[test]
fn a_default_never_overrules_what_somebody_gave() {
    let device = Device::new(8);
    let given = open(&device, "given", Some(pages(8)), None);
    let _bare = open(&device, "bare", None, None);
    let _part = open(&device, "part", None, Some(0.5));
    assert_eq!((header(&device).budget, author(&device)), (pages(8), Some("given".to_owned())));
    let _later = open(&device, "later", Some(pages(12)), None);
    assert_eq!((header(&device).budget, author(&device)), (pages(12), Some("later".to_owned())), "of two the later");
    operator_sets(&device, Some(pages(4)));
    let _last = open(&device, "last", Some(pages(16)), None);
    assert_eq!((header(&device).budget, author(&device)), (pages(4), Some("kvctl".to_owned())));
    alloc(&given, 4 * BLOCKS);
    assert!(given.alloc(BLOCKS, &mut Vec::new()).unwrap_err().is_transient(), "the living obey");

    operator_sets(&device, None);
    let total = device.backend.memory().unwrap().total;
    device.until("the budget is derived, from the part that was asked for", |view| {
        view.header.budget == Bytes(total.0 / 2) && view.header.refreshed_ms > 0
    });
    alloc(&given, BLOCKS);
}

#[test]
fn the_part_that_somebody_asked_for_is_everybodys() {
    let device = Device::new(1);
    let total = device.backend.memory().unwrap().total;
    let bare = open(&device, "bare", None, None);
    assert_eq!((header(&device).budget, author(&device)), (total.part(DEFAULT_UTILIZATION), None));
    let _half = open(&device, "half", None, Some(0.5));
    let _other = open(&device, "other", None, None);
    assert_eq!((header(&device).budget, author(&device)), (Bytes(total.0 / 2), Some("half".to_owned())));
    // A pool of an older release derives it from a part of its own: it is put right at the next look.
    let older = |view: &mut tidekv_shm::LedgerView| view.header.budget = total;
    device.ledger().update(Instant::now() + SOON, older).unwrap();
    device.until("the part holds", |view| view.header.budget == Bytes(total.0 / 2));
    assert_balanced(&bare);
}

/// A budget that is set lower is kept as a limit is: also what is in use goes, of whoever holds more than its share.
#[test]
fn a_budget_that_is_set_lower_is_kept_by_the_living() {
    let device = Device::new(8);
    let (large, small) = (device.pool("large"), device.pool("small"));
    let held = Arc::new(Mutex::new(alloc(&large, 6 * BLOCKS)));
    let _leases = alloc(&small, 2 * BLOCKS);
    // What an engine does: it evicts on its own thread.
    let (evict, orders) = mpsc::channel::<ReclaimRequest>();
    let evicting = large.clone();
    let engine = std::thread::spawn(move || {
        for order in orders {
            assert_eq!(order.pages, order.firm_pages, "requests that run make room");
            let mut held = held.lock().unwrap();
            let keep = held.len().saturating_sub((order.pages * BLOCKS) as usize);
            evicting.free(&held.split_off(keep), NO_WORK).unwrap();
        }
    });
    large.on_reclaim(move |request| evict.send(request).unwrap_or_default());
    let (asked, is_asked) = mpsc::channel();
    small.on_reclaim(move |request| asked.send(request).unwrap_or_default());

    operator_sets(&device, Some(pages(4)));
    device.until("pools hold no more than the budget", |view| view.reserved() <= pages(4));
    let reserved = |pool: &KvPool| device.entry(pool).reserved;
    assert_eq!((reserved(&large), reserved(&small)), (pages(2), pages(2)));
    operator_sets(&device, Some(pages(16)));
    assert!(is_asked.try_recv().is_err(), "the small one holds its share");
    let mut more = Vec::new();
    small.alloc_within(12 * BLOCKS, SOON, &mut more).unwrap();

    let device_name = DeviceName::new(&device.backend.capabilities().id).unwrap();
    let told = EventReader::open(&device.runtime_dir(), &device_name).unwrap().unwrap().read().unwrap().events;
    let budgets: Vec<_> = told
        .iter()
        .filter(|event| event.kind == EventKind::Budget)
        .map(|event| (event.reason, event.free, event.budget, event.peer.clone()))
        .collect();
    let given = budgets[0].3.as_ref().map(|peer| peer.name.as_str());
    assert_eq!((budgets[0].0, given, budgets[0].2), (Reason::Given, Some("large"), pages(8)));
    assert_eq!(budgets[1], (Reason::Operator, pages(8), pages(4), None));
    assert_eq!(budgets[2], (Reason::Operator, pages(4), pages(16), None));
    let asked = told.iter().find(|event| event.kind == EventKind::EvictAsked).unwrap();
    assert_eq!((asked.reason, asked.bytes), (Reason::OverBudget, pages(4)));
    // The callback goes with the pool, the channel with the callback, the engine with the channel.
    large.on_reclaim(|_| {});
    engine.join().unwrap();
}
