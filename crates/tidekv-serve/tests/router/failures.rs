//! Engines that die, and who notices.

use std::sync::Arc;

use serde_json::json;
use tidekv_serve::router::{Instance, Life, ModelSpec};

use crate::engine::Script;
use crate::running::{Answer, Running, read_until, settings, spec};

#[test]
fn an_engine_that_is_gone_is_a_502_and_others_answer() {
    let router = Running::start(settings(), vec![(spec("dead"), Arc::default()), (spec("alive"), Arc::default())]);
    // A port that nobody has: bound, and given back.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    router.models[0].set_instance(Instance {
        life: Life::Ready,
        address: Some(free.to_string()),
        pid: None,
        restarts: 0,
    });
    assert_eq!(router.complete(&json!({"model": "dead"})).code(), (502, "engine_gone".to_owned()));
    assert_eq!(router.complete(&json!({"model": "alive"})).status, 200);
    assert_eq!(router.send("GET", "/health/all", &[], "").status, 503);
    assert_eq!(router.get("/health/alive")["health"]["alive"], true);
}

#[test]
fn a_stream_whose_engine_dies_ends_with_a_word() {
    let script = Arc::new(Script::default());
    let router = Running::one(settings(), &script);
    let pieces = script.next_stream();
    let mut socket = router.open_complete(&json!({"model": "m", "stream": true}));
    pieces.send(Some("data: 1\n\n".into())).unwrap();
    read_until(&mut socket, "data: 1");
    pieces.send(None).unwrap();
    let seen = read_until(&mut socket, "data: [DONE]");
    assert!(seen.contains("engine_gone"), "{seen}");
    router.wait_for("m", "nobody", |status| status["in_flight"] == 0);
    assert_eq!(router.get("/traffic/stats/m")["model_stats"]["failed_requests"], 1);
}

/// The half of an event that came first must not swallow what is said of the end.
#[test]
fn what_is_said_of_an_engine_that_dies_in_an_event_is_an_event_of_its_own() {
    for (half, whole) in [("data: {\"choices\": [{\"te", false), ("data: 1\n\n", true)] {
        let script = Arc::new(Script::default());
        let router = Running::one(settings(), &script);
        let pieces = script.next_stream();
        let mut socket = router.open_complete(&json!({"model": "m", "stream": true}));
        pieces.send(Some(half.into())).unwrap();
        let mut seen = read_until(&mut socket, half);
        pieces.send(None).unwrap();
        seen += &read_until(&mut socket, "data: [DONE]");
        assert_eq!(seen.contains("\r\n\n\ndata: {\"error\""), !whole, "{seen}");
    }
}

#[test]
fn whoever_waits_for_an_instance_that_dies_is_told_at_once() {
    let script = Arc::new(Script { is_gated: true, ..Script::default() });
    let narrow = ModelSpec { max_concurrency: 1, ..spec("m") };
    let router = Running::start(settings(), vec![(narrow, Arc::clone(&script))]);
    let running = router.open_complete(&json!({"model": "m"}));
    router.wait_for("m", "one", |status| status["in_flight"] == 1);
    let queued: Vec<_> = (0..5).map(|_| router.open_complete(&json!({"model": "m"}))).collect();
    router.wait_for("m", "all", |status| status["queued"] == 5);
    let instance = router.models[0].instance();
    router.models[0].set_instance(Instance { life: Life::Restarting, address: None, pid: None, restarts: 0 });
    for socket in queued {
        assert_eq!(Answer::read(socket).code(), (502, "engine_restarting".to_owned()));
    }
    assert_eq!(router.complete(&json!({"model": "m"})).code(), (502, "engine_restarting".to_owned()));
    router.models[0].set_instance(Instance { restarts: 1, ..instance });
    script.gate.add_permits(2);
    assert_eq!(Answer::read(running).status, 200, "its engine never died");
    assert_eq!(router.complete(&json!({"model": "m"})).status, 200);
    assert_eq!(router.status("m")["restarts"], 1);
}

#[test]
fn an_instance_that_starts_or_has_failed_says_so() {
    let router = Running::one(settings(), &Arc::default());
    for (life, code) in [(Life::Starting, (503, "model_starting")), (Life::Failed, (502, "engine_failed"))] {
        router.models[0].set_instance(Instance { life, address: None, pid: None, restarts: 0 });
        let answer = router.complete(&json!({"model": "m"}));
        assert_eq!(answer.code(), (code.0, code.1.to_owned()));
    }
}
