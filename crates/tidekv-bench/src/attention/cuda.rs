//! The card: attention of `tidekv-serve` over pools of every layout.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use tidekv_core::geometry::{Capacity, ChunkChoice, Geometry, GeometryConfig};
use tidekv_core::units::Bytes;
use tidekv_mem::Backend;
use tidekv_mem::cuda::{CudaBackend, CudaOptions};
use tidekv_serve::compute::cuda::{AttentionProbe, Device, PlainMemory};
use tidekv_serve::config::{ModelSource, Precision};
use tidekv_serve::model::{Model, ModelShape};

use super::measure::{Attention, Card, Plain};
use super::{Cell, Plan, Variant};
use crate::host::HostInfo;
use crate::lab::Lab;

/// A GPU, and the shape of the model whose cache it reads.
#[derive(Debug)]
pub(super) struct CudaCard {
    device: Device,
    backend: Arc<CudaBackend>,
    shape: ModelShape,
    block_tokens: u32,
}

impl CudaCard {
    pub(super) fn open(plan: &Plan) -> anyhow::Result<Self> {
        let shape = match plan.model.parse()? {
            ModelSource::Synthetic { size, seed } => Model::sketch(size, seed).shape,
            ModelSource::Folder(_) => bail!(
                "--model is {:?}: attention needs only a shape, and knows those of synthetic models such as synthetic:llama-8b",
                plan.model
            ),
        };
        let device = Device::open(plan.device).context("attention is measured on a GPU")?;
        let backend = CudaBackend::open(CudaOptions { device: plan.device, ..CudaOptions::default() })?;
        Ok(Self { device, backend: Arc::new(backend), shape, block_tokens: plan.block_size })
    }
}

impl Card for CudaCard {
    fn host(&self) -> HostInfo {
        HostInfo::with_backend(self.backend.capabilities())
    }

    fn kv_bytes(&self, cell: Cell) -> Bytes {
        let token = 2 * self.shape.kv_size() as u64 * self.shape.layers as u64 * u64::from(Precision::Bf16.bytes());
        Bytes(u64::from(cell.batch) * u64::from(cell.context) * token)
    }

    fn free(&self) -> anyhow::Result<Bytes> {
        Ok(self.backend.memory()?.free)
    }

    fn plain(&self, bytes: Bytes) -> anyhow::Result<Box<dyn Plain>> {
        Ok(Box::new(PlainMemory::open(&self.device, bytes)?))
    }

    fn attention(&self, cell: Cell, variant: Variant) -> anyhow::Result<Box<dyn Attention>> {
        let lab = Lab::new()?;
        let config = |capacity| GeometryConfig {
            shape: self.shape.kv_shape_of(Precision::Bf16.bytes(), self.block_tokens),
            layout: variant.layout,
            granularity: self.backend.capabilities().granularity,
            chunk: ChunkChoice::Bytes(variant.chunk),
            capacity,
        };
        let one_page = Geometry::new(&config(Capacity::Pages(1))).with_context(|| format!("{variant}"))?;
        let blocks = cell.batch * cell.context.div_ceil(self.block_tokens);
        let pages = blocks.div_ceil(one_page.blocks_per_page());
        let budget = Bytes(one_page.page_bytes().0 * u64::from(pages));
        let pool = lab.config(Arc::<CudaBackend>::clone(&self.backend), config(Capacity::Pages(pages)), budget);
        let probe = AttentionProbe::open(&self.device, &self.shape, pool, cell.batch, cell.context);
        let probe = probe.map_err(|error| anyhow::anyhow!("{cell}, {variant}: {error}"))?;
        Ok(Box::new(CudaAttention { probe, page_bytes: one_page.page_bytes(), _lab: lab }))
    }
}

impl Plain for PlainMemory {
    fn bytes(&self) -> Bytes {
        self.bytes()
    }

    fn time_read(&self) -> anyhow::Result<Duration> {
        Ok(self.time_read()?)
    }

    fn time_copy(&self) -> anyhow::Result<Duration> {
        Ok(self.time_copy()?)
    }
}

struct CudaAttention {
    probe: AttentionProbe,
    page_bytes: Bytes,
    /// Behind the pool: its folder goes last.
    _lab: Lab,
}

impl Attention for CudaAttention {
    fn page_bytes(&self) -> Bytes {
        self.page_bytes
    }

    fn time(&self) -> anyhow::Result<Duration> {
        Ok(self.probe.time()?)
    }
}
