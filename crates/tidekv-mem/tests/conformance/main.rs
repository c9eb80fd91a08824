//! One suite, every back-end: what a reservation promises, whatever memory is behind it.
//!
//! | promise                                                        | test                                   |
//! |----------------------------------------------------------------|----------------------------------------|
//! | mapped bytes can be written and read, in all three layouts      | bytes_are_kept                         |
//! | other pages' bytes stay as they are; memory can go elsewhere    | other_pages_are_untouched              |
//! | a batch maps whole or not at all, whichever call fails          | a_failing_call_leaves_no_trace         |
//! | what cannot be given back is counted and can be retried         | stuck_memory_is_counted_and_retried    |
//! | out of memory is a value                                       | out_of_memory_is_a_value               |
//! | bad batches change nothing                                     | bad_batches_change_nothing             |
//! | addresses never move                                           | addresses_never_move                   |
//! | 10,000 random operations agree with a plain model               | random_operations_agree_with_a_model   |
//! | threads may work side by side                                  | threads_work_side_by_side              |
//! | copies of one page do not see each other                       | threads_copy_from_and_to_one_page      |
//! | unmapped addresses can read as zeros                           | unmapped_addresses_can_read_as_zeros   |
//! | nothing is left at the end                                     | every test, and dropping_gives_all_back |

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[path = "../support/mod.rs"]
mod support;

mod faults;
mod model;
mod promises;

use std::sync::Arc;

use support::cuda;
use tidekv_core::units::Bytes;
use tidekv_mem::Backend;
use tidekv_mem::cuda::CudaOptions;
use tidekv_mem::fake::FakeBackend;
use tidekv_mem::host::{HostBackend, HostOptions, HugePages};

/// A back-end under test.
struct Rig {
    backend: Arc<dyn Backend>,
    /// A page size it can make.
    page: Bytes,
    /// A page size of which it has room for `room` at the most, and the back-end to try that on.
    scarce: (Arc<dyn Backend>, Bytes, u32),
}

impl Rig {
    /// Nothing may be left when a test's pages are unmapped, but for what a cache keeps on purpose.
    fn assert_nothing_held(&self) {
        self.backend.trim_cache().unwrap();
        assert_eq!(self.backend.held(), Bytes::ZERO, "memory was not given back");
    }
}

fn fake(_test: &str) -> Option<Rig> {
    let page = Bytes::kib(64);
    let scarce = (Arc::new(FakeBackend::with_total(Bytes(page.0 * 6))) as Arc<dyn Backend>, page, 6);
    Some(Rig { backend: Arc::new(FakeBackend::default()), page, scarce })
}

fn host_with(options: HostOptions) -> Rig {
    let page = Bytes::mib(2);
    let scarce = HostBackend::open(HostOptions { budget: Some(Bytes(page.0 * 6)), ..options }).unwrap();
    Rig { backend: Arc::new(HostBackend::open(options).unwrap()), page, scarce: (Arc::new(scarce), page, 6) }
}

fn host(_test: &str) -> Option<Rig> {
    Some(host_with(HostOptions::default()))
}

fn host_lazy(_test: &str) -> Option<Rig> {
    Some(host_with(HostOptions { lazy: true, ..HostOptions::default() }))
}

fn host_huge(_test: &str) -> Option<Rig> {
    Some(host_with(HostOptions { huge_pages: HugePages::Transparent, ..HostOptions::default() }))
}

fn gpu(test: &str) -> Option<Rig> {
    gpu_with(test, CudaOptions::default())
}

fn gpu_cached(test: &str) -> Option<Rig> {
    gpu_with(test, CudaOptions { handle_cache: Bytes::mib(6), ..CudaOptions::default() })
}

fn gpu_with(test: &str, options: CudaOptions) -> Option<Rig> {
    let backend = cuda(test, options)?;
    let granularity = backend.capabilities().granularity;
    // Pages so large that the card has room for fewer than eight of them.
    let large = Bytes(backend.memory().unwrap().total.0 / 8 / granularity.0 * granularity.0);
    Some(Rig { scarce: (Arc::clone(&backend), large, 8), page: granularity, backend })
}

macro_rules! backend_suite {
    ($($backend:ident),*; $($module:ident::$test:ident),* $(,)?) => {
        backend_suite!(@each [$($backend),*] [$($module::$test),*]);
    };
    (@each [$($backend:ident),*] $tests:tt) => {
        $(mod $backend { backend_suite!(@tests $backend $tests); })*
    };
    (@tests $backend:ident [$($module:ident::$test:ident),*]) => {
        $(#[test]
        fn $test() {
            let name = concat!(stringify!($backend), "::", stringify!($test));
            if let Some(rig) = crate::$backend(name) {
                crate::$module::$test(&rig);
                rig.assert_nothing_held();
            }
        })*
    };
}

backend_suite! {
    fake, host, host_lazy, host_huge, gpu, gpu_cached;
    promises::bytes_are_kept,
    promises::other_pages_are_untouched,
    promises::bad_batches_change_nothing,
    promises::addresses_never_move,
    promises::out_of_memory_is_a_value,
    promises::unmapped_addresses_can_read_as_zeros,
    promises::dropping_gives_all_back,
    promises::everything_can_be_unmapped_and_the_addresses_stay,
    promises::bad_page_sizes_are_refused,
    faults::a_failing_call_leaves_no_trace,
    faults::stuck_memory_is_counted_and_retried,
    faults::a_failed_unmap_strands_no_other_page,
    model::random_operations_agree_with_a_model,
    model::threads_work_side_by_side,
    model::threads_copy_from_and_to_one_page,
}
