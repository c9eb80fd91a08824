//! A model as the router knows it: where its engine listens, who is being answered, whether it sleeps.
//!
//! ```text
//!   request ──> arrive ──> place in the queue ──> permit ──> awake ──> Pass ──> answered
//!               unknown,    429 when it is full   one of      one wake-up
//!               not there:                        N           for all
//!               refused
//! ```
//!
//! A request is *present* from [`Model::enter`] until its [`Pass`] is dropped. What decides whether a model may sleep (`present`, the
//! state of its rest, whether its process lives) is behind one lock, so that a model cannot fall asleep under a request. The
//! lock is never held across a call that waits.

mod admission;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::sync::{Semaphore, watch};

use super::error::Refusal;
use super::rest::{Rest, RestEvent, SleepSettings, should_sleep};
use super::slo::SloTarget;
use super::traffic::Traffic;

pub(crate) use admission::Pass;

/// Which engine answers, as far as its pages differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// Ours.
    Kvserve,
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// Anything that speaks OpenAI's API and cannot sleep.
    Command,
}

impl EngineKind {
    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvserve => "kvserve",
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::Command => "command",
        }
    }
}

/// What the router is told of a model.
#[derive(Clone, Debug)]
pub struct ModelSpec {
    /// The instance's name, which clients may use.
    pub name: String,
    /// The model, which clients may use too.
    pub model: String,
    /// What the engine calls the model: requests are rewritten to it.
    pub served_name: String,
    /// Which engine.
    pub engine: EngineKind,
    /// Requests that the engine gets at once.
    pub max_concurrency: usize,
    /// Requests that wait here beyond that; further ones are told to come back.
    pub max_queue: usize,
    /// What its answers should be like.
    pub slo: Option<SloTarget>,
}

/// What becomes of an instance, as whoever runs it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// Started, and not well yet.
    Starting,
    /// It answers.
    Ready,
    /// It ended, and is about to be started again.
    Restarting,
    /// It will not be started again.
    Failed,
}

/// Where an instance is and how it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    /// How it is.
    pub life: Life,
    /// `host:port`, once it is known.
    pub address: Option<String>,
    /// Its process; none for one that somebody else started.
    pub pid: Option<u32>,
    /// How often it was started again.
    pub restarts: u32,
}

/// A model's state in a word, as `/api/status` says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum StateWord {
    Starting,
    Ready,
    Sleeping,
    Waking,
    Restarting,
    Failed,
}

impl StateWord {
    fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Sleeping => "sleeping",
            Self::Waking => "waking",
            Self::Restarting => "restarting",
            Self::Failed => "failed",
        }
    }
}

/// A model, shared by everything that asks about it or changes it.
#[derive(Debug)]
pub struct Model {
    spec: ModelSpec,
    permits: Arc<Semaphore>,
    queued: AtomicUsize,
    refused: AtomicU64,
    inner: Mutex<Inner>,
    /// Moves on whenever `inner` changes in a way that somebody may wait for.
    changed: watch::Sender<u64>,
}

#[derive(Debug)]
struct Inner {
    instance: Instance,
    /// Which life of the instance this is: what a call to an earlier one answers is not about this one.
    birth: u64,
    rest: Rest,
    /// Which time of being awake this is: what an engine said in an earlier one is not about this one.
    spell: u64,
    present: usize,
    /// Since when nobody is present, or was, or could have been.
    idle_since: Instant,
    /// How often it was woken, and how the latest try that failed is called.
    wakes: u64,
    failed_wake: Option<(u64, String)>,
    sleeps: u64,
    traffic: Traffic,
}

/// What of a model is shown.
#[derive(Clone, Debug)]
pub(crate) struct Sight {
    pub(crate) state: StateWord,
    pub(crate) instance: Instance,
    pub(crate) in_flight: usize,
    pub(crate) queued: usize,
    pub(crate) idle: Duration,
    pub(crate) asleep_since: Option<Instant>,
    pub(crate) wakes: u64,
    pub(crate) sleeps: u64,
    pub(crate) refused: u64,
}

/// A call to the engine that one caller has to make: it begins with this and is told of the answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Errand {
    /// Where to.
    pub(crate) address: String,
    birth: u64,
}

impl Model {
    /// One that is about to be started.
    pub fn new(spec: ModelSpec) -> Self {
        let now = Instant::now();
        let instance = Instance { life: Life::Starting, address: None, pid: None, restarts: 0 };
        let inner = Inner {
            instance,
            birth: 0,
            rest: Rest::Awake,
            spell: 0,
            present: 0,
            idle_since: now,
            wakes: 0,
            failed_wake: None,
            sleeps: 0,
            traffic: Traffic::new(now),
        };
        Self {
            permits: Arc::new(Semaphore::new(spec.max_concurrency.min(Semaphore::MAX_PERMITS))),
            spec,
            queued: AtomicUsize::new(0),
            refused: AtomicU64::new(0),
            inner: Mutex::new(inner),
            changed: watch::Sender::new(0),
        }
    }

    /// What it was made from.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The instance is now so. One that answers again, or no longer, is awake: its memory went with its process.
    pub fn set_instance(&self, instance: Instance) {
        let mut inner = self.lock();
        if instance.life != inner.instance.life || instance.pid != inner.instance.pid {
            inner.birth += 1;
            inner.apply(RestEvent::ProcessGone);
            inner.idle_since = Instant::now();
        }
        inner.instance = instance;
        drop(inner);
        self.tell();
    }

    /// The instance as it was last said to be.
    pub fn instance(&self) -> Instance {
        self.lock().instance.clone()
    }

    /// Its state in a word: `starting`, `ready`, `sleeping`, `waking`, `restarting` or `failed`.
    pub fn state_word(&self) -> &'static str {
        self.lock().word().name()
    }

    /// Begins to put an idle model to sleep, if it is time.
    pub(crate) fn begin_idle_sleep(&self, settings: &SleepSettings) -> Option<Errand> {
        let mut inner = self.lock();
        let idle = inner.idle();
        if self.spec.engine == EngineKind::Command || !should_sleep(settings, inner.rest, inner.present, idle) {
            return None;
        }
        let address = inner.address(&self.spec.name).ok()?;
        Some(inner.begin_sleep(address))
    }

    /// Begins to put it to sleep because somebody says so.
    pub(crate) fn begin_sleep(&self) -> Result<Errand, CannotRest> {
        let mut inner = self.lock();
        let address = inner.address(&self.spec.name).map_err(|refusal| CannotRest::NotThere(refusal.to_string()))?;
        match inner.rest {
            _ if self.spec.engine == EngineKind::Command => Err(CannotRest::NoSuchPage),
            Rest::Asleep { .. } => Err(CannotRest::Already("asleep")),
            Rest::FallingAsleep | Rest::Waking { .. } => Err(CannotRest::Changing),
            Rest::Awake if inner.present > 0 => Err(CannotRest::Busy(inner.present)),
            Rest::Awake => Ok(inner.begin_sleep(address)),
        }
    }

    /// Begins to wake it up because somebody says so; the shortest sleep is for machines, not for people. One that is awake as far as is
    /// known may sleep all the same, and an engine that has nothing to do says so.
    pub(crate) fn begin_wake(&self) -> Result<Errand, CannotRest> {
        let mut inner = self.lock();
        let address = inner.address(&self.spec.name).map_err(|refusal| CannotRest::NotThere(refusal.to_string()))?;
        match inner.rest {
            _ if self.spec.engine == EngineKind::Command => Err(CannotRest::NoSuchPage),
            // It would take memory that it has, and read its weights under the requests that run.
            Rest::Awake if self.spec.engine == EngineKind::Sglang => Err(CannotRest::Already("awake")),
            Rest::FallingAsleep | Rest::Waking { .. } => Err(CannotRest::Changing),
            Rest::Awake | Rest::Asleep { .. } => Ok(inner.begin_wake(address)),
        }
    }

    /// The engine said that it sleeps, to a request that it got in this `spell`. Since when, nobody here knows: for long enough to be woken.
    fn found_asleep(&self, spell: u64, min_sleep: Duration) {
        let mut inner = self.lock();
        if inner.spell == spell && inner.rest == Rest::Awake {
            let now = Instant::now();
            inner.apply(RestEvent::FoundAsleep { since: now.checked_sub(min_sleep).unwrap_or(now) });
        }
        drop(inner);
        self.tell();
    }

    /// The engine answered a call to sleep.
    pub(crate) fn end_sleep(&self, errand: &Errand, outcome: &Result<(), String>) {
        self.end(errand, |inner| match outcome {
            Ok(()) => {
                inner.sleeps += 1;
                inner.apply(RestEvent::Slept { at: Instant::now() });
            }
            Err(_) => {
                // It was asked as if it had been used: it is asked again when it was idle for as long once more.
                inner.idle_since = Instant::now();
                inner.apply(RestEvent::SleepRefused);
            }
        });
    }

    /// The engine answered a call to wake up.
    pub(crate) fn end_wake(&self, errand: &Errand, outcome: &Result<(), String>) {
        self.end(errand, |inner| match outcome {
            Ok(()) => {
                inner.idle_since = Instant::now();
                inner.apply(RestEvent::Woke);
            }
            Err(reason) => {
                inner.apply(RestEvent::WakeRefused);
                if inner.rest != Rest::Awake {
                    inner.failed_wake = Some((inner.wakes, reason.clone()));
                }
            }
        });
    }

    fn end(&self, errand: &Errand, change: impl FnOnce(&mut Inner)) {
        let mut inner = self.lock();
        // The process that was called is gone, and with it what it answered.
        if inner.birth == errand.birth {
            change(&mut inner);
        }
        drop(inner);
        self.tell();
    }

    pub(crate) fn sight(&self) -> Sight {
        let inner = self.lock();
        let queued = self.queued.load(Ordering::Relaxed);
        Sight {
            state: inner.word(),
            instance: inner.instance.clone(),
            in_flight: inner.present.saturating_sub(queued),
            queued,
            idle: inner.idle(),
            asleep_since: inner.rest.asleep_since(),
            wakes: inner.wakes,
            sleeps: inner.sleeps,
            refused: self.refused.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn traffic<T>(&self, look: impl FnOnce(&mut Traffic) -> T) -> T {
        look(&mut self.lock().traffic)
    }

    fn tell(&self) {
        self.changed.send_modify(|count| *count += 1);
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Whoever panicked under the lock was reading or counting: nothing is half done.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn address(&self, name: &str) -> Result<String, Refusal> {
        let model = || name.to_owned();
        match (self.instance.life, &self.instance.address) {
            (Life::Ready, Some(address)) => Ok(address.clone()),
            (Life::Starting | Life::Ready, _) => Err(Refusal::Starting { model: model() }),
            (Life::Restarting, _) => Err(Refusal::Restarting { model: model() }),
            (Life::Failed, _) => Err(Refusal::Failed { model: model() }),
        }
    }

    fn begin_sleep(&mut self, address: String) -> Errand {
        self.apply(RestEvent::ToSleep);
        Errand { address, birth: self.birth }
    }

    fn begin_wake(&mut self, address: String) -> Errand {
        if self.rest != Rest::Awake {
            self.wakes += 1;
        }
        self.apply(RestEvent::ToWake);
        Errand { address, birth: self.birth }
    }

    fn apply(&mut self, event: RestEvent) {
        self.rest = self.rest.next(event).expect("callers look at the state under the same lock");
        if self.rest == Rest::Awake {
            self.spell += 1;
        }
    }

    fn idle(&self) -> Duration {
        if self.present > 0 { Duration::ZERO } else { self.idle_since.elapsed() }
    }

    fn word(&self) -> StateWord {
        match (self.instance.life, self.rest) {
            (Life::Starting, _) => StateWord::Starting,
            (Life::Restarting, _) => StateWord::Restarting,
            (Life::Failed, _) => StateWord::Failed,
            (Life::Ready, Rest::Awake | Rest::FallingAsleep) => StateWord::Ready,
            (Life::Ready, Rest::Asleep { .. }) => StateWord::Sleeping,
            (Life::Ready, Rest::Waking { .. }) => StateWord::Waking,
        }
    }
}

/// Why somebody's order to sleep or wake up is not carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CannotRest {
    #[error("it is {0} already")]
    Already(&'static str),
    #[error("it is just falling asleep or waking up: ask again")]
    Changing,
    #[error("{0} requests are present: it sleeps when nobody waits for it")]
    Busy(usize),
    #[error("its engine is a command of yours: the router knows no page there that makes it sleep or wakes it up")]
    NoSuchPage,
    #[error("{0}")]
    NotThere(String),
}
