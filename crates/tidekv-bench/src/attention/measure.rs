//! Turns of reading, attending and copying, on whatever card there is.

use std::time::Duration;

use super::{Cell, PLAIN_BYTES, Plan, Variant};
use crate::host::HostInfo;
use crate::progress::Progress;
use crate::stats::{Samples, to_f64};
use tidekv_core::units::Bytes;

/// A card, as far as it is measured here.
pub(super) trait Card {
    /// The machine with the card in it.
    fn host(&self) -> HostInfo;

    /// Keys and values that a step of this cell reads.
    fn kv_bytes(&self, cell: Cell) -> Bytes;

    /// Memory that nobody has, now.
    fn free(&self) -> anyhow::Result<Bytes>;

    /// Takes plain memory, twice so much.
    fn plain(&self, bytes: Bytes) -> anyhow::Result<Box<dyn Plain>>;

    /// Fills a pool of this layout with the cell's rows.
    fn attention(&self, cell: Cell, variant: Variant) -> anyhow::Result<Box<dyn Attention>>;
}

/// Memory that is read and copied.
pub(super) trait Plain {
    fn bytes(&self) -> Bytes;
    fn time_read(&self) -> anyhow::Result<Duration>;
    fn time_copy(&self) -> anyhow::Result<Duration>;
}

/// One step's attention.
pub(super) trait Attention {
    fn page_bytes(&self) -> Bytes;
    fn time(&self) -> anyhow::Result<Duration>;
}

/// What was seen.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) cells: Vec<CellTimes>,
    pub(super) left_out: Vec<Cell>,
}

/// One cell, layout by layout.
#[derive(Debug)]
pub(super) struct CellTimes {
    pub(super) cell: Cell,
    pub(super) kv_bytes: Bytes,
    pub(super) plain_bytes: Bytes,
    pub(super) layouts: Vec<LayoutTimes>,
}

/// One layout, and the turns of plain memory in between.
#[derive(Debug)]
pub(super) struct LayoutTimes {
    pub(super) variant: Variant,
    pub(super) page_bytes: Bytes,
    pub(super) attention: Samples,
    pub(super) read: Samples,
    pub(super) copy: Samples,
}

/// Measures every cell that fits.
pub(super) fn measure(plan: &Plan, card: &dyn Card, progress: &Progress) -> anyhow::Result<Measured> {
    let mut measured = Measured { cells: Vec::new(), left_out: Vec::new() };
    for cell in plan.cells() {
        let kv_bytes = card.kv_bytes(cell);
        let plain_bytes = kv_bytes.min(PLAIN_BYTES);
        // Pages are filled to the last block but one, and the tables beside them are small.
        let needed = kv_bytes.0 + kv_bytes.0 / 16 + 2 * plain_bytes.0 + Bytes::mib(512).0;
        if needed > card.free()?.0 {
            measured.left_out.push(cell);
            plan.variants.iter().for_each(|_| progress.step());
            continue;
        }
        let plain = card.plain(plain_bytes)?;
        let mut layouts = Vec::new();
        for &variant in &plan.variants {
            progress.now(format!("{cell}, {variant}"));
            layouts.push(turns(plan, &*plain, &*card.attention(cell, variant)?, variant)?);
            progress.step();
        }
        measured.cells.push(CellTimes { cell, kv_bytes, plain_bytes: plain.bytes(), layouts });
    }
    anyhow::ensure!(!measured.cells.is_empty(), "no cell fits into the card's free memory: give a smaller --batch");
    Ok(measured)
}

fn turns(plan: &Plan, plain: &dyn Plain, attention: &dyn Attention, variant: Variant) -> anyhow::Result<LayoutTimes> {
    let room = || Samples::with_capacity(plan.samples as usize);
    let page_bytes = attention.page_bytes();
    let mut times = LayoutTimes { variant, page_bytes, attention: room(), read: room(), copy: room() };
    for turn in 0..=plan.samples {
        let (read, attended, copied) = (plain.time_read()?, attention.time()?, plain.time_copy()?);
        // The first turn loads kernels and wakes clocks.
        if turn > 0 {
            times.read.push_duration(read);
            times.attention.push_duration(attended);
            times.copy.push_duration(copied);
        }
    }
    Ok(times)
}

/// Bytes a nanosecond, which are GB a second: by the median.
pub(super) fn speed(bytes: Bytes, times: &Samples) -> f64 {
    let median = times.percentiles().map_or(f64::INFINITY, |percentiles| to_f64(percentiles.p50));
    to_f64(bytes.0) / median.max(1.0)
}

impl CellTimes {
    /// All turns of plain memory.
    pub(super) fn plain(&self, of: impl Fn(&LayoutTimes) -> &Samples) -> f64 {
        let mut all = Samples::new();
        self.layouts.iter().for_each(|layout| all.extend(of(layout)));
        speed(self.plain_bytes, &all)
    }

    /// What attention reads in a second, in GB.
    pub(super) fn gb_per_s(&self, layout: &LayoutTimes) -> f64 {
        speed(self.kv_bytes, &layout.attention)
    }

    /// Of what reading alone manages in the same moments.
    pub(super) fn share_of_read(&self, layout: &LayoutTimes) -> f64 {
        self.gb_per_s(layout) / speed(self.plain_bytes, &layout.read)
    }

    /// For a byte.
    pub(super) fn time_over_copy(&self, layout: &LayoutTimes) -> f64 {
        speed(self.plain_bytes, &layout.copy) / self.gb_per_s(layout)
    }
}
