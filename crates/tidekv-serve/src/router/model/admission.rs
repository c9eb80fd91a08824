//! How a request comes in: presence, a permit, a model that is awake; and what it holds until its answer is over.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::OwnedSemaphorePermit;

use super::{Errand, Model};
use crate::router::error::Refusal;
use crate::router::rest::{Rest, SleepSettings, until_wakeable};
use crate::router::traffic::Ending;

impl Model {
    /// Waits in the queue, for a permit and for the model to be awake. `wake` is called at most once for each time that
    /// the model has to be woken, by whoever came first.
    pub(crate) async fn enter(
        self: &Arc<Self>,
        sleep: &SleepSettings,
        deadline: Instant,
        wake: impl Fn(Errand),
    ) -> Result<Pass, Refusal> {
        let presence = self.arrive()?;
        let permit = self.permit(deadline).await?;
        let (address, spell) = self.awake(sleep, deadline, wake).await?;
        Ok(Pass { presence, _permit: permit, address, spell })
    }

    /// From here on the model cannot fall asleep.
    fn arrive(self: &Arc<Self>) -> Result<Presence, Refusal> {
        let now = Instant::now();
        let mut inner = self.lock();
        inner.address(&self.spec.name)?;
        inner.present += 1;
        inner.traffic.started(now);
        Ok(Presence { model: Arc::clone(self), came: now, ending: Ending::Bad })
    }

    async fn permit(&self, deadline: Instant) -> Result<OwnedSemaphorePermit, Refusal> {
        if let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() {
            return Ok(permit);
        }
        let place = QueuePlace::take(&self.queued);
        if place.number > self.spec.max_queue {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return Err(Refusal::QueueFull {
                model: self.spec.name.clone(),
                running: self.spec.max_concurrency,
                waiting: self.spec.max_queue,
            });
        }
        let mut changes = self.changed.subscribe();
        let permit = Arc::clone(&self.permits).acquire_owned();
        tokio::pin!(permit);
        loop {
            tokio::select! {
                permit = &mut permit => return Ok(permit.expect("the permits are never closed")),
                // An instance that died answers nobody, and whoever waits for it should know at once.
                _ = changes.changed() => { self.lock().address(&self.spec.name)?; }
                () = tokio::time::sleep_until(deadline.into()) => return Err(self.too_late("a place")),
            }
        }
    }

    /// The address of an instance that is awake, and in which spell that was.
    async fn awake(
        &self,
        sleep: &SleepSettings,
        deadline: Instant,
        wake: impl Fn(Errand),
    ) -> Result<(String, u64), Refusal> {
        let mut changes = self.changed.subscribe();
        let mut waited_for = None;
        loop {
            changes.mark_unchanged();
            let now = Instant::now();
            let mut look_again = deadline;
            {
                let mut inner = self.lock();
                let address = inner.address(&self.spec.name)?;
                if let (Some(waited_for), Some((failed, reason))) = (waited_for, &inner.failed_wake)
                    && waited_for == *failed
                {
                    return Err(Refusal::WakeFailed { model: self.spec.name.clone(), reason: reason.clone() });
                }
                match inner.rest {
                    Rest::Awake => return Ok((address, inner.spell)),
                    Rest::FallingAsleep | Rest::Waking { asleep_since: None } => {}
                    Rest::Waking { asleep_since: Some(_) } => waited_for = Some(inner.wakes),
                    Rest::Asleep { .. } if !sleep.wakes_on_request => {
                        return Err(Refusal::Asleep { model: self.spec.name.clone() });
                    }
                    Rest::Asleep { since } => match until_wakeable(since, sleep.min_sleep, now) {
                        Duration::ZERO => {
                            let errand = inner.begin_wake(address);
                            waited_for = Some(inner.wakes);
                            drop(inner);
                            wake(errand);
                        }
                        wait => look_again = deadline.min(now + wait),
                    },
                }
            }
            tokio::select! {
                _ = changes.changed() => {}
                () = tokio::time::sleep_until(look_again.into()) => {
                    if Instant::now() >= deadline {
                        return Err(self.too_late("the model to wake up"));
                    }
                }
            }
        }
    }

    fn too_late(&self, what: &'static str) -> Refusal {
        Refusal::Deadline { model: self.spec.name.clone(), what }
    }
}

/// A place in the queue, given back on drop.
struct QueuePlace<'a> {
    queued: &'a AtomicUsize,
    number: usize,
}

impl<'a> QueuePlace<'a> {
    fn take(queued: &'a AtomicUsize) -> Self {
        Self { queued, number: queued.fetch_add(1, Ordering::Relaxed) + 1 }
    }
}

impl Drop for QueuePlace<'_> {
    fn drop(&mut self) {
        self.queued.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A request that is somewhere between its arrival and the last byte of its answer.
#[derive(Debug)]
struct Presence {
    model: Arc<Model>,
    came: Instant,
    ending: Ending,
}

impl Drop for Presence {
    fn drop(&mut self) {
        let now = Instant::now();
        let mut inner = self.model.lock();
        inner.present -= 1;
        inner.idle_since = now;
        inner.traffic.ended(now, now - self.came, self.ending);
    }
}

/// What an admitted request holds until its answer is over: its presence and one of the permits.
#[derive(Debug)]
pub(crate) struct Pass {
    presence: Presence,
    _permit: OwnedSemaphorePermit,
    pub(crate) address: String,
    spell: u64,
}

impl Pass {
    pub(crate) fn model(&self) -> &Arc<Model> {
        &self.presence.model
    }

    pub(crate) fn came(&self) -> Instant {
        self.presence.came
    }

    /// The engine sleeps, as it said itself: it is woken as any sleeper is, by whoever comes first.
    pub(crate) async fn wake_again(
        &mut self,
        sleep: &SleepSettings,
        deadline: Instant,
        wake: impl Fn(Errand),
    ) -> Result<(), Refusal> {
        let model = Arc::clone(self.model());
        model.found_asleep(self.spell, sleep.min_sleep);
        (self.address, self.spell) = model.awake(sleep, deadline, wake).await?;
        Ok(())
    }

    /// The answer was good, to its end. Without this it counts as one that was not.
    pub(crate) fn ended_well(&mut self) {
        self.presence.ending = Ending::Good;
    }
}
