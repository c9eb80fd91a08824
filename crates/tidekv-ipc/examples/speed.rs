//! Question: what does a strategy cost beside the bare echo that it is built on?
//!
//! ```text
//!   cargo run --release -p tidekv-ipc --example speed -- [RANKS] [ROUNDS]
//!
//!   strategy   floor, measured in turn with it, same number of processes
//!   seq        write and read 64 bytes through a socket pair, one process after another
//!   thread     the same from one thread for each process
//!   async      write to all, then read from all
//!   ring       store a word and wake it, then wait for the answering word, in shared memory
//! ```
//!
//! Blocks of floor and strategy alternate, each with processes of its own, so that both meet the same machine. New processes
//! because one set of them can answer more than twice as fast as the next, and stays so for its life. Medians of all rounds
//! are compared.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use tidekv_core::units::PageId;
use tidekv_ipc::SocketDir;
use tidekv_ipc::broadcast::{Broadcaster, Ranks, STRATEGIES, StrategyEntry};
use tidekv_ipc::message::{Balance, Deed, Heading, Order, Verdict};
use tidekv_ipc::server::{Handler, WorkerServer};
use tidekv_shm::PoolName;
use tidekv_shm::ring::FutexWords;

const MESSAGE: usize = 64;
const BLOCKS: u32 = 20;
const PATIENCE: Duration = Duration::from_secs(60);

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.first().map(String::as_str) {
        Some("serve") => serve(&words[1], &words[2]),
        Some("echo") => echo(),
        Some("futex") => futex(&words[1], &words[2]),
        _ => measure(&words),
    }
}

fn measure(words: &[String]) {
    let number = |at: usize, default: u32| words.get(at).map_or(default, |word| word.parse().expect("a number"));
    let (ranks, rounds) = (number(0, 4), number(1, 20_000));
    let mut out = std::io::stdout().lock();
    let title = format!("{ranks} processes, {rounds} rounds each, medians in us");
    writeln!(out, "{title}\n{:<10} {:>9} {:>9} {:>7}   floor", "strategy", "strategy", "floor", "ratio")
        .expect("stdout");
    for entry in STRATEGIES {
        let (mut floors, mut casts, mut name) = (Vec::new(), Vec::new(), "");
        for _ in 0..BLOCKS {
            let mut floor = Floor::of(entry.name, ranks);
            name = floor.name();
            sample(&mut floors, rounds / BLOCKS, || floor.round());
            drop(floor);
            let mut fleet = Fleet::start(entry, ranks);
            sample(&mut casts, rounds / BLOCKS, || fleet.round());
        }
        let (floor_us, us) = (median(&mut floors), median(&mut casts));
        let ratio = us / floor_us;
        writeln!(out, "{:<10} {us:>9.1} {floor_us:>9.1} {ratio:>7.2}   {name}", entry.name).expect("stdout");
    }
}

fn sample(samples: &mut Vec<Duration>, rounds: u32, mut round: impl FnMut()) {
    (0..rounds / 10).for_each(|_| round());
    for _ in 0..rounds {
        let started = Instant::now();
        round();
        samples.push(started.elapsed());
    }
}

fn median(samples: &mut [Duration]) -> f64 {
    samples.sort();
    samples[samples.len() / 2].as_secs_f64() * 1e6
}

/// This program again, in another role.
fn start(words: &[&str], input: Stdio) -> Child {
    let program = std::env::current_exe().expect("this program");
    Command::new(program).args(words).stdin(input).spawn().expect("a process")
}

// ---- the strategies ----------------------------------------------------------------------------------------------

struct Fleet {
    caster: Broadcaster,
    epoch: u64,
    deeds: [Deed; 2],
    children: Vec<Child>,
    _root: tempfile::TempDir,
}

impl Fleet {
    fn start(entry: &StrategyEntry, ranks: u32) -> Self {
        let root = tempfile::tempdir().expect("a folder");
        let path = root.path().to_str().expect("text");
        let children = (0..ranks).map(|rank| start(&["serve", path, &rank.to_string()], Stdio::null())).collect();
        let mut caster = Broadcaster::new(dir(path), 0, ranks, entry, None);
        let deadline = Instant::now() + PATIENCE;
        while caster.connect(deadline).iter().any(Result::is_err) {
            assert!(Instant::now() < deadline, "the workers did not start");
            std::thread::sleep(Duration::from_millis(10));
        }
        let pages = vec![PageId(50)];
        let deeds = [Deed::Map { pages: pages.clone(), ahead: false }, Deed::Unmap { pages, after: None }];
        Self { caster, epoch: 0, deeds, children, _root: root }
    }

    fn round(&mut self) {
        self.epoch += 1;
        let deed = &self.deeds[usize::from(self.epoch.is_multiple_of(2))];
        let deadline = Instant::now() + PATIENCE;
        let heading = Heading { epoch: self.epoch, settled: self.epoch - 1, ..Heading::default() };
        let answers = self.caster.send(Ranks::All, heading, deed, deadline);
        assert!(answers.iter().all(|answer| answer.outcome.is_ok()), "{answers:?}");
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.children.iter_mut().for_each(end);
    }
}

fn end(child: &mut Child) {
    // It may have ended by itself.
    let _ = child.kill();
    let _ = child.wait();
}

fn dir(root: &str) -> SocketDir {
    SocketDir::new(root, &PoolName::new("speed").expect("a name"))
}

fn serve(root: &str, rank: &str) {
    struct Nothing;
    impl Handler for Nothing {
        fn handle(&mut self, _: &Order) -> Verdict {
            Verdict::Done
        }
        fn balance(&mut self, _: &Order) -> Balance {
            Balance::default()
        }
        fn scheduler_gone(&mut self) {}
    }
    let server = WorkerServer::bind(&dir(root), 0, rank.parse().expect("a number")).expect("a place");
    server.serve(&mut Nothing).expect("to serve");
}

// ---- the floors --------------------------------------------------------------------------------------------------

enum Floor {
    OneByOne(Echoes),
    Threads(Threads),
    Pipelined(Echoes),
    Futex(Words),
}

impl Floor {
    fn of(strategy: &str, ranks: u32) -> Self {
        match strategy {
            "seq" => Self::OneByOne(Echoes::start(ranks)),
            "thread" => Self::Threads(Threads::start(Echoes::start(ranks))),
            "ring" => Self::Futex(Words::start(ranks)),
            _ => Self::Pipelined(Echoes::start(ranks)),
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::OneByOne(_) => "socket pairs, one after another",
            Self::Threads(_) => "socket pairs, a thread each",
            Self::Pipelined(_) => "socket pairs, all written, then all read",
            Self::Futex(_) => "futex words",
        }
    }

    fn round(&mut self) {
        match self {
            Self::OneByOne(echoes) => echoes.streams.iter_mut().for_each(exchange),
            Self::Threads(threads) => threads.round(),
            Self::Pipelined(echoes) => {
                let mut message = [1; MESSAGE];
                echoes.streams.iter_mut().for_each(|stream| stream.write_all(&message).expect("an echo"));
                echoes.streams.iter_mut().for_each(|stream| stream.read_exact(&mut message).expect("an echo"));
            }
            Self::Futex(words) => words.round(),
        }
    }
}

fn exchange(stream: &mut UnixStream) {
    let mut message = [1; MESSAGE];
    stream.write_all(&message).expect("an echo");
    stream.read_exact(&mut message).expect("an echo");
}

/// Processes that send back what they are sent.
struct Echoes {
    streams: Vec<UnixStream>,
    children: Vec<Child>,
}

impl Echoes {
    fn start(ranks: u32) -> Self {
        let pair = |_| {
            let (ours, theirs) = UnixStream::pair().expect("a pair");
            (ours, start(&["echo"], Stdio::from(OwnedFd::from(theirs))))
        };
        let (streams, children) = (0..ranks).map(pair).unzip();
        Self { streams, children }
    }
}

impl Drop for Echoes {
    fn drop(&mut self) {
        self.children.iter_mut().for_each(end);
    }
}

fn echo() {
    let mut message = [0; MESSAGE];
    let socket = rustix::stdio::stdin();
    while let Ok(count @ 1..) = rustix::io::read(socket, &mut message) {
        rustix::io::write(socket, &message[..count]).expect("the other side");
    }
}

/// One thread for each socket, woken for each round.
struct Threads {
    shared: Arc<Shared>,
    threads: Vec<Thread>,
    /// Their processes; when these end, so do the threads.
    _echoes: Echoes,
}

struct Shared {
    round: AtomicU32,
    busy: AtomicUsize,
    caller: Thread,
}

impl Threads {
    fn start(mut echoes: Echoes) -> Self {
        let shared =
            Arc::new(Shared { round: AtomicU32::new(0), busy: AtomicUsize::new(0), caller: std::thread::current() });
        let work = |mut stream: UnixStream| {
            let shared = Arc::clone(&shared);
            let mut seen = 0;
            let thread = std::thread::spawn(move || {
                loop {
                    while shared.round.load(Ordering::Acquire) == seen {
                        std::thread::park();
                    }
                    seen += 1;
                    if stream.write_all(&[1; MESSAGE]).and_then(|()| stream.read_exact(&mut [0; MESSAGE])).is_err() {
                        return;
                    }
                    if shared.busy.fetch_sub(1, Ordering::AcqRel) == 1 {
                        shared.caller.unpark();
                    }
                }
            });
            thread.thread().clone()
        };
        let threads = echoes.streams.drain(..).map(work).collect();
        Self { shared, threads, _echoes: echoes }
    }

    fn round(&self) {
        self.shared.busy.store(self.threads.len(), Ordering::Release);
        self.shared.round.fetch_add(1, Ordering::AcqRel);
        self.threads.iter().for_each(Thread::unpark);
        while self.shared.busy.load(Ordering::Acquire) > 0 {
            std::thread::park();
        }
    }
}

/// Processes that answer a word with a word. Word 2r goes to rank r, word 2r + 1 comes back.
struct Words {
    words: FutexWords,
    round: u32,
    children: Vec<Child>,
    _file: OwnedFd,
}

impl Words {
    fn start(ranks: u32) -> Self {
        let (words, file) = FutexWords::create().expect("memory");
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        let children: Vec<Child> =
            (0..ranks).map(|rank| start(&["futex", &path, &rank.to_string()], Stdio::null())).collect();
        Self { words, round: 0, children, _file: file }
    }

    fn round(&mut self) {
        self.round += 1;
        for rank in 0..self.children.len() {
            self.words.store_and_wake(2 * rank, self.round).expect("a word");
        }
        for rank in 0..self.children.len() {
            wait_for(&self.words, 2 * rank + 1, self.round);
        }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        self.children.iter_mut().for_each(end);
    }
}

fn wait_for(words: &FutexWords, at: usize, value: u32) {
    loop {
        let seen = words.load(at).expect("a word");
        if seen == value {
            return;
        }
        words.wait(at, seen, PATIENCE).expect("a word");
    }
}

fn futex(path: &str, rank: &str) {
    let file = std::fs::File::options().read(true).write(true).open(path).expect("the words");
    let words = FutexWords::attach(&file.into()).expect("the words");
    let rank: usize = rank.parse().expect("a number");
    for round in 1.. {
        wait_for(&words, 2 * rank, round);
        words.store_and_wake(2 * rank + 1, round).expect("a word");
    }
}
