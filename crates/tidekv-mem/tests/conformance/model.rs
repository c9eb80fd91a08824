//! Long random runs: against a plain model, and from several threads at once.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};

use tidekv_core::units::{ByteOffset, Bytes, PageId};
use tidekv_mem::{Call, MapError, PageUse, UnmapError};

use crate::Rig;
use crate::support::{Random, mark, marked, pages, reserve};

const PAGES: u32 = 24;
const OPERATIONS: u32 = 10_000;

/// The model: which pages have memory, and the mark on each once it was written.
type Model = BTreeMap<u32, Option<u8>>;

pub(crate) fn random_operations_agree_with_a_model(rig: &Rig) {
    let reservation = reserve(&rig.backend, rig.page, PAGES);
    let mut random = Random::new(0x7165_6b76);
    let mut model = Model::new();
    for step in 0..OPERATIONS {
        let batch: Vec<u32> = (0..=random.below(3)).map(|_| random.page(PAGES + 1)).collect();
        let unique = batch.iter().enumerate().all(|(at, page)| !batch[..at].contains(page));
        let inside = batch.iter().all(|page| *page < PAGES);
        let faulty = random.below(20) == 0;
        match random.below(6) {
            0 | 1 => {
                let possible = unique && inside && batch.iter().all(|page| !model.contains_key(page));
                if faulty && possible {
                    rig.backend.meter().fail_nth(Call::SetAccess, 1 + random.below(batch.len() as u64));
                }
                match reservation.map_pages(&pages(batch.clone())) {
                    Ok(()) => {
                        assert!(possible && !faulty, "step {step}: {batch:?}");
                        model.extend(batch.iter().map(|page| (*page, None)));
                    }
                    Err(MapError::Refused { stuck: 0, .. }) => assert!(faulty, "step {step}: {batch:?}"),
                    Err(error) => assert!(!possible, "step {step}: {error}"),
                }
            }
            2 | 3 => {
                let possible = unique && inside && batch.iter().all(|page| model.contains_key(page));
                match reservation.unmap_pages(&pages(batch.clone())) {
                    Ok(()) => {
                        assert!(possible, "step {step}: {batch:?}");
                        model.retain(|page, _| !batch.contains(page));
                    }
                    Err(UnmapError::Stuck { .. }) => panic!("step {step}: stuck without a fault"),
                    Err(_) => assert!(!possible, "step {step}: {batch:?}"),
                }
            }
            4 => {
                if let Some(value) = model.get_mut(&batch[0]) {
                    let new = u8::try_from(step % 251).unwrap();
                    mark(&reservation, batch[0], new);
                    *value = Some(new);
                }
            }
            _ => {
                if let Some(Some(value)) = model.get(&batch[0]) {
                    assert_eq!(marked(&reservation, batch[0]), Some(*value), "step {step}");
                }
            }
        }
        assert_eq!(reservation.mapped_pages() as usize, model.len(), "step {step}");
    }
    // Every mark that was ever written to a page that is still there.
    for (page, value) in &model {
        assert_eq!(reservation.page_use(PageId(*page)), Some(PageUse::Mapped));
        if value.is_some() {
            assert_eq!(marked(&reservation, *page), *value);
        }
    }
    rig.backend.trim_cache().unwrap();
    assert_eq!(rig.backend.held(), Bytes(rig.page.0 * model.len() as u64));
    assert_eq!(reservation.stuck_pages(), 0);
}

pub(crate) fn threads_work_side_by_side(rig: &Rig) {
    let reservation = reserve(&rig.backend, rig.page, PAGES);
    // Who holds each page: 0 for nobody. Two holders at once would be seen here.
    let holders: Vec<AtomicU32> = (0..PAGES).map(|_| AtomicU32::new(0)).collect();
    std::thread::scope(|scope| {
        for thread in 1..=4u32 {
            let (reservation, holders) = (&reservation, &holders);
            scope.spawn(move || {
                let mut random = Random::new(u64::from(thread) * 7919);
                let mut held: Option<u32> = None;
                for _ in 0..400 {
                    match held.take() {
                        None => {
                            let page = random.page(PAGES);
                            match reservation.map_pages(&pages([page])) {
                                Ok(()) => {
                                    assert_eq!(
                                        holders[page as usize].swap(thread, Ordering::SeqCst),
                                        0,
                                        "page {page} has two holders"
                                    );
                                    mark(reservation, page, u8::try_from(thread).unwrap());
                                    held = Some(page);
                                }
                                Err(MapError::AlreadyMapped { .. } | MapError::Busy { .. }) => {}
                                Err(error) => panic!("{error}"),
                            }
                        }
                        Some(page) => {
                            assert_eq!(
                                marked(reservation, page),
                                Some(u8::try_from(thread).unwrap()),
                                "someone wrote to page {page}"
                            );
                            assert_eq!(holders[page as usize].swap(0, Ordering::SeqCst), thread);
                            reservation.unmap_pages(&pages([page])).unwrap();
                        }
                    }
                }
                if let Some(page) = held {
                    holders[page as usize].store(0, Ordering::SeqCst);
                    reservation.unmap_pages(&pages([page])).unwrap();
                }
            });
        }
    });
    assert_eq!((reservation.mapped_pages(), reservation.stuck_pages()), (0, 0));
}

/// Each thread has a part of the page for itself; all of them read and write at once.
pub(crate) fn threads_copy_from_and_to_one_page(rig: &Rig) {
    let reservation = reserve(&rig.backend, rig.page, 1);
    reservation.map_pages(&pages([0])).unwrap();
    let part = usize::try_from(rig.page.0 / 4).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4u8 {
            let reservation = &reservation;
            scope.spawn(move || {
                let offset = ByteOffset(u64::from(thread) * part as u64);
                let mut bytes = vec![0; part];
                for round in 0..60u8 {
                    reservation.write(offset, &vec![round ^ thread; part]).unwrap();
                    for _ in 0..3 {
                        assert_eq!(reservation.page_use(PageId(0)), Some(PageUse::Mapped));
                        reservation.read(offset, &mut bytes).unwrap();
                        assert!(bytes.iter().all(|byte| *byte == round ^ thread));
                    }
                }
            });
        }
    });
    reservation.unmap_pages(&pages([0])).unwrap();
}
