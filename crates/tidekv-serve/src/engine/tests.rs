//! What happens to requests when computing goes wrong under them, and when there is no memory for them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use tidekv_core::blocks::BlockLease;
use tidekv_core::geometry::{Capacity, ChunkChoice, GeometryConfig, KvShape, Layout};
use tidekv_core::pages::Fence;
use tidekv_core::units::{Bytes, Step};
use tidekv_mem::host::{HostBackend, HostOptions};
use tidekv_mem::{Backend, MemError};
use tidekv_pool::{KvPool, PoolConfig, ReservePolicy};
use tidekv_shm::{DeviceName, Ledger, PoolName, RuntimeDir};

use super::front::Front;
use super::start::{About, Place, StartError, start_with};
use super::worker::{Loader, Patience};
use crate::compute::{Compute, ComputeError, CpuCompute, KvStore, Outputs, StepInput, StepTables};
use crate::config::{ComputeChoice, EngineConfig, KvBudget, KvMode, ModelSource, SyntheticSize};
use crate::handle::{
    Engine, EngineStats, Event, GenerateError, GenerateRequest, Generation, Health, Prompt, Sampling, SleepError,
    SubmitError,
};
use crate::model::{Model, ModelError};

#[derive(Clone, Copy)]
enum Fault {
    Error,
    Panic,
    /// As behind an illegal address: the step says one thing, and from then on the device says another.
    Loss,
}

/// Computes, but for one step.
struct Faulty {
    inner: CpuCompute,
    steps_left: Arc<AtomicU32>,
    fault: Fault,
    is_lost: bool,
    is_host_full: Arc<AtomicBool>,
    /// The device that its weights take room on.
    card: Option<RuntimeDir>,
    on_card: Arc<AtomicBool>,
}

/// What its weights take is nobody's then.
impl Drop for Faulty {
    fn drop(&mut self) {
        self.on_card.store(false, Relaxed);
    }
}

/// Where weights take room on a device, it has none while pools hold it.
fn check_room(card: Option<&RuntimeDir>) -> Result<(), ComputeError> {
    let Some(dir) = card else { return Ok(()) };
    let ledger = Ledger::open_existing(dir, &DeviceName::host()).unwrap().unwrap();
    let free = BUDGET.saturating_sub(ledger.read().unwrap().reserved());
    if free < WEIGHTS { Err(MemError::OutOfMemory { wanted: WEIGHTS, free: Some(free) }.into()) } else { Ok(()) }
}

impl Compute for Faulty {
    fn forward(
        &mut self,
        kv: &mut KvStore,
        tables: &mut StepTables,
        step: &StepInput<'_>,
    ) -> Result<Outputs, ComputeError> {
        let outputs = self.inner.forward(kv, tables, step)?;
        if self.steps_left.fetch_sub(1, Relaxed) != 1 {
            return Ok(outputs);
        }
        match self.fault {
            Fault::Error => Err(ComputeError::UnknownToken { id: 7, vocab: 5 }),
            Fault::Panic => panic!("a planted panic"),
            Fault::Loss => {
                self.is_lost = true;
                Err(ComputeError::Cublas { function: "cublasGemmEx", code: 13 })
            }
        }
    }

    fn check_device(&mut self) -> Result<(), ComputeError> {
        let (function, code, name) = ("cuMemAlloc_v2", 700, "CUDA_ERROR_ILLEGAL_ADDRESS".to_owned());
        let meaning = "an illegal memory access was encountered".to_owned();
        if self.is_lost { Err(MemError::Driver { function, code, name, meaning }.into()) } else { Ok(()) }
    }

    fn park(&mut self) -> Result<(), ComputeError> {
        let full = MemError::OutOfMemory { wanted: Bytes::gib(15), free: Some(Bytes::gib(3)) };
        if self.is_host_full.load(Relaxed) {
            return Err(ComputeError::NoRoomToPark(full));
        }
        self.on_card.store(false, Relaxed);
        Ok(())
    }

    fn parked_bytes(&self) -> Bytes {
        WEIGHTS
    }

    fn unpark(&mut self) -> Result<(), ComputeError> {
        check_room(self.card.as_ref())?;
        self.on_card.store(true, Relaxed);
        Ok(())
    }
}

struct Lab {
    front: Front,
    /// Steps until the fault; 0 for never again.
    steps_left: Arc<AtomicU32>,
    is_host_full: Arc<AtomicBool>,
    /// Whether the weights are on the device.
    on_card: Arc<AtomicBool>,
    dir: Arc<tempfile::TempDir>,
}

/// What all pools of a lab's device may hold.
const BUDGET: Bytes = Bytes::mib(4);
/// What weights take of it, where they do.
const WEIGHTS: Bytes = Bytes::mib(1);

fn lab(fault: Fault) -> Lab {
    lab_with(fault, KvMode::Elastic, Patience::default())
}

fn lab_with(fault: Fault, kv: KvMode, patience: Patience) -> Lab {
    lab_in(Arc::new(tempfile::tempdir().unwrap()), false, fault, kv, patience)
}

fn lab_in(dir: Arc<tempfile::TempDir>, takes_room: bool, fault: Fault, kv: KvMode, patience: Patience) -> Lab {
    lab_within(BUDGET, dir, takes_room, fault, kv, patience)
}

fn lab_within(
    budget: Bytes,
    dir: Arc<tempfile::TempDir>,
    takes_room: bool,
    fault: Fault,
    kv: KvMode,
    patience: Patience,
) -> Lab {
    let config = EngineConfig {
        model: ModelSource::Synthetic { size: SyntheticSize::Tiny, seed: 0 },
        kv: kv.into(),
        kv_budget: KvBudget::Given(budget),
        pool_name: PoolName::new("faulty").unwrap(),
        runtime_dir: RuntimeDir::at(dir.path()),
        compute: ComputeChoice::Cpu,
        max_batch_rows: 4,
        max_step_tokens: 32,
        max_waiting: 100,
        max_cached_tokens: None,
        context_tokens: None,
        block_tokens: 16,
        chunk: ChunkChoice::Bytes(Bytes::kib(8)),
        reserve: ReservePolicy::Auto,
        threads: Some(1),
    };
    let about = About::new(&Model::load(&config.model).unwrap());
    let steps_left = Arc::new(AtomicU32::new(0));
    let is_host_full = Arc::new(AtomicBool::new(false));
    let on_card = Arc::new(AtomicBool::new(true));
    let (left, full, there) = (Arc::clone(&steps_left), Arc::clone(&is_host_full), Arc::clone(&on_card));
    let (source, card) = (config.model.clone(), takes_room.then(|| config.runtime_dir.clone()));
    let make = move || Faulty {
        inner: CpuCompute::new(Model::load(&source).unwrap(), 1).unwrap(),
        steps_left: Arc::clone(&left),
        fault,
        is_lost: false,
        is_host_full: Arc::clone(&full),
        card: card.clone(),
        on_card: Arc::clone(&there),
    };
    let compute = Box::new(make());
    let there = Arc::clone(&on_card);
    let card = takes_room.then(|| config.runtime_dir.clone());
    // Where weights take no room, they cannot be had again.
    let load = Box::new(move || {
        if card.is_none() {
            return Err(StartError::Model(ModelError::NoWeights { path: "gone".into() }));
        }
        check_room(card.as_ref())?;
        let made = make();
        there.store(true, Relaxed);
        Ok(Box::new(made) as _)
    });
    let load = Loader { load, device_bytes: WEIGHTS };
    let front = start_with(config, about, compute, load, Place::Host, patience).unwrap();
    Lab { front, steps_left, is_host_full, on_card, dir }
}

fn submit(lab: &Lab, first: u32) -> Generation {
    lab.front.submit(request(first)).unwrap()
}

fn request(first: u32) -> GenerateRequest {
    GenerateRequest {
        prompt: Prompt { tokens: (first..first + 40).collect() },
        sampling: Sampling::GREEDY,
        max_tokens: 12,
        stop_tokens: Vec::new(),
        ignore_eos: false,
        logprobs: None,
        cache_salt: None,
    }
}

fn finish(mut generation: Generation) -> Result<Vec<u32>, GenerateError> {
    let mut tokens = Vec::new();
    loop {
        match generation.blocking_next().unwrap() {
            Event::Token { id, .. } => tokens.push(id),
            Event::Done { .. } => return Ok(tokens),
            Event::Failed(error) => return Err(error),
        }
    }
}

/// Wherever it happens, those who were in the step hear why, their blocks are free, and the next ones get what they
/// would have got.
#[test]
fn a_step_that_fails_fails_its_requests_and_nobody_else() {
    for fault in [Fault::Error, Fault::Panic] {
        let lab = lab(fault);
        let wanted = finish(submit(&lab, 1)).unwrap();
        for step in 1..=8 {
            lab.steps_left.store(step, Relaxed);
            let requests: Vec<_> = (0..6).map(|number| submit(&lab, 50 + number * 20)).collect();
            let outcomes: Vec<_> = requests.into_iter().map(finish).collect();
            let failed: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
            assert!(!failed.is_empty() && failed.len() <= 4, "four rows at most are in a step: {outcomes:?}");
            let why = match fault {
                Fault::Error => "token 7 is not in the vocabulary of 5",
                Fault::Panic => "the step panicked: a planted panic",
                Fault::Loss => unreachable!("that has a test of its own"),
            };
            let named = |error: &GenerateError| matches!(error, GenerateError::Compute { what } if what == why);
            assert!(failed.iter().all(|error| named(error)), "{failed:?}");
            assert_eq!(finish(submit(&lab, 1)).unwrap(), wanted, "cached blocks of a failed step are not believed");
            let stats = lab.front.stats();
            assert_eq!((stats.blocks_used, stats.running, stats.waiting), (stats.blocks_cached, 0, 0));
        }
        assert_eq!(lab.front.health(), Health::Well);
    }
}

/// Those in the step, those in the queue, those who come later, and operators: all hear what the driver said, and at once.
#[test]
fn a_lost_device_fails_everybody_and_is_told_to_whoever_asks() {
    let lab = lab(Fault::Loss);
    finish(submit(&lab, 1)).unwrap();
    assert_eq!(lab.front.health(), Health::Well);
    lab.steps_left.store(3, Relaxed);
    let requests: Vec<_> = (0..6).filter_map(|number| lab.front.submit(request(50 + number * 20)).ok()).collect();
    let why = "cuMemAlloc_v2 failed with CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access was encountered";
    for outcome in requests.into_iter().map(finish) {
        assert_eq!(outcome, Err(GenerateError::DeviceLost { what: why.to_owned() }));
    }
    let lost = Health::DeviceLost { what: why.to_owned() };
    assert_eq!(lab.front.health(), lost);
    let refused = lab.front.submit(request(1)).map(drop).unwrap_err();
    assert_eq!(refused, SubmitError::DeviceLost { what: why.to_owned() });
    assert!(refused.to_string().contains("until the server is started again: cuMemAlloc"), "{refused}");
    for refused in [lab.front.sleep(1), lab.front.sleep(2), lab.front.wake_up()] {
        assert_eq!(refused, Err(SleepError::DeviceLost { what: why.to_owned() }));
    }
    assert_eq!(lab.front.health(), lost, "it stays to say so");
    let stats = lab.front.stats();
    assert_eq!((stats.blocks_used, stats.running, stats.waiting), (0, 0, 0));
    lab.front.drain(LONG);
    assert_eq!(lab.front.health(), Health::Stopped);
}

/// It serves on, with all its memory: a static cache is not given up for a sleep that cannot be.
#[test]
fn a_model_that_the_host_has_no_room_for_stays_awake() {
    for kv in [KvMode::Elastic, KvMode::Static(BUDGET)] {
        let lab = lab_with(Fault::Error, kv, Patience::default());
        let wanted = finish(submit(&lab, 1)).unwrap();
        let before = lab.front.stats();
        lab.is_host_full.store(true, Relaxed);
        let error = lab.front.sleep(1).unwrap_err();
        assert!(
            matches!(&error, SleepError::Memory { what } if what.contains("stay on the GPU") && what.contains("15 GiB wanted")),
            "{error}"
        );
        assert!(!lab.front.is_sleeping() && lab.front.health() == Health::Well);
        let after = lab.front.stats();
        assert_eq!(after.blocks_cached, before.blocks_cached, "{kv:?}");
        let mapped = |stats: &EngineStats| stats.memory.held().0;
        assert!(kv == KvMode::Elastic || mapped(&after) == mapped(&before), "{before:?} {after:?}");
        assert_eq!(finish(submit(&lab, 1)).unwrap(), wanted);
        lab.is_host_full.store(false, Relaxed);
        lab.front.sleep(1).unwrap();
        lab.front.wake_up().unwrap();
        assert_eq!(finish(submit(&lab, 1)).unwrap(), wanted);
    }
}

/// What a neighbour keeps in case is given up for a model that wakes up; what it needs is not, and then the model sleeps on. So it is for
/// weights that come back from the host (1), and for those that are loaded again (2).
#[test]
fn a_neighbour_makes_room_for_weights_that_come_back() {
    for level in [1, 2] {
        let patience = Patience { wake: Duration::from_millis(100), ..Patience::default() };
        let sleeper = lab_in(Arc::new(tempfile::tempdir().unwrap()), true, Fault::Error, KvMode::Elastic, patience);
        let wanted = finish(submit(&sleeper, 1)).unwrap();
        sleeper.front.sleep(level).unwrap();
        let mut miser = Miser::new(&sleeper);
        miser.take_all();
        let error = sleeper.front.wake_up().unwrap_err();
        assert!(matches!(error, SleepError::Memory { .. }) && sleeper.front.is_sleeping(), "{error}");
        miser.let_go();
        drop(miser);

        let patience = Patience { wake: LONG, ..patience };
        let dir = Arc::clone(&sleeper.dir);
        drop(sleeper);
        let sleeper = lab_in(Arc::clone(&dir), true, Fault::Error, KvMode::Elastic, patience);
        sleeper.front.sleep(level).unwrap();
        let neighbour = lab_in(dir, false, Fault::Error, KvMode::Elastic, patience);
        // Texts that all begin otherwise, until their blocks fill the device.
        let most = |lab: &Lab| lab.front.stats().memory.used().0 + Bytes::kib(512).0 > BUDGET.0;
        let mut number = 0;
        while !most(&neighbour) {
            finish(submit(&neighbour, number % 200)).unwrap();
            number += 1;
            assert!(number < 10_000, "{:?}", neighbour.front.stats());
        }
        sleeper.front.wake_up().unwrap();
        assert!(!most(&neighbour), "level {level}: {:?}", neighbour.front.stats());
        assert_eq!(finish(submit(&sleeper, 1)).unwrap(), wanted);
        finish(submit(&neighbour, 1)).unwrap();
    }
}

/// Its weights come back before its pages, and go again when those cannot be had: to the host, or where that is full or they came from
/// nowhere, to nobody.
#[test]
fn a_static_model_that_sleeps_on_keeps_no_weights_on_the_device() {
    for (level, is_host_full) in [(1, false), (1, true), (2, false)] {
        let patience = Patience { wake: Duration::from_millis(50), ..Patience::default() };
        let dir = Arc::new(tempfile::tempdir().unwrap());
        let lab = lab_in(dir, true, Fault::Error, KvMode::Static(BUDGET), patience);
        let wanted = finish(submit(&lab, 1)).unwrap();
        lab.front.sleep(level).unwrap();
        assert!(!lab.on_card.load(Relaxed));
        let mut miser = Miser::new(&lab);
        // Room for the weights, and not for all pages.
        miser.take(miser.pool.geometry().block_count() / 2);
        lab.is_host_full.store(is_host_full, Relaxed);
        let error = lab.front.wake_up().unwrap_err();
        assert!(matches!(error, SleepError::Memory { .. }) && lab.front.is_sleeping(), "{error}");
        assert!(!lab.on_card.load(Relaxed), "level {level}, with a full host: {is_host_full}");
        miser.let_go();
        drop(miser);
        lab.front.wake_up().unwrap();
        assert!(lab.on_card.load(Relaxed));
        assert_eq!(finish(submit(&lab, 1)).unwrap(), wanted);
    }
}

#[test]
fn a_model_that_cannot_be_loaded_again_sleeps_on() {
    let lab = lab(Fault::Error);
    lab.front.sleep(2).unwrap();
    let error = lab.front.wake_up().unwrap_err();
    assert!(matches!(&error, SleepError::Memory { what } if what.contains("gone")), "{error}");
    assert!(lab.front.is_sleeping() && lab.front.health() == Health::Well);
}

/// Another pool on the lab's device, which takes all of it and gives nothing back until it likes to.
struct Miser {
    pool: KvPool,
    leases: Vec<BlockLease>,
}

impl Miser {
    fn new(lab: &Lab) -> Self {
        let backend = HostBackend::open(HostOptions::default()).unwrap();
        let geometry = GeometryConfig {
            shape: KvShape::heads(4, 2, 16, 4, 16),
            layout: Layout::Slab,
            granularity: backend.capabilities().granularity,
            chunk: ChunkChoice::Bytes(Bytes::kib(8)),
            capacity: Capacity::Budget(BUDGET),
        };
        let mut config = PoolConfig::new(PoolName::new("miser").unwrap(), Arc::new(backend), geometry);
        config.runtime_dir = RuntimeDir::at(lab.dir.path());
        config.budget = Some(BUDGET);
        config.reserve = ReservePolicy::Fixed { min: 0, max: 0 };
        Self { pool: KvPool::open(config).unwrap(), leases: Vec::new() }
    }

    /// All that there is, as soon as the engine has given its idle pages back.
    fn take_all(&mut self) {
        self.take(self.pool.geometry().block_count());
    }

    fn take(&mut self, blocks: u32) {
        self.pool.alloc_within(blocks, LONG, &mut self.leases).unwrap();
    }

    fn let_go(&mut self) {
        self.pool.free(&self.leases, Fence::Step(Step(0))).unwrap();
        self.leases.clear();
    }
}

/// Only a hang reaches it.
const LONG: Duration = Duration::from_secs(120);

fn wait_for(lab: &Lab, what: &str, wanted: impl Fn(&EngineStats) -> bool) {
    let deadline = Instant::now() + LONG;
    while !wanted(&lab.front.stats()) {
        assert!(Instant::now() < deadline, "{what} did not come: {:?}", lab.front.stats());
        std::thread::park_timeout(Duration::from_millis(1));
    }
}

/// Nobody waits longer because others waited before: five requests without memory are told so in the time of one.
#[test]
fn requests_that_starve_are_told_so_and_leave_nothing_behind() {
    let patience = Patience { starved: Duration::from_millis(200), ..Patience::default() };
    let lab = lab_with(Fault::Error, KvMode::Elastic, patience);
    let wanted = finish(submit(&lab, 1)).unwrap();
    lab.front.sleep(1).unwrap();
    let mut miser = Miser::new(&lab);
    miser.take_all();
    lab.front.wake_up().unwrap();
    let starving: Vec<_> = (0..5).map(|number| submit(&lab, number * 30)).collect();
    for generation in starving {
        let error = finish(generation).unwrap_err();
        assert!(matches!(error, GenerateError::Starved { needed_tokens: 40, waited } if waited >= patience.starved));
        assert!(error.to_string().contains("other pools hold it"), "{error}");
    }
    let stats = lab.front.stats();
    assert_eq!((stats.running, stats.waiting, stats.blocks_used), (0, 0, 0));
    miser.let_go();
    assert_eq!(finish(submit(&lab, 1)).unwrap(), wanted);
}

#[test]
fn requests_that_wait_long_for_memory_lose_nothing() {
    let lab = lab_with(Fault::Error, KvMode::Elastic, Patience { starved: LONG, ..Patience::default() });
    let wanted: Vec<_> = (0..5).map(|number| finish(submit(&lab, number * 30)).unwrap()).collect();
    lab.front.sleep(1).unwrap();
    let mut miser = Miser::new(&lab);
    miser.take_all();
    lab.front.wake_up().unwrap();
    let waiting: Vec<_> = (0..5).map(|number| submit(&lab, number * 30)).collect();
    let gone = submit(&lab, 7);
    wait_for(&lab, "six that wait", |stats| (stats.running, stats.waiting) == (0, 6));
    drop(gone);
    wait_for(&lab, "one that nobody reads", |stats| (stats.waiting, stats.cancelled) == (5, 1));
    miser.let_go();
    for (generation, wanted) in waiting.into_iter().zip(wanted) {
        assert_eq!(finish(generation).unwrap(), wanted);
    }
    wait_for(&lab, "an engine at rest", |stats| {
        (stats.running, stats.waiting, stats.blocks_used) == (0, 0, stats.blocks_cached)
    });
}

/// Each needs three quarters of the device, and its share is half: they waited for each other until both were given up.
#[test]
fn requests_of_two_engines_that_need_more_than_a_share_are_served_one_after_the_other() {
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let patience = Patience { give_way: Duration::from_millis(50), starved: LONG, ..Patience::default() };
    // A thousand tokens, of a kibibyte each.
    let engine = || lab_within(Bytes::mib(1), Arc::clone(&dir), false, Fault::Error, KvMode::Elastic, patience);
    let engines = [engine(), engine()];
    let long = |first: u32| GenerateRequest {
        prompt: Prompt { tokens: (0..750).map(|number| (first + number * 7) % 250).collect() },
        ..request(first)
    };
    let alone: Vec<_> = (0..2).map(|first| finish(engines[0].front.submit(long(first)).unwrap()).unwrap()).collect();
    for round in 0..2 {
        let first = |index: usize| u32::try_from((index + round) % 2).unwrap();
        let both = [0, 1].map(|index| engines[index].front.submit(long(first(index))).unwrap());
        for (index, generation) in both.into_iter().enumerate() {
            assert_eq!(finish(generation).unwrap(), alone[first(index) as usize]);
        }
    }
    let preemptions: u64 = engines.iter().map(|lab| lab.front.stats().preemptions).sum();
    assert!(preemptions > 0, "they were never in each other's way");
    for lab in &engines {
        wait_for(lab, "an engine at rest", |stats| {
            (stats.running, stats.waiting, stats.blocks_used) == (0, 0, stats.blocks_cached)
        });
    }
}

/// A static model keeps its memory from everybody while it is awake, and from nobody while it sleeps.
#[test]
fn a_static_model_that_sleeps_leaves_its_memory_to_others() {
    let patience = Patience { wake: Duration::from_millis(50), ..Patience::default() };
    let lab = lab_with(Fault::Error, KvMode::Static(BUDGET), patience);
    let wanted = finish(submit(&lab, 1)).unwrap();
    let mut miser = Miser::new(&lab);
    assert!(miser.pool.alloc(1, &mut miser.leases).unwrap_err().is_transient(), "all of it is the engine's");
    lab.front.sleep(1).unwrap();
    miser.take_all();
    let error = lab.front.wake_up().unwrap_err();
    assert!(matches!(error, SleepError::Memory { .. }), "{error}");
    assert!(lab.front.is_sleeping(), "it sleeps on, and is still owed nothing");
    miser.let_go();
    miser.take_all();
    miser.let_go();
    lab.front.wake_up().unwrap();
    assert!(miser.pool.alloc(1, &mut miser.leases).unwrap_err().is_transient(), "all of it is the engine's again");
    assert_eq!(finish(submit(&lab, 1)).unwrap(), wanted);
}
