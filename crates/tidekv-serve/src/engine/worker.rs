//! The engine's thread: hears commands, gives memory back when asked, computes a step, and again.
//!
//! ```text
//!   awake ──sleep──> ending (nothing new; what runs ends) ──> asleep ──wake──> awake
//!                       └── too long: Busy, awake again
//!   any   ──stop───> ending until a deadline ──> the rest fails ──> over
//! ```
//!
//! It waits for nobody but the pool, and for that only when it has nothing else to do, so every command is heard after
//! one step at most.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use tidekv_batch::SeqId;
use tidekv_core::units::Bytes;

use super::blocks::{Blocks, BlocksError};
use super::front::{Command, Counters};
use super::giving_way::GivingWay;
use super::sequence::Sequence;
use super::sleeping::FallingAsleep;
use super::start::StartError;
use super::step::{Progress, with_sources};
use crate::compute::{Compute, ComputeError};
use crate::config::{EngineConfig, KvMode};
use crate::handle::{FinishReason, GenerateError};

/// Makes what a deep sleep dropped.
pub(super) struct Loader {
    pub(super) load: Box<dyn Fn() -> Result<Box<dyn Compute>, StartError> + Send>,
    /// What that takes of the device beside pages: weights, and the buffers of steps.
    pub(super) device_bytes: Bytes,
}

/// How often an engine that waits for memory looks again.
const STALL_LOOK: Duration = Duration::from_millis(5);

/// How long the engine waits for what it cannot bring about itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// A request that there is no memory for is given up after this time without any progress.
    pub(super) starved: Duration,
    /// The least time without progress after which an engine lets neighbours past that wait too.
    pub(super) give_way: Duration,
    /// A model that shall sleep lets its requests end.
    pub(super) sleep: Duration,
    /// A static model that wakes up lets its neighbours give back what was its.
    pub(super) wake: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            starved: Duration::from_secs(60),
            give_way: Duration::from_secs(1),
            sleep: Duration::from_secs(60),
            wake: Duration::from_secs(10),
        }
    }
}

/// See the [module](self).
pub(super) struct Worker {
    pub(super) blocks: Blocks,
    /// `None` in a deep sleep.
    pub(super) compute: Option<Box<dyn Compute>>,
    pub(super) counters: Arc<Counters>,
    /// By age: numbers grow.
    pub(super) running: BTreeMap<SeqId, Sequence>,
    /// By age too: who was preempted is older than who came later.
    pub(super) waiting: BTreeMap<SeqId, Sequence>,
    pub(super) max_step_tokens: u32,
    pub(super) max_rows: usize,
    /// Since when nothing could be computed for want of memory.
    pub(super) stalled_since: Option<Instant>,
    pub(super) giving_way: GivingWay,
    /// What neighbours were last asked for ahead of need, and when.
    pub(super) asked: Option<(u32, Instant)>,
    pub(super) patience: Patience,
    pub(super) kv_mode: KvMode,
    /// What is kept for a static model when it is awake; `Some` while it sleeps, when nothing is.
    pub(super) floor_awake: Option<Bytes>,
    pub(super) load: Loader,
    orders: Receiver<Command>,
    next_id: u64,
    /// The pool may be asking for memory.
    is_owing: bool,
    pub(super) falling_asleep: Option<FallingAsleep>,
    stop: Option<Instant>,
}

impl Worker {
    pub(super) fn new(
        config: &EngineConfig,
        kv_mode: KvMode,
        blocks: Blocks,
        compute: Box<dyn Compute>,
        load: Loader,
        orders: Receiver<Command>,
        counters: Arc<Counters>,
    ) -> Self {
        Self {
            blocks,
            compute: Some(compute),
            counters,
            running: BTreeMap::new(),
            waiting: BTreeMap::new(),
            max_step_tokens: config.max_step_tokens,
            max_rows: config.max_batch_rows as usize,
            stalled_since: None,
            giving_way: GivingWay::default(),
            asked: None,
            patience: Patience::default(),
            kv_mode,
            floor_awake: None,
            load,
            orders,
            next_id: 0,
            is_owing: false,
            falling_asleep: None,
            stop: None,
        }
    }

    /// The same with other waits.
    pub(super) fn with_patience(self, patience: Patience) -> Self {
        Self { patience, ..self }
    }

    /// Runs until it is told to stop. A panic ends it: everybody who waits then hears that the engine is gone, because
    /// the other ends of their channels went with it.
    pub(super) fn run(mut self) {
        let outcome = catch_unwind(AssertUnwindSafe(|| while self.turn() {}));
        if outcome.is_err() {
            tracing::error!("the engine's thread panicked; its requests fail and it must be started again");
        }
    }

    /// One turn of the loop; `false` at the end.
    fn turn(&mut self) -> bool {
        let progress = match self.hear() {
            Ok(()) => {
                self.drop_unread();
                self.settle();
                self.step()
            }
            Err(Gone) => Progress::Over,
        };
        self.publish();
        if self.should_end(progress) {
            self.fail_all(|| GenerateError::ShutDown);
            return false;
        }
        self.fall_asleep();
        match progress {
            Progress::Stepped => true,
            // Commands are heard at the top, the one that woke us included.
            Progress::Stalled => self.wait(Some(STALL_LOOK)),
            Progress::Idle => self.wait(None),
            Progress::Over => false,
        }
    }

    /// Waits for a command and takes it.
    fn wait(&mut self, most: Option<Duration>) -> bool {
        let command = match most {
            Some(most) => self.orders.recv_timeout(most),
            None => self.orders.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match command {
            Ok(command) => {
                self.obey(command);
                true
            }
            Err(RecvTimeoutError::Timeout) => true,
            Err(RecvTimeoutError::Disconnected) => false,
        }
    }

    /// Takes all commands that are there.
    fn hear(&mut self) -> Result<(), Gone> {
        loop {
            match self.orders.try_recv() {
                Ok(command) => self.obey(command),
                Err(TryRecvError::Empty) => return Ok(()),
                Err(TryRecvError::Disconnected) => return Err(Gone),
            }
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Generate { request, seed, events } => {
                self.next_id += 1;
                let seq = Sequence::new(SeqId(self.next_id), request, seed, events);
                // It was on its way when the device was lost, or when the model fell asleep.
                let refusal = match self.loss() {
                    Some(what) => Some(GenerateError::DeviceLost { what }),
                    None => self.is_asleep().then_some(GenerateError::Asleep),
                };
                if let Some(refusal) = refusal {
                    self.counters.waiting.fetch_sub(1, Relaxed);
                    seq.fail(refusal);
                } else {
                    self.waiting.insert(seq.id, seq);
                }
            }
            Command::Sleep { level, answer } => self.begin_sleep(level, answer),
            Command::WakeUp { answer } => {
                // Whoever does not listen any more does not need the answer.
                let _ = answer.send(self.wake_up());
            }
            Command::Reclaim => self.is_owing = true,
            Command::Stop { deadline } => {
                self.stop = Some(self.stop.map_or(deadline, |earlier| earlier.min(deadline)));
            }
        }
    }

    /// Ends requests that nobody reads.
    fn drop_unread(&mut self) {
        let unread = |(&id, seq): (&SeqId, &Sequence)| seq.is_cancelled().then_some(id);
        for id in self.running.iter().filter_map(unread).collect::<Vec<_>>() {
            self.end(id, |seq| seq.finish(FinishReason::Cancelled));
            self.counters.cancelled.fetch_add(1, Relaxed);
        }
        for id in self.waiting.iter().filter_map(unread).collect::<Vec<_>>() {
            self.waiting.remove(&id);
            self.counters.waiting.fetch_sub(1, Relaxed);
            self.counters.cancelled.fetch_add(1, Relaxed);
        }
    }

    /// Gives the pool what it asks for: cached blocks, then those of the youngest requests. One request always stays, so
    /// that something ends.
    fn settle(&mut self) {
        if !self.is_owing {
            return;
        }
        loop {
            let owed = self.blocks.owed().pages;
            if owed > 0 {
                let given = self.blocks.give_back(owed);
                self.report(given);
                // What is gone cannot be asked for again.
                self.blocks.kv().set_evictable(self.blocks.kept());
            }
            // Cached blocks may lie on pages with others: what they did not free is no reason to stop a request.
            self.is_owing = self.blocks.owed().firm_pages > 0;
            if !self.is_owing || !self.preempt_youngest() {
                return;
            }
        }
    }

    /// Whether the pool asked for memory and did not get all of it: nobody new is let in then.
    pub(super) fn is_owing(&self) -> bool {
        self.is_owing
    }

    /// Sends the youngest request back to the queue, if it is not the only one.
    pub(super) fn preempt_youngest(&mut self) -> bool {
        let is_alone = self.running.len() < 2;
        if !is_alone {
            self.send_back_youngest();
        }
        !is_alone
    }

    /// Sends the youngest request back to the queue. Says whether there was one.
    fn send_back_youngest(&mut self) -> bool {
        let Some((id, mut seq)) = self.running.pop_last() else { return false };
        let left = self.blocks.leave(id);
        self.report(left);
        seq.preempted();
        self.waiting.insert(id, seq);
        self.counters.waiting.fetch_add(1, Relaxed);
        self.counters.preemptions.fetch_add(1, Relaxed);
        true
    }

    /// Lets neighbours past, if some wait too: all requests go back to the queue. What they computed stays until somebody asks
    /// for its memory.
    pub(super) fn give_way(&mut self) {
        match self.blocks.kv().give_way() {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => return tracing::debug!(%error, "nobody was let past"),
        }
        tracing::info!(requests = self.running.len(), "waits for memory as others do, and lets them past");
        while self.send_back_youngest() {}
        let spared = self.blocks.return_spare();
        self.report(spared);
        self.asked = None;
        self.giving_way.rest(Instant::now(), self.patience.give_way);
    }

    /// A running request is over: its blocks are free, and counted so, before anybody hears of it.
    pub(super) fn end(&mut self, id: SeqId, last_words: impl FnOnce(Sequence)) {
        let Some(seq) = self.running.remove(&id) else { return };
        let left = self.blocks.leave(id);
        self.report(left);
        self.publish();
        last_words(seq);
    }

    /// Blocks that cannot be moved are a bug, or a pool that is broken: said, and the engine goes on with what it has.
    pub(super) fn report(&self, outcome: Result<(), BlocksError>) {
        if let Err(error) = outcome {
            tracing::error!(%error, "blocks could not be given back");
        }
    }

    pub(super) fn publish(&self) {
        let count = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
        self.counters.running.store(count(self.running.len()), Relaxed);
        self.counters.in_rows.store(self.blocks.in_rows(), Relaxed);
        self.counters.cached.store(self.blocks.cached(), Relaxed);
        self.blocks.kv().set_evictable(self.blocks.kept());
    }

    pub(super) fn has_work(&self) -> bool {
        !(self.running.is_empty() && self.waiting.is_empty())
    }

    fn should_end(&self, progress: Progress) -> bool {
        progress == Progress::Over || self.stop.is_some_and(|deadline| !self.has_work() || Instant::now() >= deadline)
    }

    fn fail_all(&mut self, error: impl Fn() -> GenerateError) {
        while let Some((&id, _)) = self.running.first_key_value() {
            self.end(id, |seq| seq.fail(error()));
        }
        while let Some((_, seq)) = self.waiting.pop_first() {
            self.counters.waiting.fetch_sub(1, Relaxed);
            seq.fail(error());
        }
        let cleared = self.blocks.clear();
        self.report(cleared);
        self.publish();
    }
}

/// A device that is lost. The process stays, to say so to whoever asks; a new one is needed to compute.
impl Worker {
    /// What the driver said when the device was lost, if it was.
    pub(super) fn loss(&self) -> Option<String> {
        self.counters.lost.get().cloned()
    }

    /// Asks the device, behind something that failed, whether it is lost. Everybody hears of a loss.
    pub(super) fn look_for_loss(&mut self) -> Option<String> {
        let error = self.compute.as_mut()?.check_device().err().filter(ComputeError::is_device_lost)?;
        let what = self.counters.lost.get_or_init(|| with_sources(&error)).clone();
        tracing::error!(what, "the device is lost: all requests fail, and the server must be started again");
        self.fail_all(|| GenerateError::DeviceLost { what: what.clone() });
        Some(what)
    }
}

/// The other end of the commands is gone.
struct Gone;
