//! Everything a fleet is told when it is connected.

use std::path::PathBuf;
use std::time::Duration;

use tidekv_ipc::{SocketDir, ipc_timeout_from_env};
use tidekv_shm::PoolName;

/// How long a lost rank may take to come back, unless told otherwise.
const REJOIN_PATIENCE: Duration = Duration::from_secs(60);
/// How long connecting waits for workers that have not started, unless told otherwise.
const START_PATIENCE: Duration = Duration::from_secs(60);

/// How to connect a fleet.
#[derive(Clone, Debug)]
pub struct FleetConfig {
    /// The name by which workers know their scheduler's pool.
    pub pool: PoolName,
    /// Tensor-parallel ranks of each pipeline stage.
    pub stages: Vec<u32>,
    /// How orders are sent: a name of `tidekv_ipc::broadcast::STRATEGIES`.
    pub strategy: String,
    /// How long an operation waits for every rank; `None` for as long as it takes.
    pub timeout: Option<Duration>,
    /// Root of the sockets' folder; `None` for `KVCACHED_RUNTIME_DIR`, else `/tmp`.
    pub socket_root: Option<PathBuf>,
    /// How long connecting waits for workers that have not started.
    pub start_patience: Duration,
    /// How long a rank may be lost or silent before it is excluded.
    pub rejoin_patience: Duration,
}

impl FleetConfig {
    /// The defaults: strategy `ring`, timeout from `KVCACHED_IPC_TIMEOUT`, a minute of patience.
    pub fn new(pool: PoolName, stages: Vec<u32>) -> Self {
        Self {
            pool,
            stages,
            strategy: "ring".to_owned(),
            timeout: ipc_timeout_from_env(),
            socket_root: None,
            start_patience: START_PATIENCE,
            rejoin_patience: REJOIN_PATIENCE,
        }
    }

    pub(super) fn socket_dir(&self) -> SocketDir {
        match &self.socket_root {
            Some(root) => SocketDir::new(root, &self.pool),
            None => SocketDir::from_env(&self.pool),
        }
    }
}
