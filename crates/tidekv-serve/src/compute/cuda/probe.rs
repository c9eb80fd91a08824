//! Floors: what benchmarks compare a step with, on the same card in the same run.

use std::sync::Arc;
use std::time::Duration;

use tidekv_batch::cuda::gpu::{Event, Gpu, Stream};
use tidekv_core::units::{Buffer, Bytes, LayerIndex};
use tidekv_mem::cuda::DeviceMemory;
use tidekv_pool::{KvPool, PoolConfig};

use super::attention::{Attend, Attention};
use super::kernels::Kernels;
use super::weights::Places;
use super::{CudaCompute, Device};
use crate::compute::ComputeError;
use crate::config::Precision;
use crate::model::ModelShape;

impl Device {
    /// How long it takes to read so many bytes of the card once, with a kernel that does nothing else: the median of so many times.
    ///
    /// # Errors
    /// What the driver says.
    pub fn time_read(&self, bytes: Bytes, times: usize) -> Result<Duration, ComputeError> {
        let kernels = Kernels::load(&self.gpu, Precision::Bf16)?;
        let from = DeviceMemory::zeroed(&self.gpu.device, bytes)?;
        let out = DeviceMemory::zeroed(&self.gpu.device, Bytes(16))?;
        time(&self.gpu, times, |stream| {
            // SAFETY: two allocations of our own, which live until `time` has waited.
            Ok(unsafe { kernels.read(stream.raw(), out.address(), from.address(), bytes.0) }?)
        })
    }
}

/// The attention of one decode step of bf16 over the pages of a pool in any layout, layer by layer, and nothing else.
#[derive(Debug)]
pub struct AttentionProbe {
    attend: Attend,
    launches: Vec<Attention>,
    rows: u32,
    bytes: Bytes,
    gpu: Arc<Gpu>,
    _memory: DeviceMemory,
    /// Nobody else has a handle of it, so every block stays leased, and its page mapped, as long as this value.
    _pool: KvPool,
}

impl AttentionProbe {
    /// Opens a pool and takes blocks for rows of `tokens` tokens each, of which the newest attends to all.
    ///
    /// # Errors
    /// What the pool and the driver say; memory that is not the device's.
    pub fn open(
        device: &Device,
        shape: &ModelShape,
        config: PoolConfig,
        rows: u32,
        tokens: u32,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let pool = KvPool::open(config)?;
        let geometry = *pool.geometry();
        let block_tokens = geometry.shape().block_tokens;
        let reservation = pool.reservation().filter(|memory| !memory.backend().capabilities().host_accessible);
        let base = reservation.ok_or(ComputeError::Elsewhere { what: "keys and values" })?.base_address();
        let blocks = tokens.div_ceil(block_tokens);
        let mut leases = Vec::new();
        pool.alloc_within(rows * blocks, Duration::ZERO, &mut leases)?;
        let mut tables = vec![Vec::with_capacity(blocks as usize); rows as usize];
        // Rows grow in turn, as they do when they are served together.
        for (index, &lease) in leases.iter().enumerate() {
            tables[index % rows as usize].push(i32::try_from(pool.kernel_id(lease)?.0)?);
        }
        let gpu = Arc::clone(&device.gpu);
        let attend = Attend::load(&gpu, Precision::Bf16, shape)?;
        let mut places = Places::default();
        let [queries, out] = [0; 2].map(|_: u8| places.take(u64::from(rows) * shape.query_size() as u64 * 2));
        let partial = places.take(attend.partial_bytes().0);
        let [table, lens, starts] = [rows * blocks, rows, rows + 1].map(|words| places.take(u64::from(words) * 4));
        let memory = DeviceMemory::zeroed(&gpu.device, places.bytes())?;
        let write = |at: u64, words: &[i32]| {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            // SAFETY: nobody knows this memory yet.
            unsafe { memory.write_at(at, &bytes) }
        };
        write(table, &tables.concat())?;
        write(lens, &vec![i32::try_from(tokens)? - 1; rows as usize])?;
        write(starts, &(0..=i32::try_from(rows)?).collect::<Vec<_>>())?;
        #[expect(clippy::cast_precision_loss, reason = "heads are small")]
        let scale = 1.0 / (shape.head_size as f32).sqrt();
        let at = |offset: u64| memory.address() + offset;
        let mut launches = Vec::new();
        for layer in 0..geometry.shape().layers {
            let view = |buffer| geometry.layer_view(LayerIndex(layer), buffer);
            let (keys, values) = (view(Buffer::Key)?, view(Buffer::Value)?);
            launches.push(Attention {
                queries: at(queries),
                out: at(out),
                keys: base + keys.offset.0,
                values: base + values.offset.0,
                table: at(table),
                context_lens: at(lens),
                query_start_loc: at(starts),
                tiles: 0,
                token_rows: 0,
                partial: at(partial),
                query_stride: shape.query_size() as u64,
                block_stride: keys.id_stride.0 / u64::from(Precision::Bf16.bytes()),
                token_stride: shape.kv_size() as u64,
                table_stride: u64::from(blocks),
                heads: 0,
                kv_heads: 0,
                head_size: 0,
                block_shift: block_tokens.trailing_zeros(),
                splits: attend.splits(rows),
                scale,
            });
        }
        let token_bytes = 2 * shape.kv_size() as u64 * u64::from(Precision::Bf16.bytes());
        let bytes = Bytes(u64::from(rows) * u64::from(tokens) * token_bytes * launches.len() as u64);
        Ok(Self { attend, launches, rows, bytes, gpu, _memory: memory, _pool: pool })
    }

    /// Keys and values that a step reads.
    pub fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// The device's time for all layers: the median of so many times.
    ///
    /// # Errors
    /// What the driver says.
    pub fn time(&self, times: usize) -> Result<Duration, ComputeError> {
        time(&self.gpu, times, |stream| {
            for launch in &self.launches {
                // SAFETY: memory and blocks of our own, which live and are mapped until `time` has waited.
                unsafe { self.attend.launch(stream.raw(), launch, self.rows, self.rows) }?;
            }
            Ok(())
        })
    }
}

impl CudaCompute {
    /// How long it takes to read the weights once, with a kernel that does nothing else: the median of so many times.
    ///
    /// # Errors
    /// What the driver says; weights that are parked.
    pub fn time_weight_read(&self, times: usize) -> Result<Duration, ComputeError> {
        let from = self.weights.base()?;
        let out = DeviceMemory::zeroed(&self.gpu.device, Bytes(16))?;
        time(&self.gpu, times, |stream| {
            // SAFETY: the weights' own memory, which nothing writes to, and a word of our own.
            Ok(unsafe { self.kernels.read(stream.raw(), out.address(), from, self.weights.bytes().0) }?)
        })
    }
}

/// The device's time for what `enqueue` puts on a stream: the median of so many times, behind one that does not count.
pub(super) fn time(
    gpu: &Arc<Gpu>,
    times: usize,
    enqueue: impl Fn(&Stream) -> Result<(), ComputeError>,
) -> Result<Duration, ComputeError> {
    let stream = Stream::new(gpu)?;
    let _entered = gpu.enter()?;
    let (start, end) = (Event::with_time(gpu)?, Event::with_time(gpu)?);
    enqueue(&stream)?;
    stream.synchronise()?;
    let mut micros = Vec::with_capacity(times);
    for _ in 0..times.max(1) {
        start.record(&stream)?;
        enqueue(&stream)?;
        end.record(&stream)?;
        end.wait()?;
        micros.push(end.micros_since(&start)?);
    }
    micros.sort_unstable_by(f64::total_cmp);
    Ok(Duration::from_secs_f64(micros[micros.len() / 2] / 1e6))
}
