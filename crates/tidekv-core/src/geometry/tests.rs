//! The promises of a geometry, checked over random models and on the vectors that users know.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::units::GroupId;

const CUDA_GRANULARITY: Bytes = Bytes::mib(2);

fn config(shape: KvShape, layout: Layout, chunk: ChunkChoice, capacity: Capacity) -> GeometryConfig {
    GeometryConfig { shape, layout, granularity: CUDA_GRANULARITY, chunk, capacity }
}

/// 32 layers, 8 KV heads of 128, bf16, 16 tokens: 32 KiB per block and buffer.
fn llama_8b() -> KvShape {
    KvShape::heads(32, 8, 128, 2, 16)
}

fn build(shape: KvShape, layout: Layout, chunk: ChunkChoice, pages: u32) -> Geometry {
    Geometry::new(&config(shape, layout, chunk, Capacity::Pages(pages))).unwrap()
}

/// Every promise, for the blocks of the first two and the last page (or all of them when there are few).
fn assert_promises(g: &Geometry) {
    let m = g.blocks_per_page();
    let pages: Vec<u32> = (0..g.page_count()).filter(|&p| p < 2 || p + 1 == g.page_count()).collect();
    let places: Vec<u32> = (0..m).filter(|&i| i < 3 || i + 2 >= m).collect();
    // start -> end of everything seen; no two may overlap.
    let mut taken: BTreeMap<u64, u64> = BTreeMap::new();
    for &page in &pages {
        for &place in &places {
            let block = BlockIndex(page * m + place);
            assert_eq!(g.page_of(block), Ok(PageId(page)));
            let id = g.kernel_id(block).unwrap();
            assert_eq!(g.block_of(id), Some(block), "round trip");
            assert!(id.0 < g.id_count());
            for layer in (0..g.shape().layers).map(LayerIndex) {
                for &buffer in g.shape().buffers() {
                    let start = g.byte_offset(block, layer, buffer).unwrap();
                    let bytes = g.shape().block_bytes(buffer).unwrap().0;
                    let view = g.layer_view(layer, buffer).unwrap();
                    assert_eq!(start.0, view.offset.0 + u64::from(id.0) * view.id_stride.0, "uniform stride");
                    let first = g.placement().locate(start).expect("first byte lies in a page");
                    let last = g.placement().locate(ByteOffset(start.0 + bytes - 1)).expect("last byte lies in a page");
                    assert_eq!((first.page, first.handle), (last.page, last.handle), "a block lies in one handle");
                    assert_eq!(first.page, PageId(page), "inside its own page");
                    assert!(taken.insert(start.0, start.0 + bytes).is_none(), "two blocks start at {start:?}");
                }
            }
        }
    }
    let mut end = 0;
    for (&start, &stop) in &taken {
        assert!(start >= end, "overlap at byte {start}");
        end = stop;
    }
    assert!(end <= g.reservation_bytes().0);
    assert!(u64::from(g.id_count()) * u64::from(g.shape().block_tokens) <= 1 << 31);
}

#[test]
#[cfg_attr(miri, ignore = "every block of a whole card; other geometries have a few")]
fn seed_vector_354_pages_in_every_layout() {
    for layout in Layout::ALL {
        let budget = Capacity::Budget(Bytes::mib(45_312));
        let g = Geometry::new(&config(llama_8b(), layout, ChunkChoice::Bytes(Bytes::mib(2)), budget)).unwrap();
        assert_eq!((g.page_count(), g.page_bytes()), (354, Bytes::mib(128)), "{}", layout.name());
        assert_eq!(g.check_page(PageId(353)), Ok(()));
        let refused = g.check_page(PageId(354)).unwrap_err();
        assert_eq!(refused.to_string(), "page 354 is outside this reservation: valid page ids are 0..=353");
        assert_promises(&g);
    }
}

#[test]
fn page_size_mb_is_the_chunk() {
    let chunk = ChunkChoice::from_page_size_mb(Some("2")).unwrap();
    assert_eq!(chunk, ChunkChoice::Bytes(Bytes::mib(2)));
    assert_eq!(build(llama_8b(), Layout::Slab, chunk, 1).chunk_bytes(), Bytes::mib(2));
    assert_eq!(ChunkChoice::from_page_size_mb(None), Ok(ChunkChoice::Auto));
    assert_eq!(ChunkChoice::from_page_size_mb(Some(" ")), Ok(ChunkChoice::Auto));
    for bad in ["0", "-2", "2.5", "two", "99999999999999999999"] {
        assert!(matches!(ChunkChoice::from_page_size_mb(Some(bad)), Err(GeometryError::BadPageSizeMb { .. })), "{bad}");
    }
}

#[test]
fn automatic_pages_are_16_to_32_mib_without_slack() {
    let auto = |layers| build(KvShape::heads(layers, 8, 128, 2, 16), Layout::Slab, ChunkChoice::Auto, 4);
    assert_eq!((auto(32).page_bytes(), auto(32).blocks_per_page()), (Bytes::mib(20), 10));
    assert_eq!((auto(36).page_bytes(), auto(36).blocks_per_page()), (Bytes::mib(18), 8));
    assert_eq!((auto(80).page_bytes(), auto(80).blocks_per_page()), (Bytes::mib(20), 4));
    // Two layers: chunks stop at 2 MiB. 1,000 layers: one block passes the window.
    assert_eq!((auto(2).page_bytes(), auto(2).chunk_bytes()), (Bytes::mib(8), Bytes::mib(2)));
    assert_eq!((auto(1000).blocks_per_page(), auto(1000).chunk_bytes()), (1, Bytes::kib(32)));
}

#[test]
#[cfg_attr(miri, ignore = "every block of 61 layers; other geometries have a few")]
fn slab_of_mla_steps_over_pages_in_whole_ids() {
    // DeepSeek: 61 layers, 576 elements of 2 bytes, 64 tokens: 73,728-byte blocks, not a power of two.
    let g = build(KvShape::latent(61, 576, 2, 64), Layout::Slab, ChunkChoice::Auto, 5);
    assert_promises(&g);
    assert!(g.page_bytes() >= Bytes::mib(16) && g.page_bytes() <= Bytes::mib(32));
    let (first, second) = (g.kernel_id(BlockIndex(0)).unwrap(), g.kernel_id(BlockIndex(g.blocks_per_page())).unwrap());
    assert_eq!(u64::from(second.0 - first.0) * 73_728 % Bytes::mib(2).0, 0, "a page starts on both grids");
    assert!(matches!(g.layer_view(LayerIndex(0), Buffer::Value), Err(GeometryError::NoValueBuffer)));
}

#[test]
fn dense_layouts_hand_out_dense_ids() {
    for layout in [Layout::PerLayer, Layout::Interleaved] {
        let g = build(llama_8b(), layout, ChunkChoice::Auto, 7);
        assert_eq!(g.blocks_per_page(), 64);
        for block in 0..g.block_count() {
            assert_eq!(g.kernel_id(BlockIndex(block)), Ok(KernelId(block)));
        }
    }
}

#[test]
fn ids_between_blocks_belong_to_nobody() {
    let g = build(llama_8b(), Layout::Slab, ChunkChoice::Auto, 2);
    let owned = (0..g.id_count() + 10).filter(|&id| g.block_of(KernelId(id)).is_some()).count();
    assert_eq!(owned, g.block_count() as usize);
    assert_eq!(g.block_of(KernelId(u32::MAX)), None);
}

#[test]
fn unequal_k_and_v_share_ids() {
    let attention = Attention::Heads { kv_heads: 4, key_size: 192, value_size: 128 };
    let shape = KvShape { layers: 5, attention, element_bytes: 2, block_tokens: 16 };
    for layout in Layout::ALL {
        let g = build(shape, layout, ChunkChoice::Auto, 3);
        assert_promises(&g);
        let view = |buffer| g.layer_view(LayerIndex(4), buffer).unwrap();
        assert_eq!(view(Buffer::Key).id_stride, view(Buffer::Value).id_stride);
    }
}

#[test]
fn groups_have_geometries_of_their_own() {
    let full = config(llama_8b(), Layout::Slab, ChunkChoice::Auto, Capacity::Budget(Bytes::gib(4)));
    let window = GeometryConfig { shape: KvShape::heads(6, 4, 256, 2, 32), ..full };
    let model = ModelGeometry::new(&[(GroupId(0), full), (GroupId(1000), window)]).unwrap();
    assert_eq!(model.iter().count(), 2);
    assert_promises(model.group(GroupId(1000)).unwrap());
    assert!(matches!(model.group(GroupId(1)), Err(GeometryError::UnknownGroup { .. })));
    assert_eq!(ModelGeometry::new(&[]), Err(GeometryError::NoGroups));
    let twice = ModelGeometry::new(&[(GroupId(3), full), (GroupId(3), window)]);
    assert_eq!(twice, Err(GeometryError::DuplicateGroup { group: GroupId(3) }));
}

#[test]
fn bad_input_is_refused_in_one_sentence() {
    let ask = |shape, layout, chunk, capacity| {
        Geometry::new(&config(shape, layout, chunk, capacity)).unwrap_err().to_string()
    };
    let two_mib = ChunkChoice::Bytes(Bytes::mib(2));
    let pages = Capacity::Pages(10);
    let shape = llama_8b();
    for (message, part) in [
        (ask(KvShape { layers: 0, ..shape }, Layout::Slab, two_mib, pages), "number of layers is 0"),
        (ask(KvShape { block_tokens: 0, ..shape }, Layout::Slab, two_mib, pages), "block size is 0"),
        (ask(KvShape::heads(1, 0, 128, 2, 16), Layout::Slab, two_mib, pages), "KV heads is 0"),
        (ask(shape, Layout::PerLayer, ChunkChoice::Bytes(Bytes::mib(3)), pages), "multiple of 2 MiB"),
        (ask(shape, Layout::Slab, ChunkChoice::Bytes(Bytes(0)), pages), "multiple of 2 MiB"),
        (ask(shape, Layout::Slab, ChunkChoice::Bytes(Bytes::kib(16)), pages), "does not fit into 16 KiB"),
        (ask(shape, Layout::Interleaved, two_mib, Capacity::Budget(Bytes::mib(100))), "below one page of 128 MiB"),
        (ask(shape, Layout::Slab, two_mib, Capacity::Pages(0)), "number of pages is 0"),
        (ask(shape, Layout::Slab, two_mib, Capacity::Pages(u32::MAX)), "address space"),
        (ask(KvShape::heads(u32::MAX, u32::MAX, u32::MAX, 2, 16), Layout::Slab, two_mib, pages), "past 64 bits"),
        (
            ask(KvShape::heads(1, 1, 1, 1, 128), Layout::PerLayer, two_mib, Capacity::Budget(Bytes::gib(512))),
            "pass 2^31 slots",
        ),
    ] {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
        assert!(!message.contains('\n'));
    }
}

/// Found by fuzzing: products and sums of absurd but representable numbers overflowed instead of being refused.
#[test]
fn absurd_numbers_overflow_nothing() {
    // Ids past the reservation, times a stride of 2^40.
    let wide =
        config(KvShape::latent(1, 1 << 31, 1, 1 << 9), Layout::Interleaved, ChunkChoice::Auto, Capacity::Pages(3));
    assert_eq!(Geometry::new(&wide).unwrap().block_of(KernelId(u32::MAX)), None);
    // More than 2^31 layers: the last buffer's number does not fit 32 bits.
    let deep = KvShape::heads(u32::MAX, 1, 1, 1, 1);
    assert_eq!(deep.buffer_index(LayerIndex(u32::MAX - 1), Buffer::Value), Ok(2 * u64::from(u32::MAX) - 1));
    // A page size near 2^64.
    let chunk = ChunkChoice::Bytes(Bytes(u64::MAX - (2 << 20) + 1));
    assert!(Geometry::new(&config(KvShape::latent(1, 3, 1, 1), Layout::PerLayer, chunk, Capacity::Pages(1))).is_err());
}

prop_compose! {
    fn any_attention()(latent: bool, kv_heads in 1u32..12, key in 1u32..300, value in 1u32..300, same: bool, size in 1u32..1200) -> Attention {
        if latent {
            Attention::Latent { size }
        } else {
            Attention::Heads { kv_heads, key_size: key, value_size: if same { key } else { value } }
        }
    }
}

prop_compose! {
    fn any_shape()(
        attention in any_attention(),
        layers in 1u32..9,
        element_bytes in prop::sample::select(vec![1u32, 2, 4]),
        block_tokens in prop::sample::select(vec![1u32, 16, 32, 64, 128]),
    ) -> KvShape {
        KvShape { layers, attention, element_bytes, block_tokens }
    }
}

prop_compose! {
    fn any_config()(
        shape in any_shape(),
        layout in prop::sample::select(Layout::ALL.to_vec()),
        granularity in prop::sample::select(vec![Bytes::kib(4), Bytes::kib(64), Bytes::mib(2)]),
        chunk in prop_oneof![
            Just(ChunkChoice::Auto),
            (1u64..9).prop_map(|n| ChunkChoice::Bytes(Bytes::mib(n))),
            (1u64..4000).prop_map(|n| ChunkChoice::Bytes(Bytes(n * 1024))),
        ],
        pages in 1u32..40,
    ) -> GeometryConfig {
        GeometryConfig { shape, layout, granularity, chunk, capacity: Capacity::Pages(pages) }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 3 } else { 600 }, failure_persistence: None, ..ProptestConfig::default() })]

    /// Refused or right: there is no third outcome.
    #[test]
    fn every_geometry_keeps_its_promises(config in any_config()) {
        match Geometry::new(&config) {
            Ok(geometry) => assert_promises(&geometry),
            Err(error) => prop_assert!(
                config.chunk != ChunkChoice::Auto,
                "an automatic choice always fits, but: {error} for {config:?}"
            ),
        }
    }

    #[test]
    fn a_budget_is_never_passed(shape in any_shape(), layout in prop::sample::select(Layout::ALL.to_vec()), budget in 1u64..1 << 38) {
        let asked = config(shape, layout, ChunkChoice::Auto, Capacity::Budget(Bytes(budget)));
        if let Ok(g) = Geometry::new(&asked) {
            let used = g.page_bytes().0 * u64::from(g.page_count());
            prop_assert!(used <= budget && budget - used < g.page_bytes().0);
        }
    }

    #[test]
    fn offsets_and_places_are_inverse(page in 0u32..50, handle in 0u32..6, within in 0u64..4096) {
        let placement = Placement::regions(Bytes(4096), 50, 6).unwrap();
        let extent = placement.extent(PageId(page), handle);
        let place = placement.locate(ByteOffset(extent.offset.0 + within));
        prop_assert_eq!(place, Some(Place { page: PageId(page), handle, within }));
        prop_assert_eq!(placement.locate(ByteOffset(placement.reservation_bytes().0 + within)), None);
    }
}
