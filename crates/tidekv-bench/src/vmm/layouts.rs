//! One page id of a whole model, in one layout.

use std::sync::Arc;

use anyhow::Context;
use tidekv_core::geometry::{Capacity, Geometry, GeometryConfig, KvShape, Layout};
use tidekv_core::units::{Bytes, PageId};
use tidekv_mem::{Backend, RegionOptions, Reservation};

use super::calls::{MapTimes, timed};
use super::{Plan, SharedBackend};
use crate::progress::Progress;
use crate::stats::{Samples, to_f64};

/// The model: 8 KV heads of 128 elements, bf16, as Llama 3 8B and many others.
const KV_HEADS: u32 = 8;
const HEAD_SIZE: u32 = 128;
const ELEMENT_BYTES: u32 = 2;

/// Reservations of the whole device that are timed.
const INIT_ROUNDS: u32 = 5;

/// Times of one layout.
#[derive(Debug)]
pub(super) struct LayoutTimes {
    pub(super) geometry: Geometry,
    pub(super) init: Samples,
    pub(super) page: MapTimes,
    pub(super) calls_per_page: f64,
}

/// The layout over all memory that the device has.
pub(super) fn geometry(plan: &Plan, layout: Layout, backend: &dyn Backend) -> anyhow::Result<Geometry> {
    let config = GeometryConfig {
        shape: KvShape::heads(plan.layers, KV_HEADS, HEAD_SIZE, ELEMENT_BYTES, plan.block_size),
        layout,
        granularity: backend.capabilities().granularity,
        chunk: plan.chunk,
        capacity: Capacity::Budget(backend.memory()?.total),
    };
    Ok(Geometry::new(&config)?)
}

/// All layouts, in short rounds that take turns: whatever slows the machine for a while slows each of them.
pub(super) fn measure(backend: &SharedBackend, plan: &Plan, progress: &Progress) -> anyhow::Result<Vec<LayoutTimes>> {
    let bytes = bytes_per_turn(plan, &**backend)?;
    let mut turns = Vec::new();
    for &layout in &plan.layouts_measured {
        turns.push(Turn::new(backend, plan, layout, bytes).with_context(|| format!("the {} layout", layout.name()))?);
    }
    for round in plan.rounds() {
        for turn in &mut turns {
            turn.round().with_context(|| format!("round {round} of the {} layout", turn.geometry.layout().name()))?;
        }
        progress.step();
    }
    Ok(turns.into_iter().map(Turn::finish).collect())
}

/// A layout while it is being measured.
struct Turn {
    geometry: Geometry,
    reservation: Reservation,
    pages: u32,
    init: Samples,
    times: MapTimes,
    calls: u64,
}

impl Turn {
    fn new(backend: &SharedBackend, plan: &Plan, layout: Layout, bytes: Bytes) -> anyhow::Result<Self> {
        let geometry = geometry(plan, layout, &**backend)?;
        let reserve = || Reservation::new(Arc::clone(backend), *geometry.placement(), RegionOptions::default());
        let mut init = Samples::new();
        for _ in 0..INIT_ROUNDS {
            let mut reservation = None;
            timed(&mut init, || {
                reservation = Some(reserve()?);
                Ok(())
            })?;
        }
        let pages = u32::try_from(bytes.0 / geometry.page_bytes().0).unwrap_or(u32::MAX).min(geometry.page_count());
        let reservation = reserve()?;
        // One round unmeasured, as for the page sizes.
        one_round(&reservation, pages, &mut MapTimes::default())?;
        Ok(Self { geometry, reservation, pages, init, times: MapTimes::default(), calls: 0 })
    }

    fn round(&mut self) -> anyhow::Result<()> {
        let meter = self.reservation.backend().meter();
        let before = meter.total();
        one_round(&self.reservation, self.pages, &mut self.times)?;
        self.calls += meter.total() - before;
        Ok(())
    }

    fn finish(self) -> LayoutTimes {
        let Self { geometry, init, times, calls, .. } = self;
        let calls_per_page = to_f64(calls) / to_f64(times.map.len() as u64);
        LayoutTimes { geometry, init, page: times, calls_per_page }
    }
}

fn one_round(reservation: &Reservation, pages: u32, times: &mut MapTimes) -> anyhow::Result<()> {
    for page in (0..pages).map(PageId) {
        timed(&mut times.map, || Ok(reservation.map_pages(&[page])?))?;
    }
    for page in (0..pages).map(PageId) {
        timed(&mut times.unmap, || Ok(reservation.unmap_pages(&[page])?))?;
    }
    Ok(())
}

/// What every layout maps in one turn: as many of the largest page ids as asked for and as fit into half of what is free.
/// Equal bytes for all, so that a time per GiB means the same in each.
fn bytes_per_turn(plan: &Plan, backend: &dyn Backend) -> anyhow::Result<Bytes> {
    let mut largest = Bytes::ZERO;
    for &layout in &plan.layouts_measured {
        largest = largest.max(geometry(plan, layout, backend)?.page_bytes());
    }
    let half = Bytes(backend.memory()?.free.0 / 2);
    anyhow::ensure!(
        largest <= half,
        "one page id takes {largest}, more than half of the free memory: use fewer --layers"
    );
    Ok(Bytes(half.0.min(largest.0 * u64::from(plan.pages))))
}
