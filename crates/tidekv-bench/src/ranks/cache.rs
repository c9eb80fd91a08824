//! The KV cache that every rank reserves: the same model on each, over all memory of the rank's device.
//!
//! One page id has memory for a chunk of every layer's K and V, so a cache has `memory / layers / 2 / page size` of
//! them, where the page size is that of one layer's K or V (kvcached's page size). How many handles that takes is the
//! layout's business.

use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};
use tidekv_core::geometry::{Capacity, ChunkChoice, Geometry, GeometryConfig, KvShape, Layout};
use tidekv_core::units::Bytes;
use tidekv_mem::{Backend, BackendName, Capabilities, RegionOptions, Reservation};

use super::devices::DeviceMap;
use crate::lab::{ELEMENT_BYTES, GPU_GRANULARITY, HEAD_SIZE, KV_HEADS, LayoutName};

const MAX_LAYERS: u32 = 10_000;
const MAX_BLOCK_TOKENS: u32 = 1_000_000;

/// Flags about the cache and where it lies.
#[derive(Args, Clone, Debug)]
pub struct CacheArgs {
    /// Layers of the model (8 KV heads of 128, bf16)
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub num_layers: u32,

    /// Tokens in one block: changes how many blocks a page has, and which page slab chooses
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub block_size: u32,

    /// Layout of the cache: slab, per-layer, interleaved
    #[arg(long, value_name = "NAME", default_value = "slab")]
    pub layout: LayoutName,

    /// kvcached's name for --layout per-layer: one handle for each layer's K and V
    #[arg(long, conflicts_with = "layout")]
    pub not_contiguous: bool,

    /// MiB of one layer's K or V in a page [default: $KVCACHED_PAGE_SIZE_MB, else chosen by the layout]
    #[arg(long, value_name = "N")]
    pub page_size_mb: Option<String>,

    /// Memory to map: host, cuda, fake, or auto (cuda where there is a GPU)
    #[arg(long, value_name = "NAME", default_value_t = BackendName::Auto)]
    pub backend: BackendName,
}

/// The cache in words: what a rank is told to reserve, and what `args` of the result says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CacheSpec {
    /// `host`, `cuda` or `fake`.
    pub(crate) backend: String,
    pub(crate) num_layers: u32,
    pub(crate) block_size: u32,
    pub(crate) layout: String,
    /// Of one layer's K or V; `None` for the layout's own choice.
    pub(crate) page_size_bytes: Option<u64>,
}

/// The cache as it comes out on the devices at hand.
#[derive(Clone, Debug)]
pub(crate) struct CacheFacts {
    /// On the device with the least memory, where they differ.
    pub(crate) geometry: Geometry,
    /// Of that device.
    pub(crate) memory: Bytes,
    /// Of the first rank's device.
    pub(crate) capabilities: Capabilities,
}

impl CacheSpec {
    /// Checks the flags. `auto` is decided here, once for all ranks.
    pub(crate) fn of(args: &CacheArgs) -> anyhow::Result<Self> {
        let within = |flag, value, most| {
            ensure!((1..=most).contains(&value), "{flag} is {value}: give 1 to {most}");
            Ok(value)
        };
        let (from, text) = match &args.page_size_mb {
            Some(text) => ("--page-size-mb", Some(text.clone())),
            None => ("KVCACHED_PAGE_SIZE_MB", std::env::var("KVCACHED_PAGE_SIZE_MB").ok()),
        };
        let page_size = match ChunkChoice::from_page_size_mb(text.as_deref()).context(from)? {
            ChunkChoice::Auto => None,
            ChunkChoice::Bytes(bytes) => Some(bytes.0),
        };
        let layout = if args.not_contiguous { Layout::PerLayer } else { args.layout.0 };
        let backend = tidekv_mem::open(args.backend, 0)?;
        Ok(Self {
            backend: backend.capabilities().name.to_owned(),
            num_layers: within("--num-layers", args.num_layers, MAX_LAYERS)?,
            block_size: within("--block-size", args.block_size, MAX_BLOCK_TOKENS)?,
            layout: layout.name().to_owned(),
            page_size_bytes: page_size,
        })
    }

    pub(crate) fn backend_name(&self) -> anyhow::Result<BackendName> {
        self.backend.parse().map_err(anyhow::Error::msg)
    }

    /// Reserves the cache in this process: addresses for all memory of the device, and no memory.
    pub(crate) fn reserve(&self, device: u32) -> anyhow::Result<Reservation> {
        let backend = tidekv_mem::open(self.backend_name()?, device)?;
        let geometry = self.geometry(&*backend)?;
        Ok(Reservation::new(Arc::clone(&backend), *geometry.placement(), RegionOptions::default())?)
    }

    /// Looks at every device that a rank will work on. `pages_on` says how many pages its ranks hold at once.
    ///
    /// # Errors
    /// A device that cannot be opened, or with too little free memory for what will be mapped.
    pub(crate) fn look(&self, map: &DeviceMap, pages_on: impl Fn(&[usize]) -> u64) -> anyhow::Result<CacheFacts> {
        let mut smallest: Option<CacheFacts> = None;
        for (device, ranks) in map.ranks_by_device().filter(|(_, ranks)| !ranks.is_empty()) {
            let backend = tidekv_mem::open(self.backend_name()?, device)?;
            let geometry = self.geometry(&*backend).with_context(|| format!("the {} layout", self.layout))?;
            let memory = backend.memory()?;
            // What is beyond the reservation is refused with the formula, by the caller.
            let pages = pages_on(&ranks).min(u64::from(geometry.page_count()));
            let needed = Bytes(geometry.page_bytes().0.saturating_mul(pages));
            ensure!(
                needed <= memory.free,
                "{pages} pages of {} take {needed}, and device {device} has {} free of {}: map fewer pages at once",
                geometry.page_bytes(),
                memory.free,
                memory.total
            );
            let capabilities = backend.capabilities().clone();
            let capabilities = smallest.as_ref().map_or(capabilities, |facts| facts.capabilities.clone());
            if smallest.as_ref().is_none_or(|facts| geometry.page_count() < facts.geometry.page_count()) {
                smallest = Some(CacheFacts { geometry, memory: memory.total, capabilities });
            }
        }
        smallest.context("no rank has a device")
    }

    fn geometry(&self, backend: &dyn Backend) -> anyhow::Result<Geometry> {
        let layout: LayoutName = self.layout.parse().map_err(anyhow::Error::msg)?;
        let config = GeometryConfig {
            shape: KvShape::heads(self.num_layers, KV_HEADS, HEAD_SIZE, ELEMENT_BYTES, self.block_size),
            layout: layout.0,
            // Pages as a GPU has them on any memory, so that a page means the same everywhere.
            granularity: backend.capabilities().granularity.max(GPU_GRANULARITY),
            chunk: self.page_size_bytes.map_or(ChunkChoice::Auto, |bytes| ChunkChoice::Bytes(Bytes(bytes))),
            capacity: Capacity::Budget(backend.memory()?.total),
        };
        Ok(Geometry::new(&config)?)
    }
}

impl CacheFacts {
    /// Refuses page ids beyond the reservation, naming the largest valid value of `flag` and where it comes from.
    pub(crate) fn check_pages(&self, flag: &str, pages: u32, base_page: u32) -> anyhow::Result<()> {
        let count = self.geometry.page_count();
        if base_page.checked_add(pages).is_some_and(|end| end <= count) {
            return Ok(());
        }
        let formula = self.formula();
        ensure!(base_page < count, "--base-page is {base_page}: the last page id is {}, because {formula}", count - 1);
        let behind = if base_page == 0 { String::new() } else { format!(" behind --base-page {base_page}") };
        bail!(
            "{flag} is {pages}: the largest valid value{behind} is {} (page ids are 0 to {}), because {formula}",
            count - base_page,
            count - 1
        )
    }

    /// `memory / layers / 2 / page size = 141 GiB / 32 / 2 / 320 KiB = 7219 pages`.
    fn formula(&self) -> String {
        let layers = self.geometry.shape().layers;
        let page_size = Bytes(self.geometry.page_bytes().0 / u64::from(layers) / 2);
        format!(
            "memory / layers / 2 / page size = {} / {layers} / 2 / {page_size} = {} pages",
            self.memory,
            self.geometry.page_count()
        )
    }

    /// `20 MiB in 1 handle (slab, 32 layers, K and V)`.
    pub(crate) fn page_in_words(&self) -> String {
        let handles = self.geometry.placement().handles_per_page();
        format!(
            "{} in {handles} handle{} ({}, {} layers, K and V)",
            self.geometry.page_bytes(),
            if handles == 1 { "" } else { "s" },
            self.geometry.layout().name(),
            self.geometry.shape().layers
        )
    }
}
