//! What was seen, as figures and as a table.

use serde_json::{Value, json};
use tidekv_core::units::Bytes;

use super::Plan;
use crate::result::BenchResult;
use crate::stats::{Percentiles, Samples, to_f64};
use crate::table::{Table, format_figure, format_ns};

/// What was seen.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) weight_bytes: Bytes,
    pub(super) cells: Vec<CellTimes>,
}

/// What was seen at one batch size.
#[derive(Debug)]
pub(super) struct CellTimes {
    pub(super) batch: u32,
    pub(super) context: u32,
    pub(super) steps: Samples,
    pub(super) floor: Samples,
    pub(super) prompt_tokens_per_s: f64,
}

pub(super) fn fill(result: &mut BenchResult, measured: &Measured) {
    let mut cells: Vec<Value> = Vec::new();
    for cell in &measured.cells {
        result.add_times(format!("{}x{}.step", cell.batch, cell.context), &cell.steps);
        result.add_times(format!("{}x{}.weights_read", cell.batch, cell.context), &cell.floor);
        let Some((steps, floor)) = cell.percentiles() else { continue };
        cells.push(json!({
            "batch": cell.batch,
            "context": cell.context,
            "step_ms": {"p50": to_f64(steps.p50) / 1e6, "p99": to_f64(steps.p99) / 1e6},
            "tokens_per_s": cell.tokens_per_s(&steps),
            "weights_read_ms": to_f64(floor.p50) / 1e6,
            "ratio_to_floor": ratio(&steps, &floor),
            "prompt_tokens_per_s": cell.prompt_tokens_per_s,
        }));
    }
    result.summary.insert("cells".to_owned(), cells.into());
    result.set_figure("weight_bytes", to_f64(measured.weight_bytes.0));
    if let Some((steps, floor)) = measured.cells.first().and_then(CellTimes::percentiles) {
        result.set_figure("weights_read_gb_per_s", to_f64(measured.weight_bytes.0) / to_f64(floor.p50.max(1)));
        result.set_figure("ratio_to_floor", ratio(&steps, &floor));
    }
}

pub(super) fn table(plan: &Plan, measured: &Measured) -> String {
    let mut table =
        Table::new(&["batch", "context", "step p50", "step p99", "tokens/s", "weights read", "step / weights read"]);
    for cell in &measured.cells {
        let Some((steps, floor)) = cell.percentiles() else { continue };
        table.row(&[
            cell.batch.to_string(),
            cell.context.to_string(),
            format_ns(to_f64(steps.p50)),
            format_ns(to_f64(steps.p99)),
            format_figure(cell.tokens_per_s(&steps)),
            format_ns(to_f64(floor.p50)),
            format_figure(ratio(&steps, &floor)),
        ]);
    }
    format!("{} on {}: {} of weights\n\n{}", plan.model, plan.backend.name(), measured.weight_bytes, table.render())
}

fn ratio(steps: &Percentiles, floor: &Percentiles) -> f64 {
    to_f64(steps.p50) / to_f64(floor.p50.max(1))
}

impl CellTimes {
    /// Of steps and floors.
    fn percentiles(&self) -> Option<(Percentiles, Percentiles)> {
        Some((self.steps.percentiles()?, self.floor.percentiles()?))
    }

    fn tokens_per_s(&self, steps: &Percentiles) -> f64 {
        f64::from(self.batch) * 1e9 / to_f64(steps.p50.max(1))
    }
}
