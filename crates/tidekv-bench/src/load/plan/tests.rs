//! Schedules: the same for a seed, whatever else there is.

use super::*;
use crate::load::data::{Form, RandomData, Vocabulary};
use crate::load::endpoint::{Api, BaseUrl};

fn random(input_tokens: u32) -> Dataset {
    let vocabulary = Vocabulary::default();
    Dataset::Random(RandomData {
        input_tokens,
        output_tokens: 4,
        range_ratio: 0.5,
        prefix_tokens: 0,
        form: Form::Tokens,
        vocabulary,
    })
}

fn stream(name: &str) -> Stream {
    let endpoint = Endpoint::new(BaseUrl::new("127.0.0.1", 1), Api::Completions, "m");
    let arrivals = Arrivals::poisson(50.0);
    Stream { requests: Some(40), arrivals, ..Stream::new(name, endpoint, random(32)) }
}

fn planned(streams: Vec<Stream>) -> Result<Schedule, PlanError> {
    plan(&Scenario { streams }, 7)
}

#[test]
fn a_seed_is_a_schedule_byte_for_byte() {
    let first = planned(vec![stream("a"), stream("b")]).unwrap();
    assert_eq!(format!("{first:?}"), format!("{:?}", planned(vec![stream("a"), stream("b")]).unwrap()));
    let other = plan(&Scenario { streams: vec![stream("a"), stream("b")] }, 8).unwrap();
    assert_ne!(first.digest(), other.digest());
}

/// A change here makes every result incomparable with those before it.
#[test]
fn schedules_are_the_same_for_ever() {
    assert_eq!(planned(vec![stream("a")]).unwrap().digest(), KNOWN);
}

const KNOWN: &str = "2aa1a9c459ada6e8";

#[test]
fn a_stream_does_not_depend_on_its_neighbours() {
    let of_a = |streams| {
        let requests = planned(streams).unwrap().requests.into_iter().filter(|request| request.max_tokens != 99);
        requests.map(|request| (request.at_ns, request.item)).collect::<Vec<_>>()
    };
    let mut neighbour = stream("b");
    neighbour.data = Dataset::Items(vec![Item { output_tokens: Some(99), ..Item::text("x") }]);
    assert_eq!(of_a(vec![stream("a")]), of_a(vec![neighbour, stream("a")]));
}

#[test]
fn streams_are_merged_on_one_clock() {
    let late = Stream { start: Duration::from_secs(100), ..stream("late") };
    let schedule = planned(vec![late, stream("early")]).unwrap();
    assert!(schedule.requests.windows(2).all(|pair| pair[0].at_ns <= pair[1].at_ns));
    assert_eq!((schedule.requests[0].stream, schedule.requests[40].stream), (1, 0));
    assert_eq!(schedule.requests[40].at_ns, 100_000_000_000);
}

#[test]
fn a_duration_ends_a_stream() {
    let timed = Stream {
        requests: None,
        duration: Some(Duration::from_secs(2)),
        arrivals: Arrivals::constant(10.0),
        ..stream("a")
    };
    assert_eq!(planned(vec![timed]).unwrap().requests.len(), 20);
}

#[test]
fn a_trace_keeps_its_times() {
    let item = |seconds| Item { at: Some(Duration::from_secs(seconds)), ..Item::text("x") };
    let data = Dataset::Items(vec![item(30), item(10), item(20)]);
    let trace = Stream { requests: None, data, arrivals: Arrivals::Trace { speed: 10.0 }, ..stream("a") };
    let times = |trace: &Stream| -> Vec<u64> {
        planned(vec![trace.clone()]).unwrap().requests.iter().map(|request| request.at_ns / 1_000_000).collect()
    };
    assert_eq!(times(&trace), [0, 1000, 2000]);
    assert_eq!(times(&Stream { duration: Some(Duration::from_secs(2)), ..trace.clone() }), [0, 1000]);
    let untimed = Stream { data: Dataset::Items(vec![Item::text("x")]), ..trace };
    assert!(matches!(planned(vec![untimed]), Err(PlanError::NoTimes { .. })));
}

#[test]
fn what_cannot_be_planned_is_refused() {
    assert_eq!(planned(vec![]), Err(PlanError::NoStream));
    assert!(matches!(planned(vec![stream("a"), stream("a")]), Err(PlanError::SameName { .. })));
    for (bad, part) in [
        (Stream { data: Dataset::Items(vec![]), ..stream("a") }, "no prompts"),
        (Stream { requests: None, ..stream("a") }, "number of requests or a duration"),
        (Stream { max_concurrency: Some(0), ..stream("a") }, "at least 1"),
        (Stream { requests: Some(MAX_REQUESTS + 1), ..stream("a") }, "more than"),
        (Stream { arrivals: Arrivals::poisson(0.0), ..stream("a") }, "the rate is 0"),
        (
            Stream {
                requests: None,
                duration: Some(Duration::from_secs(1)),
                arrivals: Arrivals::Immediately,
                ..stream("a")
            },
            "or a rate",
        ),
    ] {
        let error = planned(vec![bad]).unwrap_err().to_string();
        assert!(error.contains(part), "{error} lacks {part}");
    }
}
