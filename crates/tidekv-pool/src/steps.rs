//! Which step of the engine is over, and which one pages wait for.
//!
//! ```text
//!   engine              background thread
//!   ------              -----------------
//!   completed = 7       awaited = 7              each writes its own word first and reads the other's then:
//!   awaited?            completed?               at least one of the two sees the other's, so no step is waited for in vain
//! ```
//!
//! All four are sequentially consistent. With less, each could read what was there before the other's write: the engine
//! that nobody waits, the thread that the step is not over, and the pages would lie until the next heartbeat.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

use tidekv_core::units::Step;

/// Nothing is waited for.
const NOTHING: u64 = u64::MAX;

#[derive(Debug)]
pub(crate) struct Steps {
    completed: AtomicU64,
    /// The earliest step that retired pages wait for.
    awaited: AtomicU64,
}

impl Default for Steps {
    fn default() -> Self {
        Self { completed: AtomicU64::new(0), awaited: AtomicU64::new(NOTHING) }
    }
}

impl Steps {
    /// The last step that is over; 0 before the first.
    pub(crate) fn completed(&self) -> Step {
        Step(self.completed.load(SeqCst))
    }

    /// For the engine: this step and all before it are over. Says whether pages wait for that.
    pub(crate) fn complete(&self, step: Step) -> bool {
        self.note_completed(step);
        self.is_awaited(step)
    }

    /// For the background thread: pages wait for this step. Says whether it is over by now: then the engine may not have
    /// seen that anybody waits.
    pub(crate) fn wait_for(&self, step: Option<Step>) -> bool {
        self.note_awaited(step);
        self.is_over(step)
    }

    /// Whether pages wait for a step.
    pub(crate) fn is_any_awaited(&self) -> bool {
        self.awaited.load(SeqCst) != NOTHING
    }

    fn note_completed(&self, step: Step) {
        self.completed.fetch_max(step.0, SeqCst);
    }

    fn is_awaited(&self, step: Step) -> bool {
        step.0 >= self.awaited.load(SeqCst)
    }

    fn note_awaited(&self, step: Option<Step>) {
        self.awaited.store(step.map_or(NOTHING, |step| step.0), SeqCst);
    }

    fn is_over(&self, step: Option<Step>) -> bool {
        step.is_some_and(|step| self.completed() >= step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every order in which the two halves of `complete` and of `wait_for` can come: sequential consistency leaves no other.
    #[test]
    fn whenever_a_step_ends_somebody_knows_that_it_was_waited_for() {
        let step = Step(7);
        // Who makes the next move, four times: two of each.
        for order in (0_u8..16).filter(|order| order.count_ones() == 2) {
            let steps = Steps::default();
            steps.complete(Step(6));
            let (mut engine, mut thread) = (0, 0);
            let mut heard = false;
            for turn in 0..4 {
                if order >> turn & 1 == 0 {
                    match engine {
                        0 => steps.note_completed(step),
                        _ => heard |= steps.is_awaited(step),
                    }
                    engine += 1;
                } else {
                    match thread {
                        0 => steps.note_awaited(Some(step)),
                        _ => heard |= steps.is_over(Some(step)),
                    }
                    thread += 1;
                }
            }
            assert!(heard, "order {order:04b}");
        }
    }

    #[test]
    fn who_waits_for_nothing_is_not_woken() {
        let steps = Steps::default();
        assert!(!steps.complete(Step(3)) && !steps.is_any_awaited());
        assert!(!steps.wait_for(Some(Step(4))) && steps.is_any_awaited());
        assert!(steps.complete(Step(5)), "a later step ends the wait too");
        assert!(!steps.wait_for(None) && !steps.is_any_awaited());
        assert!(!steps.complete(Step(2)) && steps.completed() == Step(5), "steps that are told late");
        assert!(steps.wait_for(Some(Step(5))), "over before anybody waited");
    }
}
