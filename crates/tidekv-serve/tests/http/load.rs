//! A thousand streams at once through the API alone: every one gets all of its text, and afterwards nothing is left. With
//! the engine, in a process of its own and for as long as one likes: the tests of `kvserve`.

use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;

use crate::client::{Events, block_on};
use crate::running::Running;

const CLIENTS: usize = 1000;
const TOKENS: u32 = 64;

/// Both ends of every connection are in this process: are so many files allowed?
fn may_open_enough() -> bool {
    let limit = getrlimit(Resource::Nofile);
    if limit.maximum.is_some_and(|most| most < 2 * CLIENTS as u64 + 200) {
        let line = format!("SKIPPED: a_thousand_streams_lose_nothing: {:?} open files are too few\n", limit.maximum);
        // Past the capture of test output.
        let _ = std::io::stderr().write_all(line.as_bytes());
        return false;
    }
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).unwrap();
    true
}

fn prompt(client: usize) -> String {
    format!("client {client} says ")
}

/// One client's text.
async fn ask(address: SocketAddr, client: usize) -> String {
    let request = json!({"prompt": prompt(client), "max_tokens": TOKENS, "ignore_eos": true, "stream": true,
                         "stream_options": {"include_usage": true}});
    let events = Events::open(address, "/v1/completions", &request).await.rest().await;
    let (usage, parts) = events.split_last().unwrap();
    assert_eq!(usage["usage"]["completion_tokens"], TOKENS);
    assert_eq!(parts.last().unwrap()["choices"][0]["finish_reason"], "length");
    parts.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect()
}

#[test]
fn a_thousand_streams_lose_nothing() {
    if !may_open_enough() {
        return;
    }
    let server = Running::start();
    let address = server.address;
    // All of them are there before any gets further than its first token.
    server.engine.hold_at(Some(1));
    block_on(async {
        let clients: Vec<_> = (0..CLIENTS).map(|client| tokio::spawn(ask(address, client))).collect();
        let engine = Arc::clone(&server.engine);
        let gate = tokio::task::spawn_blocking(move || {
            engine.wait_until("a thousand are there at once", |_, active| active == CLIENTS);
            engine.hold_at(None);
        });
        gate.await.unwrap();
        for (client, text) in clients.into_iter().enumerate() {
            let wanted: String = prompt(client).chars().cycle().take(TOKENS as usize).collect();
            assert_eq!(text.await.unwrap(), wanted);
        }
    });
    assert!(server.engine.is_idle());
    assert_eq!(server.engine.finished.load(Ordering::SeqCst), CLIENTS as u64);
    assert_eq!(server.engine.cancelled.load(Ordering::SeqCst), 0);
}
