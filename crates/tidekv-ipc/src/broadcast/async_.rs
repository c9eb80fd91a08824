//! `async`: one reactor. Everything is sent at once, then an epoll says whose answer has come.
//!
//! Lanes are registered when they are opened, so a broadcast costs one send and one receive for each worker and one wait
//! for each batch of answers. A lane whose order did not fit into its socket is watched for room as well, until it did.
//!
//! Edges, not levels: a late answer on a lane that this order is not for, or the end of its worker, is reported once and
//! does not keep the reactor awake. An answer always comes after its order was sent, so its edge is never missed.

use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use tidekv_fork::ClosedInChild;

use crate::broadcast::{Lane, Strategy};
use crate::error::LaneError;

const INWARD: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ET);
/// Answers taken from one wait.
const EVENTS: usize = 64;
/// A longer wait than this ends early, and is waited again.
const LONGEST_WAIT: Duration = Duration::from_secs(60 * 60);

/// One reactor.
#[derive(Debug, Default)]
pub(super) struct Reactor {
    /// Made with the first lane.
    queue: Option<ClosedInChild>,
}

impl Strategy for Reactor {
    fn opened(&mut self, lane: &Lane) -> Result<(), LaneError> {
        let os = |call| move |source| LaneError::Os { call, source };
        if self.queue.is_none() {
            let made = ClosedInChild::open(|| epoll::create(epoll::CreateFlags::CLOEXEC));
            self.queue = Some(made.map_err(os("epoll_create1"))?);
        }
        match &self.queue {
            Some(queue) => epoll::add(queue, lane, key(lane), INWARD).map_err(os("epoll_ctl")),
            None => Err(LaneError::NotConnected),
        }
    }

    fn closing(&mut self, lane: &Lane) {
        if let Some(queue) = &self.queue {
            // A process that is being started may have a copy of the socket, so closing ours might not be enough.
            let _ = epoll::delete(queue, lane);
        }
    }

    fn exchange(&mut self, lanes: &mut Vec<Lane>, deadline: Instant) {
        lanes.sort_unstable_by_key(Lane::rank);
        for lane in &mut *lanes {
            lane.try_send();
        }
        self.watch_for_room(lanes, true);
        let mut is_last = false;
        while lanes.iter().any(Lane::is_waiting) && !is_last {
            let left = deadline.saturating_duration_since(Instant::now());
            // After the deadline one more look is taken, without waiting.
            is_last = left.is_zero();
            if !self.turn(lanes, left) {
                break;
            }
        }
        self.watch_for_room(lanes, false);
    }
}

impl Reactor {
    /// Waits for events and attends to their lanes; `false` if waiting is not possible at all.
    fn turn(&self, lanes: &mut [Lane], left: Duration) -> bool {
        let Some(queue) = &self.queue else { return false };
        let mut space = [MaybeUninit::uninit(); EVENTS];
        let left = Timespec::try_from(left.min(LONGEST_WAIT)).expect("an hour fits");
        match epoll::wait(queue, &mut space, Some(&left)) {
            Ok((events, _)) => {
                for event in events {
                    let key = event.data.u64();
                    if let Ok(at) = lanes.binary_search_by_key(&key, |lane| u64::from(lane.rank())) {
                        lanes[at].try_send();
                        lanes[at].try_receive();
                    }
                }
                true
            }
            Err(Errno::INTR) => true,
            Err(error) => {
                tracing::warn!("epoll_wait failed: {error}");
                false
            }
        }
    }

    /// Lanes that could not send everything are watched for room too.
    fn watch_for_room(&self, lanes: &[Lane], on: bool) {
        let Some(queue) = &self.queue else { return };
        let flags = if on { INWARD | epoll::EventFlags::OUT } else { INWARD };
        for lane in lanes.iter().filter(|lane| lane.is_unsent()) {
            // Without it the lane times out at the deadline.
            let _ = epoll::modify(queue, lane, key(lane), flags);
        }
    }
}

fn key(lane: &Lane) -> epoll::EventData {
    epoll::EventData::new_u64(u64::from(lane.rank()))
}
