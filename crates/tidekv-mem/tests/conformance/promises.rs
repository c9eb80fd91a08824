//! The ordinary promises: bytes, addresses, refusals.

use std::sync::Arc;

use tidekv_core::geometry::{Capacity, ChunkChoice, Geometry, GeometryConfig, KvShape, Layout, Placement};
use tidekv_core::units::{BlockIndex, Buffer, ByteOffset, Bytes, LayerIndex, PageId};
use tidekv_mem::{MapError, MemError, PageUse, RegionOptions, Reservation, UnmapError, UnmappedReads};

use crate::Rig;
use crate::support::{mark, marked, pages, reserve, start};

pub(crate) fn bytes_are_kept(rig: &Rig) {
    for layout in Layout::ALL {
        let config = GeometryConfig {
            shape: KvShape::heads(3, 2, 64, 2, 16),
            layout,
            granularity: rig.backend.capabilities().granularity,
            chunk: ChunkChoice::Bytes(rig.page),
            capacity: Capacity::Pages(4),
        };
        let geometry = Geometry::new(&config).unwrap();
        let reservation =
            Reservation::new(Arc::clone(&rig.backend), *geometry.placement(), RegionOptions::default()).unwrap();
        reservation.map_pages(&pages([0, 3])).unwrap();
        assert_eq!(rig.backend.held(), Bytes(2 * geometry.page_bytes().0), "{}", layout.name());

        // Every block of both pages, in every layer and buffer, gets a value of its own; then all are read back.
        let per_page = geometry.blocks_per_page();
        let blocks: Vec<u32> = (0..per_page).chain(3 * per_page..4 * per_page).step_by(3).collect();
        let each = |visit: &mut dyn FnMut(ByteOffset, u8)| {
            let mut value = 1u8;
            for &block in &blocks {
                for layer in 0..3 {
                    for buffer in [Buffer::Key, Buffer::Value] {
                        visit(geometry.byte_offset(BlockIndex(block), LayerIndex(layer), buffer).unwrap(), value);
                        value = value.wrapping_mul(31).wrapping_add(7);
                    }
                }
            }
        };
        let block_bytes = usize::try_from(geometry.shape().block_bytes(Buffer::Key).unwrap().0).unwrap();
        each(&mut |offset, value| reservation.write(offset, &vec![value; block_bytes]).unwrap());
        let mut bytes = vec![0; block_bytes];
        each(&mut |offset, value| {
            reservation.read(offset, &mut bytes).unwrap();
            assert!(bytes.iter().all(|byte| *byte == value), "{} at {offset:?}", layout.name());
        });
        reservation.unmap_pages(&pages([3, 0])).unwrap();
        rig.assert_nothing_held();
    }
}

pub(crate) fn other_pages_are_untouched(rig: &Rig) {
    let reservation = reserve(&rig.backend, rig.page, 8);
    reservation.map_pages(&pages([0, 1, 2])).unwrap();
    for page in 0..3 {
        mark(&reservation, page, 10 + u8::try_from(page).unwrap());
    }
    // The memory of page 1 goes, and comes again elsewhere.
    reservation.unmap_pages(&pages([1])).unwrap();
    reservation.map_pages(&pages([5])).unwrap();
    mark(&reservation, 5, 99);
    assert_eq!(marked(&reservation, 1), None, "an unmapped page cannot be read");
    assert!(matches!(reservation.write(start(&reservation, 1), &[1]), Err(MemError::NotMapped { .. })));
    for (page, value) in [(0, 10), (2, 12), (5, 99)] {
        assert_eq!(marked(&reservation, page), Some(value), "page {page}");
    }
    // Page 1 again: the others still do not notice.
    reservation.map_pages(&pages([1])).unwrap();
    mark(&reservation, 1, 77);
    for (page, value) in [(0, 10), (1, 77), (2, 12), (5, 99)] {
        assert_eq!(marked(&reservation, page), Some(value), "page {page}");
    }
    assert_eq!(reservation.mapped_pages(), 4);
}

pub(crate) fn bad_batches_change_nothing(rig: &Rig) {
    let reservation = reserve(&rig.backend, rig.page, 4);
    reservation.map_pages(&pages([1])).unwrap();
    let calls = rig.backend.meter().total();
    assert!(matches!(
        reservation.map_pages(&pages([0, 4])),
        Err(MapError::OutOfRange { page: PageId(4), last: PageId(3) })
    ));
    assert!(matches!(reservation.map_pages(&pages([0, u32::MAX])), Err(MapError::OutOfRange { .. })));
    assert!(matches!(reservation.map_pages(&pages([0, 1])), Err(MapError::AlreadyMapped { page: PageId(1) })));
    assert!(matches!(reservation.map_pages(&pages([0, 2, 0])), Err(MapError::Busy { page: PageId(0) })));
    assert!(matches!(reservation.unmap_pages(&pages([1, 0])), Err(UnmapError::NotMapped { page: PageId(0) })));
    assert!(matches!(reservation.unmap_pages(&pages([1, 1])), Err(UnmapError::Busy { page: PageId(1) })));
    assert!(matches!(reservation.unmap_pages(&pages([1, 9])), Err(UnmapError::OutOfRange { .. })));
    assert_eq!(rig.backend.meter().total(), calls, "refused before the system was asked");
    let uses: Vec<_> = (0..4).map(|page| reservation.page_use(PageId(page)).unwrap()).collect();
    assert_eq!(uses, [PageUse::Unmapped, PageUse::Mapped, PageUse::Unmapped, PageUse::Unmapped]);
    assert_eq!(reservation.page_use(PageId(4)), None);
    reservation.map_pages(&[]).unwrap();
    reservation.unmap_pages(&[]).unwrap();
    // A range over the end of a page is not inside one.
    let end = start(&reservation, 1).0 + rig.page.0;
    assert!(matches!(reservation.read(ByteOffset(end - 1), &mut [0; 2]), Err(MemError::NotMapped { .. })));
    assert!(matches!(reservation.read(ByteOffset(u64::MAX), &mut [0; 2]), Err(MemError::NotMapped { .. })));
}

pub(crate) fn addresses_never_move(rig: &Rig) {
    let reservation = reserve(&rig.backend, rig.page, 6);
    let base = reservation.base_address();
    for round in 0..50u32 {
        let page = round * 7 % 6;
        reservation.map_pages(&pages([page])).unwrap();
        assert_eq!(reservation.base_address(), base);
        reservation.unmap_pages(&pages([page])).unwrap();
    }
    assert_eq!(reservation.base_address(), base);
}

pub(crate) fn out_of_memory_is_a_value(rig: &Rig) {
    let (backend, page, room) = &rig.scarce;
    let reservation = reserve(backend, *page, room + 2);
    let mut mapped = 0;
    let refused = loop {
        match reservation.map_pages(&pages([mapped])) {
            Ok(()) => mapped += 1,
            Err(error) => break error,
        }
    };
    assert!(refused.is_out_of_memory() && refused.is_transient(), "{refused:?}");
    assert!(mapped >= 1 && mapped <= *room, "{mapped} pages before memory ran out");
    let (held, witness) = (backend.held(), reservation.witness());
    assert_eq!(held, Bytes(page.0 * u64::from(mapped)));

    // A batch whose second page does not fit leaves the first one unmapped too.
    reservation.unmap_pages(&pages([0])).unwrap();
    let batch = reservation.map_pages(&pages([0, mapped])).unwrap_err();
    assert!(matches!(batch, MapError::Refused { page: PageId(page), stuck: 0, .. } if page == mapped), "{batch:?}");
    assert_eq!(reservation.mapped_pages(), mapped - 1);
    reservation.map_pages(&pages([0])).expect("what was given back can be had again");
    assert_eq!((backend.held(), reservation.witness()), (held, witness));
    mark(&reservation, 0, 42);
    assert_eq!(marked(&reservation, 0), Some(42), "and works");
}

pub(crate) fn unmapped_addresses_can_read_as_zeros(rig: &Rig) {
    let placement = Placement::uniform(rig.page, 3).unwrap();
    let options = RegionOptions { unmapped_reads: UnmappedReads::Zeros };
    let reservation = Reservation::new(Arc::clone(&rig.backend), placement, options).unwrap();
    assert_eq!((0..3).map(|page| marked(&reservation, page)).collect::<Vec<_>>(), [Some(0); 3]);
    assert!(matches!(reservation.write(start(&reservation, 1), &[1]), Err(MemError::NotMapped { .. })));
    reservation.map_pages(&pages([1])).unwrap();
    mark(&reservation, 1, 5);
    assert_eq!((0..3).map(|page| marked(&reservation, page)).collect::<Vec<_>>(), [Some(0), Some(5), Some(0)]);
    reservation.unmap_pages(&pages([1])).unwrap();
    assert_eq!((0..3).map(|page| marked(&reservation, page)).collect::<Vec<_>>(), [Some(0); 3]);
}

pub(crate) fn dropping_gives_all_back(rig: &Rig) {
    let free_before = rig.backend.memory().unwrap().free;
    for _ in 0..3 {
        let reservation = reserve(&rig.backend, rig.page, 16);
        reservation.map_pages(&pages(0..16)).unwrap();
        mark(&reservation, 15, 1);
        assert_eq!(rig.backend.held(), Bytes(rig.page.0 * 16));
        drop(reservation);
        rig.backend.trim_cache().unwrap();
        rig.assert_nothing_held();
    }
    if rig.backend.capabilities().name == "cuda" {
        assert_eq!(rig.backend.memory().unwrap().free, free_before, "the driver counts the same");
    }
}

pub(crate) fn everything_can_be_unmapped_and_the_addresses_stay(rig: &Rig) {
    let reservation = reserve(&rig.backend, rig.page, 8);
    let base = reservation.base_address();
    assert_eq!(reservation.unmap_all(), 0, "nothing to do");
    reservation.map_pages(&pages([1, 4, 7])).unwrap();
    mark(&reservation, 4, 9);
    assert_eq!(reservation.unmap_all(), 0);
    rig.backend.trim_cache().unwrap();
    assert_eq!((reservation.mapped_pages(), rig.backend.held()), (0, Bytes::ZERO));
    assert!(matches!(reservation.read(start(&reservation, 4), &mut [0]), Err(MemError::NotMapped { .. })));
    reservation.map_pages(&pages([4])).expect("the addresses are there");
    assert_eq!((reservation.base_address(), marked(&reservation, 4)), (base, Some(0)));
}

pub(crate) fn bad_page_sizes_are_refused(rig: &Rig) {
    let granularity = rig.backend.capabilities().granularity;
    for bad in [Bytes(1), Bytes(granularity.0 - 1), Bytes(granularity.0 * 3 / 2)] {
        let placement = Placement::uniform(bad, 2).unwrap();
        let refused = Reservation::new(Arc::clone(&rig.backend), placement, RegionOptions::default()).unwrap_err();
        let text = refused.to_string();
        assert!(
            matches!(refused, MemError::PageSize { .. }) && text.contains(&format!("multiple of {granularity}")),
            "{text}"
        );
        assert!(matches!(rig.backend.raw_pages(bad, 2), Err(MemError::PageSize { .. })));
    }
    assert!(matches!(rig.backend.raw_pages(Bytes::ZERO, 2), Err(MemError::PageSize { .. })));
}
