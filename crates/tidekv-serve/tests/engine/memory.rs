//! Memory that is short, is taken away, or is wanted elsewhere: everybody who can be served ends, and nothing leaks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tidekv_core::geometry::{Capacity, ChunkChoice, GeometryConfig, KvShape, Layout};
use tidekv_core::pages::Fence;
use tidekv_core::units::{Bytes, GroupId, Step};
use tidekv_mem::Backend;
use tidekv_mem::host::{HostBackend, HostOptions};
use tidekv_pool::{KvPool, PoolConfig, ReservePolicy};
use tidekv_serve::config::{EngineConfig, KvMode};
use tidekv_serve::handle::{EngineStats, FinishReason, GenerateError};
use tidekv_shm::{DeviceName, Ledger, PoolName, RuntimeDir};

use crate::support::{BLOCK_BYTES, Lab, PAGE, config, finish, text, tokens};

/// Sets the limit of the engine's pool as `kvctl limit` does.
fn set_limit(lab: &Lab, limit: Bytes) {
    let device = DeviceName::new("host").unwrap();
    let ledger = Ledger::open_existing(&RuntimeDir::at(lab.dir.path()), &device).unwrap().unwrap();
    let name = lab.engine.stats().pool;
    let write = |view: &mut tidekv_shm::LedgerView| {
        let entry = view.by_name_mut(&name, GroupId(0)).unwrap();
        (entry.limit, entry.limit_revision) = (limit, entry.limit_revision + 1);
    };
    ledger.update(Instant::now() + Duration::from_secs(60), write).unwrap();
}

/// Another pool on the same device.
fn neighbour(lab: &Lab, budget: Bytes) -> KvPool {
    let backend = HostBackend::open(HostOptions::default()).unwrap();
    let geometry = GeometryConfig {
        shape: KvShape::heads(4, 2, 16, 4, 16),
        layout: Layout::Slab,
        granularity: backend.capabilities().granularity,
        chunk: ChunkChoice::Bytes(Bytes(PAGE.0 / 8)),
        capacity: Capacity::Budget(budget),
    };
    let mut config = PoolConfig::new(PoolName::new("neighbour").unwrap(), Arc::new(backend), geometry);
    config.runtime_dir = RuntimeDir::at(lab.dir.path());
    config.budget = Some(budget);
    config.reserve = ReservePolicy::Fixed { min: 0, max: 0 };
    KvPool::open(config).unwrap()
}

#[test]
fn an_answer_that_nobody_reads_is_given_up() {
    let lab = Lab::new(|dir| EngineConfig { max_batch_rows: 2, ..config(dir, KvMode::Elastic, 256) });
    let mut read = lab.submit(&text(1, 40), 3000);
    let running = lab.submit(&text(2, 40), 3000);
    let waiting = lab.submit(&text(3, 40), 3000);
    read.blocking_next().unwrap();
    lab.wait_for("two rows", |stats| stats.running == 2 && stats.waiting == 1);
    drop(waiting);
    lab.wait_for("an empty queue", |stats| stats.waiting == 0 && stats.cancelled == 1);
    drop(running);
    drop(read);
    lab.wait_for("an empty batch", |stats| stats.running == 0 && stats.cancelled == 3);
    lab.assert_nothing_leaked();
}

#[test]
fn a_cache_keeps_to_its_bound() {
    let lab = Lab::new(|dir| EngineConfig { max_cached_tokens: Some(64), ..config(dir, KvMode::Elastic, 64) });
    for number in 0..10 {
        tokens(lab.submit(&text(number, 60), 4));
        let stats = lab.engine.stats();
        assert!(stats.blocks_used <= 4, "64 tokens are 4 blocks: {stats:?}");
    }
    let off = Lab::new(|dir| EngineConfig { max_cached_tokens: Some(0), ..config(dir, KvMode::Elastic, 64) });
    tokens(off.submit(&text(1, 60), 4));
    assert_eq!(off.engine.stats().blocks_used, 0);
}

#[test]
fn a_limit_lowered_under_a_full_batch_is_met_and_everybody_ends() {
    let lab = Lab::elastic(64);
    let wanted: Vec<_> = (0..24).map(|number| tokens(lab.submit(&text(number, 50), 60))).collect();
    let running: Vec<_> = (0..24).map(|number| lab.submit(&text(number, 50), 60)).collect();
    lab.wait_for("a full batch", |stats| stats.running >= 20);
    set_limit(&lab, Bytes(6 * PAGE.0));
    lab.wait_for("memory under the limit", |stats| {
        stats.limit_bytes == Bytes(6 * PAGE.0) && stats.memory.held().0 <= 6 * PAGE.0
    });
    for (generation, wanted) in running.into_iter().zip(&wanted) {
        assert_eq!(tokens(generation), *wanted);
    }
    lab.assert_nothing_leaked();
}

#[test]
fn a_request_that_a_lowered_limit_cannot_hold_fails_by_name_and_the_rest_goes_on() {
    let lab = Lab::elastic(64);
    let long = lab.submit(&text(1, 40), 900);
    lab.wait_for("a request that runs", |stats| stats.running == 1);
    set_limit(&lab, Bytes(3 * PAGE.0));
    match finish(long).unwrap_err() {
        GenerateError::OutOfMemory { needed_tokens, capacity_tokens } => {
            assert_eq!(capacity_tokens, 3 * 4 * 16);
            assert!(needed_tokens > capacity_tokens);
        }
        other => panic!("{other}"),
    }
    let (_, reason, _) = finish(lab.submit(&text(2, 40), 20)).unwrap();
    assert_eq!(reason, FinishReason::Length);
    lab.assert_nothing_leaked();
}

#[test]
fn a_neighbour_gets_its_share_from_cached_prefixes_and_from_requests() {
    let lab = Lab::elastic(32);
    let wanted: Vec<_> = (0..16).map(|number| tokens(lab.submit(&text(number, 80), 40))).collect();
    let running: Vec<_> = (0..16).map(|number| lab.submit(&text(number, 80), 40)).collect();
    lab.wait_for("a busy engine", |stats| stats.running > 4);
    let neighbour = neighbour(&lab, Bytes(32 * PAGE.0));
    let mut leases = Vec::new();
    // Half of the device is its fair share; the engine holds nearly all of it.
    neighbour.alloc_within(14 * 4, Duration::from_secs(60), &mut leases).unwrap();
    for (generation, wanted) in running.into_iter().zip(&wanted) {
        assert_eq!(tokens(generation), *wanted, "what was taken away does not show");
    }
    neighbour.free(&leases, Fence::Step(Step(0))).unwrap();
    lab.assert_nothing_leaked();
}

/// A model whose peak begins while the cache of an idle one fills the device: its requests used to wait for each other, one
/// page at a time, because nobody asked the neighbour before somebody who ran already was short.
#[test]
fn a_peak_finds_the_memory_that_an_idle_model_only_keeps() {
    let idle = Lab::elastic(64);
    for number in 0..60 {
        tokens(idle.submit(&text(number, 100), 2));
    }
    let budget = 64 * 4 * BLOCK_BYTES;
    let is_full = |stats: &EngineStats| stats.memory.held().0 == budget;
    idle.wait_for("a cache that fills the device", is_full);
    let busy = Lab::beside(Arc::clone(&idle.dir), |dir| EngineConfig {
        pool_name: PoolName::new("busy").unwrap(),
        ..config(dir, KvMode::Elastic, 64)
    });
    // Five times 44 blocks in the end, of 256; and two pages at once for each to begin with.
    let peak: Vec<_> = (100..105).map(|number| busy.submit(&text(number, 100), 600)).collect();
    busy.wait_for("all of the peak running at once", |stats| stats.running == 5);
    drop(peak);
    busy.wait_for("an end of the peak", |stats| stats.running == 0);
    idle.assert_nothing_leaked();
    busy.assert_nothing_leaked();
}

#[test]
fn a_static_cache_is_mapped_from_the_start_and_stays() {
    let size = Bytes(16 * PAGE.0);
    let lab = Lab::new(|dir| config(dir, KvMode::Static(size), 32));
    let mapped = |lab: &Lab| {
        let stats = lab.engine.stats();
        stats.memory.held()
    };
    assert_eq!(mapped(&lab), size);
    assert_eq!(lab.engine.stats().blocks_total, size.0 / BLOCK_BYTES);
    let neighbour = neighbour(&lab, Bytes(32 * PAGE.0));
    let mut leases = Vec::new();
    neighbour.alloc(16 * 4, &mut leases).unwrap();
    assert!(neighbour.alloc(1, &mut leases).unwrap_err().is_transient(), "the other half is the engine's");
    tokens(lab.submit(&text(1, 60), 4));
    assert_eq!(mapped(&lab), size);
}
