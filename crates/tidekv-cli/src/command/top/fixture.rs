//! Samples that no file ever held, for the tests of state and drawing.

use std::time::Duration;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use tidekv_core::share::{MemoryUse, Standing};
use tidekv_core::units::Bytes;
use tidekv_shm::{Counters, DeviceName, UNLIMITED};

use super::collect::{DeviceSample, PlaceSample, PoolSample, Sample};
use super::state::{Flow, State};
use crate::change::{Owner, PoolKey};
use crate::request::{SortKey, TopOutput, TopRequest};
use crate::scene;

pub(super) fn request() -> TopRequest {
    TopRequest {
        names: Vec::new(),
        refresh: Duration::from_secs(1),
        sort: SortKey::Name,
        filter: String::new(),
        mouse: false,
        output: TopOutput::Screen,
        count: None,
    }
}

/// A living pool on the host, in GiB: in use, idle, limit, and a fair share of half the limit.
pub(super) fn pool(name: &str, in_use: u64, idle: u64, limit: u64) -> PoolSample {
    let device = DeviceName::host();
    let owner = Owner { device: device.clone(), slot: 0, pid: 4711, started: 1 };
    PoolSample {
        key: PoolKey { name: name.to_owned(), owner: Some(owner) },
        label: crate::text::printable(name).into_owned(),
        state: scene::State::Live,
        limit: Bytes::gib(limit),
        in_use: Bytes::gib(in_use),
        idle: Bytes::gib(idle),
        place: Some(PlaceSample {
            device,
            pid: 4711,
            held: Bytes::gib(in_use + idle),
            demand: Bytes::ZERO,
            cached: Bytes::ZERO,
            standing: Standing::Within,
            why: None,
            fair: Bytes(limit << 29),
            owed: Bytes::ZERO,
            reclaim: Bytes::ZERO,
            floor: Bytes::gib(1),
            ceiling: UNLIMITED,
            weight: 1,
            priority: 0,
            page: Bytes::mib(2),
            revisions: (3, 3),
            counters: Counters::default(),
        }),
    }
}

/// A pool of kvcached's own.
pub(super) fn foreign(name: &str, in_use: u64, idle: u64, limit: u64) -> PoolSample {
    let ours = pool(name, in_use, idle, limit);
    PoolSample {
        key: PoolKey { name: name.to_owned(), owner: None },
        state: scene::State::Kvcached,
        place: None,
        ..ours
    }
}

pub(super) fn place(pool: &mut PoolSample) -> &mut PlaceSample {
    pool.place.as_mut().unwrap()
}

/// A device, in GiB.
pub(super) fn device(name: &str, total: u64, in_use: u64, idle: u64, non_pool: u64, budget: u64) -> DeviceSample {
    let [total, in_use, idle, non_pool, budget] = [total, in_use, idle, non_pool, budget].map(Bytes::gib);
    let usage = MemoryUse { needed: in_use, cached: Bytes::ZERO, idle };
    let device_free = total.saturating_sub(usage.held()).saturating_sub(non_pool);
    let free = if budget == Bytes::ZERO { device_free } else { device_free.min(budget.saturating_sub(usage.held())) };
    DeviceSample { name: DeviceName::new(name).unwrap(), total, usage, non_pool, device_free, free, budget }
}

pub(super) fn sample(pools: Vec<PoolSample>) -> Sample {
    Sample { devices: vec![device("host", 80, 20, 4, 10, 64)], pools, troubles: Vec::new() }
}

/// A state that has seen these samples, a second apart.
pub(super) fn seen(samples: impl IntoIterator<Item = Sample>) -> State {
    let mut state = State::new(&request());
    for (second, sample) in (0..).zip(samples) {
        state.observe(sample, Duration::from_secs(second), format!("12:00:{second:02}"));
    }
    state
}

pub(super) fn press(state: &mut State, code: KeyCode) -> Flow {
    state.key(KeyEvent::new(code, KeyModifiers::NONE))
}

/// Presses one key after another.
pub(super) fn type_keys(state: &mut State, text: &str) {
    for character in text.chars() {
        press(state, KeyCode::Char(character));
    }
}
