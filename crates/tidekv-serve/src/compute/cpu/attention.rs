//! Attention over the blocks of the pool.
//!
//! ```text
//!   query token at position p of row r:   blocks of the table   [ 0..16 | 16..32 | ... | ..p ]
//!      scores   q . k[0], q . k[1], ... q . k[p]                 one after the other, in the order of the positions
//!      weights  exp(score - largest), and their sum
//!      out      sum of weight * v, in the same order, then divided
//! ```
//!
//! One task computes one token's heads that share a KV head, from the first position to its own. So the order of every
//! sum is given by the position alone: not by the chunk that the token came in, not by the block size, not by threads.

use rayon::prelude::*;
use tidekv_core::units::KernelId;

use super::Prepared;
use super::ops::{add_scaled, dot};
use super::threads::Threads;
use crate::compute::kv::LayerKv;
use crate::model::ModelShape;

/// A query token's place: its row of the batch and its position in the sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) row: u32,
    pub(super) position: i32,
}

/// Computes `out` (`[tokens, heads, head_size]`) from `queries` in the same order.
pub(super) fn attend(
    threads: &Threads,
    shape: &ModelShape,
    kv: LayerKv<'_>,
    step: &Prepared<'_>,
    places: &[Place],
    queries: &[f32],
    out: &mut Vec<f32>,
) {
    out.clear();
    out.resize(queries.len(), 0.0);
    let group = shape.heads / shape.kv_heads * shape.head_size;
    let task = |scores: &mut Vec<f32>, (index, (out, queries)): (usize, (&mut [f32], &[f32]))| {
        let (place, kv_head) = (places[index / shape.kv_heads], index % shape.kv_heads);
        Head { shape, kv, blocks: step.tables.row(place.row), kv_head }.attend(place.position, queries, scores, out);
    };
    #[expect(clippy::cast_sign_loss, reason = "positions are not negative")]
    let keys: usize = places.iter().map(|place| place.position as usize + 1).sum();
    let tasks = out.par_chunks_exact_mut(group).zip(queries.par_chunks_exact(group)).enumerate();
    threads.run(keys * 2 * shape.query_size(), || tasks.for_each_init(Vec::new, task));
}

/// The queries of one KV head against one row's keys and values.
struct Head<'a> {
    shape: &'a ModelShape,
    kv: LayerKv<'a>,
    blocks: &'a [i32],
    kv_head: usize,
}

impl Head<'_> {
    fn attend(&self, position: i32, queries: &[f32], scores: &mut Vec<f32>, out: &mut [f32]) {
        let size = self.shape.head_size;
        #[expect(clippy::cast_sign_loss, reason = "positions are not negative")]
        let keys = position as usize + 1;
        #[expect(clippy::cast_precision_loss, reason = "heads are small")]
        let scale = 1.0 / (size as f32).sqrt();
        let heads = queries.len() / size;
        // Head after head: `scores[head * keys + position]`.
        scores.clear();
        scores.resize(heads * keys, 0.0);
        self.each(keys, LayerKv::keys, |at, key| {
            for (head, query) in queries.chunks_exact(size).enumerate() {
                scores[head * keys + at] = dot(query, key) * scale;
            }
        });
        for (scores, out) in scores.chunks_exact_mut(keys).zip(out.chunks_exact_mut(size)) {
            let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut sum = 0.0;
            for score in scores.iter_mut() {
                *score = (*score - largest).exp();
                sum += *score;
            }
            scores.iter_mut().for_each(|score| *score /= sum);
            out.fill(0.0);
        }
        self.each(keys, LayerKv::values, |at, value| {
            for (head, out) in out.chunks_exact_mut(size).enumerate() {
                add_scaled(out, scores[head * keys + at], value);
            }
        });
    }

    /// Calls `take` with each of the first `count` positions and its vector of this head, in order.
    fn each<'a>(
        &'a self,
        count: usize,
        buffer: impl Fn(&LayerKv<'a>, KernelId) -> &'a [f32],
        mut take: impl FnMut(usize, &[f32]),
    ) {
        let (token, size) = (self.shape.kv_size(), self.shape.head_size);
        let start = self.kv_head * size;
        let mut at = 0;
        for &id in self.blocks {
            #[expect(clippy::cast_sign_loss, reason = "the table's ids are kernel ids")]
            let block = buffer(&self.kv, KernelId(id as u32));
            for vector in block.chunks_exact(token).take(count - at) {
                take(at, &vector[start..start + size]);
                at += 1;
            }
            if at == count {
                return;
            }
        }
    }
}
