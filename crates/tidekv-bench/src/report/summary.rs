//! The figures under `summary`: single numbers in one table, lists of objects in one of their own.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::html::{Grid, Html};
use super::{run_label, variants};
use crate::compare::direction;
use crate::compare::figures;
use crate::runs::Run;
use crate::statistics::median;
use crate::table::format_figure;

/// Columns of a list.
const MAX_KEYS: usize = 24;

/// Columns of a table: more would be read by nobody.
const MAX_COLUMNS: usize = 10;

/// All figures of some runs of one benchmark.
pub(super) fn html(runs: &[&Run]) -> Html {
    let mut out = Html::new();
    let grid = numbers(runs);
    if !grid.rows.is_empty() {
        out.element("h3", &[], &Html::text("Figures")).push(&grid.fitting("All figures"));
    }
    for run in runs.iter().take(MAX_COLUMNS) {
        for (path, rows) in lists(&run.summary) {
            let caption = if runs.len() > 1 { format!("{}: {path}", run_label(run)) } else { path };
            out.push(&list(&caption, &rows).fitting(&caption));
        }
    }
    out
}

/// A row for each figure that is not in a list, a column for each variant: the median of its repeats.
fn numbers(runs: &[&Run]) -> Grid {
    let variants = variants::of(runs);
    let mut places: HashMap<Vec<String>, usize> = HashMap::new();
    let mut rows: Vec<(Vec<String>, Vec<Vec<f64>>)> = Vec::new();
    for (column, variant) in variants.iter().enumerate() {
        for figure in variant.runs.iter().flat_map(|run| figures::of_summary(&without_lists(&run.summary))) {
            let row = *places.entry(figure.path.clone()).or_insert_with(|| {
                rows.push((figure.path, vec![Vec::new(); variants.len()]));
                rows.len() - 1
            });
            rows[row].1[column].push(figure.value);
        }
    }
    let shown = variants.len().min(MAX_COLUMNS);
    let mut header = vec!["figure", "better"];
    header.extend(variants[..shown].iter().map(|variant| variant.label.as_str()));
    let repeats = if variants.iter().any(|variant| variant.runs.len() > 1) { ", medians of repeats" } else { "" };
    let left_out =
        if variants.len() > shown { format!(", first {shown} of {}", variants.len()) } else { String::new() };
    let mut grid = Grid::new(format!("Figures of the summary{repeats}{left_out}"), &header);
    for (path, values) in rows {
        let mut row = vec![path.join("."), direction::of_path(&path).to_string()];
        row.extend(values[..shown].iter().map(|values| median(values).map_or("-".to_owned(), format_figure)));
        grid.row(row);
    }
    grid
}

/// What is left of an object when lists of objects, at any depth, are taken out.
fn without_lists(fields: &Map<String, Value>) -> Map<String, Value> {
    let kept = fields.iter().filter(|(_, value)| objects(value).is_none()).map(|(key, value)| {
        let value = match value {
            Value::Object(inner) => Value::Object(without_lists(inner)),
            other => other.clone(),
        };
        (key.clone(), value)
    });
    kept.collect()
}

/// All lists of objects with the paths that lead to them.
fn lists(fields: &Map<String, Value>) -> Vec<(String, Vec<&Map<String, Value>>)> {
    let mut found = Vec::new();
    for (key, value) in fields {
        if let Some(rows) = objects(value) {
            found.push((key.clone(), rows));
        } else if let Value::Object(inner) = value {
            found.extend(lists(inner).into_iter().map(|(path, rows)| (format!("{key}.{path}"), rows)));
        }
    }
    found
}

fn objects(value: &Value) -> Option<Vec<&Map<String, Value>>> {
    let rows = value.as_array().filter(|rows| !rows.is_empty())?;
    rows.iter().map(Value::as_object).collect()
}

/// A column for each key that any of the objects has, at any depth.
fn list(caption: &str, rows: &[&Map<String, Value>]) -> Grid {
    let rows: Vec<Vec<(String, &Value)>> = rows.iter().map(|row| flattened("", row)).collect();
    let mut keys: Vec<&str> = Vec::new();
    for (key, _) in rows.iter().flatten() {
        if !keys.contains(&key.as_str()) {
            keys.push(key);
        }
    }
    let left_out = keys.len().saturating_sub(MAX_KEYS);
    keys.truncate(MAX_KEYS);
    let caption =
        if left_out == 0 { caption.to_owned() } else { format!("{caption} ({left_out} more columns are in the file)") };
    let mut grid = Grid::new(caption, &keys);
    for row in &rows {
        let of_key =
            |key: &&str| row.iter().find(|(name, _)| name == key).map_or("-".to_owned(), |(_, value)| cell(value));
        grid.row(keys.iter().map(of_key).collect());
    }
    grid
}

/// The fields of an object, those of objects in it by their paths.
fn flattened<'a>(prefix: &str, fields: &'a Map<String, Value>) -> Vec<(String, &'a Value)> {
    let mut flat = Vec::new();
    for (key, value) in fields {
        let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        match value {
            Value::Object(inner) => flat.extend(flattened(&path, inner)),
            other => flat.push((path, other)),
        }
    }
    flat
}

fn cell(value: &Value) -> String {
    match value {
        Value::Array(items) => items.iter().map(cell).collect::<Vec<_>>().join(" to "),
        other => other.as_f64().map_or_else(|| super::words(other), format_figure),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn lists_of_objects_are_tables_of_their_own() {
        let summary = json!({"speedup": 2, "sizes": [{"kb": 4, "x": 1}, {"kb": 8, "y": {"z": "hot", "ci": [1, 2]}}], "a": {"cells": [{"z": 1}], "b": [1, 2]}});
        let summary = summary.as_object().unwrap();
        let found = lists(summary);
        let paths: Vec<&str> = found.iter().map(|(path, _)| path.as_str()).collect();
        assert_eq!(paths, ["sizes", "a.cells"]);
        let grid = list("sizes", &found[0].1);
        assert_eq!(
            (grid.header, grid.rows[1].clone()),
            (
                vec!["kb".into(), "x".into(), "y.z".into(), "y.ci".into()],
                vec!["8.00".into(), "-".into(), "hot".into(), "1.00 to 2.00".into()]
            )
        );
        let left = figures::of_summary(&without_lists(summary));
        assert_eq!(left.len(), 3, "speedup and the two numbers of b");
    }
}
