//! A running `kvctl up` with a folder of shared files of its own, and everything that it started ended with the test.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

/// Long enough that only a hang reaches it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// kvctl in a folder, with nothing of this process's environment that would change what it does.
pub(crate) fn kvctl(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvctl"));
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("KVCACHED_") || name == "ENABLE_KVCACHED") {
            command.env_remove(name);
        }
    }
    command.args(args).env("KVCACHED_RUNTIME_DIR", dir).env("KVCACHED_HOST_BUDGET", "64M").env("NO_COLOR", "1");
    command
}

pub(crate) fn run(dir: &Path, args: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = kvctl(dir, args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code().unwrap(), text(stdout), text(stderr))
}

/// Two small models on one thread each; `extra` comes before the instances.
pub(crate) fn two_models(extra: &str) -> String {
    format!(
        "{extra}\ninstances:\n  - {{name: a, model: 'synthetic:tiny', engine: kvserve, engine_args: '--threads 1'}}\n  - {{name: b, \
         model: 'synthetic:tiny:2', engine: kvserve, engine_args: ['--threads 1']}}\n"
    )
}

/// What it wrote so far, and a bell for those who wait for more.
#[derive(Default)]
struct Written {
    lines: Mutex<(Vec<String>, IsOver)>,
    more: Condvar,
}

type IsOver = bool;

fn new_folder() -> Arc<TempDir> {
    Arc::new(tempfile::tempdir().unwrap())
}

pub(crate) struct Supervisor {
    pub(crate) dir: Arc<TempDir>,
    pub(crate) child: Child,
    output: Arc<Written>,
    pub(crate) address: String,
}

impl Supervisor {
    pub(crate) fn start(config: &str) -> Self {
        Self::start_with(config, |_| ())
    }

    /// Another one in the same folder.
    pub(crate) fn start_beside(&self, config: &str) -> Self {
        Self::start_in(Arc::clone(&self.dir), config, |_| ())
    }

    /// One that cannot write what it has to say: nobody knows its address.
    pub(crate) fn start_unseen(config: &str) -> Self {
        let (dir, mut command) = Self::command(new_folder(), config);
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let child = command.stdout(full).spawn().unwrap();
        let output = Arc::<Written>::default();
        output.lines.lock().unwrap().1 = true;
        Self { address: String::new(), dir, child, output }
    }

    fn command(dir: Arc<TempDir>, config: &str) -> (Arc<TempDir>, Command) {
        let file = dir.path().join("models.yaml");
        fs::write(&file, config).unwrap();
        let command = kvctl(dir.path(), &["up", "--port", "0", "--config", file.to_str().unwrap()]);
        (dir, command)
    }

    pub(crate) fn start_with(config: &str, change: impl FnOnce(&mut Command)) -> Self {
        Self::start_in(new_folder(), config, change)
    }

    fn start_in(dir: Arc<TempDir>, config: &str, change: impl FnOnce(&mut Command)) -> Self {
        let (dir, mut command) = Self::command(dir, config);
        command.stdout(Stdio::piped());
        change(&mut command);
        let mut child = command.spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut first = String::new();
        stdout.read_line(&mut first).unwrap();
        let address = first.trim_end().strip_prefix("listening on http://").unwrap_or_else(|| panic!("{first}"));
        let output = Arc::<Written>::default();
        let kept = Arc::clone(&output);
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                kept.lines.lock().unwrap().0.push(line);
                kept.more.notify_all();
            }
            kept.lines.lock().unwrap().1 = true;
            kept.more.notify_all();
        });
        Self { address: address.to_owned(), dir, child, output }
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        self.output.lines.lock().unwrap().0.clone()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits until it wrote such a line, or nothing more.
    fn wait_for_output(&self, is_it: impl Fn(&[String], IsOver) -> bool) {
        let lines = self.output.lines.lock().unwrap();
        let (lines, timeout) =
            self.output.more.wait_timeout_while(lines, PATIENCE, |(lines, is_over)| !is_it(lines, *is_over)).unwrap();
        assert!(!timeout.timed_out(), "waited in vain: {:?}", lines.0);
    }

    pub(crate) fn wait_for_line(&self, text: &str) {
        self.wait_for_output(|lines, _| lines.iter().any(|line| line.contains(text)));
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.wait_for_output(|_, is_over| is_over);
        self.child.wait().unwrap()
    }

    /// Status and body of a request.
    pub(crate) fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> (u16, String) {
        send(&self.address, method, path, headers, body)
    }

    pub(crate) fn get(&self, path: &str) -> Value {
        let (status, body) = self.send("GET", path, "", "");
        assert_eq!(status, 200, "{path}: {body}");
        serde_json::from_str(&body).unwrap()
    }

    pub(crate) fn complete(&self, model: &str) -> (u16, String) {
        let body = format!("{{\"model\": \"{model}\", \"prompt\": \"Hello\", \"max_tokens\": 3}}");
        self.send("POST", "/v1/completions", "", &body)
    }

    pub(crate) fn status(&self, name: &str) -> Value {
        let status = self.get("/api/status");
        status["models"].as_array().unwrap().iter().find(|model| model["name"] == name).unwrap().clone()
    }

    pub(crate) fn wait_for(&self, name: &str, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = self.status(name);
            if is_so(&status) {
                return status;
            }
            assert!(Instant::now() < deadline, "{name}: waited for {what}: {status}\n{:?}", self.lines());
        }
    }

    pub(crate) fn wait_until_ready(&self, name: &str) -> Value {
        self.wait_for(name, "ready", |status| status["state"] == "ready")
    }

    /// The files of its folder, the configuration apart.
    pub(crate) fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.dir.path()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name != "models.yaml").collect()
    }

    /// What `kvctl ps` calls it.
    pub(crate) fn id(&self) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let (code, text, _) = run(self.dir.path(), &["ps", "--json"]);
            if code == 0 {
                let rows: Value = serde_json::from_str(&text).unwrap();
                return rows[0]["id"].as_str().unwrap().to_owned();
            }
            assert!(Instant::now() < deadline, "kvctl ps shows nothing");
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // Ended already, or ended now with all that it started.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = kvctl(self.dir.path(), &["gc"]).output();
    }
}

/// Processes that carry a supervisor's mark.
pub(crate) fn marked(id: &str) -> Vec<u32> {
    let wanted = format!("KVCACHED_UP_ID={id}");
    let entries = fs::read_dir("/proc").unwrap();
    let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let has_it = |pid: &u32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|pair| pair == wanted.as_bytes())
    };
    numbers.filter(has_it).collect()
}

pub(crate) fn send(address: &str, method: &str, path: &str, headers: &str, body: &str) -> (u16, String) {
    let mut socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-length: {}\r\n{headers}\r\n",
        body.len()
    );
    socket.write_all((head + body).as_bytes()).unwrap();
    let mut text = String::new();
    socket.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text:?}"));
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}
