//! Our own kernels, and how each is launched.
//!
//! They ship as PTX for compute_80, which the driver compiles for the card; `scripts/kernels` makes the PTX from `kernels/*.cu`. Each
//! exists for both precisions under a name that ends in its element's; [`Kernels`] has those of one precision.
//!
//! Every launch is `unsafe` for the same reason and under the same condition: addresses are those of arrays on the device, as large
//! as the sizes beside them say, until the launch is over, and nothing that is not ordered with it uses them.

use std::ffi::{CStr, CString};
use std::ptr::from_ref;
use std::sync::Arc;

use cudarc::driver::sys::CUstream;
use tidekv_batch::cuda::gpu::{Gpu, Grid, Kernel, Module};
use tidekv_mem::MemError;

use super::cublas::{Element, Product};
use crate::config::Precision;
use crate::model::Draw;

/// PTX with the NUL that the driver wants.
macro_rules! ptx {
    ($file:literal) => {
        match CStr::from_bytes_with_nul(concat!(include_str!($file), "\0").as_bytes()) {
            Ok(text) => text,
            Err(_) => panic!("PTX has no NUL inside"),
        }
    };
}
pub(super) use ptx;

const PTX: &CStr = ptx!("../../../kernels/layers.ptx");

/// Threads of a block where a block has a row.
const ROW_THREADS: u32 = 512;
/// Threads of a block where a thread has an element.
const ELEMENT_THREADS: u32 = 256;
/// Parts of a row of logits that are looked at side by side: BEST_PARTS of the source.
pub(super) const BEST_PARTS: u32 = 64;
/// Blocks of kernels that go over an array of any size.
const SWEEP_BLOCKS: u32 = 2048;
const ROPE_THREADS: u32 = 256;
/// Outputs of a block of `one`: ONE_WARPS of the source.
const ONE_WARPS: u32 = 8;

/// Where a layer's heads go; `struct Rope` of `kernels/layers.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Rope {
    pub(super) qkv: u64,
    pub(super) keys: u64,
    pub(super) values: u64,
    pub(super) frequencies: u64,
    pub(super) bias: u64,
    pub(super) query_norm: u64,
    pub(super) key_norm: u64,
    pub(super) slot_mapping: u64,
    pub(super) context_lens: u64,
    pub(super) query_start_loc: u64,
    pub(super) token_rows: u64,
    pub(super) heads: u32,
    pub(super) kv_heads: u32,
    pub(super) head_size: u32,
    pub(super) epsilon: f32,
}

/// A launch: the kernel, where, and pointers to its arguments in order.
macro_rules! launch {
    ($kernel:expr, $grid:expr, $stream:expr, $($argument:expr),+) => {
        // SAFETY: the arguments are of the kernel's types (tests compare their sizes with the PTX); the rest is the condition of
        // every launch, which is the caller's promise.
        unsafe { $kernel.launch($grid, $stream, [$(from_ref(&$argument).cast()),+]) }
    };
}
pub(super) use launch;

/// The kernels of one precision.
#[derive(Debug)]
pub(super) struct Kernels {
    embed: Kernel,
    norm: Kernel,
    rope: Kernel,
    gate: Kernel,
    fill: Kernel,
    convert: Kernel,
    bias: Kernel,
    best_of_parts: Kernel,
    best: Kernel,
    read: Kernel,
    one_bf16: Kernel,
    one_float: Kernel,
    one_gate: Kernel,
}

/// The ending of a precision's kernels.
pub(super) fn suffix(precision: Precision) -> &'static str {
    match precision {
        Precision::Bf16 => "bf16",
        Precision::F32 => "float",
    }
}

pub(super) fn kernel(module: &Arc<Module>, name: &str) -> Result<Kernel, MemError> {
    module.kernel(&CString::new(name).expect("names have no NUL"))
}

impl Kernels {
    pub(super) fn load(gpu: &Arc<Gpu>, precision: Precision) -> Result<Self, MemError> {
        let module = Module::load(gpu, PTX)?;
        let typed = |name: &str| kernel(&module, &format!("tidekv_{name}_{}", suffix(precision)));
        Ok(Self {
            embed: typed("embed")?,
            norm: typed("norm")?,
            rope: typed("rope")?,
            gate: typed("gate")?,
            fill: typed("fill")?,
            convert: typed("convert")?,
            bias: module.kernel(c"tidekv_bias")?,
            best_of_parts: module.kernel(c"tidekv_best_of_parts")?,
            best: module.kernel(c"tidekv_best")?,
            read: module.kernel(c"tidekv_read")?,
            one_bf16: module.kernel(c"tidekv_one_bf16")?,
            one_float: module.kernel(c"tidekv_one_float")?,
            one_gate: module.kernel(c"tidekv_one_gate")?,
        })
    }

    /// `state[i] = embedding[tokens[i]]`.
    pub(super) unsafe fn embed(
        &self,
        stream: CUstream,
        state: u64,
        embedding: u64,
        tokens: u64,
        count: u32,
        hidden: u32,
    ) -> Result<(), MemError> {
        launch!(self.embed, Grid::line(count, ROW_THREADS), stream, state, embedding, tokens, hidden)
    }

    /// `out[i] = norm(state[rows[i]])`; rows of address 0 are all of them in order.
    #[expect(clippy::too_many_arguments, reason = "the kernel's own")]
    pub(super) unsafe fn norm(
        &self,
        stream: CUstream,
        out: u64,
        state: u64,
        weight: u64,
        rows: u64,
        count: u32,
        hidden: u32,
        epsilon: f32,
    ) -> Result<(), MemError> {
        launch!(self.norm, Grid::line(count, ROW_THREADS), stream, out, state, weight, rows, hidden, epsilon)
    }

    pub(super) unsafe fn rope(&self, stream: CUstream, rope: &Rope, tokens: u32) -> Result<(), MemError> {
        let heads = (rope.heads + 2 * rope.kv_heads).div_ceil(ROPE_THREADS / 32);
        let grid = Grid { blocks: [tokens, heads, 1], threads: ROPE_THREADS, shared_bytes: 0 };
        launch!(self.rope, grid, stream, *rope)
    }

    /// `out = silu(gate) * up`.
    pub(super) unsafe fn gate(
        &self,
        stream: CUstream,
        out: u64,
        gate_up: u64,
        bias: u64,
        tokens: u32,
        intermediate: u32,
    ) -> Result<(), MemError> {
        launch!(self.gate, columns_by_rows(intermediate, tokens), stream, out, gate_up, bias, intermediate)
    }

    /// `out[row] += bias`, floats.
    pub(super) unsafe fn bias(
        &self,
        stream: CUstream,
        out: u64,
        bias: u64,
        rows: u32,
        columns: u32,
    ) -> Result<(), MemError> {
        launch!(self.bias, columns_by_rows(columns, rows), stream, out, bias, columns)
    }

    /// `best[row]`: the id of the largest logit. `parts` has room for [`BEST_PARTS`] words of 64 bits for each row.
    pub(super) unsafe fn best(
        &self,
        stream: CUstream,
        best: u64,
        parts: u64,
        logits: u64,
        rows: u32,
        vocab: u32,
    ) -> Result<(), MemError> {
        let grid = Grid { blocks: [BEST_PARTS, rows, 1], threads: ELEMENT_THREADS, shared_bytes: 0 };
        launch!(self.best_of_parts, grid, stream, parts, logits, vocab)?;
        launch!(self.best, Grid::line(rows, 32), stream, best, parts)
    }

    /// A product of one row of bf16, whose inputs are a multiple of 8.
    pub(super) unsafe fn one(&self, stream: CUstream, product: &Product) -> Result<(), MemError> {
        let Product { input, weight, out, out_element, inputs, outputs, add, .. } = *product;
        let kernel = match out_element {
            Element::Bf16 => &self.one_bf16,
            Element::F32 => &self.one_float,
        };
        let add = u32::from(add);
        let grid = Grid::line(outputs.div_ceil(ONE_WARPS), ONE_WARPS * 32);
        launch!(kernel, grid, stream, out, input, weight, inputs, outputs, add)
    }

    /// The product of gate and up (`[2 intermediate, inputs]`) for one row of bf16, and [`gate`](Self::gate) of it.
    pub(super) unsafe fn one_gate(
        &self,
        stream: CUstream,
        out: u64,
        input: u64,
        weight: u64,
        bias: u64,
        (inputs, intermediate): (u32, u32),
    ) -> Result<(), MemError> {
        let grid = Grid::line(intermediate.div_ceil(ONE_WARPS), ONE_WARPS * 32);
        launch!(self.one_gate, grid, stream, out, input, weight, bias, inputs, intermediate)
    }

    /// Makes a matrix's numbers; `turned` makes `[columns, rows]` of it.
    pub(super) unsafe fn fill(&self, stream: CUstream, out: u64, draw: &Draw, turned: bool) -> Result<(), MemError> {
        let (rows, columns, turned) = (draw.rows as u64, draw.columns as u64, u32::from(turned));
        let grid = Grid::line(SWEEP_BLOCKS, ELEMENT_THREADS);
        launch!(
            self.fill,
            grid,
            stream,
            out,
            rows,
            columns,
            draw.state,
            draw.reach,
            draw.whisper,
            draw.loud.start,
            draw.loud.end,
            turned
        )
    }

    /// Converts `count` rows, from `first_row` on, of a matrix `[rows, columns]` of floats.
    #[expect(clippy::too_many_arguments, reason = "the kernel's own")]
    pub(super) unsafe fn convert(
        &self,
        stream: CUstream,
        out: u64,
        floats: u64,
        (rows, columns): (u64, u64),
        first_row: u64,
        count: u64,
        turned: bool,
    ) -> Result<(), MemError> {
        let turned = u32::from(turned);
        let grid = Grid::line(SWEEP_BLOCKS, ELEMENT_THREADS);
        launch!(self.convert, grid, stream, out, floats, rows, columns, first_row, count, turned)
    }

    /// Reads so many bytes and forgets them; `out` is a word.
    pub(super) unsafe fn read(&self, stream: CUstream, out: u64, from: u64, bytes: u64) -> Result<(), MemError> {
        let words = bytes / 16;
        launch!(self.read, Grid::line(SWEEP_BLOCKS, ELEMENT_THREADS), stream, out, from, words)
    }
}

fn columns_by_rows(columns: u32, rows: u32) -> Grid {
    Grid { blocks: [columns.div_ceil(ELEMENT_THREADS), rows, 1], threads: ELEMENT_THREADS, shared_bytes: 0 }
}

/// The bytes of a kernel's parameters, as its PTX declares them.
#[cfg(test)]
pub(super) fn parameter_bytes(ptx: &CStr, kernel: &str) -> Vec<usize> {
    let ptx = ptx.to_str().unwrap();
    let entry = ptx.split(&format!(".entry {kernel}(")).nth(1).unwrap_or_else(|| panic!("{kernel} is not there"));
    let size = |line: &str| match line.split_whitespace().collect::<Vec<_>>()[..] {
        [".param", ".align", _, ".b8", name] => {
            name.trim_end_matches([',', ']']).split('[').nth(1).unwrap().parse().unwrap()
        }
        [".param", ".u64", _] => 8,
        [".param", ".u32" | ".f32", _] => 4,
        ref other => panic!("{other:?}"),
    };
    entry.split(')').next().unwrap().lines().filter(|line| line.contains(".param")).map(size).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_take_what_is_passed_to_them() {
        for precision in [Precision::Bf16, Precision::F32] {
            let bytes = |name: &str| parameter_bytes(PTX, &format!("tidekv_{name}_{}", suffix(precision)));
            assert_eq!(bytes("embed"), [8, 8, 8, 4]);
            assert_eq!(bytes("norm"), [8, 8, 8, 8, 4, 4]);
            assert_eq!(bytes("rope"), [size_of::<Rope>()]);
            assert_eq!(bytes("gate"), [8, 8, 8, 4]);
            assert_eq!(bytes("fill"), [8, 8, 8, 8, 4, 4, 4, 4, 4]);
            assert_eq!(bytes("convert"), [8, 8, 8, 8, 8, 8, 4]);
            assert_eq!(bytes("one"), [8, 8, 8, 4, 4, 4]);
        }
        assert_eq!(parameter_bytes(PTX, "tidekv_one_gate"), [8, 8, 8, 8, 4, 4]);
        assert_eq!(parameter_bytes(PTX, "tidekv_bias"), [8, 8, 4]);
        assert_eq!(parameter_bytes(PTX, "tidekv_best_of_parts"), [8, 8, 4]);
        assert_eq!(parameter_bytes(PTX, "tidekv_best"), [8, 8]);
        assert_eq!(parameter_bytes(PTX, "tidekv_read"), [8, 8, 8]);
    }

    #[test]
    fn drivers_from_series_550_on_take_the_ptx() {
        let ptx = PTX.to_str().unwrap();
        assert!(ptx.contains("\n.version 8.4\n") && ptx.contains("\n.target sm_80\n"));
    }

    #[test]
    fn the_constants_are_those_of_the_source() {
        let source = include_str!("../../../kernels/layers.cu");
        assert!(source.contains(&format!(" ONE_WARPS = {ONE_WARPS},")));
        assert!(source.contains(&format!(" BEST_PARTS = {BEST_PARTS},")));
    }
}
