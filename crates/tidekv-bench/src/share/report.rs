//! From what was seen to figures and a table.

use super::Plan;
use super::phases::Measured;
use crate::result::BenchResult;
use crate::stats::{Samples, to_f64};
use crate::table::{Table, format_figure, format_ns};

/// Puts samples and figures into the result.
pub(super) fn fill(result: &mut BenchResult, outcome: &Measured) {
    if let Some(worst) = worst_error(outcome) {
        result.set_figure("share_error", worst);
        result.set_figure("share_error_mean", outcome.errors.iter().sum::<f64>() / to_f64(outcome.errors.len() as u64));
    }
    for (name, times) in [("grant", &outcome.grants), ("share", &outcome.shares)] {
        result.add_times(name, times);
        if let Some(percentiles) = times.percentiles() {
            result.set_figure(&format!("{name}_ms.p50"), to_f64(percentiles.p50) / 1e6);
            result.set_figure(&format!("{name}_ms.p99"), to_f64(percentiles.p99) / 1e6);
        }
    }
    if let Some(over_budget) = outcome.over_budget {
        result.set_figure("over_budget_bytes", to_f64(over_budget.0));
        result.set_figure("moments", to_f64(outcome.moments));
    }
    result.set_figure("exhausted", to_f64(outcome.exhausted));
    result.set_figure("reclaims", to_f64(outcome.reclaims));
}

/// The workers at the end, and a line for every question.
pub(super) fn table(plan: &Plan, outcome: &Measured) -> String {
    let mut table = Table::new(&["worker", "weight", "floor", "fair", "held", "error"]);
    for (worker, (&weight, &(held, fair))) in plan.weights.iter().zip(&outcome.last).enumerate() {
        let error = (held - f64::from(fair)).abs() / f64::from(fair.max(1));
        table.row(&[
            worker.to_string(),
            weight.to_string(),
            plan.floor(worker).to_string(),
            fair.to_string(),
            format_figure(held),
            format!("{:.1} %", error * 100.0),
        ]);
    }
    let mut text = format!("{}\nPages, in the last second of {} phases.\n", table.render(), outcome.errors.len());
    if let Some(worst) = worst_error(outcome) {
        text += &format!("share error: {:.1} % in the worst phase\n", worst * 100.0);
    }
    for (name, times) in [("floor", &outcome.grants), ("share", &outcome.shares)] {
        text += &time_line(name, times);
    }
    text += &match outcome.over_budget {
        Some(over) => format!("most beyond the budget: {over}, looked for {} times\n", outcome.moments),
        None => "without memory files nobody outside the workers can tell what they hold\n".to_owned(),
    };
    text + &format!("{} refused allocations, {} requests to give back\n", outcome.exhausted, outcome.reclaims)
}

fn time_line(name: &str, times: &Samples) -> String {
    let Some(percentiles) = times.percentiles() else { return String::new() };
    let [p50, p99] = [percentiles.p50, percentiles.p99].map(|time| format_ns(to_f64(time)));
    format!("from wanting it to the {name}: {p50} (p99 {p99}, {} times)\n", percentiles.count)
}

fn worst_error(outcome: &Measured) -> Option<f64> {
    outcome.errors.iter().copied().reduce(f64::max)
}
