//! The load library against a mock in the same process: both note times by the same clock, so that what the client measured
//! can be held against what the server did, however busy the machine is.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

use std::num::NonZero;
use std::thread;
use std::time::{Duration, Instant};

use tidekv_bench::load::mock::{Ending, Mock, MockLog, MockRequest, Script, Step, Timing};
use tidekv_bench::load::{
    Api, Arrivals, ChunkKind, Client, Control, Dataset, Failure, Item, Metrics, MetricsRequest, ProbePlan, Record, Run,
    Scenario, Stream, metrics, plan,
};

fn client() -> Client {
    Client::new(NonZero::<usize>::MIN).unwrap()
}

/// Requests `0`, `1`, ... whose prompts are their numbers.
fn numbered(mock: &Mock, api: Api, requests: usize) -> Stream {
    let items = (0..requests).map(|number| Item::text(number.to_string())).collect();
    Stream::new("a", mock.endpoint(api), Dataset::Items(items))
}

fn send(stream: Stream) -> Run {
    send_with(stream, &Control::default())
}

fn send_with(stream: Stream, control: &Control) -> Run {
    client().run(&plan(&Scenario { streams: vec![stream] }, 1).unwrap(), control)
}

fn wait(ms: u64) -> Step {
    Step::Wait(Duration::from_millis(ms))
}

fn tokens(count: u32) -> Step {
    Step::Tokens { text: " token".repeat(count as usize), count }
}

/// Every event of it is written by itself, but for the last: an empty chunk, three tokens and a comment, two tokens, one, and the end.
fn mixed(_: &MockRequest) -> Script {
    Script::new(vec![wait(3), Step::Opening, wait(4), tokens(3), Step::Comment, wait(2), tokens(2), wait(5), tokens(1)])
}

/// The same records with every chunk at the moment at which the mock wrote it. The first write is the head of the answer.
fn as_the_mock_saw_them(run: &Run, log: &[MockLog]) -> Vec<Record> {
    let on_the_clock = |moment: Instant| u64::try_from((moment - run.start).as_nanos()).unwrap();
    let written = |record: &Record| {
        let entry = log.iter().find(|entry| entry.prompt == record.index.to_string()).unwrap();
        let mut record = record.clone();
        let last = entry.writes.len() - 1;
        for (index, chunk) in record.chunks.iter_mut().enumerate() {
            let (before, _) = entry.writes[(index + 1).min(last)];
            assert!(chunk.at_ns >= on_the_clock(before), "a chunk was seen before it was written");
            chunk.at_ns = on_the_clock(before);
        }
        record
    };
    run.records.iter().map(written).collect()
}

/// The medians of all four, in milliseconds.
fn medians(figures: &Metrics) -> [f64; 4] {
    [&figures.ttft, &figures.itl, &figures.tpot, &figures.e2el].map(|times| times.median_ms().unwrap())
}

/// A machine that is busy with other things may hold a thread back for longer than the bound; never every time.
const ROUNDS: usize = 10;

#[test]
fn ttft_itl_tpot_and_e2e_are_within_a_millisecond_of_what_the_server_did() {
    for api in [Api::Completions, Api::Chat, Api::SglangGenerate] {
        let is_close = |_| {
            let mock = Mock::start(mixed).unwrap();
            let run = send(Stream { arrivals: Arrivals::constant(200.0), ..numbered(&mock, api, 40) });
            let truth = as_the_mock_saw_them(&run, &mock.log());
            let [found, truth] = [&run.records, &truth].map(|records| metrics(records, &MetricsRequest::default()));
            assert_eq!((found.completed, found.failed, found.total_output_tokens), (40, 0, 40 * 6));
            let (found, truth) = (medians(&found), medians(&truth));
            found.iter().zip(&truth).all(|(found, truth)| (found - truth).abs() < 1.0)
        };
        assert!((0..ROUNDS).any(is_close), "{api:?}: not within 1 ms in {ROUNDS} rounds");
    }
}

#[test]
fn chunks_are_what_the_server_sent() {
    let mock = Mock::start(mixed).unwrap();
    let record = &send(numbered(&mock, Api::Completions, 1)).records[0];
    let kinds: Vec<ChunkKind> = record.chunks.iter().map(|chunk| chunk.kind).collect();
    let choice = |has_text| ChunkKind::Choice { has_text };
    assert_eq!(kinds, [choice(false), choice(true), choice(true), choice(true), ChunkKind::Usage]);
    assert_eq!((record.output_tokens(), record.input_tokens(), record.status), (6, 1, Some(200)));

    let record = &send(numbered(&mock, Api::SglangGenerate, 1)).records[0];
    let tokens: Vec<Option<u32>> = record.chunks.iter().map(|chunk| chunk.tokens).collect();
    assert_eq!(tokens, [Some(0), Some(3), Some(2), Some(1), Some(0)]);
}

#[test]
fn an_event_that_comes_in_pieces_counts_when_it_is_whole() {
    let mock = Mock::start(|_| {
        let event = "data: {\"choices\":[{\"text\":\"\u{e9}\"}]}\n\n".as_bytes();
        let (first, second) = event.split_at(event.len() - 8);
        Script::new(vec![wait(2), Step::Raw(first.to_vec()), wait(20), Step::Raw(second.to_vec())])
    })
    .unwrap();
    let run = send(Stream { keep_text: true, ..numbered(&mock, Api::Completions, 1) });
    let (record, log) = (&run.records[0], mock.log());
    assert_eq!(record.text.as_deref(), Some("\u{e9}"));
    let (before_the_second, _) = log[0].writes[2];
    assert!(run.start + Duration::from_nanos(record.chunks[0].at_ns) >= before_the_second);
}

fn failing(request: &MockRequest) -> Script {
    let start = vec![wait(1), tokens(1), wait(1), tokens(1)];
    let ending = |ending| Script { ending, ..Script::new(start.clone()) };
    match request.prompt.as_str() {
        "0" => Script::error(503, "overloaded"),
        "1" => Script::new([&start[..], &[Step::Error("out of memory".to_owned())]].concat()),
        "2" => ending(Ending::Disconnect),
        "3" => ending(Ending::Silence),
        "4" => ending(Ending::Stall),
        "5" => Script::new(vec![Step::Raw(b"data: {oops\n\n".to_vec())]),
        "6" => Script::new(vec![Step::Raw(b"data: {\"choices\":[]}\n\n".to_vec())]),
        _ => Script::new(start),
    }
}

#[test]
fn errors_disconnects_and_stalls_are_failures_of_their_kind_and_of_nobody_else() {
    let mock = Mock::start(failing).unwrap();
    let control = Control { request_timeout: Duration::from_secs(2), ..Control::default() };
    let run = send_with(numbered(&mock, Api::Completions, 10), &control);
    assert_eq!(run.records.len(), 10);
    let failure = |index: usize| run.records[index].failure.clone();
    assert_eq!(failure(0), Some(Failure::Status { status: 503, message: "overloaded".to_owned() }));
    assert_eq!(failure(1), Some(Failure::Server { message: "out of memory".to_owned() }));
    assert!(matches!(failure(2), Some(Failure::Disconnected { after, .. }) if after == "after 2 chunks"));
    assert!(matches!(failure(3), Some(Failure::Disconnected { .. })), "a stream without an end is no answer");
    assert_eq!(failure(4), Some(Failure::Timeout { seconds: 2 }));
    assert!(matches!(failure(5), Some(Failure::Malformed { reason }) if reason.contains("oops")));
    assert!(matches!(failure(6), Some(Failure::Malformed { .. })), "no choice at all is no answer");
    for index in 7..10 {
        assert_eq!(failure(index), None);
    }
    let figures = metrics(&run.records, &MetricsRequest::default());
    assert_eq!((figures.completed, figures.failed, figures.ttft.len()), (3, 7, 3));
    assert_eq!(run.records[4].chunks.len(), 2, "what came before a stall is kept");
}

#[test]
fn nobody_listens() {
    let address = Mock::start(mixed).unwrap().base_url();
    // The mock is gone, its port free.
    let mock = Mock::start(mixed).unwrap();
    let mut stream = numbered(&mock, Api::Chat, 1);
    stream.endpoint.base_url = address;
    if stream.endpoint.base_url.port != mock.base_url().port {
        assert!(matches!(send(stream).records[0].failure, Some(Failure::Connect { .. })));
    }
}

/// How many requests were at the server at once, at most.
fn most_at_once(log: &[MockLog]) -> usize {
    let is_there = |entry: &&MockLog, moment| entry.received <= moment && moment < entry.writes.last().unwrap().0;
    let at = |moment| log.iter().filter(|entry| is_there(entry, moment)).count();
    log.iter().map(|entry| at(entry.received)).max().unwrap()
}

#[test]
fn a_cap_holds_and_what_it_holds_back_keeps_its_time() {
    let mock = Mock::start(|_| Script::new(vec![wait(20), tokens(1)])).unwrap();
    let capped = Stream { max_concurrency: Some(3), ..numbered(&mock, Api::Completions, 12) };
    let run = send(Stream { arrivals: Arrivals::constant(1000.0), ..capped });
    assert_eq!(run.records.len(), 12);
    assert!(most_at_once(&mock.log()) <= 3);
    for (nth, record) in (0u64..).zip(&run.records) {
        assert_eq!(record.intended_ns, nth * 1_000_000, "the intended time stays");
        assert!(record.released_ns >= record.intended_ns && record.sent_ns >= record.released_ns);
    }
    let figures = metrics(&run.records, &MetricsRequest::default());
    // The last of four turns of 20 ms each was meant to go after 11 ms.
    assert!(figures.cap_wait.max_ms().unwrap() >= 60.0 - 11.0, "{:?}", figures.cap_wait.max_ms());
    assert!(figures.ttft_intended.max_ms().unwrap() >= figures.ttft.max_ms().unwrap() + 40.0);
}

#[test]
fn in_a_closed_loop_a_request_is_meant_to_go_when_its_place_is_free() {
    let mock = Mock::start(|_| Script::new(vec![wait(5), tokens(1)])).unwrap();
    let run = send(Stream { max_concurrency: Some(2), ..numbered(&mock, Api::Completions, 8) });
    assert!(most_at_once(&mock.log()) <= 2);
    assert!(run.records.iter().all(|record| record.intended_ns == record.released_ns));
    assert!(run.records.iter().filter(|record| record.intended_ns > 0).count() == 6);
}

#[test]
fn connections_are_kept_and_those_that_a_server_closed_are_replaced_without_a_failure() {
    let keeping = Mock::start(|_| Script::new(vec![tokens(1)])).unwrap();
    let client = client();
    let one_at_a_time = |mock: &Mock| Stream { max_concurrency: Some(1), ..numbered(mock, Api::Completions, 6) };
    let run = |mock: &Mock| {
        let schedule = plan(&Scenario { streams: vec![one_at_a_time(mock)] }, 1).unwrap();
        metrics(&client.run(&schedule, &Control::default()).records, &MetricsRequest::default())
    };
    client.warm(&keeping.endpoint(Api::Completions), 1).unwrap();
    let figures = run(&keeping);
    assert_eq!((figures.completed, figures.connects), (6, 0));

    let closing = Mock::start(|_| Script { ending: Ending::Close, ..Script::new(vec![tokens(1)]) }).unwrap();
    let figures = run(&closing);
    assert_eq!((figures.completed, figures.failed, figures.connects), (6, 0, 6));
}

#[test]
fn a_cancelled_run_gives_what_it_has() {
    let mock = Mock::start(|request| match request.ordinal {
        0..3 => Script::new(vec![tokens(1)]),
        _ => Script { ending: Ending::Stall, ..Script::new(vec![tokens(1)]) },
    })
    .unwrap();
    let control = Control::default();
    let stream = Stream { max_concurrency: Some(2), ..numbered(&mock, Api::Completions, 50) };
    let run = thread::scope(|scope| {
        let running = scope.spawn(|| send_with(stream, &control));
        // Three are answered, and two hang: nothing else can happen.
        while mock.arrived() < 5 {
            thread::yield_now();
        }
        control.cancel.cancel();
        running.join().unwrap()
    });
    let figures = metrics(&run.records, &MetricsRequest::default());
    assert!(run.is_partial());
    assert_eq!((figures.completed, figures.failed, figures.cancelled, run.unsent), (3, 0, 2, 45));
}

#[test]
fn streams_to_several_servers_share_a_clock() {
    let [one, two] = [1, 2].map(|count| Mock::start(move |_| Script::new(vec![tokens(count)])).unwrap());
    let at = |mock: &Mock, name: &str, start| Stream {
        name: name.to_owned(),
        start: Duration::from_millis(start),
        arrivals: Arrivals::constant(500.0),
        ..numbered(mock, Api::Chat, 10)
    };
    let scenario = Scenario { streams: vec![at(&one, "one", 10), at(&two, "two", 0)] };
    let run = client().run(&plan(&scenario, 1).unwrap(), &Control::default());
    let of = |stream: usize| run.records.iter().filter(move |record| record.stream == stream);
    assert_eq!((one.log().len(), two.log().len()), (10, 10));
    assert!(of(0).all(|record| record.output_tokens() == 1) && of(1).all(|record| record.output_tokens() == 2));
    assert_eq!(of(0).next().unwrap().intended_ns, 10_000_000);
    assert!(run.records.windows(2).all(|pair| pair[0].intended_ns <= pair[1].intended_ns));
}

#[test]
fn a_probe_runs_beside_the_others_and_is_not_among_them() {
    let mock = Mock::start(|request| match request.prompt.as_str() {
        "probe" => Script::new(vec![tokens(1)]),
        _ => Script::new(vec![wait(200), tokens(1)]),
    })
    .unwrap();
    let probe = ProbePlan {
        stream: Stream::new("probe", mock.endpoint(Api::Completions), Dataset::Items(vec![Item::text("probe")])),
        per_s: 100.0,
    };
    // The client is ready before it begins, and what it sent then had been sent at 0 and was answered in no time.
    let start = Some(Instant::now() + Duration::from_millis(100));
    let control = Control { probe: Some(probe), start, ..Control::default() };
    let run = send_with(numbered(&mock, Api::Completions, 4), &control);
    assert_eq!(run.records.len(), 4);
    assert!(!run.probe.is_empty() && run.probe.iter().all(Record::is_complete));
    let mut sent: Vec<u64> = run.probe.iter().map(|record| record.intended_ns).collect();
    sent.sort_unstable();
    assert!(sent.windows(2).all(|pair| pair[0] < pair[1]), "{sent:?}");
}

#[test]
fn a_key_reaches_the_server_and_so_do_further_fields() {
    let mock = Mock::start(|request| Script::saying(request.body["min_p"].as_str().unwrap_or("nothing"))).unwrap();
    let mut stream = Stream { keep_text: true, ..numbered(&mock, Api::Chat, 1) };
    stream.sampling.extra_body.insert("min_p".to_owned(), "a half".into());
    assert_eq!(send(stream).records[0].text.as_deref(), Some("a half"));
}

#[test]
fn the_mocks_timing_is_as_long_as_the_answer_may_be() {
    let timing = Timing { tokens_per_chunk: 3, ..Timing::IMMEDIATE };
    let mock = Mock::start(move |request| timing.script(request)).unwrap();
    let mut stream = numbered(&mock, Api::Completions, 1);
    stream.sampling.max_tokens = 7;
    let record = &send(stream).records[0];
    assert_eq!((record.output_tokens(), record.chunks.len()), (7, 4));
}
