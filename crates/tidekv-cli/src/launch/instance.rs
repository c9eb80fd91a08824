//! One instance from its start to its end, again and again, on a thread of its own.
//!
//! ```text
//!   something answers at its port ──> used, and watched; ours is started when it goes away
//!   else: start ──> Starting ── /health is 200 ──> Ready ── ended ──> Restarting ── backoff ──> start ...
//!                       └─ not well in time: ended as if it had                └─> Failed, if it never was ready
//!                                                    Ready, and says twice that it will never be well again: the same
//!   told to stop: SIGTERM to its group, SIGKILL after the grace, then to all that carries the mark
//! ```
//!
//! The thread lives as long as the process that it started: the kernel tells the process when the thread is gone.

use std::io::{self, PipeReader};
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use tidekv_serve::router::{EngineKind, Instance, Life, Model};
use tidekv_shm::RuntimeDir;

use super::backoff::Backoff;
use super::config::{IPC_NAME, InstancePlan};
use super::house::{self, INSTANCE_MARK, MARK};
use super::lines::{LogFile, each_line};
use super::probe::Health;
use super::{desk, probe};

/// How often an instance that starts is asked whether it is well.
const ASK_EVERY: Duration = Duration::from_millis(100);
/// How often one that is ready is asked, and how often it says that it is lost before it is believed.
const LOOK_EVERY: Duration = Duration::from_secs(2);
const LOST_LOOKS: u32 = 2;
const LOOK_PATIENCE: Duration = Duration::from_secs(1);
/// How long what an instance wrote may take to be read when nobody of its own is left: somebody else may hold the pipe.
const LAST_LINES: Duration = Duration::from_secs(5);
/// How often an instance of somebody else's is.
const WATCH_EVERY: Duration = Duration::from_secs(1);
/// From SIGTERM to SIGKILL.
const GRACE: Duration = Duration::from_secs(10);
/// What kvserve prints when it knows its port.
const LISTENING: &str = "listening on http://";

/// Something to show: an instance's line, or what becomes of it.
#[derive(Debug)]
pub(crate) enum Told {
    /// It wrote this.
    Line { name: String, line: String },
    /// This became of it.
    News { name: String, text: String },
}

/// Told to all threads at once: readable for ever once it was.
#[derive(Debug)]
pub(crate) struct StopFlag(OwnedFd);

impl StopFlag {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub(crate) fn raise(&self) {
        // It can only fail when it was raised 2^64 times.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Waits, and says whether it was raised.
    fn wait(&self, time: Duration) -> bool {
        wait_for(&[PollFd::new(&self.0, PollFlags::IN)], time).contains(&true)
    }
}

/// Waits for any of them; which are ready.
fn wait_for(fds: &[PollFd<'_>], time: Duration) -> Vec<bool> {
    let deadline = Instant::now() + time;
    let mut fds: Vec<PollFd<'_>> = fds.to_vec();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match poll(&mut fds, Timespec::try_from(left).ok().as_ref()) {
            Err(Errno::INTR) => {}
            // Nothing can be waited for: as if the time were up.
            Err(_) => return vec![false; fds.len()],
            Ok(_) => return fds.iter().map(|fd| !fd.revents().is_empty()).collect(),
        }
    }
}

/// What an instance's thread works with.
pub(crate) struct Keeper {
    pub(crate) plan: InstancePlan,
    pub(crate) program: PathBuf,
    pub(crate) model: Arc<Model>,
    pub(crate) dir: RuntimeDir,
    /// The supervisor's.
    pub(crate) id: String,
    pub(crate) log: PathBuf,
    pub(crate) stop: Arc<StopFlag>,
    pub(crate) tell: SyncSender<Told>,
    /// Before its first start.
    pub(crate) delay: Duration,
}

impl std::fmt::Debug for Keeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keeper").field("plan", &self.plan).finish_non_exhaustive()
    }
}

/// How a life ended.
enum End {
    /// We were told to stop, and it is gone.
    Stopped,
    /// On its own, having been ready for so long.
    Gone { ready_for: Option<Duration> },
}

impl Keeper {
    /// Until told to stop.
    pub(crate) fn run(self) {
        let mut backoff = Backoff::default();
        let mut restarts = 0;
        if !self.delay.is_zero() && self.stop.wait(self.delay) {
            return;
        }
        loop {
            let ready_for = match self.live(restarts) {
                End::Stopped => return,
                End::Gone { ready_for } => ready_for,
            };
            // On a device it takes a second until memory is back, which the next start need not wait for.
            let dir = self.dir.clone();
            thread::spawn(move || desk::notice_deaths(&dir));
            let Some(wait) = backoff.after(ready_for) else {
                self.set(Life::Failed, None, None, restarts);
                self.news("it never became ready and is not started again");
                return;
            };
            self.news(format!("started again in {} s", wait.as_secs_f64()));
            if self.stop.wait(wait) {
                return;
            }
            restarts += 1;
        }
    }

    /// One life: of a process of ours, or of something that serves there already.
    fn live(&self, restarts: u32) -> End {
        let fixed = (self.plan.port != 0).then(|| format!("{}:{}", self.plan.host, self.plan.port));
        if let Some(address) = fixed.as_deref().filter(|address| probe::is_listening(address)) {
            return self.watch_foreign(address, restarts);
        }
        let (process, reader) = match self.start() {
            Ok(started) => started,
            Err(error) => {
                self.set(Life::Restarting, None, None, restarts);
                self.news(format!("{} cannot be started: {error}", self.program.display()));
                return End::Gone { ready_for: None };
            }
        };
        let announced = Arc::new(Mutex::new(None));
        let reading = self.read_lines(reader, Arc::clone(&announced));
        let end = self.attend(process, fixed, &announced, restarts);
        // An engine may have started processes that are in no group of ours.
        match (house::end_marked(&self.id, Some(&self.plan.spec.name)), reading) {
            // It ends with the last writer, by hanging up.
            (Ok(_), Ok(reading)) => drop(reading.recv_timeout(LAST_LINES)),
            (Ok(_), Err(error)) => self.news(format!("its lines could not be read: {error}")),
            (Err(error), _) => self.news(format!("{error:#}")),
        }
        end
    }

    fn watch_foreign(&self, address: &str, restarts: u32) -> End {
        self.news(format!("something serves at {address} already: it is used, and not stopped"));
        if self.plan.pool.has_terms() {
            self.news("it is not ours: its pool keeps the limit and the share that it has");
        }
        let mut ready_since = None;
        while probe::is_listening(address) {
            if ready_since.is_none() && probe::is_well(address) {
                ready_since = Some(Instant::now());
                self.set(Life::Ready, Some(address.to_owned()), None, restarts);
                self.news(format!("ready at http://{address}"));
            }
            if self.stop.wait(WATCH_EVERY) {
                return End::Stopped;
            }
        }
        self.set(Life::Restarting, None, None, restarts);
        self.news(format!("nothing serves at {address} any more"));
        End::Gone { ready_for: ready_since.map(|since| since.elapsed()) }
    }

    fn start(&self) -> io::Result<(Process, PipeReader)> {
        let (reader, writer) = io::pipe()?;
        let mut command = Command::new(&self.program);
        command.args(&self.plan.args);
        command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
        // The router's key is the router's. An engine of ours that had one of its own would refuse the router.
        command.env_remove("KVCACHED_WEB_API_KEY");
        if self.plan.spec.engine == EngineKind::Kvserve {
            command.env_remove("VLLM_API_KEY");
        }
        command
            .env("KVCACHED_RUNTIME_DIR", self.dir.path())
            .env(MARK, &self.id)
            .env(INSTANCE_MARK, &self.plan.spec.name);
        command.env(IPC_NAME, self.plan.pool.name.as_str());
        command.env("PYTHONUNBUFFERED", "1");
        // vLLM and SGLang name their processes by a library that writes over the environment, and so over our mark.
        command.env("SPT_NOENV", "1");
        command.envs(self.plan.variables.iter().map(|(name, value)| (name, value)));
        command.process_group(0);
        tidekv_fork::end_with_parent(&mut command);
        Ok((Process::of(command.spawn()?)?, reader))
    }

    fn read_lines(&self, reader: PipeReader, announced: Arc<Mutex<Option<String>>>) -> io::Result<Receiver<()>> {
        let (tell, name) = (self.tell.clone(), self.plan.spec.name.clone());
        let mut log = LogFile::create(&self.log)?;
        let (reading, is_read) = mpsc::channel();
        thread::Builder::new().name(format!("log {name}")).spawn(move || {
            let _reading = reading;
            let mut is_full = false;
            each_line(reader, |line| {
                if let Some(address) = line.strip_prefix(LISTENING) {
                    *announced.lock().unwrap_or_else(PoisonError::into_inner) = Some(address.to_owned());
                }
                if let Err(error) = log.line(line)
                    && !std::mem::replace(&mut is_full, true)
                {
                    tracing::warn!("{name}: its log is not written any more: {error}");
                }
                // Whoever shows lines may be slow: the instance does not wait for it, and the log has all of them.
                let _ = tell.try_send(Told::Line { name: name.clone(), line: line.to_owned() });
            });
        })?;
        Ok(is_read)
    }

    /// Sees a process of ours from its start to its end.
    fn attend(&self, process: Process, fixed: Option<String>, announced: &Mutex<Option<String>>, restarts: u32) -> End {
        let pid = process.child.id();
        self.set(Life::Starting, None, Some(pid), restarts);
        self.news(format!("started (pid {pid})"));
        let deadline = Instant::now() + self.plan.startup_timeout;
        // Others have no word for it; and SGLang computes a token to answer, vLLM writes a line.
        let can_be_lost = matches!(self.plan.spec.engine, EngineKind::Kvserve | EngineKind::Command);
        let mut ready: Option<(Instant, String)> = None;
        let mut lost = 0;
        loop {
            let patience = match &ready {
                None => ASK_EVERY,
                Some(_) if can_be_lost => LOOK_EVERY,
                Some(_) => Duration::from_secs(3600),
            };
            match process.wait(&self.stop, patience) {
                Waited::Stop => {
                    self.news(format!("{} (pid {pid}) is being stopped", describe(&self.program)));
                    process.end(GRACE);
                    return End::Stopped;
                }
                Waited::Ended => break,
                Waited::Nothing if ready.is_some() && !can_be_lost => {}
                Waited::Nothing => {
                    if let Some((_, address)) = &ready {
                        let Health::Lost(reason) = probe::health(address, LOOK_PATIENCE) else {
                            lost = 0;
                            continue;
                        };
                        lost += 1;
                        if lost < LOST_LOOKS {
                            continue;
                        }
                        self.news(format!("pid {pid} can answer nothing any more: {reason}"));
                        break;
                    }
                    let said = announced.lock().unwrap_or_else(PoisonError::into_inner).clone();
                    let address = fixed.clone().or(said);
                    if let Some(address) = address.filter(|address| probe::is_well(address)) {
                        for trouble in desk::apply_terms(&self.dir, pid, &self.plan.pool) {
                            self.news(trouble);
                        }
                        self.news(format!("ready at http://{address} (pid {pid})"));
                        self.set(Life::Ready, Some(address.clone()), Some(pid), restarts);
                        ready = Some((Instant::now(), address));
                    } else if Instant::now() >= deadline {
                        self.news(format!("not well after {} s", self.plan.startup_timeout.as_secs_f64()));
                        break;
                    }
                }
            }
        }
        // First of all whoever waits for it should know.
        self.set(Life::Restarting, None, None, restarts);
        let how = process.end(Duration::ZERO);
        self.news(format!("pid {pid} {how}"));
        End::Gone { ready_for: ready.map(|(since, _)| since.elapsed()) }
    }

    fn set(&self, life: Life, address: Option<String>, pid: Option<u32>, restarts: u32) {
        self.model.set_instance(Instance { life, address, pid, restarts });
    }

    fn news(&self, text: impl Into<String>) {
        let (name, text) = (self.plan.spec.name.clone(), text.into());
        tracing::info!("{name}: {text}");
        // A supervisor that has ended shows nothing any more.
        let _ = self.tell.send(Told::News { name, text });
    }
}

fn describe(program: &Path) -> String {
    program.file_name().map_or_else(|| program.display().to_string(), |name| name.to_string_lossy().into_owned())
}

/// A process of ours, the leader of its group.
struct Process {
    child: Child,
    /// Readable when it has ended.
    handle: OwnedFd,
}

enum Waited {
    Stop,
    Ended,
    Nothing,
}

impl Process {
    fn of(mut child: Child) -> io::Result<Self> {
        match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(handle) => Ok(Self { child, handle }),
            Err(error) => {
                let _ = child.kill();
                child.wait()?;
                Err(error.into())
            }
        }
    }

    fn wait(&self, stop: &StopFlag, time: Duration) -> Waited {
        let fds = [PollFd::new(&stop.0, PollFlags::IN), PollFd::new(&self.handle, PollFlags::IN)];
        match wait_for(&fds, time).as_slice() {
            [true, ..] => Waited::Stop,
            [_, true] => Waited::Ended,
            _ => Waited::Nothing,
        }
    }

    /// Ends the whole group, kindly for as long as the grace, and says how the leader ended.
    fn end(mut self, grace: Duration) -> String {
        let group = Pid::from_child(&self.child);
        if !grace.is_zero() {
            // Gone already, which is what is wanted.
            let _ = kill_process_group(group, Signal::TERM);
            wait_for(&[PollFd::new(&self.handle, PollFlags::IN)], grace);
        }
        // Until its leader is waited for, nobody else can have the group's number.
        let _ = kill_process_group(group, Signal::KILL);
        self.child.wait().map_or_else(|error| format!("is lost: {error}"), how_it_ended)
    }
}

fn how_it_ended(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with exit code {code}"),
        (None, Some(signal)) => format!("was ended by signal {signal}"),
        (None, None) => "ended".to_owned(),
    }
}

/// Where `kvserve` is: beside this program, or on `PATH`.
pub(crate) fn find_kvserve() -> Option<PathBuf> {
    let beside = std::env::current_exe().ok().and_then(|own| Some(own.parent()?.join("kvserve")));
    let on_path: Vec<PathBuf> = std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
        .map(|folder| folder.join("kvserve"))
        .collect();
    beside.into_iter().chain(on_path).find(|file| file.is_file())
}
