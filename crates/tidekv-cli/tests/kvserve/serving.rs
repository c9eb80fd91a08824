//! The real engine behind the real server.

use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::sync::mpsc;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::process::{Server, answer, kvctl, kvserve, open_with};

const TEXT: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// Names that pools have in a folder: segments, not the ledger and its events, which belong to the device.
fn segments(server: &Server) -> Vec<String> {
    let names = fs::read_dir(server.dir.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with("kvcached_kvserve")).collect()
}

#[test]
fn the_default_model_answers_and_gives_everything_back() {
    let mut server = Server::start(&[]);
    assert!(
        server.first_line.contains("synthetic:tiny") && server.first_line.contains("kv_mode=elastic"),
        "{}",
        server.first_line
    );
    let request = json!({"prompt": "Hello", "max_tokens": 24, "temperature": 0});
    let whole = server.good("POST", TEXT, &request);
    let text = whole["choices"][0]["text"].as_str().unwrap().to_owned();
    assert!(!text.is_empty());
    assert_eq!((&whole["usage"]["prompt_tokens"], &whole["usage"]["completion_tokens"]), (&json!(6), &json!(24)));

    // The same tokens again, streamed, and again with a seed and heat.
    let mut streamed = request.clone();
    streamed["stream"] = true.into();
    let (status, events) = server.send("POST", TEXT, &streamed.to_string());
    let chunks = events.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    let chunks = chunks
        .map(|data| serde_json::from_str::<Value>(data).unwrap()["choices"][0]["text"].as_str().unwrap().to_owned());
    assert_eq!((status, chunks.collect::<String>()), (200, text));
    let hot = json!({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 16, "temperature": 1.5, "seed": 7, "logprobs": true, "top_logprobs": 2});
    let twice = [(); 2].map(|()| server.good("POST", CHAT, &hot)["choices"].clone());
    assert_eq!(twice[0], twice[1]);
    assert_eq!(twice[0][0]["logprobs"]["content"].as_array().unwrap().len(), 16);
    assert_eq!(twice[0][0]["logprobs"]["content"][0]["top_logprobs"].as_array().unwrap().len(), 2);

    // An operator sees it, and sleep gives its memory back.
    let list = kvctl(server.dir.path(), &["list"]);
    assert!(String::from_utf8_lossy(&list.stdout).contains("kvcached_kvserve"), "{list:?}");
    assert!(server.metric("kvcached_kv_cache_pool_mapped_bytes") > 0.0);
    assert_eq!(server.good("POST", "/sleep", &json!({"level": "1"})), json!({"is_sleeping": true}));
    server.wait_for_metric("kvcached_kv_cache_pool_allocated_blocks", 0.0);
    assert_eq!(server.send("POST", TEXT, &request.to_string()).0, 503);
    assert_eq!(server.good("POST", "/wake_up", &Value::Null), json!({"is_sleeping": false}));
    assert_eq!(server.good("POST", TEXT, &request)["choices"], whole["choices"]);

    server.signal(Signal::TERM);
    assert_eq!(server.wait().code(), Some(0));
    assert_eq!(segments(&server), Vec::<String>::new());
}

/// As vLLM has it: what costs or changes anything needs the key, and so does the list of models; probes and scrapers need none.
#[test]
fn the_key_is_needed_from_a_file_or_the_environment() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("key");
    fs::write(&file, "hunter2\n").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let names = ["--allowed-hosts", "host.docker.internal", "--allowed-origins", "[\"https://app.example\"]"];
    let in_file =
        Server::start(&[&["--host", "0.0.0.0", "--api-key-file", file.to_str().unwrap()][..], &names].concat());
    let in_variable = Server::start_with(&names, |command| {
        command.env("VLLM_API_KEY", "hunter2");
    });
    let request = json!({"prompt": "Hello", "max_tokens": 2}).to_string();
    for server in [&in_file, &in_variable] {
        let ask = |method, path, lines: &str, body: &str| {
            answer(open_with(&server.address, method, path, lines, body).unwrap())
        };
        let (key, wrong) = ("authorization: Bearer hunter2\r\n", "authorization: Bearer hunter3\r\n");
        for (method, path) in [("POST", TEXT), ("POST", "/tokenize"), ("GET", "/v1/models"), ("POST", "/sleep")] {
            assert_eq!(ask(method, path, "", &request).0, 401, "{path}");
            assert_eq!(ask(method, path, wrong, &request).0, 401, "{path}");
        }
        for path in ["/health", "/metrics", "/version", "/is_sleeping"] {
            assert_eq!(ask("GET", path, "", "").0, 200, "{path}");
        }
        for lines in ["", "host: host.docker.internal\r\n", "host: localhost\r\norigin: https://app.example\r\n"] {
            assert_eq!(ask("POST", TEXT, &format!("{lines}{key}"), &request).0, 200, "{lines}");
        }
        let (status, text) = ask("POST", TEXT, &format!("host: rebound.example\r\n{key}"), &request);
        assert!(status == 403 && text.contains("start it with --allowed-hosts rebound.example"), "{text}");
    }
}

#[test]
fn the_switch_makes_it_static_and_the_tokens_are_the_same() {
    let request = json!({"prompt": "Hello", "max_tokens": 24, "temperature": 0});
    let elastic = Server::start(&["--kv-budget", "16M"]);
    let fixed = Server::start_with(&["--kv-budget", "16M"], |command| {
        command.env("ENABLE_KVCACHED", "false");
    });
    assert!(fixed.first_line.contains("kv_mode=static"), "{}", fixed.first_line);
    assert!(fixed.send("GET", "/metrics", "").1.contains("kv_mode=\"static\""));
    // All of it from the start, whole pages of it.
    assert!(fixed.metric("kvcached_kv_cache_pool_mapped_bytes") > 12.0 * 1024.0 * 1024.0);
    let choices = [&elastic, &fixed].map(|server| server.good("POST", TEXT, &request)["choices"].clone());
    assert_eq!(choices[0], choices[1]);
}

/// A third of the answers had U+FFFD in them, and a chat that named no length went on through 32,768 tokens.
#[test]
fn a_synthetic_model_answers_in_printable_text_and_comes_to_an_end() {
    let server = Server::start(&[]);
    let content = |request: &Value| {
        let whole = server.good("POST", CHAT, request);
        let tokens = whole["usage"]["completion_tokens"].as_u64().unwrap();
        (whole["choices"][0]["message"]["content"].as_str().unwrap().to_owned(), tokens)
    };
    let ask = |hello: String| json!({"messages": [{"role": "user", "content": hello}]});
    assert_eq!(content(&ask("Hello!".to_owned())).1, 64);
    for seed in 0..60 {
        let mut request = ask(format!("Hello {seed}, was hei\u{df}t du?"));
        (request["max_tokens"], request["seed"], request["temperature"]) = (64.into(), seed.into(), 2.into());
        let (text, tokens) = content(&request);
        assert_eq!((text.chars().count(), tokens), (64, 64), "{text}");
        assert!(text.bytes().all(|byte| matches!(byte, b' '..=b'~')), "{text:?}");
    }
    // What is asked for is answered in full, and a short context has the last word.
    let mut long = ask("Hello!".to_owned());
    long["max_tokens"] = 300.into();
    assert_eq!(content(&long).1, 300);
    let short = Server::start(&["--max-model-len", "32"]);
    let whole = short.good("POST", CHAT, &ask("Hello!".to_owned()));
    assert_eq!(whole["usage"]["total_tokens"], 32);
}

#[test]
fn cached_beginnings_are_shared_under_the_same_salt_alone() {
    let server = Server::start(&[]);
    let cached = |salt: Value| {
        let request = json!({"prompt": "Hello ".repeat(20), "max_tokens": 1, "cache_salt": salt});
        server.good("POST", TEXT, &request)["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    let salts = || [json!("one"), json!("two"), Value::Null];
    assert_eq!(salts().map(cached), [0, 0, 0]);
    assert_eq!(salts().map(cached), [112, 112, 112], "seven full blocks of 121 tokens");
}

#[test]
fn a_client_that_goes_away_leaves_no_block_behind() {
    let server = Server::start_with(&[], |command| {
        // Without cached prefixes every block is a request's.
        command.env("KVCACHED_MAX_CACHED_TOKENS", "0");
    });
    let endless = json!({"prompt": "Hello", "max_tokens": 30_000, "ignore_eos": true, "stream": true}).to_string();
    let mut socket = server.open("POST", TEXT, &endless);
    let mut first = [0; 512];
    assert!(socket.read(&mut first).unwrap() > 0);
    drop(socket);
    server.wait_for_metric("vllm:num_requests_running", 0.0);
    server.wait_for_metric("kvcached_kv_cache_pool_allocated_blocks", 0.0);
    server.good("POST", TEXT, &json!({"prompt": "Hello", "max_tokens": 4}));
}

#[test]
fn sigterm_lets_a_running_stream_end_and_a_second_one_does_not_wait() {
    let mut server = Server::start(&["--drain", "100"]);
    let request = json!({"prompt": "Hello", "max_tokens": 400, "ignore_eos": true, "stream": true}).to_string();
    let mut socket = server.open("POST", TEXT, &request);
    let mut first = [0; 16];
    socket.read_exact(&mut first).unwrap();
    server.signal(Signal::TERM);
    let mut rest = String::new();
    socket.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("[DONE]"), "{rest}");
    assert_eq!(server.wait().code(), Some(0));
    assert_eq!(segments(&server), Vec::<String>::new());

    let mut server = Server::start(&["--drain", "1000"]);
    let endless = json!({"prompt": "Hello", "max_tokens": 32_000, "ignore_eos": true, "stream": true}).to_string();
    let mut socket = server.open("POST", TEXT, &endless);
    socket.read_exact(&mut first).unwrap();
    server.signal(Signal::INT);
    // It has begun to drain when nobody new is let in.
    while std::net::TcpStream::connect(&server.address).is_ok() {
        std::thread::yield_now();
    }
    server.signal(Signal::INT);
    assert_eq!(server.wait().signal(), Some(Signal::INT.as_raw()));
    assert_eq!(segments(&server), Vec::<String>::new());
}

/// `timeout` and supervisors send a signal to a process and once more to its group. `TIDEKV_SIGNALS` pairs of them.
#[test]
fn two_sigterms_some_milliseconds_apart_leave_no_segment() {
    let pairs: u64 = std::env::var("TIDEKV_SIGNALS").map_or(6, |count| count.parse().unwrap());
    // The time between the two is what is tested.
    let (_nobody, nobody_says) = mpsc::channel::<()>();
    let left = (0..pairs).filter(|pair| {
        let mut server = Server::start(&[]);
        assert_eq!(segments(&server).len(), 1);
        server.signal(Signal::TERM);
        let _ = nobody_says.recv_timeout(Duration::from_millis(pair * 50 / pairs));
        server.signal(Signal::TERM);
        server.wait();
        !segments(&server).is_empty()
    });
    assert_eq!(left.count(), 0, "of {pairs} servers left a segment");
}

#[test]
fn what_takes_longer_than_draining_is_told_so() {
    let mut server = Server::start(&["--drain", "0"]);
    let endless = json!({"prompt": "Hello", "max_tokens": 32_000, "ignore_eos": true, "stream": true}).to_string();
    let mut socket = server.open("POST", TEXT, &endless);
    let mut first = [0; 16];
    socket.read_exact(&mut first).unwrap();
    server.signal(Signal::TERM);
    let mut rest = String::new();
    socket.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("shutting_down"), "{}", &rest[rest.len().saturating_sub(400)..]);
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn sigkill_leaves_nothing_that_gc_does_not_remove() {
    let mut server = Server::start(&[]);
    server.good("POST", TEXT, &json!({"prompt": "Hello", "max_tokens": 4}));
    server.signal(Signal::KILL);
    assert_eq!(server.wait().signal(), Some(Signal::KILL.as_raw()));
    assert!(!segments(&server).is_empty(), "something is left to be removed");
    let gc = kvctl(server.dir.path(), &["gc"]);
    assert!(gc.status.success(), "{gc:?}");
    assert_eq!(segments(&server), Vec::<String>::new());
    let list = kvctl(server.dir.path(), &["list", "--json"]);
    assert!(!String::from_utf8_lossy(&list.stdout).contains("kvserve"), "{list:?}");
}

#[test]
fn many_clients_share_a_small_pool() {
    let server = Server::start_with(&["--kv-budget", "16M", "--max-num-seqs", "16"], |command| {
        command.env("KVCACHED_MAX_CACHED_TOKENS", "0");
    });
    let request = |client: usize| json!({"model": "default", "messages": [{"role": "user", "content": format!("Hello {client}!")}], "max_tokens": 20});
    let sockets: Vec<_> = (0..60).map(|client| server.open("POST", CHAT, &request(client).to_string())).collect();
    for socket in sockets {
        let (status, text) = answer(socket);
        let whole: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((status, &whole["usage"]["completion_tokens"]), (200, &json!(20)), "{text}");
        assert!(!whole["choices"][0]["message"]["content"].as_str().unwrap().is_empty());
    }
    server.wait_for_metric("kvcached_kv_cache_pool_allocated_blocks", 0.0);
}

#[test]
fn a_port_that_is_taken_is_an_error_and_the_first_server_goes_on() {
    let server = Server::start(&[]);
    let port = server.address.rsplit_once(':').unwrap().1;
    let output = kvserve(server.dir.path(), &["--port", port]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        error.starts_with(&format!("error: port {port} of 127.0.0.1 is taken")) && error.lines().count() == 1,
        "{error}"
    );
    server.good("GET", "/health", &Value::Null);
}
