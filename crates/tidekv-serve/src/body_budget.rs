//! What the bodies of requests may hold together: one budget in bytes for all connections of a server.
//!
//! ```text
//!   client ── pieces ──> arriving ── whole ──> Bytes ── the last copy dropped ──> the budget has it back
//!                        charged as it grows          charged until then
//!                          │
//!                          │ the budget is full
//!                          ├─ others are late: the largest of them are dropped, and told 408
//!                          ├─ it is late itself: 408
//!                          └─ nobody is: 503 with Retry-After
//! ```
//!
//! A body is charged for what has arrived, so a client that announces megabytes and sends a few bytes costs a few bytes. Who sends less
//! than [`LEAST_BYTES_PER_SECOND`] becomes late, and loses its place when somebody else needs it, not before. What is refused is still
//! read for as long as it comes fast, and thrown away: a client that sends before it listens would not see the answer otherwise.

use std::collections::HashMap;
use std::error::Error;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::StatusCode;
use futures_util::stream::{self, StreamExt};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// Who sends less is late when it is short of its time.
const LEAST_BYTES_PER_SECOND: u64 = 64 << 10;
/// How far ahead of that a sender can be: then it is late after so long without a byte.
const HEADWAY: Duration = Duration::from_secs(1);
/// Bodies of this size leave holes in the heap that are worth returning.
const LONG_BYTES: usize = 16 << 10;
/// The heap is returned when so much of them was freed.
const RETURN_AFTER_BYTES: usize = 8 << 20;

/// Why a body did not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BodyError {
    /// It took longer than one may, or was late when somebody else needed its memory.
    #[error("the request's body took too long: send it faster, or less at once")]
    TooSlow,
    /// It is longer than one may be.
    #[error("the request is larger than {} MiB: send less at once", most >> 20)]
    TooLong { most: usize },
    /// Other bodies hold the whole budget, and none of them is late.
    #[error("other requests that are being read hold all of {} MiB: come back later, or raise the body budget", most >> 20)]
    NoRoom { most: usize },
}

impl BodyError {
    pub(crate) fn status_and_code(self) -> (StatusCode, &'static str) {
        match self {
            Self::TooSlow => (StatusCode::REQUEST_TIMEOUT, "request_timeout"),
            Self::TooLong { .. } => (StatusCode::PAYLOAD_TOO_LARGE, "request_too_large"),
            Self::NoRoom { .. } => (StatusCode::SERVICE_UNAVAILABLE, "too_many_bodies"),
        }
    }

    /// Whether it is why a body did not arrive.
    pub(crate) fn behind(error: &(dyn Error + 'static)) -> Option<Self> {
        let mut cause = Some(error);
        while let Some(error) = cause {
            if let Some(found) = error.downcast_ref() {
                return Some(*found);
            }
            cause = error.source();
        }
        None
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct BodyBudget {
    most: usize,
    /// [`HEADWAY`], but for tests.
    headway: Duration,
    state: Mutex<State>,
    /// Of long bodies, since the heap was last returned.
    freed: AtomicUsize,
}

#[derive(Debug, Default)]
struct State {
    /// By those that arrive and those that have arrived.
    used: usize,
    arriving: HashMap<u64, Arriving>,
    next: u64,
}

/// A body of which a part is here.
#[derive(Debug)]
struct Arriving {
    charged: usize,
    /// From then on it is late, unless more comes.
    late_at: Instant,
    bytes: Arc<Mutex<Vec<u8>>>,
    dropped: Arc<Notify>,
}

/// The reader's end of an [`Arriving`], which goes with it.
struct Arrival {
    budget: Arc<BodyBudget>,
    id: u64,
    bytes: Arc<Mutex<Vec<u8>>>,
    dropped: Arc<Notify>,
    len: usize,
    capacity: usize,
}

/// A body that is whole.
struct Arrived {
    bytes: Vec<u8>,
    _charge: Charge,
}

impl AsRef<[u8]> for Arrived {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Bytes of the budget, given back on drop.
struct Charge {
    budget: Arc<BodyBudget>,
    bytes: usize,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.lock().used -= self.bytes;
        self.budget.note_freed(self.bytes);
    }
}

impl BodyBudget {
    pub(crate) fn new(most: usize) -> Arc<Self> {
        tidekv_mem::return_large_blocks_at_once();
        Self::with_headway(most, HEADWAY)
    }

    fn with_headway(most: usize, headway: Duration) -> Arc<Self> {
        Arc::new(Self { most, headway, state: Mutex::default(), freed: AtomicUsize::new(0) })
    }

    /// The same body, which comes whole and charged to the budget, or fails with a [`BodyError`] in time.
    pub(crate) fn charge(self: &Arc<Self>, body: Body, most: usize, patience: Duration) -> Body {
        if body.is_end_stream() {
            return body;
        }
        let deadline = Instant::now() + patience;
        Body::from_stream(stream::once(Arc::clone(self).whole(body, most, deadline)))
    }

    async fn whole(self: Arc<Self>, body: Body, most: usize, deadline: Instant) -> Result<Bytes, axum::Error> {
        let announced = body.size_hint();
        let expected = announced.upper().and_then(|upper| usize::try_from(upper).ok()).unwrap_or(usize::MAX);
        let is_too_long = announced.lower() > most as u64;
        let mut refused = is_too_long.then_some(BodyError::TooLong { most });
        let mut arrival = self.begin();
        let mut parts = body.into_data_stream();
        let mut seen = 0_usize;
        loop {
            let late_at = arrival.late_at();
            let part = tokio::select! {
                biased;
                part = parts.next() => part,
                () = arrival.dropped.notified() => return Err(axum::Error::new(BodyError::TooSlow)),
                () = sleep_until(deadline) => return Err(axum::Error::new(BodyError::TooSlow)),
                () = sleep_until(late_at), if refused.is_some() => None,
            };
            match (part, refused) {
                (Some(part), None) => {
                    let part = part?;
                    seen += part.len();
                    if seen > most {
                        return Err(axum::Error::new(BodyError::TooLong { most }));
                    }
                    if let Err(error) = arrival.push(&part, expected) {
                        if error == BodyError::TooSlow {
                            return Err(axum::Error::new(error));
                        }
                        // Nothing is kept from here on, and its speed still counts.
                        arrival = self.begin();
                        refused = Some(error);
                    }
                }
                (Some(Ok(part)), Some(error)) => {
                    seen += part.len();
                    arrival.came(part.len())?;
                    if seen > most {
                        return Err(axum::Error::new(error));
                    }
                }
                (Some(Err(_)) | None, Some(error)) => return Err(axum::Error::new(error)),
                (None, None) => return arrival.finish().map_err(axum::Error::new),
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(self: &Arc<Self>) -> Arrival {
        let (bytes, dropped) = (Arc::<Mutex<Vec<u8>>>::default(), Arc::<Notify>::default());
        let mut state = self.lock();
        let id = state.next;
        state.next += 1;
        let late_at = Instant::now() + self.headway;
        let arriving = Arriving { charged: 0, late_at, bytes: Arc::clone(&bytes), dropped: Arc::clone(&dropped) };
        state.arriving.insert(id, arriving);
        Arrival { budget: Arc::clone(self), id, bytes, dropped, len: 0, capacity: 0 }
    }

    /// The heap goes back to the system once enough of it was freed, on a thread that nobody waits for.
    fn note_freed(&self, bytes: usize) {
        if bytes < LONG_BYTES || self.freed.fetch_add(bytes, Ordering::Relaxed) + bytes < RETURN_AFTER_BYTES {
            return;
        }
        self.freed.store(0, Ordering::Relaxed);
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn_blocking(tidekv_mem::release_freed_heap);
        }
    }
}

impl State {
    /// Makes room for so many bytes more, if those who are late have as many.
    fn make_room(&mut self, bytes: usize, most: usize, now: Instant) -> bool {
        let is_late = |one: &Arriving| one.late_at < now && one.charged > 0;
        let theirs: usize = self.arriving.values().filter(|one| is_late(one)).map(|one| one.charged).sum();
        if self.used - theirs + bytes > most {
            return false;
        }
        let late = self.arriving.iter().filter(|(_, one)| is_late(one));
        let mut late: Vec<_> = late.map(|(&id, one)| (one.charged, id)).collect();
        late.sort_unstable();
        while self.used + bytes > most {
            let Some((charged, id)) = late.pop() else { return false };
            if let Some(one) = self.arriving.remove(&id) {
                self.used -= charged;
                *one.bytes.lock().unwrap_or_else(PoisonError::into_inner) = Vec::new();
                one.dropped.notify_one();
            }
        }
        true
    }
}

impl Arrival {
    fn late_at(&self) -> Instant {
        self.budget.lock().arriving.get(&self.id).map_or_else(Instant::now, |own| own.late_at)
    }

    /// So many bytes came.
    fn came(&self, bytes: usize) -> Result<(), axum::Error> {
        self.grow(bytes, 0).map_err(axum::Error::new)
    }

    /// So many bytes came, and so many more are to be held.
    fn grow(&self, came: usize, more: usize) -> Result<(), BodyError> {
        let now = Instant::now();
        let mut state = self.budget.lock();
        let Some(own) = state.arriving.get_mut(&self.id) else { return Err(BodyError::TooSlow) };
        let earned = Duration::from_micros(came as u64 * 1_000_000 / LEAST_BYTES_PER_SECOND);
        own.late_at = (own.late_at + earned).min(now + self.budget.headway);
        let is_late = own.late_at < now;
        let most = self.budget.most;
        if more > most.saturating_sub(state.used) {
            if is_late {
                return Err(BodyError::TooSlow);
            }
            if !state.make_room(more, most, now) {
                return Err(BodyError::NoRoom { most });
            }
        }
        state.used += more;
        if let Some(own) = state.arriving.get_mut(&self.id) {
            own.charged += more;
        }
        Ok(())
    }

    /// Keeps a part of a body that has `expected` bytes in all, or fewer.
    fn push(&mut self, part: &[u8], expected: usize) -> Result<(), BodyError> {
        let len = self.len + part.len();
        // Doubled, so that a body of many parts is moved a few times only.
        let wanted = if len > self.capacity { len.max((2 * self.capacity).min(expected)) } else { self.capacity };
        self.grow(part.len(), wanted - self.capacity)?;
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let more = wanted - bytes.len();
        bytes.reserve_exact(more);
        bytes.extend_from_slice(part);
        (self.len, self.capacity) = (len, wanted);
        Ok(())
    }

    /// All of it is here.
    fn finish(self) -> Result<Bytes, BodyError> {
        let own = self.budget.lock().arriving.remove(&self.id).ok_or(BodyError::TooSlow)?;
        let charge = Charge { budget: Arc::clone(&self.budget), bytes: own.charged };
        let bytes = std::mem::take(&mut *self.bytes.lock().unwrap_or_else(PoisonError::into_inner));
        Ok(Bytes::from_owner(Arrived { bytes, _charge: charge }))
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        let own = self.budget.lock().arriving.remove(&self.id);
        if let Some(own) = own {
            drop(std::mem::take(&mut *self.bytes.lock().unwrap_or_else(PoisonError::into_inner)));
            self.budget.lock().used -= own.charged;
            self.budget.note_freed(own.charged);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::error::Error as _;

    use futures_util::FutureExt;
    use http_body_util::BodyExt;
    use tokio::sync::mpsc;
    use tokio::task::unconstrained;

    use super::*;

    const MOST: usize = 1 << 20;

    fn run<T>(test: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(unconstrained(test))
    }

    type Sender = mpsc::UnboundedSender<Result<Bytes, Infallible>>;

    fn parts() -> (Sender, Body) {
        let (sender, parts) = mpsc::unbounded_channel();
        let next = |mut parts: mpsc::UnboundedReceiver<_>| async move { Some((parts.recv().await?, parts)) };
        (sender, Body::from_stream(stream::unfold(parts, next)))
    }

    /// A body that is sent part by part; over when the sender is dropped.
    fn sent(budget: &Arc<BodyBudget>) -> (Sender, Body) {
        let (sender, body) = parts();
        (sender, budget.charge(body, MOST, Duration::from_secs(60)))
    }

    async fn read(body: Body) -> Result<Bytes, BodyError> {
        let read = body.collect().await.map(http_body_util::Collected::to_bytes);
        read.map_err(|error| BodyError::behind(error.source().unwrap()).unwrap())
    }

    const NEVER_LATE: Duration = Duration::from_secs(3600);
    /// Whoever does not send is late.
    const SOON_LATE: Duration = Duration::ZERO;

    /// Until the clock has gone on, by more than a few bytes earn.
    fn time_passes() {
        let began = std::time::Instant::now();
        while began.elapsed() < Duration::from_millis(2) {
            std::thread::yield_now();
        }
    }

    fn used(budget: &BodyBudget) -> usize {
        budget.lock().used
    }

    #[test]
    fn a_body_is_charged_for_what_came_until_nobody_has_it() {
        let budget = BodyBudget::with_headway(4 * MOST, NEVER_LATE);
        run(async {
            let (sender, body) = sent(&budget);
            let mut reading = Box::pin(read(body));
            sender.send(Ok(vec![1; 1000].into())).unwrap();
            assert!((&mut reading).now_or_never().is_none());
            assert_eq!(used(&budget), 1000);
            sender.send(Ok(vec![2; 1].into())).unwrap();
            drop(sender);
            let body = reading.await.unwrap();
            assert_eq!((body.len(), body[999], body[1000], used(&budget)), (1001, 1, 2, 2000));
            let part = body.slice(..10);
            drop(body);
            assert_eq!(used(&budget), 2000, "a part of it lives");
            drop(part);
            assert_eq!(used(&budget), 0);
            // One whose client goes away.
            let (sender, body) = sent(&budget);
            let mut reading = Box::pin(read(body));
            sender.send(Ok(vec![1; 1000].into())).unwrap();
            assert!((&mut reading).now_or_never().is_none());
            drop(reading);
            assert_eq!((used(&budget), budget.lock().arriving.len()), (0, 0));
        });
    }

    /// One who has half of the budget and sends nothing more, and what becomes of another who sends as much and a byte more.
    async fn beside_half_a_body(budget: &Arc<BodyBudget>) -> [Option<Result<usize, BodyError>>; 2] {
        let (first, body) = sent(budget);
        let mut slow = Box::pin(read(body));
        first.send(Ok(vec![0; MOST / 2].into())).unwrap();
        assert!((&mut slow).now_or_never().is_none());
        time_passes();
        assert!((&mut slow).now_or_never().is_none(), "nobody needs its memory");
        let (sender, body) = sent(budget);
        sender.send(Ok(vec![0; MOST / 2 + 1].into())).unwrap();
        drop(sender);
        let fast = read(body).await;
        [slow.now_or_never(), Some(fast)].map(|read| read.map(|read| read.map(|body| body.len())))
    }

    #[test]
    fn who_is_late_loses_its_place_and_who_is_not_keeps_it() {
        let refused = Err(BodyError::NoRoom { most: MOST });
        let budget = BodyBudget::with_headway(MOST, NEVER_LATE);
        assert_eq!(run(beside_half_a_body(&budget)), [None, Some(refused)]);
        assert_eq!(used(&budget), 0);
        let budget = BodyBudget::with_headway(MOST, SOON_LATE);
        assert_eq!(run(beside_half_a_body(&budget)), [Some(Err(BodyError::TooSlow)), Some(Ok(MOST / 2 + 1))]);
        assert_eq!(used(&budget), 0);
    }

    #[test]
    fn a_late_sender_drops_nobody() {
        let budget = BodyBudget::with_headway(MOST, SOON_LATE);
        run(async {
            let begin = || {
                let (sender, body) = sent(&budget);
                sender.send(Ok(vec![0; MOST / 2].into())).unwrap();
                let mut reading = Box::pin(read(body));
                assert!((&mut reading).now_or_never().is_none());
                (sender, reading)
            };
            let ((_other, mut other), (drip, mut dripping)) = (begin(), begin());
            time_passes();
            drip.send(Ok(vec![0].into())).unwrap();
            assert_eq!((&mut dripping).now_or_never(), Some(Err(BodyError::TooSlow)));
            assert!((&mut other).now_or_never().is_none(), "it keeps its place");
        });
    }

    #[test]
    fn what_is_too_long_or_too_slow_is_told_so_and_holds_nothing() {
        let budget = BodyBudget::with_headway(4 * MOST, NEVER_LATE);
        run(async {
            let body = budget.charge(Body::from(vec![0; MOST + 1]), MOST, Duration::from_secs(60));
            assert_eq!(read(body).await, Err(BodyError::TooLong { most: MOST }));
            let (sender, body) = parts();
            sender.send(Ok(vec![0; MOST].into())).unwrap();
            let body = budget.charge(body, MOST, Duration::from_millis(10));
            assert_eq!(read(body).await, Err(BodyError::TooSlow));
            assert_eq!(used(&budget), 0);
        });
    }

    #[test]
    fn thousands_of_slow_senders_with_a_few_bytes_do_not_fill_it() {
        let budget = BodyBudget::with_headway(MOST, NEVER_LATE);
        run(async {
            let mut slow: Vec<_> = (0..4000)
                .map(|_| {
                    let (sender, body) = sent(&budget);
                    sender.send(Ok(vec![0; 10].into())).unwrap();
                    (sender, Box::pin(read(body)))
                })
                .collect();
            for (_, reading) in &mut slow {
                assert!(reading.now_or_never().is_none());
            }
            assert_eq!(used(&budget), 40_000);
            let (sender, body) = sent(&budget);
            sender.send(Ok(vec![0; MOST / 2].into())).unwrap();
            drop(sender);
            assert!(read(body).await.is_ok());
        });
    }
}
