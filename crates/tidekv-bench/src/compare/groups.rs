//! Which runs belong together, when a side has several.
//!
//! ```text
//!   A: rate8.json rate8-again.json rate16.json      B: x.jsonl, three lines
//!            │ what was measured, without what only names a run
//!            ▼
//!   {serve, rate 8}: 2 runs   {serve, rate 16}: 1 run        the same on the other side, and the two are paired
//! ```
//!
//! Runs are repeats of each other when they are of one benchmark and one set of arguments; where to, from which seed
//! and under which label is no part of it. One workload that is left on each side is a pair too, whatever its
//! arguments: the comparison then says how they differ.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use crate::runs::Run;

/// Arguments that differ between repeats, or between the sides of an A/B comparison, and say nothing about the work.
const INCIDENTAL: [&str; 21] = [
    "a_cmd",
    "api_key",
    "append_result",
    "b_cmd",
    "base_url",
    "cooldown",
    "cooldown_s",
    "csv",
    "endpoint",
    "host",
    "json",
    "kv",
    "kv_mode",
    "label",
    "metadata",
    "output",
    "port",
    "quiet",
    "seed",
    "tokenizer_id",
    "url",
];

/// What a result of a server under load says about the work at its top, as `vllm bench serve` does.
const SERVED: [&str; 6] =
    ["model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency", "ramp_up_strategy"];

/// Most facts within lists that a label names.
const MOST_NESTED: usize = 3;

/// Repeats of one measurement on both sides.
#[derive(Debug, Default)]
pub(super) struct Pair {
    /// What to call it.
    pub(super) label: String,
    pub(super) a: Vec<Run>,
    pub(super) b: Vec<Run>,
}

/// All pairs, and what only one side has.
#[derive(Debug, Default)]
pub(super) struct Pairs {
    pub(super) pairs: Vec<Pair>,
    pub(super) missing_in_a: Vec<String>,
    pub(super) missing_in_b: Vec<String>,
}

/// Pairs files of the same name: what two folders of different benchmarks hold.
pub(super) fn by_file(a: Vec<Run>, b: Vec<Run>) -> Pairs {
    let named = |runs: Vec<Run>| -> BTreeMap<String, Run> {
        // `x.json` and `x.jsonl` are two.
        let labels = each_once(runs.iter().map(stem).collect());
        labels.into_iter().zip(runs).collect()
    };
    let (a, mut b) = (named(a), named(b));
    let mut pairs = Pairs::default();
    for (label, run) in a {
        match b.remove(&label) {
            Some(other) => pairs.pairs.push(Pair { label, a: vec![run], b: vec![other] }),
            None => pairs.missing_in_b.push(label),
        }
    }
    pairs.missing_in_a.extend(b.into_keys());
    pairs
}

/// Pairs repeats of the same measurement.
pub(super) fn by_workload(a: Vec<Run>, b: Vec<Run>) -> Pairs {
    let (a, mut b) = (grouped(a), grouped(b));
    let mut pairs = Pairs::default();
    let mut alone = Vec::new();
    for group in a {
        match b.iter().position(|other| other.key == group.key) {
            Some(place) => pairs.pairs.push(Pair { label: String::new(), a: group.runs, b: b.remove(place).runs }),
            None => alone.push(group),
        }
    }
    let is_same_benchmark = |a: &Group, b: &Group| a.key.0 == b.key.0;
    if alone.len() == 1 && b.len() == 1 && is_same_benchmark(&alone[0], &b[0]) {
        let (a, b) = (alone.remove(0), b.remove(0));
        pairs.pairs.push(Pair { label: String::new(), a: a.runs, b: b.runs });
    }
    let of_pairs = pairs.pairs.iter().map(|pair| &pair.a);
    let groups = of_pairs.chain(alone.iter().chain(&b).map(|group| &group.runs));
    let mut labels = labels(&groups.filter_map(|runs| runs.first()).collect::<Vec<_>>()).into_iter();
    for (pair, label) in pairs.pairs.iter_mut().zip(labels.by_ref()) {
        pair.label = label;
    }
    pairs.missing_in_b = labels.by_ref().take(alone.len()).collect();
    pairs.missing_in_a = labels.collect();
    pairs
}

/// Whether some of these runs are repeats.
pub(super) fn has_repeats(runs: &[Run]) -> bool {
    let mut keys: Vec<_> = runs.iter().map(key).collect();
    keys.sort();
    keys.windows(2).any(|pair| pair[0] == pair[1])
}

struct Group {
    key: (String, String),
    runs: Vec<Run>,
}

/// In the order in which they first appear.
fn grouped(runs: Vec<Run>) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for run in runs {
        let key = key(&run);
        match groups.iter_mut().find(|group| group.key == key) {
            Some(group) => group.runs.push(run),
            None => groups.push(Group { key, runs: vec![run] }),
        }
    }
    groups
}

/// The benchmark, and what was measured.
fn key(run: &Run) -> (String, String) {
    (run.name.clone(), workload(run))
}

/// What was measured, in a fixed order, without what only names a run: the same for all repeats.
pub(crate) fn workload(run: &Run) -> String {
    let facts: Vec<String> = facts(run).iter().map(|(name, value)| format!("{name}={value}")).collect();
    facts.join(" ")
}

/// The arguments, and for a server under load what its file says at the top.
fn facts(run: &Run) -> BTreeMap<String, Value> {
    let at_the_top = SERVED.iter().filter(|_| run.is_serving()).filter_map(|name| Some((*name, run.extra.get(*name)?)));
    let mut facts: BTreeMap<String, Value> = at_the_top.map(|(name, value)| (name.to_owned(), value.clone())).collect();
    facts.extend(essential(&run.args));
    facts.retain(|_, value| !value.is_null());
    facts
}

/// Arguments that say something about the work, at any depth.
pub(super) fn essential(args: &Map<String, Value>) -> Map<String, Value> {
    fn cleaned(value: &Value) -> Value {
        match value {
            Value::Object(fields) => Value::Object(essential(fields)),
            Value::Array(items) => Value::Array(items.iter().map(cleaned).collect()),
            other => other.clone(),
        }
    }
    let kept = args.iter().filter(|(name, _)| !INCIDENTAL.contains(&name.as_str()));
    kept.map(|(name, value)| (name.clone(), cleaned(value))).collect()
}

/// A name for each workload, told apart from others of its benchmark by as few facts as do it: `serve, request_rate 8`.
fn labels(workloads: &[&Run]) -> Vec<String> {
    let facts: Vec<(&str, BTreeMap<String, Value>)> =
        workloads.iter().map(|run| (run.name.as_str(), leaves(run))).collect();
    let short = facts.iter().map(|one| label(one, &facts, 0)).collect::<Vec<_>>();
    if short.iter().collect::<BTreeSet<_>>().len() == short.len() {
        return short;
    }
    each_once(facts.iter().map(|one| label(one, &facts, MOST_NESTED)).collect())
}

/// With the facts that are not the same in all of a benchmark; of those within lists so many at most.
fn label(
    (name, own): &(&str, BTreeMap<String, Value>),
    all: &[(&str, BTreeMap<String, Value>)],
    most_nested: usize,
) -> String {
    let peers = || all.iter().filter(|(other, _)| other == name).map(|(_, facts)| facts);
    let names: BTreeSet<&String> = peers().flat_map(BTreeMap::keys).collect();
    let varying = names.into_iter().filter(|&name| peers().any(|other| other.get(name) != own.get(name)));
    let (nested, plain): (Vec<&String>, Vec<&String>) = varying.partition(|name| name.contains('.'));
    let said = |name: &&String| match own.get(*name) {
        Some(value) => format!(", {name} {}", words(value)),
        None => format!(", no {name}"),
    };
    (*name).to_owned() + &plain.iter().chain(nested.iter().take(most_nested)).map(said).collect::<String>()
}

/// Names that come again are counted: nothing that was measured may stand in for another.
fn each_once(names: Vec<String>) -> Vec<String> {
    let mut known = BTreeSet::new();
    let once = |name: String| {
        let mut candidates = std::iter::once(name.clone()).chain((2..).map(|nth| format!("{name} ({nth})")));
        let free = candidates.find(|candidate| !known.contains(candidate)).unwrap_or(name);
        known.insert(free.clone());
        free
    };
    names.into_iter().map(once).collect()
}

/// The facts that are no lists, and what stands in lists by its place: `streams.0.duration_s`.
fn leaves(run: &Run) -> BTreeMap<String, Value> {
    fn walk(path: String, value: Value, found: &mut BTreeMap<String, Value>) {
        match value {
            Value::Object(fields) => {
                fields.into_iter().for_each(|(name, value)| walk(format!("{path}.{name}"), value, found));
            }
            Value::Array(items) => {
                (0..).zip(items).for_each(|(place, value): (usize, _)| walk(format!("{path}.{place}"), value, found));
            }
            leaf => drop(found.insert(path, leaf)),
        }
    }
    let mut found = BTreeMap::new();
    facts(run).into_iter().for_each(|(name, value)| walk(name, value, &mut found));
    found
}

fn words(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn stem(run: &Run) -> String {
    let stem = run.source.path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    run.source.entry.map_or(stem.clone(), |entry| format!("{stem}-{entry}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostInfo;
    use crate::result::BenchResult;
    use serde_json::json;

    fn run(name: &str, file: &str, args: &Value) -> Run {
        let mut run = Run::of_result(BenchResult::new(name, args, HostInfo::default()).unwrap(), Map::new());
        run.source.path = file.into();
        run
    }

    fn shape(pairs: &Pairs) -> Vec<(&str, usize, usize)> {
        pairs.pairs.iter().map(|pair| (pair.label.as_str(), pair.a.len(), pair.b.len())).collect()
    }

    #[test]
    fn repeats_are_those_of_one_workload() {
        let at =
            |rate: u32, seed: u32| run("serve", "x.json", &json!({"request_rate": rate, "seed": seed, "port": seed}));
        assert!(!has_repeats(&[at(8, 1), at(16, 1)]));
        assert!(has_repeats(&[at(8, 1), at(16, 1), at(8, 2)]));
        let pairs = by_workload(vec![at(8, 1), at(16, 1), at(8, 2)], vec![at(16, 5), at(16, 6), at(8, 5), at(32, 5)]);
        assert_eq!(shape(&pairs), [("serve, request_rate 8", 2, 1), ("serve, request_rate 16", 1, 2)]);
        assert_eq!((pairs.missing_in_a, pairs.missing_in_b), (vec!["serve, request_rate 32".to_owned()], vec![]));
    }

    #[test]
    fn where_a_server_listens_is_no_part_of_the_work() {
        let at = |port: u32, rate: f64| {
            let args = json!({"streams": [{"url": format!("http://127.0.0.1:{port}"), "arrivals": format!("{rate} a second")}]});
            let mut run = run("serve", "x.json", &args);
            run.serving.insert("completed".into(), json!(1));
            run.extra.insert("request_rate".into(), json!(rate));
            run
        };
        let pairs = by_workload(vec![at(1, 8.0), at(1, 16.0)], vec![at(2, 8.0), at(2, 16.0)]);
        assert_eq!(shape(&pairs), [("serve, request_rate 8.0", 1, 1), ("serve, request_rate 16.0", 1, 1)]);
    }

    #[test]
    fn one_workload_that_is_left_on_each_side_is_a_pair() {
        let (a, b) = (run("vmm", "a.json", &json!({"pages": 4})), run("vmm", "b.json", &json!({"pages": 8})));
        assert_eq!(shape(&by_workload(vec![a.clone(), a.clone()], vec![b.clone(), b])), [("vmm", 2, 2)]);
        let other = run("alloc", "b.json", &json!({}));
        let pairs = by_workload(vec![a], vec![other]);
        assert!(pairs.pairs.is_empty());
        assert_eq!((pairs.missing_in_a, pairs.missing_in_b), (vec!["alloc".to_owned()], vec!["vmm".to_owned()]));
    }

    #[test]
    fn workloads_that_differ_within_a_list_have_a_label_each() {
        let at = |blocks: u32, seconds: u32| {
            run("serve", "x.json", &json!({"blocks": [blocks], "streams": [{"name": "a", "duration_s": seconds}]}))
        };
        let runs = || vec![at(1, 10), at(1000, 10), at(1000, 20)];
        let pairs = by_workload(runs(), runs());
        let labels: Vec<&str> = shape(&pairs).into_iter().map(|(label, ..)| label).collect();
        assert_eq!(
            labels,
            [
                "serve, blocks.0 1, streams.0.duration_s 10",
                "serve, blocks.0 1000, streams.0.duration_s 10",
                "serve, blocks.0 1000, streams.0.duration_s 20"
            ]
        );
    }

    #[test]
    fn a_fact_that_only_some_have_tells_them_apart() {
        let (plain, capped) = (run("serve", "x.json", &json!({})), run("serve", "x.json", &json!({"cap": 4})));
        let pairs = by_workload(vec![plain.clone(), capped.clone()], vec![plain, capped]);
        assert_eq!(shape(&pairs), [("serve, no cap", 1, 1), ("serve, cap 4", 1, 1)]);
    }

    #[test]
    fn no_name_stands_twice() {
        let names = ["x", "y", "x", "x (2)", "x"].map(str::to_owned).to_vec();
        assert_eq!(each_once(names), ["x", "y", "x (2)", "x (2) (2)", "x (3)"]);
    }

    #[test]
    fn files_are_paired_by_name() {
        let (x, y, z) =
            (run("a", "p/x.json", &json!({})), run("b", "p/y.json", &json!({})), run("b", "q/z.json", &json!({})));
        let pairs = by_file(vec![x.clone(), y], vec![z, x]);
        assert_eq!(shape(&pairs), [("x", 1, 1)]);
        assert_eq!((pairs.missing_in_a, pairs.missing_in_b), (vec!["z".to_owned()], vec!["y".to_owned()]));
    }
}
