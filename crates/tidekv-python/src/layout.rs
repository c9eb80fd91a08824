//! `Layout`, `Geometry`, `LayerView`: what a model keeps per token, and where every block's bytes are.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tidekv_core::blocks::FreeError;
use tidekv_core::geometry::{
    Attention, Capacity, ChunkChoice, Geometry as CoreGeometry, GeometryConfig, KvShape, Layout as CoreLayout,
};
use tidekv_core::units::{BlockIndex, Buffer, Bytes, KernelId, LayerIndex};

use crate::device::DeviceName;
use crate::dtype::Dtype;
use crate::error::Refused;

/// What a group of layers keeps per token, and how that is arranged.
#[pyclass(module = "tidekv._native", frozen, eq, from_py_object)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) shape: KvShape,
    pub(crate) layout: CoreLayout,
    pub(crate) dtype: Dtype,
    pub(crate) chunk: Option<u64>,
    /// Bytes without meaning: views are flat.
    is_raw: bool,
}

fn layout_named(name: &str) -> Result<CoreLayout, Refused> {
    let found = CoreLayout::ALL.into_iter().find(|layout| layout.name() == name);
    found.ok_or_else(|| Refused::argument(format!("{name:?} is not a layout: use slab, per-layer or interleaved")))
}

pub(crate) fn dtype_named(name: &str) -> Result<Dtype, Refused> {
    Dtype::named(name)
        .ok_or_else(|| Refused::argument(format!("{name:?} is not a type: use bfloat16, float16, float8_e4m3fn, ...")))
}

impl Layout {
    /// The addresses for a capacity. `chunk` counts where the layout itself says none.
    pub(crate) fn config(&self, capacity: Capacity, granularity: Bytes, chunk: Option<u64>) -> GeometryConfig {
        GeometryConfig {
            shape: self.shape,
            layout: self.layout,
            granularity,
            chunk: self.chunk.or(chunk).map_or(ChunkChoice::Auto, |bytes| ChunkChoice::Bytes(Bytes(bytes))),
            capacity,
        }
    }

    pub(crate) fn check_buffer(&self, value: bool) -> Result<Buffer, Refused> {
        match (value, self.shape.attention) {
            (true, Attention::Latent { .. }) => {
                Err(Refused::argument("this layout keeps one buffer per layer: it has no V"))
            }
            (true, Attention::Heads { .. }) => Ok(Buffer::Value),
            (false, _) => Ok(Buffer::Key),
        }
    }

    /// Sizes of one id's part of a view, in elements of `dtype`.
    fn inner_shape(&self, value: bool) -> Vec<i64> {
        let tokens = i64::from(self.shape.block_tokens);
        match self.shape.attention {
            Attention::Heads { kv_heads, key_size, value_size } => {
                vec![tokens, i64::from(kv_heads), i64::from(if value { value_size } else { key_size })]
            }
            Attention::Latent { size } if self.is_raw => vec![i64::from(size)],
            Attention::Latent { size } => vec![tokens, i64::from(size)],
        }
    }
}

#[pymethods]
impl Layout {
    /// MHA, GQA and MQA: K and V for each KV head.
    #[staticmethod]
    #[pyo3(signature = (layers, kv_heads, head_size, *, value_size = None, dtype = "bfloat16", block_tokens = 16,
        layout = "slab", chunk_bytes = None))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn heads(
        layers: u32,
        kv_heads: u32,
        head_size: u32,
        value_size: Option<u32>,
        dtype: &str,
        block_tokens: u32,
        layout: &str,
        chunk_bytes: Option<u64>,
    ) -> Result<Self, Refused> {
        let dtype = dtype_named(dtype)?;
        let attention = Attention::Heads { kv_heads, key_size: head_size, value_size: value_size.unwrap_or(head_size) };
        let shape = KvShape { layers, attention, element_bytes: dtype.bytes, block_tokens };
        Self { shape, layout: layout_named(layout)?, dtype, chunk: chunk_bytes, is_raw: false }.checked()
    }

    /// MLA: one vector per token and layer.
    #[staticmethod]
    #[pyo3(signature = (layers, size, *, dtype = "bfloat16", block_tokens = 16, layout = "slab", chunk_bytes = None))]
    fn latent(
        layers: u32,
        size: u32,
        dtype: &str,
        block_tokens: u32,
        layout: &str,
        chunk_bytes: Option<u64>,
    ) -> Result<Self, Refused> {
        let dtype = dtype_named(dtype)?;
        let shape = KvShape::latent(layers, size, dtype.bytes, block_tokens);
        Self { shape, layout: layout_named(layout)?, dtype, chunk: chunk_bytes, is_raw: false }.checked()
    }

    /// Only bytes: so many buffers of `block_bytes` for each block.
    #[staticmethod]
    #[pyo3(signature = (buffers, block_bytes, *, layout = "interleaved", chunk_bytes = None))]
    fn raw(buffers: u32, block_bytes: u32, layout: &str, chunk_bytes: Option<u64>) -> Result<Self, Refused> {
        let shape = KvShape::latent(buffers, block_bytes, 1, 1);
        Self { shape, layout: layout_named(layout)?, dtype: Dtype::BYTES, chunk: chunk_bytes, is_raw: true }.checked()
    }

    #[getter]
    fn layers(&self) -> u32 {
        self.shape.layers
    }

    #[getter]
    fn buffers_per_layer(&self) -> u32 {
        self.shape.buffers_per_layer()
    }

    #[getter]
    fn block_tokens(&self) -> u32 {
        self.shape.block_tokens
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name
    }

    #[getter]
    fn layout(&self) -> &'static str {
        self.layout.name()
    }

    #[getter]
    fn chunk_bytes(&self) -> Option<u64> {
        self.chunk
    }

    #[getter]
    fn block_bytes(&self) -> Result<u64, Refused> {
        let mut row = 0u64;
        for &buffer in self.shape.buffers() {
            row = row.saturating_add(self.shape.block_bytes(buffer)?.0);
        }
        Ok(row.saturating_mul(u64::from(self.shape.layers)))
    }

    #[pyo3(signature = (*, pages = None, capacity = None, device = "cpu", granularity = None, env = false))]
    fn geometry(
        &self,
        pages: Option<u32>,
        capacity: Option<u64>,
        device: &str,
        granularity: Option<u64>,
        env: bool,
    ) -> Result<Geometry, Refused> {
        let granularity = match granularity {
            Some(bytes) => Bytes(bytes),
            None => DeviceName::parse(device)?.granularity()?,
        };
        let capacity = capacity_of(pages, capacity)?
            .ok_or_else(|| Refused::argument("a geometry needs a size: give `pages` or `capacity`"))?;
        let mut config = self.config(capacity, granularity, None);
        if env && self.chunk.is_none() {
            // As a pool does it.
            let page_size = std::env::var("KVCACHED_PAGE_SIZE_MB").ok();
            config.chunk = ChunkChoice::from_page_size_mb(page_size.as_deref())?;
        }
        Ok(Geometry { layout: self.clone(), geometry: CoreGeometry::new(&config)? })
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.layout.name(), self.dtype.name, self.chunk, self.shape.layers, self.shape.block_tokens).hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        let KvShape { layers, block_tokens, .. } = self.shape;
        let what = match self.shape.attention {
            Attention::Heads { kv_heads, key_size, value_size } if key_size == value_size => {
                format!("kv_heads={kv_heads}, head_size={key_size}")
            }
            Attention::Heads { kv_heads, key_size, value_size } => {
                format!("kv_heads={kv_heads}, head_size={key_size}, value_size={value_size}")
            }
            Attention::Latent { size } => format!("size={size}"),
        };
        let (dtype, layout) = (self.dtype.name, self.layout.name());
        format!("Layout(layers={layers}, {what}, block_tokens={block_tokens}, dtype={dtype:?}, layout={layout:?})")
    }
}

impl Layout {
    /// Refuses shapes that no geometry can have, before anybody builds on them.
    fn checked(self) -> Result<Self, Refused> {
        let numbers = match self.shape.attention {
            Attention::Heads { kv_heads, key_size, value_size } => vec![kv_heads, key_size, value_size],
            Attention::Latent { size } => vec![size],
        };
        if numbers.into_iter().chain([self.shape.layers, self.shape.block_tokens]).any(|number| number == 0) {
            return Err(Refused::argument("every number of a layout is at least 1"));
        }
        Ok(self)
    }
}

/// At most one of the two ways to say how large.
pub(crate) fn capacity_of(pages: Option<u32>, bytes: Option<u64>) -> Result<Option<Capacity>, Refused> {
    match (pages, bytes) {
        (Some(_), Some(_)) => Err(Refused::argument("give `pages` or `capacity`, not both")),
        (Some(pages), None) => Ok(Some(Capacity::Pages(pages))),
        (None, Some(bytes)) => Ok(Some(Capacity::Budget(Bytes(bytes)))),
        (None, None) => Ok(None),
    }
}

/// The address arithmetic of one reservation.
#[pyclass(module = "tidekv._native", frozen)]
#[derive(Clone, Debug)]
pub(crate) struct Geometry {
    pub(crate) layout: Layout,
    pub(crate) geometry: CoreGeometry,
}

impl Geometry {
    /// The dense index behind a kernel id.
    pub(crate) fn index_of(&self, block: u32) -> Result<BlockIndex, Refused> {
        index_of(&self.geometry, block)
    }

    pub(crate) fn layer_view(&self, layer: u32, value: bool, dtype: Dtype) -> Result<LayerView, Refused> {
        let buffer = self.layout.check_buffer(value)?;
        let view = self.geometry.layer_view(LayerIndex(layer), buffer)?;
        let element = u64::from(dtype.bytes);
        if !view.id_stride.0.is_multiple_of(element) {
            let stride = view.id_stride;
            return Err(Refused::argument(format!("blocks lie {stride} apart, which {} does not divide", dtype.name)));
        }
        let mut shape = vec![i64::from(view.id_count)];
        shape.extend(self.layout.inner_shape(value));
        let mut strides = vec![1i64; shape.len()];
        for place in (1..shape.len().saturating_sub(1)).rev() {
            strides[place] = strides[place + 1] * shape[place + 1];
        }
        strides[0] = i64::try_from(view.id_stride.0 / element).unwrap_or(i64::MAX);
        Ok(LayerView { offset: view.offset.0, shape, strides, dtype, block_bytes: view.block_bytes.0 })
    }
}

/// Converts many ids in a row. Neighbours are mostly of one page, which spares the divisions.
#[derive(Debug)]
pub(crate) struct Converter<'a> {
    geometry: &'a CoreGeometry,
    first_index: u32,
    first_id: u32,
    /// Blocks of the page that was met last; 0 before the first.
    blocks: u32,
}

impl<'a> Converter<'a> {
    pub(crate) fn new(geometry: &'a CoreGeometry) -> Self {
        Self { geometry, first_index: 0, first_id: 0, blocks: 0 }
    }

    /// The kernel id of a block that the allocator gave.
    pub(crate) fn id(&mut self, index: BlockIndex) -> u32 {
        let place = index.0.wrapping_sub(self.first_index);
        if place < self.blocks {
            return self.first_id + place;
        }
        let id = self.geometry.kernel_id(index).map_or(0, |id| id.0);
        self.remember(index, id);
        id
    }

    /// The block of a kernel id that somebody named.
    pub(crate) fn index(&mut self, id: u32) -> Result<BlockIndex, Refused> {
        let place = id.wrapping_sub(self.first_id);
        if place < self.blocks {
            return Ok(BlockIndex(self.first_index + place));
        }
        let index = index_of(self.geometry, id)?;
        self.remember(index, id);
        Ok(index)
    }

    fn remember(&mut self, index: BlockIndex, id: u32) {
        self.blocks = self.geometry.blocks_per_page();
        let place = index.0 % self.blocks;
        (self.first_index, self.first_id) = (index.0 - place, id.saturating_sub(place));
    }
}

/// A free that was refused, in kernel ids.
pub(crate) fn refused_free(geometry: &CoreGeometry, error: FreeError) -> Refused {
    let block = geometry.kernel_id(error.block()).map_or(error.block().0, |id| id.0);
    let why = match error {
        FreeError::Repeated { .. } => "is named twice",
        FreeError::NullBlock => "is the null block, which stays for the life of the pool",
        _ => "is not leased: it was freed before, or never allocated",
    };
    Refused::new("NotLeased", format!("block {block} {why}; nothing was freed")).about_block(block)
}

/// The dense index behind a kernel id, or an error that names it.
fn index_of(geometry: &CoreGeometry, block: u32) -> Result<BlockIndex, Refused> {
    geometry.block_of(KernelId(block)).ok_or_else(|| {
        let message = format!("block {block} is not of this pool, whose ids are below {}", geometry.id_count());
        Refused::new("NotLeased", message).about_block(block)
    })
}

#[pymethods]
impl Geometry {
    #[getter]
    fn layout(&self) -> Layout {
        self.layout.clone()
    }

    #[getter]
    fn page_count(&self) -> u32 {
        self.geometry.page_count()
    }

    #[getter]
    fn page_bytes(&self) -> u64 {
        self.geometry.page_bytes().0
    }

    #[getter]
    fn chunk_bytes(&self) -> u64 {
        self.geometry.chunk_bytes().0
    }

    #[getter]
    fn blocks_per_page(&self) -> u32 {
        self.geometry.blocks_per_page()
    }

    #[getter]
    fn block_count(&self) -> u32 {
        self.geometry.block_count()
    }

    #[getter]
    fn id_count(&self) -> u32 {
        self.geometry.id_count()
    }

    #[getter]
    fn reservation_bytes(&self) -> u64 {
        self.geometry.reservation_bytes().0
    }

    fn kernel_id(&self, index: u32) -> Result<u32, Refused> {
        Ok(self.geometry.kernel_id(BlockIndex(index))?.0)
    }

    fn block_index(&self, block: u32) -> Option<u32> {
        self.geometry.block_of(KernelId(block)).map(|index| index.0)
    }

    fn page_of(&self, block: u32) -> Result<u32, Refused> {
        Ok(self.geometry.page_of(self.index_of(block)?)?.0)
    }

    #[pyo3(signature = (block, layer, value = false))]
    fn byte_offset(&self, block: u32, layer: u32, value: bool) -> Result<u64, Refused> {
        let buffer = self.layout.check_buffer(value)?;
        Ok(self.geometry.byte_offset(self.index_of(block)?, LayerIndex(layer), buffer)?.0)
    }

    #[pyo3(signature = (layer, value = false))]
    fn view(&self, layer: u32, value: bool) -> Result<LayerView, Refused> {
        self.layer_view(layer, value, self.layout.dtype)
    }

    fn __repr__(&self) -> String {
        let geometry = &self.geometry;
        format!(
            "Geometry({} pages of {} blocks and {} bytes, {})",
            geometry.page_count(),
            geometry.blocks_per_page(),
            geometry.page_bytes().0,
            geometry.layout().name()
        )
    }
}

/// One layer's K or V inside a reservation.
#[pyclass(module = "tidekv._native", frozen)]
#[derive(Clone, Debug)]
pub(crate) struct LayerView {
    pub(crate) offset: u64,
    pub(crate) shape: Vec<i64>,
    pub(crate) strides: Vec<i64>,
    pub(crate) dtype: Dtype,
    block_bytes: u64,
}

#[pymethods]
impl LayerView {
    #[getter]
    fn offset(&self) -> u64 {
        self.offset
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.strides)
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name
    }

    #[getter]
    fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    fn __repr__(&self) -> String {
        format!("LayerView(offset={}, shape={:?}, strides={:?})", self.offset, self.shape, self.strides)
    }
}
