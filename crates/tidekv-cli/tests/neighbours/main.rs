//! Three servers on one device and one budget, all under load, and one of them is killed: the others lose no request, and have its memory
//! soon after the device does.
//!
//! ```text
//!   budget  [ first | second | third ]        full: each holds what its load fills and its neighbours leave it
//!                              SIGKILL
//!           [ first    |    second   ]        within a second of the device having the memory back
//! ```
//!
//! Real processes, on the processor; with `TIDEKV_REQUIRE_GPU` set on a GPU, as the GPU bundle does it.

#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a failed unwrap is a failed test; --nocapture shows the times"
)]

#[allow(dead_code, reason = "the tests of kvserve use the rest")]
#[path = "../kvserve/process.rs"]
mod process;

use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};
use tidekv_cli::gpu::GpuReader;
use tidekv_core::units::Bytes;
use tidekv_shm::{Ledger, LedgerView, RuntimeDir};

use process::{Server, open, try_answer};

/// What is served, and how much.
struct Scene {
    args: &'static [&'static str],
    budget: Bytes,
    /// A token each.
    prompt_letters: usize,
    /// Of each server.
    clients: usize,
    /// From the device having the memory to the first page of it that a neighbour has mapped.
    bound: Duration,
}

/// Some ten thousand tokens of a small model; a busy machine may take its time.
const ON_THE_PROCESSOR: Scene = Scene {
    args: &["synthetic:tiny", "--backend", "cpu", "--kv-chunk", "16K", "--kv-budget", "6M"],
    budget: Bytes::mib(6),
    prompt_letters: 300,
    clients: 3,
    bound: Duration::from_secs(20),
};

/// Three quarters of a million.
const ON_A_GPU: Scene = Scene {
    args: &["synthetic:llama-1b", "--backend", "cuda", "--kv-budget", "24G"],
    budget: Bytes::gib(24),
    prompt_letters: 8000,
    clients: 8,
    bound: Duration::from_secs(1),
};

/// Longer than any wait of a test that passes: one of them takes tenths of a second on the processor, seconds on a GPU.
const DEADLINE: Duration = Duration::from_secs(120);

/// Clients of one server, who ask until they are told to stop. Every prompt is another one, so that memory fills.
#[derive(Debug, Default)]
struct Load {
    is_over: AtomicBool,
    served: AtomicU64,
    failures: Mutex<Vec<String>>,
}

impl Load {
    fn client(&self, address: &str, name: &str, letters: usize) {
        for number in 0.. {
            if self.is_over.load(SeqCst) {
                return;
            }
            let prompt: String = format!("{name} {number} ").chars().cycle().take(letters).collect();
            let body = json!({"prompt": prompt, "max_tokens": 8, "ignore_eos": true, "temperature": 0}).to_string();
            match open(address, "POST", "/v1/completions", &body).and_then(try_answer) {
                Ok((200, text)) => {
                    let whole: Value = serde_json::from_str(&text).unwrap();
                    assert_eq!(whole["usage"]["completion_tokens"], 8, "{text}");
                    self.served.fetch_add(1, SeqCst);
                }
                Ok((status, text)) => return self.failed(format!("{status}: {text}")),
                Err(error) => return self.failed(error.to_string()),
            }
        }
    }

    fn failed(&self, why: String) {
        self.failures.lock().unwrap().push(why);
    }

    fn served(&self) -> u64 {
        self.served.load(SeqCst)
    }
}

/// Ends the clients whatever happens to the test: a scope waits for its threads.
struct EndLoads<'a>(&'a [Load]);

impl Drop for EndLoads<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|load| load.is_over.store(true, SeqCst));
    }
}

/// What a process holds by the ledger, and pages that it has mapped so far.
fn held(view: &LedgerView, pid: u32) -> (Bytes, u64) {
    let entry = view.entries.iter().find(|entry| entry.pid == pid);
    entry.map_or((Bytes::ZERO, 0), |entry| (entry.reserved, entry.counters.maps))
}

/// Waits until `look` says something; `tell` says how things stand where that does not come.
fn wait_for<T>(what: &str, tell: impl Fn() -> String, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(start.elapsed() < DEADLINE, "{what} did not come: {}", tell());
        thread::park_timeout(Duration::from_millis(1));
    }
}

/// When what happened after the signal.
#[derive(Debug, Default)]
struct Times {
    ended: Option<Duration>,
    on_device: Option<Duration>,
    struck_out: Option<Duration>,
    first_page: Option<Duration>,
}

#[test]
fn the_others_serve_on_and_have_the_memory_of_one_that_was_killed() {
    let is_gpu = std::env::var_os("TIDEKV_REQUIRE_GPU").is_some();
    let scene = if is_gpu { ON_A_GPU } else { ON_THE_PROCESSOR };
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let start = || Server::start_in(Arc::clone(&dir), scene.args, |_| ());
    let mut servers = [start(), start(), start()];
    let pids = [0, 1, 2].map(|index: usize| servers[index].pid());
    let runtime = RuntimeDir::at(dir.path());
    let device = Ledger::list(&runtime).unwrap().pop().expect("the servers share a ledger");
    let ledger = Ledger::open_existing(&runtime, &device).unwrap().unwrap();
    let read = || {
        let view = ledger.read().unwrap();
        assert!(view.reserved() <= scene.budget, "{:?}", view.entries);
        view
    };
    let gpu = is_gpu.then(|| GpuReader::open().unwrap());
    let used = || gpu.as_ref().and_then(|gpu| gpu.usage().first()?.memory.map(|memory| memory.used()));
    let loads: [Load; 3] = Default::default();
    let tell = || format!("{:?}, loads {loads:?}", read().entries);
    let addresses = [0, 1, 2].map(|index: usize| servers[index].address.clone());

    thread::scope(|scope| {
        let _end = EndLoads(&loads);
        for (index, (load, address)) in loads.iter().zip(&addresses).enumerate() {
            for client in 0..scene.clients {
                let name = format!("server {index} client {client}");
                scope.spawn(move || load.client(address, &name, scene.prompt_letters));
            }
        }
        let page = read().entries[0].page_bytes;
        wait_for("a full device", tell, || {
            let view = read();
            let is_full = view.reserved().0 + page.0 > scene.budget.0 - page.0;
            let all_have = pids.iter().all(|&pid| held(&view, pid).0.0 > scene.budget.0 / 6);
            (is_full && all_have && loads.iter().all(|load| load.served() > 0)).then_some(())
        });

        let used_before = used();
        let (lost, _) = held(&read(), pids[2]);
        let killed = Instant::now();
        servers[2].signal(Signal::KILL);
        let view = read();
        // What it held in the end; its neighbours may have struck it out already.
        let lost = Some(held(&view, pids[2]).0).filter(|&last| last > Bytes::ZERO).unwrap_or(lost);
        let bound = scene.budget.saturating_sub(lost);
        let maps = |view: &LedgerView| pids[..2].iter().map(|&pid| held(view, pid).1).sum::<u64>();
        let maps_before = maps(&view);
        let mut times = Times::default();
        wait_for("a page over what the two could have before", tell, || {
            let at = Some(killed.elapsed());
            if servers[2].has_ended() {
                times.ended = times.ended.or(at);
            }
            if let (Some(before), Some(now)) = (used_before, used()) {
                times.on_device = times.on_device.or(at.filter(|_| now.0 + lost.0 / 2 < before.0));
            }
            let view = read();
            if held(&view, pids[2]).0 == Bytes::ZERO {
                times.struck_out = times.struck_out.or(at);
            }
            let living: u64 = pids[..2].iter().map(|&pid| held(&view, pid).0.0).sum();
            times.first_page = at.filter(|_| living > bound.0 && maps(&view) > maps_before);
            times.first_page.map(drop)
        });
        // The two fill it, and nobody is turned away.
        wait_for("a device that is full again", tell, || {
            let living: u64 = pids[..2].iter().map(|&pid| held(&read(), pid).0.0).sum();
            (living + 2 * page.0 > scene.budget.0).then_some(())
        });
        let full = killed.elapsed();
        let before = [loads[0].served(), loads[1].served()];
        wait_for("more answers", tell, || (0..2).all(|index| loads[index].served() > before[index] + 2).then_some(()));

        let seconds = |time: Option<Duration>| time.map_or(Value::Null, |time| time.as_secs_f64().into());
        let result = json!({
            "name": "sigkill", "budget_bytes": scene.budget.0, "lost_bytes": lost.0, "ended_s": seconds(times.ended),
            "on_device_s": seconds(times.on_device), "struck_out_s": seconds(times.struck_out),
            "first_page_s": seconds(times.first_page), "full_s": full.as_secs_f64(),
        });
        // Past the test's own capture: figures of a GPU are worth keeping.
        if is_gpu {
            writeln!(std::io::stderr(), "RESULT {result}").unwrap();
        } else {
            println!("RESULT {result}");
        }
        // Where a neighbour was quicker than our look at the device, it had the memory in between.
        let given_back = times.on_device.or(times.ended).unwrap_or(Duration::ZERO);
        let late = times.first_page.unwrap().saturating_sub(given_back);
        assert!(late <= scene.bound, "{late:?} after the device had it: {times:?}");
    });

    for load in &loads[..2] {
        assert_eq!(*load.failures.lock().unwrap(), Vec::<String>::new());
    }
    for server in &servers[..2] {
        server.good("GET", "/health", &Value::Null);
    }
}
