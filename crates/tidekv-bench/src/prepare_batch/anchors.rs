//! What others need for the same step: update and pack of one decode step, synchronised wall time, measured on an H200.
//!
//! Six variants of three public systems were timed there in four cells (DisagMoE on CPU and GPU, SGLang's fused kernels with pages
//! of 16 and of 1, vLLM V1 and V2). The fastest of each cell stands here; a default run on a GPU measures the same cells.

use super::cell::Cell;

/// A cell and the best that anybody else showed in it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Anchor {
    pub(super) cell: Cell,
    pub(super) best_peer_us: f64,
}

/// DisagMoE on the CPU in the first cell, SGLang with pages of one token in the others.
pub(super) const ANCHORS: [Anchor; 4] = [
    Anchor { cell: Cell { batch: 64, seq: 2048 }, best_peer_us: 100.0 },
    Anchor { cell: Cell { batch: 1024, seq: 2048 }, best_peer_us: 211.0 },
    Anchor { cell: Cell { batch: 64, seq: 32_768 }, best_peer_us: 98.0 },
    Anchor { cell: Cell { batch: 1024, seq: 32_768 }, best_peer_us: 310.0 },
];
