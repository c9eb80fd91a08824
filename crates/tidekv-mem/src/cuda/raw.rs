//! The bare driver calls of the CUDA back-end, in its order.

use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use tidekv_core::geometry::Placement;
use tidekv_core::units::Bytes;

use super::Shared;
use super::context::Entered;
use super::memory::Handle;
use crate::{MemError, RawPages};

#[derive(Debug)]
pub(super) struct CudaRaw {
    base: CUdeviceptr,
    page_bytes: Bytes,
    /// Per page: the handle (0 for none) and whether it is mapped.
    pages: Vec<(Handle, bool)>,
    /// The context stays current on the thread that made this, so that each call is one driver call and nothing else.
    entered: Entered,
    shared: Arc<Shared>,
}

impl CudaRaw {
    pub(super) fn new(shared: Arc<Shared>, page_bytes: Bytes, pages: u32) -> Result<Self, MemError> {
        let entered = shared.context.enter()?;
        let base = entered.reserve(Placement::uniform(page_bytes, pages)?.reservation_bytes(), shared.granularity)?;
        Ok(Self { base, page_bytes, pages: vec![(0, false); pages as usize], entered, shared })
    }

    fn at(&self, page: usize) -> CUdeviceptr {
        self.base + page as u64 * self.page_bytes.0
    }
}

impl RawPages for CudaRaw {
    fn create(&mut self, page: usize) -> Result<(), MemError> {
        self.pages[page].0 = self.entered.create(&self.shared.recipe, self.page_bytes)?;
        Ok(())
    }

    fn map(&mut self, page: usize) -> Result<(), MemError> {
        self.entered.map(self.at(page), self.page_bytes, self.pages[page].0)?;
        self.pages[page].1 = true;
        Ok(())
    }

    fn set_access(&mut self, page: usize) -> Result<(), MemError> {
        self.entered.set_access(&self.shared.recipe, self.at(page), self.page_bytes)
    }

    fn unmap(&mut self, page: usize) -> Result<(), MemError> {
        // SAFETY: no kernel ever learnt these addresses.
        unsafe { self.entered.unmap(self.at(page), self.page_bytes) }?;
        self.pages[page].1 = false;
        Ok(())
    }

    fn release(&mut self, page: usize) -> Result<(), MemError> {
        self.entered.release(self.pages[page].0)?;
        self.pages[page].0 = 0;
        Ok(())
    }
}

impl Drop for CudaRaw {
    fn drop(&mut self) {
        for page in 0..self.pages.len() {
            if self.pages[page].1 {
                let _ = self.unmap(page);
            }
            if self.pages[page].0 != 0 {
                let _ = self.release(page);
            }
        }
        let _ = self.entered.free_addresses(self.base, Bytes(self.page_bytes.0 * self.pages.len() as u64));
    }
}
