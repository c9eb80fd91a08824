//! The processor: products by gemm, attention and everything else our own, in 32-bit floats.
//!
//! ```text
//!   tokens ─> embedding ─┬─> norm ─> qkv ─> (head norms) ─> turn ─> K, V into the pool ─> attention ─> output ─┬─> ...
//!                        └──────────────────────────────── + ──────────────────────────────────────────────────┘
//!             ... ─┬─> norm ─> gate, up ─> silu * ─> down ─┬─> next layer ... ─> norm ─> head ─> logits
//!                  └────────────────── + ──────────────────┘
//! ```
//!
//! | file        | it                                                                     |
//! |-------------|------------------------------------------------------------------------|
//! | `dense`     | products in tiles of a fixed number of rows                            |
//! | `ops`       | norms, rotary positions, the gate: one row at a time                   |
//! | `attention` | scores and sums over the pool's blocks, in the order of the positions  |
//! | `threads`   | small work stays on the calling thread                                 |

mod attention;
mod dense;
mod ops;
mod threads;

use std::fmt;

use tidekv_batch::{Metadata, Padding, TableView, Work};

use super::{
    Compute, ComputeError, HostTables, KvStore, Logits, Outputs, StepInput, StepTables, Wanted, check_held, check_step,
    likeliest,
};
use crate::model::{Embedding, Layer, Matrix, Model, ModelShape};
use attention::{Place, attend};
use dense::Dense;
use threads::Threads;

/// A model on the processor.
pub struct CpuCompute {
    shape: ModelShape,
    frequencies: Vec<f32>,
    embedding: Option<Matrix>,
    layers: Vec<CpuLayer>,
    norm: Vec<f32>,
    head: Dense,
    threads: Threads,
    scratch: Scratch,
}

struct CpuLayer {
    attention_norm: Vec<f32>,
    qkv: Dense,
    query_norm: Option<Vec<f32>>,
    key_norm: Option<Vec<f32>>,
    output: Dense,
    feed_norm: Vec<f32>,
    gate_up: Dense,
    down: Dense,
}

/// A step whose tokens have their places.
struct Prepared<'a> {
    tokens: &'a [u32],
    metadata: &'a Metadata,
    tables: TableView<'a>,
    wanted: &'a [Wanted],
}

/// Arrays of one step, kept for the next.
#[derive(Default)]
struct Scratch {
    places: Vec<Place>,
    angles: Vec<(f32, f32)>,
    state: Vec<f32>,
    normed: Vec<f32>,
    qkv: Vec<f32>,
    queries: Vec<f32>,
    attended: Vec<f32>,
    product: Vec<f32>,
    gated: Vec<f32>,
}

impl fmt::Debug for CpuCompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuCompute").field("shape", &self.shape).finish_non_exhaustive()
    }
}

impl CpuCompute {
    /// Takes a model over, to be computed by `threads` threads.
    ///
    /// # Errors
    /// [`ComputeError::Threads`].
    pub fn new(model: Model, threads: usize) -> Result<Self, ComputeError> {
        let Model { shape, weights, .. } = model;
        Ok(Self {
            frequencies: shape.rope.frequencies(shape.head_size),
            shape,
            embedding: match weights.embedding {
                Embedding::Own(matrix) => Some(matrix),
                Embedding::Tied => None,
            },
            layers: weights.layers.into_iter().map(CpuLayer::new).collect(),
            norm: weights.norm,
            head: Dense::new(weights.head),
            threads: Threads::new(threads)?,
            scratch: Scratch::default(),
        })
    }

    fn compute(&mut self, kv: &mut KvStore, step: &Prepared<'_>) -> Outputs {
        self.scratch.place(step, &self.frequencies);
        self.embed(step.tokens);
        let Self { shape, layers, norm, head, threads, scratch, .. } = self;
        for (index, layer) in layers.iter().enumerate() {
            layer.attention(threads, shape, index, kv, step, scratch);
            layer.feed(threads, shape, scratch);
        }
        scratch.normed.clear();
        for wanted in step.wanted {
            scratch.normed.extend_from_slice(&scratch.state[wanted.token as usize * shape.hidden..][..shape.hidden]);
        }
        let rows = std::mem::take(&mut scratch.normed);
        ops::norm_rows(&rows, norm, shape.norm_epsilon, &mut scratch.normed);
        let mut data = Vec::new();
        head.apply(threads, &scratch.normed, &mut data);
        let best = data.chunks_exact(shape.vocab).map(likeliest).collect();
        if !step.wanted.iter().all(|wanted| wanted.logits) {
            let rows = data.chunks_exact(shape.vocab).zip(step.wanted).filter(|(_, wanted)| wanted.logits);
            data = rows.flat_map(|(row, _)| row).copied().collect();
        }
        Outputs { best, logits: Logits { vocab: shape.vocab, data } }
    }

    fn embed(&mut self, tokens: &[u32]) {
        let state = &mut self.scratch.state;
        state.clear();
        for &id in tokens {
            match &self.embedding {
                Some(table) => state.extend_from_slice(&table.data[id as usize * table.columns..][..table.columns]),
                None => self.head.column(id as usize, state),
            }
        }
    }
}

impl Compute for CpuCompute {
    fn forward(
        &mut self,
        kv: &mut KvStore,
        tables: &mut StepTables,
        step: &StepInput<'_>,
    ) -> Result<Outputs, ComputeError> {
        let StepTables::Host(host) = tables else { return Err(ComputeError::Elsewhere { what: "tables" }) };
        check_step(step, self.shape.vocab)?;
        let HostTables { tables, metadata } = &mut **host;
        let new_blocks = tables.plan(Work::Rows(step.query))?.new_blocks;
        check_held(kv, tables, new_blocks)?;
        tables.step(Work::Rows(step.query), Padding::NONE, metadata)?;
        let tables = tables.block_tables();
        Ok(self.compute(kv, &Prepared { tokens: step.tokens, metadata, tables, wanted: step.wanted }))
    }
}

impl CpuLayer {
    fn new(layer: Layer) -> Self {
        Self {
            attention_norm: layer.attention_norm,
            qkv: Dense::new(layer.qkv),
            query_norm: layer.query_norm,
            key_norm: layer.key_norm,
            output: Dense::new(layer.output),
            feed_norm: layer.feed_norm,
            gate_up: Dense::new(layer.gate_up),
            down: Dense::new(layer.down),
        }
    }

    /// `state += output(attention(norm(state)))`; the new tokens' keys and values go to the pool.
    fn attention(
        &self,
        threads: &Threads,
        shape: &ModelShape,
        index: usize,
        kv: &mut KvStore,
        step: &Prepared<'_>,
        scratch: &mut Scratch,
    ) {
        ops::norm_rows(&scratch.state, &self.attention_norm, shape.norm_epsilon, &mut scratch.normed);
        self.qkv.apply(threads, &scratch.normed, &mut scratch.qkv);
        let (query_size, kv_size, head_size) = (shape.query_size(), shape.kv_size(), shape.head_size);
        scratch.queries.clear();
        let rows = scratch.qkv.chunks_exact_mut(query_size + 2 * kv_size);
        let angles = scratch.angles.chunks_exact(head_size / 2);
        for ((row, angles), &slot) in rows.zip(angles).zip(&step.metadata.slot_mapping) {
            let (queries, keys_values) = row.split_at_mut(query_size);
            let (keys, values) = keys_values.split_at_mut(kv_size);
            for (heads, norm) in [(&mut *queries, &self.query_norm), (&mut *keys, &self.key_norm)] {
                for head in heads.chunks_exact_mut(head_size) {
                    if let Some(weight) = norm {
                        ops::norm(head, weight, shape.norm_epsilon);
                    }
                    ops::turn(head, angles);
                }
            }
            scratch.queries.extend_from_slice(queries);
            kv.write(index, slot, keys, values);
        }
        attend(threads, shape, kv.layer(index), step, &scratch.places, &scratch.queries, &mut scratch.attended);
        self.output.apply(threads, &scratch.attended, &mut scratch.product);
        scratch.add_product();
    }

    /// `state += down(silu(gate(norm(state))) * up(norm(state)))`.
    fn feed(&self, threads: &Threads, shape: &ModelShape, scratch: &mut Scratch) {
        ops::norm_rows(&scratch.state, &self.feed_norm, shape.norm_epsilon, &mut scratch.normed);
        self.gate_up.apply(threads, &scratch.normed, &mut scratch.product);
        ops::gate(&scratch.product, shape.intermediate, &mut scratch.gated);
        self.down.apply(threads, &scratch.gated, &mut scratch.product);
        scratch.add_product();
    }
}

impl Scratch {
    /// Finds each query token's row and position, and the angles of the position.
    fn place(&mut self, step: &Prepared<'_>, frequencies: &[f32]) {
        self.places.clear();
        self.angles.clear();
        let metadata = step.metadata;
        for (row, (&context, &len)) in (0..metadata.batch).zip(metadata.context_lens.iter().zip(&metadata.seq_lens)) {
            for position in context..len {
                self.places.push(Place { row, position });
                ops::angles(position, frequencies, &mut self.angles);
            }
        }
    }

    fn add_product(&mut self) {
        self.state.iter_mut().zip(&self.product).for_each(|(state, more)| *state += more);
    }
}
