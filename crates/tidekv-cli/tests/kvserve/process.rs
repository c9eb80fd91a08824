//! A running `kvserve` with a folder of shared files of its own, killed when the test is over, and a client in a few lines.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

/// Long enough that only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(120);

/// A program of ours: as cargo built it, or where the tests were brought without it.
fn program(name: &str, built: &str) -> PathBuf {
    std::env::var_os("TIDEKV_TEST_PROGRAMS").map_or_else(|| built.into(), |folder| Path::new(&folder).join(name))
}

/// `kvserve` with nothing of this process's environment that would change what it does.
pub(crate) fn kvserve(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(program("kvserve", env!("CARGO_BIN_EXE_kvserve")));
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| {
            name.starts_with("KVCACHED_")
                || name.starts_with("HF_")
                || ["ENABLE_KVCACHED", "VLLM_API_KEY"].contains(&name)
        }) {
            command.env_remove(name);
        }
    }
    command.env("KVCACHED_RUNTIME_DIR", dir).env("HF_HOME", dir.join("hf")).args(args);
    command
}

/// Runs a tool of ours to its end.
pub(crate) fn kvctl(dir: &Path, args: &[&str]) -> Output {
    Command::new(program("kvctl", env!("CARGO_BIN_EXE_kvctl")))
        .args(args)
        .env("KVCACHED_RUNTIME_DIR", dir)
        .output()
        .unwrap()
}

pub(crate) struct Server {
    pub(crate) dir: Arc<TempDir>,
    child: Child,
    /// What it writes behind its two lines, when it has ended.
    rest: Receiver<String>,
    pub(crate) first_line: String,
    pub(crate) address: String,
}

impl Server {
    /// On a free port, with 64 MiB unless `args` say otherwise.
    pub(crate) fn start(args: &[&str]) -> Self {
        Self::start_with(args, |_| ())
    }

    pub(crate) fn start_with(args: &[&str], change: impl FnOnce(&mut Command)) -> Self {
        Self::start_in(Arc::new(tempfile::tempdir().unwrap()), args, change)
    }

    /// On the same device as whoever uses `dir`.
    pub(crate) fn start_in(dir: Arc<TempDir>, args: &[&str], change: impl FnOnce(&mut Command)) -> Self {
        let budget: &[&str] = if args.contains(&"--kv-budget") { &[] } else { &["--kv-budget", "64M"] };
        Self::start_as_told(dir, &[budget, args].concat(), change)
    }

    /// The same with the budget that a server has whom nobody tells one.
    pub(crate) fn start_bare_in(dir: Arc<TempDir>) -> Self {
        Self::start_as_told(dir, &[], |_| ())
    }

    fn start_as_told(dir: Arc<TempDir>, args: &[&str], change: impl FnOnce(&mut Command)) -> Self {
        let mut command = kvserve(dir.path(), &["--port", "0", "--threads", "1"]);
        command.args(args).stdout(Stdio::piped());
        change(&mut command);
        let mut child = command.spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = || {
            let mut line = String::new();
            stdout.read_line(&mut line).unwrap();
            line.trim_end().to_owned()
        };
        let first_line = line();
        let listening = line();
        let address =
            listening.strip_prefix("listening on http://").unwrap_or_else(|| panic!("{first_line}\n{listening}"));
        let (ended, rest) = mpsc::channel();
        std::thread::spawn(move || {
            let mut text = String::new();
            stdout.read_to_string(&mut text).unwrap();
            // A test that is over does not wait for it.
            let _ = ended.send(text);
        });
        Self { address: address.to_owned(), dir, child, rest, first_line }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Whether it has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits for its end; nothing more may come on stdout.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let rest = self.rest.recv_timeout(PATIENCE).expect("kvserve does not end");
        assert_eq!(rest, "");
        self.child.wait().unwrap()
    }

    /// A request on a connection of its own, sent.
    pub(crate) fn open(&self, method: &str, path: &str, body: &str) -> TcpStream {
        open(&self.address, method, path, body).unwrap()
    }

    /// Status and body.
    pub(crate) fn send(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        answer(self.open(method, path, body))
    }

    /// The JSON of a request that was right.
    pub(crate) fn good(&self, method: &str, path: &str, body: &Value) -> Value {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let (status, text) = self.send(method, path, &body);
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// A figure of `/metrics`.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let (_, page) = self.send("GET", "/metrics", "");
        let line = page.lines().find(|line| line.starts_with(&format!("{name}{{")));
        line.unwrap_or_else(|| panic!("no {name} in {page}")).rsplit_once(' ').unwrap().1.parse().unwrap()
    }

    /// Waits until a figure has come to a value: events of the engine reach `/metrics` a little later.
    pub(crate) fn wait_for_metric(&self, name: &str, wanted: f64) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let value = self.metric(name);
            if (value - wanted).abs() < 1e-9 {
                return;
            }
            assert!(Instant::now() < deadline, "{name} is {value} and not {wanted}");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Ended already, or to be ended now.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A request on a connection of its own, sent; to a server that may be gone.
pub(crate) fn open(address: &str, method: &str, path: &str, body: &str) -> io::Result<TcpStream> {
    open_with(address, method, path, &format!("host: {address}\r\n"), body)
}

/// The same with these lines in its head.
pub(crate) fn open_with(address: &str, method: &str, path: &str, lines: &str, body: &str) -> io::Result<TcpStream> {
    let mut socket = TcpStream::connect(address)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let head =
        format!("{method} {path} HTTP/1.1\r\n{lines}connection: close\r\ncontent-length: {}\r\n\r\n", body.len());
    socket.write_all((head + body).as_bytes())?;
    Ok(socket)
}

/// Status and body of what was asked; chunks are put together.
pub(crate) fn answer(socket: TcpStream) -> (u16, String) {
    try_answer(socket).unwrap()
}

/// The same of a server that may be gone in the middle.
pub(crate) fn try_answer(mut socket: TcpStream) -> io::Result<(u16, String)> {
    let mut text = String::new();
    socket.read_to_string(&mut text)?;
    let parts = || {
        let (head, body) = text.split_once("\r\n\r\n")?;
        Some((head, body, head.split(' ').nth(1)?.parse().ok()?))
    };
    let cut = || io::Error::new(io::ErrorKind::UnexpectedEof, format!("an answer that is not whole: {text:?}"));
    let (head, body, status) = parts().ok_or_else(cut)?;
    let is_chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    Ok((status, if is_chunked { dechunked(body) } else { body.to_owned() }))
}

/// A body that came in chunks, as one.
pub(crate) fn dechunked(body: &str) -> String {
    let (mut whole, mut rest) = (String::new(), body);
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        whole += &after[..size];
        rest = after[size..].trim_start_matches("\r\n");
        if size == 0 {
            break;
        }
    }
    whole
}
