//! From times to figures and lines.

use serde_json::{Value, json};
use tidekv_shm::copy::{Calibration, Copier, Method, non_temporal_width};

use super::single::Single;
use super::sweep::{Contender, Row};
use super::{Plan, Temperature};
use crate::result::BenchResult;
use crate::shm::chunks::mark;
use crate::shm::lines::{our_size, row, rule, seed_size};
use crate::stats::to_f64;
use crate::table::{Table, format_figure};

const WIDTH: usize = 20;
const GIB: f64 = (1u64 << 30) as f64;

/// Blocks whose cold copies are promised to be faster than `memcpy`.
const PROMISED: std::ops::RangeInclusive<usize> = 16 << 10..=16 << 20;

/// Puts samples and figures into the result, and answers the lines.
pub(super) fn fill(result: &mut BenchResult, plan: &Plan, copier: &Copier, single: &Single, rows: &[Row]) -> String {
    result.add_times("single.batch", single.chunks.samples());
    result.set_figure("single_ns", single.figure.p50_ns);
    result.set_figure("single_gibps", single_gibps(single));
    let sizes = rows.iter().map(size_figures).collect();
    result.summary.insert("sizes".to_owned(), Value::Array(sizes));
    if let Some(speedup) = cold_speedup(rows) {
        result.set_figure("cold_speedup", speedup);
    }
    for row in rows {
        for (contender, samples) in &row.samples {
            let name = format!("{}KB.{}.{}.batch", row.len >> 10, row.temperature.name(), contender.name());
            result.add_times(name, samples);
        }
    }
    single_lines(plan, single) + &seed_table(rows) + &our_table(plan, copier, rows)
}

fn size_figures(row: &Row) -> Value {
    let (ours, memcpy, best) = (row.ours(), row.memcpy(), row.best());
    json!({
        "kb": row.len >> 10,
        "temperature": row.temperature.name(),
        "ours_gibps": ours,
        "memcpy_gibps": memcpy,
        "best_gibps": best,
        "ours_over_memcpy": ours / memcpy,
        "ours_over_best": ours / best,
    })
}

/// The least that cold blocks of the promised sizes gain.
fn cold_speedup(rows: &[Row]) -> Option<f64> {
    let promised = rows.iter().filter(|row| row.temperature == Temperature::Cold && PROMISED.contains(&row.len));
    promised.map(|row| row.ours() / row.memcpy()).reduce(f64::min)
}

fn single_gibps(single: &Single) -> f64 {
    to_f64(single.len as u64) / GIB / (single.figure.p50_ns / 1e9)
}

fn single_lines(plan: &Plan, single: &Single) -> String {
    let figure = single.figure;
    format!(
        "\n=== SHM Transfer Benchmark ===\nNumber of transfers: {}\n\n\
         --- Single Transfer Size: {} KB ---\n\
         Average time: {:.2} ns{}\nAverage time: {:.2} \u{3bc}s\nBandwidth: {:.2} GB/s\n\
         Total transfers: {}\nTotal data: {:.2} MB\n{}",
        plan.num_transfers,
        plan.transfer_size_kb,
        figure.p50_ns,
        mark(figure.resolved),
        figure.p50_ns / 1e3,
        single_gibps(single),
        single.copies,
        to_f64((single.copies * single.len) as u64) / f64::from(1 << 20),
        match (plan.verify_data, single.differs) {
            (false, _) => "",
            (true, false) => "Data verification: passed\n",
            (true, true) => "Data verification: FAILED\n",
        }
    )
}

/// Hot blocks by `memcpy`, as this table always showed; cold ones where only those were measured.
fn seed_table(rows: &[Row]) -> String {
    let shown =
        if rows.iter().any(|row| row.temperature == Temperature::Hot) { Temperature::Hot } else { Temperature::Cold };
    let mut text = "\n--- Transfer Performance by Size ---\n".to_owned();
    text += &row(WIDTH, &["Size", "Avg Time (\u{3bc}s)", "Bandwidth (GB/s)"]);
    text += &rule(WIDTH, 3);
    for entry in rows.iter().filter(|row| row.temperature == shown) {
        let gibps = entry.memcpy();
        let us = to_f64(entry.len as u64) / GIB / gibps * 1e6;
        text += &row(WIDTH, &[&seed_size(entry.len), &format!("{us:.2}"), &format!("{gibps:.2}")]);
    }
    text + &format!("(memcpy of {} blocks; GB/s are GiB/s, bytes counted once)\n", shown.name())
}

fn our_table(plan: &Plan, copier: &Copier, rows: &[Row]) -> String {
    let methods: Vec<Method> = Method::available().collect();
    let mut header = vec!["block".to_owned()];
    header.extend(methods.iter().map(|method| method.name().to_owned()));
    header.extend(["ours", "by", "ours/memcpy", "ours/best"].map(str::to_owned));
    let mut table = Table::new(&header);
    for row in rows {
        let rate = |rate: Option<f64>| rate.map_or("-".to_owned(), format_figure);
        let mut cells = vec![format!("{} {}", our_size(row.len), row.temperature.name())];
        cells.extend(methods.iter().map(|method| rate(row.gibps(Contender::Method(*method)))));
        let (method, together) = copier.choice(row.temperature.destination(), row.len);
        let by = if together { format!("{} x{}", method.name(), plan.threads) } else { method.name().to_owned() };
        cells.extend([format_figure(row.ours()), by]);
        cells.extend([row.memcpy(), row.best()].map(|other| format!("{:.2}", row.ours() / other)));
        table.row(&cells);
    }
    let mut text = format!("\n--- Methods side by side (GiB/s, medians) ---\n{}", table.render());
    if let Some(speedup) = cold_speedup(rows) {
        text += &format!("cold blocks of 16 KiB to 16 MiB: at least {speedup:.2} times memcpy\n");
    }
    let near = |share: f64| rows.iter().filter(|row| row.ours() >= share * row.best()).count();
    text += &format!(
        "within 10 % of the fastest method in {} of {} rows, within 5 % in {}\n",
        near(0.90),
        rows.len(),
        near(0.95)
    );
    text + &machine_line(plan, copier)
}

fn machine_line(plan: &Plan, copier: &Copier) -> String {
    let nt = non_temporal_width()
        .map_or("no non-temporal stores".to_owned(), |bytes| format!("non-temporal stores of {bytes} bytes"));
    let how = match copier.calibration() {
        Calibration::Given => format!("--copy={:?}", plan.copy).to_lowercase(),
        Calibration::Loaded(path) => format!("as measured before ({})", path.display()),
        Calibration::Measured { took, kept } => {
            let kept = kept.as_ref().map_or("and not kept".to_owned(), |path| format!("kept in {}", path.display()));
            format!("measured now in {} ms, {kept}", took.as_millis())
        }
        _ => "assumed".to_owned(),
    };
    format!("{} thread(s) for ours, {nt}; methods {how}\n", plan.threads)
}
