//! Figures and tables.

use serde_json::{Map, Value};

use super::Plan;
use super::fit::Counted;
use super::measure::Measured;
use crate::compare::ratios::{add_ratios, ratio_cell};
use crate::overhead::report::{VALUE_HEADER, named, row_verdict, side, together, value_row};
use crate::result::BenchResult;
use crate::stats::to_f64;
use crate::table::{Table, format_figure};

const NAMES: [&str; 2] = ["static", "elastic"];

pub(super) fn fill(result: &mut BenchResult, counted: &[Counted; 2], measured: &[Measured]) {
    let [fixed, elastic] = counted.each_ref().map(|side| to_f64(side.serving as u64));
    result.set_figure("models_static", fixed);
    result.set_figure("models_elastic", elastic);
    if fixed > 0.0 {
        result.set_figure("models_ratio", elastic / fixed);
    }
    let profile = |measured: &Measured| {
        let mut entry = Map::from_iter([("name".to_owned(), measured.profile.into())]);
        add_ratios(&mut entry, named(&measured.figures));
        for (place, name) in NAMES.iter().enumerate() {
            entry.insert((*name).to_owned(), side(&together(&measured.pairs, place)));
        }
        Value::from(entry)
    };
    result.summary.insert("profiles".to_owned(), measured.iter().map(profile).collect());
    for measured in measured {
        for (place, name) in NAMES.iter().enumerate() {
            let all = together(&measured.pairs, place);
            for (figure, times) in [("ttft", &all.ttft), ("itl", &all.mean_itl), ("e2e", &all.e2e)] {
                result.add_times(format!("{}.{name}.{figure}", measured.profile), times);
            }
        }
    }
}

pub(super) fn tables(plan: &Plan, counted: &[Counted; 2], measured: &[Measured]) -> String {
    let mib = |bytes: u64| format_figure(to_f64(bytes) / f64::from(1 << 20));
    let mut table = Table::new(&["KV memory", "models that serve", "why no more"]);
    for (name, side) in NAMES.iter().zip(counted) {
        let why = match &side.refusal {
            Some(refusal) => refusal.clone(),
            None => "nobody asked for more (--max-models)".to_owned(),
        };
        table.row(&[(*name).to_owned(), side.serving.to_string(), why]);
    }
    let mut text = format!(
        "Budget {} MiB, a static model holds {} MiB\n\n{}",
        mib(plan.kv_budget_bytes),
        mib(plan.model_kv_bytes),
        table.render()
    );
    if measured.is_empty() {
        return text;
    }
    let models = counted[1].serving;
    let mut ratios = Table::new(&["elastic / static", "throughput", "TTFT p50", "ITL p50", "E2E p50", "verdict"]);
    let mut values = Table::new(&VALUE_HEADER);
    for measured in measured {
        let (word, tone) = row_verdict(&measured.figures);
        let cells: Vec<String> = [measured.profile.to_owned()]
            .into_iter()
            .chain(measured.figures.map(ratio_cell))
            .chain([word.to_owned()])
            .collect();
        ratios.coloured_row(&cells, tone);
        for (place, name) in NAMES.iter().enumerate() {
            values.row(&value_row(measured.profile.to_owned(), name, &together(&measured.pairs, place)));
        }
    }
    text += &format!(
        "\n{models} elastic models on one budget beside {models} static ones with a budget each ({} times the memory):\n\n{}\n{}",
        models,
        ratios.render(),
        values.render()
    );
    text + &format!(
        "\nThe middle of {} pairs of slices and its 95 % interval, by signed ranks of the pairs.\n",
        plan.pairs
    )
}
