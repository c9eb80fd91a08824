//! Where the runs were made: one column for each environment, and who used it.

use serde_json::{Map, Value};

use super::html::{Grid, Html};
use super::plot::axis::Unit;
use super::{run_label, words};
use crate::host::HostInfo;
use crate::runs::Run;
use crate::stats::to_f64;

/// Environments that have a column.
const MAX_COLUMNS: usize = 6;

/// A machine, and what it had installed.
pub(super) struct Environment {
    pub(super) fields: Map<String, Value>,
    runs: Vec<String>,
}

/// The environments of some runs, in the order in which they first appear.
pub(super) fn of(runs: &[&Run]) -> Vec<Environment> {
    let mut found: Vec<Environment> = Vec::new();
    for run in runs {
        let fields = fields(run);
        match found.iter_mut().find(|environment| environment.fields == fields) {
            Some(environment) => environment.runs.push(run_label(run)),
            None => found.push(Environment { fields, runs: vec![run_label(run)] }),
        }
    }
    found
}

/// A table of them.
pub(super) fn html(runs: &[&Run]) -> Html {
    let all = of(runs);
    let shown = &all[..all.len().min(MAX_COLUMNS)];
    let names: Vec<String> = shown.iter().map(|environment| named(&environment.runs, all.len())).collect();
    let mut header = vec!["field"];
    header.extend(names.iter().map(String::as_str));
    let mut grid = Grid::new("Environment", &header);
    let mut keys: Vec<&String> = Vec::new();
    for key in shown.iter().flat_map(|environment| environment.fields.keys()) {
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    for key in keys {
        let cell = |environment: &Environment| environment.fields.get(key).map_or("-".to_owned(), words);
        grid.row([key.clone()].into_iter().chain(shown.iter().map(cell)).collect());
    }
    let mut out = Html::new();
    out.element("h2", &[("id", "environment")], &Html::text("Environment")).push(&grid.html());
    if all.len() > shown.len() {
        let more = all.len() - shown.len();
        out.element("p", &[("class", "note")], &Html::text(format!("{more} more environments are left out.")));
    }
    out
}

fn named(runs: &[String], environments: usize) -> String {
    match runs {
        _ if environments == 1 => "all runs".to_owned(),
        [first, second] => format!("{first}, {second}"),
        [first, rest @ ..] if !rest.is_empty() => format!("{first} and {} more", rest.len()),
        _ => runs.join(", "),
    }
}

/// What the file says about the machine and the server. The date differs from run to run and is in the overview.
fn fields(run: &Run) -> Map<String, Value> {
    let HostInfo { cpu, cores, memory_bytes, kernel, governor, gpu, driver, commit, build, date: _ } = &run.host;
    let text = |value: &str| (!value.is_empty()).then(|| Value::from(value));
    let known = [
        ("GPU", gpu.as_deref().and_then(text)),
        ("driver", driver.as_deref().and_then(text)),
        ("CPU", text(cpu)),
        ("cores", (*cores > 0).then(|| Value::from(*cores))),
        ("memory", (*memory_bytes > 0).then(|| Unit::Bytes.format(to_f64(*memory_bytes)).into())),
        ("kernel", text(kernel)),
        ("governor", governor.as_deref().and_then(text)),
        ("tidekv commit", text(commit)),
        ("build", text(build)),
    ];
    let mut fields: Map<String, Value> =
        known.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect();
    if fields.is_empty() {
        fields.insert("tool".to_owned(), run.tool.to_string().into());
    }
    for key in ["environment", "server_info"] {
        if let Some(Value::Object(more)) = run.extra.get(key) {
            flatten(key, more, &mut fields);
        }
    }
    fields
}

/// Words and numbers of an object by their paths; what is nested deeper is joined by dots.
fn flatten(prefix: &str, object: &Map<String, Value>, fields: &mut Map<String, Value>) {
    for (key, value) in object {
        let is_top = prefix == "environment";
        let path = if is_top { key.clone() } else { format!("{prefix}.{key}") };
        match value {
            Value::Object(inner) => flatten(&path, inner, fields),
            Value::Null => {}
            Value::Array(items) if items.is_empty() => {}
            other => {
                fields.insert(path, other.clone());
            }
        }
    }
}
