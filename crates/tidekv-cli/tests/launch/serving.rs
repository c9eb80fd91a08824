//! What a running `kvctl up` does for those who ask.

use std::fs;
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tidekv_shm::{DeviceName, Ledger, RuntimeDir};

use crate::supervisor::{PATIENCE, Supervisor, kvctl, run, send, two_models};

#[test]
fn two_models_behind_one_address_until_it_is_told_to_stop() {
    let mut up = Supervisor::start(&two_models(""));
    for name in ["a", "b"] {
        up.wait_until_ready(name);
        let (status, body) = up.complete(name);
        assert_eq!(status, 200, "{body}");
    }
    assert_eq!(up.complete("default").0, 200);
    assert_eq!(up.complete("synthetic:tiny:2").0, 200);
    assert_eq!(up.complete("nobody").0, 404);

    let dir = up.dir.path().to_owned();
    let (code, text, _) = run(&dir, &["ps", "--json"]);
    let rows: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((code, rows[0]["instances"][1]["name"].as_str().unwrap()), (0, "b"));
    assert_eq!(rows[0]["router"], format!("http://{}", up.address));
    let (code, text, _) = run(&dir, &["ps"]);
    assert!(code == 0 && text.contains("Instance") && text.contains("kvserve"), "{text}");
    let (code, text, _) = run(&dir, &["logs", "a"]);
    assert!(code == 0 && text.contains("serving synthetic:tiny with kv_mode=elastic"), "{text}");
    let (code, _, error) = run(&dir, &["logs", "aa"]);
    assert!(code == 1 && error.contains("No instance 'aa' runs"), "{error}");
    // Each model has a pool of its own, which the router knows.
    let [a, b] =
        ["a", "b"].map(|name| up.wait_for(name, "its pool", |status| status["pool"].is_string())["pool"].clone());
    assert_ne!(a, b);
    assert!(up.lines().iter().any(|line| line.starts_with("a | serving ")), "{:?}", up.lines());

    up.signal(Signal::INT);
    assert_eq!(up.wait().code(), Some(0));
    assert_eq!(up.files(), Vec::<String>::new());
    assert_eq!(run(&dir, &["ps"]).0, 1);
}

#[test]
fn a_killed_instance_is_noticed_by_nobody_else_and_comes_back() {
    let up = Supervisor::start(&two_models(""));
    let pid = up.wait_until_ready("a")["pid"].as_u64().unwrap();
    up.wait_until_ready("b");
    assert_eq!(up.complete("a").0, 200, "it holds memory now");
    let raw = i32::try_from(pid).unwrap();
    kill_process(Pid::from_raw(raw).unwrap(), Signal::KILL).unwrap();
    // Until it is back its requests are refused, and never hang; the other's are answered.
    let killed = Instant::now();
    let mut refused = 0;
    loop {
        let (status, body) = up.complete("a");
        match status {
            200 => break,
            502 | 503 => refused += 1,
            other => panic!("{other}: {body}"),
        }
        assert_eq!(up.complete("b").0, 200);
        assert!(killed.elapsed() < PATIENCE, "{:?}", up.lines());
    }
    assert!(refused > 0);
    let status = up.wait_until_ready("a");
    assert_eq!(status["restarts"], 1);
    assert_ne!(status["pid"].as_u64().unwrap(), pid);
    // Nothing is counted for the dead one any more.
    let ledger = Ledger::open_existing(&RuntimeDir::at(up.dir.path()), &DeviceName::host()).unwrap().unwrap();
    let is_left = || ledger.read().unwrap().entries.iter().any(|entry| u64::from(entry.pid) == pid);
    while is_left() {
        assert!(killed.elapsed() < PATIENCE, "{:?}", ledger.read());
        std::thread::yield_now();
    }
    assert!(up.lines().iter().any(|line| line.contains("was ended by signal 9")), "{:?}", up.lines());
}

#[test]
fn a_sleeping_model_gives_its_memory_back_and_wakes_for_a_request() {
    let up = Supervisor::start(&two_models("sleep_manager: {min_sleep_duration: 0}"));
    up.wait_until_ready("a");
    assert_eq!(up.complete("a").0, 200);
    let (status, body) = up.send("POST", "/action/sleep/a", "", "");
    assert_eq!(status, 200, "{body}");
    assert_eq!(up.status("a")["state"], "sleeping");
    let held = || {
        let pools = up.get("/api/pools");
        let of_a = pools["pools"].as_array().unwrap().iter().find(|pool| pool["model"] == "a").cloned();
        let parts = ["needed_bytes", "cached_bytes", "idle_bytes"];
        of_a.map_or(0, |pool| parts.map(|part| pool[part].as_u64().unwrap()).iter().sum())
    };
    let deadline = Instant::now() + PATIENCE;
    while held() > 0 {
        assert!(Instant::now() < deadline, "asleep, and it still holds {}", held());
    }
    assert_eq!(up.complete("a").0, 200);
    assert_eq!(up.status("a")["state"], "ready");
}

#[test]
fn limits_are_set_with_the_key_which_nobody_else_gets_to_see() {
    let up = Supervisor::start_with(&two_models(""), |command| {
        command.env("KVCACHED_WEB_API_KEY", "hunter2").env("KVCACHED_LOG_LEVEL", "DEBUG");
        // It is for engines of vLLM's: one of ours that took it would refuse the router.
        command.env("VLLM_API_KEY", "hunter3");
    });
    let pid = up.wait_until_ready("a")["pid"].as_u64().unwrap();
    let pool = up.wait_for("a", "its pool", |status| status["pool"].is_string())["pool"].as_str().unwrap().to_owned();
    let path = format!("/api/pools/{pool}/limit");
    assert_eq!(up.send("POST", &path, "", "{\"size\": \"16M\"}").0, 401);
    let key = "authorization: Bearer hunter2\r\n";
    assert_eq!(up.send("POST", &path, key, "{\"size\": \"16M\"}").0, 200);
    let (code, list, _) = run(up.dir.path(), &["list", &pool, "--json"]);
    assert!(code == 0 && list.contains("16777216"), "{list}");
    let share = format!("/api/pools/{pool}/share");
    assert_eq!(up.send("POST", &share, key, "{\"weight\": 3}").0, 200);
    let (_, shown, _) = run(up.dir.path(), &["share", &pool]);
    assert!(shown.contains("Weight       3"), "{shown}");
    assert_eq!(up.send("POST", &share, key, "{\"floor\": \"1T\"}").0, 422);
    assert_eq!(up.send("POST", "/api/pools/..%2F..%2Fetc%2Fpasswd/limit", key, "{\"bytes\": 1}").0, 404);
    assert_eq!(up.complete("a").0, 200);
    assert_eq!(up.send("POST", "/action/sleep/a", key, "").0, 200);
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap();
    assert!(!String::from_utf8_lossy(&environment).contains("hunter2"), "instances have no business with it");
    assert!(!up.lines().join("\n").contains("hunter2"));
    let (_, log, _) = run(up.dir.path(), &["logs", "a"]);
    assert!(!log.contains("hunter2"));
}

#[test]
fn what_serves_at_a_port_already_is_used_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let mut other = kvctl(folder.path(), &[]);
    let mut own = std::process::Command::new(env!("CARGO_BIN_EXE_kvserve"));
    own.envs(other.get_envs().filter_map(|(name, value)| Some((name, value?))));
    other = own;
    other.args(["--port", "0", "--threads", "1"]).stdout(std::process::Stdio::piped());
    let mut other = other.spawn().unwrap();
    let mut reader = std::io::BufReader::new(other.stdout.take().unwrap());
    let mut lines = String::new();
    while !lines.contains("listening on http://") {
        assert!(std::io::BufRead::read_line(&mut reader, &mut lines).unwrap() > 0, "{lines}");
    }
    let address = lines.trim_end().rsplit("http://").next().unwrap().to_owned();
    let port = address.rsplit(':').next().unwrap();
    let config =
        format!("instances: [{{name: a, model: 'synthetic:tiny', engine: kvserve, engine_args: '--port {port}'}}]");
    let mut up = Supervisor::start(&config);
    let status = up.wait_until_ready("a");
    assert!(status["pid"].is_null(), "{status}");
    assert_eq!(up.complete("a").0, 200);
    up.signal(Signal::TERM);
    assert_eq!(up.wait().code(), Some(0));
    assert!(up.lines().iter().any(|line| line.contains("it is used, and not stopped")), "{:?}", up.lines());
    assert_eq!(send(&address, "GET", "/health", "", "").0, 200);
    other.kill().unwrap();
    other.wait().unwrap();
}

/// Says that it is well three times, then that its device is lost, and is well again when it is started anew.
const LOSES_ITS_DEVICE: &str = r#"
import http.server, json, os, sys
looks, noted = 0, sys.argv[1]
is_second = os.path.exists(noted)
open(noted, "w").close()

class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global looks
        looks += self.path == "/health"
        is_lost = looks > 3 and not is_second
        body = json.dumps({"status": "device_lost", "reason": "an illegal address"} if is_lost else {}).encode()
        self.send_response(503 if is_lost else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[-1])), Page).serve_forever()
"#;

/// kvserve stays when its GPU is lost, to say so. The router passed requests on to it for ever.
#[test]
fn an_instance_that_says_it_is_lost_is_started_again() {
    let folder = tempfile::tempdir().unwrap();
    let (script, noted) = (folder.path().join("engine.py"), folder.path().join("started"));
    std::fs::write(&script, LOSES_ITS_DEVICE).unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let up = Supervisor::start(&format!(
        "instances:\n  - {{name: a, model: m, engine: command, command: [python3, {}, {}, --port, {port}]}}\n",
        script.display(),
        noted.display()
    ));
    up.wait_for_line("can answer nothing any more: an illegal address");
    let status = up.wait_for("a", "a second life", |status| status["state"] == "ready" && status["restarts"] == 1);
    assert!(status["pid"].is_number(), "{status}");
}
