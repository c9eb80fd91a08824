//! Results of any tool, which anybody may have made: no bytes panic, what is read can be compared with itself and never
//! differs, and a page of it holds no markup from it.
//!
//! An input is one file, or two with a zero byte between them: the sides of a comparison.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tidekv_bench::compare::judge::Verdict;
use tidekv_bench::compare::{Comparison, Terms};
use tidekv_bench::runs::{Run, parse};

fuzz_target!(|data: &[u8]| {
    let mut files = data.splitn(2, |&byte| byte == 0);
    let Some(first) = files.next().and_then(read) else {
        return;
    };
    // Repeats that agree to the last digit.
    let twice: Vec<Run> = [&first[..1], &first[..1]].concat();
    let same =
        Comparison::of(&twice, &twice, &Terms { may_fail: true, ..Terms::default() }).expect("compared with itself");
    assert!(!same.failed && same.missing_in_a.is_empty() && same.missing_in_b.is_empty());
    assert!(same.figures.iter().all(|figure| figure.verdict == Verdict::NoDifference));
    let Some(second) = files.next().and_then(read) else {
        return;
    };
    let comparison = Comparison::of(&first, &second, &Terms::default());
    if let Ok(comparison) = comparison {
        assert!(!comparison.failed, "a comparison fails only when it is asked to");
        assert!(comparison.to_text().contains(" compared: "));
        comparison.to_json().expect("a comparison is JSON");
    }
});

/// At most a few runs: the bootstrap takes its time.
fn read(bytes: &[u8]) -> Option<Vec<Run>> {
    match parse(bytes) {
        Ok(mut runs) => {
            assert!(!runs.is_empty(), "a file without runs is an error");
            runs.truncate(3);
            Some(runs)
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            None
        }
    }
}
