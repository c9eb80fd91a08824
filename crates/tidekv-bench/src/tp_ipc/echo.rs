//! Bare echoes: what a worker's answer costs at least, over a socket and over a word in shared memory.
//!
//! ```text
//!   worker                                            scheduler
//!   connects to <dir>/echo.sock, says its rank  -->   accepts, makes the words
//!   attaches them                               <--   passes their descriptor
//!   thread 1:  read n bytes, write m bytes            a connected pair of sockets, as `socketpair` makes one
//!   thread 2:  wait for word 0, set word 1            a futex in each direction
//! ```
//!
//! Neither knows of frames, sequences, deadlines or peers; nobody looks at what the bytes say. The echoes live in the
//! worker processes themselves, so that the same processes wake up in both measurements.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};
use tidekv_shm::ring::{FutexWords, RingError};

/// The word that the scheduler sets, and the one that the worker sets.
const TO_WORKER: usize = 0;
const TO_SCHEDULER: usize = 1;

/// How long a thread sleeps on a word before it looks whether anybody will ever set it.
const SLICE: Duration = Duration::from_secs(1);

/// No echo takes so long: the worker must have been stopped.
const PATIENCE: Duration = Duration::from_secs(60);

/// Messages of an echo, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Sizes {
    pub(super) order: usize,
    pub(super) answer: usize,
}

/// In a worker: connects, and echoes until the scheduler closes the connection.
pub(super) fn start(dir: &Path, rank: u32, sizes: Sizes) -> anyhow::Result<()> {
    let mut stream = UnixStream::connect(socket_path(dir))?;
    stream.write_all(&rank.to_le_bytes())?;
    let listen = move || -> anyhow::Result<()> {
        let words = FutexWords::attach(&receive_descriptor(&stream)?)?;
        thread::Builder::new().name("echo-words".to_owned()).spawn(move || echo_words(&words))?;
        Ok(echo_bytes(&mut stream, sizes)?)
    };
    // A worker whose echo ends answers no more of them, which the scheduler sees as a closed socket.
    thread::Builder::new().name("echo-bytes".to_owned()).spawn(listen)?;
    Ok(())
}

fn echo_bytes(stream: &mut UnixStream, sizes: Sizes) -> std::io::Result<()> {
    let (mut order, answer) = (vec![0; sizes.order], vec![0; sizes.answer]);
    loop {
        stream.read_exact(&mut order)?;
        stream.write_all(&answer)?;
    }
}

fn echo_words(words: &FutexWords) -> Result<(), RingError> {
    let mut seen = 0;
    loop {
        match words.load(TO_WORKER)? {
            value if value == seen => words.wait(TO_WORKER, seen, SLICE)?,
            value => {
                seen = value;
                words.store_and_wake(TO_SCHEDULER, value)?;
            }
        }
    }
}

/// Where workers connect their echoes to.
#[derive(Debug)]
pub(super) struct EchoListener {
    listener: UnixListener,
    sizes: Sizes,
}

impl EchoListener {
    pub(super) fn bind(dir: &Path, sizes: Sizes) -> anyhow::Result<Self> {
        Ok(Self { listener: UnixListener::bind(socket_path(dir))?, sizes })
    }

    /// The echoes of all workers, which have connected by now, by rank.
    pub(super) fn accept(&self, workers: u32) -> anyhow::Result<Vec<Echo>> {
        let mut echoes: Vec<Option<Echo>> = (0..workers).map(|_| None).collect();
        for _ in 0..workers {
            let (mut stream, _) = self.listener.accept()?;
            let mut rank = [0; 4];
            stream.read_exact(&mut rank)?;
            let rank = u32::from_le_bytes(rank);
            let place = usize::try_from(rank).ok().and_then(|rank| echoes.get_mut(rank));
            let place = place.with_context(|| format!("an echo of rank {rank}, which was not started"))?;
            ensure!(place.is_none(), "rank {rank} connected two echoes");
            stream.set_read_timeout(Some(PATIENCE))?;
            let (words, descriptor) = FutexWords::create()?;
            send_descriptor(&stream, &descriptor)?;
            let (order, answer) = (vec![0; self.sizes.order], vec![0; self.sizes.answer]);
            *place = Some(Echo { stream, words, turn: 0, order, answer });
        }
        Ok(echoes.into_iter().flatten().collect())
    }
}

/// The scheduler's end of one worker's echoes.
#[derive(Debug)]
pub(super) struct Echo {
    stream: UnixStream,
    words: FutexWords,
    turn: u32,
    order: Vec<u8>,
    answer: Vec<u8>,
}

impl Echo {
    pub(super) fn send(&mut self) -> anyhow::Result<()> {
        self.stream.write_all(&self.order).context("sending an echo")
    }

    pub(super) fn receive(&mut self) -> anyhow::Result<()> {
        self.stream.read_exact(&mut self.answer).context("waiting for an echo")
    }

    pub(super) fn ring(&mut self) -> anyhow::Result<()> {
        self.turn = self.turn.wrapping_add(1);
        Ok(self.words.store_and_wake(TO_WORKER, self.turn)?)
    }

    /// Waits for the other word. A worker that is gone closes its socket, which is looked at after every slice.
    pub(super) fn wait(&mut self) -> anyhow::Result<()> {
        let before = self.turn.wrapping_sub(1);
        let mut slices = PATIENCE.as_secs() / SLICE.as_secs();
        while self.words.load(TO_SCHEDULER)? == before {
            let slept = Instant::now();
            self.words.wait(TO_SCHEDULER, before, SLICE)?;
            if slept.elapsed() >= SLICE {
                slices = slices.checked_sub(1).context("waiting for an echo: the worker does not answer")?;
                self.check_alive()?;
            }
        }
        Ok(())
    }

    fn check_alive(&self) -> anyhow::Result<()> {
        let peeked = rustix::net::recv(&self.stream, &mut [0u8; 1][..], RecvFlags::PEEK | RecvFlags::DONTWAIT);
        ensure!(!matches!(peeked, Ok((_, 0))), "waiting for an echo: the worker is gone");
        Ok(())
    }
}

fn socket_path(dir: &Path) -> PathBuf {
    dir.join("echo.sock")
}

fn send_descriptor(stream: &UnixStream, descriptor: &OwnedFd) -> anyhow::Result<()> {
    let descriptors = [descriptor.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(stream, &[IoSlice::new(&[0])], &mut control, SendFlags::empty()).context("passing the words")?;
    Ok(())
}

fn receive_descriptor(stream: &UnixStream) -> anyhow::Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let passed = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    passed.context("no words were passed")
}
