//! What the fleet needs of the connections to one stage: so that its rules can be tested against workers that are only
//! values, and lose, repeat and delay messages on purpose.

use std::fmt;
use std::time::Instant;

use tidekv_ipc::LaneError;
use tidekv_ipc::broadcast::{Broadcaster, RankAnswer, Ranks};
use tidekv_ipc::message::{Deed, Heading};

/// Connections to the ranks of one stage.
pub(crate) trait Wire: Send + fmt::Debug {
    /// Connects the ranks that are not; one result for each rank, with the worker's instance.
    fn connect(&mut self, deadline: Instant) -> Vec<Result<u64, LaneError>>;

    /// The same order to these ranks; one answer for each.
    fn send(&mut self, to: &[u32], heading: Heading, deed: &Deed, deadline: Instant) -> Vec<RankAnswer>;

    /// Ends a connection.
    fn disconnect(&mut self, rank: u32);
}

impl Wire for Broadcaster {
    fn connect(&mut self, deadline: Instant) -> Vec<Result<u64, LaneError>> {
        Self::connect(self, deadline)
    }

    fn send(&mut self, to: &[u32], heading: Heading, deed: &Deed, deadline: Instant) -> Vec<RankAnswer> {
        Self::send(self, Ranks::Some(to), heading, deed, deadline).to_vec()
    }

    fn disconnect(&mut self, rank: u32) {
        Self::disconnect(self, rank);
    }
}
