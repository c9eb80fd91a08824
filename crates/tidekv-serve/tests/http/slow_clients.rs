//! Clients that are slow, stuck or too many: each holds its place for so long and no longer, and nobody else notices more.
//!
//! One place is enough to see it: whoever keeps it keeps everybody out.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};
use tidekv_serve::connections::ConnectionLimits;

use crate::client::{block_on, get, post};
use crate::echo::{CONTEXT_TOKENS, Echo};
use crate::running::Running;

const TEXT: &str = "/v1/completions";
/// Only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(120);
const SHORT: Duration = Duration::from_millis(300);

/// One place, and patience that is never over, but for what a test changes.
fn one_place() -> ConnectionLimits {
    ConnectionLimits { places: 1, head: PATIENCE, body: PATIENCE, stalled: PATIENCE, ..ConnectionLimits::default() }
}

fn connect(server: &Running) -> TcpStream {
    let socket = TcpStream::connect(server.address).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// All that comes until the server closes.
fn rest(mut socket: TcpStream) -> String {
    let mut bytes = Vec::new();
    // A server that closes with something of ours unread resets the connection: what it said before counts.
    let _ = socket.read_to_end(&mut bytes);
    String::from_utf8(bytes).unwrap()
}

#[test]
fn half_a_head_does_not_keep_others_out() {
    let server = Running::with_limits(ConnectionLimits { head: SHORT, ..one_place() });
    let mut slow = connect(&server);
    slow.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: lo").unwrap();
    block_on(get(server.address, "/health")).good();
    assert_eq!(rest(slow), "", "closed without a word");
}

#[test]
fn a_connection_that_asks_nothing_more_does_not_keep_others_out() {
    let server = Running::with_limits(ConnectionLimits { head: SHORT, ..one_place() });
    let mut idle = connect(&server);
    idle.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
    block_on(get(server.address, "/health")).good();
    assert!(rest(idle).starts_with("HTTP/1.1 200 OK"));
}

#[test]
fn half_a_body_is_told_so_and_closed() {
    let server = Running::with_limits(ConnectionLimits { body: SHORT, ..one_place() });
    let mut slow = connect(&server);
    slow.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{\"prompt\"")
        .unwrap();
    let answer = rest(slow);
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 408 "), "{answer}");
    let body: Value = serde_json::from_str(body).unwrap();
    assert_eq!(body["error"]["code"], "request_timeout", "{body}");
    block_on(post(server.address, TEXT, &json!({"prompt": "hello"}))).good();
    assert!(server.engine.is_idle());
}

/// Several prompts, so that there is more text than all buffers between the two can take.
#[test]
fn a_client_that_reads_nothing_does_not_keep_others_out() {
    let server = Running::with_limits(ConnectionLimits { stalled: Duration::from_secs(1), ..one_place() });
    let prompts = ["abc"; 32];
    let request =
        json!({"prompt": prompts, "max_tokens": CONTEXT_TOKENS - 8, "ignore_eos": true, "stream": true, "logprobs": 5});
    let request = request.to_string();
    let mut stuck = connect(&server);
    let head = format!("POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", request.len());
    stuck.write_all((head + &request).as_bytes()).unwrap();
    // A slow machine may still be making them when the client has had its time.
    let is_over = |engine: &Echo, _| {
        [&engine.finished, &engine.cancelled].map(|count| count.load(Ordering::SeqCst)).iter().sum::<u64>() == 32
    };
    server.engine.wait_until("the texts are made, or given up", is_over);
    block_on(get(server.address, "/health")).good();
    drop(stuck);
}

#[test]
fn no_more_clients_than_places_and_all_of_them_are_served() {
    let server = Running::with_limits(ConnectionLimits { places: 3, ..one_place() });
    let texts = block_on(async {
        let clients: Vec<_> = (0..30)
            .map(|client| {
                let address = server.address;
                let prompt = format!("client {client}");
                tokio::spawn(async move { (post(address, TEXT, &json!({"prompt": prompt})).await.good(), prompt) })
            })
            .collect();
        let mut texts = Vec::new();
        for client in clients {
            texts.push(client.await.unwrap());
        }
        texts
    });
    assert!(texts.iter().all(|(answer, prompt)| answer["choices"][0]["text"] == **prompt));
    let most = server.engine.most_at_once.load(Ordering::SeqCst);
    assert!(most <= 3, "{most} at once");
}
