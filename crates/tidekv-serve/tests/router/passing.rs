//! What passes through the router, and that it is the same on the other side.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde_json::{Value, json};

use crate::engine::Script;
use crate::running::{Answer, Running, read_until, settings, spec, with_key};

#[test]
fn a_model_is_found_by_each_of_its_names_and_called_by_its_own() {
    let (first, second) = (Arc::new(Script::default()), Arc::new(Script::default()));
    let router = Running::start(settings(), vec![(spec("a"), Arc::clone(&first)), (spec("b"), Arc::clone(&second))]);
    for name in ["a", "org/a", "served-a", "default"] {
        let answer = router.complete(&json!({"model": name, "prompt": "x"}));
        assert_eq!((answer.status, &answer.json()["model"]), (200, &json!("served-a")), "{name}");
    }
    for name in ["b", "org/b", "served-b"] {
        assert_eq!(router.complete(&json!({"model": name})).json()["model"], "served-b");
    }
    assert_eq!((first.asked.lock().unwrap().len(), second.asked.lock().unwrap().len()), (4, 3));
    let listed = router.get("/v1/models");
    assert_eq!((&listed["data"][0]["id"], &listed["data"][1]["root"]), (&json!("a"), &json!("org/b")));
    assert_eq!(router.get("/v1/models/org/b")["id"], "b");
}

#[test]
fn who_names_no_model_is_told_which_there_are() {
    let router = Running::one(settings(), &Arc::default());
    let answer = router.complete(&json!({"model": "x", "prompt": "x"}));
    assert_eq!(answer.code(), (404, "model_not_found".to_owned()));
    assert!(answer.body.contains("\\\"m\\\"") && answer.body.contains("default"), "{}", answer.body);
    assert_eq!(router.complete(&json!({"prompt": "x"})).code(), (400, "missing_model".to_owned()));
    assert_eq!(router.complete(&json!({"model": 7})).code(), (400, "missing_model".to_owned()));
    assert_eq!(router.send("POST", "/v1/completions", &[], "{").code(), (400, "invalid_json".to_owned()));
    assert_eq!(router.send("GET", "/v1/completions", &[], "").code(), (405, "method_not_supported".to_owned()));
    assert_eq!(router.send("GET", "/../../etc/passwd", &[], "").status, 404);
}

#[test]
fn status_headers_and_body_of_an_engine_stay_as_they_are() {
    let router = Running::one(settings(), &Arc::default());
    let answer = router.complete(&json!({"model": "m", "prompt": "teapot"}));
    assert_eq!((answer.status, answer.json()["error"]["message"].as_str().unwrap()), (418, "short and stout"));
    assert!(answer.head.contains("x-mine: kept"), "{}", answer.head);
    let status = router.get("/traffic/stats/m");
    assert_eq!(status["model_stats"]["failed_requests"], 1);
}

#[test]
fn pieces_arrive_before_the_next_ones_are_made() {
    let script = Arc::new(Script::default());
    let router = Running::one(settings(), &script);
    let pieces = script.next_stream();
    let mut socket = router.open_complete(&json!({"model": "m", "stream": true}));
    for number in 0..5 {
        pieces.send(Some(format!("data: piece {number}\n\n").into())).unwrap();
        read_until(&mut socket, &format!("piece {number}"));
    }
    drop(pieces);
    read_until(&mut socket, "0\r\n\r\n");
    let status = router.wait_for("m", "its end", |status| status["in_flight"] == 0);
    assert!(status["ttft_ms"]["p50"].is_number() && status["itl_ms"]["p99"].is_number(), "{status}");
    assert_eq!(router.get("/traffic/stats/m")["model_stats"]["successful_requests"], 1);
}

/// Neither a comment that keeps a connection open nor an answer that comes whole is a token.
#[test]
fn only_events_of_streams_are_tokens() {
    let script = Arc::new(Script::default());
    let router = Running::one(settings(), &script);
    assert_eq!(router.complete(&json!({"model": "m"})).status, 200);
    let pieces = script.next_stream();
    let mut socket = router.open_complete(&json!({"model": "m", "stream": true}));
    for _ in 0..2 {
        pieces.send(Some(": keep-alive\n\n".into())).unwrap();
        read_until(&mut socket, "keep-alive");
    }
    let status = router.status("m");
    assert_eq!((&status["ttft_ms"]["p50"], &status["itl_ms"]["p50"]), (&Value::Null, &Value::Null), "{status}");
    pieces.send(Some("data: 1\n\n".into())).unwrap();
    read_until(&mut socket, "data: 1");
    let status = router.status("m");
    assert!(status["ttft_ms"]["p50"].is_number() && status["itl_ms"]["p50"].is_null(), "{status}");
}

#[test]
fn a_client_that_goes_away_cancels_its_request_streaming_or_waiting() {
    let script = Arc::new(Script { is_gated: true, ..Script::default() });
    let router = Running::one(settings(), &script);
    let waiting = router.open_complete(&json!({"model": "m"}));
    router.wait_for("m", "the request", |status| status["in_flight"] == 1);
    while script.asked_of("/v1/completions").is_empty() {
        std::thread::yield_now();
    }
    drop(waiting);
    router.wait_for("m", "nobody", |status| status["in_flight"] == 0);
    let pieces = script.next_stream();
    let mut streaming = router.open_complete(&json!({"model": "m", "stream": true}));
    pieces.send(Some("data: 1\n\n".into())).unwrap();
    read_until(&mut streaming, "data: 1");
    drop(streaming);
    router.wait_for("m", "nobody", |status| status["in_flight"] == 0);
    // The engine notices when it next writes to a connection that is gone.
    while script.cancelled.load(Ordering::SeqCst) < 2 {
        let _ = pieces.send(Some("data: 2\n\n".into()));
        std::thread::yield_now();
    }
}

#[test]
fn the_routers_key_stays_with_the_router() {
    let script = Arc::new(Script::default());
    let router = Running::one(with_key(), &script);
    for (shown, passed) in [("Bearer secret", false), ("Bearer sk-of-the-engine", true)] {
        let socket = router.open("POST", "/v1/completions", &[("authorization", shown)], "{\"model\":\"m\"}");
        assert_eq!(Answer::read(socket).status, 200);
        let asked = script.asked_of("/v1/completions");
        assert_eq!(asked.last().unwrap().headers.contains_key("authorization"), passed, "{shown}");
    }
}
