//! Which runs are repeats of each other, and what to call them: the columns of tables and the lines of plots.
//!
//! Runs of a server differ in how it kept its memory, in their label and in their rate; those of other benchmarks in
//! their arguments. What is left are repeats, whose measurements belong together.

use std::path::Path;

use serde_json::Value;

use super::{run_label, words};
use crate::compare::workload;
use crate::runs::Run;

/// Repeats of one measurement.
pub(super) struct Variant<'a> {
    /// What it is called among the others.
    pub(super) label: String,
    /// The rate at which requests were sent, where there is one.
    pub(super) rate: Option<f64>,
    /// At least one.
    pub(super) runs: Vec<&'a Run>,
}

/// The variants among some runs of one benchmark, in the order in which they first appear.
pub(super) fn of<'a>(runs: &[&'a Run]) -> Vec<Variant<'a>> {
    let rates_differ = runs.windows(2).any(|pair| rate_words(pair[0]) != rate_words(pair[1]));
    let mut found: Vec<(String, Variant<'a>)> = Vec::new();
    for run in runs {
        let (key, label) = if run.is_serving() {
            let mut label = arm(run, runs);
            if let (true, Some(rate)) = (rates_differ, rate_words(run)) {
                label += &format!(", rate {rate}");
            }
            (label.clone(), label)
        } else {
            (format!("{}: {}", folder(run), workload(run)), run_label(run))
        };
        match found.iter_mut().find(|(seen, _)| *seen == key) {
            Some((_, variant)) => variant.runs.push(run),
            None => found.push((key, Variant { label, rate: rate(run), runs: vec![run] })),
        }
    }
    let mut variants: Vec<Variant<'a>> = found.into_iter().map(|(_, variant)| variant).collect();
    for variant in variants.iter_mut().filter(|variant| variant.runs.len() > 1 && !variant.runs[0].is_serving()) {
        variant.label += &format!(" and {} repeats", variant.runs.len() - 1);
    }
    // One server, measured again and again, has no better names than those of its files.
    if let [only] = &variants[..]
        && only.runs.len() > 1
    {
        return runs.iter().map(|run| Variant { label: run_label(run), rate: rate(run), runs: vec![run] }).collect();
    }
    variants
}

/// What a run of a server is called among others: how it kept its memory, under which label, by which tool.
pub(super) fn arm(run: &Run, runs: &[&Run]) -> String {
    let label = run.args.get("label").or_else(|| run.extra.get("label")).and_then(Value::as_str);
    let several_tools = runs.iter().any(|other| other.tool != run.tool);
    let tool = several_tools.then(|| run.tool.to_string());
    let parts = [run.kv_mode().map(str::to_owned), label.map(str::to_owned), tool];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    match (parts.is_empty(), folder(run)) {
        (false, _) => parts.join(", "),
        (true, folder) if folder.is_empty() => "all runs".to_owned(),
        (true, folder) => folder,
    }
}

/// The rate of a run, as a number.
pub(super) fn rate(run: &Run) -> Option<f64> {
    rate_value(run).and_then(Value::as_f64)
}

/// The rate of a run as its file has it, which may be `inf`.
pub(super) fn rate_words(run: &Run) -> Option<String> {
    let whole = |rate: f64| if rate.fract() == 0.0 { format!("{rate:.0}") } else { rate.to_string() };
    rate_value(run).filter(|rate| !rate.is_null()).map(|value| value.as_f64().map_or_else(|| words(value), whole))
}

fn rate_value(run: &Run) -> Option<&Value> {
    run.args.get("request_rate").or_else(|| run.extra.get("request_rate"))
}

/// The folder of a run, as seen from that of the page.
fn folder(run: &Run) -> String {
    run.source.path.parent().map(Path::display).map(|folder| folder.to_string()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostInfo;
    use crate::result::BenchResult;
    use serde_json::json;

    fn run(name: &str, file: &str, args: &Value, extra: &Value) -> Run {
        let result = BenchResult::new(name, args, HostInfo::default()).unwrap();
        let mut run = Run::of_result(result, extra.as_object().unwrap().clone());
        run.source.path = file.into();
        run
    }

    fn labels(runs: &[Run]) -> Vec<(String, usize)> {
        let runs: Vec<&Run> = runs.iter().collect();
        of(&runs).into_iter().map(|variant| (variant.label, variant.runs.len())).collect()
    }

    #[test]
    fn servers_by_memory_and_rate() {
        let at = |rate: f64, mode: &str, file: &str| {
            let extra = json!({"kv_mode": mode, "request_throughput": 1.0, "duration": 1.0, "completed": 1});
            run("serve", file, &json!({"request_rate": rate}), &extra)
        };
        let runs = [
            at(8.0, "static", "a.json"),
            at(8.0, "static", "b.json"),
            at(8.0, "elastic", "c.json"),
            at(16.0, "elastic", "d.json"),
        ];
        assert_eq!(
            labels(&runs),
            [("static, rate 8".into(), 2), ("elastic, rate 8".into(), 1), ("elastic, rate 16".into(), 1)]
        );
        assert_eq!(
            labels(&runs[..2]),
            [("a".into(), 1), ("b".into(), 1)],
            "repeats of one thing have the names of their files"
        );
    }

    #[test]
    fn others_by_arguments_and_folder() {
        let at = |pages: u32, file: &str| run("vmm", file, &json!({"pages": pages}), &json!({}));
        let runs = [at(4, "before/1.json"), at(4, "before/2.json"), at(4, "after/1.json"), at(8, "after/2.json")];
        assert_eq!(labels(&runs), [("before/1 and 1 repeats".into(), 2), ("after/1".into(), 1), ("after/2".into(), 1)]);
    }
}
