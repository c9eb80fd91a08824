//! Taking a place in a device's ledger, for a pool or for one worker of a fleet.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tidekv_core::units::Bytes;
use tidekv_mem::{Backend, MemoryInfo};
use tidekv_shm::{BudgetAuthor, BudgetRight, DeviceName, EntrySpec, Ledger, LedgerError, RuntimeDir, now_ms};

use crate::account::Account;
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
    /// What says so later; `None` for a ledger without a device.
    pub(crate) backend: Option<Arc<dyn Backend>>,
    /// What all entries may hold together, where somebody decides that.
    pub(crate) budget: Option<Bytes>,
    /// The part of the device that they may use where nobody does, if this pool was told one.
    pub(crate) utilization: Option<f64>,
    /// Whether a table keeps whoever registers within limit and ceiling, at once and to the page; a worker has none.
    pub(crate) has_table: bool,
}

impl Terms<'_> {
    pub(crate) fn register(self, spec: EntrySpec) -> Result<Account, LedgerError> {
        let ledger = Ledger::open(self.runtime_dir, &self.device)?;
        let deadline = Instant::now() + OPEN_PATIENCE;
        let name = spec.name.with_group(spec.group);
        let entry = ledger.register(deadline, spec)?;
        let asynchronous = self.backend.as_ref().is_some_and(|backend| backend.capabilities().needs_fence);
        let author = BudgetAuthor::here(BudgetRight::Pool, name.as_str());
        entry.update(deadline, |view, _| {
            let header = &mut view.header;
            header.total = self.memory.total;
            if let Some(utilization) = self.utilization {
                header.decide_utilization(utilization, author);
            }
            if let Some(budget) = self.budget {
                let was = header.explicit_budget.then_some(header.budget);
                if !header.decide_budget(Some(budget), author) {
                    tracing::warn!(asked = %budget, budget = %header.budget, "an operator set the budget of the device");
                } else if let Some(was) = was.filter(|&was| was != budget) {
                    tracing::warn!(%was, now = %budget, "another pool gave the device another budget");
                }
            }
            refresh_budget(view, self.memory, asynchronous, now_ms());
        })?;
        Ok(Account::new(entry, self.backend, self.has_table))
    }
}
