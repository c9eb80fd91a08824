//! One step on the device.
//!
//! ```text
//!   every row has one token     graph for the padded batch: metadata, layers, choice     the first time eagerly, then captured
//!   any other                   rows of tokens and tiles -> device; metadata; layers; choice of the wanted, some rows at a time
//! ```
//!
//! The first decode step of a size runs eagerly because libraries load kernels when they first use them, which must not happen while
//! a stream is being captured.

use std::ffi::c_void;

use cudarc::driver::sys::CUstream;
use tidekv_batch::cuda::gpu::Stream;
use tidekv_batch::cuda::{CudaBatch, StepTensors};
use tidekv_batch::{Padding, Work};

use super::CudaCompute;
use super::attention::Attention;
use super::cublas::{Element, Product};
use super::kernels::Rope;
use super::weights::DenseAt;
use crate::compute::kv::DeviceLayer;
use crate::compute::{ComputeError, KvStore, Logits, Outputs, StepInput, StepTables, check_held, check_step};
use crate::config::Precision;

/// What the layers are launched for.
#[derive(Clone, Copy, Debug)]
struct Launch<'a> {
    stream: CUstream,
    /// With padding.
    tokens: u32,
    tiles: u32,
    /// 0 for a decode step: token i is row i.
    token_rows: u64,
    /// The same for tiles.
    tiles_at: u64,
    metadata: StepTensors,
    layers: &'a [DeviceLayer],
    block_shift: u32,
}

/// Waits for the stream when dropped: whatever happens to a step, nothing of it is under way behind it.
struct Settled<'a>(&'a Stream);

impl Drop for Settled<'_> {
    fn drop(&mut self) {
        // A failure means that nothing runs any more.
        let _ = self.0.synchronise();
    }
}

/// Rows that a decode step of `rows` rows is padded to, so that a few graphs serve all.
fn bucket(rows: u32, most: u32) -> u32 {
    let padded = match rows {
        0..=8 => rows.next_power_of_two(),
        9..=64 => rows.next_multiple_of(8),
        _ => rows.next_multiple_of(32),
    };
    padded.min(most)
}

impl CudaCompute {
    pub(super) fn step(
        &mut self,
        kv: &mut KvStore,
        tables: &mut StepTables,
        step: &StepInput<'_>,
    ) -> Result<Outputs, ComputeError> {
        check_step(step, self.shape.vocab)?;
        let StepTables::Cuda(batch) = tables else { return Err(ComputeError::Elsewhere { what: "tables" }) };
        let layers = self.check_memory(kv, batch)?;
        let is_decode = !step.query.is_empty() && step.query.iter().all(|&tokens| tokens == 1);
        let work = if is_decode { Work::Decode } else { Work::Rows(step.query) };
        let new_blocks = batch.tables().plan(work)?.new_blocks;
        check_held(kv, batch.tables(), new_blocks)?;
        if step.tokens.is_empty() {
            batch.step(work, Padding::NONE)?;
            return Ok(Outputs { best: Vec::new(), logits: Logits { vocab: self.shape.vocab, data: Vec::new() } });
        }
        let gpu = std::sync::Arc::clone(&self.gpu);
        let _entered = gpu.enter()?;
        // SAFETY: the batch's stream, which lives as long as the batch that is borrowed here.
        let stream = unsafe { Stream::borrowed(&gpu, batch.stream().cast()) };
        // SAFETY: as above; every step sets it anew.
        unsafe { self.blas.use_stream(stream.raw()) }?;
        let _settled = Settled(&stream);
        if is_decode { self.decode(batch, &layers, step, &stream) } else { self.mixed(batch, &layers, step, &stream) }
    }

    /// Refuses memory and tables that kernels would misread.
    fn check_memory(&self, kv: &KvStore, batch: &CudaBatch) -> Result<Vec<DeviceLayer>, ComputeError> {
        let elsewhere = |what| Err(ComputeError::Elsewhere { what });
        let Some(layers) = kv.on_device() else { return elsewhere("keys and values") };
        let layers: Vec<DeviceLayer> = layers.collect();
        let (config, limits) = (batch.tables().shape().config(), self.buffers.limits);
        let is_ours = layers.len() == self.shape.layers
            && kv.element_bytes() == self.precision.bytes()
            && kv.token_elements() == self.shape.kv_size()
            && kv.block_tokens() == config.block_tokens as usize;
        let fits = config.max_rows <= limits.max_rows && config.max_step_tokens <= limits.max_step_tokens;
        if !is_ours {
            return elsewhere("keys and values");
        }
        if !fits || batch.gpu().device.number() != self.gpu.device.number() {
            return elsewhere("tables");
        }
        Ok(layers)
    }

    /// One token for every row.
    fn decode(
        &mut self,
        batch: &mut CudaBatch,
        layers: &[DeviceLayer],
        step: &StepInput<'_>,
        stream: &Stream,
    ) -> Result<Outputs, ComputeError> {
        let rows = u32::try_from(step.tokens.len()).expect("rows are counted in 32 bits");
        let padded = bucket(rows, batch.tables().shape().config().max_rows);
        let place = (batch.identity(), layers.first().map_or(0, |layer| layer.keys));
        if self.captured_for != Some(place) {
            self.graphs.clear();
            self.captured_for = Some(place);
        }
        self.buffers.set_tokens(step.tokens, padded);
        let padding = Padding::decode(padded);
        if let Some(graph) = self.graphs.get_mut(&padded) {
            batch.announce_decode(padding)?;
            // SAFETY: captured from this batch and for this memory; the weights, buffers and kernels it names live in `self`, and what moves
            // them clears the graphs. All of it is used on this stream alone.
            unsafe { graph.launch(stream) }?;
        } else {
            batch.step(Work::Decode, padding)?;
            self.enqueue_decode(batch, layers, padded, stream.raw())?;
            self.wait(stream)?;
            let raw: *mut c_void = stream.raw().cast();
            let graph = stream.capture(|| {
                // SAFETY: a stream of the primary context that is being captured; launched as said above.
                unsafe { batch.enqueue_decode(raw, padding) }?;
                self.enqueue_decode(batch, layers, padded, stream.raw())
            })?;
            self.graphs.insert(padded, graph);
        }
        self.wait(stream)?;
        let mut data = Vec::new();
        for wanted in step.wanted.iter().filter(|wanted| wanted.logits) {
            self.buffers.logits(wanted.token as usize, &mut data)?;
        }
        let best = self.buffers.best(padded as usize);
        let best = step.wanted.iter().map(|wanted| best[wanted.token as usize]).collect();
        Ok(Outputs { best, logits: Logits { vocab: self.shape.vocab, data } })
    }

    /// The layers of a decode step, and the choice of every row's next token.
    fn enqueue_decode(
        &mut self,
        batch: &CudaBatch,
        layers: &[DeviceLayer],
        padded: u32,
        stream: CUstream,
    ) -> Result<(), ComputeError> {
        let launch = Launch {
            stream,
            tokens: padded,
            tiles: padded,
            token_rows: 0,
            tiles_at: 0,
            metadata: batch.outputs(),
            layers,
            block_shift: batch.tables().shape().block_shift(),
        };
        self.enqueue_layers(&launch)?;
        self.enqueue_head(stream, 0, padded)
    }

    /// Any number of tokens for each row.
    fn mixed(
        &mut self,
        batch: &mut CudaBatch,
        layers: &[DeviceLayer],
        step: &StepInput<'_>,
        stream: &Stream,
    ) -> Result<Outputs, ComputeError> {
        let tokens = u32::try_from(step.tokens.len()).expect("a step's tokens are counted in 32 bits");
        let tile_tokens = self.attend.tile_tokens();
        let (mut token_rows, mut tiles) = (Vec::with_capacity(step.tokens.len()), Vec::new());
        for (row, &query) in (0..).zip(step.query) {
            token_rows.extend((0..query).map(|_| row));
            tiles.extend((0..query).step_by(tile_tokens as usize).flat_map(|first| [row, first]));
        }
        self.buffers.set_tokens(step.tokens, tokens);
        self.buffers.send_rows(&token_rows, &tiles, stream)?;
        batch.step(Work::Rows(step.query), Padding::NONE)?;
        let launch = Launch {
            stream: stream.raw(),
            tokens,
            tiles: u32::try_from(tiles.len() / 2).expect("not more than tokens"),
            token_rows: self.buffers.at.token_rows,
            tiles_at: self.buffers.at.tiles,
            metadata: batch.outputs(),
            layers,
            block_shift: batch.tables().shape().block_shift(),
        };
        self.enqueue_layers(&launch)?;
        let (mut best, mut data) = (Vec::with_capacity(step.wanted.len()), Vec::new());
        // There is room for the logits of so many.
        for wanted in step.wanted.chunks(self.buffers.limits.max_rows as usize) {
            let indices: Vec<u32> = wanted.iter().map(|wanted| wanted.token).collect();
            self.buffers.send_wanted(&indices, stream)?;
            let rows = u32::try_from(wanted.len()).expect("not more than rows");
            self.enqueue_head(stream.raw(), self.buffers.at.wanted, rows)?;
            self.wait(stream)?;
            for (row, _) in wanted.iter().enumerate().filter(|(_, wanted)| wanted.logits) {
                self.buffers.logits(row, &mut data)?;
            }
            best.extend_from_slice(self.buffers.best(wanted.len()));
        }
        self.wait(stream)?;
        Ok(Outputs { best, logits: Logits { vocab: self.shape.vocab, data } })
    }

    /// Waits for everything that was put on the stream.
    fn wait(&self, stream: &Stream) -> Result<(), ComputeError> {
        self.done.record(stream)?;
        Ok(self.done.wait()?)
    }

    /// From tokens to states.
    fn enqueue_layers(&mut self, launch: &Launch<'_>) -> Result<(), ComputeError> {
        let (base, at, shape) = (self.weights.base()?, self.buffers.at, self.shape.clone());
        let (stream, tokens) = (launch.stream, launch.tokens);
        let size = |value: usize| u32::try_from(value).expect("sizes of models are below 2^24");
        let (hidden, intermediate) = (size(shape.hidden), size(shape.intermediate));
        let or_none = |offset: Option<u64>| offset.map_or(0, |offset| base + offset);
        let element = self.element();
        let embedding = base + self.weights.embedding;
        // SAFETY, of every launch here: weights, buffers, tables and outputs are on the device, made for this model's sizes and for at
        // least so many tokens, and belong to this step alone until it is over, which `step` waits for. Blocks of all rows are held
        // (`check_held`), so their pages are mapped until then.
        // SAFETY: as just said; tokens were checked to be in the vocabulary.
        unsafe { self.kernels.embed(stream, at.state, embedding, at.tokens, tokens, hidden) }?;
        for (index, kv) in launch.layers.iter().enumerate() {
            let layer = self.weights.layers[index];
            let norm = |weight: u64| (base + weight, shape.norm_epsilon);
            let (weight, epsilon) = norm(layer.attention_norm);
            // SAFETY: as above.
            unsafe { self.kernels.norm(stream, at.normed, at.state, weight, 0, tokens, hidden, epsilon) }?;
            // SAFETY: as above.
            unsafe { self.multiply(stream, at.normed, layer.qkv, at.qkv, element, tokens, false) }?;
            let rope = Rope {
                qkv: at.qkv,
                keys: kv.keys,
                values: kv.values,
                frequencies: base + self.weights.frequencies,
                bias: or_none(layer.qkv.bias),
                query_norm: or_none(layer.query_norm),
                key_norm: or_none(layer.key_norm),
                slot_mapping: launch.metadata.slot_mapping.address,
                context_lens: launch.metadata.context_lens.address,
                query_start_loc: launch.metadata.query_start_loc.address,
                token_rows: launch.token_rows,
                heads: size(shape.heads),
                kv_heads: size(shape.kv_heads),
                head_size: size(shape.head_size),
                epsilon,
            };
            // SAFETY: as above.
            unsafe { self.kernels.rope(stream, &rope, tokens) }?;
            // SAFETY: as above.
            unsafe { self.enqueue_attention(launch, kv) }?;
            // SAFETY: as above.
            unsafe { self.add_product(stream, at.attended, layer.output, tokens) }?;
            let (weight, epsilon) = norm(layer.feed_norm);
            // SAFETY: as above.
            unsafe { self.kernels.norm(stream, at.normed, at.state, weight, 0, tokens, hidden, epsilon) }?;
            let bias = or_none(layer.gate_up.bias);
            if self.is_one(tokens, layer.gate_up) {
                let (weight, sizes) = (base + layer.gate_up.weight, (hidden, intermediate));
                // SAFETY: as above.
                unsafe { self.kernels.one_gate(stream, at.gated, at.normed, weight, bias, sizes) }?;
            } else {
                // SAFETY: as above.
                unsafe { self.multiply(stream, at.normed, layer.gate_up, at.gate_up, element, tokens, false) }?;
                // SAFETY: as above.
                unsafe { self.kernels.gate(stream, at.gated, at.gate_up, bias, tokens, intermediate) }?;
            }
            // SAFETY: as above.
            unsafe { self.add_product(stream, at.gated, layer.down, tokens) }?;
        }
        Ok(())
    }

    /// # Safety
    /// As the launches of `enqueue_layers`.
    unsafe fn enqueue_attention(&self, launch: &Launch<'_>, kv: &DeviceLayer) -> Result<(), ComputeError> {
        let (at, shape) = (self.buffers.at, &self.shape);
        #[expect(clippy::cast_precision_loss, reason = "heads are small")]
        let scale = 1.0 / (shape.head_size as f32).sqrt();
        let attention = Attention {
            queries: at.qkv,
            out: at.attended,
            keys: kv.keys,
            values: kv.values,
            table: launch.metadata.block_tables.address,
            context_lens: launch.metadata.context_lens.address,
            query_start_loc: launch.metadata.query_start_loc.address,
            tiles: launch.tiles_at,
            token_rows: launch.token_rows,
            partial: at.partial,
            query_stride: (shape.query_size() + 2 * shape.kv_size()) as u64,
            block_stride: (shape.kv_size() as u64) << launch.block_shift,
            token_stride: shape.kv_size() as u64,
            table_stride: launch.metadata.block_tables.strides[0].cast_unsigned(),
            heads: 0,
            kv_heads: 0,
            head_size: 0,
            block_shift: launch.block_shift,
            splits: self.attend.splits(launch.tiles),
            scale,
        };
        // SAFETY: the caller's promise.
        Ok(unsafe { self.attend.launch(launch.stream, &attention, launch.tokens, launch.tiles) }?)
    }

    /// The logits and choices of so many tokens, by their indices at `wanted` or (0) of the first.
    fn enqueue_head(&mut self, stream: CUstream, wanted: u64, rows: u32) -> Result<(), ComputeError> {
        let (base, at, head) = (self.weights.base()?, self.buffers.at, self.weights.head);
        let (norm, epsilon) = (base + self.weights.norm, self.shape.norm_epsilon);
        // SAFETY: as in `enqueue_layers`; wanted indices were checked to be tokens of the step.
        unsafe { self.kernels.norm(stream, at.normed, at.state, norm, wanted, rows, head.inputs, epsilon) }?;
        // SAFETY: as there.
        unsafe { self.multiply(stream, at.normed, head, at.logits, Element::F32, rows, false) }?;
        if let Some(bias) = head.bias {
            // SAFETY: as there.
            unsafe { self.kernels.bias(stream, at.logits, base + bias, rows, head.outputs) }?;
        }
        // SAFETY: as there.
        Ok(unsafe { self.kernels.best(stream, at.best, at.parts, at.logits, rows, head.outputs) }?)
    }

    fn element(&self) -> Element {
        match self.precision {
            Precision::Bf16 => Element::Bf16,
            Precision::F32 => Element::F32,
        }
    }

    /// `state += input * weight + bias`.
    ///
    /// # Safety
    /// As the launches of `enqueue_layers`.
    unsafe fn add_product(
        &mut self,
        stream: CUstream,
        input: u64,
        dense: DenseAt,
        tokens: u32,
    ) -> Result<(), ComputeError> {
        let state = self.buffers.at.state;
        // SAFETY: the caller's promise.
        unsafe { self.multiply(stream, input, dense, state, Element::F32, tokens, true) }?;
        if let Some(bias) = dense.bias {
            let bias = self.weights.base()? + bias;
            // SAFETY: the caller's promise.
            unsafe { self.kernels.bias(stream, state, bias, tokens, dense.outputs) }?;
        }
        Ok(())
    }

    /// Whether our own kernels are faster than the library: a lone row costs one reading of the weights.
    fn is_one(&self, rows: u32, dense: DenseAt) -> bool {
        rows == 1 && self.precision == Precision::Bf16 && dense.inputs.is_multiple_of(8)
    }

    /// A product, by whoever is faster.
    ///
    /// # Safety
    /// As the launches of `enqueue_layers`.
    #[expect(clippy::too_many_arguments, reason = "a product has three arrays")]
    unsafe fn multiply(
        &mut self,
        stream: CUstream,
        input: u64,
        dense: DenseAt,
        out: u64,
        out_element: Element,
        rows: u32,
        add: bool,
    ) -> Result<(), ComputeError> {
        let DenseAt { weight, inputs, outputs, .. } = dense;
        let (weight, element) = (self.weights.base()? + weight, self.element());
        let product = Product { input, weight, element, out, out_element, rows, inputs, outputs, add };
        if self.is_one(rows, dense) {
            // SAFETY: the caller's promise; the shape is one that it takes.
            Ok(unsafe { self.kernels.one(stream, &product) }?)
        } else {
            // SAFETY: the caller's promise.
            unsafe { self.blas.multiply(&product) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_batch_fits_its_graph_and_graphs_are_few() {
        for most in [1, 3, 8, 60, 256, 1000] {
            let buckets: std::collections::BTreeSet<u32> = (1..=most).map(|rows| bucket(rows, most)).collect();
            assert!((1..=most).all(|rows| bucket(rows, most) >= rows && bucket(rows, most) <= most));
            assert!(buckets.len() <= 12 + most as usize / 32, "{most}: {buckets:?}");
        }
    }
}
