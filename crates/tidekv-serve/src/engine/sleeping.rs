//! Falling asleep and waking up, between two steps of the engine's thread.
//!
//! ```text
//!   sleep   what runs ends ──> weights to the host (1) ──> blocks and pages back to the pool ──> weights dropped (2)
//!   wake    weights back, or loaded again ──> a static model's pages ──> requests are let in
//! ```
//!
//! What can fail comes first, so a model that could not sleep is as awake as before, with all its memory: weights that the host has no room
//! for stay where they are, and a static cache is not given up for nothing. A model that could not wake up is as asleep as before: weights
//! that came back before something else failed go again, because a sleeper that kept them would hold what its neighbours are owed.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::Sender;
use std::time::Instant;

use tidekv_core::units::Bytes;

use super::blocks::BlocksError;
use super::start::StartError;
use super::step::with_sources;
use super::worker::Worker;
use crate::config::KvMode;
use crate::handle::SleepError;

/// A sleep that was asked for and waits for requests to end.
pub(super) struct FallingAsleep {
    level: u8,
    answer: Sender<Result<(), SleepError>>,
    deadline: Instant,
}

impl Worker {
    /// Whether memory was given back.
    pub(super) fn is_asleep(&self) -> bool {
        self.falling_asleep.is_none() && self.counters.is_asleep.load(Relaxed)
    }

    pub(super) fn begin_sleep(&mut self, level: u8, answer: Sender<Result<(), SleepError>>) {
        let refusal = match self.loss() {
            Some(what) => Some(SleepError::DeviceLost { what }),
            None if self.falling_asleep.is_some() => Some(self.busy()),
            None => None,
        };
        if let Some(refusal) = refusal {
            // Whoever does not listen any more does not need the answer; so everywhere here.
            let _ = answer.send(Err(refusal));
            return;
        }
        // From here on the front refuses requests.
        self.counters.is_asleep.store(true, Relaxed);
        self.falling_asleep = Some(FallingAsleep { level, answer, deadline: Instant::now() + self.patience.sleep });
    }

    fn busy(&self) -> SleepError {
        SleepError::Busy { running: u32::try_from(self.running.len()).unwrap_or(u32::MAX) }
    }

    /// Sleeps once nothing runs; gives up when that takes too long.
    pub(super) fn fall_asleep(&mut self) {
        let Some(FallingAsleep { level, answer, deadline }) = self.falling_asleep.take() else { return };
        if self.has_work() && Instant::now() < deadline {
            self.falling_asleep = Some(FallingAsleep { level, answer, deadline });
            return;
        }
        let outcome = if self.has_work() { Err(self.busy()) } else { self.go_to_sleep(level) };
        self.publish();
        if outcome.is_err() {
            self.counters.is_asleep.store(false, Relaxed);
        }
        let _ = answer.send(outcome);
    }

    /// Level 1 moves weights off the device, level 2 drops them.
    fn go_to_sleep(&mut self, level: u8) -> Result<(), SleepError> {
        let start = Instant::now();
        if let (1, Some(compute)) = (level, &mut self.compute) {
            compute.park().map_err(|error| self.unchanged(&error))?;
        }
        if let Err(error) = self.give_everything_back() {
            // A pool that takes nothing back is broken; the weights at least are where they were.
            self.compute.as_mut().map_or(Ok(()), |compute| compute.unpark()).map_err(|error| self.unchanged(&error))?;
            return Err(self.unchanged(&error));
        }
        if level == 2 {
            self.compute = None;
        }
        tracing::info!(level, seconds = start.elapsed().as_secs_f64(), "the model sleeps");
        Ok(())
    }

    fn give_everything_back(&mut self) -> Result<(), BlocksError> {
        self.blocks.clear()?;
        self.blocks.trim()?;
        if self.kv_mode != KvMode::Elastic && self.floor_awake.is_none() {
            // A floor that a sleeper kept would be memory that nobody may have.
            self.floor_awake = Some(self.blocks.kv().set_floor(Bytes::ZERO)?);
        }
        Ok(())
    }

    /// A static model takes its memory again: the floor first, so that neighbours owe what they took meanwhile.
    fn take_everything_again(&mut self) -> Result<(), SleepError> {
        let Some(floor) = self.floor_awake else { return Ok(()) };
        self.blocks.kv().set_floor(floor).map_err(|error| self.unchanged(&error))?;
        if let Err(error) = self.blocks.map_everything(self.patience.wake) {
            let given = self.blocks.kv().set_floor(Bytes::ZERO);
            self.report(given.map(drop).map_err(BlocksError::from));
            return Err(self.unchanged(&error));
        }
        self.floor_awake = None;
        Ok(())
    }

    /// From the host, or loaded again.
    fn bring_weights_back(&mut self) -> Result<(), StartError> {
        match &mut self.compute {
            Some(compute) => Ok(compute.unpark()?),
            None => {
                self.compute = Some((self.load.load)()?);
                Ok(())
            }
        }
    }

    /// The card has no room for the weights, because pools took it meanwhile: they give it back as they would for blocks.
    fn bring_weights_into_room(&mut self) -> Result<(), SleepError> {
        let bytes = self.compute.as_ref().map_or(self.load.device_bytes, |compute| compute.parked_bytes());
        let floor = self.blocks.make_room(bytes, self.patience.wake).map_err(|error| self.unchanged(&error))?;
        let back = self.bring_weights_back();
        let given = self.blocks.kv().set_floor(floor);
        self.report(given.map(drop).map_err(BlocksError::from));
        back.map_err(|error| self.unchanged(&error))
    }

    /// The model sleeps on, so its weights go where they were. They can be loaded again where the host has no room for them any more.
    fn send_weights_back(&mut self, were_parked: bool) {
        let parked = match &mut self.compute {
            Some(compute) if were_parked => compute.park(),
            _ => return self.compute = None,
        };
        if let Err(error) = parked {
            tracing::warn!(%error, "the weights of a model that sleeps on are dropped");
            self.compute = None;
        }
    }

    pub(super) fn wake_up(&mut self) -> Result<(), SleepError> {
        if let Some(what) = self.loss() {
            return Err(SleepError::DeviceLost { what });
        }
        if let Some(FallingAsleep { answer, .. }) = self.falling_asleep.take() {
            let _ = answer.send(Err(self.busy()));
        }
        let start = Instant::now();
        let were_parked = self.compute.is_some();
        match self.bring_weights_back() {
            Err(error) if error.is_out_of_memory() => self.bring_weights_into_room()?,
            outcome => outcome.map_err(|error| self.unchanged(&error))?,
        }
        tracing::info!(seconds = start.elapsed().as_secs_f64(), "the weights are back");
        if let Err(error) = self.take_everything_again() {
            // Behind a loss of the device there is nothing to carry, and the compute has to say so to whoever asks.
            if self.loss().is_none() {
                self.send_weights_back(were_parked);
            }
            return Err(error);
        }
        self.counters.is_asleep.store(false, Relaxed);
        Ok(())
    }

    /// Memory or weights could not be changed over, and why.
    fn unchanged(&mut self, error: &dyn std::error::Error) -> SleepError {
        let what = with_sources(error);
        match self.look_for_loss() {
            Some(what) => SleepError::DeviceLost { what },
            None => SleepError::Memory { what },
        }
    }
}
