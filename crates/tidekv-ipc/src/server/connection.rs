//! One scheduler's connection, from its greeting to its end.

use std::time::{Duration, Instant};

use tidekv_core::units::{Bytes, GroupId};
use tidekv_fork::ClosedInChild;
use tidekv_shm::ring::RingEnd;

use super::{Handler, TICK, WorkerServer, tick};
use crate::frame::{Channel, FrameError, decode_order, encode_answer};
use crate::link::{Link, LinkError};
use crate::message::{Answer, Balance, Deed, Order, PAGES_MAX, Refusal, RefusalKind, Verdict};

/// How long somebody may stay connected without a greeting, while others wait.
const GREETING_WAIT: Duration = Duration::from_secs(1);
/// How long an answer may wait for a scheduler that lives and does not take it.
const ANSWER_WAIT: Duration = Duration::from_secs(60);

/// Why a connection ended.
#[derive(Debug)]
enum End {
    Closed,
    Stopped,
    Bad(FrameError),
    /// It said something that does not belong there; it was told so.
    Refused,
    /// No greeting, or nobody takes our answers.
    Silent,
    System(LinkError),
}

/// A scheduler that is being served.
pub(super) struct Connection<'a> {
    server: &'a WorkerServer,
    link: Link,
    handler: &'a mut dyn Handler,
    ticked: &'a mut Instant,
    is_greeted: bool,
    /// Somebody else who connected when this one had just gone.
    next: Option<ClosedInChild>,
    order: Order,
    frame: Vec<u8>,
}

impl<'a> Connection<'a> {
    /// Serves one scheduler to its end. Returns the next one's socket where that was accepted already.
    pub(super) fn serve(
        server: &'a WorkerServer,
        socket: ClosedInChild,
        handler: &'a mut dyn Handler,
        ticked: &'a mut Instant,
    ) -> Option<ClosedInChild> {
        let link = Link::new(socket, TICK, true).inspect_err(|error| tracing::warn!(?error, "a socket is unusable"));
        let link = link.ok()?;
        server.stop.watch(&link);
        let order = Order {
            sequence: 0,
            epoch: 0,
            settled: 0,
            group: GroupId(0),
            spare_pages: 0,
            evictable_pages: 0,
            deed: Deed::Ping,
        };
        let mut connection =
            Self { server, link, handler, ticked, is_greeted: false, next: None, order, frame: Vec::new() };
        let end = match connection.greet() {
            Ok(()) => {
                connection.is_greeted = true;
                connection.handler.scheduler_came();
                let end = connection.serve_orders();
                connection.handler.scheduler_gone();
                end
            }
            Err(end) => end,
        };
        connection.report(&end);
        connection.next
    }

    /// The first frame must be a greeting, meant for us.
    fn greet(&mut self) -> Result<(), End> {
        let deadline = Instant::now() + GREETING_WAIT;
        let channel = self.await_order(Some(deadline))?;
        let descriptor = self.link.take_descriptor();
        let WorkerServer { stage, rank, .. } = *self.server;
        match self.order.deed {
            Deed::Hello { stage: its_stage, rank: its_rank } if (its_stage, its_rank) == (stage, rank) => {}
            Deed::Hello { stage: its_stage, rank: its_rank } => {
                let reason = format!("this is rank {rank} of stage {stage}, not rank {its_rank} of stage {its_stage}");
                return self.refuse(RefusalKind::Protocol, reason);
            }
            _ => return self.refuse(RefusalKind::Protocol, "an order came before the greeting".to_owned()),
        }
        let ring = match channel {
            Channel::Socket => None,
            Channel::Ring => {
                let attached = descriptor.ok_or(FrameError::NoRing).and_then(|descriptor| {
                    RingEnd::attach(&descriptor).map_err(|error| {
                        tracing::warn!("a ring cannot be used: {error}");
                        FrameError::NoRing
                    })
                });
                Some(attached.map_err(End::Bad)?)
            }
        };
        self.answer(Verdict::Done, Balance::default())?;
        if let Some(ring) = ring {
            self.link.use_ring(ring);
        }
        Ok(())
    }

    fn serve_orders(&mut self) -> End {
        loop {
            if let Err(end) = self.serve_order() {
                return end;
            }
            self.look_around();
        }
    }

    fn serve_order(&mut self) -> Result<(), End> {
        // Where the next order is here already, waiting for it looks at nothing else: in a ring orders are found on after the
        // socket was shut down.
        self.check_stop()?;
        self.await_order(None)?;
        let verdict = match self.order.deed {
            Deed::Hello { .. } => return self.refuse(RefusalKind::Protocol, "a second greeting came".to_owned()),
            Deed::Ping => Verdict::Done,
            _ => self.handler.handle(&self.order),
        };
        let balance = self.handler.balance(&self.order);
        self.answer(verdict, balance)
    }

    /// Waits for the next order, for ever or until a deadline.
    fn await_order(&mut self, deadline: Option<Instant>) -> Result<Channel, End> {
        loop {
            if self.link.receive(TICK).map_err(End::from)? {
                return decode_order(self.link.frame(), &mut self.order).map_err(End::Bad);
            }
            self.check_stop()?;
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(End::Silent);
            }
            self.look_around();
        }
    }

    /// What must be done every tick, also while orders come.
    fn look_around(&mut self) {
        if tick(self.handler, self.ticked) {
            self.turn_others_away();
        }
    }

    /// Whoever else wants to be served is told that it is too late; unless ours is gone, and the other comes next. As
    /// long as ours has not greeted, it may be nobody at all, and the others wait.
    fn turn_others_away(&mut self) {
        if self.next.is_some() || !self.is_greeted {
            return;
        }
        let other = match self.server.accept() {
            Ok(Some(other)) => other,
            Ok(None) => return,
            Err(error) => {
                tracing::warn!("looking for other schedulers failed: {error}");
                return;
            }
        };
        // Ours may have closed its connection before the other connected: then this is the next one, not a second.
        if self.link.is_closed_by_peer() {
            self.next = Some(other);
            return;
        }
        let reason = format!("rank {} is served to another scheduler", self.server.rank);
        let refusal = Refusal { kind: RefusalKind::Busy, wanted: Bytes::ZERO, grantable: Bytes::ZERO, reason };
        let answer = self.server.answer_to(0, 0, Verdict::Refused(refusal), Balance::default());
        if let Ok(mut link) = Link::new(other, TICK, false) {
            let mut frame = Vec::new();
            // A refusal has no pages. If it cannot be sent the other sees that we closed.
            let _ = encode_answer(&mut frame, &answer);
            link.load(&frame);
            let _ = link.try_send();
        }
    }

    /// Answers the order that came last.
    fn answer(&mut self, verdict: Verdict, balance: Balance) -> Result<(), End> {
        let Order { sequence, epoch, .. } = self.order;
        let mut answer = self.server.answer_to(sequence, epoch, verdict, balance);
        if let Err(error) = encode_answer(&mut self.frame, &answer) {
            let reason = format!("{} pages are held, {PAGES_MAX} can be named in one answer", error.pages);
            answer.verdict = refused(RefusalKind::Protocol, reason);
            // A refusal has no pages.
            let _ = encode_answer(&mut self.frame, &answer);
        }
        self.link.load(&self.frame);
        self.send()
    }

    /// Refuses the connection as a whole, and ends it.
    fn refuse<T>(&mut self, kind: RefusalKind, reason: String) -> Result<T, End> {
        self.order.sequence = 0;
        self.answer(refused(kind, reason), Balance::default())?;
        Err(End::Refused)
    }

    /// Sends what is loaded. A scheduler that lives but takes nothing is waited for, though not for ever.
    fn send(&mut self) -> Result<(), End> {
        let started = Instant::now();
        while !self.link.try_send().map_err(End::from)? {
            self.check_stop()?;
            if started.elapsed() >= ANSWER_WAIT {
                return Err(End::Silent);
            }
            self.link.wait_to_send(TICK).map_err(End::from)?;
            self.look_around();
        }
        Ok(())
    }

    fn check_stop(&self) -> Result<(), End> {
        if self.server.stop.is_set() { Err(End::Stopped) } else { Ok(()) }
    }

    /// Says why it ended, to the log, and to the scheduler where it is the one to mend it.
    fn report(&mut self, end: &End) {
        let rank = self.server.rank;
        match end {
            _ if self.server.stop.is_set() => tracing::debug!(rank, "the worker was stopped"),
            End::Closed | End::Stopped | End::Refused => tracing::debug!(rank, ?end, "the scheduler is gone"),
            End::Silent => tracing::warn!(rank, "the scheduler was dropped: it said nothing, or took no answer"),
            End::System(error) => tracing::warn!(rank, ?error, "the scheduler was dropped"),
            End::Bad(error) => {
                tracing::warn!(rank, "the scheduler was dropped: {error}");
                let reason = format!("the connection was dropped: {error}");
                let answer = self.server.answer_to(0, 0, refused(RefusalKind::Protocol, reason), Balance::default());
                self.link.unload();
                if encode_answer(&mut self.frame, &answer).is_ok() && !self.link.has_output() {
                    self.link.load(&self.frame);
                    // It may not listen any more.
                    let _ = self.link.try_send();
                }
            }
        }
    }
}

impl WorkerServer {
    fn answer_to(&self, sequence: u64, epoch: u64, verdict: Verdict, balance: Balance) -> Answer {
        Answer { sequence, epoch, instance: self.instance, balance, verdict }
    }
}

fn refused(kind: RefusalKind, reason: String) -> Verdict {
    Verdict::Refused(Refusal { kind, wanted: Bytes::ZERO, grantable: Bytes::ZERO, reason })
}

impl From<LinkError> for End {
    fn from(error: LinkError) -> Self {
        match error {
            LinkError::Closed => Self::Closed,
            LinkError::Frame(error) => Self::Bad(error),
            error => Self::System(error),
        }
    }
}
