//! From a scenario to a schedule: which request is sent when. Pure, and the same for a seed byte for byte.
//!
//! ```text
//!   clock    0 ───────────────────────────────────────────────────────────>
//!   chat        │ │││   │ │    │                 streams have their own data, arrivals, cap and endpoint,
//!   code              start ─> ││ ││ ││ ││       and one clock
//! ```
//!
//! What a stream draws depends on the seed and on its own name, not on its neighbours: adding a stream changes no other.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Map, Value};

use super::arrivals::{Arrivals, ArrivalsError, Course};
use super::data::{Dataset, Item, mixed, salted};
use super::digest::Digest;
use super::endpoint::Endpoint;

/// More than a client could send in a day, and a bound on the memory of a schedule.
pub const MAX_REQUESTS: usize = 2_000_000;

/// Several models at several servers, on one clock.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// The streams, each with a name of its own.
    pub streams: Vec<Stream>,
}

/// Requests of one kind to one endpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Stream {
    /// What results call it.
    pub name: String,
    /// Where its requests go.
    pub endpoint: Endpoint,
    /// What they ask.
    pub data: Dataset,
    /// How many there are. `None`: as many as [`duration`](Self::duration) has room for, or as the data have.
    pub requests: Option<usize>,
    /// How long it sends. `None`: until all are sent.
    pub duration: Option<Duration>,
    /// When they are sent, from [`start`](Self::start) on.
    pub arrivals: Arrivals,
    /// When it begins on the common clock.
    pub start: Duration,
    /// How many may be under way at a time. One too many waits, and its time goes on counting.
    pub max_concurrency: Option<usize>,
    /// How answers are to be made.
    pub sampling: Sampling,
    /// Whether answers are kept as text.
    pub keep_text: bool,
}

impl Stream {
    /// A stream that sends all its data at once.
    pub fn new(name: impl Into<String>, endpoint: Endpoint, data: Dataset) -> Self {
        Self {
            name: name.into(),
            endpoint,
            data,
            requests: None,
            duration: None,
            arrivals: Arrivals::Immediately,
            start: Duration::ZERO,
            max_concurrency: None,
            sampling: Sampling::default(),
            keep_text: false,
        }
    }

    /// Over what its rate changes, if that is a ramp: its requests, or its time where nobody said how many those are. `count` is
    /// how many there are if neither is said.
    pub fn course(&self, count: usize) -> Course {
        match (self.requests, self.duration) {
            (Some(requests), _) => Course::Requests(requests),
            (None, Some(duration)) => Course::Time(duration),
            (None, None) => Course::Requests(count),
        }
    }

    /// Whether its requests wait for one another and for nothing else.
    pub fn is_closed_loop(&self) -> bool {
        self.arrivals == Arrivals::Immediately && self.max_concurrency.is_some()
    }
}

/// How answers are to be made.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Longest answer where the data do not say.
    pub max_tokens: u32,
    /// 0 by default, because two runs that sample are of different lengths; `None` leaves it to the server.
    pub temperature: Option<f64>,
    /// Left to the server by default.
    pub top_p: Option<f64>,
    /// Whether an answer goes on to its full length.
    pub ignore_eos: bool,
    /// Further fields of the request, over ours.
    pub extra_body: Map<String, Value>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { max_tokens: 128, temperature: Some(0.0), top_p: None, ignore_eos: false, extra_body: Map::new() }
    }
}

/// What is sent when.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// The seed it was drawn from.
    pub seed: u64,
    /// The streams, without their data.
    pub streams: Vec<Stream>,
    /// All requests in the order of their times.
    pub requests: Vec<Planned>,
}

/// One request and its time.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// Nanoseconds on the common clock.
    pub at_ns: u64,
    /// Index of its stream.
    pub stream: usize,
    /// Which of the stream's requests it is.
    pub index: usize,
    /// What it asks.
    pub item: Item,
    /// Longest answer.
    pub max_tokens: u32,
}

/// Why there is no schedule.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// Nothing to do.
    #[error("there is no stream")]
    NoStream,
    /// Results could not tell them apart.
    #[error("two streams are called {name:?}")]
    SameName {
        /// The name.
        name: String,
    },
    /// Nothing to ask.
    #[error("stream {name:?} has no prompts")]
    NoData {
        /// Of which stream.
        name: String,
    },
    /// It would never end.
    #[error("stream {name:?} needs a number of requests or a duration")]
    Endless {
        /// Which stream.
        name: String,
    },
    /// All of infinitely many at once.
    #[error("stream {name:?} sends at once and as long as a duration: give a number of requests or a rate")]
    NoRate {
        /// Which stream.
        name: String,
    },
    /// More than [`MAX_REQUESTS`].
    #[error("the schedule has more than {MAX_REQUESTS} requests")]
    TooMany,
    /// A cap of 0.
    #[error("stream {name:?} may have 0 requests under way: give at least 1")]
    NoConcurrency {
        /// Which stream.
        name: String,
    },
    /// A trace without times.
    #[error("stream {name:?} replays a trace, and its data have no times")]
    NoTimes {
        /// Which stream.
        name: String,
    },
    /// Not an arrival process.
    #[error("stream {name:?}: {source}")]
    Arrivals {
        /// Which stream.
        name: String,
        /// What is wrong.
        #[source]
        source: ArrivalsError,
    },
}

/// Draws the schedule of a scenario.
pub fn plan(scenario: &Scenario, seed: u64) -> Result<Schedule, PlanError> {
    if scenario.streams.is_empty() {
        return Err(PlanError::NoStream);
    }
    let mut requests = Vec::new();
    for (index, stream) in scenario.streams.iter().enumerate() {
        if scenario.streams[..index].iter().any(|other| other.name == stream.name) {
            return Err(PlanError::SameName { name: stream.name.clone() });
        }
        requests.extend(plan_stream(stream, index, seed)?);
        if requests.len() > MAX_REQUESTS {
            return Err(PlanError::TooMany);
        }
    }
    // Stable: of one moment, streams in their order and requests in theirs.
    requests.sort_by_key(|request| request.at_ns);
    let without_data = |stream: &Stream| Stream { data: Dataset::Items(Vec::new()), ..stream.clone() };
    Ok(Schedule { seed, streams: scenario.streams.iter().map(without_data).collect(), requests })
}

fn plan_stream(stream: &Stream, index: usize, seed: u64) -> Result<Vec<Planned>, PlanError> {
    let name = || stream.name.clone();
    stream.arrivals.check().map_err(|source| PlanError::Arrivals { name: name(), source })?;
    if stream.data.is_empty() {
        return Err(PlanError::NoData { name: name() });
    }
    if stream.max_concurrency == Some(0) {
        return Err(PlanError::NoConcurrency { name: name() });
    }
    let count = match (stream.requests, stream.duration) {
        (Some(count), _) => count,
        (None, Some(_)) if stream.arrivals == Arrivals::Immediately => return Err(PlanError::NoRate { name: name() }),
        (None, Some(_)) if !matches!(stream.arrivals, Arrivals::Trace { .. }) => MAX_REQUESTS + 1,
        (None, _) => stream.data.len().ok_or_else(|| PlanError::Endless { name: name() })?,
    };
    if count > MAX_REQUESTS && stream.requests.is_some() {
        return Err(PlanError::TooMany);
    }
    let end_ns = stream.duration.map_or(u64::MAX, nanoseconds);
    let seed = mixed(seed, Digest::of(stream.name.as_bytes()));
    let items = |count| stream.data.draw(count, mixed(seed, 1));
    let planned: Vec<(u64, Item)> = match stream.arrivals {
        Arrivals::Trace { speed } => trace(items(count.min(stream.data.len().unwrap_or(0))), speed, end_ns)
            .ok_or_else(|| PlanError::NoTimes { name: name() })?,
        _ => {
            let times = stream.arrivals.times_ns(stream.course(count), count, end_ns, mixed(seed, 2));
            let items = items(times.len());
            times.into_iter().zip(items).collect()
        }
    };
    let start_ns = nanoseconds(stream.start);
    let request = |(nth, (at_ns, item)): (usize, (u64, Item))| Planned {
        at_ns: at_ns.saturating_add(start_ns),
        stream: index,
        index: nth,
        max_tokens: item.output_tokens.unwrap_or(stream.sampling.max_tokens),
        item,
    };
    Ok(planned.into_iter().enumerate().map(request).collect())
}

/// The times of the data, from the earliest on; `None` if an item has none.
fn trace(items: Vec<Item>, speed: f64, end_ns: u64) -> Option<Vec<(u64, Item)>> {
    let times: Vec<Duration> = items.iter().map(|item| item.at).collect::<Option<_>>()?;
    let first = times.iter().min().copied().unwrap_or_default();
    let at_ns = |time: Duration| nanoseconds((time - first).div_f64(speed));
    let mut planned: Vec<(u64, Item)> = times.into_iter().map(at_ns).zip(items).collect();
    planned.sort_by_key(|(at_ns, _)| *at_ns);
    planned.retain(|(at_ns, _)| *at_ns < end_ns);
    Some(planned)
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Schedule {
    /// Makes every prompt unlike those of any run with another salt. Times and lengths stay.
    pub fn salt_prompts(&mut self, salt: u64) {
        for request in &mut self.requests {
            request.item = salted(&request.item, salt);
        }
    }

    /// A number that is the same for the same schedule, prompts included, on every machine.
    pub fn digest(&self) -> String {
        let mut digest = Digest::default();
        let mut line = String::new();
        for request in &self.requests {
            line.clear();
            let stream = &self.streams[request.stream];
            // Writing to a string does not fail.
            let _ = write!(line, "{} {} {} {} ", request.at_ns, stream.name, request.index, request.max_tokens);
            digest.add(line.as_bytes());
            digest.add_prompt(&request.item);
        }
        digest.to_hex()
    }

    /// When the last request is meant to be sent.
    pub fn length(&self) -> Duration {
        Duration::from_nanos(self.requests.last().map_or(0, |request| request.at_ns))
    }
}

#[cfg(test)]
mod tests;
