//! What happens to requests when computing goes wrong under them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use tidekv_core::geometry::ChunkChoice;
use tidekv_core::units::Bytes;
use tidekv_pool::ReservePolicy;
use tidekv_shm::{PoolName, RuntimeDir};

use super::front::Front;
use super::start::{About, StartError, start_with};
use crate::compute::{Compute, ComputeError, CpuCompute, KvStore, Logits, StepInput};
use crate::config::{ComputeChoice, EngineConfig, KvMode, ModelSource, SyntheticSize};
use crate::handle::{Engine, Event, GenerateError, GenerateRequest, Generation, Prompt, Sampling, SleepError};
use crate::model::{Model, ModelError};

#[derive(Clone, Copy)]
enum Fault {
    Error,
    Panic,
}

/// Computes, but for one step.
struct Faulty {
    inner: CpuCompute,
    steps_left: Arc<AtomicU32>,
    fault: Fault,
}

impl Compute for Faulty {
    fn forward(&mut self, kv: &mut KvStore, step: &StepInput<'_>) -> Result<Logits, ComputeError> {
        let logits = self.inner.forward(kv, step)?;
        if self.steps_left.fetch_sub(1, Relaxed) != 1 {
            return Ok(logits);
        }
        match self.fault {
            Fault::Error => Err(ComputeError::UnknownToken { id: 7, vocab: 5 }),
            Fault::Panic => panic!("a planted panic"),
        }
    }
}

struct Lab {
    front: Front,
    /// Steps until the fault; 0 for never again.
    steps_left: Arc<AtomicU32>,
    _dir: tempfile::TempDir,
}

fn lab(fault: Fault) -> Lab {
    let dir = tempfile::tempdir().unwrap();
    let config = EngineConfig {
        model: ModelSource::Synthetic { size: SyntheticSize::Tiny, seed: 0 },
        kv: KvMode::Elastic,
        kv_budget: Bytes::mib(4),
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
    let model = Model::load(&config.model).unwrap();
    let about = About { name: model.name.clone(), shape: model.shape.clone(), eos: model.eos.clone() };
    let steps_left = Arc::new(AtomicU32::new(0));
    let inner = CpuCompute::new(model, 1).unwrap();
    let compute = Box::new(Faulty { inner, steps_left: Arc::clone(&steps_left), fault });
    let missing = || StartError::Model(ModelError::NoWeights { path: "gone".into() });
    let front = start_with(config, about, compute, Box::new(move || Err(missing()))).unwrap();
    Lab { front, steps_left, _dir: dir }
}

fn submit(lab: &Lab, first: u32) -> Generation {
    let request = GenerateRequest {
        prompt: Prompt { tokens: (first..first + 40).collect() },
        sampling: Sampling::GREEDY,
        max_tokens: 12,
        stop_tokens: Vec::new(),
        ignore_eos: false,
        logprobs: None,
    };
    lab.front.submit(request).unwrap()
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
            };
            let named = |error: &GenerateError| matches!(error, GenerateError::Compute { what } if what == why);
            assert!(failed.iter().all(|error| named(error)), "{failed:?}");
            assert_eq!(finish(submit(&lab, 1)).unwrap(), wanted, "cached blocks of a failed step are not believed");
            let stats = lab.front.stats();
            assert_eq!((stats.blocks_used, stats.running, stats.waiting), (stats.blocks_cached, 0, 0));
        }
        assert!(lab.front.is_alive());
    }
}

#[test]
fn a_model_that_cannot_be_loaded_again_sleeps_on() {
    let lab = lab(Fault::Error);
    lab.front.sleep(2).unwrap();
    let error = lab.front.wake_up().unwrap_err();
    assert!(matches!(&error, SleepError::Memory { what } if what.contains("gone")), "{error}");
    assert!(lab.front.is_sleeping() && lab.front.is_alive());
}
