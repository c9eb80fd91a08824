//! From a model's shape to the numbers of a [`Geometry`]: one function per layout, every product checked.

use super::chunk::{SlabPage, gcd, whole_blocks_per_span};
use super::{
    BufferPitch, Capacity, ChunkChoice, DEFAULT_CHUNK, Geometry, GeometryConfig, GeometryError, Layout, Placement,
};
use crate::units::{Buffer, Bytes};

/// Slots (ids times tokens) that a kernel's signed 32-bit arithmetic can reach.
const SLOT_LIMIT: u64 = 1 << 31;

pub(super) fn plan(config: &GeometryConfig) -> Result<Geometry, GeometryError> {
    config.shape.check()?;
    if !config.granularity.0.is_power_of_two() || config.granularity.0 < 256 {
        return Err(GeometryError::BadGranularity { granularity: config.granularity });
    }
    if config.chunk == ChunkChoice::Bytes(Bytes::ZERO) {
        return Err(GeometryError::ChunkNotGranular { chunk: Bytes::ZERO, granularity: config.granularity });
    }
    let geometry = match config.layout {
        Layout::Slab => slab(config),
        Layout::PerLayer => per_layer(config),
        Layout::Interleaved => interleaved(config),
    }?;
    check_ids(&geometry)?;
    Ok(geometry)
}

fn slab(config: &GeometryConfig) -> Result<Geometry, GeometryError> {
    let buffers = buffer_count(config);
    let block = larger_block(config)?;
    let granularity = config.granularity.0;
    let page = match config.chunk {
        ChunkChoice::Auto => SlabPage::choose(block, buffers, granularity)?,
        ChunkChoice::Bytes(chunk) => {
            SlabPage::with_blocks(at_least_one(chunk.0 / block, block, chunk)?, block, buffers, granularity)?
        }
    };
    // Pages lie a multiple of both apart: of the granularity for the driver, of the block for whole ids.
    let page_pitch = (granularity / gcd(granularity, block))
        .checked_mul(block)
        .and_then(|lcm| page.page_bytes.checked_next_multiple_of(lcm))
        .ok_or(GeometryError::Overflow { what: "the distance between pages" })?;
    let page_count = page_count(config.capacity, Bytes(page.page_bytes))?;
    Ok(Geometry {
        shape: config.shape,
        layout: Layout::Slab,
        placement: Placement::strided(Bytes(page.page_bytes), Bytes(page_pitch), page_count)?,
        chunk: Bytes(page.chunk_pitch),
        blocks_per_page: blocks_per_page(page.blocks)?,
        id_stride: block,
        id_span: page_pitch,
        buffer_pitch: BufferPitch::Uniform(page.chunk_pitch),
    })
}

fn per_layer(config: &GeometryConfig) -> Result<Geometry, GeometryError> {
    let buffers = buffer_count(config);
    let block = larger_block(config)?;
    let chunk = compatible_chunk(config, block)?;
    check_granular(chunk, chunk, config.granularity)?;
    let blocks = at_least_one(whole_blocks_per_span(chunk.0, block), block, chunk)?;
    let page_bytes = mul(chunk.0, buffers, "the size of a page")?;
    let page_count = page_count(config.capacity, Bytes(page_bytes))?;
    let handles = u32::try_from(buffers).map_err(|_| GeometryError::Overflow { what: "the handles per page" })?;
    Ok(Geometry {
        shape: config.shape,
        layout: Layout::PerLayer,
        placement: Placement::regions(chunk, page_count, handles)?,
        chunk,
        blocks_per_page: blocks_per_page(blocks)?,
        id_stride: block,
        id_span: chunk.0,
        buffer_pitch: BufferPitch::Uniform(mul(chunk.0, u64::from(page_count), "a layer's region")?),
    })
}

fn interleaved(config: &GeometryConfig) -> Result<Geometry, GeometryError> {
    let buffers = buffer_count(config);
    let key = config.shape.block_bytes(Buffer::Key)?.0;
    let value = if config.shape.buffers_per_layer() == 2 { config.shape.block_bytes(Buffer::Value)?.0 } else { 0 };
    let per_layer = key.checked_add(value).ok_or(GeometryError::Overflow { what: "a layer's block" })?;
    let row = mul(per_layer, u64::from(config.shape.layers), "a row of all layers")?;
    let chunk = compatible_chunk(config, row.div_ceil(buffers))?;
    let page_bytes = mul(chunk.0, buffers, "the size of a page")?;
    check_granular(chunk, Bytes(page_bytes), config.granularity)?;
    let blocks = at_least_one(whole_blocks_per_span(page_bytes, row), row.div_ceil(buffers), chunk)?;
    let page_count = page_count(config.capacity, Bytes(page_bytes))?;
    Ok(Geometry {
        shape: config.shape,
        layout: Layout::Interleaved,
        placement: Placement::uniform(Bytes(page_bytes), page_count)?,
        chunk,
        blocks_per_page: blocks_per_page(blocks)?,
        id_stride: row,
        id_span: page_bytes,
        buffer_pitch: BufferPitch::Packed { key, value },
    })
}

/// The chunk of the two compatible layouts: kvcached's 2 MiB unless a block needs more.
fn compatible_chunk(config: &GeometryConfig, block: u64) -> Result<Bytes, GeometryError> {
    match config.chunk {
        ChunkChoice::Bytes(chunk) => Ok(chunk),
        ChunkChoice::Auto => {
            let unit = DEFAULT_CHUNK.0.max(config.granularity.0);
            if whole_blocks_per_span(unit, block) > 0 {
                return Ok(Bytes(unit));
            }
            // Two strides hold a whole block wherever the first one starts.
            let two = mul(block, 2, "the size of a block")?;
            two.checked_next_multiple_of(unit).map(Bytes).ok_or(GeometryError::Overflow { what: "the size of a page" })
        }
    }
}

/// Buffers of unequal size share ids by sharing the larger stride.
fn larger_block(config: &GeometryConfig) -> Result<u64, GeometryError> {
    let mut larger = 0;
    for &buffer in config.shape.buffers() {
        larger = larger.max(config.shape.block_bytes(buffer)?.0);
    }
    Ok(larger)
}

fn buffer_count(config: &GeometryConfig) -> u64 {
    u64::from(config.shape.layers) * u64::from(config.shape.buffers_per_layer())
}

fn page_count(capacity: Capacity, page_bytes: Bytes) -> Result<u32, GeometryError> {
    match capacity {
        Capacity::Pages(pages) => Ok(pages),
        Capacity::Budget(budget) => match u32::try_from(budget.0 / page_bytes.0) {
            Ok(0) => Err(GeometryError::BudgetBelowOnePage { budget, page_bytes }),
            Ok(pages) => Ok(pages),
            Err(_) => Err(GeometryError::Overflow { what: "the number of pages" }),
        },
    }
}

fn blocks_per_page(blocks: u64) -> Result<u32, GeometryError> {
    u32::try_from(blocks).map_err(|_| GeometryError::Overflow { what: "the number of blocks in a page" })
}

fn at_least_one(blocks: u64, block: u64, chunk: Bytes) -> Result<u64, GeometryError> {
    match blocks {
        0 => Err(GeometryError::BlockLargerThanChunk { block: Bytes(block), chunk }),
        blocks => Ok(blocks),
    }
}

fn check_granular(chunk: Bytes, handle: Bytes, granularity: Bytes) -> Result<(), GeometryError> {
    if handle.0 > 0 && handle.is_multiple_of(granularity) {
        return Ok(());
    }
    Err(GeometryError::ChunkNotGranular { chunk, granularity })
}

/// Refuses geometries whose ids a kernel could not use. Runs before anything else computes an id.
fn check_ids(geometry: &Geometry) -> Result<(), GeometryError> {
    let last_page = u64::from(geometry.page_count() - 1);
    let overflow = || GeometryError::Overflow { what: "the number of ids" };
    let id_count = last_page
        .checked_mul(geometry.id_span)
        .map(|bytes| bytes.div_ceil(geometry.id_stride) + u64::from(geometry.blocks_per_page))
        .ok_or_else(overflow)?;
    let block_tokens = geometry.shape.block_tokens;
    if id_count.checked_mul(u64::from(block_tokens)).is_none_or(|slots| slots > SLOT_LIMIT) {
        return Err(GeometryError::TooManyIds { id_count, block_tokens });
    }
    Ok(())
}

fn mul(a: u64, b: u64, what: &'static str) -> Result<u64, GeometryError> {
    a.checked_mul(b).ok_or(GeometryError::Overflow { what })
}
