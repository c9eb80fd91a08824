//! `ring`: shared memory instead of sockets. All orders are written first, then the answers are read one after another;
//! while one is waited for, the others arrive.
//!
//! Everything particular about rings (the futex, the spin, noticing a dead worker) is in the lane's link and in
//! `tidekv_shm::ring`; a worker that answers late blocks nobody, because the others' answers wait in their own rings.

use std::time::Instant;

use crate::broadcast::{Channel, Lane, Strategy};

/// Orders out, then answers in, through shared memory.
#[derive(Debug, Default)]
pub(super) struct Rings;

impl Strategy for Rings {
    fn channel(&self) -> Channel {
        Channel::Ring
    }

    fn exchange(&mut self, lanes: &mut Vec<Lane>, deadline: Instant) {
        // A ring that is full belongs to a worker that is behind: the others go first.
        lanes.iter_mut().for_each(|lane| {
            lane.try_send();
        });
        for lane in &mut *lanes {
            lane.send(deadline);
        }
        for lane in lanes {
            lane.receive(deadline);
        }
    }
}
