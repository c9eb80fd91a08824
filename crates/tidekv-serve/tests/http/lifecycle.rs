//! Clients that go away, servers that are told to stop, ports that are taken.

use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::json;
use tidekv_serve::access::Access;
use tidekv_serve::server::{ServeError, Server};

use crate::client::{Connection, Events, block_on, post};
use crate::running::Running;

const TEXT: &str = "/v1/completions";

#[test]
fn a_client_that_goes_away_cancels_its_request() {
    let server = Running::start();
    server.engine.hold_at(Some(2));
    block_on(async {
        let mut streamed = Events::open(server.address, TEXT, &json!({"prompt": "hello", "stream": true})).await;
        streamed.next().await.unwrap();
        let address = server.address;
        let waiting = tokio::spawn(async move { post(address, TEXT, &json!({"prompt": "hello"})).await });
        server.engine.wait_until("both are there", |_, active| active == 2);
        drop(streamed);
        server.engine.wait_until("the stream is cancelled", |engine, active| {
            active == 1 && engine.cancelled.load(Ordering::SeqCst) == 1
        });
        waiting.abort();
    });
    server
        .engine
        .wait_until("the other one too", |engine, active| active == 0 && engine.cancelled.load(Ordering::SeqCst) == 2);
    server.engine.hold_at(None);
    block_on(post(server.address, TEXT, &json!({"prompt": "hello"}))).good();
}

#[test]
fn one_prompt_of_several_that_is_refused_cancels_the_others() {
    let server = Running::start();
    server.engine.hold_at(Some(0));
    let refused = block_on(post(server.address, TEXT, &json!({"prompt": [[104], [300]]})));
    assert_eq!(refused.status.as_u16(), 400);
    server.engine.wait_until("the first one is cancelled", |engine, active| {
        active == 0 && engine.cancelled.load(Ordering::SeqCst) == 1
    });
}

#[test]
fn stopping_lets_running_requests_end() {
    let mut server = Running::start();
    server.engine.hold_at(Some(2));
    block_on(async {
        let mut events = Events::open(server.address, TEXT, &json!({"prompt": "hello", "stream": true})).await;
        let first = events.next().await.unwrap();
        let mut idle = Connection::open(server.address).await;
        server.begin_stop();
        server.engine.wait_until("it is draining", |engine, _| !engine.accepts());
        // A connection that was open may be told so, or closed: either way nothing new is accepted.
        let request = json!({"prompt": "late"}).to_string();
        if let Ok(late) = idle.try_send("POST", TEXT, request).await {
            assert_eq!(late.status().as_u16(), 503);
        }
        server.engine.hold_at(None);
        let rest = events.rest().await;
        let parts = rest.iter().map(|event| event["choices"][0]["text"].as_str().unwrap());
        let first: serde_json::Value = serde_json::from_str(&first).unwrap();
        assert_eq!(first["choices"][0]["text"].as_str().unwrap().to_owned() + &parts.collect::<String>(), "hello");
    });
    server.join();
    assert!(server.engine.is_idle());
}

#[test]
fn what_takes_longer_than_draining_ends_with_a_sentence() {
    let mut server = Running::with_drain(Duration::ZERO);
    server.engine.hold_at(Some(2));
    block_on(async {
        let mut events = Events::open(server.address, TEXT, &json!({"prompt": "hello", "stream": true})).await;
        events.next().await.unwrap();
        server.begin_stop();
        let rest = events.rest().await;
        assert_eq!(rest.last().unwrap()["error"]["code"], "shutting_down", "{rest:?}");
    });
    server.join();
}

#[test]
fn a_client_that_does_not_read_does_not_keep_a_stopped_server() {
    let mut server = Running::with_drain(Duration::ZERO);
    server.engine.hold_at(Some(2));
    block_on(async {
        let mut connection = Connection::open(server.address).await;
        let response = connection.send("POST", TEXT, json!({"prompt": "hello", "stream": true}).to_string()).await;
        server.begin_stop();
        server.join();
        drop(response);
    });
}

#[test]
fn a_port_that_is_taken_is_said_so() {
    let server = Running::start();
    let error = Server::bind("127.0.0.1", server.address.port(), Access::default()).unwrap_err();
    assert!(matches!(error, ServeError::PortTaken { .. }), "{error}");
    assert!(error.to_string().contains("is taken"));
    let error = Server::bind("no such host", 0, Access::default()).unwrap_err();
    assert!(matches!(error, ServeError::Host { .. }), "{error}");
    let error = Server::bind("0.0.0.0", 0, Access::default()).unwrap_err();
    assert!(matches!(error, ServeError::NoKey { .. }) && error.to_string().contains("--api-key-file"), "{error}");
}
