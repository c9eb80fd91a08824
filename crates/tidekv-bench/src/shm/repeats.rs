//! `--repeat`: the whole measurement again and again, and what the figures of all of them say.
//!
//! Every figure of the summary becomes the median of its repeats; a table shows how far they spread.

use serde_json::{Map, Value};

use super::Report;
use crate::compare::figures::{self, Figure};
use crate::result::BenchResult;
use crate::table::{Table, format_figure};

/// Measures `repeat` times. The first that fails ends it.
pub(super) fn measure(repeat: u32, mut once: impl FnMut(u32) -> anyhow::Result<Report>) -> anyhow::Result<Report> {
    let mut reports = Vec::new();
    for number in 0..repeat.max(1) {
        let report = once(number)?;
        let stop = report.wrong.is_some();
        reports.push(report);
        if stop {
            break;
        }
    }
    let results: Vec<&BenchResult> = reports.iter().map(|report| &report.result).collect();
    let spreads = spreads(&results);
    let mut merged = reports.pop().ok_or_else(|| anyhow::anyhow!("nothing was measured"))?;
    if reports.is_empty() {
        return Ok(merged);
    }
    for spread in &spreads {
        set(&mut merged.result.summary, &spread.path, spread.median);
    }
    merged.text += &table(reports.len() + 1, &spreads);
    Ok(merged)
}

/// One figure over the repeats.
#[derive(Debug, PartialEq)]
struct Spread {
    path: Vec<String>,
    median: f64,
    min: f64,
    max: f64,
}

/// Figures that every repeat has.
fn spreads(results: &[&BenchResult]) -> Vec<Spread> {
    let all: Vec<Vec<Figure>> = results.iter().map(|result| figures::of_summary(&result.summary)).collect();
    let Some((first, others)) = all.split_first() else { return Vec::new() };
    let in_all = first.iter().filter_map(|figure| {
        let value_in = |figures: &Vec<Figure>| figures.iter().find(|other| other.path == figure.path).map(|f| f.value);
        let mut values: Vec<f64> = others.iter().map(value_in).collect::<Option<_>>()?;
        values.push(figure.value);
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        Some(Spread { path: figure.path.clone(), median: values[values.len() / 2], min, max })
    });
    in_all.collect()
}

/// Sets the figure at `path`, which is there.
fn set(summary: &mut Map<String, Value>, path: &[String], value: f64) {
    let Some((first, rest)) = path.split_first() else { return };
    let mut place = summary.get_mut(first);
    for part in rest {
        place = match place {
            Some(Value::Array(items)) => part.parse::<usize>().ok().and_then(|index| items.get_mut(index)),
            Some(Value::Object(fields)) => fields.get_mut(part),
            _ => None,
        };
    }
    if let Some(place) = place {
        *place = Value::from(value);
    }
}

fn table(repeats: usize, spreads: &[Spread]) -> String {
    let mut table = Table::new(&["figure", "median", "min", "max"]);
    for Spread { path, median, min, max } in spreads {
        let [median, min, max] = [median, min, max].map(|value| format_figure(*value));
        table.row(&[path.join("."), median, min, max]);
    }
    format!("\n--- {repeats} repeats ---\n{}", table.render())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostInfo;
    use serde_json::json;

    fn report(value: f64) -> Report {
        let mut result = BenchResult::new("x", &json!({}), HostInfo::default()).unwrap();
        result.summary =
            json!({"a_ns": value, "sizes": [{"kb": 4, "gibps": 2.0 * value}]}).as_object().unwrap().clone();
        Report { result, text: "text\n".into(), wrong: None }
    }

    #[test]
    fn figures_are_medians_and_the_spread_is_shown() {
        let values = [3.0, 100.0, 5.0];
        let merged = measure(3, |number| Ok(report(values[number as usize]))).unwrap();
        assert_eq!(merged.result.summary["a_ns"], json!(5.0));
        assert_eq!(merged.result.summary["sizes"][0]["gibps"], json!(10.0));
        assert!(merged.text.contains("--- 3 repeats ---") && merged.text.contains("| a_ns"), "{}", merged.text);
        let row = merged.text.lines().find(|line| line.starts_with("| a_ns")).unwrap().to_owned();
        assert!(row.contains("5.00") && row.contains("3.00") && row.contains("100"), "{row}");
        assert_eq!(measure(1, |_| Ok(report(1.0))).unwrap().text, "text\n");
    }

    #[test]
    fn a_wrong_result_ends_it() {
        let mut measured = 0;
        let merged = measure(5, |_| {
            measured += 1;
            Ok(Report { wrong: Some("no".into()), ..report(1.0) })
        });
        assert!(merged.unwrap().verdict().is_err());
        assert_eq!(measured, 1);
    }
}
