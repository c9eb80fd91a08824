//! Result files, which anybody may have edited: no bytes panic, what is accepted survives being written and read
//! again, and comparing is fair: a result is never worse than itself, and what got worse one way got better the other.
//!
//! An input is one file, or two with a zero byte between them.

#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use tidekv_bench::compare::figures::of_summary;
use tidekv_bench::compare::judge::{Tolerance, Verdict};
use tidekv_bench::compare::{Comparison, Terms};
use tidekv_bench::result::BenchResult;
use tidekv_bench::runs::Run;

fuzz_target!(|data: &[u8]| {
    let mut files = data.splitn(2, |&byte| byte == 0);
    let Some(first) = files.next().and_then(read) else {
        return;
    };
    let zero: Tolerance = "0".parse().expect("0 is a tolerance");
    let same = compare(&first, &first, Some(zero)).expect("a result can be compared with itself");
    assert!(!same.failed && same.missing_in_a.is_empty() && same.missing_in_b.is_empty() && same.warnings.is_empty());
    assert!(same.figures.iter().all(|figure| figure.verdict == Verdict::Same));
    show(&same);
    let Some(second) = files.next().and_then(read) else {
        return;
    };
    compare_both_ways(&first, &second, zero);
});

/// One run a side. What stands at the top of a file beside the fields of a result is the matter of `foreign`.
fn compare(a: &BenchResult, b: &BenchResult, fail_above: Option<Tolerance>) -> Option<Comparison> {
    let run = |result: &BenchResult| [Run::of_result(result.clone(), serde_json::Map::new())];
    let terms = Terms { tolerance: fail_above, may_fail: fail_above.is_some(), ..Terms::default() };
    Comparison::of(&run(a), &run(b), &terms).ok()
}

fn read(bytes: &[u8]) -> Option<BenchResult> {
    let result = match BenchResult::parse(bytes) {
        Ok(result) => result,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return None;
        }
    };
    let text = result.to_json().unwrap_or_else(|error| panic!("{result:?} cannot be written: {error}"));
    let again = BenchResult::parse(text.as_bytes()).unwrap_or_else(|error| panic!("{text} cannot be read: {error}"));
    let value = |result| serde_json::to_value(result).expect("a result is JSON");
    assert!(is_same(&value(&result), &value(&again)), "{result:?} became {again:?}");
    check_nothing_lost(bytes, &value(&result));
    Some(result)
}

/// Every field of the file that a result has too, at any depth, has the value that stands in the file.
fn check_nothing_lost(bytes: &[u8], read: &Value) {
    fn check(file: &Value, read: &Value) {
        match (file, read) {
            (Value::Object(file), Value::Object(read)) => {
                for (key, read) in read {
                    file.get(key).inspect(|file| check(file, read));
                }
            }
            // A figure may be whole in the file and not in the result.
            (Value::Number(file), Value::Number(read)) => assert_eq!(file.as_f64(), read.as_f64()),
            _ => assert_eq!(file, read),
        }
    }
    check(&serde_json::from_slice(bytes).expect("it was read as JSON"), read);
}

/// Equal, but for the last bits of a number that is not whole: the reader of JSON may round them.
fn is_same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| is_same(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| is_same(a, b)))
        }
        (Value::Number(a), Value::Number(b)) if a.is_f64() && b.is_f64() => {
            let (a, b) = (a.as_f64().unwrap_or(0.0), b.as_f64().unwrap_or(0.0));
            (a - b).abs() <= 1e-14 * a.abs()
        }
        _ => a == b,
    }
}

fn compare_both_ways(first: &BenchResult, second: &BenchResult, tolerance: Tolerance) {
    let there = compare(first, second, Some(tolerance));
    let back = compare(second, first, Some(tolerance));
    let (Some(there), Some(back)) = (there, back) else {
        assert_ne!(first.name, second.name, "results of one benchmark can be compared");
        return;
    };
    assert_eq!(first.name, second.name, "results of two benchmarks cannot be compared");
    show(&there);
    assert_eq!(there.figures.len() + there.missing_in_b.len(), of_summary(&first.summary).len(), "a figure got lost");
    assert_eq!((&there.missing_in_a, &there.missing_in_b), (&back.missing_in_b, &back.missing_in_a));
    let count = |of: &Comparison, verdict| of.figures.iter().filter(|figure| figure.verdict == verdict).count();
    assert_eq!(count(&there, Verdict::Worse), count(&back, Verdict::Better), "worse one way is better the other");
    assert_eq!(count(&there, Verdict::Same), count(&back, Verdict::Same));
    assert_eq!(there.failed, count(&there, Verdict::Worse) > 0 || !there.missing_in_b.is_empty());
    let unasked = compare(first, second, None).expect("compared above");
    assert!(!unasked.failed, "a comparison fails only when it is asked to");
}

fn show(comparison: &Comparison) {
    assert!(comparison.to_text().contains(&format!("{} compared", comparison.figures.len())));
    let json = comparison.to_json().expect("a comparison is JSON");
    let json: Value = serde_json::from_str(&json).expect("a comparison is JSON");
    assert_eq!(json["figures"].as_array().map(Vec::len), Some(comparison.figures.len()));
}
