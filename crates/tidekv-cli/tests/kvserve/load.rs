//! A thousand streams at once against a `kvserve` in a process of its own: every one gets all of its text, afterwards no
//! request holds a block, and memory does not grow from round to round.
//!
//! `TIDEKV_SERVE_LOAD_SECONDS=60` keeps a thousand of them running for a minute; without it each client makes one short
//! request in each round.

use std::fs;
use std::io::Write;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::process::{Server, dechunked};

const CLIENTS: usize = 1000;
/// Tokens of an answer where nobody asked for a long run, and where somebody did.
const SHORT_TOKENS: usize = 2;
const LONG_TOKENS: usize = 64;
const SHORT_ROUNDS: u32 = 3;
const LONG_ROUNDS: u32 = 6;
/// What an allocator may keep for itself beyond what the first round left.
const SLACK_KIB: u64 = 16 << 10;

/// Past the capture of test output.
fn say(line: &str) {
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Every connection is an open file on either side.
fn may_open_enough() -> bool {
    let limit = getrlimit(Resource::Nofile);
    if limit.maximum.is_some_and(|most| most < CLIENTS as u64 + 200) {
        say(&format!("SKIPPED: a_thousand_streams: {:?} open files are too few", limit.maximum));
        return false;
    }
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).unwrap();
    true
}

/// One client asks again and again until the time is over. Says how many answers it got.
async fn ask(address: String, client: usize, tokens: usize, until: Instant) -> usize {
    let mut answered = 0;
    loop {
        let request = json!({"prompt": format!("client {client} says {answered} "), "max_tokens": tokens, "ignore_eos": true,
                             "temperature": 0, "stream": true, "stream_options": {"include_usage": true}});
        let request = request.to_string();
        let mut socket = TcpStream::connect(&address).await.unwrap();
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            request.len()
        );
        socket.write_all((head + &request).as_bytes()).await.unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).await.unwrap();
        assert_whole(&answer, tokens);
        answered += 1;
        if Instant::now() >= until {
            return answered;
        }
    }
}

/// All of a text, why it ended, what it cost, and the end of the stream.
fn assert_whole(answer: &str, tokens: usize) {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer}"));
    assert!(head.starts_with("HTTP/1.1 200 "), "{answer}");
    let body = dechunked(body);
    let mut events: Vec<&str> = body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!(events.pop(), Some("[DONE]"), "{body}");
    let events: Vec<Value> = events.into_iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    let (usage, parts) = events.split_last().unwrap();
    assert_eq!(usage["usage"]["completion_tokens"], tokens, "{usage}");
    assert_eq!(parts.last().unwrap()["choices"][0]["finish_reason"], "length");
    assert!(parts.iter().any(|part| !part["choices"][0]["text"].as_str().unwrap().is_empty()), "{body}");
}

/// What is the process's own, and what are the pool's pages: KiB.
fn memory(server: &Server) -> (u64, u64) {
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    };
    (field("RssAnon:"), field("RssShmem:"))
}

#[test]
fn a_thousand_streams_lose_nothing_and_memory_stays_flat() {
    if !may_open_enough() {
        return;
    }
    let seconds: u32 = std::env::var("TIDEKV_SERVE_LOAD_SECONDS").map_or(0, |text| text.parse().unwrap());
    let (rounds, tokens) = if seconds == 0 { (SHORT_ROUNDS, SHORT_TOKENS) } else { (LONG_ROUNDS, LONG_TOKENS) };
    // 64 MiB hold 65,536 tokens of it, so its cache of prefixes is full after one round of a long run.
    let server = Server::start_with(&["--kv-budget", "64M", "--max-num-waiting", "2000"], |command| {
        if seconds == 0 {
            command.env("KVCACHED_MAX_CACHED_TOKENS", "4096");
        }
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (mut own_after_first, mut all) = (None, 0);
    for round in 1..=rounds {
        let until = Instant::now() + Duration::from_secs(seconds.into()) / rounds;
        let clients = || (0..CLIENTS).map(|client| ask(server.address.clone(), client, tokens, until));
        let answered: usize = runtime.block_on(async {
            let clients: Vec<_> = clients().map(tokio::spawn).collect();
            let mut answered = 0;
            for client in clients {
                answered += client.await.unwrap();
            }
            answered
        });
        all += answered;
        server.wait_for_metric("vllm:num_requests_running", 0.0);
        server.wait_for_metric("vllm:num_requests_waiting", 0.0);
        let cached = server.metric("kvcached_kv_cache_pool_cached_blocks");
        server.wait_for_metric("kvcached_kv_cache_pool_allocated_blocks", cached);
        let (own, pool) = memory(&server);
        say(&format!(
            "round {round}: {answered} answers of {tokens} tokens; {own} KiB of its own, {pool} KiB of the pool"
        ));
        let first = *own_after_first.get_or_insert(own);
        assert!(own <= first + SLACK_KIB, "memory has grown from {first} KiB to {own} KiB in round {round}");
    }
    // Asleep it holds nothing at all.
    server.good("POST", "/sleep", &Value::Null);
    for name in ["allocated_blocks", "mapped_bytes"] {
        server.wait_for_metric(&format!("kvcached_kv_cache_pool_{name}"), 0.0);
    }
    say(&format!("{all} answers in all"));
}
