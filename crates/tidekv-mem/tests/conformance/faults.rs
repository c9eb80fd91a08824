//! Every call to the system below fails once, at every position, and the real rollback runs.

use std::sync::Arc;

use tidekv_core::geometry::{Capacity, ChunkChoice, Geometry, GeometryConfig, KvShape, Layout};
use tidekv_core::units::{Bytes, PageId};
use tidekv_mem::{Backend, Call, MapError, MemError, PageUse, RegionOptions, Reservation, UnmapError};

use crate::Rig;
use crate::support::{mark, marked, pages, reserve};

/// Two layers of K and V in the per-layer layout: four handles per page, so that a page can fail halfway.
fn reserve_several_handles(rig: &Rig) -> Reservation {
    let config = GeometryConfig {
        shape: KvShape::heads(2, 1, 64, 2, 16),
        layout: Layout::PerLayer,
        granularity: rig.backend.capabilities().granularity,
        chunk: ChunkChoice::Bytes(rig.page),
        capacity: Capacity::Pages(6),
    };
    let geometry = Geometry::new(&config).unwrap();
    Reservation::new(Arc::clone(&rig.backend), *geometry.placement(), RegionOptions::default()).unwrap()
}

fn snapshot(reservation: &Reservation) -> (Vec<Option<PageUse>>, u32, u32, Bytes, Option<Bytes>) {
    let uses = (0..reservation.placement().page_count()).map(|page| reservation.page_use(PageId(page))).collect();
    let backend: &Arc<dyn Backend> = reservation.backend();
    backend.trim_cache().unwrap();
    (uses, reservation.mapped_pages(), reservation.stuck_pages(), backend.held(), reservation.witness())
}

pub(crate) fn a_failing_call_leaves_no_trace(rig: &Rig) {
    let reservation = reserve_several_handles(rig);
    reservation.map_pages(&pages([4])).unwrap();
    mark(&reservation, 4, 44);
    let before = snapshot(&reservation);
    for call in [Call::Create, Call::Map, Call::SetAccess] {
        // Three pages of four handles: every position in the batch.
        for nth in 1..=12 {
            rig.backend.meter().fail_nth(call, nth);
            let error = reservation.map_pages(&pages([0, 5, 2])).unwrap_err();
            let MapError::Refused { stuck: 0, source: MemError::Injected { call: failed }, .. } = error else {
                panic!("{call} {nth}: {error:?}");
            };
            assert_eq!(failed, call);
            assert_eq!(snapshot(&reservation), before, "after failing {call} {nth}");
            assert_eq!(marked(&reservation, 4), Some(44), "the neighbour's bytes");
        }
    }
    rig.backend.meter().heal();
    reservation.map_pages(&pages([0, 5, 2])).expect("the same batch works once the fault is gone");
    rig.backend.meter().fail_nth(Call::Reserve, 1);
    let placement = *reservation.placement();
    let refused = Reservation::new(Arc::clone(&rig.backend), placement, RegionOptions::default());
    assert!(matches!(refused, Err(MemError::Injected { call: Call::Reserve })));
}

pub(crate) fn stuck_memory_is_counted_and_retried(rig: &Rig) {
    // The cache would take the handle without asking the driver.
    let reservation = reserve(&rig.backend, rig.page, 4);
    // The map fails at the very end, and undoing it fails too.
    rig.backend.meter().fail_nth(Call::SetAccess, 2);
    rig.backend.meter().fail_nth(Call::Unmap, 1);
    let error = reservation.map_pages(&pages([0, 1])).unwrap_err();
    assert!(matches!(error, MapError::Refused { page: PageId(1), stuck: 1, .. }), "{error:?}");
    assert_eq!((reservation.mapped_pages(), reservation.stuck_pages()), (0, 1));
    assert_eq!(reservation.page_use(PageId(1)), Some(PageUse::Stuck));
    rig.backend.trim_cache().unwrap();
    assert_eq!(rig.backend.held(), rig.page, "what is stuck is still counted as held");
    assert!(matches!(reservation.map_pages(&pages([1])), Err(MapError::Stuck { page: PageId(1) })));
    assert_eq!(marked(&reservation, 1), None, "a stuck page cannot be used");

    reservation.unmap_pages(&pages([1])).expect("the second try succeeds");
    assert_eq!(reservation.stuck_pages(), 0);
    reservation.map_pages(&pages([0, 1])).unwrap();
    // Left stuck when the reservation goes: dropping is one more try.
    rig.backend.meter().fail_nth(Call::Unmap, 1);
    assert!(matches!(reservation.unmap_pages(&pages([0])), Err(UnmapError::Stuck { .. })));
}

pub(crate) fn a_failed_unmap_strands_no_other_page(rig: &Rig) {
    let reservation = reserve_several_handles(rig);
    for call in [Call::Unmap, Call::Release] {
        for nth in 1..=12 {
            reservation.map_pages(&pages([0, 1, 2])).unwrap();
            rig.backend.meter().fail_nth(call, nth);
            match reservation.unmap_pages(&pages([0, 1, 2])) {
                Err(UnmapError::Stuck { stuck, source: MemError::Injected { .. } }) => {
                    assert_eq!(stuck.len(), 1, "{call} {nth}");
                    assert_eq!((reservation.mapped_pages(), reservation.stuck_pages()), (0, 1));
                    rig.backend.trim_cache().unwrap();
                    assert_eq!(rig.backend.held(), rig.page, "only the one handle of that page stays");
                    reservation.unmap_pages(&stuck).unwrap();
                }
                // A handle that goes to the cache is not released, so a release may come less often than twelve times.
                Ok(()) => assert!(call == Call::Release && rig.backend.held() > Bytes::ZERO),
                Err(other) => panic!("{call} {nth}: {other:?}"),
            }
            rig.backend.meter().heal();
            rig.backend.trim_cache().unwrap();
            assert_eq!((reservation.mapped_pages(), reservation.stuck_pages()), (0, 0));
            rig.assert_nothing_held();
        }
    }
}
