//! `my_impl`: all orders out, then all answers in, on one thread and without a reactor.
//!
//! While the first answer is waited for the others arrive, so a round takes as long as its slowest worker.

use std::time::Instant;

use crate::broadcast::{Lane, Strategy};

/// Out, then in.
#[derive(Debug, Default)]
pub(super) struct MyImpl;

impl Strategy for MyImpl {
    fn exchange(&mut self, lanes: &mut Vec<Lane>, deadline: Instant) {
        // Nobody waits for a worker that does not take its order now.
        for lane in &mut *lanes {
            lane.try_send();
        }
        for lane in lanes {
            lane.send(deadline);
            lane.receive(deadline);
        }
    }
}
