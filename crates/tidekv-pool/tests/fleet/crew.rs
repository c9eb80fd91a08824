//! Real workers for tests: this test binary, started again as one rank, spoken to through pipes and signals.
//!
//! ```text
//!   Crew::new(stages)        a folder: sockets, ledgers dev-<stage>-<rank>, segments
//!   crew.start(rank)   -->   the test named `process`, with its role in the environment
//!   crew.kill, stop, go on   real signals
//!   crew.at_rest(..)         every live rank has the pages that the pool has, and every ledger says so to the byte
//! ```

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use tempfile::TempDir;
use tidekv_core::geometry::{Capacity, ChunkChoice, Geometry, GeometryConfig, KvShape, Layout};
use tidekv_core::units::{Bytes, GroupId, PageId};
use tidekv_mem::fake::FakeBackend;
use tidekv_mem::{Backend, RegionOptions, Reservation};
use tidekv_pool::fleet::RankState;
use tidekv_pool::{
    Fleet, FleetConfig, KvPool, PoolConfig, RankId, ReservePolicy, Scope, Worker, WorkerConfig, WorkerGroupConfig,
};
use tidekv_shm::{DeviceName, Ledger, LedgerEntry, PoolName, RuntimeDir};

/// A page: 2 layers x K and V x 16 KiB.
pub(crate) const PAGE: Bytes = Bytes::kib(64);
/// Blocks of such a page.
pub(crate) const BLOCKS: u32 = 8;
/// Pages of a pool.
pub(crate) const PAGES: u32 = 64;
/// Longer than anything takes on the slowest machine; only a failure reaches it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
pub(crate) const POOL: &str = "kvcached_crew";
pub(crate) const G0: GroupId = GroupId(0);

const ROLE: &str = "TIDEKV_FLEET_TEST_ROLE";
const DIR: &str = "TIDEKV_FLEET_TEST_DIR";

pub(crate) fn pages(count: u32) -> Bytes {
    Bytes(PAGE.0 * u64::from(count))
}

pub(crate) fn geometry() -> GeometryConfig {
    GeometryConfig {
        shape: KvShape::heads(2, 1, 64, 2, 16),
        layout: Layout::Slab,
        granularity: Bytes::kib(4),
        chunk: ChunkChoice::Bytes(Bytes::kib(16)),
        capacity: Capacity::Pages(PAGES),
    }
}

/// What this process is, if it is not the test itself.
pub(crate) fn role() -> Option<(Vec<String>, RuntimeDir)> {
    let role = std::env::var(ROLE).ok()?;
    Some((role.split(' ').map(str::to_owned).collect(), RuntimeDir::at(std::env::var_os(DIR)?)))
}

pub(crate) fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "@{text}").and_then(|()| out.flush()).expect("the test listens");
}

/// The next line of the test; its end ends the process.
pub(crate) fn listen() {
    let count = std::io::stdin().lock().read_line(&mut String::new()).expect("a pipe");
    assert!(count > 0, "the test is gone");
}

pub(crate) fn device_of(at: RankId) -> DeviceName {
    DeviceName::new(&format!("dev-{}-{}", at.stage, at.rank)).expect("a name")
}

fn pool_name() -> PoolName {
    PoolName::new(POOL).expect("a name")
}

/// One rank, until it is killed: `worker <stage> <rank> <budget in pages> <groups>`.
pub(crate) fn be_worker(arguments: &[String], dir: &RuntimeDir) {
    let number = |at: usize| arguments[at].parse::<u32>().expect("a number");
    let at = RankId { stage: number(0), rank: number(1) };
    let mut config = WorkerConfig::new(pool_name(), at);
    config.socket_root = Some(dir.path().to_owned());
    config.runtime_dir = dir.clone();
    let mut worker = Worker::new(config).expect("the place is free");
    let geometry = Geometry::new(&geometry()).expect("a geometry");
    for group in 0..number(3) {
        let backend: Arc<dyn Backend> = Arc::new(FakeBackend::default());
        let reservation =
            Reservation::new(backend, *geometry.placement(), RegionOptions::default()).expect("addresses");
        let mut group = WorkerGroupConfig::new(GroupId(group), Arc::new(reservation));
        group.device = Some(device_of(at));
        group.budget = Some(pages(number(2)));
        worker.add_group(group).expect("a place in the ledger");
    }
    say("ready");
    worker.run().expect("served until killed");
}

/// A process of the test.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Process {
    pub(crate) fn start(dir: &Path, role: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this binary"));
        command.args(["--exact", "process", "--nocapture", "--test-threads=1"]).env(ROLE, role).env(DIR, dir);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a process");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let mut process = Self { input: child.stdin.take().expect("piped"), child, output };
        process.expect("ready");
        process
    }

    pub(crate) fn tell(&mut self, word: &str) {
        writeln!(self.input, "{word}").expect("it listens");
    }

    pub(crate) fn expect(&mut self, word: &str) {
        loop {
            let mut line = String::new();
            let count = self.output.read_line(&mut line).expect("a pipe");
            assert!(count > 0, "the process ended without a word");
            if let Some((_, text)) = line.split_once('@') {
                assert_eq!(text.trim(), word);
                return;
            }
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it is ours");
    }

    /// SIGKILL. When this returns the kernel has closed all its files.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("it is ours");
        self.child.wait().expect("it is ours");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Workers of all ranks, and their folder.
#[derive(Debug)]
pub(crate) struct Crew {
    workers: Vec<(RankId, Option<Process>)>,
    pub(crate) budget_pages: Vec<u32>,
    groups: u32,
    stages: Vec<u32>,
    pub(crate) dir: TempDir,
}

impl Crew {
    /// All ranks, each on a device of its own with room for the whole pool.
    pub(crate) fn new(stages: &[u32]) -> Self {
        let ranks: u32 = stages.iter().sum();
        Self::with(stages, &vec![PAGES; ranks as usize], 1)
    }

    pub(crate) fn with(stages: &[u32], budget_pages: &[u32], groups: u32) -> Self {
        let dir = tempfile::Builder::new().prefix("kvtp").tempdir_in("/dev/shm").expect("a folder");
        let ranks = (0..).zip(stages).flat_map(|(stage, &count)| (0..count).map(move |rank| RankId { stage, rank }));
        let workers = ranks.map(|at| (at, None)).collect();
        let mut crew = Self { workers, budget_pages: budget_pages.to_vec(), groups, stages: stages.to_vec(), dir };
        (0..crew.workers.len()).for_each(|worker| crew.start(worker));
        crew
    }

    pub(crate) fn runtime_dir(&self) -> RuntimeDir {
        RuntimeDir::at(self.dir.path())
    }

    pub(crate) fn start(&mut self, worker: usize) {
        let (at, process) = &mut self.workers[worker];
        let role = format!("worker {} {} {} {}", at.stage, at.rank, self.budget_pages[worker], self.groups);
        *process = Some(Process::start(self.dir.path(), &role));
    }

    pub(crate) fn process(&self, worker: usize) -> &Process {
        self.workers[worker].1.as_ref().expect("it runs")
    }

    pub(crate) fn kill(&mut self, worker: usize) {
        self.workers[worker].1.take().expect("it runs").kill();
    }

    /// SIGSTOP. When this returns no thread of it runs any more.
    pub(crate) fn stop(&self, worker: usize) {
        let process = self.process(worker);
        process.signal(Signal::STOP);
        let stopped = waitpid(Some(Pid::from_child(&process.child)), WaitOptions::UNTRACED).expect("it is ours");
        assert!(stopped.is_some_and(|(_, status)| status.stopped()));
    }

    pub(crate) fn go_on(&self, worker: usize) {
        self.process(worker).signal(Signal::CONT);
    }

    pub(crate) fn fleet_config(&self, strategy: &str) -> FleetConfig {
        FleetConfig {
            strategy: strategy.to_owned(),
            socket_root: Some(self.dir.path().to_owned()),
            timeout: Some(PATIENCE),
            ..FleetConfig::new(pool_name(), self.stages.clone())
        }
    }

    pub(crate) fn fleet(&self, strategy: &str) -> Fleet {
        Fleet::connect(self.fleet_config(strategy)).expect("everybody is there")
    }

    pub(crate) fn pool_config(&self, fleet: &Fleet, group: GroupId, scope: Scope) -> PoolConfig {
        PoolConfig {
            runtime_dir: self.runtime_dir(),
            reserve: ReservePolicy::Fixed { min: 0, max: PAGES },
            ..PoolConfig::on_fleet(pool_name(), fleet.group(group, scope), geometry())
        }
    }

    /// A pool without a reserve over all ranks: nothing is mapped but what the test asks for.
    pub(crate) fn pool(&self, fleet: &Fleet) -> KvPool {
        KvPool::open(self.pool_config(fleet, G0, Scope::AllStages)).expect("a pool")
    }

    pub(crate) fn ledger(&self, worker: usize) -> Ledger {
        let device = device_of(self.workers[worker].0);
        Ledger::open(&self.runtime_dir(), &device).expect("a ledger")
    }

    /// The worker's own entry.
    pub(crate) fn entry(&self, worker: usize, group: GroupId) -> Option<LedgerEntry> {
        let at = self.workers[worker].0;
        let name = match at.stage {
            0 => format!("{POOL}-w{}", at.rank),
            stage => format!("{POOL}-pp{stage}-w{}", at.rank),
        };
        self.ledger(worker).read().expect("a ledger").by_name(&name, group).cloned()
    }

    pub(crate) fn reserved(&self, worker: usize) -> Bytes {
        self.entry(worker, G0).map_or(Bytes::ZERO, |entry| entry.reserved)
    }

    /// Waits until everybody is a member again, nothing is quarantined, every rank has exactly the pool's pages, and all
    /// ledgers say so to the byte.
    pub(crate) fn at_rest(&self, fleet: &Fleet, pool: &KvPool) {
        until("all ranks hold what the pool holds", || self.is_at_rest(fleet, pool));
    }

    fn is_at_rest(&self, fleet: &Fleet, pool: &KvPool) -> Result<(), String> {
        let check = |what: &str, is: bool| if is { Ok(()) } else { Err(what.to_owned()) };
        let status = fleet.status();
        check(&format!("{status:?}"), status.iter().all(|rank| rank.state == RankState::Member))?;
        let snapshot = pool.snapshot();
        check(&format!("{snapshot:#?}"), fleet.quarantined(G0) == 0 && snapshot.refused_pages == 0)?;
        check(&format!("{snapshot:#?}"), snapshot.ledger_bytes == snapshot.mapped_bytes)?;
        let held = fleet.held(G0).map_err(|error| error.to_string())?;
        let first = held.first().and_then(|rank| rank.pages.clone().ok()).ok_or("no answer")?;
        check(
            &format!("{held:?}"),
            held.len() == self.workers.len() && held.iter().all(|rank| rank.pages.as_ref() == Ok(&first)),
        )?;
        let bytes = Bytes(PAGE.0 * first.len() as u64);
        check(&format!("pool {} ranks {bytes}", snapshot.mapped_bytes), bytes == snapshot.mapped_bytes)?;
        for worker in 0..self.workers.len() {
            let reserved = self.reserved(worker);
            check(&format!("worker {worker}: {reserved} reserved, {bytes} held"), reserved == bytes)?;
        }
        Ok(())
    }

    /// What a rank says that it has.
    pub(crate) fn held_by(&self, fleet: &Fleet, group: GroupId, worker: usize) -> Option<Vec<PageId>> {
        let at = self.workers[worker].0;
        let held = fleet.held(group).expect("an open group");
        held.into_iter().find(|rank| rank.at == at).and_then(|rank| rank.pages.ok())
    }
}

/// Waits until `done`, looking again and again: what other processes do and think announces itself nowhere.
pub(crate) fn until(what: &str, mut done: impl FnMut() -> Result<(), String>) {
    let deadline = Instant::now() + PATIENCE;
    while let Err(last) = done() {
        assert!(Instant::now() < deadline, "waited {PATIENCE:?} for: {what}; last seen: {last}");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

/// The same for a plain condition.
pub(crate) fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    until(what, || if done() { Ok(()) } else { Err("not yet".to_owned()) });
}
