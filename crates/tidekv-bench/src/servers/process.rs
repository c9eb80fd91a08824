//! One server: started behind its guard, waited for, stopped when it is dropped.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::kvserve::KvServe;
use super::session::Session;
use crate::load::BaseUrl;

/// Lines of a server's output that are kept, to say why it ended.
const KEPT_LINES: usize = 12;
/// Longest line that is kept, and longest that is looked at in one piece.
const KEPT_LETTERS: usize = 400;
const LINE_BYTES: u64 = 64 << 10;
/// What kvserve prints before its address.
const LISTENING: &str = "listening on http://";
/// How long one question to a server that is starting may take, and how often it is asked.
const ASK_TIMEOUT: Duration = Duration::from_secs(2);
const ASK_EVERY: Duration = Duration::from_millis(200);
/// A server of ours has nothing to write down when it ends; others get time to.
const OWN_GRACE: Duration = Duration::from_secs(2);
const FOREIGN_GRACE: Duration = Duration::from_secs(15);
/// Beyond the grace that the guard gives.
const GUARD_TIMEOUT: Duration = Duration::from_secs(5);

/// How to come to a server.
#[derive(Clone, Debug)]
pub enum Launch {
    /// Start kvserve.
    KvServe(KvServe),
    /// Start this line by `sh`, with a free port for `{port}`.
    Command {
        /// The line.
        line: String,
        /// Where it will listen, if the line has no `{port}`.
        url: Option<BaseUrl>,
        /// What its environment has besides ours.
        variables: Vec<(String, String)>,
    },
    /// It is there.
    Url(BaseUrl),
}

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// This program's own file cannot be found.
    #[error("kvbench cannot find itself to start a server")]
    NoProgram {
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Neither here nor on the path.
    #[error(
        "there is no kvserve: this kvbench was built without one and none is on PATH; install it, or give --a-cmd and --b-cmd, or URLs"
    )]
    NoKvServe,
    /// The operating system refused a process, a pipe, a thread or a port.
    #[error("{what} cannot be started")]
    Start {
        /// The command, shortened.
        what: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A command whose address nobody knows.
    #[error("{line:?} has no {{port}} in it: write where the port goes, or give the URL of the server too")]
    NoPort {
        /// As written.
        line: String,
    },
    /// It ended before it served anybody.
    #[error("{what} ended before it served anybody; its last lines: {tail}")]
    Ended {
        /// The command, shortened.
        what: String,
        /// What it said.
        tail: String,
    },
    /// It does not answer.
    #[error("{what} did not answer within {seconds} s: raise --start-timeout, or see its last lines: {tail}")]
    Late {
        /// The command, shortened, or the URL.
        what: String,
        /// How long was waited.
        seconds: u64,
        /// What it said.
        tail: String,
    },
    /// Somebody else would be measured in its place.
    #[error(
        "something answers at {url} before {what} is started: stop it, or write {{port}} into the command for a port that is free"
    )]
    Occupied {
        /// Where.
        url: BaseUrl,
        /// The command, shortened.
        what: String,
    },
    /// Nobody serves at a URL.
    #[error("{url} does not answer /health or /v1/models: is the server running there?")]
    NotThere {
        /// Where.
        url: BaseUrl,
    },
    /// Ctrl-C.
    #[error("interrupted while {what} was starting")]
    Interrupted {
        /// What.
        what: String,
    },
}

/// A server that answers. Dropping it stops what was started for it.
#[derive(Debug)]
pub struct Server {
    url: BaseUrl,
    _process: Option<Process>,
}

impl Server {
    /// Starts what `launch` says and waits until it answers, `timeout` is over, or somebody interrupts.
    ///
    /// # Errors
    /// [`ServerError`]; nothing is left running.
    pub fn start(launch: &Launch, timeout: Duration, session: &Session) -> Result<Self, ServerError> {
        let deadline = Instant::now() + timeout;
        let wait = Wait { deadline, timeout, session };
        match launch {
            Launch::KvServe(kvserve) => {
                let mut process = Process::start(&kvserve.command()?, &kvserve.variables, OWN_GRACE)?;
                let url = process.wait_for_address(&wait)?;
                Ok(Self { url, _process: Some(process) })
            }
            Launch::Command { line, url, variables } => {
                let (line, url) = with_port(line, url.as_ref())?;
                if wait.is_healthy(&url) {
                    return Err(ServerError::Occupied { url, what: shortened(&line) });
                }
                let shell: Vec<OsString> = ["sh", "-c", line.as_str()].map(OsString::from).to_vec();
                let mut process = Process::start(&shell, variables, FOREIGN_GRACE)?;
                process.wait_until_healthy(&url, &wait)?;
                Ok(Self { url, _process: Some(process) })
            }
            Launch::Url(url) if wait.is_healthy(url) => Ok(Self { url: url.clone(), _process: None }),
            Launch::Url(url) => Err(ServerError::NotThere { url: url.clone() }),
        }
    }

    /// Where it answers.
    pub fn url(&self) -> &BaseUrl {
        &self.url
    }
}

/// Until when, and who may end it earlier.
struct Wait<'a> {
    deadline: Instant,
    timeout: Duration,
    session: &'a Session,
}

impl Wait<'_> {
    /// Whether there is somebody who serves a model: `/health` where there is one, else the list of models.
    fn is_healthy(&self, url: &BaseUrl) -> bool {
        ["/health", "/v1/models"].iter().any(|path| self.session.page(url, path, ASK_TIMEOUT).is_some())
    }

    fn check(&self, what: &str, tail: impl FnOnce() -> String) -> Result<(), ServerError> {
        if self.session.is_interrupted() {
            return Err(ServerError::Interrupted { what: what.to_owned() });
        }
        if Instant::now() >= self.deadline {
            return Err(ServerError::Late { what: what.to_owned(), seconds: self.timeout.as_secs(), tail: tail() });
        }
        Ok(())
    }

    fn pause(&self, what: &str, tail: impl FnOnce() -> String) -> Result<(), ServerError> {
        self.check(what, tail)?;
        thread::sleep(ASK_EVERY);
        Ok(())
    }
}

/// A command behind its guard.
#[derive(Debug)]
struct Process {
    what: String,
    guard: Child,
    /// Closing it tells the guard to stop the server.
    stdin: Option<ChildStdin>,
    grace: Duration,
    tail: Tail,
    /// What it says, until it serves.
    lines: Option<Receiver<String>>,
}

impl Process {
    fn start(command: &[OsString], variables: &[(String, String)], grace: Duration) -> Result<Self, ServerError> {
        let words: Vec<_> = command.iter().map(|word| word.to_string_lossy()).collect();
        let what = shortened(&words.join(" "));
        let refused = |source| ServerError::Start { what: what.clone(), source };
        let program = tidekv_cli::program::named_path().map_err(|source| ServerError::NoProgram { source })?;
        let mut guard = Command::new(program)
            .args(["server-guard", "--grace-ms", &grace.as_millis().to_string(), "--"])
            .args(command)
            // Benchmarks ask their own servers without a key.
            .env_remove("VLLM_API_KEY")
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C is for the benchmark, which then stops its servers.
            .process_group(0)
            .spawn()
            .map_err(refused)?;
        let (tail, (told, lines)) = (Tail::default(), channel());
        let stdin = guard.stdin.take();
        let outputs: [Option<Box<dyn Read + Send>>; 2] = [
            guard.stdout.take().map(|pipe| Box::new(pipe) as Box<dyn Read + Send>),
            guard.stderr.take().map(|pipe| Box::new(pipe) as Box<dyn Read + Send>),
        ];
        let process = Self { what: what.clone(), guard, stdin, grace, tail: tail.clone(), lines: Some(lines) };
        for output in outputs.into_iter().flatten() {
            let (tail, told) = (tail.clone(), told.clone());
            let reader = thread::Builder::new().name("server-output".to_owned());
            reader.spawn(move || read_lines(output, &tail, &told)).map_err(refused)?;
        }
        Ok(process)
    }

    /// The address that kvserve prints once it listens.
    fn wait_for_address(&mut self, wait: &Wait<'_>) -> Result<BaseUrl, ServerError> {
        let Some(lines) = self.lines.take() else { return Err(self.ended()) };
        loop {
            wait.check(&self.what, || self.tail.text())?;
            match lines.recv_timeout(ASK_EVERY) {
                Ok(line) => {
                    if let Some(Ok(url)) = line.find(LISTENING).map(|at| line[at + LISTENING.len()..].trim().parse()) {
                        return Ok(url);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                // Both outputs are over, so all that it had to say is in the tail.
                Err(RecvTimeoutError::Disconnected) => return Err(self.ended()),
            }
        }
    }

    fn wait_until_healthy(&mut self, url: &BaseUrl, wait: &Wait<'_>) -> Result<(), ServerError> {
        let lines = self.lines.take();
        loop {
            let is_healthy = wait.is_healthy(url);
            // Looked at behind the answer, which may be of somebody who has the port that this one wanted.
            if !matches!(self.guard.try_wait(), Ok(None)) {
                // The rest of what it said is on its way.
                while lines.as_ref().is_some_and(|lines| lines.recv_timeout(ASK_TIMEOUT).is_ok()) {}
                return Err(self.ended());
            }
            if is_healthy {
                return Ok(());
            }
            wait.pause(&self.what, || self.tail.text())?;
        }
    }

    fn ended(&self) -> ServerError {
        ServerError::Ended { what: self.what.clone(), tail: self.tail.text() }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stdin = None;
        let deadline = Instant::now() + self.grace + GUARD_TIMEOUT;
        loop {
            match self.guard.try_wait() {
                Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(5)),
                Ok(Some(_)) => return,
                Ok(None) | Err(_) => break,
            }
        }
        // A guard that does not end is stopped itself; there is nothing more to be done for its server.
        let _ = self.guard.kill();
        let _ = self.guard.wait();
    }
}

/// The line with a port in it, and where that is.
fn with_port(line: &str, url: Option<&BaseUrl>) -> Result<(String, BaseUrl), ServerError> {
    if !line.contains("{port}") {
        let url = url.ok_or_else(|| ServerError::NoPort { line: line.to_owned() })?;
        return Ok((line.to_owned(), url.clone()));
    }
    let port = match url {
        Some(url) => url.port,
        None => free_port().map_err(|source| ServerError::Start { what: shortened(line), source })?,
    };
    let url = url.cloned().unwrap_or_else(|| BaseUrl::new("127.0.0.1", port));
    Ok((line.replace("{port}", &port.to_string()), url))
}

/// A port that the kernel has just had to spare.
fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// The last lines of a server, shared with the threads that read them.
#[derive(Clone, Debug, Default)]
struct Tail(Arc<Mutex<VecDeque<String>>>);

impl Tail {
    fn push(&self, line: &str) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == KEPT_LINES {
            lines.pop_front();
        }
        lines.push_back(shortened(line));
    }

    fn text(&self) -> String {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.is_empty() {
            "it said nothing".to_owned()
        } else {
            lines.iter().cloned().collect::<Vec<_>>().join(" | ")
        }
    }
}

/// Keeps the pipe empty for as long as the server lives: one that nobody reads stops it.
fn read_lines(output: impl Read, tail: &Tail, told: &Sender<String>) {
    let mut reader = BufReader::new(output);
    let mut line = Vec::new();
    while matches!(reader.by_ref().take(LINE_BYTES).read_until(b'\n', &mut line), Ok(1..)) {
        let text = String::from_utf8_lossy(&line);
        tail.push(text.trim_end());
        // Whoever has its address listens no more.
        let _ = told.send(text.into_owned());
        line.clear();
    }
}

fn shortened(text: &str) -> String {
    if text.chars().count() <= KEPT_LETTERS {
        text.to_owned()
    } else {
        text.chars().take(KEPT_LETTERS).chain(['…']).collect()
    }
}
