//! A server in a crowd: thousands of clients that are slow, that stream, and that send a body without its end. Its memory stays within the
//! budget for bodies and a bound for each connection, and it answers everybody else.
//!
//! `TIDEKV_CROWD=full` is 4,000 slow clients, 2,000 streams and 24 half bodies, with the times that are promised.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

#[allow(dead_code, reason = "the tests of kvserve use the rest")]
#[path = "../kvserve/process.rs"]
mod process;
#[allow(dead_code, reason = "the tests of kvctl up use the rest")]
#[path = "../launch/supervisor.rs"]
mod supervisor;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;

use process::Server;
use supervisor::Supervisor;

/// Only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(120);
const BUDGET_KIB: u64 = 64 << 10;
/// What a connection may cost, with a request that is being answered.
const CONNECTION_KIB: u64 = 32;
/// What the heap may keep besides.
const SLACK_KIB: u64 = 32 << 10;
const BODY_BYTES: usize = 8 << 20;
const LOOK_WITHIN: Duration = Duration::from_secs(1);
const BEGIN_WITHIN: Duration = Duration::from_secs(5);

#[derive(Clone, Copy)]
struct Crowd {
    slow: usize,
    streams: usize,
    half_bodies: usize,
    /// Times count: otherwise whoever else uses the machine would decide.
    is_timed: bool,
}

fn crowd() -> Crowd {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).unwrap();
    if std::env::var("TIDEKV_CROWD").is_ok_and(|text| text == "full") {
        Crowd { slow: 4000, streams: 2000, half_bodies: 24, is_timed: true }
    } else {
        Crowd { slow: 100, streams: 50, half_bodies: 24, is_timed: false }
    }
}

/// Past the capture of test output.
fn say(line: &str) {
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

fn own_kib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

fn connect(address: &str) -> TcpStream {
    let socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

fn head(address: &str, method: &str, path: &str, length: usize) -> String {
    format!("{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n")
}

/// The head of an answer, as far as one reading brings it.
fn first_of(socket: &mut TcpStream) -> String {
    let mut bytes = [0; 1024];
    let count = socket.read(&mut bytes).unwrap_or(0);
    String::from_utf8_lossy(&bytes[..count]).to_ascii_lowercase()
}

/// A request, and how long it took until its answer began.
fn ask(address: &str, method: &str, path: &str, body: &str) -> (String, Duration, TcpStream) {
    let began = Instant::now();
    let mut socket = connect(address);
    // A server that refuses may have closed already; what it said counts.
    let _ = socket.write_all((head(address, method, path, body.len()) + body).as_bytes());
    let answer = first_of(&mut socket);
    (answer, began.elapsed(), socket)
}

fn stream_request() -> String {
    json!({"model": "default", "prompt": "Hello", "max_tokens": 20_000, "ignore_eos": true, "stream": true}).to_string()
}

/// Everybody comes, and what is promised holds.
fn hold(what: &str, address: &str, pid: u32) {
    let Crowd { slow, streams, half_bodies, is_timed } = crowd();
    let in_time = |what: &str, took: Duration, within: Duration| {
        say(&format!("  {what}: {} ms", took.as_millis()));
        assert!(!is_timed || took <= within, "{what} took {took:?}");
    };
    let (answer, ..) = ask(address, "POST", "/tokenize", &json!({"model": "default", "prompt": "x"}).to_string());
    assert!(answer.starts_with("http/1.1 200 "), "{answer}");
    let before = own_kib(pid);
    let mut most = before;
    let mut kept = Vec::new();
    for number in 0..slow {
        let mut socket = connect(address);
        let mut text = head(address, "POST", "/v1/completions", 1000);
        if number % 2 == 0 {
            text.truncate(text.len() / 2);
        } else {
            text += "{\"prompt\": ";
        }
        socket.write_all(text.as_bytes()).unwrap();
        kept.push(socket);
    }
    for _ in 0..streams {
        let (answer, _, socket) = ask(address, "POST", "/v1/completions", &stream_request());
        assert!(answer.starts_with("http/1.1 200 ") || answer.starts_with("http/1.1 503 "), "{answer}");
        kept.push(socket);
    }
    most = most.max(own_kib(pid));
    // All but the last byte, one client after another: eight of them are more than the budget.
    let half = vec![b' '; BODY_BYTES - 1];
    let mut halves: Vec<TcpStream> = (0..half_bodies)
        .map(|_| {
            let mut socket = connect(address);
            socket.write_all(head(address, "POST", "/v1/completions", BODY_BYTES).as_bytes()).unwrap();
            // One for which there is no room is closed in the middle.
            let _ = socket.write_all(&half);
            socket
        })
        .collect();
    most = most.max(own_kib(pid));
    for path in ["/health", "/v1/models"] {
        let (answer, took, _) = ask(address, "GET", path, "");
        assert!(answer.starts_with("http/1.1 200 "), "{answer}");
        in_time(path, took, LOOK_WITHIN);
    }
    let (answer, took, _socket) = ask(address, "POST", "/v1/completions", &stream_request());
    let is_later = answer.starts_with("http/1.1 503 ") && answer.contains("retry-after");
    assert!(answer.starts_with("http/1.1 200 ") || is_later, "{answer}");
    in_time(if is_later { "a completion is told to come back" } else { "a completion begins" }, took, BEGIN_WITHIN);
    // Who stopped before the end loses its place to one that sends all of it.
    let long =
        format!("{{\"model\": \"default\", \"prompt\": \"x\", \"stream\": true, \"x\": \"{}\"}}", "x".repeat(12 << 20));
    let deadline = Instant::now() + PATIENCE;
    loop {
        let (answer, took, _socket) = ask(address, "POST", "/v1/completions", &long);
        most = most.max(own_kib(pid));
        if answer.starts_with("http/1.1 200 ") {
            in_time("a long completion", took, BEGIN_WITHIN);
            break;
        }
        assert!(answer.is_empty() || answer.contains("retry-after"), "{answer}");
        assert!(Instant::now() < deadline, "nobody lost a place: {answer}");
    }
    let is_late = |socket: &mut TcpStream| {
        socket.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        first_of(socket).starts_with("http/1.1 408 ")
    };
    let late = halves.iter_mut().filter_map(|socket| is_late(socket).then_some(())).count();
    let clients = slow + streams + half_bodies;
    let bound = before + BUDGET_KIB + CONNECTION_KIB * clients as u64 + SLACK_KIB;
    say(&format!(
        "  {what}, {clients} clients: {before} KiB before, {most} KiB at most, bound {bound} KiB; {late} half bodies were late"
    ));
    assert!(most <= bound, "{most} KiB of its own, and not {bound}");
    assert!(late > 0, "a half body lost its place");
}

#[test]
fn kvserve_stays_within_its_budget_and_answers() {
    let server = Server::start(&["--max-num-seqs", "8", "--body-budget", "64M"]);
    hold("kvserve", &server.address, server.pid());
}

#[test]
fn the_router_stays_within_its_budget_and_answers() {
    let router = Supervisor::start(
        "router: {max_concurrency: 4096, body_budget: 64M}\ninstances:\n  - {name: a, model: 'synthetic:tiny', engine: kvserve, \
         engine_args: '--threads 1 --max-num-seqs 8'}\n",
    );
    router.wait_until_ready("a");
    hold("the router", &router.address, router.child.id());
}
