//! From times to figures and lines.

use serde_json::{Map, Value, json};

use super::arena::ArenaTimes;
use super::syscalls::{CallTimes, SyscallTimes};
use super::{Plan, TOUCHED_KB, TouchKind, bytes};
use crate::result::BenchResult;
use crate::shm::chunks::{Chunks, Figure, mark};
use crate::shm::lines::{our_size, row, rule, stat_line};
use crate::stats::{Samples, to_f64};
use crate::table::{Table, format_figure, format_ns};

const WIDTH: usize = 20;

/// Puts samples and figures into the result, and answers the lines.
pub(super) fn fill(
    result: &mut BenchResult,
    plan: &Plan,
    calls: Option<&SyscallTimes>,
    ours: Option<&ArenaTimes>,
) -> String {
    let mut text = format!(
        "\n=== SHM Allocation Benchmark ===\nIterations: {}\nSize range: {} KB - {} KB\n\n",
        plan.num_iterations, plan.min_size_kb, plan.max_size_kb
    );
    if let Some(calls) = calls {
        fill_calls(result, calls);
        text += &call_lines(plan, calls);
    }
    if let Some(ours) = ours {
        fill_ours(result, ours);
        text += &our_lines(plan, ours);
    }
    fill_sizes(result, calls, ours);
    if let (Some(calls), Some(ours)) = (calls, ours) {
        text += &side_by_side(result, calls, ours);
    }
    if let Some(calls) = calls.filter(|calls| !calls.left.is_empty()) {
        text += &left_lines(calls);
    }
    text
}

fn call_lines(plan: &Plan, times: &SyscallTimes) -> String {
    let calls = &times.calls;
    let mut text = String::new();
    if plan.measure_mmap_only {
        text += "--- mmap() Only (pre-created SHM) ---\n\nResults:\n";
        text += &stat_line("mmap() only", &calls.mmap);
    } else {
        text += "--- Full Allocation (shm_open + ftruncate + mmap) ---\n\nResults:\n";
        text += &stat_line("shm_open()", &calls.shm_open);
        text += &stat_line("ftruncate()", &calls.ftruncate);
        text += &stat_line("mmap()", &calls.mmap);
        text += &stat_line("Total (all 3 syscalls)", &calls.total);
        text += &stat_line("Cleanup (munmap + close + unlink)", &calls.cleanup);
        if plan.touch != TouchKind::None {
            text += &stat_line("First touch of the memory", &calls.touch);
        }
        let mean = calls.total.percentiles().map_or(f64::INFINITY, |p| p.avg);
        text += &format!("\nThroughput: {:.2} allocations/sec\n", 1e9 / mean);
        text += &percentile_lines(calls);
    }
    text += "\n--- Allocation Performance by Size ---\n";
    text += &row(WIDTH, &["Size (KB)", "Mean Time (ns)", "Throughput (MB/s)"]);
    text += &rule(WIDTH, 3);
    for (kb, samples) in &times.by_size {
        let mean = samples.percentiles().map_or(f64::INFINITY, |p| p.avg);
        let mib_per_s = f64::from(*kb) / 1024.0 / (mean / 1e9);
        text += &row(WIDTH, &[&kb.to_string(), &format!("{mean:.2}"), &format!("{mib_per_s:.2}")]);
    }
    text + "(the whole life of a block, cleanup included; no byte is written, so MB/s is not a bandwidth)\n"
}

/// Means hide what a mean is made of.
fn percentile_lines(calls: &CallTimes) -> String {
    let mut text = String::new();
    for (name, samples) in named(calls) {
        if let Some(p) = samples.percentiles() {
            text += &format!("{name:>30}: p50={} ns, p99={} ns\n", p.p50, p.p99);
        }
    }
    text
}

fn named(calls: &CallTimes) -> [(&'static str, &Samples); 6] {
    [
        ("shm_open", &calls.shm_open),
        ("ftruncate", &calls.ftruncate),
        ("mmap", &calls.mmap),
        ("touch", &calls.touch),
        ("total", &calls.total),
        ("cleanup", &calls.cleanup),
    ]
}

fn fill_calls(result: &mut BenchResult, times: &SyscallTimes) {
    for (name, samples) in named(&times.calls) {
        result.add_times(format!("call.{name}"), samples);
        if let Some(p) = samples.percentiles() {
            // Its p99 is in the samples: one run of it says too little to be compared.
            result.set_figure(&format!("calls.{name}_ns_p50"), to_f64(p.p50));
        }
    }
    result.add_times("syscall_pair.mixed", &times.mixed);
    set_p50(result, "syscall_pair_ns", &times.mixed);
    for (kind, rows) in [("touched", &times.touched), ("paged", &times.paged)] {
        for (kb, samples) in rows {
            result.add_times(format!("syscall_pair.{kind}.{}", size_key(*kb)), samples);
            set_p50(result, &format!("{kind}.{}.syscall_pair_ns", size_key(*kb)), samples);
        }
    }
}

fn fill_ours(result: &mut BenchResult, ours: &ArenaTimes) {
    result.add_times("arena_pair.mixed.batch", ours.mixed.samples());
    set_chunk(result, "arena_pair_ns", &ours.mixed);
    for (kind, rows) in [("touched", &ours.touched), ("paged", &ours.paged)] {
        for (kb, chunks) in rows {
            result.add_times(format!("arena_pair.{kind}.{}.batch", size_key(*kb)), chunks.samples());
            set_chunk(result, &format!("{kind}.{}.arena_pair_ns", size_key(*kb)), chunks);
        }
    }
    for (number, chunks) in ours.processes.iter().enumerate() {
        result.add_times(format!("arena_pair.process{number}.batch"), chunks.samples());
    }
    if let Some(slowest) = slowest(&ours.processes) {
        result.set_figure("two_process_pair_ns", slowest.p50_ns);
    }
}

/// The process with the longest pair: each of them is promised a short one.
fn slowest(processes: &[Chunks]) -> Option<Figure> {
    processes.iter().filter_map(Chunks::figure).max_by(|a, b| a.p50_ns.total_cmp(&b.p50_ns))
}

/// `sizes[]`, and the figures that take both sides.
fn fill_sizes(result: &mut BenchResult, calls: Option<&SyscallTimes>, ours: Option<&ArenaTimes>) {
    let kbs = calls.map(|calls| calls.by_size.iter().map(|(kb, _)| *kb).collect());
    let kbs: Vec<u32> = kbs.or_else(|| Some(ours?.by_size.iter().map(|(kb, _)| *kb).collect())).unwrap_or_default();
    let mut sizes = Vec::new();
    for (index, kb) in kbs.iter().enumerate() {
        let mut entry = Map::new();
        entry.insert("kb".to_owned(), json!(kb));
        if let Some(p) = calls.and_then(|calls| calls.by_size[index].1.percentiles()) {
            entry.insert("syscall_pair_ns".to_owned(), json!(to_f64(p.p50)));
        }
        if let Some(figure) = ours.and_then(|ours| ours.by_size[index].1.figure()) {
            entry.insert("arena_pair_ns".to_owned(), json!(figure.p50_ns));
        }
        sizes.push(Value::Object(entry));
    }
    result.summary.insert("sizes".to_owned(), Value::Array(sizes));
    let (Some(calls), Some(ours)) = (calls, ours) else { return };
    if let Some(speedup) = ratio(&calls.mixed, &ours.mixed) {
        result.set_figure("speedup", speedup);
    }
    let kinds = [("touched", &calls.touched, &ours.touched), ("paged", &calls.paged, &ours.paged)];
    for (kind, theirs, ours) in kinds {
        for ((kb, theirs), (_, ours)) in theirs.iter().zip(ours) {
            if let Some(speedup) = ratio(theirs, ours) {
                result.set_figure(&format!("speedup_{kind}_{}", size_key(*kb)), speedup);
            }
        }
    }
}

fn our_lines(plan: &Plan, ours: &ArenaTimes) -> String {
    let mut text = "\n--- Arena (alloc + free of a block, timed in chunks) ---\n".to_owned();
    let mut line = |label: &str, figure: Option<Figure>| {
        if let Some(figure) = figure {
            text += &format!("{label:>30}: {figure}\n");
        }
    };
    line(&format!("{} KB - {} KB, mixed", plan.min_size_kb, plan.max_size_kb), ours.mixed.figure());
    for (kb, chunks) in &ours.by_size {
        line(&format!("{kb} KB"), chunks.figure());
    }
    for (number, chunks) in ours.processes.iter().enumerate() {
        line(&format!("process {} of {}, mixed", number + 1, ours.processes.len()), chunks.figure());
    }
    let cpus = tidekv_shm::copy::allowed_cpus().get();
    if ours.processes.len() > cpus {
        text += &format!("({} processes share {cpus} processors: they wait for each other)\n", ours.processes.len());
    }
    text
}

fn side_by_side(result: &BenchResult, calls: &SyscallTimes, ours: &ArenaTimes) -> String {
    let mut table = Table::new(&["alloc + free", "system calls", "arena", "speedup"]);
    let mut add = |label: String, theirs: &Samples, ours: &Chunks| {
        let (Some(p), Some(figure)) = (theirs.percentiles(), ours.figure()) else { return };
        let speedup = format_figure(to_f64(p.p50) / figure.p50_ns);
        let ours = format_ns(figure.p50_ns) + mark(figure.resolved);
        table.row(&[label, format_ns(to_f64(p.p50)), ours, format!("{speedup}x")]);
    };
    add("mixed sizes".to_owned(), &calls.mixed, &ours.mixed);
    for ((kb, theirs), (_, ours)) in calls.by_size.iter().zip(&ours.by_size) {
        add(our_size(bytes(*kb)), theirs, ours);
    }
    let kinds =
        [("every byte written", &calls.touched, &ours.touched), ("every page written", &calls.paged, &ours.paged)];
    for (kind, theirs, ours) in kinds {
        for ((kb, theirs), (_, ours)) in theirs.iter().zip(ours) {
            add(format!("{}, {kind}", our_size(bytes(*kb))), theirs, ours);
        }
    }
    let mut text = format!("\n--- Side by side (medians) ---\n{}", table.render());
    if let Some(two) = result.summary.get("two_process_pair_ns").and_then(Value::as_f64) {
        text += &format!("{} processes on one arena: {} a pair in the slowest\n", ours.processes.len(), format_ns(two));
    }
    text
}

fn left_lines(calls: &SyscallTimes) -> String {
    let mut text =
        format!("\n{} segments are left behind, as --cleanup=false asks; `kvctl gc` removes them:\n", calls.left.len());
    const SHOWN: usize = 3;
    for path in calls.left.iter().take(SHOWN) {
        text += &format!("  {}\n", path.display());
    }
    if let (true, Some(last)) = (calls.left.len() > SHOWN, calls.left.last()) {
        text += &format!("  ... to {}\n", last.display());
    }
    text
}

fn ratio(theirs: &Samples, ours: &Chunks) -> Option<f64> {
    Some(to_f64(theirs.percentiles()?.p50) / ours.figure()?.p50_ns)
}

fn set_p50(result: &mut BenchResult, path: &str, samples: &Samples) {
    if let Some(p) = samples.percentiles() {
        result.set_figure(path, to_f64(p.p50));
    }
}

fn set_chunk(result: &mut BenchResult, path: &str, chunks: &Chunks) {
    if let Some(figure) = chunks.figure() {
        result.set_figure(path, figure.p50_ns);
    }
}

/// `64k`, `1m`: a key without spaces.
fn size_key(kb: u32) -> String {
    if kb < 1024 { format!("{kb}k") } else { format!("{}m", kb / 1024) }
}

/// The sizes whose speed-ups are promised have the names that were promised.
const _: () = assert!(TOUCHED_KB[0] == 64 && TOUCHED_KB[1] == 1024);
