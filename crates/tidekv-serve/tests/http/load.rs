//! A thousand streams at once: every one gets all of its text, and afterwards nothing is left.
//!
//! `TIDEKV_SERVE_LOAD_SECONDS=60` keeps a thousand of them running for a minute; without it each client makes one request.

use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use tidekv_core::geometry::ChunkChoice;
use tidekv_core::units::Bytes;
use tidekv_pool::ReservePolicy;
use tidekv_serve::config::{ComputeChoice, EngineConfig, KvMode, ModelSource, SyntheticSize};
use tidekv_serve::handle::EngineStats;
use tidekv_shm::{PoolName, RuntimeDir};

use crate::client::{Events, block_on, get};
use crate::running::{Running, Up};

const CLIENTS: usize = 1000;
const TOKENS: u32 = 64;
/// Tokens of an answer that is really computed, where nobody asked for more.
const COMPUTED_TOKENS: u32 = 3;
/// What an allocator may keep for itself between two rounds of a thousand clients.
const SLACK_BYTES: f64 = 64.0 * 1024.0 * 1024.0;

/// Past the capture of test output.
fn say(line: &str) {
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Both ends of every connection are in this process: are so many files allowed?
fn may_open_enough(test: &str) -> bool {
    let limit = getrlimit(Resource::Nofile);
    // Two tests may run at once.
    if limit.maximum.is_some_and(|most| most < 4 * CLIENTS as u64 + 200) {
        say(&format!("SKIPPED: {test}: {:?} open files are too few", limit.maximum));
        return false;
    }
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).unwrap();
    true
}

fn seconds() -> u64 {
    std::env::var("TIDEKV_SERVE_LOAD_SECONDS").map_or(0, |text| text.parse().unwrap())
}

/// One client asks again and again until the time is over; returns its texts.
async fn ask(address: SocketAddr, client: usize, tokens: u32, until: Instant) -> Vec<String> {
    let mut texts = Vec::new();
    loop {
        let prompt = format!("client {client} says {} ", texts.len());
        let request = json!({"prompt": prompt, "max_tokens": tokens, "ignore_eos": true, "stream": true, "temperature": 0,
                             "stream_options": {"include_usage": true}});
        let events = Events::open(address, "/v1/completions", &request).await.rest().await;
        let (usage, parts) = events.split_last().unwrap();
        assert_eq!(usage["usage"]["completion_tokens"], tokens);
        assert_eq!(parts.last().unwrap()["choices"][0]["finish_reason"], "length");
        texts.push(parts.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect());
        if Instant::now() >= until {
            return texts;
        }
    }
}

#[test]
fn a_thousand_streams_lose_nothing() {
    if !may_open_enough("a_thousand_streams_lose_nothing") {
        return;
    }
    let until = Instant::now() + Duration::from_secs(seconds());
    let server = Running::start();
    let address = server.address;
    // All of them are there before any gets further than its first token.
    server.engine.hold_at(Some(1));
    let answered = block_on(async {
        let clients: Vec<_> = (0..CLIENTS).map(|client| tokio::spawn(ask(address, client, TOKENS, until))).collect();
        let engine = Arc::clone(&server.engine);
        let gate = tokio::task::spawn_blocking(move || {
            engine.wait_until("a thousand are there at once", |_, active| active == CLIENTS);
            engine.hold_at(None);
        });
        gate.await.unwrap();
        let mut answered = 0;
        for (client, asked) in clients.into_iter().enumerate() {
            for (turn, text) in asked.await.unwrap().into_iter().enumerate() {
                let prompt = format!("client {client} says {turn} ");
                assert_eq!(text, prompt.chars().cycle().take(TOKENS as usize).collect::<String>());
                answered += 1;
            }
        }
        answered
    });
    assert!(server.engine.is_idle());
    assert_eq!(server.engine.finished.load(Ordering::SeqCst), answered);
    assert_eq!(server.engine.cancelled.load(Ordering::SeqCst), 0);
}

#[test]
fn a_thousand_streams_of_the_synthetic_model_leave_nothing_behind() {
    if !may_open_enough("a_thousand_streams_of_the_synthetic_model_leave_nothing_behind") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let engine = tidekv_serve::engine::start(EngineConfig {
        model: ModelSource::Synthetic { size: SyntheticSize::Tiny, seed: 0 },
        kv: KvMode::Elastic,
        kv_budget: Bytes::mib(64),
        pool_name: PoolName::new("load").unwrap(),
        runtime_dir: RuntimeDir::at(dir.path()),
        compute: ComputeChoice::Cpu,
        max_batch_rows: 256,
        max_step_tokens: 2048,
        max_waiting: 2000,
        max_cached_tokens: Some(0),
        context_tokens: None,
        block_tokens: 16,
        chunk: ChunkChoice::Auto,
        reserve: ReservePolicy::Auto,
        threads: None,
    })
    .unwrap();
    let server = Up::start(Arc::clone(&engine), Duration::from_secs(60));
    let address = server.address;
    let tokens = if seconds() == 0 { COMPUTED_TOKENS } else { TOKENS };
    let round = |until: Instant| {
        let answered: usize = block_on(async {
            let clients: Vec<_> =
                (0..CLIENTS).map(|client| tokio::spawn(ask(address, client, tokens, until))).collect();
            let mut answered = 0;
            for client in clients {
                answered += client.await.unwrap().len();
            }
            answered
        });
        // The last text is out a moment before its blocks are free.
        let deadline = Instant::now() + Duration::from_secs(60);
        let held = |stats: &EngineStats| (stats.running, stats.waiting, stats.blocks_used);
        while held(&engine.stats()) != (0, 0, 0) {
            assert!(Instant::now() < deadline, "{:?}", engine.stats());
            std::thread::yield_now();
        }
        answered
    };
    let answered = round(Instant::now());
    if seconds() > 0 {
        // The first round has grown everything that grows with a thousand clients.
        let before = resident(address);
        let more = round(Instant::now() + Duration::from_secs(seconds()));
        let after = resident(address);
        say(&format!("{answered} and {more} answers of {tokens} tokens; {before} and {after} bytes resident"));
        assert!(after < before + SLACK_BYTES, "memory has grown from {before} to {after}");
    }
    assert_eq!(engine.stats().cancelled, 0);
}

/// Memory of this process, as the server counts it.
fn resident(address: SocketAddr) -> f64 {
    let page = block_on(get(address, "/metrics")).text;
    let line = page.lines().find(|line| line.starts_with("process_resident_memory_bytes")).unwrap();
    line.rsplit_once(' ').unwrap().1.parse().unwrap()
}
