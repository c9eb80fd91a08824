//! The result file: what is written is what is read, and nothing that is read can panic.

use super::*;
use proptest::prelude::*;
use serde_json::json;

fn example() -> BenchResult {
    let mut result = BenchResult::new("alloc", &json!({"k": [1, 16]}), HostInfo::default()).unwrap();
    result.add_times("k16", &[300, 100, 200].into_iter().collect());
    result.set_figure("alloc_free_ns.k16.p50", 200.5);
    result.set_figure("alloc_free_ns.k16.p99", 300.0);
    result.set_figure("speedup", 2.0);
    result
}

fn parse(text: &str) -> Result<BenchResult, ResultError> {
    BenchResult::parse(text.as_bytes())
}

#[test]
fn what_is_written_is_what_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.json");
    example().write(&path).unwrap();
    assert_eq!(BenchResult::read(&path).unwrap(), example());
}

#[test]
fn dots_open_objects() {
    let summary = Value::Object(example().summary);
    assert_eq!(summary, json!({"alloc_free_ns": {"k16": {"p50": 200.5, "p99": 300.0}}, "speedup": 2.0}));
}

#[test]
#[should_panic(expected = "speedup of summary.speedup.k16 is a figure already")]
fn a_figure_cannot_become_an_object() {
    example().set_figure("speedup.k16", 1.0);
}

#[test]
fn the_text_is_one_field_a_line_and_one_array_a_line() {
    let text = example().to_json().unwrap();
    assert!(text.starts_with("{\n  \"schema\": \"tidekv.bench.v1\",\n  \"name\": \"alloc\",\n"), "{text}");
    assert!(text.contains("\"values\": [300,100,200]\n"), "{text}");
    assert!(text.ends_with("\n}\n"), "{text}");
}

#[test]
fn a_reader_needs_little_and_ignores_what_it_does_not_know() {
    let text = r#"{"schema": "tidekv.bench.v1", "name": "x", "summary": {"a_ns": 1}, "later": [1]}"#;
    let result = parse(text).unwrap();
    assert_eq!((result.name.as_str(), result.samples.len()), ("x", 0));
    assert_eq!(result.host, HostInfo::default());
}

#[test]
fn each_kind_of_bad_file_has_its_own_error() {
    let valid = example().to_json().unwrap();
    let cut_off = parse(&valid[..valid.len() / 2]).unwrap_err();
    assert!(matches!(&cut_off, ResultError::NotJson { reason, .. } if reason.contains("too early")), "{cut_off}");
    assert!(matches!(parse("").unwrap_err(), ResultError::NotJson { reason, .. } if reason.contains("empty")));
    assert!(matches!(parse("not json").unwrap_err(), ResultError::NotJson { line: 1, .. }));
    assert!(matches!(BenchResult::parse(b"\"\xff\""), Err(ResultError::NotJson { .. })));
    assert!(matches!(parse("[1]").unwrap_err(), ResultError::NotAnObject));
    assert!(matches!(parse("{}").unwrap_err(), ResultError::MissingField { field: "schema" }));
    let other = parse(r#"{"schema": "tidekv.bench.v9"}"#).unwrap_err();
    assert!(matches!(other, ResultError::WrongSchema { found } if found == "tidekv.bench.v9"));
    let head = r#"{"schema": "tidekv.bench.v1", "name": "x""#;
    assert!(matches!(parse(&format!("{head}}}")).unwrap_err(), ResultError::MissingField { field: "summary" }));
    let list = parse(&format!("{head}, \"summary\": []}}")).unwrap_err();
    assert!(matches!(list, ResultError::BadField { field: "summary", .. }));
    let bad_series = parse(&format!("{head}, \"summary\": {{}}, \"samples\": {{\"a\": {{}}}}}}")).unwrap_err();
    assert!(matches!(bad_series, ResultError::BadField { field: "samples", .. }));
    assert!(matches!(BenchResult::read(Path::new("/nonexistent/a.json")), Err(ResultError::Read { .. })));
}

#[test]
fn numbers_that_are_none_are_named() {
    for token in ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"] {
        for tail in ["}}", ", \"b\": 1}}", "\n}}"] {
            let text =
                format!("{{\"schema\": \"tidekv.bench.v1\", \"name\": \"x\",\n\"summary\": {{\"a\": {token}{tail}");
            let error = parse(&text).unwrap_err();
            assert!(matches!(&error, ResultError::NotFinite { place } if place.starts_with(token)), "{token}: {error}");
        }
    }
    let text = r#"{"schema": "tidekv.bench.v1", "name": "x", "summary": {"a": [1, {"b": null}]}}"#;
    assert!(matches!(parse(text).unwrap_err(), ResultError::NotFinite { place } if place == "summary.a.1.b"));
}

#[test]
fn a_figure_that_is_not_a_number_is_never_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.json");
    let mut result = example();
    result.set_figure("map_us.p50", f64::NAN);
    let error = result.write(&path).unwrap_err();
    assert!(matches!(error, ResultError::NotFinite { place } if place == "summary.map_us.p50"));
    assert!(!path.exists());
}

#[test]
fn a_long_run_is_thinned_to_fit_and_keeps_its_percentiles() {
    let mut result = example();
    let long: Samples = (0..200_000).map(|i| 1_000_000 + i * 7919 % 100_003).collect();
    result.add_times("long", &long);
    let text = result.to_json().unwrap();
    assert!(text.len() <= MAX_KEPT_BYTES, "{} bytes", text.len());
    assert!(text.len() > MAX_KEPT_BYTES * 9 / 10, "{} bytes: thinned more than needed", text.len());
    let back = parse(&text).unwrap();
    assert!(back.samples["long"].thinned && !back.samples["k16"].thinned);
    assert_eq!(back.samples["long"].percentiles, long.percentiles().unwrap());
    assert_eq!(back.samples["long"].percentiles.count, 200_000);
    assert_eq!(back.samples["k16"].values, [300, 100, 200]);
}

#[test]
fn a_summary_that_cannot_be_kept_is_an_error() {
    let mut result = example();
    for i in 0..60_000 {
        result.set_figure(&format!("a_figure_of_many_{i}"), 1.0);
    }
    assert!(matches!(result.to_json(), Err(ResultError::TooLargeToKeep { .. })));
}

#[test]
fn a_file_beyond_the_bound_is_refused() {
    let bytes = vec![b' '; usize::try_from(MAX_READ_BYTES).unwrap() + 1];
    assert!(matches!(BenchResult::parse(&bytes), Err(ResultError::TooLargeToRead)));
}

#[test]
fn what_stands_besides_is_kept() {
    let mut result = example();
    result.set_more("ttft_p50", 1.5);
    result.set_more("max_concurrency", Value::Null);
    let back = parse(&result.to_json().unwrap()).unwrap();
    assert_eq!(back, result);
    assert_eq!(back.more["max_concurrency"], Value::Null);
}

#[test]
fn a_result_with_every_answer_or_request_may_be_large() {
    for key in ["generated_texts", "pairs"] {
        let mut result = example();
        result.set_more("errors", "x".repeat(MAX_KEPT_BYTES));
        assert!(matches!(result.to_json(), Err(ResultError::TooLargeToKeep { .. })));
        result.set_more(key, Value::Array(Vec::new()));
        assert!(result.to_json().unwrap().len() > MAX_KEPT_BYTES);
    }
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes: Vec<u8>) {
        let _ = BenchResult::parse(&bytes);
    }

    /// Damage anywhere is an error or still a result, and never a panic.
    #[test]
    fn no_damage_panics(at: prop::sample::Index, byte: u8) {
        let mut bytes = example().to_json().unwrap().into_bytes();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let _ = BenchResult::parse(&bytes);
    }

    #[test]
    fn any_samples_round_trip(values in prop::collection::vec(any::<u64>(), 1..100), figure in -1e300..1e300f64) {
        let mut result = example();
        result.add_times("any", &values.iter().copied().collect());
        result.set_figure("any_ns", figure);
        let back = parse(&result.to_json().unwrap()).unwrap();
        prop_assert_eq!(&back.samples["any"].values, &values);
        prop_assert_eq!(back.samples["any"].percentiles.p99, result.samples["any"].percentiles.p99);
        // serde_json reads a float to within one unit in the last place.
        let back = back.summary["any_ns"].as_f64().unwrap();
        prop_assert!((back - figure).abs() <= figure.abs() * 1e-15, "{} became {}", figure, back);
    }
}
