//! The kernels, and how each is launched.
//!
//! They ship as PTX for compute_80, which the driver compiles for the card when a batch is opened; `scripts/kernels` makes the
//! PTX from `kernels/batch.cu`, and `--check` says whether the two still belong together.

use std::ffi::CStr;
use std::ptr::from_ref;
use std::sync::Arc;

use cudarc::driver::sys::CUstream;
use tidekv_mem::MemError;

use super::gpu::{Gpu, Grid, Kernel, Module};
use super::replica::{PaddingWords, Replica};
use super::staging::Staged;

/// The PTX with the NUL that the driver wants.
const PTX: &CStr = match CStr::from_bytes_with_nul(concat!(include_str!("../../kernels/batch.ptx"), "\0").as_bytes()) {
    Ok(text) => text,
    Err(_) => panic!("PTX has no NUL inside"),
};

/// Rows that one block of threads can plan: 12 bytes each in the shared memory of every card since compute_80.
pub(super) const MAX_ROWS: u32 = 8192;
/// Threads of a block, and of the one block of a decode step.
const MAX_THREADS: u32 = 1024;
const WARP: u32 = 32;
/// Shared memory that a launch may use without asking, less what the kernels declare themselves.
const SHARED_FOR_ALL: u32 = 47 << 10;
/// Tokens of one block of `mixed`: TILE_TOKENS of the source.
const TILE_TOKENS: u32 = 2048;
/// Runs that a warp of `apply` reads at a time: WARP_RUNS of the source.
const WARP_RUNS: u32 = 8;
const APPLY_THREADS: u32 = 256;
const APPLY_MAX_BLOCKS: u32 = 264;

/// Which part of a decode step a launch does.
#[derive(Clone, Copy, Debug)]
pub(super) enum Decode {
    Step,
    Update,
    Pack,
}

/// What the ring and the batch are, in the terms of kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Words {
    pub(super) batch: u32,
    /// Cell of the next id.
    pub(super) head: u32,
    pub(super) free: u32,
}

#[derive(Debug)]
pub(super) struct Kernels {
    step: Kernel,
    update: Kernel,
    pack: Kernel,
    mixed: Kernel,
    apply: Kernel,
    nothing: Kernel,
    decode_threads: u32,
}

impl Kernels {
    /// Loads them for batches of at most `max_rows` rows.
    pub(super) fn load(gpu: &Arc<Gpu>, max_rows: u32) -> Result<Self, MemError> {
        let module = Module::load(gpu, PTX)?;
        let mixed = module.kernel(c"tidekv_mixed")?;
        let shared = mixed_shared_bytes(max_rows);
        if shared > SHARED_FOR_ALL {
            mixed.allow_shared(shared)?;
        }
        Ok(Self {
            step: module.kernel(c"tidekv_decode")?,
            update: module.kernel(c"tidekv_decode_update")?,
            pack: module.kernel(c"tidekv_decode_pack")?,
            mixed,
            apply: module.kernel(c"tidekv_apply")?,
            nothing: module.kernel(c"tidekv_nothing")?,
            decode_threads: max_rows.next_multiple_of(WARP).min(MAX_THREADS),
        })
    }

    /// One token for every row.
    ///
    /// # Safety
    /// As [`Kernel::launch`] for the arrays of `replica`; the padding fits them.
    pub(super) unsafe fn decode(
        &self,
        part: Decode,
        stream: CUstream,
        replica: &Replica,
        padding: PaddingWords,
    ) -> Result<(), MemError> {
        let kernel = match part {
            Decode::Step => &self.step,
            Decode::Update => &self.update,
            Decode::Pack => &self.pack,
        };
        let grid = Grid::line(1, self.decode_threads);
        // SAFETY: the kernel's two parameters; the rest is the caller's promise.
        unsafe { kernel.launch(grid, stream, [from_ref(replica).cast(), from_ref(&padding).cast()]) }
    }

    /// How many blocks of threads a step of so many tokens, with padding, has: each reads the work of all rows.
    pub(super) fn mixed_blocks(tokens_out: u32) -> u32 {
        tokens_out.div_ceil(TILE_TOKENS).max(1)
    }

    /// Any number of tokens for every row; `row_work` is where the device finds how many.
    ///
    /// # Safety
    /// As [`decode`](Self::decode); `row_work` holds `words.batch` rows until the launch is over.
    pub(super) unsafe fn mixed(
        &self,
        stream: CUstream,
        replica: &Replica,
        padding: PaddingWords,
        row_work: u64,
        words: Words,
        tokens_out: u32,
    ) -> Result<(), MemError> {
        let grid = Grid {
            blocks: [Self::mixed_blocks(tokens_out), 1, 1],
            threads: MAX_THREADS,
            shared_bytes: mixed_shared_bytes(words.batch),
        };
        let arguments = [
            from_ref(replica).cast(),
            from_ref(&padding).cast(),
            from_ref(&row_work).cast(),
            from_ref(&words.batch).cast(),
            from_ref(&words.head).cast(),
            from_ref(&words.free).cast(),
        ];
        // SAFETY: the kernel's six parameters; the rest is the caller's promise.
        unsafe { self.mixed.launch(grid, stream, arguments) }
    }

    /// Writes what changed.
    ///
    /// # Safety
    /// As [`decode`](Self::decode); what was staged stays until the launch is over, and names cells and rows of the arrays.
    pub(super) unsafe fn apply(
        &self,
        stream: CUstream,
        replica: &Replica,
        staged: Staged,
        words: Words,
    ) -> Result<(), MemError> {
        let runs = staged.run_count.div_ceil(WARP_RUNS * (APPLY_THREADS / WARP));
        let rows = staged.row_count.div_ceil(APPLY_THREADS);
        let grid = Grid::line(runs.max(rows).clamp(1, APPLY_MAX_BLOCKS), APPLY_THREADS);
        let arguments = [
            from_ref(replica).cast(),
            from_ref(&staged.runs).cast(),
            from_ref(&staged.run_count).cast(),
            from_ref(&staged.rows).cast(),
            from_ref(&staged.row_count).cast(),
            from_ref(&words.batch).cast(),
            from_ref(&words.head).cast(),
            from_ref(&words.free).cast(),
        ];
        // SAFETY: the kernel's eight parameters; the rest is the caller's promise.
        unsafe { self.apply.launch(grid, stream, arguments) }
    }

    /// A kernel that does nothing, as wide as a decode step.
    pub(super) fn nothing(&self, stream: CUstream) -> Result<(), MemError> {
        let grid = Grid::line(1, self.decode_threads);
        // SAFETY: the kernel has no parameters and touches no memory.
        unsafe { self.nothing.launch(grid, stream, []) }
    }
}

/// Three words for each row, and the end of the query starts.
const fn mixed_shared_bytes(rows: u32) -> u32 {
    (3 * rows + 1) * 4
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes of a kernel's parameters, as the PTX declares them.
    fn parameter_bytes(kernel: &str) -> Vec<usize> {
        let ptx = PTX.to_str().unwrap();
        let entry = ptx.split(&format!(".entry {kernel}(")).nth(1).expect("the kernel is there");
        let declared = entry.split(')').next().unwrap();
        let size = |line: &str| match line.split_whitespace().collect::<Vec<_>>()[..] {
            [".param", ".align", _, ".b8", name] => {
                name.trim_end_matches([',', ']']).split('[').nth(1).unwrap().parse().unwrap()
            }
            [".param", ".u64", _] => 8,
            [".param", ".u32", _] => 4,
            ref other => panic!("{other:?}"),
        };
        declared.lines().filter(|line| line.contains(".param")).map(size).collect()
    }

    #[test]
    fn the_kernels_take_what_is_passed_to_them() {
        let (replica, padding) = (size_of::<Replica>(), size_of::<PaddingWords>());
        for kernel in ["tidekv_decode", "tidekv_decode_update", "tidekv_decode_pack"] {
            assert_eq!(parameter_bytes(kernel), [replica, padding]);
        }
        assert_eq!(parameter_bytes("tidekv_mixed"), [replica, padding, 8, 4, 4, 4]);
        assert_eq!(parameter_bytes("tidekv_apply"), [replica, 8, 4, 8, 4, 4, 4, 4]);
        assert_eq!(parameter_bytes("tidekv_nothing"), []);
    }

    #[test]
    fn drivers_from_series_550_on_take_the_ptx() {
        let ptx = PTX.to_str().unwrap();
        assert!(ptx.contains("\n.version 8.4\n") && ptx.contains("\n.target sm_80\n"));
    }

    /// Compiled twice from one idea: what the host assumes of the source is what the source says.
    #[test]
    fn the_constants_are_those_of_the_source() {
        let source = include_str!("../../kernels/batch.cu");
        for (name, value) in [
            ("TILE_TOKENS", TILE_TOKENS),
            ("WARP_RUNS", WARP_RUNS),
            ("MAX_THREADS", MAX_THREADS),
            ("TABLE", super::super::replica::Run::TABLE),
            ("RING", super::super::replica::Run::RING),
        ] {
            assert!(source.contains(&format!(" {name} = {value},")), "{name}");
        }
    }

    #[test]
    fn the_largest_plan_fits_every_card() {
        // 99 KiB is what cards of compute_86 and 89 give one block, the least since compute_80.
        assert!(mixed_shared_bytes(MAX_ROWS) + 3 * 2 * (MAX_THREADS / WARP) * 4 <= 99 << 10);
    }
}
