//! Bodies of requests, which any client may send: no bytes panic on any page, and reading them never takes more memory than a small
//! multiple of what was sent.

#![no_main]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use libfuzzer_sys::fuzz_target;
use tidekv_serve::api::read_on_every_page;
use tidekv_serve::tokenizer::Tokenizer;

/// What each byte of a body may cost, for texts, ids and the growing of both.
const TIMES: usize = 8;
/// What each of the first bytes may cost: a message of 12 letters becomes an object, and there are only so many.
const TIMES_AT_FIRST: usize = 64;
const FIRST_BYTES: usize = 256 << 10;
/// Paths and sentences of refusals.
const BESIDE: usize = 64 << 10;

/// Counts what is allocated.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

fn count(more: usize, less: usize) {
    let now = NOW.fetch_add(more, Relaxed) + more;
    MOST.fetch_max(now, Relaxed);
    NOW.fetch_sub(less, Relaxed);
}

// SAFETY: every call is passed on as it came; what is counted beside it changes no block.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: the caller's duty, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        count(0, layout.size());
        // SAFETY: the caller's duty, passed on.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size, layout.size());
        // SAFETY: the caller's duty, passed on.
        unsafe { System.realloc(block, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(Tokenizer::bytes);

fuzz_target!(|body: &[u8]| {
    let tokenizer = &*TOKENIZER;
    let before = NOW.load(Relaxed);
    MOST.store(before, Relaxed);
    let read = read_on_every_page(body, tokenizer);
    let cost = MOST.load(Relaxed) - before;
    let most = TIMES * body.len() + TIMES_AT_FIRST * body.len().min(FIRST_BYTES) + BESIDE;
    assert!(cost <= most, "{} bytes cost {cost} and not {most}: {read:?}", body.len());
});
