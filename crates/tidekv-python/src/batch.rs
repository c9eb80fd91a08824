//! `Batch`: block tables and attention metadata of the next step, on the CPU.
//!
//! The arrays of a step are the caller's: each step has its own, so a tensor made of one never changes under a kernel that
//! still reads it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tidekv_batch::{BatchConfig, BlockTables, IdRun, Metadata, Padding, SeqId, Work};
use tidekv_core::units::KernelId;

use crate::dlpack;
use crate::error::{Refused, not_picklable};
use crate::layout::dtype_named;
use crate::numbers;
use crate::strided::Strided;
use crate::view::View;

/// Sequences in rows, and the free ids that their blocks come from.
#[pyclass(module = "tidekv._native", frozen)]
pub(crate) struct Batch {
    tables: Mutex<BlockTables>,
    config: BatchConfig,
}

impl Batch {
    fn tables(&self) -> MutexGuard<'_, BlockTables> {
        // Every operation is checked first and then done.
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Neighbouring ids as runs, in the order given.
fn runs(ids: Vec<u32>) -> Vec<IdRun> {
    let mut runs: Vec<IdRun> = Vec::new();
    for id in ids {
        match runs.last_mut() {
            Some(run) if run.first.0.checked_add(run.count) == Some(id) => run.count += 1,
            _ => runs.push(IdRun { first: KernelId(id), count: 1 }),
        }
    }
    runs
}

fn numbers_of(ids: Vec<KernelId>) -> Vec<u32> {
    ids.into_iter().map(|id| id.0).collect()
}

/// An array that lives as long as its view.
fn array<T>(owner: &Arc<T>, start: u64, dtype: &str, shape: Vec<usize>) -> Result<View, Refused>
where
    T: Send + Sync + 'static,
{
    let dtype = dtype_named(dtype)?;
    let bytes = shape.iter().product::<usize>() as u64 * u64::from(dtype.bytes);
    let shape = shape.into_iter().map(|size| i64::try_from(size).unwrap_or(i64::MAX)).collect();
    let strided = Strided::within(bytes, 0, dtype, shape, None).map_err(Refused::argument)?;
    let keep: Arc<T> = Arc::clone(owner);
    Ok(View::new(strided, start, dlpack::Device::CPU, keep))
}

#[pymethods]
impl Batch {
    #[new]
    #[pyo3(signature = (*, block_tokens, max_rows, max_row_tokens, max_step_tokens, max_ids))]
    fn new(
        block_tokens: u32,
        max_rows: u32,
        max_row_tokens: u32,
        max_step_tokens: u32,
        max_ids: u32,
    ) -> Result<Self, Refused> {
        let config = BatchConfig { block_tokens, max_rows, max_row_tokens, max_step_tokens, max_ids };
        Ok(Self { tables: Mutex::new(BlockTables::new(config)?), config })
    }

    #[getter]
    fn block_tokens(&self) -> u32 {
        self.config.block_tokens
    }

    #[getter]
    fn max_rows(&self) -> u32 {
        self.config.max_rows
    }

    // ---- ids ----

    fn lend(&self, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let runs = runs(numbers::ids(blocks)?);
        Ok(self.tables().lend(&runs).map_err(Refused::from)?)
    }

    fn withdraw(&self, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let runs = runs(numbers::ids(blocks)?);
        Ok(self.tables().withdraw(&runs).map_err(Refused::from)?)
    }

    fn take_back(&self, #[pyo3(from_py_with = numbers::count)] count: u32) -> Vec<u32> {
        let mut ids = Vec::new();
        self.tables().take_back(count, &mut ids);
        numbers_of(ids)
    }

    #[getter]
    fn free_blocks(&self) -> u32 {
        self.tables().free_blocks()
    }

    // ---- sequences ----

    #[pyo3(signature = (sequence, tokens = 0, *, shared = None))]
    fn admit(&self, sequence: u64, tokens: u32, shared: Option<&Bound<'_, PyAny>>) -> PyResult<u32> {
        let shared = shared.map(numbers::ids).transpose()?.unwrap_or_default();
        let shared: Vec<KernelId> = shared.into_iter().map(KernelId).collect();
        Ok(self.tables().admit(SeqId(sequence), tokens, &shared).map_err(Refused::from)?)
    }

    fn release(&self, sequence: u64) -> Result<Vec<u32>, Refused> {
        let mut out = Vec::new();
        self.tables().release(SeqId(sequence), &mut out)?;
        Ok(numbers_of(out))
    }

    fn remove(&self, sequence: u64) -> Result<Vec<u32>, Refused> {
        let mut out = Vec::new();
        self.tables().remove(SeqId(sequence), &mut out)?;
        Ok(numbers_of(out))
    }

    fn preempt(&self, sequence: u64) -> Result<(u32, Vec<u32>), Refused> {
        let mut out = Vec::new();
        let lost = self.tables().preempt(SeqId(sequence), &mut out)?;
        Ok((lost, numbers_of(out)))
    }

    fn truncate(&self, sequence: u64, tokens: u32) -> Result<(), Refused> {
        Ok(self.tables().truncate(SeqId(sequence), tokens)?)
    }

    fn share(&self, sequence: u64, blocks: u32) -> Result<Vec<u32>, Refused> {
        let mut out = Vec::new();
        self.tables().share(SeqId(sequence), blocks, &mut out)?;
        Ok(numbers_of(out))
    }

    fn swap(&self, one: u64, other: u64) -> Result<(), Refused> {
        Ok(self.tables().swap(SeqId(one), SeqId(other))?)
    }

    fn sequences(&self) -> Vec<u64> {
        self.tables().sequences().iter().map(|sequence| sequence.0).collect()
    }

    fn row_of(&self, sequence: u64) -> Option<u32> {
        self.tables().row_of(SeqId(sequence))
    }

    fn blocks_of(&self, sequence: u64) -> Option<Vec<u32>> {
        self.tables().blocks_of(SeqId(sequence)).map(|ids| ids.map(|id| id.0).collect())
    }

    // ---- steps ----

    #[pyo3(signature = (query_lens = None, *, pad_rows = 0, pad_tokens = 0))]
    fn step<'py>(
        &self,
        py: Python<'py>,
        query_lens: Option<&Bound<'py, PyAny>>,
        pad_rows: u32,
        pad_tokens: u32,
    ) -> PyResult<Bound<'py, PyDict>> {
        let lens = query_lens.map(numbers::ids).transpose()?;
        let work = lens.as_deref().map_or(Work::Decode, Work::Rows);
        let mut tables = self.tables();
        let mut step = Metadata::new(tables.shape()).map_err(Refused::from)?;
        tables.step(work, Padding { rows: pad_rows, tokens: pad_tokens }, &mut step).map_err(Refused::from)?;
        drop(tables);
        let step = Arc::new(step);
        let dict = PyDict::new(py);
        let slots = step.slot_mapping.as_ptr() as u64;
        dict.set_item("slot_mapping", Py::new(py, array(&step, slots, "int64", vec![step.slot_mapping.len()])?)?)?;
        for (name, words) in [
            ("seq_lens", &step.seq_lens),
            ("context_lens", &step.context_lens),
            ("query_start_loc", &step.query_start_loc),
            ("seq_start_loc", &step.seq_start_loc),
        ] {
            dict.set_item(name, Py::new(py, array(&step, words.as_ptr() as u64, "int32", vec![words.len()])?)?)?;
        }
        for (name, number) in [
            ("batch", step.batch),
            ("tokens", step.tokens),
            ("max_query_len", step.max_query_len),
            ("max_seq_len", step.max_seq_len),
            ("num_prefills", step.num_prefills),
            ("num_prefill_tokens", step.num_prefill_tokens),
            ("num_decode_tokens", step.num_decode_tokens),
        ] {
            dict.set_item(name, number)?;
        }
        Ok(dict)
    }

    /// Cells behind a row's blocks are -1.
    fn block_table(&self) -> Result<View, Refused> {
        let tables = self.tables();
        let view = tables.block_tables();
        let (rows, columns) = (view.rows as usize, view.max_blocks as usize);
        let mut cells = vec![-1i32; rows * columns];
        for (row, sequence) in tables.sequences().iter().enumerate() {
            let ids = tables.blocks_of(*sequence).into_iter().flatten();
            for (cell, id) in cells[row * columns..(row + 1) * columns].iter_mut().zip(ids) {
                *cell = i32::try_from(id.0).unwrap_or(-1);
            }
        }
        let cells = Arc::new(cells);
        array(&cells, cells.as_ptr() as u64, "int32", vec![rows, columns])
    }

    fn __repr__(&self) -> String {
        let tables = self.tables();
        format!("Batch({} of {} rows, {} free blocks)", tables.batch(), self.config.max_rows, tables.free_blocks())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("Batch", "it is the state of one engine; make one in the other process"))
    }
}
