//! Sleeping, waking, ending; what a request is told about its end.

use std::time::Duration;

use tidekv_core::units::Bytes;
use tidekv_serve::config::KvMode;
use tidekv_serve::handle::{
    Event, FinishReason, GenerateError, GenerateRequest, Health, Sampling, SleepError, SubmitError, TokenLogprob,
};

use crate::support::{Lab, PAGE, config, finish, request, text, tokens};

#[test]
fn a_model_that_sleeps_holds_nothing_and_wakes_up_the_same() {
    for (kv, level) in [(KvMode::Elastic, 1), (KvMode::Elastic, 2), (KvMode::Static(Bytes(16 * PAGE.0)), 1)] {
        let lab = Lab::new(|dir| config(dir, kv, 16));
        let before = tokens(lab.submit(&text(1, 60), 10));
        let running = lab.submit(&text(2, 60), 30);
        lab.engine.sleep(level).unwrap();
        assert!(lab.engine.is_sleeping());
        assert_eq!(tokens(running).len(), 30, "what ran was allowed to end");
        let stats = lab.engine.stats();
        assert_eq!((stats.blocks_used, stats.memory.held()), (0, Bytes::ZERO), "{stats:?}");
        assert_eq!(lab.engine.submit(request(&[1], 1)).map(drop).unwrap_err(), SubmitError::Asleep);
        lab.engine.sleep(1).unwrap();
        lab.engine.wake_up().unwrap();
        lab.engine.wake_up().unwrap();
        assert!(!lab.engine.is_sleeping());
        assert_eq!(tokens(lab.submit(&text(1, 60), 10)), before);
        lab.assert_nothing_leaked();
    }
    let lab = Lab::elastic(16);
    for level in [0, 3] {
        assert_eq!(lab.engine.sleep(level), Err(SleepError::Level { level }));
    }
    assert!(!lab.engine.is_sleeping());
}

#[test]
fn draining_lets_what_runs_end_and_refuses_the_rest() {
    let lab = Lab::elastic(64);
    let running: Vec<_> = (0..10).map(|number| lab.submit(&text(number, 30), 20)).collect();
    lab.engine.drain(Duration::from_secs(120));
    assert_eq!(lab.engine.health(), Health::Stopped);
    assert!(running.into_iter().all(|generation| tokens(generation).len() == 20));
    assert_eq!(lab.engine.submit(request(&[1], 1)).map(drop).unwrap_err(), SubmitError::ShutDown);
    assert_eq!(lab.engine.sleep(1), Err(SleepError::ShutDown));
    let stats = lab.engine.stats();
    assert_eq!((stats.blocks_used, stats.running, stats.waiting), (0, 0, 0));
}

#[test]
fn what_does_not_end_in_time_is_told_so() {
    let lab = Lab::elastic(256);
    let mut running = lab.submit(&text(1, 30), 10_000);
    running.blocking_next().unwrap();
    lab.engine.drain(Duration::ZERO);
    assert_eq!(finish(running).unwrap_err(), GenerateError::ShutDown);
    assert_eq!(lab.engine.stats().blocks_used, 0);
}

#[test]
fn an_engine_that_is_dropped_ends_its_requests_and_its_pool() {
    let lab = Lab::elastic(256);
    let running = lab.submit(&text(1, 30), 10_000);
    let dir = lab.dir.clone();
    drop(lab);
    assert_eq!(finish(running).unwrap_err(), GenerateError::ShutDown);
    let left: Vec<_> = dir.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().contains("engine-test")), "{left:?}");
}

#[test]
fn a_stop_token_ends_a_text_unless_it_is_ignored() {
    let lab = Lab::elastic(64);
    let all = tokens(lab.submit(&text(5, 20), 20));
    let stop = all[7];
    let first = all.iter().position(|&id| id == stop).unwrap();
    let stopping = GenerateRequest { stop_tokens: vec![stop], ..request(&text(5, 20), 20) };
    let (said, reason, usage) = finish(lab.engine.submit(stopping.clone()).unwrap()).unwrap();
    assert_eq!((&said[..], reason), (&all[..=first], FinishReason::Stop));
    assert_eq!((usage.prompt_tokens, usage.completion_tokens as usize), (20, first + 1));
    let ignoring = GenerateRequest { ignore_eos: true, ..stopping };
    assert_eq!(finish(lab.engine.submit(ignoring).unwrap()).unwrap().0, all);
}

#[test]
fn probabilities_are_said_when_asked_for() {
    let lab = Lab::elastic(64);
    let asking = GenerateRequest { logprobs: Some(3), ..request(&text(5, 20), 4) };
    let mut generation = lab.engine.submit(asking).unwrap();
    for _ in 0..4 {
        let Some(Event::Token { id, logprob: Some(TokenLogprob { logprob, top }) }) = generation.blocking_next() else {
            panic!("a token with its probability")
        };
        assert_eq!((top.len(), top[0]), (3, (id, logprob)), "greedy takes the likeliest");
        assert!(logprob <= 0.0 && top[0].1 >= top[1].1 && top[1].1 >= top[2].1);
    }
    let drawn = GenerateRequest { sampling: Sampling { temperature: 5.0, ..Sampling::GREEDY }, ..request(&[1], 40) };
    let twice = [drawn.clone(), drawn].map(|request| tokens(lab.engine.submit(request).unwrap()));
    assert_ne!(twice[0], twice[1], "without a seed every request draws its own");
}
