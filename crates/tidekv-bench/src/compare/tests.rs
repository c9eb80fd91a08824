//! Verdicts: which differences count, in which direction, and what they do to the exit code.

use super::*;
use serde_json::json;

fn result(summary: &Value) -> BenchResult {
    let mut result = BenchResult::new("alloc", &json!({"k": [16]}), HostInfo::default()).unwrap();
    result.summary = summary.as_object().unwrap().clone();
    result
}

fn compare(a: &Value, b: &Value, fail_above: Option<&str>) -> Comparison {
    let fail_above = fail_above.map(|text| text.parse().unwrap());
    Comparison::of(&result(a), &result(b), fail_above).unwrap()
}

#[test]
fn a_directed_figure_fails_past_the_threshold_and_a_neutral_one_never() {
    let slower = compare(&json!({"map_us": 100}), &json!({"map_us": 120}), Some("10%"));
    assert!(slower.failed);
    assert_eq!(slower.figures[0].verdict, Verdict::Worse);
    assert!(!compare(&json!({"map_us": 100}), &json!({"map_us": 120}), Some("25%")).failed);
    assert!(!compare(&json!({"map_us": 100}), &json!({"map_us": 80}), Some("10%")).failed);
    assert!(compare(&json!({"blocks_per_s": 100}), &json!({"blocks_per_s": 80}), Some("10%")).failed);
    assert!(!compare(&json!({"pages": 100}), &json!({"pages": 900}), Some("10%")).failed);
}

#[test]
fn without_a_threshold_nothing_fails() {
    let much_slower = compare(&json!({"map_us": 1, "gone_us": 1}), &json!({"map_us": 100}), None);
    assert_eq!(much_slower.figures[0].verdict, Verdict::Worse);
    assert_eq!(much_slower.missing_in_b, ["gone_us"]);
    assert!(!much_slower.failed);
}

#[test]
fn a_figure_that_is_gone_fails_and_a_new_one_does_not() {
    let (fewer, more) = (json!({"a_us": 1}), json!({"a_us": 1, "b": {"pages": 2}}));
    let gone = compare(&more, &fewer, Some("10%"));
    assert!(gone.failed);
    assert_eq!((gone.missing_in_b, gone.missing_in_a.len()), (vec!["b.pages".to_owned()], 0));
    let new = compare(&fewer, &more, Some("10%"));
    assert!(!new.failed);
    assert_eq!(new.missing_in_a, ["b.pages"]);
    assert!(compare(&json!({"a_us": 1}), &json!({"a_us": "1"}), Some("10%")).failed, "a text is no figure");
}

#[test]
fn a_step_from_zero_is_shown_without_a_ratio() {
    let comparison = compare(&json!({"waste_bytes": 0}), &json!({"waste_bytes": 4096}), Some("50%"));
    assert_eq!(comparison.figures[0].ratio, None);
    assert!(comparison.failed);
    assert!(
        comparison.to_text().contains("| waste_bytes |  lower | 0 | 4096 |   - |   worse |"),
        "{}",
        comparison.to_text()
    );
}

#[test]
fn the_text_says_all_of_it() {
    let comparison = compare(&json!({"map_us": 100, "old_us": 1}), &json!({"map_us": 125, "new_us": 1}), Some("10%"));
    let text = comparison.to_text();
    assert!(text.contains("| map_us |  lower | 100 | 125 | 1.250 |   worse |"), "{text}");
    assert!(text.contains("missing in B: old_us\nmissing in A: new_us\n"), "{text}");
    assert!(text.ends_with("FAILED: 1 worse by more than 10 %, 1 missing in B\n"), "{text}");
    let fine = compare(&json!({"map_us": 100}), &json!({"map_us": 101}), Some("10%")).to_text();
    assert!(fine.contains("1 the same within 10 %") && !fine.contains("FAILED"), "{fine}");
}

#[test]
fn another_benchmark_is_refused_by_name() {
    let (a, mut b) = (result(&json!({})), result(&json!({})));
    b.name = "vmm".to_owned();
    let error = Comparison::of(&a, &b, None).unwrap_err().to_string();
    assert!(error.contains("`alloc`") && error.contains("`vmm`"), "{error}");
}

#[test]
fn other_machines_and_arguments_are_pointed_out() {
    let a = result(&json!({}));
    assert!(warnings(&a, &a).is_empty());
    let mut b = a.clone();
    b.host = HostInfo { commit: "other".into(), date: "2030-01-01T00:00:00Z".into(), ..HostInfo::default() };
    assert!(warnings(&a, &b).is_empty(), "commit and date are what a comparison is about");
    b.host = HostInfo { cores: 64, ..HostInfo::default() }.with_gpu("H200", "570");
    b.args.insert("iters".into(), json!(5));
    let warnings = warnings(&a, &b);
    assert!(warnings[0].contains("cores 0 and 64, gpu null and \"H200\", driver null and \"570\""), "{warnings:?}");
    assert!(warnings[1].ends_with("iters none and 5"), "{warnings:?}");
}

#[test]
fn the_json_has_every_figure() {
    let comparison = compare(&json!({"map_us": 100, "zero_us": 0}), &json!({"map_us": 50, "zero_us": 0}), None);
    let value: Value = serde_json::from_str(&comparison.to_json().unwrap()).unwrap();
    assert_eq!(
        value["figures"][0],
        json!({"path": "map_us", "better": "lower", "a": 100.0, "b": 50.0, "ratio": 0.5, "verdict": "better"})
    );
    assert_eq!(value["figures"][1]["ratio"], Value::Null);
    assert_eq!(
        (&value["failed"], &value["fail_above"], &value["name"]),
        (&json!(false), &Value::Null, &json!("alloc"))
    );
}
