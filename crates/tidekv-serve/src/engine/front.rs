//! The engine as other threads see it: requests are checked here, so that the engine's thread meets only what it can do.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::compute::KvGauge;
use crate::config::KvMode;
use crate::handle::{
    Engine, EngineStats, EventSender, GenerateRequest, Generation, Health, ModelInfo, SleepError, SubmitError,
};

/// What the engine's thread is told.
pub(super) enum Command {
    /// A request that was accepted. `seed` is for one that named none.
    Generate { request: GenerateRequest, seed: u64, events: EventSender },
    /// End what runs, then give memory back.
    Sleep { level: u8, answer: Sender<Result<(), SleepError>> },
    /// Be ready again.
    WakeUp { answer: Sender<Result<(), SleepError>> },
    /// Look at what the pool asks for.
    Reclaim,
    /// End what runs until then, fail the rest, and end.
    Stop { deadline: Instant },
}

/// What both sides count.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) running: AtomicU32,
    pub(super) waiting: AtomicU32,
    pub(super) in_rows: AtomicU32,
    pub(super) cached: AtomicU32,
    pub(super) steps: AtomicU64,
    pub(super) prompt_tokens: AtomicU64,
    pub(super) generated_tokens: AtomicU64,
    pub(super) prefix_queried_tokens: AtomicU64,
    pub(super) prefix_hit_tokens: AtomicU64,
    pub(super) preemptions: AtomicU64,
    pub(super) cancelled: AtomicU64,
    pub(super) is_asleep: AtomicBool,
    /// What the driver said when the device was lost.
    pub(super) lost: OnceLock<String>,
}

/// What a request is checked against.
#[derive(Clone, Debug)]
pub(super) struct Bounds {
    pub(super) model: ModelInfo,
    pub(super) kv_mode: KvMode,
    pub(super) max_waiting: u32,
    /// Tokens that the whole pool holds.
    pub(super) capacity_tokens: u64,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Front {
    bounds: Bounds,
    counters: Arc<Counters>,
    gauge: KvGauge,
    commands: Sender<Command>,
    is_stopping: AtomicBool,
    /// Seeds of requests that name none.
    seeds: RandomState,
    submitted: AtomicU64,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Front {
    pub(super) fn new(
        bounds: Bounds,
        counters: Arc<Counters>,
        gauge: KvGauge,
        commands: Sender<Command>,
        thread: JoinHandle<()>,
    ) -> Self {
        Self {
            bounds,
            counters,
            gauge,
            commands,
            is_stopping: AtomicBool::new(false),
            seeds: RandomState::new(),
            submitted: AtomicU64::new(0),
            thread: Mutex::new(Some(thread)),
        }
    }

    fn check(&self, request: &GenerateRequest) -> Result<(), SubmitError> {
        let ModelInfo { vocab, context_tokens, .. } = self.bounds.model;
        let prompt_tokens = request.prompt.tokens.len() as u64;
        let max_tokens = u64::from(request.max_tokens);
        if prompt_tokens == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        if let Some(&id) = request.prompt.tokens.iter().find(|&&id| id >= vocab) {
            return Err(SubmitError::UnknownToken { id, vocab });
        }
        check_sampling(request)?;
        if prompt_tokens >= u64::from(context_tokens) {
            return Err(SubmitError::PromptTooLong { prompt_tokens, context_tokens });
        }
        if prompt_tokens + max_tokens > u64::from(context_tokens) {
            return Err(SubmitError::TooManyTokens { prompt_tokens, max_tokens, context_tokens });
        }
        // The last token made is said and never read.
        let needed_tokens = prompt_tokens + max_tokens - 1;
        if needed_tokens > self.bounds.capacity_tokens {
            return Err(SubmitError::NeverFits { needed_tokens, capacity_tokens: self.bounds.capacity_tokens });
        }
        Ok(())
    }

    /// Waits for the engine's answer.
    fn ask(&self, command: impl FnOnce(Sender<Result<(), SleepError>>) -> Command) -> Result<(), SleepError> {
        if self.is_stopping.load(Relaxed) {
            return Err(SleepError::ShutDown);
        }
        let (answer, answered): (_, Receiver<_>) = channel();
        self.commands.send(command(answer)).map_err(|_| SleepError::EngineGone)?;
        // The engine ends without an answer only when it dies or is told to stop.
        let gone = || if self.is_stopping.load(Relaxed) { SleepError::ShutDown } else { SleepError::EngineGone };
        answered.recv().unwrap_or_else(|_| Err(gone()))
    }

    fn stop(&self, within: Duration) {
        self.is_stopping.store(true, Relaxed);
        // A thread that is gone needs no order.
        let _ = self.commands.send(Command::Stop { deadline: Instant::now() + within });
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // It reported its panic, if it had one, itself.
            let _ = thread.join();
        }
    }
}

fn check_sampling(request: &GenerateRequest) -> Result<(), SubmitError> {
    let out_of_range = |field, value, wanted| Err(SubmitError::OutOfRange { field, value, wanted });
    let sampling = &request.sampling;
    if request.max_tokens == 0 {
        return out_of_range("max_tokens", 0.0, "at least 1");
    }
    if !(sampling.temperature >= 0.0 && sampling.temperature.is_finite()) {
        return out_of_range("temperature", f64::from(sampling.temperature), "0 or more");
    }
    if !(sampling.top_p > 0.0 && sampling.top_p <= 1.0) {
        return out_of_range("top_p", f64::from(sampling.top_p), "above 0 and at most 1");
    }
    Ok(())
}

impl Engine for Front {
    fn submit(&self, request: GenerateRequest) -> Result<Generation, SubmitError> {
        if self.is_stopping.load(Relaxed) {
            return Err(SubmitError::ShutDown);
        }
        if let Some(what) = self.counters.lost.get() {
            return Err(SubmitError::DeviceLost { what: what.clone() });
        }
        self.check(&request)?;
        if self.is_sleeping() {
            return Err(SubmitError::Asleep);
        }
        let limit = self.bounds.max_waiting;
        let one_more = |waiting: u32| (waiting < limit).then_some(waiting + 1);
        if let Err(waiting) = self.counters.waiting.fetch_update(Relaxed, Relaxed, one_more) {
            return Err(SubmitError::QueueFull { waiting, limit });
        }
        let prompt_tokens = request.prompt.tokens.len() as u64;
        let (events, generation) = Generation::channel();
        let seed = self.seeds.hash_one(self.submitted.fetch_add(1, Relaxed));
        if self.commands.send(Command::Generate { request, seed, events }).is_err() {
            self.counters.waiting.fetch_sub(1, Relaxed);
            return Err(SubmitError::EngineGone);
        }
        self.counters.prompt_tokens.fetch_add(prompt_tokens, Relaxed);
        Ok(generation)
    }

    fn model(&self) -> ModelInfo {
        self.bounds.model.clone()
    }

    fn stats(&self) -> EngineStats {
        let (counters, pool) = (&*self.counters, self.gauge.snapshot());
        let cached = counters.cached.load(Relaxed);
        EngineStats {
            kv_mode: self.bounds.kv_mode,
            pool: pool.pool_name,
            running: counters.running.load(Relaxed),
            waiting: counters.waiting.load(Relaxed),
            blocks_used: u64::from(counters.in_rows.load(Relaxed)) + u64::from(cached),
            blocks_cached: u64::from(cached),
            blocks_total: u64::from(pool.shrink_target_blocks.min(pool.total_blocks)),
            memory: pool.usage,
            limit_bytes: pool.limit_bytes,
            page_bytes: pool.page_bytes,
            page_tokens: u64::from(pool.block_tokens) * u64::from(pool.blocks_per_page),
            steps: counters.steps.load(Relaxed),
            prompt_tokens: counters.prompt_tokens.load(Relaxed),
            generated_tokens: counters.generated_tokens.load(Relaxed),
            prefix_queried_tokens: counters.prefix_queried_tokens.load(Relaxed),
            prefix_hit_tokens: counters.prefix_hit_tokens.load(Relaxed),
            preemptions: counters.preemptions.load(Relaxed),
            cancelled: counters.cancelled.load(Relaxed),
        }
    }

    fn sleep(&self, level: u8) -> Result<(), SleepError> {
        if !(1..=2).contains(&level) {
            return Err(SleepError::Level { level });
        }
        self.ask(|answer| Command::Sleep { level, answer })
    }

    fn wake_up(&self) -> Result<(), SleepError> {
        self.ask(|answer| Command::WakeUp { answer })
    }

    fn is_sleeping(&self) -> bool {
        self.counters.is_asleep.load(Relaxed)
    }

    fn health(&self) -> Health {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        match self.counters.lost.get() {
            _ if thread.as_ref().is_none_or(JoinHandle::is_finished) => Health::Stopped,
            Some(what) => Health::DeviceLost { what: what.clone() },
            None => Health::Well,
        }
    }

    fn drain(&self, within: Duration) {
        self.stop(within);
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        self.stop(Duration::ZERO);
    }
}
