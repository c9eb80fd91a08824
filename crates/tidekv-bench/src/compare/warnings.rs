//! What makes figures differ whatever the code does.

use serde_json::{Map, Value};

use super::groups::essential;
use crate::host::HostInfo;
use crate::runs::Run;

/// One sentence for each. Commit and date are meant to differ.
pub(super) fn warnings(a: &[Run], b: &[Run], paired: bool) -> Vec<String> {
    let mut warnings = Vec::new();
    for (side, runs) in [("A", a), ("B", b)] {
        if let Some((first, rest)) = runs.split_first() {
            let hosts = rest.iter().map(|run| differing(&comparable_host(&first.host), &comparable_host(&run.host)));
            if let Some(hosts) = hosts.into_iter().find(|hosts| !hosts.is_empty()) {
                warnings.push(format!("the runs of {side} are from different machines or builds: {hosts}"));
            }
        }
        warnings.extend(said_by_all(runs).into_iter().map(|(sentence, run, count)| match count {
            1 => format!("{side}, {}: {sentence}", run.source),
            count => format!("{side}, {count} of {} runs: {sentence}", runs.len()),
        }));
    }
    let (Some(first_a), Some(first_b)) = (a.first(), b.first()) else {
        return warnings;
    };
    if first_a.tool != first_b.tool {
        let tools = format!("{} and {}", first_a.tool, first_b.tool);
        warnings.push(format!(
            "the results are from different tools, {tools}: ITL, and when a clock starts, may mean different things"
        ));
    }
    let hosts = differing(&comparable_host(&first_a.host), &comparable_host(&first_b.host));
    // Others do not say which machine it was, so nothing is known to differ.
    if !hosts.is_empty() && first_a.tool == first_b.tool {
        warnings.push(format!("the results are from different machines or builds: {hosts}"));
    }
    let args = if first_a.tool == first_b.tool {
        differing(&flattened(&first_a.args), &flattened(&first_b.args))
    } else {
        String::new()
    };
    if !args.is_empty() {
        warnings.push(format!("the benchmark ran with different arguments: {args}"));
    }
    warnings.extend(same_mode(a, b));
    warnings.extend(one_after_the_other(a, b).filter(|_| !paired));
    warnings
}

/// Two sides with the same memory compare a server with itself.
fn same_mode(a: &[Run], b: &[Run]) -> Option<String> {
    let mode = a.first()?.kv_mode()?;
    let is_everywhere = a.iter().chain(b).all(|run| run.kv_mode() == Some(mode));
    is_everywhere
        .then(|| format!("both sides ran with kv_mode {mode:?}: this says nothing about elastic memory against static"))
}

/// All of A and then all of B: whatever the machine did meanwhile counts as a difference.
fn one_after_the_other(a: &[Run], b: &[Run]) -> Option<String> {
    if a.len() < 2 || b.len() < 2 {
        return None;
    }
    let dates = |runs: &[Run]| {
        let mut dates: Vec<String> = runs.iter().map(|run| run.date().to_owned()).collect();
        dates.sort();
        Some((dates.first()?.clone(), dates.last()?.clone())).filter(|(first, _)| !first.is_empty())
    };
    let ((a_first, a_last), (b_first, b_last)) = (dates(a)?, dates(b)?);
    let apart = a_last < b_first || b_last < a_first;
    apart.then(|| {
        "the runs of one side all came before those of the other, so a machine that warmed up or slowed down looks \
         like a difference: measure in turns, A B B A"
            .to_owned()
    })
}

/// What some results say against themselves: each sentence once, the first that says it, and how many do.
pub(crate) fn said_by_all<'a>(runs: impl IntoIterator<Item = &'a Run>) -> Vec<(String, &'a Run, usize)> {
    let mut said: Vec<(String, &Run, usize)> = Vec::new();
    for run in runs {
        for sentence in said_by(run) {
            match said.iter_mut().find(|(seen, _, _)| *seen == sentence) {
                Some((_, _, count)) => *count += 1,
                None => said.push((sentence, run, 1)),
            }
        }
    }
    said
}

/// What a result says against itself.
fn said_by(run: &Run) -> impl Iterator<Item = String> {
    let is_partial = run.extra.get("partial").and_then(Value::as_bool) == Some(true);
    let failed = run.number(&["failed"]).filter(|failed| *failed > 0.0);
    let own = run.extra.get("warnings").and_then(Value::as_array).into_iter().flatten();
    let partial = is_partial.then(|| "the run was interrupted, and has what it had measured by then".to_owned());
    let failed = failed.map(|failed| format!("{failed} requests failed, and latencies are those of the others"));
    partial.into_iter().chain(failed).chain(own.filter_map(Value::as_str).map(str::to_owned))
}

fn comparable_host(host: &HostInfo) -> Map<String, Value> {
    let Ok(Value::Object(mut fields)) = serde_json::to_value(host) else {
        return Map::new();
    };
    fields.retain(|field, _| field != "commit" && field != "date");
    fields
}

/// Arguments that say something about the work, each with the path that leads to it: a difference deep inside is named
/// without all that is the same around it.
fn flattened(args: &Map<String, Value>) -> Map<String, Value> {
    fn collect(path: String, value: Value, flat: &mut Map<String, Value>) {
        let inner: Vec<(String, Value)> = match value {
            Value::Object(fields) => fields.into_iter().collect(),
            Value::Array(items) if items.iter().any(Value::is_object) => {
                items.into_iter().enumerate().map(|(index, item)| (index.to_string(), item)).collect()
            }
            leaf => return drop(flat.insert(path, leaf)),
        };
        for (name, value) in inner {
            collect(format!("{path}.{name}"), value, flat);
        }
    }
    let mut flat = Map::new();
    for (name, value) in essential(args) {
        collect(name, value, &mut flat);
    }
    flat
}

/// `cores 2 and 64, gpu null and "H200"`: the fields that differ, each with both values.
fn differing(a: &Map<String, Value>, b: &Map<String, Value>) -> String {
    let keys = a.keys().chain(b.keys().filter(|key| !a.contains_key(*key)));
    let differing = keys.filter(|key| a.get(*key) != b.get(*key));
    let value = |map: &Map<String, Value>, key: &str| map.get(key).map_or("none".to_owned(), Value::to_string);
    let named: Vec<String> = differing.map(|key| format!("{key} {} and {}", value(a, key), value(b, key))).collect();
    named.join(", ")
}
