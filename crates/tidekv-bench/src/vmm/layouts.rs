//! One page id of a whole model, in one layout.

use std::sync::Arc;

use tidekv_core::geometry::{Capacity, Geometry, GeometryConfig, KvShape, Layout};
use tidekv_core::units::{Bytes, PageId};
use tidekv_mem::{Backend, RegionOptions, Reservation};

use super::calls::{MapTimes, timed};
use super::{Plan, SharedBackend};
use crate::stats::Samples;

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

pub(super) fn measure(backend: &SharedBackend, plan: &Plan, layout: Layout) -> anyhow::Result<LayoutTimes> {
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

    let reservation = reserve()?;
    let pages = pages_at_once(plan, &geometry, &**backend)?;
    let mut page_times = MapTimes::default();
    one_round(&reservation, pages, &mut MapTimes::default())?;
    let calls_before = backend.meter().total();
    for _ in plan.rounds() {
        one_round(&reservation, pages, &mut page_times)?;
    }
    #[expect(clippy::cast_precision_loss, reason = "a ratio of counts far below 2^53")]
    let calls_per_page = (backend.meter().total() - calls_before) as f64 / page_times.map.len() as f64;
    Ok(LayoutTimes { geometry, init, page: page_times, calls_per_page })
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

/// As many page ids as asked for and as fit into half of what is free.
fn pages_at_once(plan: &Plan, geometry: &Geometry, backend: &dyn Backend) -> anyhow::Result<u32> {
    let half = Bytes(backend.memory()?.free.0 / 2);
    let fit = u32::try_from(half.0 / geometry.page_bytes().0).unwrap_or(u32::MAX);
    anyhow::ensure!(
        fit > 0,
        "one page id takes {}, more than half of the free memory: use fewer --layers",
        geometry.page_bytes()
    );
    Ok(plan.pages.min(fit).min(geometry.page_count()))
}
