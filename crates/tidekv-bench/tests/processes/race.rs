//! Two processes, one page.

use std::time::{SystemTime, UNIX_EPOCH};

use tidekv_bench::crew::memory_files::MemoryFiles;
use tidekv_bench::crew::{Order, Word};

use super::{PAGE, PATIENCE, Stage, grabbed, number_of};

/// Far enough ahead that both have read the order by then.
const HEAD_START_US: u64 = 60;

#[test]
fn exactly_one_of_two_processes_gets_the_last_page() {
    let rounds = number_of("TIDEKV_RACES", 10_000);
    let mut stage = Stage::new(1);
    let racers = ["left", "right"].map(|name| {
        let spec = stage.spec(name);
        stage.start(spec)
    });
    let files = MemoryFiles::of(racers.map(|id| stage.crew.pid(id).unwrap())).unwrap();
    assert_eq!(files.len(), 2);

    let mut wins = [0u32; 2];
    for round in 0..rounds {
        let order = Order::Grab { blocks: 1, at_us: unix_us() + HEAD_START_US, wait_ms: 0 };
        // Who hears of it first takes turns.
        let first = usize::try_from(round % 2).unwrap();
        for racer in [racers[first], racers[1 - first]] {
            stage.crew.send(racer, &order).unwrap();
        }
        let outcomes = stage.crew.wait_for_each(&racers, PATIENCE, "to the race", grabbed).unwrap();
        let winners: Vec<usize> = (0..2).filter(|&racer| outcomes[racer].0.is_none()).collect();
        assert_eq!(winners.len(), 1, "round {round}: {outcomes:?}");
        let refusal = outcomes[1 - winners[0]].0.as_ref().unwrap();
        assert!(refusal.transient, "round {round}: {refusal:?}");
        // Both are at rest, and the kernel sees one page.
        assert_eq!(files.total(), Some(PAGE), "round {round}");

        wins[winners[0]] += 1;
        stage.crew.send(racers[winners[0]], &Order::GiveBack).unwrap();
        let gave_back = |word: &Word| matches!(word, Word::GaveBack).then_some(());
        stage.crew.wait_for(racers[winners[0]], PATIENCE, "to give back", gave_back).unwrap();
    }
    println!("{rounds} races: {} : {}", wins[0], wins[1]);
    stage.crew.dismiss_all().unwrap();
}

fn unix_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros().try_into().unwrap()
}
