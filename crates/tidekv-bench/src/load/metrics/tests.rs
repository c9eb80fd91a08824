//! Hand-made records, whose figures can be computed by head.

use proptest::prelude::*;

use super::*;
use crate::load::endpoint::Api;
use crate::load::record::{Chunk, ChunkKind, Failure, Usage};

const MS: u64 = 1_000_000;

/// A request sent at `sent` ms whose choices came so many ms later.
pub(crate) fn record(sent: u64, after: &[u64]) -> Record {
    let kind = ChunkKind::Choice { has_text: true };
    let chunks: Vec<Chunk> = after.iter().map(|ms| Chunk { at_ns: (sent + ms) * MS, kind, tokens: None }).collect();
    Record {
        stream: 0,
        index: 0,
        api: Api::Completions,
        intended_ns: sent * MS,
        released_ns: sent * MS,
        sent_ns: sent * MS,
        first_byte_ns: Some(sent * MS),
        done_ns: chunks.last().map_or(sent * MS, |chunk| chunk.at_ns),
        chunks,
        status: Some(200),
        usage: None,
        planned_input_tokens: Some(10),
        finish_reason: None,
        text: None,
        connects: 0,
        resends: 0,
        failure: None,
    }
}

fn of(records: &[Record]) -> Metrics {
    metrics(records, &MetricsRequest::default())
}

fn all_ms(distribution: &Distribution) -> Vec<u64> {
    distribution.samples().values_ns().iter().map(|ns| ns / MS).collect()
}

#[test]
fn the_definitions_of_vllm() {
    let found = of(&[record(0, &[100, 120, 150, 190]), record(1000, &[50])]);
    assert_eq!(all_ms(&found.ttft), [100, 50]);
    assert_eq!(all_ms(&found.itl), [20, 30, 40]);
    assert_eq!(all_ms(&found.tpot), [30], "one token has no time per token");
    assert_eq!(all_ms(&found.e2el), [190, 50]);
    assert_eq!((found.completed, found.failed, found.total_input_tokens, found.total_output_tokens), (2, 0, 20, 5));
    assert!((found.duration_s - 1.05).abs() < 1e-12);
    assert!((found.request_throughput - 2.0 / 1.05).abs() < 1e-12);
    assert!((found.output_throughput - 5.0 / 1.05).abs() < 1e-12);
    assert!((found.total_token_throughput - 25.0 / 1.05).abs() < 1e-12);
    assert!((found.max_output_tokens_per_s - 4.0).abs() < 1e-12);
    assert_eq!(found.max_concurrent_requests, 1);
}

#[test]
fn the_servers_count_of_tokens_decides() {
    let mut several_in_a_chunk = record(0, &[100, 190]);
    several_in_a_chunk.usage = Some(Usage { prompt_tokens: 7, completion_tokens: 10, cached_tokens: Some(4) });
    let found = of(&[several_in_a_chunk]);
    assert_eq!((found.total_output_tokens, found.total_input_tokens, found.total_cached_tokens), (10, 7, Some(4)));
    assert_eq!(all_ms(&found.tpot), [10], "90 ms for nine tokens");
    assert_eq!(all_ms(&found.itl), [90], "a gap between chunks is a gap between chunks");
}

#[test]
fn an_empty_first_chunk_is_the_first_token_of_openais_dialects_and_not_of_sglangs() {
    let mut chat = record(0, &[10, 100, 120]);
    chat.chunks[0].kind = ChunkKind::Choice { has_text: false };
    let mut sglang = Record { api: Api::SglangGenerate, ..chat.clone() };
    for (chunk, tokens) in sglang.chunks.iter_mut().zip([0, 1, 4]) {
        chunk.tokens = Some(tokens);
    }
    assert_eq!(all_ms(&of(&[chat]).ttft), [10]);
    let found = of(&[sglang]);
    assert_eq!(all_ms(&found.ttft), [100]);
    assert_eq!(all_ms(&found.itl), [90, 5, 5, 5, 5], "a gap is divided among the tokens of its chunk");
}

#[test]
fn the_usage_event_ends_a_chat_and_no_completion() {
    let mut answer = record(0, &[100, 120]);
    answer.chunks.push(Chunk { at_ns: 150 * MS, kind: ChunkKind::Usage, tokens: None });
    assert_eq!(all_ms(&of(&[answer.clone()]).e2el), [120]);
    let chat = Record { api: Api::Chat, ..answer };
    let found = of(&[chat]);
    assert_eq!((all_ms(&found.e2el), all_ms(&found.itl)), (vec![150], vec![20]));
}

#[test]
fn what_failed_is_counted_and_has_no_latency() {
    let failed = Record { failure: Some(Failure::Server { message: "x".to_owned() }), ..record(0, &[10, 20]) };
    let cancelled = Record { failure: Some(Failure::Cancelled), ..record(0, &[10]) };
    let found = of(&[failed, cancelled, record(0, &[30, 40])]);
    assert_eq!((found.completed, found.failed, found.cancelled), (1, 1, 1));
    assert_eq!((all_ms(&found.ttft), all_ms(&found.itl)), (vec![30], vec![10]));
    assert_eq!(found.send_lag.len(), 3, "the client's delay is of all that were sent");
}

#[test]
fn latency_from_the_intended_time_has_what_the_cap_held_back() {
    let held = Record { intended_ns: 0, released_ns: 500 * MS, ..record(501, &[100, 110]) };
    let found = of(&[held]);
    assert_eq!((all_ms(&found.ttft), all_ms(&found.ttft_intended)), (vec![100], vec![601]));
    assert_eq!((all_ms(&found.e2el), all_ms(&found.e2el_intended)), (vec![110], vec![611]));
    assert_eq!((all_ms(&found.cap_wait), all_ms(&found.send_lag)), (vec![500], vec![1]));
    assert!(found.kept_schedule());
    assert!(!of(&[Record { released_ns: 0, ..record(3, &[1]) }]).kept_schedule());
}

#[test]
fn goodput_counts_who_keeps_all_bounds() {
    let records = [record(0, &[100, 120, 140]), record(0, &[200, 220, 240]), record(0, &[100, 200, 1000])];
    let good = |bounds: Bounds| {
        let found = metrics(&records, &MetricsRequest { goodput: Some(bounds) });
        (found.request_goodput.unwrap() * found.duration_s).round()
    };
    assert_eq!(good(Bounds::default()), 3.0);
    assert_eq!(good(Bounds { ttft_ms: Some(100.0), ..Bounds::default() }), 2.0);
    assert_eq!(good(Bounds { ttft_ms: Some(100.0), tpot_ms: Some(20.0), ..Bounds::default() }), 1.0);
    assert_eq!(good(Bounds { e2el_ms: Some(139.0), ..Bounds::default() }), 0.0);
    assert_eq!(of(&records).request_goodput, None);
}

#[test]
fn the_steady_part_has_neither_ramp_nor_tail() {
    // Two at a time from 1 s to 9 s, one before and after.
    let records = [record(0, &[10_000]), record(1000, &[4000]), record(5000, &[4000])];
    let steady = of(&records).steady.unwrap();
    assert_eq!(steady.concurrency, 2);
    assert!((steady.start_s - 1.0).abs() < 1e-9 && (steady.duration_s - 8.0).abs() < 1e-9, "{steady:?}");
    assert!((steady.request_throughput - 0.25).abs() < 1e-9, "{steady:?}");
    assert_eq!(of(&[]).steady, None);
}

#[test]
fn of_no_records_nothing_is_said_and_nothing_breaks() {
    let found = of(&[]);
    assert_eq!((found.completed, found.ttft.median_ms(), found.request_throughput), (0, None, 0.0));
}

fn any_record() -> impl Strategy<Value = Record> {
    (0..5000u64, prop::collection::vec(0..2000u64, 1..6)).prop_map(|(sent, mut after)| {
        after.sort_unstable();
        record(sent, &after)
    })
}

proptest! {
    /// The dull model: second by second and request by request.
    #[test]
    fn busiest_seconds_by_counting(records in prop::collection::vec(any_record(), 1..20)) {
        let found = of(&records);
        let first = records.iter().map(|record| record.sent_ns).min().unwrap();
        let second = |at_ns: u64| (at_ns - first) / 1_000_000_000;
        let tokens_in = |wanted| records.iter().flat_map(|it| &it.chunks).filter(|it| second(it.at_ns) == wanted).count();
        let busy_in = |wanted| {
            let covers = |it: &&Record| (second(it.sent_ns)..=second(it.done_ns)).contains(&wanted);
            records.iter().filter(covers).count()
        };
        let most_tokens = (0..10).map(tokens_in).max().unwrap();
        prop_assert!((found.max_output_tokens_per_s - most_tokens as f64).abs() < 1e-9);
        prop_assert_eq!(found.max_concurrent_requests, (0..10).map(busy_in).max().unwrap());
    }

    #[test]
    fn a_request_is_its_first_token_and_its_gaps(one in any_record()) {
        let found = of(std::slice::from_ref(&one));
        let sum = found.ttft.samples().values_ns()[0] + found.itl.samples().values_ns().iter().sum::<u64>();
        prop_assert_eq!(sum, found.e2el.samples().values_ns()[0]);
    }
}
