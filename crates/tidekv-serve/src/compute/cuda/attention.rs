//! Attention over the pool's pages: which kernel, in how many pieces.
//!
//! | heads                                   | kernel                      | pieces                                         |
//! |-----------------------------------------|-----------------------------|------------------------------------------------|
//! | bf16, 64 or 128 elements, up to 16 on a KV head | `attend`, `merge`   | tiles of 16 rows, each split so that the card is full |
//! | any other                               | `plain`                     | a warp for each token and head                 |
//!
//! A captured decode step keeps its number of splits while its rows grow: a split takes its turn of the chunks that there are, and one
//! without any does nothing.

use std::ffi::CStr;
use std::ptr::from_ref;
use std::sync::Arc;

use cudarc::driver::sys::CUstream;
use tidekv_batch::cuda::gpu::{Gpu, Grid, Kernel, Module};
use tidekv_core::units::Bytes;
use tidekv_mem::MemError;

use super::kernels::{kernel, launch, ptx, suffix};
use crate::config::Precision;
use crate::model::ModelShape;

const PTX: &CStr = ptx!("../../../kernels/attention.ptx");

/// TILE_ROWS of the source.
const TILE_ROWS: u32 = 16;
/// TILE_WARPS of the source.
const TILE_WARPS: u32 = 4;
/// MERGE_WARPS of the source.
const MERGE_WARPS: u32 = 8;
/// PLAIN_WARPS of the source.
const PLAIN_WARPS: u32 = 4;
/// Heads of more elements than this do not fit a warp's registers: 32 lanes, PLAIN_LANES of the source each.
pub(super) const MAX_HEAD_SIZE: usize = 256;
/// Blocks of threads that fill a card, with some to spare where they are not equally long.
const FULL: u32 = 1024;
/// More splits of a tile cost more to put together than they save. MAX_SPLITS of the source.
const MAX_SPLITS: u32 = 32;

/// `struct Attention` of `kernels/attention.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Attention {
    pub(super) queries: u64,
    pub(super) out: u64,
    pub(super) keys: u64,
    pub(super) values: u64,
    pub(super) table: u64,
    pub(super) context_lens: u64,
    pub(super) query_start_loc: u64,
    pub(super) tiles: u64,
    pub(super) token_rows: u64,
    pub(super) partial: u64,
    pub(super) query_stride: u64,
    pub(super) block_stride: u64,
    pub(super) token_stride: u64,
    pub(super) table_stride: u64,
    pub(super) heads: u32,
    pub(super) kv_heads: u32,
    pub(super) head_size: u32,
    pub(super) block_shift: u32,
    pub(super) splits: u32,
    pub(super) scale: f32,
}

/// The kernels for one shape of heads.
#[derive(Debug)]
pub(super) struct Attend {
    kind: Kind,
    heads: u32,
    kv_heads: u32,
    head_size: u32,
}

#[derive(Debug)]
enum Kind {
    Tiles { attend: Kernel, merge: Kernel },
    Plain(Kernel),
}

impl Attend {
    pub(super) fn load(gpu: &Arc<Gpu>, precision: Precision, shape: &ModelShape) -> Result<Self, MemError> {
        let module = Module::load(gpu, PTX)?;
        let group = shape.heads / shape.kv_heads;
        let fits = matches!(shape.head_size, 64 | 128) && group <= TILE_ROWS as usize && precision == Precision::Bf16;
        let kind = match fits {
            true => Kind::Tiles {
                attend: kernel(&module, &format!("tidekv_attend_{}", shape.head_size))?,
                merge: kernel(&module, &format!("tidekv_merge_{}", shape.head_size))?,
            },
            false => Kind::Plain(kernel(&module, &format!("tidekv_attend_plain_{}", suffix(precision)))?),
        };
        let size = |value: usize| u32::try_from(value).expect("sizes of models are below 2^24");
        let (heads, kv_heads, head_size) = (size(shape.heads), size(shape.kv_heads), size(shape.head_size));
        Ok(Self { kind, heads, kv_heads, head_size })
    }

    /// Query tokens of one row that a tile takes.
    pub(super) fn tile_tokens(&self) -> u32 {
        (TILE_ROWS * self.kv_heads / self.heads).max(1)
    }

    /// How many pieces the keys of each of so many tiles are cut into.
    pub(super) fn splits(&self, tiles: u32) -> u32 {
        match self.kind {
            Kind::Tiles { .. } => (FULL / (tiles * self.kv_heads).max(1)).clamp(1, MAX_SPLITS),
            Kind::Plain(_) => 1,
        }
    }

    /// What splits need in between, at most.
    pub(super) fn partial_bytes(&self) -> Bytes {
        let row = u64::from(self.head_size + 2) * size_of::<f32>() as u64;
        // Splits times tiles times KV heads: at most FULL, unless there is one split and nothing to keep.
        Bytes(u64::from(FULL * TILE_ROWS) * row)
    }

    /// `tokens` tokens in `tiles` tiles. The heads of `attention` are set here.
    ///
    /// # Safety
    /// The condition of every launch ([`kernels`](super::kernels)): every block that a row's length reaches is mapped until it is over.
    pub(super) unsafe fn launch(
        &self,
        stream: CUstream,
        attention: &Attention,
        tokens: u32,
        tiles: u32,
    ) -> Result<(), MemError> {
        let Self { heads, kv_heads, head_size, .. } = *self;
        let attention = Attention { heads, kv_heads, head_size, ..*attention };
        match &self.kind {
            Kind::Tiles { attend, merge } => {
                let splits = attention.splits;
                let grid = |z, warps| Grid { blocks: [tiles, kv_heads, z], threads: warps * 32, shared_bytes: 0 };
                launch!(attend, grid(splits, TILE_WARPS), stream, attention)?;
                if splits > 1 {
                    launch!(merge, grid(1, MERGE_WARPS), stream, attention)?;
                }
                Ok(())
            }
            Kind::Plain(plain) => {
                let blocks = [tokens, heads.div_ceil(PLAIN_WARPS), 1];
                let grid = Grid { blocks, threads: PLAIN_WARPS * 32, shared_bytes: 0 };
                launch!(plain, grid, stream, attention)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::kernels::parameter_bytes;
    use super::*;

    #[test]
    fn the_kernels_take_what_is_passed_to_them() {
        for name in ["attend_64", "attend_128", "merge_64", "merge_128", "attend_plain_bf16", "attend_plain_float"] {
            assert_eq!(parameter_bytes(PTX, &format!("tidekv_{name}")), [size_of::<Attention>()]);
        }
        let ptx = PTX.to_str().unwrap();
        assert!(ptx.contains("\n.version 8.4\n") && ptx.contains("\n.target sm_80\n"));
    }

    #[test]
    fn the_constants_are_those_of_the_source() {
        let source = include_str!("../../../kernels/attention.cu");
        for (name, value) in [
            ("TILE_ROWS", TILE_ROWS),
            ("TILE_WARPS", TILE_WARPS),
            ("MERGE_WARPS", MERGE_WARPS),
            ("MAX_SPLITS", MAX_SPLITS),
            ("PLAIN_WARPS", PLAIN_WARPS),
        ] {
            assert!(source.contains(&format!(" {name} = {value},")), "{name}");
        }
        assert!(source.contains(&format!(" PLAIN_LANES = {},", MAX_HEAD_SIZE / 32)));
    }
}
