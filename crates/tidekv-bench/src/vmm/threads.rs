//! Several threads mapping pages of one reservation: does the system below serve them side by side?

use std::sync::Barrier;
use std::time::{Duration, Instant};

use tidekv_core::units::{Bytes, PageId};
use tidekv_mem::Reservation;

use super::calls::reserve;
use super::{Plan, SharedBackend};
use crate::stats::to_f64;

/// Pages mapped and unmapped again per second, by one thread and by all of them.
#[derive(Debug)]
pub(super) struct ThreadRates {
    pub(super) threads: u32,
    pub(super) page_bytes: Bytes,
    pub(super) one_pages_per_s: f64,
    pub(super) all_pages_per_s: f64,
}

pub(super) fn measure(backend: &SharedBackend, plan: &Plan) -> anyhow::Result<ThreadRates> {
    let page_bytes = plan.page_sizes[0];
    let reservation = reserve(backend, page_bytes, plan.pages * plan.threads)?;
    let (mut one, mut all) = (Duration::ZERO, Duration::ZERO);
    let mut rounds = 0u32;
    // Taking turns, as everywhere: whatever slows the machine slows both.
    for _ in plan.rounds() {
        one += round(&reservation, 1, plan.pages)?;
        all += round(&reservation, plan.threads, plan.pages)?;
        rounds += 1;
    }
    let rate = |threads: u32, took: Duration| {
        to_f64(u64::from(rounds) * u64::from(threads) * u64::from(plan.pages)) / took.as_secs_f64()
    };
    Ok(ThreadRates {
        threads: plan.threads,
        page_bytes,
        one_pages_per_s: rate(1, one),
        all_pages_per_s: rate(plan.threads, all),
    })
}

/// Every thread maps and unmaps its own pages; the time from the common start to the end of the last one.
fn round(reservation: &Reservation, threads: u32, pages: u32) -> anyhow::Result<Duration> {
    let start = Barrier::new(threads as usize + 1);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                let start = &start;
                scope.spawn(move || -> anyhow::Result<()> {
                    start.wait();
                    for page in thread * pages..(thread + 1) * pages {
                        reservation.map_pages(&[PageId(page)])?;
                    }
                    for page in thread * pages..(thread + 1) * pages {
                        reservation.unmap_pages(&[PageId(page)])?;
                    }
                    Ok(())
                })
            })
            .collect();
        start.wait();
        let started = Instant::now();
        for worker in workers {
            worker.join().map_err(|_| anyhow::anyhow!("a measuring thread panicked"))??;
        }
        Ok(started.elapsed())
    })
}
