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

/// Plain memory of the card: how fast it can be read at all, and copied.
#[derive(Debug)]
pub struct PlainMemory {
    kernels: Kernels,
    bytes: Bytes,
    from: DeviceMemory,
    to: DeviceMemory,
    out: DeviceMemory,
    clock: Clock,
}

impl PlainMemory {
    /// Takes so many bytes twice.
    ///
    /// # Errors
    /// What the driver says, also where the card has not so much.
    pub fn open(device: &Device, bytes: Bytes) -> Result<Self, ComputeError> {
        let gpu = &device.gpu;
        let zeroed = |bytes| DeviceMemory::zeroed(&gpu.device, bytes);
        Ok(Self {
            kernels: Kernels::load(gpu, Precision::Bf16)?,
            bytes,
            from: zeroed(bytes)?,
            to: zeroed(bytes)?,
            out: zeroed(Bytes(16))?,
            clock: Clock::new(gpu)?,
        })
    }

    /// What is read, or copied, each time.
    pub fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// The device's time to read all of it once, with a kernel that does nothing else.
    ///
    /// # Errors
    /// What the driver says.
    pub fn time_read(&self) -> Result<Duration, ComputeError> {
        self.clock.time(|stream| {
            // SAFETY: two allocations of our own, which live until the clock has waited.
            Ok(unsafe { self.kernels.read(stream.raw(), self.out.address(), self.from.address(), self.bytes.0) }?)
        })
    }

    /// The device's time to copy all of it once, by the driver: every byte is read and written.
    ///
    /// # Errors
    /// What the driver says.
    pub fn time_copy(&self) -> Result<Duration, ComputeError> {
        let bytes = usize::try_from(self.bytes.0).expect("64 bits");
        self.clock.time(|stream| {
            // SAFETY: as above; two allocations do not overlap.
            Ok(unsafe { stream.copy_within(self.to.address(), self.from.address(), bytes) }?)
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
    clock: Clock,
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
        Ok(Self { attend, launches, rows, bytes, clock: Clock::new(&gpu)?, _memory: memory, _pool: pool })
    }

    /// Keys and values that a step reads.
    pub fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// The device's time for all layers.
    ///
    /// # Errors
    /// What the driver says.
    pub fn time(&self) -> Result<Duration, ComputeError> {
        self.clock.time(|stream| {
            for launch in &self.launches {
                // SAFETY: memory and blocks of our own, which live and are mapped until the clock has waited.
                unsafe { self.attend.launch(stream.raw(), launch, self.rows, self.rows) }?;
            }
            Ok(())
        })
    }
}

impl CudaCompute {
    /// The device's time to read the weights once, with a kernel that does nothing else.
    ///
    /// # Errors
    /// What the driver says; weights that are parked.
    pub fn time_weight_read(&self) -> Result<Duration, ComputeError> {
        let from = self.weights.base()?;
        let out = DeviceMemory::zeroed(&self.gpu.device, Bytes(16))?;
        Clock::new(&self.gpu)?.time(|stream| {
            // SAFETY: the weights' own memory, which nothing writes to, and a word of our own.
            Ok(unsafe { self.kernels.read(stream.raw(), out.address(), from, self.weights.bytes().0) }?)
        })
    }
}

/// Times what is put on a stream of its own, by the device's clock.
#[derive(Debug)]
struct Clock {
    stream: Stream,
    start: Event,
    end: Event,
    gpu: Arc<Gpu>,
}

impl Clock {
    fn new(gpu: &Arc<Gpu>) -> Result<Self, ComputeError> {
        let (start, end) = (Event::with_time(gpu)?, Event::with_time(gpu)?);
        Ok(Self { stream: Stream::new(gpu)?, start, end, gpu: Arc::clone(gpu) })
    }

    /// The device's time for what `enqueue` puts on the stream, over when this returns, whatever it returns.
    fn time(&self, enqueue: impl FnOnce(&Stream) -> Result<(), ComputeError>) -> Result<Duration, ComputeError> {
        let _entered = self.gpu.enter()?;
        self.start.record(&self.stream)?;
        let enqueued = enqueue(&self.stream);
        let over = self.end.record(&self.stream).and_then(|()| self.stream.synchronise());
        enqueued?;
        over?;
        Ok(Duration::from_secs_f64(self.end.micros_since(&self.start)? / 1e6))
    }
}
