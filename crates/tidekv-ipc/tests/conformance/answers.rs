//! The ordinary case.

use tidekv_core::units::PageId;
use tidekv_ipc::LaneError;
use tidekv_ipc::broadcast::{Broadcaster, Ranks, StrategyEntry};
use tidekv_ipc::message::{Balance, Deed, PAGES_MAX, RefusalKind, Verdict};

use crate::support::{Fleet, Worker, folder, heading, is_done, map, page, soon, unmap};

pub(crate) fn everybody_answers(strategy: &StrategyEntry) {
    let mut fleet = Fleet::start(strategy, 4);
    fleet.send_to_all(&map(&[1, 2, 3]));
    fleet.send_to_all(&unmap(&[2]));
    assert_eq!(fleet.held(), vec![vec![1, 3]; 4]);
    fleet.send_to_all(&Deed::Ping);
    fleet.send_to_all(&Deed::Abort);
    for worker in &mut fleet.workers {
        assert!(worker.hear().starts_with("aborted 5 "));
    }
    let instances: Vec<u64> = fleet.workers.iter().map(|worker| worker.instance).collect();
    for (rank, answer) in (0..).zip(fleet.send(&Deed::Ping)) {
        let found = answer.outcome.as_ref().expect("an answer");
        assert_eq!((answer.rank, found.epoch), (rank, 6));
        let balance = Balance { owed_pages: 7, firm_pages: 3, grantable_pages: 5 };
        assert_eq!(found.balance, balance, "group, evictable and spare pages went and came back");
        assert_eq!(found.instance, instances[rank as usize]);
    }
}

pub(crate) fn only_those_who_are_meant(strategy: &StrategyEntry) {
    let mut fleet = Fleet::start(strategy, 3);
    let Fleet { caster, .. } = &mut fleet;
    // In any order, with one twice and one that does not exist.
    let answers = caster.send(Ranks::Some(&[2, 0, 2, 9]), heading(1), &map(&[5]), soon());
    let ranks: Vec<u32> = answers.iter().map(|answer| answer.rank).collect();
    assert_eq!(ranks, [0, 2, 9]);
    assert!(is_done(&answers[0]) && is_done(&answers[1]));
    assert_eq!(answers[2].outcome, Err(LaneError::NotConnected));
    assert!(caster.send(Ranks::Some(&[]), heading(2), &Deed::Ping, soon()).is_empty());
    assert_eq!(fleet.held(), [vec![5], vec![], vec![5]]);
    // A lane that we let go of is not sent to, and its worker gives back what it had.
    fleet.caster.disconnect(2);
    fleet.workers[2].expect("gone");
    let answers = fleet.send(&Deed::Ping);
    assert!(is_done(&answers[0]) && is_done(&answers[1]));
    assert_eq!(answers[2].outcome, Err(LaneError::NotConnected));
    fleet.connect();
    assert_eq!(fleet.held(), [vec![5], vec![], vec![]]);
}

pub(crate) fn a_refusal_names_its_rank(strategy: &StrategyEntry) {
    let mut fleet = Fleet::start(strategy, 2);
    for (rank, answer) in (0..).zip(fleet.send(&map(&[page::REFUSED]))) {
        let Verdict::Refused(refusal) = &answer.outcome.as_ref().expect("an answer").verdict else { panic!("refused") };
        assert_eq!((answer.rank, refusal.kind), (rank, RefusalKind::Exhausted));
        assert_eq!(refusal.reason, "there is too little");
    }
    fleet.send_to_all(&Deed::Ping);
}

pub(crate) fn long_orders_arrive_whole(strategy: &StrategyEntry) {
    let mut fleet = Fleet::start(strategy, 3);
    let pages: Vec<u32> = (0..16_000).collect();
    for _ in 0..3 {
        fleet.send_to_all(&map(&pages));
        assert!(fleet.held().iter().all(|held| *held == pages));
        fleet.send_to_all(&unmap(&pages[1..]));
        assert_eq!(fleet.held(), vec![vec![0]; 3]);
    }
}

pub(crate) fn a_stage_has_its_own_workers(strategy: &StrategyEntry) {
    let (_root, dir) = folder();
    let mut workers = [(0, 0), (2, 0)].map(|(stage, rank)| Worker::start(&dir, stage, rank));
    for (stage, pages) in [(0, [1]), (2, [2])] {
        let mut caster = Broadcaster::new(dir.clone(), stage, 1, strategy, None);
        let worker = &mut workers[usize::from(stage > 0)];
        assert_eq!(caster.connect(soon()), [Ok(worker.instance)]);
        assert!(is_done(&caster.send(Ranks::All, heading(1), &map(&pages), soon())[0]));
        let held = &caster.send(Ranks::All, heading(2), &Deed::Held, soon())[0];
        assert_eq!(held.outcome.as_ref().expect("an answer").verdict, Verdict::Held(vec![PageId(pages[0])]));
    }
}

pub(crate) fn too_many_pages_are_sent_to_nobody(strategy: &StrategyEntry) {
    let mut fleet = Fleet::start(strategy, 2);
    let pages: Vec<u32> = (0..16_001).collect();
    for answer in fleet.send(&map(&pages)) {
        assert_eq!(answer.outcome, Err(LaneError::TooManyPages { pages: 16_001, max: PAGES_MAX }));
    }
    assert_eq!(fleet.held(), vec![vec![]; 2], "the lanes are as they were");
}
