//! `thread`: a pool with one thread for each rank. Each sends its worker's order and waits for the answer.
//!
//! ```text
//!   caller                         seat of rank r                    thread of rank r
//!   put(lane), wake         -->    Empty -> Given(lane)       -->    takes it, sends, receives
//!   sleeps until the last   <--    Empty <- Back(lane)        <--    puts it back; the last one wakes the caller
//! ```
//!
//! Threads are started when their rank is first addressed and end with the strategy. A forked child has none of them and
//! does not wait for any.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use tidekv_fork::Birth;

use crate::broadcast::{Lane, Strategy};
use crate::error::LaneError;

/// How much later than the deadline the threads may be back; they need microseconds.
const GRACE: Duration = Duration::from_secs(5);

/// One thread for each rank.
#[derive(Debug)]
pub(super) struct Pool {
    /// By rank.
    seats: Vec<Option<Seat>>,
    crowd: Arc<Crowd>,
    /// Ranks of the order under way.
    addressed: Vec<usize>,
    birth: Birth,
}

#[derive(Debug)]
struct Seat {
    desk: Arc<Desk>,
    thread: JoinHandle<()>,
}

/// Where a lane changes hands.
#[derive(Debug, Default)]
struct Desk {
    state: Mutex<State>,
    given: Condvar,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Empty,
    Given(Job),
    Back(Lane),
    Closed,
}

#[derive(Debug)]
struct Job {
    lane: Lane,
    deadline: Instant,
}

/// How many are still at work, and who wants to know.
#[derive(Debug, Default)]
struct Crowd {
    busy: AtomicUsize,
    caller: Mutex<Option<Thread>>,
}

impl Default for Pool {
    fn default() -> Self {
        Self { seats: Vec::new(), crowd: Arc::default(), addressed: Vec::new(), birth: Birth::here() }
    }
}

impl Strategy for Pool {
    fn opened(&mut self, lane: &Lane) -> Result<(), LaneError> {
        let rank = lane.rank() as usize;
        if self.seats.len() <= rank {
            self.seats.resize_with(rank + 1, || None);
        }
        if self.seats[rank].is_none() {
            self.seats[rank] = Some(Seat::start(lane.rank(), &self.crowd)?);
        }
        Ok(())
    }

    fn exchange(&mut self, lanes: &mut Vec<Lane>, deadline: Instant) {
        self.addressed.clear();
        self.crowd.gather(lanes.len());
        for lane in lanes.drain(..) {
            let rank = lane.rank() as usize;
            match self.seats.get(rank) {
                Some(Some(seat)) => {
                    self.addressed.push(rank);
                    seat.desk.put(State::Given(Job { lane, deadline }));
                }
                // Every lane has a seat since it was opened.
                _ => self.crowd.leave(),
            }
        }
        self.crowd.wait(deadline.checked_add(GRACE).unwrap_or(deadline));
        lanes.extend(self.addressed.iter().filter_map(|rank| self.seats[*rank].as_ref()?.desk.take_back()));
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.birth.is_foreign() {
            // The threads are the parent's.
            std::mem::forget(std::mem::take(&mut self.seats));
            return;
        }
        for seat in self.seats.iter().flatten() {
            seat.desk.put(State::Closed);
        }
        for seat in self.seats.drain(..).flatten() {
            // A thread that panicked is gone as well.
            let _ = seat.thread.join();
        }
    }
}

impl Seat {
    fn start(rank: u32, crowd: &Arc<Crowd>) -> Result<Self, LaneError> {
        let desk = Arc::new(Desk::default());
        let (its, crowd) = (Arc::clone(&desk), Arc::clone(crowd));
        let started = thread::Builder::new().name(format!("tidekv-rank-{rank}")).spawn(move || its.work(&crowd));
        let refused = |error: std::io::Error| LaneError::Os {
            call: "clone",
            source: rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::AGAIN),
        };
        Ok(Self { desk, thread: started.map_err(refused)? })
    }
}

impl Desk {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, state: State) {
        *self.lock() = state;
        self.given.notify_one();
    }

    fn take_back(&self) -> Option<Lane> {
        let mut state = self.lock();
        match std::mem::take(&mut *state) {
            State::Back(lane) => Some(lane),
            other => {
                *state = other;
                None
            }
        }
    }

    /// The thread's whole life.
    fn work(&self, crowd: &Crowd) {
        while let Some(Job { mut lane, deadline }) = self.next() {
            lane.send(deadline);
            lane.receive(deadline);
            *self.lock() = State::Back(lane);
            crowd.leave();
        }
    }

    fn next(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            match std::mem::take(&mut *state) {
                State::Given(job) => return Some(job),
                State::Closed => return None,
                other => *state = other,
            }
            state = self.given.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Crowd {
    /// As many will leave, and this thread waits for the last.
    fn gather(&self, busy: usize) {
        *self.lock() = Some(thread::current());
        self.busy.store(busy, Ordering::Release);
    }

    fn leave(&self) {
        if self.busy.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(caller) = &*self.lock()
        {
            caller.unpark();
        }
    }

    fn wait(&self, latest: Instant) {
        while self.busy.load(Ordering::Acquire) > 0 {
            let left = latest.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            thread::park_timeout(left);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Thread>> {
        self.caller.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
