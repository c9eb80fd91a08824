//! Any model shape and any options: the geometry is refused with an error, or every promise holds for the blocks
//! that are looked at (the first, the last and some that the input chooses).

#![no_main]

use std::collections::BTreeMap;

use arbitrary::{Arbitrary, Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use tidekv_core::geometry::{Attention, Capacity, ChunkChoice, Geometry, GeometryConfig, KvShape, Layout};
use tidekv_core::units::{BlockIndex, Buffer, ByteOffset, Bytes, KernelId, LayerIndex, PageId};

#[derive(Debug)]
struct Input {
    config: GeometryConfig,
    blocks: [u32; 4],
    layers: [u32; 2],
    ids: [u32; 2],
}

/// Mostly a number as real models have it, sometimes anything at all.
fn number(u: &mut Unstructured<'_>, usual: u32) -> Result<u32> {
    if u.ratio(15, 16)? { u.int_in_range(1..=usual) } else { u.arbitrary() }
}

fn size(u: &mut Unstructured<'_>) -> Result<Bytes> {
    let (count, shift): (u16, u8) = u.arbitrary()?;
    if u.ratio(15, 16)? { Ok(Bytes(u64::from(count) << (shift % 24))) } else { Ok(Bytes(u.arbitrary()?)) }
}

impl<'a> Arbitrary<'a> for Input {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        let attention = if u.arbitrary()? {
            Attention::Latent { size: number(u, 2048)? }
        } else {
            Attention::Heads { kv_heads: number(u, 128)?, key_size: number(u, 512)?, value_size: number(u, 512)? }
        };
        let shape =
            KvShape { layers: number(u, 128)?, attention, element_bytes: number(u, 4)?, block_tokens: number(u, 256)? };
        let layout = *u.choose(&Layout::ALL)?;
        let granularity = match u.int_in_range(0..=7)? {
            0 => Bytes(u.arbitrary()?),
            1 => Bytes(1 << u.int_in_range(0..=63)?),
            n => [Bytes::kib(4), Bytes::kib(64), Bytes::mib(2)][n % 3],
        };
        let chunk = if u.arbitrary()? { ChunkChoice::Auto } else { ChunkChoice::Bytes(size(u)?) };
        let capacity = if u.arbitrary()? { Capacity::Budget(size(u)?) } else { Capacity::Pages(number(u, 4096)?) };
        let config = GeometryConfig { shape, layout, granularity, chunk, capacity };
        Ok(Self { config, blocks: u.arbitrary()?, layers: u.arbitrary()?, ids: u.arbitrary()? })
    }
}

fuzz_target!(|input: Input| {
    let geometry = match Geometry::new(&input.config) {
        Ok(geometry) => geometry,
        Err(error) => {
            let sentence = error.to_string();
            assert!(!sentence.is_empty() && !sentence.contains('\n'), "{error:?} is not one sentence");
            return;
        }
    };
    check_sizes(&geometry, &input.config);
    check_blocks(&geometry, &input);
    for id in input.ids.into_iter().chain([geometry.id_count() - 1, geometry.id_count(), u32::MAX]) {
        if let Some(block) = geometry.block_of(KernelId(id)) {
            assert_eq!(geometry.kernel_id(block), Ok(KernelId(id)), "an id that belongs to a block is that block's id");
        }
    }
});

fn check_sizes(geometry: &Geometry, config: &GeometryConfig) {
    let placement = geometry.placement();
    assert!(geometry.page_count() > 0 && geometry.blocks_per_page() > 0);
    let blocks = u64::from(geometry.page_count()) * u64::from(geometry.blocks_per_page());
    assert_eq!(u64::from(geometry.block_count()), blocks, "the number of blocks wrapped around");
    assert!(geometry.id_count() >= geometry.block_count(), "fewer ids than blocks");
    assert!(
        u64::from(geometry.id_count()) * u64::from(config.shape.block_tokens) <= 1 << 31,
        "a kernel cannot index this"
    );
    assert!(placement.handle_bytes().is_multiple_of(config.granularity), "a handle is not granular");
    let whole = u128::from(geometry.page_bytes().0) * u128::from(geometry.page_count());
    assert!(whole <= u128::from(geometry.reservation_bytes().0), "the pages do not fit their reservation");
    if let Capacity::Budget(budget) = config.capacity {
        assert!(whole <= u128::from(budget.0), "the pages cost more than the budget");
        assert!(u128::from(budget.0) - whole < u128::from(geometry.page_bytes().0), "one more page would fit");
    }
    let (last, past) = (PageId(geometry.page_count() - 1), PageId(geometry.page_count()));
    assert!(geometry.check_page(last).is_ok() && geometry.check_page(past).is_err());
    let end = placement.extent(last, placement.handles_per_page() - 1);
    assert!(end.offset.0 + end.bytes.0 <= geometry.reservation_bytes().0, "the last handle leaves the reservation");
}

fn check_blocks(geometry: &Geometry, input: &Input) {
    let (count, per_page) = (geometry.block_count(), geometry.blocks_per_page());
    assert!(geometry.kernel_id(BlockIndex(count)).is_err(), "a block past the end has an id");
    let chosen = input.blocks.map(|block| block % count);
    let mut blocks: Vec<u32> = chosen.into_iter().chain([0, per_page - 1, per_page % count, count - 1]).collect();
    blocks.extend(chosen.map(|block| (block + 1) % count));
    blocks.sort_unstable();
    blocks.dedup();
    let shape = geometry.shape();
    assert!(geometry.layer_view(LayerIndex(shape.layers), Buffer::Key).is_err(), "a layer past the end has a view");
    let mut layers: Vec<u32> = input.layers.map(|layer| layer % shape.layers).to_vec();
    layers.extend([0, 1 % shape.layers, shape.layers - 1]);
    layers.sort_unstable();
    layers.dedup();

    let mut taken = BTreeMap::new();
    for block in blocks.into_iter().map(BlockIndex) {
        let page = geometry.page_of(block).expect("the block is in range");
        assert_eq!(page, PageId(block.0 / per_page));
        let id = geometry.kernel_id(block).expect("the block is in range");
        assert_eq!(geometry.block_of(id), Some(block), "the id does not lead back");
        for layer in layers.iter().copied().map(LayerIndex) {
            for &buffer in shape.buffers() {
                let start = geometry.byte_offset(block, layer, buffer).expect("all indices are in range").0;
                let bytes = shape.block_bytes(buffer).expect("the geometry was accepted").0;
                let view = geometry.layer_view(layer, buffer).expect("all indices are in range");
                assert!(id.0 < view.id_count);
                assert_eq!(start, view.offset.0 + u64::from(id.0) * view.id_stride.0, "the stride is not uniform");
                let first = geometry.placement().locate(ByteOffset(start)).expect("the first byte is in no page");
                let last =
                    geometry.placement().locate(ByteOffset(start + bytes - 1)).expect("the last byte is in no page");
                assert_eq!(
                    (first.page, first.handle),
                    (page, last.handle),
                    "the block is not in one handle of its page"
                );
                assert_eq!(last.page, page, "the block leaves its page");
                assert_eq!(taken.insert(start, start + bytes), None, "two blocks start at the same byte");
            }
        }
    }
    let mut end = 0;
    for (start, stop) in taken {
        assert!(start >= end, "two blocks overlap at byte {start}");
        end = stop;
    }
}
