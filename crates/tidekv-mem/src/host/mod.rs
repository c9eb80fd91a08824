//! Plain memory of the machine, given and taken page by page: a real back-end, not a mock.
//!
//! ```text
//!   address range   [ PROT_NONE | page 1 | PROT_NONE | page 3 | ... ]     one mmap, never moves
//!                                  |                    |
//!   memory file     [   hole    | bytes  |   hole    | bytes  | ... ]     one memfd, same offsets
//! ```
//!
//! Mapping a page commits its bytes in the memory file (`fallocate`, after a look at what the machine has left, so that
//! running out is an error and not the kernel's out-of-memory killer) and puts them behind the page's addresses
//! (`MAP_FIXED`). Unmapping makes the addresses inaccessible first and then punches the hole. Every mapping is
//! `MADV_DONTFORK`: a forked child keeps none of the memory alive.

mod budget;
mod bulk;
mod raw;
mod region;
pub mod system_memory;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::MemfdFlags;
use tidekv_core::geometry::Placement;
use tidekv_core::units::Bytes;

use crate::meter::{Call, CallMeter};
use crate::reservation::check_granular;
use crate::{Backend, Capabilities, MemError, MemoryInfo, RawPages, Region, RegionOptions};
use budget::HostBudget;
pub use bulk::BulkMemory;

/// Size of the processor's pages behind our pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugePages {
    /// The system's ordinary page.
    #[default]
    Off,
    /// Ask the kernel for transparent huge pages; it may or may not grant them (`shmem_enabled` must be `advise`).
    Transparent,
    /// 2 MiB pages of the `hugetlb` pool, which an administrator set aside (`vm.nr_hugepages`).
    Reserved,
}

/// Choices for host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostOptions {
    /// The most this back-end may hold; `None` for what the machine and its control group allow.
    pub budget: Option<Bytes>,
    /// Huge pages.
    pub huge_pages: HugePages,
    /// Commit memory when it is first touched instead of when it is mapped. Mapping becomes nearly free, but running
    /// out of memory then kills the process instead of being an error: for measuring, not for serving.
    pub lazy: bool,
}

/// See the [module](self).
#[derive(Debug)]
pub struct HostBackend {
    capabilities: Capabilities,
    shared: Arc<Shared>,
}

/// What the back-end and its regions have in common; regions may outlive the back-end.
#[derive(Debug)]
struct Shared {
    meter: CallMeter,
    budget: HostBudget,
    options: HostOptions,
}

impl HostBackend {
    /// Opens the machine's memory.
    ///
    /// # Errors
    /// [`MemError::Unsupported`] for reserved huge pages on a machine without any.
    pub fn open(options: HostOptions) -> Result<Self, MemError> {
        let system_page = Bytes(rustix::param::page_size() as u64);
        let huge = options.huge_pages == HugePages::Reserved;
        if huge && system_memory::reserved_huge_pages() == 0 {
            return Err(MemError::Unsupported { option: "reserved huge pages (vm.nr_hugepages is 0)" });
        }
        let capabilities = Capabilities {
            name: "host",
            device: "host memory".to_owned(),
            id: "host".to_owned(),
            driver: None,
            granularity: if huge { Bytes::mib(2) } else { system_page },
            host_accessible: true,
            needs_fence: false,
        };
        let shared = Shared { meter: CallMeter::default(), budget: HostBudget::new(options.budget), options };
        Ok(Self { capabilities, shared: Arc::new(shared) })
    }
}

impl Backend for HostBackend {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn memory(&self) -> Result<MemoryInfo, MemError> {
        self.shared.budget.memory()
    }

    fn held(&self) -> Bytes {
        Bytes(self.shared.budget.held.load(Ordering::Relaxed))
    }

    fn meter(&self) -> &CallMeter {
        &self.shared.meter
    }

    fn open_region(&self, placement: &Placement, options: RegionOptions) -> Result<Box<dyn Region>, MemError> {
        self.shared.meter.announce(Call::Reserve)?;
        Ok(Box::new(region::HostRegion::new(Arc::clone(&self.shared), placement, options)?))
    }

    fn raw_pages(&self, page_bytes: Bytes, pages: u32) -> Result<Box<dyn RawPages>, MemError> {
        check_granular(self, page_bytes)?;
        Ok(Box::new(raw::HostRaw::new(page_bytes, pages, self.shared.options)?))
    }
}

fn memfd_flags(options: HostOptions) -> MemfdFlags {
    match options.huge_pages {
        HugePages::Reserved => MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
        HugePages::Off | HugePages::Transparent => MemfdFlags::CLOEXEC,
    }
}
