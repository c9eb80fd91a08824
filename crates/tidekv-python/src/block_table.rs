//! `BlockTable`: a pool's decisions for those who map themselves, on their own thread.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use tidekv_core::blocks::{AllocPlan, BlockAllocator, BlockLease};
use tidekv_core::pages::{Fence, PageClaim};
use tidekv_core::units::{BlockIndex, PageId, Step};

use crate::error::{Refused, not_picklable};
use crate::layout::{Converter, Geometry, refused_free};
use crate::numbers;

/// The caller has waited for its device before it reports a page as unmapped, so no free needs a fence of ours.
const NO_FENCE: Fence = Fence::Step(Step(0));

struct Table {
    blocks: BlockAllocator,
    /// Pages that the caller is mapping or unmapping, and by which right.
    claims: BTreeMap<u32, PageClaim>,
    null_block: NullBlock,
}

enum NullBlock {
    None,
    /// Taken with the first claim.
    Wanted,
    /// Its page is being mapped.
    Planned(AllocPlan),
    There,
}

/// Blocks without memory of their own.
#[pyclass(module = "tidekv._native", frozen)]
pub(crate) struct BlockTable {
    table: Mutex<Table>,
    geometry: Geometry,
    has_null_block: bool,
}

impl BlockTable {
    fn table(&self) -> MutexGuard<'_, Table> {
        // Every method checks before it changes anything.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn list<'py>(&self, py: Python<'py>, leases: &[BlockLease]) -> PyResult<Bound<'py, PyList>> {
        let mut converter = Converter::new(&self.geometry.geometry);
        PyList::new(py, leases.iter().map(|lease| converter.id(lease.block)))
    }

    fn indices(&self, blocks: &Bound<'_, PyAny>) -> PyResult<Vec<BlockIndex>> {
        let mut converter = Converter::new(&self.geometry.geometry);
        numbers::ids(blocks)?.into_iter().map(|block| Ok(converter.index(block)?)).collect()
    }
}

impl Table {
    /// The claims of pages that the caller was given, all or none.
    fn take(&mut self, pages: &[PageId]) -> Result<Vec<PageClaim>, Refused> {
        let claims: Option<Vec<PageClaim>> = pages.iter().map(|page| self.claims.get(&page.0).copied()).collect();
        let claims = claims.ok_or_else(|| {
            Refused::argument("some of these pages were not claimed or retired here, or were reported before")
        })?;
        for page in pages {
            self.claims.remove(&page.0);
        }
        Ok(claims)
    }

    /// The plan of the null block, if these pages are its.
    fn null_plan(&mut self, pages: &[PageId]) -> Option<AllocPlan> {
        match &self.null_block {
            NullBlock::Planned(plan) if plan.claims().iter().any(|claim| pages.contains(&claim.page)) => {}
            _ => return None,
        }
        match std::mem::replace(&mut self.null_block, NullBlock::Wanted) {
            NullBlock::Planned(plan) => Some(plan),
            other => {
                self.null_block = other;
                None
            }
        }
    }
}

fn stale(error: impl std::error::Error) -> Refused {
    Refused::argument(error.to_string())
}

#[pymethods]
impl BlockTable {
    #[new]
    #[pyo3(signature = (geometry, *, null_block = false))]
    fn new(geometry: &Bound<'_, Geometry>, null_block: bool) -> Result<Self, Refused> {
        let geometry = geometry.get().clone();
        let core = &geometry.geometry;
        let blocks = BlockAllocator::new(core.page_count(), core.blocks_per_page())?;
        let null = if null_block { NullBlock::Wanted } else { NullBlock::None };
        let table = Table { blocks, claims: BTreeMap::new(), null_block: null };
        Ok(Self { table: Mutex::new(table), geometry, has_null_block: null_block })
    }

    #[getter]
    fn geometry(&self) -> Geometry {
        self.geometry.clone()
    }

    #[getter]
    fn null_block(&self) -> Option<u32> {
        self.has_null_block.then_some(0)
    }

    fn try_alloc<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = numbers::count)] count: u32,
    ) -> PyResult<Option<Bound<'py, PyList>>> {
        let mut leases = Vec::new();
        let taken = self.table().blocks.alloc_mapped(count, &mut leases).is_ok();
        if taken { self.list(py, &leases).map(Some) } else { Ok(None) }
    }

    fn claim(&self, #[pyo3(from_py_with = numbers::count)] count: u32) -> Result<Option<Vec<u32>>, Refused> {
        let mut table = self.table();
        let per_page = table.blocks.blocks_per_page();
        let mut free = table.blocks.leasable_blocks();
        let mut pages = Vec::new();
        if matches!(table.null_block, NullBlock::Wanted) {
            let Ok(plan) = table.blocks.reserve_null_block() else { return Ok(None) };
            for claim in plan.claims() {
                pages.push(claim.page.0);
                table.claims.insert(claim.page.0, *claim);
            }
            free += per_page - 1;
            table.null_block = NullBlock::Planned(plan);
        }
        let more = count.saturating_sub(free).div_ceil(per_page);
        let claimed = if more == 0 { Ok(Vec::new()) } else { table.blocks.claim_pages(more) };
        let Ok(claimed) = claimed else {
            // The null block's page goes back too: all or none.
            let pages: Vec<PageId> = pages.into_iter().map(PageId).collect();
            if let Some(plan) = table.null_plan(&pages) {
                table.take(&pages)?;
                table.blocks.abort(plan);
            }
            return Ok(None);
        };
        for claim in claimed {
            pages.push(claim.page.0);
            table.claims.insert(claim.page.0, claim);
        }
        Ok(Some(pages))
    }

    fn mapped(&self, pages: &Bound<'_, PyAny>) -> PyResult<()> {
        let pages = numbers::pages(pages)?;
        let mut table = self.table();
        let mut claims = table.take(&pages)?;
        if let Some(plan) = table.null_plan(&pages) {
            claims.retain(|claim| !plan.claims().contains(claim));
            table.blocks.commit(plan, &mut Vec::new()).map_err(stale)?;
            table.null_block = NullBlock::There;
        }
        Ok(table.blocks.pages_mapped(&claims).map_err(stale)?)
    }

    fn refused(&self, pages: &Bound<'_, PyAny>) -> PyResult<()> {
        let pages = numbers::pages(pages)?;
        let mut table = self.table();
        let mut claims = table.take(&pages)?;
        if let Some(plan) = table.null_plan(&pages) {
            claims.retain(|claim| !plan.claims().contains(claim));
            table.blocks.abort(plan);
        }
        Ok(table.blocks.pages_refused(&claims).map_err(stale)?)
    }

    fn free(&self, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let indices = self.indices(blocks)?;
        let freed = self.table().blocks.free_blocks(&indices, NO_FENCE);
        freed.map(drop).map_err(|error| refused_free(&self.geometry.geometry, error).into())
    }

    fn retire(&self, #[pyo3(from_py_with = numbers::count)] count: u32) -> Vec<u32> {
        let mut table = self.table();
        table.blocks.retire(count);
        let plan = table.blocks.begin_unmap(Step(u64::MAX), count);
        for claim in &plan.pages {
            table.claims.insert(claim.page.0, *claim);
        }
        plan.pages.iter().map(|claim| claim.page.0).collect()
    }

    fn unmapped(&self, pages: &Bound<'_, PyAny>) -> PyResult<()> {
        let pages = numbers::pages(pages)?;
        let mut table = self.table();
        let claims = table.take(&pages)?;
        Ok(table.blocks.unmapped(&claims).map_err(stale)?)
    }

    /// Those pages are the caller's to unmap again: `retire` hands them out first of all.
    fn unmap_failed(&self, pages: &Bound<'_, PyAny>) -> PyResult<()> {
        let pages = numbers::pages(pages)?;
        let mut table = self.table();
        for claim in table.take(&pages)? {
            table.blocks.unmap_failed(claim).map_err(stale)?;
        }
        for claim in table.blocks.retry_unmap() {
            table.claims.insert(claim.page.0, claim);
        }
        Ok(())
    }

    fn available(&self) -> u32 {
        let table = self.table();
        let null = u32::from(matches!(table.null_block, NullBlock::Wanted));
        table.blocks.available_blocks().saturating_sub(null)
    }

    fn set_limit(&self, pages: u32) {
        self.table().blocks.set_limit(pages);
    }

    fn occupancy(&self, pages: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        let pages = numbers::pages(pages)?;
        let table = self.table();
        let count = table.blocks.pages().page_count();
        Ok(pages.into_iter().map(|page| if page.0 < count { table.blocks.live_blocks(page) } else { 0 }).collect())
    }

    fn pages_of(&self, blocks: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        let per_page = self.geometry.geometry.blocks_per_page();
        Ok(self.indices(blocks)?.into_iter().map(|index| index.0 / per_page).collect())
    }

    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let table = self.table();
        let (blocks, pages) = (table.blocks.counts(), table.blocks.pages().counts());
        let dict = PyDict::new(py);
        for (name, number) in [
            ("total_blocks", blocks.total),
            ("free_blocks", blocks.free_mapped),
            ("leased_blocks", blocks.leased),
            ("reserved_pages", pages.reserved),
            ("mapping_pages", pages.mapping),
            ("idle_pages", pages.idle),
            ("inuse_pages", pages.in_use),
            ("draining_pages", pages.draining),
            ("unmapping_pages", pages.unmapping),
            ("limit_pages", table.blocks.pages().limit()),
        ] {
            dict.set_item(name, number)?;
        }
        Ok(dict)
    }

    fn clear(&self) -> Result<u32, Refused> {
        let mut table = self.table();
        let all = (0..table.blocks.total_blocks()).map(BlockIndex);
        let leased: Vec<_> = all.filter(|&block| table.blocks.is_leased(block)).collect();
        table.blocks.free_blocks(&leased, NO_FENCE)?;
        Ok(u32::try_from(leased.len()).unwrap_or(u32::MAX))
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("BlockTable", "it is the state of one allocator; make one in the other process"))
    }
}
