//! What the bodies of requests cost a `kvserve` in a process of its own.

use std::fs;
use std::io::Write;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::process::{Server, answer, open};

const BODY_BYTES: usize = 16 << 20;
/// What may stay when all of them are over.
const LEFT_KIB: u64 = 64 << 10;
/// What one body may cost beside itself while it is read: its text, and the text with its escapes resolved.
const READING_KIB: u64 = 48 << 10;
/// Only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(120);

/// A body as long as one may be: `head`, then `part` again and again, then `tail`.
fn filled(head: &str, part: &str, tail: &str) -> String {
    let parts = (BODY_BYTES - head.len() - tail.len() - part.len()) / (part.len() + 1);
    let mut body = String::with_capacity(BODY_BYTES);
    body += head;
    for _ in 0..parts {
        body += part;
        body.push(',');
    }
    body += part;
    body + tail
}

/// Where, what, and the status that it gets.
fn kinds() -> Vec<(&'static str, &'static str, String, u16)> {
    const TEXT: &str = "/v1/completions";
    const CHAT: &str = "/v1/chat/completions";
    let chat = "{\"max_tokens\":1,\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],";
    let deep = format!("{{\"prompt\":\"x\",\"max_tokens\":1,\"x\":{}{}}}", "[".repeat(1 << 20), "]".repeat(1 << 20));
    let text = format!("{{\"prompt\":\"{}\"}}", "x".repeat(BODY_BYTES - 13));
    vec![
        ("unknown objects", TEXT, filled("{\"prompt\":\"x\",\"max_tokens\":1,\"x\":[", "{\"a\":0}", "]}"), 200),
        ("unknown arrays in arrays", TEXT, deep, 200),
        ("token ids", TEXT, filled("{\"prompt\":[", "1", "]}"), 400),
        ("lists of token ids", TEXT, filled("{\"prompt\":[", "[1]", "]}"), 400),
        ("empty texts", TEXT, filled("{\"prompt\":[", "\"\"", "]}"), 400),
        ("one text", TEXT, text.clone(), 400),
        ("one text of escapes", TEXT, text.replace("xx", "\\n"), 400),
        ("stop strings", TEXT, filled("{\"prompt\":\"x\",\"stop\":[", "\"\"", "]}"), 400),
        ("stop tokens", TEXT, filled("{\"prompt\":\"x\",\"stop_token_ids\":[", "1", "]}"), 400),
        ("an unsupported field", TEXT, filled("{\"prompt\":\"x\",\"logit_bias\":[", "[]", "]}"), 400),
        ("messages", CHAT, filled("{\"messages\":[", "{\"role\":\"\"}", "]}"), 400),
        (
            "parts",
            CHAT,
            filled("{\"messages\":[{\"role\":\"user\",\"content\":[", "{\"type\":\"text\",\"text\":\"\"}", "]}]}"),
            400,
        ),
        ("calls of tools", CHAT, filled("{\"messages\":[{\"role\":\"user\",\"tool_calls\":[", "{}", "]}]}"), 400),
        (
            "variables of a template",
            CHAT,
            filled(&format!("{chat}\"chat_template_kwargs\":{{\"a\":["), "{}", "]}}"),
            400,
        ),
        ("a text to tokenise", "/tokenize", text, 400),
        ("tokens to detokenise", "/detokenize", filled("{\"tokens\":[", "1", "]}"), 400),
        ("a level of sleep", "/sleep", filled("{\"level\":[", "[]", "]}"), 400),
    ]
}

/// A figure of `/proc/PID/status` in KiB.
fn memory(server: &Server, name: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_start_matches(':').split_whitespace().next().unwrap().parse().unwrap()
}

/// From here on `VmHWM` is the most that was used since.
fn forget_the_peak(server: &Server) {
    fs::write(format!("/proc/{}/clear_refs", server.pid()), "5").unwrap();
}

/// Waits until no more than so much is the process's own: the heap is returned a little later than an answer is sent.
fn wait_until_at_most(server: &Server, most_kib: u64, what: &str) -> u64 {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let own = memory(server, "RssAnon");
        if own <= most_kib {
            return own;
        }
        assert!(Instant::now() < deadline, "{what}: {own} KiB of its own are left, and not {most_kib}");
        std::thread::yield_now();
    }
}

#[test]
fn long_bodies_of_every_kind_cost_their_size_and_leave_nothing() {
    let server = Server::start(&[]);
    server.good("POST", "/v1/completions", &json!({"prompt": "x", "max_tokens": 1}));
    let before = memory(&server, "RssAnon");
    for (what, path, body, wanted) in kinds() {
        for at_once in [1, 4] {
            forget_the_peak(&server);
            let resident = memory(&server, "VmRSS");
            let statuses: Vec<u16> = std::thread::scope(|scope| {
                let (address, body) = (&server.address, &body);
                let ask = || scope.spawn(|| answer(open(address, "POST", path, body).unwrap()).0);
                let asked: Vec<_> = (0..at_once).map(|_| ask()).collect();
                asked.into_iter().map(|one| one.join().unwrap()).collect()
            });
            let peak = memory(&server, "VmHWM").saturating_sub(resident);
            let left = memory(&server, "RssAnon");
            let _ = std::io::stderr().write_all(
                format!(
                    "{what}, {at_once} at once: {statuses:?}, {} MiB at most, {} MiB left\n",
                    peak >> 10,
                    left >> 10
                )
                .as_bytes(),
            );
            assert!(statuses.iter().all(|&status| status == wanted), "{what}: {statuses:?}");
            let most = at_once * ((BODY_BYTES as u64 >> 10) + READING_KIB);
            assert!(peak <= most, "{what}, {at_once} at once: {peak} KiB more than before, and not {most}");
            wait_until_at_most(&server, before + LEFT_KIB, what);
        }
    }
    server.good("POST", "/v1/completions", &json!({"prompt": "x", "max_tokens": 1}));
}
