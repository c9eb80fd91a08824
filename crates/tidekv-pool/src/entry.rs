//! Taking a place in a device's ledger, for a pool or for one worker of a fleet.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tidekv_core::units::Bytes;
use tidekv_mem::{Backend, MemoryInfo};
use tidekv_shm::{DeviceName, EntrySpec, Ledger, LedgerError, Reason, RuntimeDir, now_ms};

use crate::account::{Account, note_budget};
use crate::returning::refresh_budget;

/// How long opening waits for the ledger's lock.
const OPEN_PATIENCE: Duration = Duration::from_secs(2);

/// Whose ledger, and on which terms.
#[derive(Debug)]
pub(crate) struct Terms<'a> {
    pub(crate) runtime_dir: &'a RuntimeDir,
    pub(crate) device: DeviceName,
    /// The device's memory, now.
    pub(crate) memory: MemoryInfo,
    /// What says so later; `None` for a ledger without a device, whose budget is given.
    pub(crate) backend: Option<Arc<dyn Backend>>,
    /// What all entries may hold together, where somebody decides that.
    pub(crate) budget: Option<Bytes>,
    pub(crate) utilization: f64,
    /// Whether a table keeps whoever registers within limit and ceiling, at once and to the page; a worker has none.
    pub(crate) has_table: bool,
}

impl Terms<'_> {
    pub(crate) fn register(self, spec: EntrySpec) -> Result<Account, LedgerError> {
        let ledger = Ledger::open(self.runtime_dir, &self.device)?;
        let deadline = Instant::now() + OPEN_PATIENCE;
        let entry = ledger.register(deadline, spec)?;
        let asynchronous = self.backend.as_ref().is_some_and(|backend| backend.capabilities().needs_fence);
        entry.update(deadline, |view, me| match self.budget {
            Some(budget) => {
                let header = &mut view.header;
                let news = header.budget != budget;
                if header.explicit_budget && header.budget != budget {
                    tracing::warn!(was = %header.budget, now = %budget, "another pool gave the device another budget");
                }
                (header.budget, header.explicit_budget, header.total) = (budget, true, self.memory.total);
                refresh_budget(view, self.memory, self.utilization, asynchronous, now_ms());
                if news {
                    note_budget(view, me, Reason::Given);
                }
            }
            None => {
                if refresh_budget(view, self.memory, self.utilization, asynchronous, now_ms()) {
                    note_budget(view, me, Reason::OtherUsers);
                }
            }
        })?;
        Ok(Account::new(entry, self.backend, self.utilization, self.has_table))
    }
}
