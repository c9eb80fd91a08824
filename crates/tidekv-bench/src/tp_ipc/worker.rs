//! The process of one rank: the pool's own worker, or one that only nods, and the echoes beside it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use anyhow::{Context, bail};
use clap::Args;
use serde::{Deserialize, Serialize};
use tidekv_core::units::GroupId;
use tidekv_ipc::message::{Balance, Order, Verdict};
use tidekv_ipc::server::{Handler, Stopper, WorkerServer};
use tidekv_ipc::{IpcError, SocketDir};
use tidekv_pool::{RankId, Worker, WorkerConfig, WorkerGroupConfig};
use tidekv_shm::{PoolName, RuntimeDir};

use super::echo;
use crate::ranks::cache::CacheSpec;
use crate::ranks::{answer, serve};
use crate::subprocess::orders;
use tidekv_cli::exit::Outcome;

/// Name of the scheduler's pool.
const POOL: &str = "bench";

/// The one group of layers.
pub(super) const GROUP: GroupId = GroupId(0);

/// Arguments of the hidden `kvbench tp-worker`: none. Everything comes as orders.
#[derive(Args, Clone, Copy, Debug)]
#[command(after_help = "Examples:\n  kvbench tp-ipc --tp-size 4    # starts its workers itself")]
pub struct TpWorkerArgs {}

/// The one order of a worker's input: what to be. After that the scheduler speaks to its server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Open {
    pub(super) rank: u32,
    pub(super) device: u32,
    /// `None`: answer without mapping anything.
    pub(super) cache: Option<CacheSpec>,
    /// Where the sockets are.
    pub(super) dir: PathBuf,
    pub(super) echo: echo::Sizes,
}

/// The one answer to it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Opened {}

/// Serves until its input closes.
pub fn run(_: &TpWorkerArgs) -> anyhow::Result<Outcome> {
    serve(work)
}

fn work() -> anyhow::Result<()> {
    let mut input = orders();
    let Some(open): Option<Open> = input.next() else { return Ok(()) };
    let mut rank = Rank::open(&open)?;
    echo::start(&open.dir, open.rank, open.echo).context("connecting the echoes")?;
    let stopper = rank.stopper();
    thread::scope(|scope| {
        let serving = thread::Builder::new().name("server".to_owned()).spawn_scoped(scope, || rank.run())?;
        answer(&Opened {})?;
        // Nothing more comes: this waits for the end of the input.
        let unasked = input.next();
        stopper.stop();
        serving.join().map_err(|_| anyhow::anyhow!("the server panicked"))??;
        if unasked.is_some() { bail!("a second order came") } else { Ok(()) }
    })
}

/// Where the workers of this benchmark listen.
pub(super) fn socket_dir(dir: &Path) -> anyhow::Result<SocketDir> {
    Ok(SocketDir::new(dir, &PoolName::new(POOL)?))
}

/// What answers the scheduler.
#[derive(Debug)]
enum Rank {
    /// The real thing: reserves in the ledger of its device (a private one of this run), maps, unmaps.
    Mapping(Worker),
    /// Says yes to everything and does nothing.
    Nodding(WorkerServer),
}

impl Rank {
    fn open(open: &Open) -> anyhow::Result<Self> {
        let Some(cache) = &open.cache else {
            let server = WorkerServer::bind(&socket_dir(&open.dir)?, 0, open.rank);
            return Ok(Self::Nodding(server.context("taking the rank's place")?));
        };
        let config = WorkerConfig {
            socket_root: Some(open.dir.clone()),
            runtime_dir: RuntimeDir::at(&open.dir),
            ..WorkerConfig::new(PoolName::new(POOL)?, RankId { stage: 0, rank: open.rank })
        };
        let mut worker = Worker::new(config).context("taking the rank's place")?;
        let reservation = Arc::new(cache.reserve(open.device).context("reserving the cache")?);
        worker.add_group(WorkerGroupConfig::new(GROUP, reservation)).context("entering the ledger")?;
        Ok(Self::Mapping(worker))
    }

    fn stopper(&self) -> Stopper {
        match self {
            Self::Mapping(worker) => worker.stopper(),
            Self::Nodding(server) => server.stopper(),
        }
    }

    fn run(&mut self) -> Result<(), IpcError> {
        match self {
            Self::Mapping(worker) => worker.run(),
            Self::Nodding(server) => server.serve(&mut Nodder),
        }
    }
}

#[derive(Debug)]
struct Nodder;

impl Handler for Nodder {
    fn handle(&mut self, _: &Order) -> Verdict {
        Verdict::Done
    }

    fn balance(&mut self, _: &Order) -> Balance {
        Balance::default()
    }

    fn scheduler_gone(&mut self) {}
}
