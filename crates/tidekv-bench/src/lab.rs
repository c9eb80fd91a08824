//! Where the pools of a benchmark live: a private runtime directory, and pools of a shape made to measure.
//!
//! A benchmark never meets the pools of the machine: its ledger and its segments are in a directory of its own,
//! which is removed when the benchmark ends, by an error too.
//!
//! Two kinds of shapes are enough for all of them. [`small_pages`] has pages of a chosen size with a chosen number
//! of blocks, for measuring bookkeeping and sharing with little memory; [`model`] is the KV cache of a real model.

use std::env;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use tidekv_core::geometry::{Capacity, ChunkChoice, GeometryConfig, KvShape, Layout};
use tidekv_core::units::Bytes;
use tidekv_mem::{Backend, BackendName};
use tidekv_pool::{KvPool, PoolConfig, ReservePolicy, Share};
use tidekv_shm::{PoolName, RuntimeDir};

/// Where files of ours lie by default, and faster than a disk.
const SHARED_MEMORY: &str = "/dev/shm";

/// What a GPU gives memory in.
pub const GPU_GRANULARITY: Bytes = Bytes::mib(2);

/// The model of most benchmarks: 8 KV heads of 128 elements, bf16, blocks of 16 tokens, as Llama 3 and Qwen 3.
pub const KV_HEADS: u32 = 8;
/// Elements of one head.
pub const HEAD_SIZE: u32 = 128;
/// Bytes of one element.
pub const ELEMENT_BYTES: u32 = 2;
/// Tokens of one block.
pub const BLOCK_TOKENS: u32 = 16;

/// A [`Layout`] as an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayoutName(pub Layout);

impl FromStr for LayoutName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Layout::ALL.into_iter().find(|layout| layout.name() == text);
        known.map(Self).ok_or_else(|| "not a layout: use slab, per-layer or interleaved".to_owned())
    }
}

/// A private runtime directory, gone with the value.
#[derive(Debug)]
pub struct Lab {
    dir: TempDir,
}

impl Lab {
    /// Makes the directory: in `KVCACHED_RUNTIME_DIR` where that is set, else in shared memory where there is any.
    pub fn new() -> anyhow::Result<Self> {
        let mut builder = tempfile::Builder::new();
        // There are sockets and segments in it: nobody else's business.
        builder.prefix("kvcached-bench-").permissions(Permissions::from_mode(0o700));
        let dir = match env::var_os("KVCACHED_RUNTIME_DIR").filter(|dir| !dir.is_empty()) {
            Some(dir) => builder.tempdir_in(dir),
            None => builder.tempdir_in(SHARED_MEMORY).or_else(|_| builder.tempdir()),
        };
        Ok(Self { dir: dir.context("making a directory for the benchmark's pools")? })
    }

    /// The directory's path.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The directory as pools know it.
    pub fn runtime_dir(&self) -> RuntimeDir {
        RuntimeDir::at(self.path())
    }

    /// A pool that nobody else shares, with `budget` to itself.
    pub fn config(&self, backend: Arc<dyn Backend>, geometry: GeometryConfig, budget: Bytes) -> PoolConfig {
        let name = PoolName::new("kvcached_bench").expect("a name of allowed letters");
        let mut config = PoolConfig::new(name, backend, geometry);
        config.runtime_dir = self.runtime_dir();
        config.budget = Some(budget);
        config
    }
}

/// Pages of `page_bytes` with `blocks_per_page` blocks each, one buffer and one layer.
pub fn small_pages(
    backend: &dyn Backend,
    page_bytes: Bytes,
    blocks_per_page: u32,
    pages: u32,
) -> anyhow::Result<GeometryConfig> {
    let granularity = backend.capabilities().granularity;
    ensure!(page_bytes.is_multiple_of(granularity), "a page of {page_bytes} is no multiple of {granularity}");
    let block_bytes = u32::try_from(page_bytes.0 / u64::from(blocks_per_page)).context("a block of 4 GiB or more")?;
    Ok(GeometryConfig {
        shape: KvShape::latent(1, block_bytes, 1, 1),
        layout: Layout::Slab,
        granularity,
        chunk: ChunkChoice::Bytes(page_bytes),
        capacity: Capacity::Pages(pages),
    })
}

/// The KV cache of a model with this many layers, in the slab layout, with room for `capacity`. Its pages are those of
/// a GPU on any memory, so that waste means the same everywhere.
pub fn model(backend: &dyn Backend, layers: u32, capacity: Capacity) -> GeometryConfig {
    GeometryConfig {
        shape: KvShape::heads(layers, KV_HEADS, HEAD_SIZE, ELEMENT_BYTES, BLOCK_TOKENS),
        layout: Layout::Slab,
        granularity: backend.capabilities().granularity.max(GPU_GRANULARITY),
        chunk: ChunkChoice::Auto,
        capacity,
    }
}

/// A pool of small pages in words: what a worker process is told to open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolSpec {
    /// Its name in the runtime directory.
    pub name: String,
    /// The directory that all sharers have in common.
    pub runtime_dir: PathBuf,
    /// `host`, `cuda` or `fake`.
    pub backend: String,
    /// Bytes of one page.
    pub page_bytes: u64,
    /// Blocks of one page.
    pub blocks_per_page: u32,
    /// Pages that the pool has room for.
    pub pages: u32,
    /// What all sharers may hold together.
    pub budget_bytes: u64,
    /// Memory that is this pool's whenever it wants it.
    pub floor_bytes: u64,
    /// Its part of what the floors leave.
    pub weight: u32,
    /// Idle pages are given back after this long.
    pub decay_ms: u64,
    /// Pages kept ahead of demand; `None` for the pool's own choice.
    pub reserve_pages: Option<u32>,
}

impl PoolSpec {
    /// A pool on host memory without a floor, of weight 1, that may take the whole budget and keeps no reserve.
    pub fn new(name: impl Into<String>, runtime_dir: &Path, page_bytes: Bytes, budget_pages: u32) -> Self {
        Self {
            name: name.into(),
            runtime_dir: runtime_dir.to_owned(),
            backend: BackendName::Host.name().to_owned(),
            page_bytes: page_bytes.0,
            blocks_per_page: 1,
            pages: budget_pages,
            budget_bytes: page_bytes.0 * u64::from(budget_pages),
            floor_bytes: 0,
            weight: 1,
            decay_ms: 1000,
            reserve_pages: Some(0),
        }
    }

    /// Opens the pool, in this process.
    pub fn open(&self) -> anyhow::Result<KvPool> {
        let name: BackendName = self.backend.parse().map_err(anyhow::Error::msg)?;
        let backend = tidekv_mem::open(name, 0)?;
        let geometry = small_pages(&*backend, Bytes(self.page_bytes), self.blocks_per_page, self.pages)?;
        let mut config = PoolConfig::new(PoolName::new(&self.name)?, backend, geometry);
        config.runtime_dir = RuntimeDir::at(&self.runtime_dir);
        config.budget = Some(Bytes(self.budget_bytes));
        config.share = Share { floor: Bytes(self.floor_bytes), weight: self.weight, ..Share::default() };
        config.decay = Duration::from_millis(self.decay_ms);
        if let Some(pages) = self.reserve_pages {
            config.reserve = ReservePolicy::Fixed { min: pages, max: pages };
        }
        Ok(KvPool::open(config)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidekv_core::geometry::Geometry;
    use tidekv_mem::fake::FakeBackend;

    #[test]
    fn the_directory_goes_with_the_lab() {
        let lab = Lab::new().unwrap();
        let path = lab.path().to_owned();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        drop(lab);
        assert!(!path.exists());
    }

    #[test]
    fn small_pages_are_as_small_as_asked() {
        let backend = FakeBackend::default();
        for (page_bytes, blocks_per_page) in [(Bytes::kib(4), 16), (Bytes::kib(64), 1), (Bytes::mib(2), 64)] {
            let config = small_pages(&backend, page_bytes, blocks_per_page, 10).unwrap();
            let geometry = Geometry::new(&config).unwrap();
            assert_eq!((geometry.page_bytes(), geometry.blocks_per_page()), (page_bytes, blocks_per_page));
        }
        assert!(small_pages(&backend, Bytes(1000), 1, 1).is_err());
    }

    #[test]
    fn a_page_of_36_layers_is_18_mib() {
        let geometry = Geometry::new(&model(&FakeBackend::default(), 36, Capacity::Pages(10))).unwrap();
        assert_eq!((geometry.page_bytes(), geometry.blocks_per_page()), (Bytes::mib(18), 8));
    }
}
