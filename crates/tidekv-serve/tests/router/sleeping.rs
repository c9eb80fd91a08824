//! When models sleep, and that nobody notices more of it than a wait.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};
use tidekv_serve::router::{EngineKind, ModelSpec, Settings, SleepSettings};

use crate::engine::Script;
use crate::running::{Answer, Running, read_until, settings, spec};

/// Looks often and is quick to put to sleep.
fn drowsy() -> Settings {
    let sleep = SleepSettings {
        is_automatic: true,
        idle_threshold: Duration::from_millis(30),
        check_interval: Duration::from_millis(5),
        min_sleep: Duration::ZERO,
        ..SleepSettings::default()
    };
    Settings { sleep, ..settings() }
}

fn is_sleeping(status: &Value) -> bool {
    status["state"] == "sleeping"
}

fn put_to_sleep(router: &Running, name: &str) {
    let answer = router.send("POST", &format!("/action/sleep/{name}"), &[], "");
    assert_eq!((answer.status, &answer.json()["success"]), (200, &json!(true)), "{}", answer.body);
}

#[test]
fn fifty_requests_wake_a_model_once() {
    let script = Arc::new(Script { is_wake_gated: true, ..Script::default() });
    let router = Running::one(settings(), &script);
    put_to_sleep(&router, "m");
    assert!(is_sleeping(&router.status("m")));
    let sockets: Vec<_> = (0..50).map(|_| router.open_complete(&json!({"model": "m"}))).collect();
    router.wait_for("m", "all of them", |status| status["in_flight"] == 50 && status["state"] == "waking");
    script.wake_gate.add_permits(50);
    for socket in sockets {
        assert_eq!(Answer::read(socket).status, 200);
    }
    assert_eq!((script.asked_of("/sleep").len(), script.asked_of("/wake_up").len()), (1, 1));
    assert_eq!(script.asked_of("/v1/completions").len(), 50);
}

#[test]
fn a_stream_is_never_slept_under_and_a_model_that_nobody_used_sleeps() {
    let (busy, unused) = (Arc::new(Script::default()), Arc::new(Script::default()));
    let router =
        Running::start(drowsy(), vec![(spec("busy"), Arc::clone(&busy)), (spec("unused"), Arc::clone(&unused))]);
    let pieces = busy.next_stream();
    let mut socket = router.open_complete(&json!({"model": "busy", "stream": true}));
    pieces.send(Some("data: 1\n\n".into())).unwrap();
    read_until(&mut socket, "data: 1");
    // It may have slept before the request came, which woke it up.
    let before = busy.asked_of("/sleep").len();
    // For the other one the threshold passes again and again.
    for round in 1..=5 {
        router.wait_for("unused", "sleep", is_sleeping);
        assert!(unused.asked_of("/sleep").len() >= round);
        assert_eq!(router.send("POST", "/action/wakeup/unused", &[], "").status, 200);
    }
    assert_eq!(busy.asked_of("/sleep").len(), before, "slept under a stream");
    assert_eq!(router.status("busy")["idle_s"], 0.0);
    pieces.send(Some("data: 2\n\n".into())).unwrap();
    drop(pieces);
    read_until(&mut socket, "data: 2");
    router.wait_for("busy", "sleep, now that the stream is over", is_sleeping);
}

#[test]
fn the_shortest_sleep_is_waited_for_and_not_refused() {
    let script = Arc::new(Script::default());
    let min_sleep = Duration::from_millis(300);
    let sleep = SleepSettings { min_sleep, ..SleepSettings::default() };
    let router = Running::one(Settings { sleep, ..settings() }, &script);
    put_to_sleep(&router, "m");
    assert_eq!(router.complete(&json!({"model": "m"})).status, 200);
    let (slept, woke) = (script.asked_of("/sleep")[0].at, script.asked_of("/wake_up")[0].at);
    assert!(woke - slept >= min_sleep, "{:?}", woke - slept);
}

#[test]
fn a_failed_wake_is_said_and_tried_again_by_the_next() {
    let script = Arc::new(Script { failing_wakes: 1.into(), ..Script::default() });
    let router = Running::one(settings(), &script);
    put_to_sleep(&router, "m");
    let refused = router.complete(&json!({"model": "m"}));
    assert_eq!(refused.code(), (502, "wake_failed".to_owned()));
    assert!(refused.body.contains("no memory"), "{}", refused.body);
    assert!(is_sleeping(&router.status("m")));
    assert_eq!(script.failing_wakes.load(Ordering::SeqCst), 0);
    assert_eq!(router.complete(&json!({"model": "m"})).status, 200);
}

#[test]
fn without_waking_on_request_a_sleeper_is_refused() {
    let sleep = SleepSettings { wakes_on_request: false, min_sleep: Duration::ZERO, ..SleepSettings::default() };
    let router = Running::one(Settings { sleep, ..settings() }, &Arc::default());
    put_to_sleep(&router, "m");
    assert_eq!(router.complete(&json!({"model": "m"})).code(), (503, "model_asleep".to_owned()));
    assert_eq!(router.send("POST", "/action/wakeup/m", &[], "").status, 200);
    assert_eq!(router.complete(&json!({"model": "m"})).status, 200);
}

/// It slept before the router came, or somebody else told it to.
#[test]
fn an_engine_that_sleeps_unknown_to_the_router_is_woken_once_for_fifty_requests() {
    let script = Arc::new(Script { is_asleep: true.into(), is_wake_gated: true, ..Script::default() });
    // The shortest sleep is one that the router saw begin.
    let sleep = SleepSettings { min_sleep: Duration::from_secs(3600), ..SleepSettings::default() };
    let router = Running::one(Settings { sleep, ..settings() }, &script);
    assert_eq!(router.status("m")["state"], "ready");
    let sockets: Vec<_> = (0..50).map(|_| router.open_complete(&json!({"model": "m"}))).collect();
    router.wait_for("m", "all of them", |status| status["in_flight"] == 50 && status["state"] == "waking");
    script.wake_gate.add_permits(50);
    for socket in sockets {
        let answer = Answer::read(socket);
        assert_eq!(answer.status, 200, "{}", answer.body);
    }
    assert_eq!(script.asked_of("/wake_up").len(), 1);
}

#[test]
fn an_engine_whose_sleep_is_somebody_elses_is_asked_again_with_every_request() {
    let sleep = SleepSettings { wakes_on_request: false, ..SleepSettings::default() };
    for (sleep, engine) in [(sleep, EngineKind::Kvserve), (SleepSettings::default(), EngineKind::Command)] {
        let script = Arc::new(Script { is_asleep: true.into(), ..Script::default() });
        let models = vec![(ModelSpec { engine, ..spec("m") }, Arc::clone(&script))];
        let router = Running::start(Settings { sleep, ..settings() }, models);
        for _ in 0..2 {
            assert_eq!(router.complete(&json!({"model": "m"})).code(), (503, "model_asleep".to_owned()), "{engine:?}");
        }
        // Woken past the router, which had taken it for asleep for ever.
        script.is_asleep.store(false, Ordering::SeqCst);
        assert_eq!(router.complete(&json!({"model": "m"})).status, 200, "{engine:?}");
        assert!(script.asked_of("/wake_up").is_empty());
    }
}

#[test]
fn somebody_can_always_wake_a_model() {
    let script = Arc::new(Script { is_asleep: true.into(), ..Script::default() });
    let router = Running::one(settings(), &script);
    for round in 1..=2 {
        let answer = router.send("POST", "/action/wakeup/m", &[], "");
        assert_eq!((answer.status, &answer.json()["message"]), (200, &json!("m is awake")), "{}", answer.body);
        assert_eq!((script.asked_of("/wake_up").len(), &router.status("m")["state"]), (round, &json!("ready")));
    }
    assert!(!script.is_asleep.load(Ordering::SeqCst));
    // One that the engine refuses changes nothing.
    script.failing_wakes.store(1, Ordering::SeqCst);
    assert_eq!(router.send("POST", "/action/wakeup/m", &[], "").status, 400);
    assert_eq!(router.complete(&json!({"model": "m"})).status, 200);
}

#[test]
fn a_sleep_whose_answer_is_lost_is_a_sleep() {
    let script = Arc::new(Script { lost_sleeps: 1.into(), ..Script::default() });
    let router = Running::one(settings(), &script);
    put_to_sleep(&router, "m");
    assert!(is_sleeping(&router.status("m")));
    assert_eq!(router.complete(&json!({"model": "m"})).status, 200);
    assert_eq!((script.asked_of("/wake_up").len(), script.asked_of("/v1/completions").len()), (1, 1));
}

#[test]
fn orders_that_cannot_be_carried_out_say_why() {
    let script = Arc::new(Script { is_gated: true, ..Script::default() });
    let command = ModelSpec { engine: EngineKind::Command, ..spec("own") };
    let router = Running::start(settings(), vec![(spec("m"), Arc::clone(&script)), (command, Arc::default())]);
    let order = |path: &str| {
        let answer = router.send("POST", path, &[], "");
        let body = answer.json();
        assert_eq!(body["success"], false, "{body}");
        (answer.status, body["message"].as_str().unwrap().to_owned())
    };
    assert_eq!(order("/action/sleep/nobody").0, 404);
    assert!(order("/action/sleep/own").1.contains("command of yours"));
    assert!(order("/action/wakeup/own").1.contains("command of yours"));
    let running = router.open_complete(&json!({"model": "m"}));
    router.wait_for("m", "one", |status| status["in_flight"] == 1);
    assert_eq!(
        order("/action/sleep/m"),
        (400, "m: 1 requests are present: it sleeps when nobody waits for it".to_owned())
    );
    script.gate.add_permits(1);
    assert_eq!(Answer::read(running).status, 200);
    router.wait_for("m", "nobody", |status| status["in_flight"] == 0);
    put_to_sleep(&router, "m");
    assert_eq!(order("/action/sleep/m"), (400, "m: it is asleep already".to_owned()));
    assert!(script.asked_of("/sleep")[0].body["level"] == "1");
}

#[test]
fn a_new_process_is_awake() {
    let router = Running::one(settings(), &Arc::default());
    put_to_sleep(&router, "m");
    let mut instance = router.models[0].instance();
    instance.pid = Some(99);
    router.models[0].set_instance(instance);
    assert_eq!(router.status("m")["state"], "ready");
    assert_eq!(router.complete(&json!({"model": "m"})).status, 200);
}
