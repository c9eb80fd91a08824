//! How fast decode attention reads the pool: `cuda_attention [ROWS] [TOKENS]`.
//!
//! The shape of Llama 3.1 8B, `ROWS` rows (64) of `TOKENS` tokens (4,096) in each of the pool's layouts, beside a kernel that only reads
//! memory, on the same card in the same run. Bytes are counted once: every key and value of every layer.

#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

use std::sync::Arc;
use std::time::Duration;

use tidekv_core::geometry::{Capacity, ChunkChoice, GeometryConfig, Layout};
use tidekv_core::units::Bytes;
use tidekv_mem::Backend;
use tidekv_mem::cuda::{CudaBackend, CudaOptions};
use tidekv_pool::PoolConfig;
use tidekv_serve::compute::cuda::{AttentionProbe, Device};
use tidekv_serve::config::SyntheticSize;
use tidekv_serve::model::Model;
use tidekv_shm::{PoolName, RuntimeDir};

const BLOCK_TOKENS: u32 = 16;
const TIMES: usize = 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let rows: u32 = arguments.next().map_or(Ok(64), |text| text.parse())?;
    let tokens: u32 = arguments.next().map_or(Ok(4096), |text| text.parse())?;
    let device = Device::open(0)?;
    let read_bytes = Bytes::gib(8);
    let read = device.time_read(read_bytes, TIMES)?;
    println!("{:<24} {:>8.3} TB/s", "reading, nothing else", terabytes(read_bytes, read));
    let slab = |kib| (Layout::Slab, ChunkChoice::Bytes(Bytes::kib(kib)));
    for (name, (layout, chunk)) in [
        ("slab, chunks of 128 KiB", slab(128)),
        ("slab, chunks of 256 KiB", slab(256)),
        ("slab, chunks of 512 KiB", slab(512)),
        ("slab, chunks of 2 MiB", slab(2048)),
        ("per layer", (Layout::PerLayer, ChunkChoice::Bytes(Bytes::mib(2)))),
        ("interleaved", (Layout::Interleaved, ChunkChoice::Bytes(Bytes::mib(2)))),
    ] {
        let (bytes, time) = measure(&device, layout, chunk, rows, tokens)?;
        let speed = terabytes(bytes, time);
        println!("{name:<24} {speed:>8.3} TB/s   {:.3} of reading", speed / terabytes(read_bytes, read));
    }
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "a figure to print")]
fn terabytes(bytes: Bytes, time: Duration) -> f64 {
    bytes.0 as f64 / time.as_secs_f64() / 1e12
}

fn measure(
    device: &Device,
    layout: Layout,
    chunk: ChunkChoice,
    rows: u32,
    tokens: u32,
) -> Result<(Bytes, Duration), Box<dyn std::error::Error>> {
    let dir = tempfile::tempdir()?;
    let shape = Model::sketch(SyntheticSize::Llama8b, 0).shape;
    let backend = CudaBackend::open(CudaOptions::default())?;
    let blocks = rows * tokens.div_ceil(BLOCK_TOKENS);
    let budget = Bytes(u64::from(blocks + 4096) * u64::from(BLOCK_TOKENS) * shape.kv_size() as u64 * 2 * 2 * 32);
    let geometry = GeometryConfig {
        shape: shape.kv_shape_of(2, BLOCK_TOKENS),
        layout,
        granularity: backend.capabilities().granularity,
        chunk,
        capacity: Capacity::Budget(budget),
    };
    let mut config = PoolConfig::new(PoolName::new("attention")?, Arc::new(backend), geometry);
    config.runtime_dir = RuntimeDir::at(dir.path());
    config.budget = Some(budget);
    let probe = AttentionProbe::open(device, &shape, config, rows, tokens)?;
    let time = probe.time(TIMES)?;
    Ok((probe.bytes(), time))
}
