//! One rank's connection as a strategy sees it: an order to send, an answer to wait for, and what became of it.
//!
//! ```text
//!   load(order n)  ->  send  ->  receive  ->  outcome
//!                                   | answer n: the outcome
//!                                   | answer below n: late, or twice; dropped. A ring full of these without a pause,
//!                                   |                 or after the deadline: no worker; the connection is over
//!                                   | answer above n: nobody asked; the connection is over
//!                                   | answer 0: a refusal of the whole connection, which is over
//! ```
//!
//! A strategy decides in which order and on which thread lanes are sent to and waited for. Everything else is here, once:
//! what an error means, what is late, what happens at the deadline. A lane whose outcome is known ignores further calls,
//! so strategies need not look at results at all.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use tidekv_shm::ring::{MESSAGE_BYTES_MAX, RingEnd};

use crate::address::SocketDir;
use crate::address::folder::open_private;
use crate::address::place::connect_stream;
use crate::error::LaneError;
use crate::frame::{Channel, FrameError, HEAD_BYTES, decode_answer, encode_order};
use crate::link::{Link, LinkError};
use crate::message::{Answer, Deed, Heading, Verdict};
use crate::peer::{AskUid, Stranger, check_peer};

/// How long a blocking receive stays in the kernel at a time.
const SLICE: Duration = Duration::from_millis(50);

/// Answers that can have been waiting when we look: as many as have room in a ring (of two longest messages, each answer
/// with its length before it); a socket has room for fewer of a worker that sends one at a time. Who looks takes no more
/// of them without looking at the clock: a worker that sends faster than we read must not keep us past the deadline.
const BACKLOG: usize = 2 * MESSAGE_BYTES_MAX / (HEAD_BYTES + size_of::<u64>());

/// One rank's connection, and the order under way on it. Small to move: a strategy may hand it to a thread.
#[derive(Debug)]
pub struct Lane(Box<State>);

#[derive(Debug)]
struct State {
    rank: u32,
    link: Link,
    /// Of the worker; 0 before it has answered the greeting.
    instance: u64,
    /// Of the order under way.
    sequence: u64,
    loaded: Instant,
    outcome: Option<Result<Answer, LaneError>>,
    /// Ready to be used once the worker has agreed.
    offered: Option<RingEnd>,
}

/// Where a worker is, and how to speak to it.
#[derive(Debug)]
pub(super) struct Route<'a> {
    pub(super) dir: &'a SocketDir,
    pub(super) stage: u32,
    pub(super) rank: u32,
    pub(super) channel: Channel,
    /// Processes that work together: all workers and the scheduler.
    pub(super) parties: u32,
    pub(super) ask_uid: AskUid,
}

impl Lane {
    /// Connects to a worker and sends the greeting; its answer is to be received like any other.
    pub(super) fn open(route: &Route<'_>, sequence: u64) -> Result<Self, LaneError> {
        let link = connect(route)?;
        let now = Instant::now();
        let Route { stage, rank, .. } = *route;
        let mut lane =
            Self(Box::new(State { rank, link, instance: 0, sequence, loaded: now, outcome: None, offered: None }));
        lane.greet(stage, route)?;
        Ok(lane)
    }

    fn greet(&mut self, stage: u32, route: &Route<'_>) -> Result<(), LaneError> {
        let mut frame = Vec::new();
        let deed = Deed::Hello { stage, rank: self.0.rank };
        // A greeting has no pages.
        let _ = encode_order(&mut frame, self.0.sequence, Heading::default(), &deed, route.channel);
        self.0.link.load(&frame);
        let sent = match route.channel {
            Channel::Socket => self.0.link.try_send().map(drop),
            Channel::Ring => {
                let (ring, descriptor) = RingEnd::create(route.parties).map_err(LinkError::from)?;
                self.0.offered = Some(ring);
                self.0.link.send_with_descriptor(descriptor.as_fd())
            }
        };
        match sent {
            // A worker that is busy says so and closes, without waiting for our greeting: its word is still to be read.
            Err(LinkError::Closed) | Ok(()) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// The worker has answered the greeting: who is it?
    pub(super) fn finish_greeting(&mut self) -> Result<u64, LaneError> {
        let answer = self.take_outcome()?;
        match answer.verdict {
            Verdict::Done => {}
            Verdict::Refused(refusal) => return Err(LaneError::Refused(refusal)),
            Verdict::Held(_) => return Err(FrameError::Kind { found: 0x82 }.into()),
        }
        self.0.instance = answer.instance;
        if let Some(ring) = self.0.offered.take() {
            self.0.link.use_ring(ring);
        }
        Ok(answer.instance)
    }

    /// Puts an order in, as bytes. What was before it is over.
    pub(super) fn load(&mut self, frame: &[u8], sequence: u64, now: Instant) {
        self.0.link.load(frame);
        (self.0.sequence, self.0.loaded, self.0.outcome) = (sequence, now, None);
    }

    /// What became of the order; without an outcome it has timed out, and will not be sent if it was not begun.
    pub(super) fn take_outcome(&mut self) -> Result<Answer, LaneError> {
        self.0.outcome.take().unwrap_or_else(|| {
            self.0.link.unload();
            Err(LaneError::TimedOut { waited: self.0.loaded.elapsed() })
        })
    }

    pub(super) fn instance(&self) -> u64 {
        self.0.instance
    }

    /// Whose it is.
    pub fn rank(&self) -> u32 {
        self.0.rank
    }

    /// Whether the order's outcome is still unknown.
    pub fn is_waiting(&self) -> bool {
        self.0.outcome.is_none()
    }

    /// Whether some of the order is still to be sent.
    pub fn is_unsent(&self) -> bool {
        self.is_waiting() && self.0.link.has_output()
    }

    /// Sends the order, waiting until the deadline where the worker does not take it. One try is made in any case.
    pub fn send(&mut self, deadline: Instant) {
        while !self.try_send() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let waited = self.0.link.wait_to_send(left);
            self.check(waited);
        }
    }

    /// Waits for the answer until the deadline. One look is taken in any case.
    pub fn receive(&mut self, deadline: Instant) {
        while self.is_waiting() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                self.try_receive();
                return;
            }
            self.receive_within(left);
        }
    }

    /// Sends what can be sent without waiting; says whether there is nothing left to send.
    pub fn try_send(&mut self) -> bool {
        if !self.is_unsent() {
            return true;
        }
        let sent = self.0.link.try_send();
        self.check(sent).unwrap_or(true)
    }

    /// Takes in what has come, without waiting; says whether the outcome is known.
    pub fn try_receive(&mut self) -> bool {
        let mut late = 0;
        while self.is_waiting() && self.receive_within(Duration::ZERO) {
            late += 1;
            self.bear(late);
        }
        !self.is_waiting()
    }

    /// So many answers were taken without waiting. A worker that is not done by then is none.
    fn bear(&mut self, late: usize) {
        if late > BACKLOG && self.is_waiting() {
            self.0.outcome = Some(Err(FrameError::Flood { found: late }.into()));
        }
    }

    /// Takes in one frame; says whether there was one.
    fn receive_within(&mut self, wait: Duration) -> bool {
        let received = self.0.link.receive(wait);
        let has_frame = self.check(received).unwrap_or(false);
        if has_frame {
            let answer = decode_answer(self.0.link.frame());
            self.judge(answer);
        }
        has_frame
    }

    fn judge(&mut self, answer: Result<Answer, FrameError>) {
        let State { instance, sequence, .. } = *self.0;
        let outcome = match answer {
            Ok(Answer { sequence: 0, verdict: Verdict::Refused(refusal), .. }) => Err(LaneError::Refused(refusal)),
            Ok(answer) if instance != 0 && answer.instance != instance => {
                Err(FrameError::Instance { found: answer.instance, expected: instance }.into())
            }
            Ok(answer) if answer.sequence < sequence => {
                tracing::debug!(rank = self.0.rank, late = answer.sequence, "an answer came too late, or twice");
                return;
            }
            Ok(answer) if answer.sequence > sequence => {
                Err(FrameError::Unasked { found: answer.sequence, last: sequence }.into())
            }
            answer => answer.map_err(LaneError::Frame),
        };
        self.0.outcome = Some(outcome);
    }

    /// An error of the connection is the outcome, unless the worker's last word is still to be read.
    fn check<T>(&mut self, result: Result<T, LinkError>) -> Option<T> {
        let error = match result {
            Ok(value) => return Some(value),
            Err(error) => error,
        };
        let mut late = 0;
        while error == LinkError::Closed && self.is_waiting() && self.0.link.receive(Duration::ZERO) == Ok(true) {
            let answer = decode_answer(self.0.link.frame());
            self.judge(answer);
            late += 1;
            self.bear(late);
        }
        self.0.outcome.get_or_insert_with(|| Err(error.into()));
        None
    }
}

impl AsFd for Lane {
    /// The socket: readable when an answer has come, or when the worker is gone. On a ring lane only the latter.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.link.socket().as_fd()
    }
}

fn connect(route: &Route<'_>) -> Result<Link, LaneError> {
    let path = route.dir.socket_path(route.stage, route.rank)?;
    let folder = path.parent().unwrap_or(route.dir.path());
    let is_there = open_private(route.dir.path())?.is_some() && open_private(folder)?.is_some();
    if !is_there {
        return Err(LaneError::NoWorker { path });
    }
    let socket = match connect_stream(&path) {
        Ok(socket) => socket,
        Err(Errno::NOENT | Errno::CONNREFUSED) => return Err(LaneError::NoWorker { path }),
        // It has not accepted anybody for a long time, and so many wait already that the queue is full.
        Err(Errno::AGAIN) => return Err(LaneError::TimedOut { waited: Duration::ZERO }),
        Err(source) => return Err(LaneError::Os { call: "connect", source }),
    };
    match check_peer(socket.as_fd(), route.ask_uid) {
        Ok(()) => Ok(Link::new(socket, SLICE, false)?),
        Err(Stranger::Uid(uid)) => Err(LaneError::WrongUser { uid }),
        Err(Stranger::Unknown(source)) => Err(LaneError::Os { call: "getsockopt", source }),
    }
}

impl From<LinkError> for LaneError {
    fn from(error: LinkError) -> Self {
        match error {
            LinkError::Closed => Self::Closed,
            LinkError::Frame(error) => Self::Frame(error),
            LinkError::Forked => Self::Forked,
            LinkError::Os { call, source } => Self::Os { call, source },
        }
    }
}
