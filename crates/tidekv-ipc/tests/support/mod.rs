//! Real worker processes for tests: this test binary, started again in a role, spoken to through pipes.
//!
//! ```text
//!   test                            worker process
//!   Worker::start(dir, stage, rank) the test named `worker`; binds, says "ready", serves a `Recorder`
//!   hear()                     <--  say("...")          lines that begin with '@', amid what the test runner prints
//!   tell("...")                -->  listen()
//!   kill(), stop(), resume()        real signals
//! ```
//!
//! Nothing sleeps: every step waits for what the other side says, and a side that is silent for a minute fails the test.

#![allow(dead_code, reason = "every test binary uses its own part")]

pub(crate) mod fake;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use tidekv_core::units::{Bytes, GroupId, PageId};
use tidekv_ipc::broadcast::{Broadcaster, RankAnswer, Ranks, StrategyEntry};
use tidekv_ipc::message::{Balance, Deed, Heading, Order, Refusal, RefusalKind, Verdict};
use tidekv_ipc::server::{Handler, WorkerServer};
use tidekv_ipc::{LaneError, SocketDir};
use tidekv_shm::PoolName;

const ROLE: &str = "TIDEKV_IPC_TEST_ROLE";
const ROOT: &str = "TIDEKV_IPC_TEST_ROOT";
/// Longer than anything takes on the slowest machine; only a failure reaches it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Pages that make a [`Recorder`] do something particular.
pub(crate) mod page {
    /// Mapping it says "inside" and goes on when it is told to.
    pub(crate) const WAITS: u32 = 4_000_000;
    /// Mapping it is refused.
    pub(crate) const REFUSED: u32 = 4_000_001;
    /// From here on, the number of the page is not recorded.
    pub(crate) const FIRST: u32 = 4_000_000;
}

pub(crate) fn soon() -> Instant {
    Instant::now() + PATIENCE
}

pub(crate) fn pool() -> PoolName {
    PoolName::new("pool").expect("a name")
}

/// A pool's folder in a temporary one.
pub(crate) fn folder() -> (tempfile::TempDir, SocketDir) {
    let root = tempfile::tempdir().expect("a temporary folder");
    let dir = SocketDir::new(root.path(), &pool());
    (root, dir)
}

/// What this process was started as, if it was: the words of its role, and the pool's folder.
pub(crate) fn role() -> Option<(Vec<String>, SocketDir)> {
    let words = std::env::var(ROLE).ok()?.split(' ').map(str::to_owned).collect();
    Some((words, SocketDir::new(std::env::var_os(ROOT)?, &pool())))
}

/// What a process in the role `serve <stage> <rank>` does, until its input ends.
pub(crate) fn serve(dir: &SocketDir, words: &[String]) {
    let number = |at: usize| words[at].parse().expect("a number");
    let server = WorkerServer::bind(dir, number(1), number(2)).expect("a place");
    say(&format!("ready {}", server.instance()));
    server.serve(&mut Recorder::default()).expect("to be served");
}

/// Remembers what it was ordered.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    pages: BTreeSet<PageId>,
    orders: u64,
    ticks: u64,
}

impl Handler for Recorder {
    fn handle(&mut self, order: &Order) -> Verdict {
        self.orders += 1;
        match &order.deed {
            Deed::Map { pages, .. } if pages.contains(&PageId(page::REFUSED)) => return refusal(),
            Deed::Map { pages, .. } => {
                if pages.contains(&PageId(page::WAITS)) {
                    say("inside");
                    listen();
                }
                self.pages.extend(pages.iter().filter(|page| page.0 < page::FIRST));
            }
            Deed::Unmap { pages, .. } => self.pages.retain(|page| !pages.contains(page)),
            Deed::Held => return Verdict::Held(self.pages.iter().copied().collect()),
            Deed::Abort => say(&format!("aborted {} after {} ticks", order.epoch, self.ticks)),
            Deed::Hello { .. } | Deed::Ping => panic!("the server answers these"),
        }
        Verdict::Done
    }

    fn balance(&mut self, order: &Order) -> Balance {
        Balance { owed_pages: order.group.0, firm_pages: order.evictable_pages, grantable_pages: order.spare_pages }
    }

    fn scheduler_came(&mut self) {
        say("came");
    }

    fn scheduler_gone(&mut self) {
        self.pages.clear();
        say("gone");
    }

    fn tick(&mut self) {
        self.ticks += 1;
    }
}

fn refusal() -> Verdict {
    Verdict::Refused(Refusal {
        kind: RefusalKind::Exhausted,
        wanted: Bytes(2),
        grantable: Bytes(1),
        reason: "there is too little".to_owned(),
    })
}

pub(crate) fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "@{text}").and_then(|()| out.flush()).expect("the test listens");
}

/// The next line of the test; its end ends the process.
pub(crate) fn listen() -> String {
    let mut line = String::new();
    match std::io::stdin().lock().read_line(&mut line) {
        Ok(count) if count > 0 => line.trim().to_owned(),
        _ => panic!("the test is gone"),
    }
}

/// A process of ours.
pub(crate) struct Worker {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    pub(crate) instance: u64,
}

impl Worker {
    pub(crate) fn start(dir: &SocketDir, stage: u32, rank: u32) -> Self {
        let mut worker = Self::in_role(dir, &format!("serve {stage} {rank}"));
        let ready = worker.hear();
        worker.instance = ready.strip_prefix("ready ").and_then(|number| number.parse().ok()).expect("an instance");
        worker
    }

    /// This binary's test `worker`, with something else to do.
    pub(crate) fn in_role(dir: &SocketDir, role: &str) -> Self {
        Self::spawn(Self::command(dir, role))
    }

    pub(crate) fn command(dir: &SocketDir, role: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().expect("this binary"));
        let root = dir.path().parent().expect("it lies in a root");
        command.args(["--exact", "worker", "--nocapture", "--test-threads=1"]).env(ROLE, role).env(ROOT, root);
        command
    }

    pub(crate) fn spawn(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a process");
        let input = child.stdin.take().expect("piped");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, input, output, instance: 0 }
    }

    pub(crate) fn tell(&mut self, text: &str) {
        writeln!(self.input, "{text}").expect("the worker listens");
    }

    /// The next thing the process says.
    pub(crate) fn hear(&mut self) -> String {
        loop {
            if self.output.buffer().is_empty() {
                let mut fds = [PollFd::new(self.output.get_ref(), PollFlags::IN)];
                let timeout = Timespec::try_from(PATIENCE).expect("a minute");
                assert_eq!(poll(&mut fds, Some(&timeout)), Ok(1), "the process was silent for {PATIENCE:?}");
            }
            let mut line = String::new();
            let count = self.output.read_line(&mut line).expect("a pipe");
            assert!(count > 0, "the process ended without the expected word");
            if let Some((_, text)) = line.split_once('@') {
                return text.trim().to_owned();
            }
        }
    }

    pub(crate) fn expect(&mut self, text: &str) {
        assert_eq!(self.hear(), text);
    }

    /// When this returns the process stands still.
    pub(crate) fn stop(&self) {
        kill_process(self.pid(), Signal::STOP).expect("it is ours");
        let stat = format!("/proc/{}/stat", self.child.id());
        let deadline = soon();
        while !std::fs::read_to_string(&stat)
            .expect("it lives")
            .rsplit_once(')')
            .is_some_and(|(_, s)| s.starts_with(" T"))
        {
            assert!(Instant::now() < deadline, "it did not stop");
            std::thread::yield_now();
        }
    }

    pub(crate) fn resume(&self) {
        kill_process(self.pid(), Signal::CONT).expect("it is ours");
    }

    /// SIGKILL. When this returns the kernel has closed all its files.
    pub(crate) fn kill(&mut self) {
        self.kill_unseen();
        self.child.wait().expect("it is ours");
    }

    /// SIGKILL, without waiting for anything.
    pub(crate) fn kill_unseen(&mut self) {
        self.child.kill().expect("it is ours");
    }

    /// Waits for its end; says whether it was content.
    pub(crate) fn finish(&mut self) -> bool {
        self.child.wait().expect("it is ours").success()
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A scheduler and its workers.
pub(crate) struct Fleet {
    pub(crate) caster: Broadcaster,
    pub(crate) workers: Vec<Worker>,
    pub(crate) dir: SocketDir,
    pub(crate) root: tempfile::TempDir,
    epoch: u64,
}

impl Fleet {
    /// All workers started and connected.
    pub(crate) fn start(strategy: &StrategyEntry, ranks: u32) -> Self {
        let (root, dir) = folder();
        let workers: Vec<Worker> = (0..ranks).map(|rank| Worker::start(&dir, 0, rank)).collect();
        let caster = Broadcaster::new(dir.clone(), 0, ranks, strategy, None);
        let mut fleet = Self { caster, workers, dir, root, epoch: 0 };
        fleet.connect();
        fleet
    }

    /// Connects whoever is not, and sees that all greet as themselves.
    pub(crate) fn connect(&mut self) {
        let before: Vec<bool> = (0..self.caster.ranks()).map(|rank| self.caster.is_connected(rank)).collect();
        let found = self.caster.connect(soon());
        let expected: Vec<Result<u64, LaneError>> = self.workers.iter().map(|worker| Ok(worker.instance)).collect();
        assert_eq!(found, expected);
        for (worker, was_connected) in self.workers.iter_mut().zip(before) {
            if !was_connected {
                worker.expect("came");
            }
        }
    }

    pub(crate) fn send_until(&mut self, deed: &Deed, deadline: Instant) -> &[RankAnswer] {
        self.epoch += 1;
        let (epoch, settled) = (self.epoch, self.epoch - 1);
        let heading = Heading { epoch, settled, group: GroupId(7), spare_pages: 5, evictable_pages: 3 };
        self.caster.send(Ranks::All, heading, deed, deadline)
    }

    pub(crate) fn send(&mut self, deed: &Deed) -> &[RankAnswer] {
        self.send_until(deed, soon())
    }

    /// Sends what all must do.
    pub(crate) fn send_to_all(&mut self, deed: &Deed) {
        let ranks = self.caster.ranks() as usize;
        let answers = self.send(deed);
        assert_eq!(answers.len(), ranks);
        for answer in answers {
            assert!(is_done(answer), "{answer:?}");
        }
    }

    /// What each rank holds.
    pub(crate) fn held(&mut self) -> Vec<Vec<u32>> {
        let held = |answer: &RankAnswer| match &answer.outcome {
            Ok(answer) => match &answer.verdict {
                Verdict::Held(pages) => pages.iter().map(|page| page.0).collect(),
                other => panic!("{other:?}"),
            },
            Err(error) => panic!("rank {}: {error}", answer.rank),
        };
        self.send(&Deed::Held).iter().map(held).collect()
    }
}

/// Of an operation of group 0, whose predecessors may still be undone.
pub(crate) fn heading(epoch: u64) -> Heading {
    Heading { epoch, ..Heading::default() }
}

pub(crate) fn is_done(answer: &RankAnswer) -> bool {
    answer.outcome.as_ref().is_ok_and(|answer| answer.verdict == Verdict::Done)
}

pub(crate) fn map(pages: &[u32]) -> Deed {
    Deed::Map { pages: pages.iter().copied().map(PageId).collect(), ahead: false }
}

pub(crate) fn unmap(pages: &[u32]) -> Deed {
    Deed::Unmap { pages: pages.iter().copied().map(PageId).collect(), after: None }
}
