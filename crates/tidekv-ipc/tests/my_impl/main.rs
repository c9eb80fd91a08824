//! The worked example of `docs/adding-a-strategy.md`: the page's code is this folder's `my_impl.rs`, compiled here as it
//! would be in the crate, and run against real workers.

#[path = "../support/mod.rs"]
mod support;

/// What the example finds under `crate::broadcast` in the crate.
mod broadcast {
    pub(crate) use tidekv_ipc::broadcast::{Lane, Strategy};
}

mod my_impl;

use std::time::{Duration, Instant};

use support::{Fleet, is_done, map, unmap};
use tidekv_ipc::LaneError;
use tidekv_ipc::broadcast::StrategyEntry;
use tidekv_ipc::message::Deed;

const PAGE: &str = include_str!("../../../../docs/adding-a-strategy.md");
const CODE: &str = include_str!("my_impl.rs");
const REGISTRY: &str = include_str!("../../src/broadcast/registry.rs");

/// The processes that the tests start.
#[test]
fn worker() {
    let Some((words, dir)) = support::role() else { return };
    support::serve(&dir, &words);
}

/// What the line of the page makes of itself in the registry.
fn entry() -> StrategyEntry {
    macro_rules! entry {
        ($name:literal, $file:literal, $module:ident::$strategy:ident, $summary:literal;) => {
            StrategyEntry {
                name: $name,
                file: $file,
                summary: $summary,
                make: || Box::new($module::$strategy::default()),
            }
        };
    }
    entry! { "my_impl", "my_impl.rs", my_impl::MyImpl, "all orders out, then all answers in"; }
}

/// The page's code blocks, without their fences.
fn blocks() -> Vec<&'static str> {
    let mut blocks = Vec::new();
    let mut rest = PAGE;
    while let Some((_, after)) = rest.split_once("```rust\n") {
        let (block, behind) = after.split_once("```").expect("a fence is closed");
        blocks.push(block);
        rest = behind;
    }
    blocks
}

#[test]
fn the_page_shows_what_is_compiled() {
    let blocks = blocks();
    assert!(blocks.contains(&CODE), "docs/adding-a-strategy.md does not show tests/my_impl/my_impl.rs as it is");
    let line = r#""my_impl", "my_impl.rs", my_impl::MyImpl, "all orders out, then all answers in";"#;
    assert!(blocks.iter().any(|block| block.trim() == line), "the page does not show the registry's line");
    // A line of the same form is in the registry for each strategy that there is.
    let like_it = |name: &str| REGISTRY.contains(&format!("\n    \"{name}\", \"{name}"));
    assert!(["seq", "thread", "async", "ring"].into_iter().all(like_it));
}

#[test]
fn the_example_works() {
    let entry = entry();
    assert_eq!((entry.name, entry.file), ("my_impl", "my_impl.rs"));
    let mut fleet = Fleet::start(&entry, 4);
    for round in 0..100 {
        fleet.send_to_all(&map(&[round, round + 1]));
        fleet.send_to_all(&unmap(&[round]));
    }
    assert_eq!(fleet.held(), vec![vec![100]; 4]);
}

/// What every strategy gets from its lanes: deadlines, late answers, dead workers.
#[test]
fn the_example_keeps_the_promises() {
    let mut fleet = Fleet::start(&entry(), 3);
    fleet.workers[0].stop();
    let started = Instant::now();
    let answers = fleet.send_until(&map(&[1]), started + Duration::from_millis(200));
    assert!(matches!(answers[0].outcome, Err(LaneError::TimedOut { .. })), "{answers:?}");
    assert!(is_done(&answers[1]) && is_done(&answers[2]), "{answers:?}");
    fleet.workers[0].resume();
    assert_eq!(fleet.held(), vec![vec![1]; 3]);
    fleet.workers[1].kill();
    let answers = fleet.send(&Deed::Ping);
    assert_eq!(answers[1].outcome.clone().map(drop), Err(LaneError::Closed));
    assert!(is_done(&answers[0]) && is_done(&answers[2]), "{answers:?}");
}
