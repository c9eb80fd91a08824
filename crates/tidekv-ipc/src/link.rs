//! One connection, seen from either side: whole frames out, whole frames in.
//!
//! ```text
//!   socket    outbox -> send (never blocks)          recv (blocks for a slice of time) -> inbox -> frame
//!   ring      whole messages, or "no room"           whole messages, or sleep for a slice; the socket says who lives
//! ```
//!
//! One system call to send and one to receive, in the ordinary case: a frame fits into the socket's buffer, so `send`
//! is tried before anybody asks whether it would block, and `recv` blocks by itself (`SO_RCVTIMEO`) instead of being
//! preceded by a `poll`. Only the last slice before a deadline is waited for with `poll`, which can be exact.
//!
//! A frame that was sent in part must be finished before the next, or the stream would be rubbish from there on: the
//! [`Outbox`] keeps the rest of it. One that was not begun is taken back.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv,
    recvmsg, send, sendmsg,
};
use tidekv_fork::ClosedInChild;
use tidekv_shm::ring::{RingEnd, RingError};

use crate::frame::{FRAME_BYTES_MAX, FrameError, frame_bytes};

/// How long a side that waits on a ring stays unaware that the other side's socket is closed.
pub(crate) const RING_SLICE: Duration = Duration::from_millis(25);
/// A longer wait than this ends early; callers wait again.
const LONGEST_WAIT: Duration = Duration::from_secs(60 * 60);
/// Room for a message that is not a long list of pages.
const INBOX_BYTES: usize = 4096;
/// The longest frame has room in a ring.
const _: () = assert!(FRAME_BYTES_MAX <= tidekv_shm::ring::MESSAGE_BYTES_MAX);

/// The end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkError {
    /// The other side is gone.
    Closed,
    /// The other side sent what is no frame.
    Frame(FrameError),
    /// This is a forked child.
    Forked,
    /// The system refused.
    Os { call: &'static str, source: Errno },
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Link {
    socket: Arc<ClosedInChild>,
    ring: Option<RingEnd>,
    outbox: Outbox,
    inbox: Inbox,
    /// How long `recv` blocks by itself.
    slice: Duration,
    /// The frame that came last, where it came through the ring.
    message: Vec<u8>,
    /// A descriptor may come with the first frame.
    passed: Passed,
}

#[derive(Debug)]
enum Passed {
    /// Nobody passes one, or it was taken.
    No,
    Perhaps,
    Came(OwnedFd),
}

impl Link {
    /// Takes over a connected socket. `takes_descriptor`: one may come with the first frame.
    pub(crate) fn new(socket: ClosedInChild, slice: Duration, takes_descriptor: bool) -> Result<Self, LinkError> {
        set_socket_timeout(&socket, Timeout::Recv, Some(slice)).map_err(os("setsockopt"))?;
        ioctl_fionbio(&socket, false).map_err(os("ioctl"))?;
        Ok(Self {
            socket: Arc::new(socket),
            ring: None,
            outbox: Outbox::default(),
            inbox: Inbox::default(),
            slice,
            message: Vec::new(),
            passed: if takes_descriptor { Passed::Perhaps } else { Passed::No },
        })
    }

    /// The socket, for whoever wants to end the connection from another thread.
    pub(crate) fn socket(&self) -> &Arc<ClosedInChild> {
        &self.socket
    }

    /// The descriptor that came with the first frame. None is taken from now on.
    pub(crate) fn take_descriptor(&mut self) -> Option<OwnedFd> {
        match std::mem::replace(&mut self.passed, Passed::No) {
            Passed::Came(descriptor) => Some(descriptor),
            Passed::No | Passed::Perhaps => None,
        }
    }

    /// From now on frames travel through the ring.
    pub(crate) fn use_ring(&mut self, ring: RingEnd) {
        self.ring = Some(ring);
    }

    /// Puts a frame behind what is still to be sent.
    pub(crate) fn load(&mut self, frame: &[u8]) {
        self.outbox.load(frame);
    }

    /// Takes the last frame back unless some of it was sent.
    pub(crate) fn unload(&mut self) {
        self.outbox.unload();
    }

    /// Whether there is something to send.
    pub(crate) fn has_output(&self) -> bool {
        !self.outbox.rest().is_empty()
    }

    /// Sends what can be sent without waiting; says whether that was all.
    pub(crate) fn try_send(&mut self) -> Result<bool, LinkError> {
        if let Some(ring) = &mut self.ring {
            let is_sent = self.outbox.rest().is_empty() || ring.send(self.outbox.rest())?;
            if is_sent {
                self.outbox.clear();
            }
            return Ok(is_sent);
        }
        while self.has_output() {
            match send(&*self.socket, self.outbox.rest(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(count) => self.outbox.sent(count),
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(error) => return Err(broken("send", error)),
            }
        }
        Ok(true)
    }

    /// Sends the first frame, and a descriptor with it. It has room in the buffer of a new socket.
    pub(crate) fn send_with_descriptor(&mut self, descriptor: BorrowedFd<'_>) -> Result<(), LinkError> {
        let descriptors = [descriptor];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        loop {
            let bytes = [IoSlice::new(self.outbox.rest())];
            match sendmsg(&*self.socket, &bytes, &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(count) => {
                    self.outbox.sent(count);
                    return Ok(());
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(broken("sendmsg", error)),
            }
        }
    }

    /// Waits until more can be sent, for at most `wait`; may return early.
    pub(crate) fn wait_to_send(&mut self, wait: Duration) -> Result<(), LinkError> {
        match &mut self.ring {
            None => wait_for(self.socket.as_fd(), PollFlags::OUT, wait).map(drop),
            Some(ring) => {
                ring.wait_room(self.outbox.rest().len(), wait.min(RING_SLICE))?;
                self.check_socket()
            }
        }
    }

    /// Looks for the next frame, waiting for at most `wait`; may return without one before that. The frame is
    /// [`frame`](Self::frame) until the next call.
    pub(crate) fn receive(&mut self, wait: Duration) -> Result<bool, LinkError> {
        if self.ring.is_some() { self.receive_by_ring(wait) } else { self.receive_by_socket(wait) }
    }

    /// The frame that the last call of [`receive`](Self::receive) found.
    pub(crate) fn frame(&self) -> &[u8] {
        if self.ring.is_some() { &self.message } else { self.inbox.frame() }
    }

    fn receive_by_ring(&mut self, wait: Duration) -> Result<bool, LinkError> {
        if self.take_message()? {
            return Ok(true);
        }
        if wait.is_zero() {
            return Ok(false);
        }
        if let Some(ring) = &mut self.ring {
            ring.wait_message(wait.min(RING_SLICE))?;
        }
        if self.take_message()? {
            return Ok(true);
        }
        match self.check_socket() {
            Ok(()) => Ok(false),
            // What was sent before the end counts.
            Err(end) => self.take_message()?.then_some(true).ok_or(end),
        }
    }

    fn take_message(&mut self) -> Result<bool, LinkError> {
        match &mut self.ring {
            Some(ring) => Ok(ring.receive(&mut self.message)?),
            None => Ok(false),
        }
    }

    /// Whether the other side of a connection that uses a ring lives.
    fn check_socket(&self) -> Result<(), LinkError> {
        let events = wait_for(self.socket.as_fd(), PollFlags::IN | PollFlags::RDHUP, Duration::ZERO)?;
        if events.intersects(PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR) {
            Err(LinkError::Closed)
        } else if events.contains(PollFlags::IN) {
            Err(LinkError::Frame(FrameError::WrongChannel))
        } else {
            Ok(())
        }
    }

    /// Whether the other side has closed the connection; what it sent before may still be unread.
    pub(crate) fn is_closed_by_peer(&self) -> bool {
        let events = wait_for(self.socket.as_fd(), PollFlags::RDHUP, Duration::ZERO);
        events.is_err() || events.is_ok_and(|events| !events.is_empty())
    }

    fn receive_by_socket(&mut self, wait: Duration) -> Result<bool, LinkError> {
        if self.inbox.next_frame()? {
            return Ok(true);
        }
        let mut flags = if wait >= self.slice {
            RecvFlags::empty()
        } else {
            if !wait.is_zero() && wait_for(self.socket.as_fd(), PollFlags::IN, wait)?.is_empty() {
                return Ok(false);
            }
            RecvFlags::DONTWAIT
        };
        loop {
            match self.receive_bytes(flags) {
                Ok(0) => return Err(LinkError::Closed),
                Ok(count) => {
                    self.inbox.filled(count);
                    if self.inbox.next_frame()? {
                        return Ok(true);
                    }
                    // The rest of a long frame, as far as it is here: whoever waits for an edge must see it all.
                    flags = RecvFlags::DONTWAIT;
                }
                Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
                Err(error) => return Err(broken("recv", error)),
            }
        }
    }

    fn receive_bytes(&mut self, flags: RecvFlags) -> Result<usize, Errno> {
        let space = self.inbox.space();
        if !matches!(self.passed, Passed::Perhaps) {
            return recv(&*self.socket, space, flags).map(|(count, _)| count);
        }
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut room);
        let flags = flags | RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(&*self.socket, &mut [IoSliceMut::new(space)], &mut control, flags)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                // Everything but the last is closed here.
                for descriptor in descriptors {
                    self.passed = Passed::Came(descriptor);
                }
            }
        }
        Ok(received.bytes)
    }
}

/// Frames on their way out.
#[derive(Debug, Default)]
struct Outbox {
    bytes: Vec<u8>,
    /// How much of them is gone.
    sent: usize,
    /// Where the last frame begins.
    last: usize,
}

impl Outbox {
    /// Room is kept for at most the rest of one frame and one frame more.
    fn load(&mut self, frame: &[u8]) {
        self.bytes.drain(..self.sent);
        self.sent = 0;
        self.last = self.bytes.len();
        self.bytes.extend_from_slice(frame);
    }

    fn unload(&mut self) {
        if self.sent <= self.last {
            self.bytes.truncate(self.last);
        }
    }

    fn rest(&self) -> &[u8] {
        &self.bytes[self.sent..]
    }

    fn sent(&mut self, count: usize) {
        self.sent += count;
        if self.sent == self.bytes.len() {
            self.clear();
        }
    }

    fn clear(&mut self) {
        self.bytes.clear();
        (self.sent, self.last) = (0, 0);
    }
}

/// Bytes that came, and the frames in them.
#[derive(Debug)]
struct Inbox {
    bytes: Vec<u8>,
    filled: Range<usize>,
    frame: Range<usize>,
}

impl Default for Inbox {
    fn default() -> Self {
        Self { bytes: vec![0; INBOX_BYTES], filled: 0..0, frame: 0..0 }
    }
}

impl Inbox {
    /// Finds the next whole frame among the bytes that are here.
    fn next_frame(&mut self) -> Result<bool, LinkError> {
        let here = &self.bytes[self.filled.clone()];
        match frame_bytes(here).map_err(LinkError::Frame)? {
            Some(length) if length <= here.len() => {
                self.frame = self.filled.start..self.filled.start + length;
                self.filled.start = self.frame.end;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    fn frame(&self) -> &[u8] {
        &self.bytes[self.frame.clone()]
    }

    /// Where the next bytes go; never empty. Called when no whole frame is here.
    fn space(&mut self) -> &mut [u8] {
        self.bytes.copy_within(self.filled.clone(), 0);
        self.filled = 0..self.filled.len();
        let wanted = match frame_bytes(&self.bytes[self.filled.clone()]) {
            Ok(Some(length)) => length,
            _ => INBOX_BYTES,
        };
        if self.bytes.len() < wanted {
            self.bytes.resize(wanted, 0);
        }
        &mut self.bytes[self.filled.end..]
    }

    fn filled(&mut self, count: usize) {
        self.filled.end += count;
    }
}

fn wait_for(socket: BorrowedFd<'_>, events: PollFlags, wait: Duration) -> Result<PollFlags, LinkError> {
    let mut fds = [PollFd::from_borrowed_fd(socket, events)];
    let wait = Timespec::try_from(wait.min(LONGEST_WAIT)).expect("an hour fits");
    match poll(&mut fds, Some(&wait)) {
        Ok(_) | Err(Errno::INTR) => Ok(fds[0].revents()),
        Err(source) => Err(LinkError::Os { call: "poll", source }),
    }
}

fn broken(call: &'static str, error: Errno) -> LinkError {
    match error {
        Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN => LinkError::Closed,
        source => LinkError::Os { call, source },
    }
}

fn os(call: &'static str) -> impl FnOnce(Errno) -> LinkError {
    move |source| LinkError::Os { call, source }
}

impl From<RingError> for LinkError {
    fn from(error: RingError) -> Self {
        match error {
            RingError::Forked => Self::Forked,
            RingError::Os { call, source } => Self::Os { call, source },
            _ => Self::Frame(FrameError::Ring),
        }
    }
}
