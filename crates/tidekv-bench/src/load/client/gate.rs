//! The cap of a stream: who may go, and who waits in which order.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use hyper::body::Bytes;

use crate::load::plan::Planned;

/// A request that is ready to be sent.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) stream: usize,
    pub(super) index: usize,
    pub(super) intended_ns: u64,
    pub(super) released_ns: u64,
    pub(super) input_tokens: Option<u32>,
    pub(super) body: Bytes,
}

impl Job {
    pub(super) fn new(request: &Planned, body: Vec<u8>) -> Self {
        Self {
            stream: request.stream,
            index: request.index,
            intended_ns: request.at_ns,
            released_ns: request.at_ns,
            input_tokens: request.item.input_tokens,
            body: body.into(),
        }
    }
}

/// Lets so many through and keeps the others in line.
#[derive(Debug)]
pub(super) struct Gate {
    cap: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    inside: usize,
    waiting: VecDeque<Job>,
}

impl Gate {
    pub(super) fn new(cap: Option<usize>) -> Self {
        Self { cap: cap.unwrap_or(usize::MAX), state: Mutex::default() }
    }

    /// The job back if it may go now; else it waits here.
    pub(super) fn enter(&self, job: Job) -> Option<Job> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.inside < self.cap {
            state.inside += 1;
            return Some(job);
        }
        state.waiting.push_back(job);
        None
    }

    /// One is over: the next that may go in its place.
    pub(super) fn leave(&self) -> Option<Job> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let next = state.waiting.pop_front();
        if next.is_none() {
            state.inside -= 1;
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(index: usize) -> Job {
        Job { stream: 0, index, intended_ns: 0, released_ns: 0, input_tokens: None, body: Bytes::new() }
    }

    #[test]
    fn the_cap_holds_and_nobody_overtakes() {
        let gate = Gate::new(Some(2));
        let went: Vec<bool> = (0..5).map(|index| gate.enter(job(index)).is_some()).collect();
        assert_eq!(went, [true, true, false, false, false]);
        let next: Vec<Option<usize>> = (0..5).map(|_| gate.leave().map(|job| job.index)).collect();
        assert_eq!(next, [Some(2), Some(3), Some(4), None, None]);
        assert!(gate.enter(job(5)).is_some() && gate.enter(job(6)).is_some() && gate.enter(job(7)).is_none());
    }
}
