//! Verdicts: which differences count, in which direction, and what they do to the exit code.

use serde_json::{Map, Value, json};

use super::warnings::warnings;
use super::*;
use crate::host::HostInfo;
use crate::result::BenchResult;
use judge::Verdict;

fn run_of(summary: &Value) -> Run {
    let mut result = BenchResult::new("alloc", &json!({"k": [16]}), HostInfo::default()).unwrap();
    result.summary = summary.as_object().unwrap().clone();
    Run::of_result(result, Map::new())
}

/// Runs of a figure, one for each value.
fn runs_of(figure: &str, values: &[f64]) -> Vec<Run> {
    values.iter().map(|value| run_of(&json!({figure: value}))).collect()
}

fn terms(fail_above: Option<&str>) -> Terms {
    let tolerance = fail_above.map(|text| text.parse().unwrap());
    Terms { tolerance, may_fail: fail_above.is_some(), ..Terms::default() }
}

fn compare(a: &Value, b: &Value, fail_above: Option<&str>) -> Comparison {
    Comparison::of(&[run_of(a)], &[run_of(b)], &terms(fail_above)).unwrap()
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
    let (a, mut b) = (run_of(&json!({})), run_of(&json!({})));
    b.name = "vmm".to_owned();
    let error = Comparison::of(&[a], &[b], &Terms::default()).unwrap_err().to_string();
    assert!(error.contains("`alloc`") && error.contains("`vmm`"), "{error}");
}

#[test]
fn other_machines_and_arguments_are_pointed_out() {
    let a = run_of(&json!({}));
    let warnings = |a: &Run, b: &Run| warnings(std::slice::from_ref(a), std::slice::from_ref(b), false);
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
fn a_result_is_told_on_where_it_tells_on_itself() {
    let mut partial = run_of(&json!({"x_us": 1}));
    partial.extra.insert("partial".into(), json!(true));
    partial.extra.insert("failed".into(), json!(3));
    partial.extra.insert("warnings".into(), json!(["the client was the bottleneck", 7]));
    let all = warnings(&[run_of(&json!({"x_us": 1}))], &[partial], false).join("\n");
    for part in ["interrupted", "3 requests failed", "the client was the bottleneck"] {
        assert!(all.contains(part), "{all}");
    }
    assert!(all.lines().all(|line| line.starts_with("B, ")), "{all}");
}

#[test]
fn two_sides_of_one_kv_mode_are_a_server_and_itself() {
    let with_mode = |mode: &str| {
        let mut run = run_of(&json!({}));
        run.extra.insert("kv_mode".into(), json!(mode));
        [run]
    };
    let said = |a: &[Run], b: &[Run]| warnings(a, b, false).join(" ").contains("kv_mode");
    assert!(said(&with_mode("elastic"), &with_mode("elastic")));
    assert!(!said(&with_mode("elastic"), &with_mode("static")));
    assert!(!said(&with_mode("elastic"), &[run_of(&json!({}))]), "what is not known is not the same");
}

#[test]
fn sides_that_were_measured_one_after_the_other_are_pointed_out() {
    let at = |hours: &[u32]| -> Vec<Run> {
        let run = |hour: &u32| {
            let mut run = run_of(&json!({"x_us": 1}));
            run.host.date = format!("2030-01-01T{hour:02}:00:00Z");
            run
        };
        hours.iter().map(run).collect()
    };
    let said = |a: &[u32], b: &[u32]| warnings(&at(a), &at(b), false).join(" ").contains("A B B A");
    assert!(said(&[1, 2], &[3, 4]) && said(&[3, 4], &[1, 2]));
    assert!(!said(&[1, 4], &[2, 3]) && !said(&[1], &[2]));
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

#[test]
fn several_runs_have_intervals_and_their_verdicts() {
    let a = runs_of("map_us", &[100.0, 101.0, 99.0, 100.5, 99.5]);
    let slower = runs_of("map_us", &[110.0, 111.0, 109.0, 110.5, 109.5]);
    let comparison = Comparison::of(&a, &slower, &Terms::default()).unwrap();
    assert_eq!((comparison.runs, comparison.tolerance, comparison.confidence), ([5, 5], 0.03, Some(0.95)));
    let figure = &comparison.figures[0];
    assert_eq!((figure.verdict, figure.a, figure.b, figure.ratio), (Verdict::Worse, 100.0, 110.0, Some(1.1)));
    let evidence = figure.evidence.unwrap();
    let interval = evidence.interval.unwrap();
    assert!(interval.low > 1.08 && interval.high < 1.12 && evidence.p_value < 0.01, "{evidence:?}");
    let text = comparison.to_text();
    assert!(text.starts_with("alloc: B over A, medians of 5 and 5 runs\n"), "{text}");
    assert!(text.contains(" 95 % interval |") && text.contains(" to 1.1"), "{text}");

    let back = Comparison::of(&slower, &a, &Terms::default()).unwrap();
    assert_eq!(back.figures[0].verdict, Verdict::Better);
    let same = Comparison::of(&a, &runs_of("map_us", &[100.2, 99.8, 100.9, 99.1, 100.1]), &Terms::default()).unwrap();
    assert_eq!(same.figures[0].verdict, Verdict::NoDifference);
}

#[test]
fn what_is_underpowered_is_no_pass_and_says_what_it_takes() {
    let few = runs_of("map_us", &[100.0, 101.0, 99.0]);
    let comparison = Comparison::of(&few, &runs_of("map_us", &[100.0, 100.4, 99.4]), &terms(Some("5%"))).unwrap();
    assert_eq!(comparison.figures[0].verdict, Verdict::Underpowered, "3 runs a side show nothing at 95 %");
    assert!(comparison.failed);
    let text = comparison.to_text();
    assert!(text.contains("5 % takes about 4 runs a side"), "{text}");
    assert!(text.ends_with("FAILED: 1 may be worse by more than 5 %, 0 missing in B\n"), "{text}");

    let noisy = [80.0, 130.0, 95.0, 110.0, 100.0, 70.0];
    let wide = Comparison::of(&runs_of("map_us", &noisy), &runs_of("map_us", &noisy), &terms(Some("5%"))).unwrap();
    assert!(wide.failed && wide.figures[0].verdict == Verdict::Underpowered);
    // Far better and very noisy is still shown to be no worse.
    let better =
        Comparison::of(&runs_of("map_us", &noisy), &runs_of("map_us", &noisy.map(|v| v / 3.0)), &terms(Some("5%")));
    let better = better.unwrap();
    assert!(!better.failed && better.figures[0].verdict == Verdict::Better);
    // And what says no direction never fails.
    assert!(!Comparison::of(&runs_of("pages", &noisy), &runs_of("pages", &noisy), &terms(Some("5%"))).unwrap().failed);
}

#[test]
fn counts_that_all_runs_agree_on_need_no_noise() {
    let pages = |value: f64| runs_of("held_bytes", &[value; 2]);
    let verdict = |a, b| Comparison::of(&pages(a), &pages(b), &Terms::default()).unwrap().figures[0].verdict;
    assert_eq!(verdict(4096.0, 4096.0), Verdict::NoDifference);
    assert_eq!(verdict(4096.0, 8192.0), Verdict::Worse);
    assert_eq!(verdict(0.0, 4096.0), Verdict::Worse);
}

#[test]
fn figures_without_a_ratio_have_a_difference() {
    let a = runs_of("lag_ms", &[0.0, 0.1, 0.0, 0.2, 0.1]);
    let b = runs_of("lag_ms", &[5.0, 5.1, 5.2, 5.1, 5.0]);
    let figure = Comparison::of(&a, &b, &Terms::default()).unwrap().figures.remove(0);
    let evidence = figure.evidence.unwrap();
    assert!(evidence.is_difference && evidence.interval.unwrap().low > 4.0, "{evidence:?}");
    assert_eq!(figure.verdict, Verdict::Worse);
}

#[test]
fn pairs_see_through_what_moved_both() {
    let hours = [100.0, 112.0, 125.0, 141.0, 160.0, 190.0, 230.0, 281.0];
    let a = runs_of("map_us", &hours);
    let b: Vec<f64> = hours.iter().enumerate().map(|(i, hour)| hour * if i % 2 == 0 { 1.049 } else { 1.051 }).collect();
    let b = runs_of("map_us", &b);
    let apart = Comparison::of(&a, &b, &Terms::default()).unwrap();
    assert_eq!(apart.figures[0].verdict, Verdict::Underpowered);
    let paired = Terms { paired: true, ..Terms::default() };
    assert_eq!(Comparison::of(&a, &b, &paired).unwrap().figures[0].verdict, Verdict::Worse);
    let error = Comparison::of(&a, &b[..3], &paired).unwrap_err().to_string();
    assert!(error.contains("8 and 3"), "{error}");
}

#[test]
fn only_what_is_asked_for() {
    let (a, b) = (run_of(&json!({"map_us": 1, "gone_us": 1})), run_of(&json!({"map_us": 1, "unmap_us": 1})));
    let only = Terms { only: vec!["map_".into()], ..terms(Some("5%")) };
    let comparison = Comparison::of(&[a], &[b], &only).unwrap();
    assert_eq!((comparison.figures.len(), comparison.missing_in_b.len(), comparison.failed), (1, 0, false));
}
