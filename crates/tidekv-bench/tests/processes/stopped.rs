//! A process stopped with the ledger's lock in its hands.

use std::time::Duration;

use tidekv_bench::crew::{Order, Word};

use super::{PATIENCE, Stage, grabbed};

/// What the neighbour waits for memory, and what it may take beyond that.
const WAIT_MS: u64 = 100;
const ANSWER_MAX: Duration = Duration::from_secs(2);

#[test]
fn a_stopped_lock_holder_costs_its_neighbours_a_typed_timeout_and_no_more() {
    let mut stage = Stage::new(16);
    let [holder, neighbour] = ["holder", "neighbour"].map(|name| {
        let spec = stage.spec(name);
        stage.start(spec)
    });
    stage.crew.send(holder, &Order::HoldLedgerLock).unwrap();
    stage.crew.wait_for(holder, PATIENCE, "to its lock", |word| matches!(word, Word::Locked).then_some(())).unwrap();
    stage.crew.stop(holder).unwrap();

    let grab = Order::Grab { blocks: 1, at_us: 0, wait_ms: WAIT_MS };
    stage.crew.send(neighbour, &grab).unwrap();
    let (refusal, took) = stage.crew.wait_for(neighbour, PATIENCE, "to an answer", grabbed).unwrap();
    let refusal = refusal.expect("nobody can reserve while the lock is held");
    println!("refused after {took:?}: {}", refusal.text);
    assert!(refusal.transient, "{refusal:?}");
    assert!(took < ANSWER_MAX, "{took:?}");

    stage.crew.resume(holder).unwrap();
    stage.want(holder, 0);
    let unlocked = |word: &Word| matches!(word, Word::Unlocked).then_some(());
    stage.crew.wait_for(holder, PATIENCE, "to its end", unlocked).unwrap();
    stage.crew.send(neighbour, &grab).unwrap();
    let (refusal, _) = stage.crew.wait_for(neighbour, PATIENCE, "to an answer", grabbed).unwrap();
    assert_eq!(refusal, None);
    stage.crew.dismiss_all().unwrap();
}
