//! What the integration tests share: opening a back-end for a test, skipping loudly, a small random source.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part of this")]

use std::io::Write;
use std::sync::Arc;

use tidekv_core::geometry::Placement;
use tidekv_core::units::{ByteOffset, Bytes, PageId};
use tidekv_mem::cuda::{CudaBackend, CudaOptions};
use tidekv_mem::{Backend, MemError, RegionOptions, Reservation};

/// Opens a GPU, or says loudly that the test did not run. With `TIDEKV_REQUIRE_GPU` set, not running is a failure.
pub fn cuda(test: &str, options: CudaOptions) -> Option<Arc<dyn Backend>> {
    match CudaBackend::open(options) {
        Ok(backend) => Some(Arc::new(backend)),
        Err(error @ (MemError::Unavailable { .. } | MemError::NoSuchDevice { count: 0, .. })) => {
            assert!(std::env::var_os("TIDEKV_REQUIRE_GPU").is_none(), "{test} needs a GPU: {error}");
            skip(test, &error.to_string());
            None
        }
        Err(error) => panic!("{test}: {error}"),
    }
}

/// Says that a test did not run. Written straight to the descriptor: the harness swallows what passing tests print.
pub fn skip(test: &str, reason: &str) {
    // One write, so that lines of parallel tests stay whole.
    let _ = std::io::stderr().write_all(format!("SKIPPED: {test}: {reason}\n").as_bytes());
}

/// A reservation of `pages` pages of one handle each.
pub fn reserve(backend: &Arc<dyn Backend>, page_bytes: Bytes, pages: u32) -> Reservation {
    let placement = Placement::uniform(page_bytes, pages).unwrap();
    Reservation::new(Arc::clone(backend), placement, RegionOptions::default()).unwrap()
}

pub fn pages(ids: impl IntoIterator<Item = u32>) -> Vec<PageId> {
    ids.into_iter().map(PageId).collect()
}

/// Where a page's first handle starts.
pub fn start(reservation: &Reservation, page: u32) -> ByteOffset {
    reservation.placement().extent(PageId(page), 0).offset
}

/// Writes `value` to both ends of every handle of a page.
pub fn mark(reservation: &Reservation, page: u32, value: u8) {
    for offset in ends(reservation, page) {
        reservation.write(offset, &[value; 64]).unwrap();
    }
}

/// What `mark` wrote, which must be the same at all ends.
pub fn marked(reservation: &Reservation, page: u32) -> Option<u8> {
    let mut seen = None;
    for offset in ends(reservation, page) {
        let mut bytes = [0; 64];
        reservation.read(offset, &mut bytes).ok()?;
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a torn mark on page {page}: {bytes:?}");
        assert!(seen.is_none_or(|seen| seen == bytes[0]), "the handles of page {page} differ");
        seen = Some(bytes[0]);
    }
    seen
}

fn ends(reservation: &Reservation, page: u32) -> Vec<ByteOffset> {
    let placement = *reservation.placement();
    (0..placement.handles_per_page())
        .map(|handle| placement.extent(PageId(page), handle))
        .flat_map(|extent| [extent.offset, ByteOffset(extent.offset.0 + extent.bytes.0 - 64)])
        .collect()
}

/// A xorshift generator: tests name their seed, so a failure can be run again.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.max(1))
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }

    pub fn page(&mut self, pages: u32) -> u32 {
        u32::try_from(self.below(u64::from(pages))).unwrap()
    }
}
