//! Whether a run measured the prefix cache that an earlier run had filled.
//!
//! ```text
//!   the server found   ├── also in another prompt of this run ──┤── only in the cache: an earlier run's ──┤
//! ```
//!
//! Who sends the same seed to the same server twice measures how fast it finds prompts, not how fast it computes them. The server says
//! how many tokens of a prompt it found, in the usage of an answer or on its page of metrics. What a prompt has in common with others
//! of its own run may be found in any run; the rest was there before.

use std::collections::HashMap;

use super::timeline::Timeline;
use crate::load::{Item, Planned, Prompt, Record, Schedule};

/// Below this a warning would cry wolf: beginnings of a few tokens, warm-up, other clients.
const LEAST_PERCENT: u64 = 5;
/// What all prompts of a server have in common however they differ: a chat template, a token at the start.
const TEMPLATE_TOKENS: u64 = 64;
/// vLLM's and kvserve's counter, for servers whose answers do not say it.
const HITS: &str = "vllm:prefix_cache_hits_total";

/// How much of the prompts came from an earlier run, if it is enough to be worth a warning.
pub(super) fn percent_from_earlier_runs(schedule: &Schedule, records: &[Record], timeline: &Timeline) -> Option<u64> {
    let usages: Vec<_> = records.iter().filter_map(|record| Some((record, record.usage?))).collect();
    let prompts: u64 = usages.iter().map(|(_, usage)| usage.prompt_tokens).sum();
    let found: Option<u64> = usages.iter().filter_map(|(_, usage)| usage.cached_tokens).reduce(|a, b| a + b);
    let is_worth_it = |tokens: u64| prompts > 0 && tokens.saturating_mul(100) / prompts >= LEAST_PERCENT;
    if !found.or_else(|| hits(timeline)).is_some_and(is_worth_it) {
        return None;
    }
    let own = in_common(&schedule.requests);
    let own = |record: &Record| own.get(&(record.stream, record.index)).copied().unwrap_or(0);
    let before = match found {
        Some(_) => {
            let earlier = |cached: u64, record: &Record| cached.saturating_sub(own(record));
            usages.iter().map(|(record, usage)| earlier(usage.cached_tokens.unwrap_or(0), record)).sum()
        }
        None => hits(timeline)?.saturating_sub(usages.iter().map(|(record, _)| own(record)).sum()),
    };
    is_worth_it(before).then(|| (before.saturating_mul(100) / prompts).min(100))
}

/// Tokens that the servers found while they were looked at.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a counter: whole, and never negative")]
fn hits(timeline: &Timeline) -> Option<u64> {
    let of_servers = timeline.columns.iter().filter(|(name, _)| name.ends_with(HITS));
    let grown = of_servers.filter_map(|(_, column)| {
        let mut known = column.iter().flatten();
        let first = known.next()?;
        Some((known.next_back()? - first).max(0.0) as u64)
    });
    grown.reduce(|a, b| a + b)
}

/// For each request, how many tokens it may have in common with another one of the run: at least as many as it has.
fn in_common(requests: &[Planned]) -> HashMap<(usize, usize), u64> {
    let mut sorted: Vec<(Vec<Part>, &Planned)> =
        requests.iter().map(|request| (parts(&request.item), request)).collect();
    sorted.sort_by(|a, b| a.0.cmp(&b.0));
    // In this order nobody has more in common with a prompt than its neighbours.
    let with = |index: Option<usize>, parts: &[Part]| {
        index.and_then(|index| sorted.get(index)).map_or(0, |(other, _)| common_tokens(parts, other))
    };
    let of = |(index, (parts, request)): (usize, &(Vec<Part>, &Planned))| {
        let tokens = with(index.checked_sub(1), parts).max(with(Some(index + 1), parts));
        ((request.stream, request.index), tokens + TEMPLATE_TOKENS.min(template_tokens(request)))
    };
    sorted.iter().enumerate().map(of).collect()
}

/// What a prompt has in common with all others, at most a quarter of it: of short prompts a template is the smaller part too.
fn template_tokens(request: &Planned) -> u64 {
    request.item.input_tokens.map_or(TEMPLATE_TOKENS, |tokens| u64::from(tokens) / 4)
}

/// A part of a prompt, and how many tokens it has at most.
type Part = (u64, u64);

fn parts(item: &Item) -> Vec<Part> {
    match &item.prompt {
        // Of words, some have two tokens.
        Prompt::Made(made) => {
            made.segments.iter().map(|segment| (segment.seed, 2 * u64::from(segment.tokens))).collect()
        }
        Prompt::Tokens(tokens) => tokens.iter().map(|&token| (u64::from(token), 1)).collect(),
        Prompt::Text(text) => text.bytes().map(|byte| (u64::from(byte), 1)).collect(),
    }
}

fn common_tokens(a: &[Part], b: &[Part]) -> u64 {
    let mut tokens = 0;
    for (a, b) in a.iter().zip(b) {
        // A shorter segment of the same seed is the beginning of the longer one.
        tokens += if a.0 == b.0 { a.1.min(b.1) } else { 0 };
        if a != b {
            break;
        }
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::{Api, BaseUrl, Dataset, Endpoint, Scenario, Stream, plan};

    fn schedule(texts: &[&str]) -> Schedule {
        let items = texts.iter().map(|&text| Item::text(text)).collect();
        let endpoint = Endpoint::new(BaseUrl::new("a", 1), Api::Completions, "m");
        let streams = vec![Stream::new("s", endpoint, Dataset::Items(items))];
        plan(&Scenario { streams }, 0).unwrap()
    }

    #[test]
    fn what_prompts_of_a_run_have_in_common_is_counted() {
        let schedule = schedule(&["abcdefgh", "x", "abcdzzzz", "abcdefgy", "abcdefgh"]);
        let common = in_common(&schedule.requests);
        let tokens = |index: usize| common[&(0, index)] - TEMPLATE_TOKENS;
        assert_eq!([0, 1, 2, 3, 4].map(tokens), [8, 0, 4, 7, 8]);
    }

    #[test]
    fn prompts_with_another_salt_share_nothing_and_are_as_long() {
        let plain = schedule(&["abcdefgh", "abcd"]);
        let [mut a, mut b] = [plain.clone(), plain.clone()];
        a.salt_prompts(1);
        b.salt_prompts(2);
        assert_ne!(a.digest(), b.digest());
        let parts = |schedule: &Schedule, index: usize| parts(&schedule.requests[index].item);
        assert_eq!(common_tokens(&parts(&a, 0), &parts(&b, 0)), 15, "of sixteen digits all but the last");
        assert_eq!(common_tokens(&parts(&a, 0), &parts(&a, 1)), 17 + 4, "what a run's prompts share they still share");
        assert_eq!(a.requests[1].at_ns, plain.requests[1].at_ns);
    }
}
