//! What happened second by second, and the part of a run that is like the rest of it.
//!
//! ```text
//!   under way      ┌─┐┌──┐┌┐┌───┐
//!   level ─ ─ ─ ┌──┘ └┘  └┘└┘   └┐─ ─     the median over time
//!         ┌─────┘                └──┐
//!         ramp  ├─ steady ───────┤  tail
//! ```

use crate::load::record::{ChunkKind, Record};
use crate::stats::to_f64;

const NS_PER_S: u64 = 1_000_000_000;

/// Longer runs than this are not looked at second by second.
const MAX_SECONDS: u64 = 7 * 24 * 3600;

/// From the first moment at which as many requests were under way as at the median moment to the last.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Steady {
    /// Its beginning on the clock of the run.
    pub start_s: f64,
    /// Its length.
    pub duration_s: f64,
    /// Requests under way at the median moment of the run.
    pub concurrency: usize,
    /// Requests that were completed in it, a second.
    pub request_throughput: f64,
    /// Tokens that came in it, a second.
    pub output_throughput: f64,
}

/// The steady part, if there is a moment at which anything was under way.
pub(super) fn steady(records: &[&Record]) -> Option<Steady> {
    let steps = steps(records);
    let level = median_level(&steps)?;
    let start_ns = steps.iter().find(|step| step.under_way >= level)?.at_ns;
    // The level is left for good at the first step behind the last that had it.
    let last = steps.iter().rposition(|step| step.under_way >= level)?;
    let end_ns = steps.get(last + 1)?.at_ns;
    let duration_s = to_f64(end_ns.checked_sub(start_ns).filter(|&length| length > 0)?) / to_f64(NS_PER_S);
    let is_inside = |at_ns: u64| (start_ns..=end_ns).contains(&at_ns);
    let completed = records.iter().filter(|record| record.is_complete() && is_inside(record.done_ns)).count();
    let tokens: u64 = tokens(records).filter(|&(at_ns, _)| is_inside(at_ns)).map(|(_, tokens)| tokens).sum();
    Some(Steady {
        start_s: to_f64(start_ns) / to_f64(NS_PER_S),
        duration_s,
        concurrency: level,
        request_throughput: super::count_f64(completed) / duration_s,
        output_throughput: to_f64(tokens) / duration_s,
    })
}

/// Requests under way from this moment to the next.
struct Step {
    at_ns: u64,
    under_way: usize,
}

fn steps(records: &[&Record]) -> Vec<Step> {
    let mut changes: Vec<(u64, bool)> = Vec::new();
    for record in records {
        changes.extend([(record.sent_ns, true), (record.done_ns, false)]);
    }
    // Of one moment those that begin first: the count never falls below zero.
    changes.sort_unstable_by_key(|&(at_ns, begins)| (at_ns, !begins));
    let mut under_way = 0usize;
    let mut steps: Vec<Step> = Vec::new();
    for (at_ns, begins) in changes {
        under_way = if begins { under_way + 1 } else { under_way.saturating_sub(1) };
        match steps.last_mut() {
            Some(last) if last.at_ns == at_ns => last.under_way = under_way,
            _ => steps.push(Step { at_ns, under_way }),
        }
    }
    steps
}

/// The level that half of the time is at or above.
fn median_level(steps: &[Step]) -> Option<usize> {
    let mut spans: Vec<(usize, u64)> =
        steps.windows(2).map(|pair| (pair[0].under_way, pair[1].at_ns - pair[0].at_ns)).collect();
    spans.retain(|&(under_way, _)| under_way > 0);
    spans.sort_unstable_by_key(|&(under_way, _)| std::cmp::Reverse(under_way));
    let half = spans.iter().map(|&(_, length)| length).sum::<u64>().div_ceil(2);
    let mut seen = 0;
    spans.iter().find_map(|&(under_way, length)| {
        seen += length;
        (seen >= half).then_some(under_way)
    })
}

/// Tokens and when they came: as many as the server says a chunk has, else one for each chunk, as vLLM counts.
fn tokens<'a>(records: &'a [&Record]) -> impl Iterator<Item = (u64, u64)> + 'a {
    let chunks = records.iter().flat_map(|record| &record.chunks);
    chunks.filter(|chunk| chunk.kind != ChunkKind::Usage).map(|chunk| (chunk.at_ns, chunk.tokens.map_or(1, u64::from)))
}

/// Most tokens in a second, counted from the first request on.
pub(super) fn most_tokens_per_s(complete: &[&Record]) -> f64 {
    let first_ns = first_sent(complete);
    let seconds = tokens(complete).map(|(at_ns, tokens)| (second(at_ns, first_ns), second(at_ns, first_ns), tokens));
    to_f64(most(seconds))
}

/// Most requests that were under way in a second, counted from the first request on.
pub(super) fn most_concurrent(complete: &[&Record]) -> usize {
    let first_ns = first_sent(complete);
    let spans = complete
        .iter()
        .filter_map(|record| Some((second(record.sent_ns, first_ns), second(record.last_token_ns()?, first_ns), 1)));
    usize::try_from(most(spans)).unwrap_or(usize::MAX)
}

fn first_sent(records: &[&Record]) -> u64 {
    records.iter().map(|record| record.sent_ns).min().unwrap_or(0)
}

fn second(at_ns: u64, first_ns: u64) -> u64 {
    (at_ns.saturating_sub(first_ns) / NS_PER_S).min(MAX_SECONDS)
}

/// The largest sum in a second, of amounts that fill whole seconds from one to another, both included.
fn most(spans: impl Iterator<Item = (u64, u64, u64)>) -> u64 {
    let mut changes: Vec<(u64, i128)> = Vec::new();
    for (from, to, amount) in spans {
        changes.extend([(from, i128::from(amount)), (to + 1, -i128::from(amount))]);
    }
    changes.sort_unstable_by_key(|&(second, _)| second);
    let (mut sum, mut largest) = (0i128, 0i128);
    for group in changes.chunk_by(|a, b| a.0 == b.0) {
        sum += group.iter().map(|&(_, change)| change).sum::<i128>();
        largest = largest.max(sum);
    }
    u64::try_from(largest).unwrap_or(0)
}
