//! Queues, deadlines, and many at once.

use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tidekv_serve::connections::ConnectionLimits;
use tidekv_serve::router::{ModelSpec, Settings};

use crate::engine::Script;
use crate::running::{Answer, PATIENCE, Running, read_until, settings, spec};

#[test]
fn a_full_queue_says_when_to_come_back() {
    let script = Arc::new(Script { is_gated: true, ..Script::default() });
    let narrow = ModelSpec { max_concurrency: 1, max_queue: 1, ..spec("m") };
    let router = Running::start(settings(), vec![(narrow, Arc::clone(&script))]);
    let running = router.open_complete(&json!({"model": "m"}));
    router.wait_for("m", "one", |status| status["in_flight"] == 1);
    let queued = router.open_complete(&json!({"model": "m"}));
    router.wait_for("m", "two", |status| status["in_flight"] == 1 && status["queued"] == 1);
    let refused = router.complete(&json!({"model": "m"}));
    assert_eq!(refused.code(), (429, "queue_full".to_owned()));
    assert!(refused.head.contains("retry-after: 1"), "{}", refused.head);
    script.gate.add_permits(2);
    assert_eq!((Answer::read(running).status, Answer::read(queued).status), (200, 200));
    assert_eq!(script.asked_of("/v1/completions").len(), 2, "the refused one never reached the engine");
    let page = router.send("GET", "/metrics", &[], "").body;
    assert!(page.contains("kvcached_router_requests_refused_total{model=\"m\"} 1"), "{page}");
}

#[test]
fn nobody_waits_longer_than_the_deadline() {
    let script = Arc::new(Script { is_gated: true, ..Script::default() });
    let narrow = ModelSpec { max_concurrency: 1, ..spec("m") };
    let impatient = Settings { request_timeout: Duration::from_millis(100), ..settings() };
    let router = Running::start(impatient, vec![(narrow, Arc::clone(&script))]);
    let (engine, queue) = (router.open_complete(&json!({"model": "m"})), router.open_complete(&json!({"model": "m"})));
    for socket in [engine, queue] {
        assert_eq!(Answer::read(socket).code(), (504, "deadline_exceeded".to_owned()));
    }
    router.wait_for("m", "nobody", |status| status["in_flight"] == 0 && status["queued"] == 0);
}

#[test]
fn a_stream_that_falls_silent_ends_with_a_word() {
    let script = Arc::new(Script::default());
    let impatient = Settings { stream_timeout: Duration::from_millis(100), ..settings() };
    let router = Running::one(impatient, &script);
    let pieces = script.next_stream();
    let mut socket = router.open_complete(&json!({"model": "m", "stream": true}));
    pieces.send(Some("data: 1\n\n".into())).unwrap();
    let seen = read_until(&mut socket, "data: [DONE]");
    assert!(seen.contains("silent for too long") && seen.contains("engine_gone"), "{seen}");
}

#[test]
fn half_a_body_is_told_that_it_is_late() {
    let limits = ConnectionLimits { body: Duration::from_millis(100), ..ConnectionLimits::default() };
    let router = Running::with_limits(settings(), vec![(spec("m"), Arc::default())], limits);
    let mut slow = TcpStream::connect(router.address).unwrap();
    slow.set_read_timeout(Some(PATIENCE)).unwrap();
    slow.write_all(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 9\r\n\r\n{",
    )
    .unwrap();
    assert_eq!(Answer::read(slow).code(), (408, "request_timeout".to_owned()));
}

#[test]
fn a_thousand_streams_at_once() {
    const STREAMS: usize = 1000;
    let script = Arc::new(Script { is_gated: true, ..Script::default() });
    let wide = ModelSpec { max_concurrency: STREAMS, ..spec("m") };
    let router = Running::start(settings(), vec![(wide, Arc::clone(&script))]);
    let sockets: Vec<_> = (0..STREAMS).map(|_| router.open_complete(&json!({"model": "m"}))).collect();
    router.wait_for("m", "all of them", |status| status["in_flight"] == STREAMS);
    script.gate.add_permits(STREAMS);
    for socket in sockets {
        assert_eq!(Answer::read(socket).status, 200);
    }
    router.wait_for("m", "nobody", |status| status["in_flight"] == 0);
}
