//! An engine that repeats the prompt: one thread, all requests a token each in turn, as a real one does it.
//!
//! It ends a text with token 257 once the prompt was repeated, or goes round again where it is told to ignore that.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tidekv_core::share::MemoryUse;
use tidekv_core::units::Bytes;
use tidekv_serve::config::KvMode;
use tidekv_serve::handle::{
    Engine, EngineStats, Event, EventSender, FinishReason, GenerateError, GenerateRequest, Generation, Health,
    ModelInfo, SleepError, SubmitError, TokenLogprob, Usage,
};

pub(crate) const CONTEXT_TOKENS: u32 = 4096;
/// Of every prompt.
pub(crate) const CACHED_TOKENS: u32 = 1;
const END_OF_TEXT: u32 = 257;

#[derive(Default)]
struct Desk {
    active: Vec<Active>,
    is_closed: bool,
    /// No request gets further than this many tokens.
    hold_at: Option<u32>,
}

struct Active {
    request: GenerateRequest,
    sender: EventSender,
    made: u32,
}

#[derive(Default)]
pub(crate) struct Echo {
    desk: Mutex<Desk>,
    changed: Condvar,
    is_sleeping: AtomicBool,
    is_draining: AtomicBool,
    pub(crate) cancelled: AtomicU64,
    pub(crate) finished: AtomicU64,
    made: AtomicU64,
    pub(crate) most_at_once: AtomicU64,
    /// Most requests at once; 0 for no bound.
    pub(crate) limit: AtomicU64,
    /// Every request fails after this many tokens.
    pub(crate) fail_at: Mutex<Option<(u32, GenerateError)>>,
    /// The device is lost: nothing is accepted, for this reason.
    pub(crate) lost: Mutex<Option<String>>,
}

impl Echo {
    pub(crate) fn start() -> Arc<Self> {
        let engine = Arc::new(Self::default());
        let own = Arc::clone(&engine);
        std::thread::spawn(move || own.work());
        engine
    }

    /// Requests stop behind so many tokens, or go on.
    pub(crate) fn hold_at(&self, tokens: Option<u32>) {
        self.lock().hold_at = tokens;
        self.changed.notify_all();
    }

    /// Waits until the engine has come to a state.
    pub(crate) fn wait_until(&self, what: &str, is_so: impl Fn(&Self, usize) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut desk = self.lock();
        while !is_so(self, desk.active.len()) {
            assert!(Instant::now() < deadline, "waited a minute for: {what}");
            desk = self.changed.wait_timeout(desk, Duration::from_millis(20)).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.lock().active.is_empty()
    }

    pub(crate) fn accepts(&self) -> bool {
        !self.is_draining.load(Ordering::SeqCst)
    }

    fn lock(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut desk = self.lock();
        while !(desk.is_closed && desk.active.is_empty()) {
            let hold_at = desk.hold_at;
            let before = desk.active.len();
            let mut progress = false;
            desk.active.retain_mut(|active| self.step(active, hold_at, &mut progress));
            if desk.active.len() != before {
                self.changed.notify_all();
            }
            if progress {
                // Clients must be able to come and go between two steps.
                drop(desk);
                std::thread::yield_now();
                desk = self.lock();
            } else {
                // A dropped answer does not wake us: look now and then.
                desk =
                    self.changed.wait_timeout(desk, Duration::from_millis(5)).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        self.changed.notify_all();
    }

    /// One token; `false` when the request is over.
    fn step(&self, active: &mut Active, hold_at: Option<u32>, progress: &mut bool) -> bool {
        if active.sender.is_cancelled() {
            self.cancelled.fetch_add(1, Ordering::SeqCst);
            return false;
        }
        if let Some((at, error)) = &*self.fail_at.lock().unwrap()
            && active.made >= *at
        {
            active.sender.send(Event::Failed(error.clone()));
            return false;
        }
        if hold_at.is_some_and(|most| active.made >= most) {
            return true;
        }
        *progress = true;
        let request = &active.request;
        let bytes: Vec<u32> = request.prompt.tokens.iter().copied().filter(|&id| id < 256).collect();
        let at = active.made as usize;
        let is_end = bytes.is_empty() || (at >= bytes.len() && !request.ignore_eos);
        let id = if is_end { END_OF_TEXT } else { bytes[at % bytes.len()] };
        let logprob = request.logprobs.map(|top| TokenLogprob {
            logprob: -0.5,
            top: (0..u32::from(top))
                .map(|rank| (97 + rank, if rank == 0 { -0.5 } else { f32::NEG_INFINITY }))
                .collect(),
        });
        active.made += 1;
        self.made.fetch_add(1, Ordering::SeqCst);
        active.sender.send(Event::Token { id, logprob });
        let is_stopped = !request.ignore_eos && request.stop_tokens.contains(&id);
        let reason = match () {
            () if is_stopped => FinishReason::Stop,
            () if active.made >= request.max_tokens => FinishReason::Length,
            () => return true,
        };
        let prompt_tokens = u32::try_from(request.prompt.tokens.len()).unwrap();
        let usage = Usage { prompt_tokens, cached_tokens: CACHED_TOKENS, completion_tokens: active.made };
        active.sender.send(Event::Done { reason, usage });
        self.finished.fetch_add(1, Ordering::SeqCst);
        false
    }
}

impl Engine for Echo {
    fn submit(&self, request: GenerateRequest) -> Result<Generation, SubmitError> {
        let mut desk = self.lock();
        let limit = self.limit.load(Ordering::SeqCst);
        let waiting = desk.active.len() as u64;
        if desk.is_closed {
            return Err(SubmitError::ShutDown);
        }
        if let Some(what) = self.lost.lock().unwrap().clone() {
            return Err(SubmitError::DeviceLost { what });
        }
        if self.is_sleeping() {
            return Err(SubmitError::Asleep);
        }
        if limit > 0 && waiting >= limit {
            let count = |number: u64| u32::try_from(number).unwrap();
            return Err(SubmitError::QueueFull { waiting: count(waiting), limit: count(limit) });
        }
        if request.prompt.tokens.is_empty() {
            return Err(SubmitError::EmptyPrompt);
        }
        if let Some(&id) = request.prompt.tokens.iter().find(|&&id| id >= 260) {
            return Err(SubmitError::UnknownToken { id, vocab: 260 });
        }
        let (sender, generation) = Generation::channel();
        sender.tell_cached(CACHED_TOKENS);
        desk.active.push(Active { request, sender, made: 0 });
        self.most_at_once.fetch_max(desk.active.len() as u64, Ordering::SeqCst);
        drop(desk);
        self.changed.notify_all();
        Ok(generation)
    }

    fn model(&self) -> ModelInfo {
        ModelInfo {
            name: "synthetic:echo".to_owned(),
            vocab: 260,
            context_tokens: CONTEXT_TOKENS,
            eos: vec![END_OF_TEXT],
            block_tokens: 16,
            answer_tokens: None,
        }
    }

    fn stats(&self) -> EngineStats {
        EngineStats {
            kv_mode: KvMode::Elastic,
            pool: "kvcached_echo".to_owned(),
            running: u32::try_from(self.lock().active.len()).unwrap(),
            waiting: 0,
            blocks_used: 3,
            blocks_cached: 1,
            blocks_total: 8,
            memory: MemoryUse { needed: Bytes(3072), cached: Bytes(1024), idle: Bytes(8192) },
            limit_bytes: Bytes(1 << 20),
            page_bytes: Bytes(4096),
            page_tokens: 32,
            steps: 0,
            prompt_tokens: 0,
            generated_tokens: self.made.load(Ordering::SeqCst),
            prefix_queried_tokens: 0,
            prefix_hit_tokens: 0,
            preemptions: 0,
            cancelled: self.cancelled.load(Ordering::SeqCst),
        }
    }

    fn sleep(&self, level: u8) -> Result<(), SleepError> {
        if !(1..=2).contains(&level) {
            return Err(SleepError::Level { level });
        }
        let running = u32::try_from(self.lock().active.len()).unwrap();
        if running > 0 {
            return Err(SleepError::Busy { running });
        }
        self.is_sleeping.store(true, Ordering::SeqCst);
        Ok(())
    }

    fn wake_up(&self) -> Result<(), SleepError> {
        self.is_sleeping.store(false, Ordering::SeqCst);
        Ok(())
    }

    fn is_sleeping(&self) -> bool {
        self.is_sleeping.load(Ordering::SeqCst)
    }

    fn health(&self) -> Health {
        match (self.lock().is_closed, &*self.lost.lock().unwrap()) {
            (true, _) => Health::Stopped,
            (false, Some(what)) => Health::DeviceLost { what: what.clone() },
            (false, None) => Health::Well,
        }
    }

    fn drain(&self, within: Duration) {
        let deadline = Instant::now() + within;
        let mut desk = self.lock();
        desk.is_closed = true;
        self.is_draining.store(true, Ordering::SeqCst);
        self.changed.notify_all();
        while !desk.active.is_empty() && Instant::now() < deadline {
            desk = self.changed.wait_timeout(desk, Duration::from_millis(5)).unwrap_or_else(PoisonError::into_inner).0;
        }
        for active in desk.active.drain(..) {
            active.sender.send(Event::Failed(GenerateError::ShutDown));
        }
        self.changed.notify_all();
    }
}
