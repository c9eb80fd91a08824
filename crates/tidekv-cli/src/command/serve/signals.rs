//! SIGTERM and Ctrl-C.
//!
//! ```text
//!   the first    nothing new is accepted, running requests may end, exit code 0
//!   the second   running requests fail, and the process ends by the signal as soon as its pool is closed
//! ```
//!
//! Nothing but SIGKILL ends the process while it has a pool: the pool's segment would stay behind.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use tidekv_serve::handle::Engine;
use tidekv_serve::server::Stop;
use tidekv_shm::segment;

/// What the second signal does. Clones are the same.
#[derive(Clone, Default)]
pub(super) struct Second(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// Which one it was, once it came.
    signal: Option<i32>,
    /// There once it has started. Weak, because the pool is open for as long as somebody has the engine.
    engine: Option<Weak<dyn Engine>>,
}

impl Second {
    /// It ends this engine's requests, at once if it came already.
    pub(super) fn ends(&self, engine: &Arc<dyn Engine>) {
        let mut state = self.state();
        state.engine = Some(Arc::downgrade(engine));
        if state.signal.is_some() {
            engine.drain(Duration::ZERO);
        }
    }

    /// Ends the process by the second signal if it came. Nobody has the engine any more.
    pub(super) fn finish(&self) {
        end_by(self.state().signal);
    }

    /// The lock is held to the end: until then this thread may have the engine, and [`finish`](Self::finish) waits.
    fn came(&self, signal: i32) {
        let mut state = self.state();
        state.signal = Some(signal);
        match &state.engine {
            Some(engine) => {
                if let Some(engine) = engine.upgrade() {
                    engine.drain(Duration::ZERO);
                }
            }
            // A model that is being loaded is nothing to wait for.
            None if segment::make_no_more() => end_by(state.signal),
            None => {}
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn end_by(signal: Option<i32>) {
    if let Some(signal) = signal {
        // It can only fail for signals that cannot be caught.
        let _ = emulate_default_handler(signal);
    }
}

/// From now on.
pub(super) fn stop_on_signal(stop: Stop) -> io::Result<Second> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let second = Second::default();
    let told = second.clone();
    std::thread::Builder::new().name("kvserve-signals".to_owned()).spawn(move || {
        let mut signals = signals.forever();
        if signals.next().is_none() {
            return;
        }
        stop.stop();
        for signal in signals {
            told.came(signal);
        }
    })?;
    Ok(second)
}
