//! The floor under each strategy: the same pattern of wake-ups with nothing around it.
//!
//! | floor         | under    | one round                                                               |
//! |---------------|----------|-------------------------------------------------------------------------|
//! | `OneByOne`    | `seq`    | write to a worker, read its answer, then the next worker                |
//! | `PerThread`   | `thread` | wake a thread for each worker, which writes and reads; wait for the last |
//! | `Pipelined`   | `async`, and any new strategy on sockets | write to all, then read from all         |
//! | `Words`       | `ring`, and any new strategy on rings | set every worker's word, then wait for every answer |

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle, Thread};

use anyhow::{Context, anyhow};
use tidekv_ipc::broadcast::{Channel, StrategyEntry};

use super::echo::Echo;

/// A bare broadcast.
pub(super) trait Floor {
    /// What it is, for people.
    fn in_words(&self) -> &'static str;

    /// Every worker echoes once.
    fn round(&mut self) -> anyhow::Result<()>;

    /// Gives the echoes back, for the next floor.
    fn finish(self: Box<Self>) -> anyhow::Result<Vec<Echo>>;
}

/// The floor under a strategy.
pub(super) fn under(strategy: &StrategyEntry, echoes: Vec<Echo>) -> anyhow::Result<Box<dyn Floor>> {
    Ok(match (strategy.name, (strategy.make)().channel()) {
        ("seq", _) => Box::new(OneByOne(echoes)),
        ("thread", _) => Box::new(PerThread::start(echoes)?),
        (_, Channel::Socket) => Box::new(Pipelined(echoes)),
        (_, Channel::Ring) => Box::new(Words(echoes)),
    })
}

struct OneByOne(Vec<Echo>);

impl Floor for OneByOne {
    fn in_words(&self) -> &'static str {
        "socket pairs, one after another"
    }

    fn round(&mut self) -> anyhow::Result<()> {
        self.0.iter_mut().try_for_each(|echo| {
            echo.send()?;
            echo.receive()
        })
    }

    fn finish(self: Box<Self>) -> anyhow::Result<Vec<Echo>> {
        Ok(self.0)
    }
}

struct Pipelined(Vec<Echo>);

impl Floor for Pipelined {
    fn in_words(&self) -> &'static str {
        "socket pairs, pipelined"
    }

    fn round(&mut self) -> anyhow::Result<()> {
        self.0.iter_mut().try_for_each(Echo::send)?;
        self.0.iter_mut().try_for_each(Echo::receive)
    }

    fn finish(self: Box<Self>) -> anyhow::Result<Vec<Echo>> {
        Ok(self.0)
    }
}

struct Words(Vec<Echo>);

impl Floor for Words {
    fn in_words(&self) -> &'static str {
        "a futex word for each worker"
    }

    fn round(&mut self) -> anyhow::Result<()> {
        self.0.iter_mut().try_for_each(Echo::ring)?;
        self.0.iter_mut().try_for_each(Echo::wait)
    }

    fn finish(self: Box<Self>) -> anyhow::Result<Vec<Echo>> {
        Ok(self.0)
    }
}

/// One thread for each worker. The last to be done wakes the caller.
struct PerThread {
    threads: Vec<EchoThread>,
    busy: Arc<AtomicUsize>,
}

struct EchoThread {
    /// Who is to be woken; closing it ends the thread.
    calls: Option<Sender<Thread>>,
    thread: JoinHandle<anyhow::Result<Echo>>,
}

impl PerThread {
    fn start(echoes: Vec<Echo>) -> anyhow::Result<Self> {
        let busy = Arc::new(AtomicUsize::new(0));
        let start = |echo: Echo| {
            let (calls, inbox) = mpsc::channel();
            let busy = Arc::clone(&busy);
            let thread = thread::Builder::new().name("echo".to_owned()).spawn(move || echo_calls(echo, &inbox, &busy));
            Ok(EchoThread { calls: Some(calls), thread: thread.context("starting a thread")? })
        };
        let threads = echoes.into_iter().map(start).collect::<anyhow::Result<_>>()?;
        Ok(Self { threads, busy })
    }
}

fn echo_calls(mut echo: Echo, calls: &Receiver<Thread>, busy: &AtomicUsize) -> anyhow::Result<Echo> {
    while let Ok(caller) = calls.recv() {
        let echoed = echo.send().and_then(|()| echo.receive());
        if busy.fetch_sub(1, Ordering::AcqRel) == 1 {
            caller.unpark();
        }
        echoed?;
    }
    Ok(echo)
}

impl Floor for PerThread {
    fn in_words(&self) -> &'static str {
        "socket pairs, a thread for each worker"
    }

    fn round(&mut self) -> anyhow::Result<()> {
        self.busy.store(self.threads.len(), Ordering::Release);
        for thread in &self.threads {
            let calls = thread.calls.as_ref().context("the threads have been told to end")?;
            calls.send(thread::current()).map_err(|_| anyhow!("waiting for an echo: the worker is gone"))?;
        }
        while self.busy.load(Ordering::Acquire) > 0 {
            thread::park();
        }
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> anyhow::Result<Vec<Echo>> {
        self.threads.iter_mut().for_each(|thread| thread.calls = None);
        let join = |thread: EchoThread| thread.thread.join().map_err(|_| anyhow!("an echo thread panicked"))?;
        self.threads.into_iter().map(join).collect()
    }
}
