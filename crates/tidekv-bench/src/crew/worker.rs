//! The worker's side: its orders, one after the other, and a report every 50 ms.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail, ensure};
use clap::Args;
use tidekv_core::blocks::BlockLease;
use tidekv_core::units::Bytes;
use tidekv_pool::PoolError;
use tidekv_shm::{DeviceName, Ledger, RuntimeDir};

use super::holding::{Grower, Holding, micros, refusal};
use super::message::{Order, Word};
use crate::lab::PoolSpec;
use crate::random::Random;
use crate::subprocess::{orders, say};
use tidekv_cli::exit::Outcome;

/// How often a worker says what it holds.
const REPORT_PERIOD: Duration = Duration::from_millis(50);

/// How long the ledger's lock may be waited for where an order is to hold it.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// Most blocks that churning holds, and leases at once.
const CHURN_BLOCKS: usize = 64;
const CHURN_STEP: u32 = 8;

/// A pool waits a fifth of a second for the ledger each time.
const RESIZE_TRIES: u32 = 50;

/// Arguments of the hidden `kvbench worker`: none. Everything comes as orders.
#[derive(Args, Clone, Copy, Debug)]
#[command(after_help = "Examples:\n  kvbench share    # starts its workers itself")]
pub struct WorkerArgs {}

/// What wakes the worker up.
#[derive(Debug)]
enum Event {
    Order(Order),
    ReclaimRequested,
    /// Standard input was closed: the parent is gone or has no more orders.
    Closed,
}

/// Follows orders until there are no more.
pub fn run(_: &WorkerArgs) -> anyhow::Result<Outcome> {
    let (sender, events) = mpsc::channel();
    let reader = sender.clone();
    thread::Builder::new().name("orders".to_owned()).spawn(move || read_orders(&reader))?;
    if let Err(error) = work(&sender, &events) {
        say(&Word::Failed { reason: format!("{error:#}") })?;
    }
    Ok(Outcome::Done)
}

fn work(sender: &Sender<Event>, events: &Receiver<Event>) -> anyhow::Result<()> {
    let Some(mut worker) = open(sender, events)? else { return Ok(()) };
    let mut next_report = Instant::now() + REPORT_PERIOD;
    // What ended an order that lasts until something happens.
    let mut pending = None;
    loop {
        let event = match pending.take() {
            Some(event) => Ok(event),
            None => events.recv_timeout(next_report.saturating_duration_since(Instant::now())),
        };
        match event {
            Ok(Event::Closed) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
            Ok(Event::Order(order)) => pending = worker.follow(order, events)?,
            Ok(Event::ReclaimRequested) => {}
            Err(RecvTimeoutError::Timeout) => {
                say(&Word::Report(worker.holding.report()))?;
                next_report = Instant::now() + REPORT_PERIOD;
            }
        }
        worker.holding.obey()?;
        if let Some(reason) = worker.holding.failure() {
            bail!(reason);
        }
    }
}

/// The first order opens the pool.
fn open(sender: &Sender<Event>, events: &Receiver<Event>) -> anyhow::Result<Option<Worker>> {
    let spec = match events.recv() {
        Ok(Event::Order(Order::Open(spec))) => spec,
        Ok(Event::Order(order)) => bail!("the pool is not open yet: {order:?}"),
        Ok(Event::ReclaimRequested | Event::Closed) | Err(_) => return Ok(None),
    };
    let pool = spec.open().context("opening the pool")?;
    let bell = sender.clone();
    pool.on_reclaim(move |_| {
        // Nobody listens any more once the input is closed.
        let _ = bell.send(Event::ReclaimRequested);
    });
    let holding = Holding::new(pool);
    let grower = Grower::start(&holding, |reached| {
        // A parent that went away closes our input too, which ends us.
        let _ = say(&Word::Reached { mark: reached.mark, us: micros(reached.after) });
    })?;
    say(&Word::Opened)?;
    Ok(Some(Worker { _grower: grower, holding, spec, grabbed: Vec::new() }))
}

#[derive(Debug)]
struct Worker {
    /// Declared first: it ends before the pool closes.
    _grower: Grower,
    holding: Arc<Holding>,
    spec: PoolSpec,
    grabbed: Vec<BlockLease>,
}

impl Worker {
    /// Follows one order; where that lasted until something else happened, answers what that was.
    fn follow(&mut self, order: Order, events: &Receiver<Event>) -> anyhow::Result<Option<Event>> {
        match order {
            Order::Open(_) => bail!("the pool is open already"),
            Order::Want { blocks, marks } => self.holding.want(blocks, &marks)?,
            Order::Grab { blocks, at_us, wait_ms } => self.grab(blocks, at_us, Duration::from_millis(wait_ms))?,
            Order::GiveBack => {
                self.holding.free(&self.grabbed)?;
                self.grabbed.clear();
                self.holding.pool.trim()?;
                say(&Word::GaveBack)?;
            }
            Order::Churn { seed, wait_ms } => {
                let random = &mut Random::seeded(seed);
                return self.churn(random, Duration::from_millis(wait_ms), events).map(Some);
            }
            Order::HoldLedgerLock => return self.hold_ledger_lock(events).map(Some),
        }
        Ok(None)
    }

    fn grab(&mut self, blocks: u32, at_us: u64, wait: Duration) -> anyhow::Result<()> {
        // Spinning: two racers that sleep wake up too far apart to race.
        while unix_us() < at_us {
            std::hint::spin_loop();
        }
        let started = Instant::now();
        let refused = self.holding.lease(blocks, wait, &mut self.grabbed).err();
        let took = started.elapsed();
        say(&Word::Grabbed { refusal: refused.as_ref().map(refusal), us: micros(took) })
    }

    /// Everything a pool can be asked for, at random, so that a kill meets all of it half-way.
    fn churn(&mut self, random: &mut Random, wait: Duration, events: &Receiver<Event>) -> anyhow::Result<Event> {
        let pool = &self.holding.pool;
        let whole = Bytes(self.spec.page_bytes * u64::from(self.spec.pages));
        let mut leases: Vec<BlockLease> = Vec::new();
        let mut next_report = Instant::now();
        let event = loop {
            match events.try_recv() {
                Ok(Event::ReclaimRequested) => self.keep_half(&mut leases)?,
                Ok(event) => break event,
                Err(TryRecvError::Disconnected) => break Event::Closed,
                Err(TryRecvError::Empty) => {}
            }
            match random.below(16) {
                0 => drop(unless_transient(pool.trim())?),
                // A limit in the middle of what is in use, then none: shrinking and growing again.
                1 => drop(unless_transient(pool.resize(Bytes(whole.0 / 4)))?),
                2 => drop(unless_transient(pool.resize(whole))?),
                3..8 if !leases.is_empty() => {
                    random.shuffle(&mut leases);
                    let keep = random.below(leases.len());
                    self.holding.free(&leases.split_off(keep))?;
                }
                _ if leases.len() < CHURN_BLOCKS => {
                    match self.holding.lease(random.between(1, CHURN_STEP), wait, &mut leases) {
                        Ok(()) => {}
                        Err(error) if error.is_transient() => self.keep_half(&mut leases)?,
                        Err(error) => return Err(error.into()),
                    }
                }
                _ => self.keep_half(&mut leases)?,
            }
            if Instant::now() >= next_report {
                say(&Word::Report(self.holding.report()))?;
                next_report = Instant::now() + REPORT_PERIOD;
            }
        };
        // The last one counts.
        let mut tries = 0..RESIZE_TRIES;
        while unless_transient(pool.resize(whole))?.is_none() {
            ensure!(tries.next().is_some(), "the ledger was locked through {RESIZE_TRIES} tries to set a limit");
        }
        self.holding.free(&leases)?;
        Ok(event)
    }

    fn keep_half(&self, leases: &mut Vec<BlockLease>) -> anyhow::Result<()> {
        let keep = leases.len() / 2;
        Ok(self.holding.free(&leases.split_off(keep))?)
    }

    fn hold_ledger_lock(&self, events: &Receiver<Event>) -> anyhow::Result<Event> {
        let dir = RuntimeDir::at(&self.spec.runtime_dir);
        let device =
            DeviceName::new(&self.holding.pool.reservation().expect("memory of its own").backend().capabilities().id)?;
        let ledger = Ledger::open(&dir, &device)?;
        let event = ledger.update(Instant::now() + LOCK_TIMEOUT, |_| {
            say(&Word::Locked)?;
            loop {
                match events.recv().unwrap_or(Event::Closed) {
                    Event::ReclaimRequested => {}
                    event => break anyhow::Ok(event),
                }
            }
        })??;
        say(&Word::Unlocked)?;
        Ok(event)
    }
}

/// What came of a call, or `None` where the ledger was locked for longer than a pool waits: on a busy machine that happens.
fn unless_transient<T>(outcome: Result<T, PoolError>) -> Result<Option<T>, PoolError> {
    match outcome {
        Err(error) if error.is_transient() => Ok(None),
        outcome => outcome.map(Some),
    }
}

fn read_orders(events: &Sender<Event>) {
    for order in orders() {
        if events.send(Event::Order(order)).is_err() {
            return;
        }
    }
    let _ = events.send(Event::Closed);
}

fn unix_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, micros)
}
