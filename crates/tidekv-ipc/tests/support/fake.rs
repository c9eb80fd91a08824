//! Peers that do as they please: raw bytes on real sockets and rings, from both sides.

use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, send, sendmsg,
};
use tidekv_core::units::GroupId;
use tidekv_ipc::SocketDir;
use tidekv_ipc::frame::{Channel, HEAD_BYTES, decode_answer, decode_order, encode_answer, encode_order, frame_bytes};
use tidekv_ipc::message::{Answer, Balance, Deed, Heading, Order, Verdict};
use tidekv_shm::ring::RingEnd;

use super::{PATIENCE, soon};

const SLICE: Duration = Duration::from_millis(20);
pub(crate) const INSTANCE: u64 = 4711;

/// A socket in a worker's place.
pub(crate) fn listen_at(dir: &SocketDir, rank: u32) -> UnixListener {
    std::fs::create_dir_all(dir.path()).expect("a folder");
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o700)).expect("ours");
    UnixListener::bind(dir.socket_path(0, rank).expect("short")).expect("a socket")
}

/// Either side of a connection, with a ring or without.
#[derive(Debug)]
pub(crate) struct FakePeer {
    pub(crate) stream: UnixStream,
    pub(crate) ring: Option<RingEnd>,
}

impl FakePeer {
    /// A worker that has answered the greeting.
    pub(crate) fn worker(listener: &UnixListener) -> Self {
        let (stream, _) = listener.accept().expect("a scheduler");
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let mut bytes = [0; HEAD_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = recvmsg(&stream, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::empty());
        assert_eq!(received.expect("a greeting").bytes, HEAD_BYTES, "it comes whole");
        let mut descriptor: Option<OwnedFd> = None;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(found) = message {
                descriptor = found.last();
            }
        }
        let mut order = blank();
        let channel = decode_order(&bytes, &mut order).expect("a greeting");
        assert!(matches!(order.deed, Deed::Hello { .. }), "{order:?}");
        let mut worker = Self { stream, ring: None };
        worker.send(&answer_to(&order));
        if channel == Channel::Ring {
            worker.ring = Some(RingEnd::attach(&descriptor.expect("promised")).expect("a ring"));
        }
        worker
    }

    /// A scheduler that has been greeted back.
    pub(crate) fn scheduler(dir: &SocketDir, rank: u32, channel: Channel) -> Self {
        let mut scheduler = Self { stream: connect(dir, rank), ring: None };
        let hello = order(1, &Deed::Hello { stage: 0, rank }, channel);
        match channel {
            Channel::Socket => scheduler.send(&hello),
            Channel::Ring => {
                let (ring, descriptor) = RingEnd::create(2).expect("a ring");
                send_with(&scheduler.stream, &hello, &descriptor);
                let answer = scheduler.answer();
                assert_eq!(answer.verdict, Verdict::Done);
                scheduler.ring = Some(ring);
                return scheduler;
            }
        }
        assert_eq!(scheduler.answer().verdict, Verdict::Done);
        scheduler
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        match &mut self.ring {
            Some(ring) => assert!(ring.send(bytes).expect("a ring"), "there is room"),
            None => match self.stream.write_all(bytes) {
                // Of rubbish the beginning may have been enough.
                Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {}
                written => written.expect("somebody reads"),
            },
        }
    }

    /// Says nothing of itself, and this instead.
    pub(crate) fn flood_instead_of_greeting(listener: &UnixListener, bytes: &[u8]) {
        let (mut stream, _) = listener.accept().expect("a scheduler");
        stream.read_exact(&mut [0; HEAD_BYTES]).expect("a greeting");
        // The other side may have heard enough before the end.
        let _ = stream.write_all(bytes);
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    }

    /// Sends as much as there is room for; says whether anybody reads.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> bool {
        match &mut self.ring {
            Some(ring) => ring.send(bytes).is_ok(),
            None => match send(&self.stream, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => sent == bytes.len() || self.stream.write_all(&bytes[sent..]).is_ok(),
                Err(error) => error == Errno::AGAIN,
            },
        }
    }

    /// The next frame.
    pub(crate) fn frame(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; HEAD_BYTES];
        let Some(ring) = &mut self.ring else {
            self.stream.read_exact(&mut bytes).expect("a frame");
            let length = frame_bytes(&bytes).expect("a head").expect("a whole one");
            bytes.resize(length, 0);
            self.stream.read_exact(&mut bytes[HEAD_BYTES..]).expect("the rest");
            return bytes;
        };
        let deadline = soon();
        while !ring.receive(&mut bytes).expect("a ring") {
            assert!(Instant::now() < deadline, "no frame came");
            ring.wait_message(SLICE).expect("a ring");
        }
        bytes
    }

    pub(crate) fn order(&mut self) -> Order {
        let mut order = blank();
        decode_order(&self.frame(), &mut order).expect("an order");
        order
    }

    pub(crate) fn answer(&mut self) -> Answer {
        decode_answer(&self.frame()).expect("an answer")
    }

    /// Whether the other side ends the connection; what it says before that is passed over.
    pub(crate) fn is_dropped(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == ErrorKind::ConnectionReset,
        }
    }
}

pub(crate) fn connect(dir: &SocketDir, rank: u32) -> UnixStream {
    let stream = UnixStream::connect(dir.socket_path(0, rank).expect("short")).expect("a worker");
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
    stream
}

/// Bytes and a descriptor at once.
pub(crate) fn send_with(stream: &UnixStream, bytes: &[u8], descriptor: &OwnedFd) {
    let descriptors = [descriptor.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).expect("somebody reads");
}

pub(crate) fn order(sequence: u64, deed: &Deed, channel: Channel) -> Vec<u8> {
    let mut bytes = Vec::new();
    let heading = Heading { epoch: sequence, group: GroupId(7), ..Heading::default() };
    encode_order(&mut bytes, sequence, heading, deed, channel).expect("few pages");
    bytes
}

/// "Done", as a frame.
pub(crate) fn answer_to(order: &Order) -> Vec<u8> {
    answer(order.sequence, order.epoch)
}

pub(crate) fn answer(sequence: u64, epoch: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    let verdict = Verdict::Done;
    let answer = Answer { sequence, epoch, instance: INSTANCE, balance: Balance::default(), verdict };
    encode_answer(&mut bytes, &answer).expect("no pages");
    bytes
}

fn blank() -> Order {
    Order { sequence: 0, epoch: 0, settled: 0, group: GroupId(0), spare_pages: 0, evictable_pages: 0, deed: Deed::Ping }
}
