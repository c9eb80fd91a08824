//! A model's weights on the device: one allocation, filled from the host's matrices or by the device itself from a seed.
//!
//! ```text
//!   memory  [ norm | frequencies | qkv 0 | output 0 | gate_up 0 | down 0 | ... | head | embedding ]     each on a boundary of 256 bytes
//! ```
//!
//! Products read a weight output by output, so it lies as `[outputs, inputs]`, the transpose of the host's. Matrices have the
//! elements of the precision; norms, biases and frequencies are floats. Places are kept as offsets: [`park`](DeviceWeights::park) moves all of it to the
//! host in one piece, and it may come back to another address.

use std::sync::Arc;

use tidekv_batch::cuda::gpu::{Gpu, Stream};
use tidekv_core::units::Bytes;
use tidekv_mem::MemError;
use tidekv_mem::cuda::DeviceMemory;
use tidekv_mem::host::BulkMemory;

use super::carry::{carry_in, carry_out};
use super::kernels::Kernels;
use crate::compute::ComputeError;
use crate::config::Precision;
use crate::model::{Draw, Embedding, Layer, Linear, Matrix, ModelShape, Weights};

/// Parts begin here, as `cudaMalloc` would align them.
const ALIGNMENT: u64 = 256;
/// Floats of the host go through so many bytes of the device.
const PIECE: usize = 64 << 20;

/// Gives places in one allocation, one behind the other.
#[derive(Debug, Default)]
pub(super) struct Places {
    end: u64,
}

impl Places {
    pub(super) fn take(&mut self, bytes: u64) -> u64 {
        let at = self.end;
        self.end = (at + bytes).next_multiple_of(ALIGNMENT);
        at
    }

    pub(super) fn bytes(&self) -> Bytes {
        Bytes(self.end)
    }
}

/// A matrix that the device can be given.
pub(super) trait Source {
    /// How many rows, and elements of each.
    fn size(&self) -> (usize, usize);

    /// Puts the numbers at `out`, turned: `[columns, rows]`, or as they are.
    ///
    /// # Safety
    /// `out` has room for them, and nothing else uses it.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn write(&self, filler: &Filler<'_>, out: u64, turned: bool) -> Result<(), MemError>;
}

/// What writes matrices.
#[derive(Debug)]
pub(super) struct Filler<'a> {
    kernels: &'a Kernels,
    stream: &'a Stream,
    /// For floats on their way.
    piece: DeviceMemory,
}

impl Source for Draw {
    fn size(&self) -> (usize, usize) {
        (self.rows, self.columns)
    }

    unsafe fn write(&self, filler: &Filler<'_>, out: u64, turned: bool) -> Result<(), MemError> {
        // SAFETY: the caller's promise.
        unsafe { filler.kernels.fill(filler.stream.raw(), out, self, turned) }
    }
}

impl Source for Matrix {
    fn size(&self) -> (usize, usize) {
        (self.rows, self.columns)
    }

    unsafe fn write(&self, filler: &Filler<'_>, out: u64, turned: bool) -> Result<(), MemError> {
        let rows_at_once = (PIECE / (self.columns * size_of::<f32>())).max(1);
        let size = (self.rows as u64, self.columns as u64);
        for (index, rows) in self.data.chunks(rows_at_once * self.columns).enumerate() {
            // SAFETY: every write before was waited for, so nothing uses the piece.
            unsafe { filler.piece.write_at(0, as_bytes(rows)) }?;
            let (first, count) = ((index * rows_at_once) as u64, (rows.len() / self.columns) as u64);
            let (stream, piece) = (filler.stream.raw(), filler.piece.address());
            // SAFETY: the piece holds `count` rows until the launch is over, which is waited for; `out` is the caller's promise.
            unsafe { filler.kernels.convert(stream, out, piece, size, first, count, turned) }?;
            filler.stream.synchronise()?;
        }
        Ok(())
    }
}

/// Where a product's numbers are: offsets.
#[derive(Clone, Copy, Debug)]
pub(super) struct DenseAt {
    pub(super) weight: u64,
    pub(super) bias: Option<u64>,
    pub(super) inputs: u32,
    pub(super) outputs: u32,
}

/// Where a layer's numbers are: offsets.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerAt {
    pub(super) attention_norm: u64,
    pub(super) qkv: DenseAt,
    pub(super) query_norm: Option<u64>,
    pub(super) key_norm: Option<u64>,
    pub(super) output: DenseAt,
    pub(super) feed_norm: u64,
    pub(super) gate_up: DenseAt,
    pub(super) down: DenseAt,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct DeviceWeights {
    home: Home,
    bytes: Bytes,
    pub(super) layers: Vec<LayerAt>,
    pub(super) embedding: u64,
    pub(super) norm: u64,
    pub(super) head: DenseAt,
    pub(super) frequencies: u64,
}

#[derive(Debug)]
enum Home {
    Device(DeviceMemory),
    Host(BulkMemory),
}

/// Numbers and the offset that they belong to.
enum Part<M> {
    /// And whether it is turned.
    Matrix(u64, M, bool),
    Vector(u64, Vec<f32>),
}

/// Gives every part of a model its place.
struct Planner<M> {
    places: Places,
    parts: Vec<Part<M>>,
    element_bytes: u64,
}

impl<M: Source> Planner<M> {
    fn vector(&mut self, numbers: Vec<f32>) -> u64 {
        let at = self.places.take(size_of_val(&numbers[..]) as u64);
        self.parts.push(Part::Vector(at, numbers));
        at
    }

    fn matrix(&mut self, matrix: M, turned: bool) -> u64 {
        let (rows, columns) = matrix.size();
        let at = self.places.take(rows as u64 * columns as u64 * self.element_bytes);
        self.parts.push(Part::Matrix(at, matrix, turned));
        at
    }

    fn dense(&mut self, linear: Linear<M>) -> DenseAt {
        let (inputs, outputs) = linear.weight.size();
        let size = |count: usize| u32::try_from(count).expect("sizes of models are below 2^24");
        let bias = linear.bias.map(|bias| self.vector(bias));
        DenseAt { weight: self.matrix(linear.weight, true), bias, inputs: size(inputs), outputs: size(outputs) }
    }
}

impl DeviceWeights {
    /// Puts a model's numbers on the device; complete when it returns.
    pub(super) fn new<M: Source>(
        gpu: &Arc<Gpu>,
        kernels: &Kernels,
        precision: Precision,
        shape: &ModelShape,
        weights: Weights<M>,
    ) -> Result<Self, ComputeError> {
        let places = Places::default();
        let mut planner = Planner { places, parts: Vec::new(), element_bytes: precision.bytes().into() };
        let norm = planner.vector(weights.norm);
        let frequencies = planner.vector(shape.rope.frequencies(shape.head_size));
        let layer = |layer: Layer<M>| LayerAt {
            attention_norm: planner.vector(layer.attention_norm),
            qkv: planner.dense(layer.qkv),
            query_norm: layer.query_norm.map(|norm| planner.vector(norm)),
            key_norm: layer.key_norm.map(|norm| planner.vector(norm)),
            output: planner.dense(layer.output),
            feed_norm: planner.vector(layer.feed_norm),
            gate_up: planner.dense(layer.gate_up),
            down: planner.dense(layer.down),
        };
        let layers = weights.layers.into_iter().map(layer).collect();
        let head = planner.dense(weights.head);
        // The head lies as `[vocab, hidden]`, as an embedding does: a tied model has one matrix for both.
        let embedding = match weights.embedding {
            Embedding::Own(matrix) => planner.matrix(matrix, false),
            Embedding::Tied => head.weight,
        };
        let memory = DeviceMemory::zeroed(&gpu.device, planner.places.bytes())?;
        let stream = Stream::new(gpu)?;
        let piece = DeviceMemory::zeroed(&gpu.device, Bytes(PIECE as u64))?;
        let filler = Filler { kernels, stream: &stream, piece };
        let _entered = gpu.enter()?;
        for part in planner.parts {
            match part {
                // SAFETY: nobody knows this memory yet, and the place was made for the matrix.
                Part::Matrix(at, matrix, turned) => unsafe {
                    matrix.write(&filler, memory.address() + at, turned)?;
                },
                // SAFETY: nobody knows this memory yet.
                Part::Vector(at, numbers) => unsafe { memory.write_at(at, as_bytes(&numbers)) }?,
            }
        }
        stream.synchronise()?;
        let bytes = memory.bytes();
        Ok(Self { home: Home::Device(memory), bytes, layers, embedding, norm, head, frequencies })
    }

    /// Where offsets begin on the device.
    pub(super) fn base(&self) -> Result<u64, ComputeError> {
        match &self.home {
            Home::Device(memory) => Ok(memory.address()),
            Home::Host(_) => Err(ComputeError::Parked),
        }
    }

    pub(super) fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// What of it is in host memory.
    pub(super) fn parked_bytes(&self) -> Bytes {
        match self.home {
            Home::Device(_) => Bytes::ZERO,
            Home::Host(_) => self.bytes,
        }
    }

    /// Moves everything to host memory and gives the device's back. No work uses it: the caller has waited. Where the host has no room for
    /// it, or anything else fails, it stays where it is.
    pub(super) fn park(&mut self, gpu: &Arc<Gpu>) -> Result<(), ComputeError> {
        let Home::Device(memory) = &self.home else { return Ok(()) };
        let mut bytes = BulkMemory::take(self.bytes).map_err(ComputeError::NoRoomToPark)?;
        // SAFETY: all of the allocation, and the caller's promise.
        unsafe { carry_out(gpu, memory.address(), bytes.as_mut_slice()) }?;
        self.home = Home::Host(bytes);
        Ok(())
    }

    /// Moves it back, and gives the host's memory back.
    pub(super) fn unpark(&mut self, gpu: &Arc<Gpu>) -> Result<(), ComputeError> {
        let Home::Host(bytes) = &self.home else { return Ok(()) };
        let memory = DeviceMemory::zeroed(&gpu.device, self.bytes)?;
        // SAFETY: nobody knows this memory yet.
        unsafe { carry_in(gpu, bytes.as_slice(), memory.address()) }?;
        self.home = Home::Device(memory);
        Ok(())
    }
}

/// Floats as what they are in memory.
fn as_bytes(numbers: &[f32]) -> &[u8] {
    // SAFETY: every byte of a float is a byte, and the borrow is the same.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}
