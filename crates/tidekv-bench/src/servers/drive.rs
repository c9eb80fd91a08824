//! Sending requests and what a comparison needs of the answers.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::memory::{Looks, MemorySummary, Watch};
use super::session::Session;
use crate::load::data::{Form, RandomData, Vocabulary};
use crate::load::{self, Arrivals, Control, Dataset, Endpoint, Record, Scenario, Stream};
use crate::stats::{Samples, to_f64};

/// Connections that are open before the first request.
const WARM_CONNECTIONS: usize = 8;
const MOST_WARM_CONNECTIONS: usize = 256;

/// How long prompts and answers are, in tokens; both scatter by `spread`, a share.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Lengths {
    /// Tokens of a prompt.
    pub input: u32,
    /// Tokens of an answer.
    pub output: u32,
    /// 0 for all alike, 0.5 for half as long up to half as long again.
    pub spread: f64,
}

/// Random prompts of these lengths to one model.
pub fn stream(name: &str, endpoint: Endpoint, lengths: Lengths, requests: usize, arrivals: Arrivals) -> Stream {
    let data = Dataset::Random(RandomData {
        input_tokens: lengths.input,
        output_tokens: lengths.output,
        range_ratio: lengths.spread,
        prefix_tokens: 0,
        form: Form::Tokens,
        vocabulary: Vocabulary::default(),
    });
    let mut stream = Stream::new(name, endpoint, data);
    stream.requests = Some(requests);
    stream.arrivals = arrivals;
    stream.sampling.ignore_eos = true;
    stream
}

/// What was seen of a run: the records, and the memory of the streams' servers.
#[derive(Debug)]
pub struct Driven {
    /// In the order in which they ended.
    pub records: Vec<Record>,
    /// By stream, look by look.
    pub memory: Looks,
}

impl Driven {
    /// Memory of all streams' servers together.
    pub fn memory_together(&self) -> Option<MemorySummary> {
        MemorySummary::of(&self.memory.together())
    }
}

/// When requests are sent, and whether anybody looks on.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// The moment of the first one; at once where it is `None`.
    pub start: Option<Instant>,
    /// Whether memory is looked at meanwhile, which takes time from whoever serves.
    pub is_watched: bool,
}

impl Pace {
    /// At once, and watched.
    pub const WATCHED: Self = Self { start: None, is_watched: true };
}

/// Sends the requests of `streams`, on one clock, and waits for all answers.
///
/// # Errors
/// When the streams make no schedule, nobody listens, or somebody interrupts.
pub fn drive(session: &Session, streams: Vec<Stream>, seed: u64) -> anyhow::Result<Driven> {
    drive_at(session, streams, seed, Pace::WATCHED)
}

/// [`drive`] at a pace.
///
/// # Errors
/// Those of [`drive`].
pub fn drive_at(session: &Session, streams: Vec<Stream>, seed: u64, pace: Pace) -> anyhow::Result<Driven> {
    let driven = drive_until_interrupted(session, streams, seed, pace)?;
    ensure!(!session.is_interrupted(), "interrupted: the servers are stopped");
    Ok(driven)
}

/// [`drive_at`] for those who have a use for a part of the answers: an interruption is no error here.
///
/// # Errors
/// When the streams make no schedule, or nobody listens.
pub fn drive_until_interrupted(
    session: &Session,
    streams: Vec<Stream>,
    seed: u64,
    pace: Pace,
) -> anyhow::Result<Driven> {
    for stream in &streams {
        let connections = stream.max_concurrency.unwrap_or(0).clamp(WARM_CONNECTIONS, MOST_WARM_CONNECTIONS);
        session.client().warm(&stream.endpoint, connections)?;
    }
    let urls: Vec<_> = streams.iter().map(|stream| stream.endpoint.base_url.clone()).collect();
    let schedule = load::plan(&Scenario { streams }, seed)?;
    let watch = pace.is_watched.then(|| Watch::begin(session, urls)).transpose();
    let watch = watch.context("a thread to watch memory with")?;
    let control = Control { cancel: session.cancel().clone(), start: pace.start, ..Control::default() };
    let run = session.client().run(&schedule, &control);
    let memory = watch.map_or_else(Looks::default, Watch::end);
    Ok(Driven { records: run.records, memory })
}

/// Latencies and throughput of some answers. Times are in the order of the requests, whenever each of them ended: two servers
/// that were asked the same have the times of the same request at the same place.
#[derive(Clone, Debug, Default)]
pub struct Answers {
    /// From the intended send to the first token, so that waiting counts wherever it happens.
    pub ttft: Samples,
    /// Between tokens, every gap.
    pub itl: Samples,
    /// Between tokens, the mean of each answer: where several tokens come in one read, single gaps say how they were read.
    pub mean_itl: Samples,
    /// From the intended send to the last token.
    pub e2e: Samples,
    /// Answers that are whole.
    pub completed: usize,
    /// The others.
    pub failed: usize,
    /// Why the first of them did.
    pub first_failure: Option<String>,
    /// Tokens made.
    pub output_tokens: u64,
    /// From the first intended send to the last end.
    pub duration: Duration,
    /// What the pool held meanwhile, where that is known.
    pub memory: Option<MemorySummary>,
}

impl Answers {
    /// Of the records of one stream.
    pub fn of(driven: &Driven, stream: usize) -> Self {
        let mut answers = Self { memory: MemorySummary::of(&driven.memory.of(stream)), ..Self::default() };
        let (mut first, mut last) = (u64::MAX, 0);
        let mut records: Vec<&Record> = driven.records.iter().filter(|record| record.stream == stream).collect();
        records.sort_by_key(|record| record.index);
        for record in records {
            first = first.min(record.intended_ns);
            last = last.max(record.done_ns);
            if let Some(failure) = &record.failure {
                answers.failed += 1;
                answers.first_failure.get_or_insert_with(|| failure.to_string());
                continue;
            }
            answers.completed += 1;
            answers.output_tokens += record.output_tokens();
            answers.add_times(record);
        }
        answers.duration = Duration::from_nanos(last.saturating_sub(first));
        answers
    }

    fn add_times(&mut self, record: &Record) {
        if let (Some(first), Some(last)) = (record.first_token_ns(), record.last_token_ns()) {
            self.ttft.push(first.saturating_sub(record.intended_ns));
            self.e2e.push(last.saturating_sub(record.intended_ns));
        }
        let gaps_ns = record.gaps_ns();
        if let Some(mean_ns) = gaps_ns.iter().sum::<u64>().checked_div(gaps_ns.len() as u64) {
            self.mean_itl.push(mean_ns);
        }
        gaps_ns.into_iter().for_each(|gap_ns| self.itl.push(gap_ns));
    }

    /// Whole answers a second, or `None` without any.
    pub fn requests_per_s(&self) -> Option<f64> {
        let seconds = self.duration.as_secs_f64();
        (self.completed > 0 && seconds > 0.0).then(|| to_f64(self.completed as u64) / seconds)
    }

    /// Tokens a second, or `None` without any.
    pub fn tokens_per_s(&self) -> Option<f64> {
        let seconds = self.duration.as_secs_f64();
        (self.output_tokens > 0 && seconds > 0.0).then(|| to_f64(self.output_tokens) / seconds)
    }

    /// Adds what another slice saw; its memory is the caller's to combine.
    pub fn extend(&mut self, other: &Self) {
        self.ttft.extend(&other.ttft);
        self.itl.extend(&other.itl);
        self.mean_itl.extend(&other.mean_itl);
        self.e2e.extend(&other.e2e);
        self.completed += other.completed;
        self.failed += other.failed;
        self.output_tokens += other.output_tokens;
        self.duration += other.duration;
        if self.first_failure.is_none() {
            self.first_failure.clone_from(&other.first_failure);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::metrics::tests::record;

    /// A long answer that was asked for first ends last.
    #[test]
    fn times_are_in_the_order_of_the_requests() {
        let ended = [record(5, &[2, 4]), record(9, &[1, 3]), record(0, &[3, 40])];
        let records = ended.into_iter().zip([1, 2, 0]).map(|(record, index)| Record { index, ..record }).collect();
        let answers = Answers::of(&Driven { records, memory: Looks::default() }, 0);
        let ms = |times: &Samples| times.values_ns().iter().map(|ns| ns / 1_000_000).collect::<Vec<u64>>();
        assert_eq!((ms(&answers.ttft), ms(&answers.e2e)), (vec![3, 2, 1], vec![40, 4, 3]));
        assert_eq!(ms(&answers.mean_itl), [37, 2, 2]);
        assert_eq!(answers.duration, Duration::from_millis(40));
    }
}
