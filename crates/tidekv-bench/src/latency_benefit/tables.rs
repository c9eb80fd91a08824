//! The report as tables for people.

use super::report::{FIGURES, NAMES, Report, ScenarioReport, ratio};
use crate::overhead::report::{VALUE_HEADER, value_row};
use crate::statistics::median;
use crate::stats::to_f64;
use crate::table::{Table, format_figure, format_ns};

fn mib(bytes: u64) -> String {
    format_figure(to_f64(bytes) / f64::from(1 << 20))
}

fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".to_owned())
}

impl Report {
    pub(super) fn tables(&self) -> String {
        let mut text = format!(
            "This machine computes {} requests/s; {} models share {} MiB of KV memory\n",
            format_figure(self.calibration.capacity_per_s),
            self.names.len(),
            mib(self.calibration.budget_bytes)
        );
        for report in &self.scenarios {
            text += &report.table(&self.names, self.calibration.budget_bytes);
        }
        let ledger = &self.ledger;
        text += &format!(
            "\nStatic over elastic, the middle of {} repeats, from the intended time on.\n\
             The elastic models' ledger had at most {} of {} MiB reserved in {} looks; {} were over budget.\n",
            self.repeats,
            mib(ledger.peak_reserved_bytes),
            mib(ledger.budget_bytes),
            ledger.looks,
            ledger.over_budget
        );
        if let Some(cut) = self.cut() {
            text += &format!("There was time for {cut}: more by --time-limit.\n");
        }
        text + &self.verdict() + "\n"
    }
}

impl ScenarioReport {
    fn table(&self, names: &[String], budget_bytes: u64) -> String {
        let need = or_dash(self.peak_need(budget_bytes).map(|need| format!("{:.0} %", need * 100.0)));
        let mut text = format!(
            "\n{}: {} requests a peak, {:.0} % of compute offered, requests used {need} of the budget at most\n\n",
            self.scenario.name,
            self.requests_per_peak,
            self.scenario.offered * 100.0
        );
        let header = ["model", "TTFT mean", "(elastic)", "times lower", "TTFT p99", "(elastic)", "times lower"];
        let mut table = Table::new(&header);
        let all = "all".to_owned();
        for (name, repeats) in names.iter().zip(&self.models).chain([(&all, &self.repeats)]) {
            let mut row = vec![name.clone()];
            for (_, of) in FIGURES {
                for side in [0, 1] {
                    let values: Vec<f64> = repeats.iter().filter_map(|sides| of(&sides[side].ttft)).collect();
                    row.push(or_dash(median(&values).map(format_ns)));
                }
                row.push(or_dash(ratio(repeats, of).map(|ratio| format_figure(ratio.value))));
            }
            table.row(&row);
        }
        let mut values = Table::new(&VALUE_HEADER);
        let unlimited = self.unlimited.iter().map(|all| ("unlimited", all));
        for (name, all) in NAMES.into_iter().zip(&self.sides).chain(unlimited) {
            values.row(&value_row("all models".to_owned(), name, all));
        }
        text += &table.render();
        text += "\n";
        text += &values.render();
        if let [Some(mean), Some(p99)] = FIGURES.map(|(_, of)| self.over_unlimited(of)) {
            text += &format!(
                "\nElastic over models with the whole budget each: TTFT {} in the mean, {} at p99; 1 is as good.\n",
                format_figure(mean),
                format_figure(p99)
            );
        }
        text
    }
}
