//! Sending a schedule: one clock, a cap for each stream, one task for each request under way.
//!
//! ```text
//!   a thread writes bodies ahead ──> the calling thread: sleeps until the moment, hands over
//!                                         │ cap not reached              │ reached
//!                                         v                              v
//!                                    task: send, time every chunk     waits; its time counts on
//!                                         │ over                         ^
//!                                         └── record; next that waits ───┘
//! ```
//!
//! The calling thread does nothing but keep time, with the finest timer the kernel has; nothing spins, because a server on
//! the same machine needs the processor. What a request waits between being allowed to go and being sent is the client's own
//! fault, and is recorded.

mod exchange;
mod gate;

use std::io;
use std::num::NonZero;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use hyper::Method;
use hyper::body::Bytes;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval_at};

use super::cancel::Cancel;
use super::dialect::body;
use super::endpoint::{BaseUrl, Endpoint};
use super::http::Server;
use super::plan::{Planned, Schedule, Stream};
use super::record::Record;
use gate::{Gate, Job};

/// Bodies that are written before their time.
const BODIES_AHEAD: usize = 64;

/// From the call of `run` to the first request, so that the first is not late already.
const LEAD: Duration = Duration::from_millis(20);

/// Different prompts of a probe, asked over and over.
const PROBE_ITEMS: usize = 256;

/// Something that sends requests. Connections are kept from run to run.
#[derive(Debug)]
pub struct Client {
    runtime: Runtime,
    servers: Mutex<Vec<Server>>,
}

/// What a run is told besides its schedule.
#[derive(Clone, Debug)]
pub struct Control {
    /// Ends it early.
    pub cancel: Cancel,
    /// What it has done so far, for whoever looks on.
    pub counters: Arc<Counters>,
    /// A request that takes longer has failed.
    pub request_timeout: Duration,
    /// The moment that is 0 on the clock of the run; shortly after the call where it is `None`.
    pub start: Option<Instant>,
    /// Small requests beside the others.
    pub probe: Option<ProbePlan>,
}

impl Default for Control {
    fn default() -> Self {
        Self {
            cancel: Cancel::new(),
            counters: Arc::default(),
            request_timeout: Duration::from_secs(600),
            start: None,
            probe: None,
        }
    }
}

/// A stream of single small requests at equal gaps for as long as the others take: what a neighbour would feel.
#[derive(Clone, Debug)]
pub struct ProbePlan {
    /// Where they go; its data are asked one after the other.
    pub stream: Stream,
    /// How many a second.
    pub per_s: f64,
}

/// What a run has done so far.
#[derive(Debug, Default)]
pub struct Counters {
    /// Requests sent.
    pub sent: AtomicU64,
    /// Requests over, failed ones included.
    pub finished: AtomicU64,
    /// Requests that failed.
    pub failed: AtomicU64,
    /// Chunks received.
    pub chunks: AtomicU64,
}

/// What came of a schedule.
#[derive(Clone, Debug)]
pub struct Run {
    /// The moment that is 0 in all records.
    pub start: Instant,
    /// Requests that were sent, in the order of the schedule.
    pub records: Vec<Record>,
    /// The probe's.
    pub probe: Vec<Record>,
    /// Requests of the schedule that were not sent, because the run was cancelled.
    pub unsent: usize,
}

impl Run {
    /// Whether the run was cancelled before its end.
    pub fn is_partial(&self) -> bool {
        self.unsent > 0 || self.records.iter().any(Record::is_cancelled)
    }
}

/// Why a run cannot begin.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// No threads, or no event queue.
    #[error("the client cannot start")]
    Client {
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// Nobody there.
    #[error("cannot connect to {url}: {source}; is the server running there?")]
    Connect {
        /// The server.
        url: BaseUrl,
        /// What the system says.
        source: io::Error,
    },
}

/// Why a page cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PageError {
    /// Nobody there, or no answer that is one.
    #[error("{url} does not answer: {source}")]
    Unreachable {
        /// The page.
        url: String,
        /// What was seen.
        source: io::Error,
    },
    /// It took too long.
    #[error("{url} does not answer within {within:?}")]
    Late {
        /// The page.
        url: String,
        /// The bound.
        within: Duration,
    },
}

impl Client {
    /// A client with so many threads that read answers; the clock has one of its own.
    pub fn new(threads: NonZero<usize>) -> Result<Self, RunError> {
        let mut runtime = Builder::new_multi_thread();
        runtime.worker_threads(threads.get()).thread_name("kvbench-client").enable_all();
        let runtime = runtime.build().map_err(|source| RunError::Client { source })?;
        Ok(Self { runtime, servers: Mutex::default() })
    }

    /// As many threads as suit this machine: one, and on a large one a few.
    pub fn default_threads() -> NonZero<usize> {
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        NonZero::new((cores / 8).clamp(1, 8)).unwrap_or(NonZero::<usize>::MIN)
    }

    /// Opens connections beforehand, so that none is opened while times are taken.
    pub fn warm(&self, endpoint: &Endpoint, connections: usize) -> Result<(), RunError> {
        let server = self.server(&endpoint.base_url);
        let url = endpoint.base_url.clone();
        self.runtime.block_on(server.warm(connections)).map_err(|source| RunError::Connect { url, source })
    }

    /// Asks for a page: its status and its bytes.
    pub fn page(&self, endpoint: &Endpoint, path: &str, within: Duration) -> Result<(u16, Vec<u8>), PageError> {
        self.ask(Method::GET, endpoint, path, Bytes::new(), within)
    }

    /// Asks several servers for a page at the same moment. Answers are in the order of the servers.
    pub fn pages(
        &self,
        endpoints: &[Endpoint],
        path: &str,
        within: Duration,
    ) -> Vec<Result<(u16, Vec<u8>), PageError>> {
        let asked: Vec<_> = endpoints
            .iter()
            .map(|endpoint| {
                let (server, endpoint, path) = (self.server(&endpoint.base_url), endpoint.clone(), path.to_owned());
                self.runtime
                    .spawn(async move { ask(&server, Method::GET, &endpoint, &path, Bytes::new(), within).await })
            })
            .collect();
        let why = "asking for a page neither panics nor is given up";
        asked.into_iter().map(|task| self.runtime.block_on(task).expect(why)).collect()
    }

    /// Posts to a page: its status and its bytes.
    pub fn post(
        &self,
        endpoint: &Endpoint,
        path: &str,
        body: Vec<u8>,
        within: Duration,
    ) -> Result<(u16, Vec<u8>), PageError> {
        self.ask(Method::POST, endpoint, path, body.into(), within)
    }

    fn ask(
        &self,
        method: Method,
        endpoint: &Endpoint,
        path: &str,
        body: Bytes,
        within: Duration,
    ) -> Result<(u16, Vec<u8>), PageError> {
        let server = self.server(&endpoint.base_url);
        self.runtime.block_on(ask(&server, method, endpoint, path, body, within))
    }

    /// Closes the connections to a server that is gone, or is about to go.
    pub fn forget(&self, url: &BaseUrl) {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner).retain(|server| server.url() != url);
    }

    fn server(&self, url: &BaseUrl) -> Server {
        let mut servers = self.servers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(server) = servers.iter().find(|server| server.url() == url) {
            return server.clone();
        }
        servers.push(Server::new(url.clone()));
        servers[servers.len() - 1].clone()
    }

    /// Sends the schedule and waits for all answers. Blocks; the calling thread is the clock.
    pub fn run(&self, schedule: &Schedule, control: &Control) -> Run {
        let start = control.start.unwrap_or_else(|| Instant::now() + LEAD);
        let lane = |stream: &Stream| Lane {
            server: self.server(&stream.endpoint.base_url),
            gate: Gate::new(stream.max_concurrency),
            is_closed_loop: stream.is_closed_loop(),
            stream: stream.clone(),
        };
        let lanes = schedule.streams.iter().map(lane).collect();
        let shared = Arc::new(Shared { start, control: control.clone(), lanes });
        let prober = control.probe.as_ref().map(|probe| {
            let lanes = vec![lane(&probe.stream)];
            let shared = Arc::new(Shared { start, control: control.clone(), lanes });
            Prober::start(&self.runtime, shared, probe)
        });
        let (records, mut finished) = unbounded_channel();
        let handed_over = self.keep_time(schedule, &shared, &records);
        drop(records);
        let mut records = drain(&mut finished);
        // A cancelled run leaves requests behind in the gates.
        let unsent = schedule.requests.len() - handed_over + (handed_over - records.len());
        let mut places = vec![Vec::new(); schedule.streams.len()];
        for (place, request) in schedule.requests.iter().enumerate() {
            places[request.stream].push(place);
        }
        records.sort_by_key(|record| places[record.stream].get(record.index).copied());
        Run { start, records, probe: prober.map(Prober::finish).unwrap_or_default(), unsent }
    }

    /// Hands every request over at its time; says how many, which is all unless the run is cancelled.
    fn keep_time(&self, schedule: &Schedule, shared: &Arc<Shared>, records: &UnboundedSender<Record>) -> usize {
        let _finest = FinestTimer::take();
        let (ahead, bodies) = mpsc::sync_channel(BODIES_AHEAD);
        let streams = &schedule.streams;
        thread::scope(|scope| {
            scope.spawn(move || {
                for request in &schedule.requests {
                    // Whoever listened was cancelled.
                    if ahead.send(Job::new(request, body(&streams[request.stream], request))).is_err() {
                        return;
                    }
                }
            });
            let mut handed_over = 0;
            for job in &bodies {
                if !shared.control.cancel.wait_until(shared.start + Duration::from_nanos(job.intended_ns)) {
                    break;
                }
                handed_over += 1;
                if let Some(job) = shared.lanes[job.stream].gate.enter(job) {
                    self.runtime.spawn(attend(Arc::clone(shared), job, records.clone()));
                }
            }
            drop(bodies);
            handed_over
        })
    }
}

async fn ask(
    server: &Server,
    method: Method,
    endpoint: &Endpoint,
    path: &str,
    body: Bytes,
    within: Duration,
) -> Result<(u16, Vec<u8>), PageError> {
    let target = endpoint.base_url.target(path);
    let url = format!("http://{}{target}", endpoint.base_url.authority());
    match tokio::time::timeout(within, server.page(method, &target, &endpoint.headers, body)).await {
        Ok(Ok(page)) => Ok(page),
        Ok(Err(source)) => Err(PageError::Unreachable { url, source }),
        Err(_) => Err(PageError::Late { url, within }),
    }
}

fn drain(finished: &mut UnboundedReceiver<Record>) -> Vec<Record> {
    let mut records = Vec::new();
    while let Some(record) = finished.blocking_recv() {
        records.push(record);
    }
    records
}

/// What all tasks of a run have in common.
#[derive(Debug)]
struct Shared {
    start: Instant,
    control: Control,
    lanes: Vec<Lane>,
}

impl Shared {
    /// Now, on the clock of the run.
    fn now_ns(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// A stream under way.
#[derive(Debug)]
struct Lane {
    server: Server,
    gate: Gate,
    is_closed_loop: bool,
    stream: Stream,
}

/// One request, and then whichever has waited longest for its place.
async fn attend(shared: Arc<Shared>, mut job: Job, records: UnboundedSender<Record>) {
    loop {
        let lane = &shared.lanes[job.stream];
        let record = exchange::exchange(&shared, lane, job).await;
        let done_ns = record.done_ns;
        let counters = &shared.control.counters;
        counters.finished.fetch_add(1, Ordering::Relaxed);
        counters.failed.fetch_add(u64::from(record.failure.is_some()), Ordering::Relaxed);
        // The run waits for every record.
        let _ = records.send(record);
        match lane.gate.leave() {
            Some(next) if !shared.control.cancel.is_cancelled() => {
                job = next;
                job.released_ns = done_ns;
                if lane.is_closed_loop {
                    job.intended_ns = done_ns;
                }
            }
            _ => return,
        }
    }
}

/// The probe's task and what it brings.
#[derive(Debug)]
struct Prober {
    stop: Cancel,
    finished: UnboundedReceiver<Record>,
}

impl Prober {
    fn start(runtime: &Runtime, shared: Arc<Shared>, probe: &ProbePlan) -> Self {
        let (records, finished) = unbounded_channel();
        let stop = Cancel::new();
        let stopped = stop.clone();
        let stream = probe.stream.clone();
        let gap = Duration::from_secs_f64(1.0 / probe.per_s);
        runtime.spawn(async move {
            let mut under_way = JoinSet::new();
            // Not before the clock of the run begins: what is sent earlier would seem to be answered at once.
            let mut ticks = interval_at(shared.start.into(), gap);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
            let mut items = stream.data.draw(PROBE_ITEMS, 0).into_iter().cycle().enumerate();
            loop {
                tokio::select! {
                    _ = ticks.tick() => {}
                    () = stopped.cancelled() => break,
                    () = shared.control.cancel.cancelled() => break,
                }
                let Some((index, item)) = items.next() else { break };
                let max_tokens = item.output_tokens.unwrap_or(stream.sampling.max_tokens);
                let request = Planned { at_ns: shared.now_ns(), stream: 0, index, item, max_tokens };
                let job = Job::new(&request, body(&stream, &request));
                under_way.spawn(attend(Arc::clone(&shared), job, records.clone()));
            }
            while under_way.join_next().await.is_some() {}
        });
        Self { stop, finished }
    }

    fn finish(mut self) -> Vec<Record> {
        self.stop.cancel();
        drain(&mut self.finished)
    }
}

/// The finest timer for this thread, and what it had before when this is dropped.
pub(crate) struct FinestTimer {
    before: Option<NonZero<u64>>,
}

impl FinestTimer {
    pub(crate) fn take() -> Self {
        let before = rustix::thread::current_timer_slack().ok().and_then(NonZero::new);
        // Without it sleeps end up to 50 us late, which is no reason not to measure.
        let _ = rustix::thread::set_current_timer_slack(NonZero::new(1));
        Self { before }
    }
}

impl Drop for FinestTimer {
    fn drop(&mut self) {
        let _ = rustix::thread::set_current_timer_slack(self.before);
    }
}
