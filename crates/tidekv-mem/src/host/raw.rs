//! The bare system calls of the host back-end, in its order.

use std::os::fd::AsFd;

use tidekv_core::geometry::{Extent, Placement};
use tidekv_core::units::{Bytes, PageId};
use tidekv_fork::ClosedInChild;

use super::HostOptions;
use super::region::{AddressSpace, commit, memory_file, punch};
use crate::{MemError, RawPages, UnmappedReads};

#[derive(Debug)]
pub(super) struct HostRaw {
    space: AddressSpace,
    file: ClosedInChild,
    placement: Placement,
}

impl HostRaw {
    pub(super) fn new(page_bytes: Bytes, pages: u32, options: HostOptions) -> Result<Self, MemError> {
        let placement = Placement::uniform(page_bytes, pages)?;
        Ok(Self {
            space: AddressSpace::new(placement.reservation_bytes(), UnmappedReads::Fault)?,
            file: memory_file(options, placement.reservation_bytes())?,
            placement,
        })
    }

    fn extent(&self, page: usize) -> Extent {
        self.placement.extent(PageId(u32::try_from(page).unwrap_or(u32::MAX)), 0)
    }
}

impl RawPages for HostRaw {
    fn create(&mut self, page: usize) -> Result<(), MemError> {
        commit(self.file.as_fd(), self.extent(page))
    }

    fn map(&mut self, page: usize) -> Result<(), MemError> {
        // SAFETY: the extent lies in our own range, on page boundaries, and no pointer into it ever left this value.
        unsafe { self.space.attach(self.extent(page), self.file.as_fd()) }
    }

    fn set_access(&mut self, page: usize) -> Result<(), MemError> {
        // SAFETY: the extent lies in our own range.
        unsafe { self.space.keep_from_children(self.extent(page)) }
    }

    fn unmap(&mut self, page: usize) -> Result<(), MemError> {
        // SAFETY: as in `map`.
        unsafe { self.space.detach(self.extent(page)) }
    }

    fn release(&mut self, page: usize) -> Result<(), MemError> {
        punch(self.file.as_fd(), self.extent(page))
    }
}
