//! One page size: each raw call alone, and our path beside the raw calls.

use std::sync::Arc;
use std::time::Instant;

use tidekv_core::geometry::Placement;
use tidekv_core::units::{Bytes, PageId};
use tidekv_mem::{MemError, RawPages, RegionOptions, Reservation};

use super::{Plan, SharedBackend};
use crate::stats::Samples;

/// Times of one page size.
#[derive(Debug)]
pub(super) struct PageSizeTimes {
    pub(super) page_bytes: Bytes,
    /// The raw calls of a page's life, in order, by name.
    pub(super) calls: Vec<(&'static str, Samples)>,
    pub(super) raw: MapTimes,
    pub(super) ours: MapTimes,
}

/// Times to map and to unmap one page.
#[derive(Debug, Default)]
pub(super) struct MapTimes {
    pub(super) map: Samples,
    pub(super) unmap: Samples,
}

pub(super) fn measure(backend: &SharedBackend, plan: &Plan, page_bytes: Bytes) -> anyhow::Result<PageSizeTimes> {
    let calls = single_calls(backend, plan, page_bytes)?;
    let mut both = [
        Contender::new(RawSide { pages: backend.raw_pages(page_bytes, plan.pages)? }),
        Contender::new(OurSide { reservation: reserve(backend, page_bytes, plan.pages)? }),
    ];
    // One round unmeasured: first uses of addresses cost page tables that later ones find in place.
    side_by_side(&mut both, plan.pages, 0)?;
    both.iter_mut().for_each(|contender| contender.times = MapTimes::default());
    for round in plan.rounds() {
        side_by_side(&mut both, plan.pages, round)?;
    }
    let [raw, ours] = both.map(|contender| contender.times);
    Ok(PageSizeTimes { page_bytes, calls, raw, ours })
}

/// A side and what was measured of it.
struct Contender {
    side: Box<dyn Side>,
    times: MapTimes,
}

impl Contender {
    fn new(side: impl Side + 'static) -> Self {
        Self { side: Box::new(side), times: MapTimes::default() }
    }
}

/// Something that can map and unmap page `n`.
trait Side {
    fn map(&mut self, page: u32) -> anyhow::Result<()>;
    fn unmap(&mut self, page: u32) -> anyhow::Result<()>;
}

struct RawSide {
    pages: Box<dyn RawPages>,
}

impl Side for RawSide {
    fn map(&mut self, page: u32) -> anyhow::Result<()> {
        let page = page as usize;
        self.pages.create(page)?;
        self.pages.map(page)?;
        self.pages.set_access(page)?;
        Ok(())
    }

    fn unmap(&mut self, page: u32) -> anyhow::Result<()> {
        let page = page as usize;
        self.pages.unmap(page)?;
        self.pages.release(page)?;
        Ok(())
    }
}

struct OurSide {
    reservation: Reservation,
}

impl Side for OurSide {
    fn map(&mut self, page: u32) -> anyhow::Result<()> {
        Ok(self.reservation.map_pages(&[PageId(page)])?)
    }

    fn unmap(&mut self, page: u32) -> anyhow::Result<()> {
        Ok(self.reservation.unmap_pages(&[PageId(page)])?)
    }
}

/// Maps every page on both sides, then unmaps every page on both sides. Who goes first alternates with page and round.
fn side_by_side(both: &mut [Contender; 2], pages: u32, round: u32) -> anyhow::Result<()> {
    let order = |page: u32| {
        if (page + round).is_multiple_of(2) { [0, 1] } else { [1, 0] }
    };
    for page in 0..pages {
        for who in order(page) {
            let Contender { side, times } = &mut both[who];
            timed(&mut times.map, || side.map(page))?;
        }
    }
    for page in 0..pages {
        for who in order(page) {
            let Contender { side, times } = &mut both[who];
            timed(&mut times.unmap, || side.unmap(page))?;
        }
    }
    Ok(())
}

fn single_calls(
    backend: &SharedBackend,
    plan: &Plan,
    page_bytes: Bytes,
) -> anyhow::Result<Vec<(&'static str, Samples)>> {
    type RawCall = fn(&mut dyn RawPages, usize) -> Result<(), MemError>;
    let steps: [(&'static str, RawCall); 5] = [
        ("create", |pages, page| pages.create(page)),
        ("map", |pages, page| pages.map(page)),
        ("set_access", |pages, page| pages.set_access(page)),
        ("unmap", |pages, page| pages.unmap(page)),
        ("release", |pages, page| pages.release(page)),
    ];
    let mut reserve = Samples::new();
    let mut times = steps.map(|_| Samples::new());
    for _ in plan.rounds() {
        let mut pages = None;
        timed(&mut reserve, || {
            pages = Some(backend.raw_pages(page_bytes, plan.pages)?);
            Ok(())
        })?;
        let Some(mut pages) = pages else { continue };
        // The whole batch through each call, so that no call is timed in the other one's shadow.
        for ((_, call), times) in steps.iter().zip(&mut times) {
            for page in 0..plan.pages as usize {
                timed(times, || Ok(call(&mut *pages, page)?))?;
            }
        }
    }
    let named = steps.iter().map(|(name, _)| *name).zip(times);
    Ok(std::iter::once(("reserve", reserve)).chain(named).collect())
}

/// Times one call; a call that fails is no sample.
pub(super) fn timed(times: &mut Samples, call: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
    let started = Instant::now();
    call()?;
    times.push_duration(started.elapsed());
    Ok(())
}

pub(super) fn reserve(backend: &SharedBackend, page_bytes: Bytes, pages: u32) -> Result<Reservation, MemError> {
    Reservation::new(Arc::clone(backend), Placement::uniform(page_bytes, pages)?, RegionOptions::default())
}
