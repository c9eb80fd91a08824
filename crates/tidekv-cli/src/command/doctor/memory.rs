//! What a device has free and what others than pools use of it: one answer for doctor, kvtop and the router.

use std::path::Path;

use tidekv_core::units::Bytes;

use super::facts::{ControlGroup, HostMemory};

/// What is left of a device, and what no pool holds of the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceMemory {
    pub(crate) free: Bytes,
    pub(crate) others: Bytes,
}

impl DeviceMemory {
    /// Of the host, where pools hold `held`. The control group that this process is in bounds both, as it bounds pools.
    pub(super) fn of_host(memory: &HostMemory, group: Option<&ControlGroup>, held: Bytes) -> Self {
        let level = group.and_then(|group| group.memory);
        let total = level.map_or(memory.total, |level| memory.total.min(Bytes(level.limit)));
        let free = level.map_or(memory.available, |level| memory.available.min(Bytes(level.left()))).min(total);
        Self { free, others: total.saturating_sub(free).saturating_sub(held) }
    }

    /// The same, read now. None where the kernel does not say.
    pub(crate) fn read_host(held: Bytes) -> Option<Self> {
        let root = Path::new("/");
        let memory = HostMemory::read(root).ok()?;
        Some(Self::of_host(&memory, ControlGroup::read(root).ok().as_ref(), held))
    }
}

#[cfg(test)]
mod tests {
    use super::super::facts::Level;
    use super::*;

    #[test]
    fn free_others_and_pools_are_the_whole_of_what_the_group_allows() {
        let none = Bytes::ZERO;
        let available = Bytes::gib(40);
        let memory = HostMemory { total: Bytes::gib(64), available, commit_limit: none, huge: none, huge_free: none };
        let held = Bytes::gib(10);
        let machine = DeviceMemory::of_host(&memory, None, held);
        assert_eq!(machine, DeviceMemory { free: Bytes::gib(40), others: Bytes::gib(14) });
        let level = Level { limit: Bytes::gib(16).0, used: Bytes::gib(12).0 };
        let group = ControlGroup { memory: Some(level), ..ControlGroup::default() };
        let inside = DeviceMemory::of_host(&memory, Some(&group), held);
        assert_eq!(inside, DeviceMemory { free: Bytes::gib(4), others: Bytes::gib(2) });
    }
}
