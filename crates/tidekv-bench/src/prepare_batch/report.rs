//! From samples to the table that people know, and to figures.

use serde_json::{Map, Value};

use super::Op;
use super::anchors::ANCHORS;
use super::cell::{CellError, Measured, Micros, Timed};
use super::device::Floors;
use crate::result::BenchResult;
use crate::table::{Table, format_figure};

const WIDTH: usize = 80;
const TITLE: &str = "KV Cache Management Benchmark: CPU vs GPU";
/// The columns and how wide each is.
const COLUMNS: [(&str, usize); 8] = [
    ("Batch Size", 13),
    ("Seq Len", 10),
    ("CPU Update (ms)", 16),
    ("GPU Update (ms)", 16),
    ("Speedup", 10),
    ("CPU Pack (ms)", 14),
    ("GPU Pack (ms)", 14),
    ("Speedup", 10),
];

/// Everything there is to report.
pub(super) struct Findings<'a> {
    pub(super) measured: &'a [Measured],
    /// Why there is nothing of a GPU.
    pub(super) gpu_absent: Option<&'a str>,
    /// The cells of [`anchors`](super::anchors), where they were measured.
    pub(super) anchors: &'a [Measured],
    pub(super) floors: Floors,
    /// Whether people want to see a GPU's step as a graph.
    pub(super) graph: bool,
    pub(super) seq_growth: Option<f64>,
    /// Whether outputs were compared.
    pub(super) verified: bool,
}

impl Findings<'_> {
    fn all(&self) -> impl Iterator<Item = &Measured> {
        self.measured.iter().chain(self.anchors)
    }

    fn verified_steps(&self) -> u64 {
        self.all().map(|measured| measured.verified_steps).sum()
    }

    fn first_wrong(&self) -> Option<&CellError> {
        let mut errors = self.all().filter_map(|measured| measured.error.as_ref());
        errors.find(|error| !matches!(error, CellError::OutOfMemory { .. }))
    }
}

/// Puts samples and figures into the result.
pub(super) fn fill(result: &mut BenchResult, findings: &Findings<'_>) {
    let cells = findings.measured.iter().map(|measured| Value::Object(cell_figures(measured))).collect();
    result.summary.insert("cells".to_owned(), Value::Array(cells));
    if !findings.anchors.is_empty() {
        let anchors = findings.anchors.iter().map(|measured| Value::Object(anchor_figures(measured))).collect();
        result.summary.insert("anchors".to_owned(), Value::Array(anchors));
    }
    for measured in findings.all() {
        let name = format!("{}x{}", measured.cell.batch, measured.cell.seq);
        let gpu =
            measured.gpu.iter().flat_map(|gpu| gpu.ops.iter()).map(|(op, times)| (format!("gpu_{}", op.name()), times));
        for (op, times) in measured.cpu.iter().map(|(op, times)| (op.name().to_owned(), times)).chain(gpu) {
            result.add_times(format!("{name}.{op}"), times.samples());
            let Some(micros) = times.micros() else { continue };
            for (figure, value) in
                [("mean", micros.mean), ("p50", micros.p50), ("p10", micros.p10), ("p90", micros.p90)]
            {
                result.set_figure(&format!("ops.{name}.{op}_us.{figure}"), value);
            }
        }
    }
    let numbers = [
        ("launch_floor_us", findings.floors.launch_us),
        ("graph_floor_us", findings.floors.graph_us),
        ("seq_growth", findings.seq_growth),
    ];
    for (name, value) in numbers.into_iter().filter_map(|(name, value)| Some((name, value?))) {
        result.set_figure(name, value);
    }
    if let Some(reason) = findings.gpu_absent {
        result.set_text("gpu_absent", reason);
    }
    if findings.verified {
        result.summary.insert("verified_steps".to_owned(), findings.verified_steps().into());
    }
}

fn cell_figures(measured: &Measured) -> Map<String, Value> {
    let mut figures = Map::new();
    figures.insert("batch".to_owned(), measured.cell.batch.into());
    figures.insert("seq".to_owned(), measured.cell.seq.into());
    let gpu = measured.gpu.as_ref();
    let p50 = |times: Option<&Timed>| times.and_then(Timed::micros).map(|micros| micros.p50);
    for (name, value) in [
        ("cpu_step_us", measured.cpu_us(Op::Step).map(|micros| micros.p50)),
        ("cpu_step_to_device_us", p50(gpu.map(|gpu| &gpu.cpu_step_to_device))),
        ("gpu_step_us", measured.gpu_us(Op::Step).map(|micros| micros.p50)),
        ("gpu_graph_launch_us", p50(gpu.map(|gpu| &gpu.graph_launch))),
        ("gpu_in_graph_us", gpu.and_then(|gpu| gpu.in_graph_us)),
        ("gpu_issue_us", p50(gpu.map(|gpu| &gpu.issue))),
    ] {
        if let Some(value) = value {
            figures.insert(name.to_owned(), value.into());
        }
    }
    if let Some(error) = &measured.error {
        figures.insert("failed".to_owned(), error.to_string().into());
    }
    figures
}

/// A cell with the best that others showed in it.
fn anchor_figures(measured: &Measured) -> Map<String, Value> {
    let mut figures = cell_figures(measured);
    let Some(anchor) = ANCHORS.iter().find(|anchor| anchor.cell == measured.cell) else { return figures };
    figures.insert("best_peer_us".to_owned(), anchor.best_peer_us.into());
    for (ratio, of) in [("peer_over_step", "gpu_step_us"), ("peer_over_graph_launch", "gpu_graph_launch_us")] {
        if let Some(ours) = figures.get(of).and_then(Value::as_f64) {
            figures.insert(ratio.to_owned(), (anchor.best_peer_us / ours).into());
        }
    }
    figures
}

/// The table, what follows it, and the verdict of a quick test.
pub(super) fn text(findings: &Findings<'_>) -> String {
    let line = |sign: &str| sign.repeat(WIDTH) + "\n";
    let mut text = line("=") + TITLE + "\n" + &line("=");
    text += &row(&COLUMNS.map(|(name, _)| name.to_owned()));
    text += &line("-");
    for measured in findings.measured {
        text += &seed_row(measured, findings.gpu_absent.is_some());
    }
    if let Some(reason) = findings.gpu_absent {
        text += &format!("\nThe GPU columns are empty: {reason}\n");
    }
    text += &format!("\nEach operation in us: median (mean, p10 to p90)\n{}", operations(findings).render());
    if let (Some(launch), Some(graph)) = (findings.floors.launch_us, findings.floors.graph_us) {
        let [launch, graph] = [launch, graph].map(format_figure);
        text += &format!("\nA decode step on the GPU, median in us\n{}", gpu_steps(findings).render());
        text += &format!("\nan empty kernel until it is over: {launch} us, as a graph {graph} us\n");
    }
    if let Some(growth) = findings.seq_growth {
        text += &format!("\nCPU step, 32768 tokens per sequence over 128, batch 256: {}\n", format_figure(growth));
    }
    if findings.verified {
        text += &match findings.first_wrong() {
            None if findings.verified_steps() == 0 => "\nNothing was verified: no cell could be prepared\n".to_owned(),
            None => format!("\nPASS: {} steps, every output as the reference has it\n", findings.verified_steps()),
            Some(error) => format!("\nFAIL: {error}\n"),
        };
    }
    text
}

/// The ways of a GPU's step, with the cells that others were measured in.
fn gpu_steps(findings: &Findings<'_>) -> Table {
    let mut table = Table::new(&[
        "batch, seq",
        "launched",
        "as a graph",
        "inside a graph",
        "host issue",
        "CPU to device",
        "best peer",
        "faster, as a graph",
    ]);
    for measured in findings.all().filter(|measured| measured.gpu.is_some()) {
        let figures = anchor_figures(measured);
        let show = |name: &str| figures.get(name).and_then(Value::as_f64).map_or_else(|| "-".to_owned(), format_figure);
        table.row(&[
            format!("{}, {}", measured.cell.batch, measured.cell.seq),
            show("gpu_step_us"),
            show("gpu_graph_launch_us"),
            show("gpu_in_graph_us"),
            show("gpu_issue_us"),
            show("cpu_step_to_device_us"),
            show("best_peer_us"),
            format!("{}, {}", show("peer_over_step"), show("peer_over_graph_launch")),
        ]);
    }
    table
}

/// Cells side by side, each in its column and none against its neighbour.
fn row(cells: &[String; 8]) -> String {
    let padded = |(cell, (_, width)): (&String, (&str, usize))| format!("{cell:<0$} ", width - 1);
    cells.iter().zip(COLUMNS).map(padded).collect::<String>() + "\n"
}

fn seed_row(measured: &Measured, no_gpu: bool) -> String {
    let size = [measured.cell.batch.to_string(), measured.cell.seq.to_string()];
    if let Some(error) = &measured.error {
        let why = match error {
            CellError::OutOfMemory { .. } => "out of memory: reduce --batch-sizes or --seq-lens",
            CellError::Wrong { .. } => "WRONG: see below",
            CellError::Failed { .. } => "failed: see below",
        };
        return format!("{:<13}{:<10}{why}\n", size[0], size[1]);
    }
    // Where there is a GPU, attention reads there: what the CPU packed has to go to it.
    let to_device = measured.gpu.as_ref().and_then(|gpu| gpu.cpu_pack_to_device.micros());
    let cpu = [measured.cpu_us(Op::Update), to_device.or(measured.cpu_us(Op::Pack))];
    let gpu = [measured.gpu_us(Op::Update), measured.gpu_us(Op::Pack)];
    let absent = if no_gpu { "no GPU" } else { "-" };
    let ms = |micros: Option<Micros>, absent: &str| {
        micros.map_or_else(|| absent.to_owned(), |micros| format!("{:.6}", micros.p50 / 1e3))
    };
    let speedup = |cpu: Option<Micros>, gpu: Option<Micros>| {
        let both = cpu.zip(gpu);
        both.map_or_else(|| "-".to_owned(), |(cpu, gpu)| format!("{:.2}", cpu.p50 / gpu.p50))
    };
    let [batch, seq] = size;
    let [update, pack] = [0, 1].map(|op| [ms(cpu[op], "-"), ms(gpu[op], absent), speedup(cpu[op], gpu[op])]);
    let [[cpu_update, gpu_update, update_speedup], [cpu_pack, gpu_pack, pack_speedup]] = [update, pack];
    row(&[batch, seq, cpu_update, gpu_update, update_speedup, cpu_pack, gpu_pack, pack_speedup])
}

/// One row for each cell and operation that was measured.
fn operations(findings: &Findings<'_>) -> Table {
    let mut table = Table::new(&["batch, seq, operation", "CPU (host only)", "CPU to device", "GPU", "host issue"]);
    for measured in findings.measured.iter().filter(|measured| measured.error.is_none()) {
        let gpu = measured.gpu.as_ref();
        for op in Op::ALL {
            let as_graph = gpu.filter(|_| findings.graph && op == Op::Step).and_then(|gpu| gpu.graph_launch.micros());
            let [on_cpu, on_gpu] = [measured.cpu_us(op), as_graph.or(measured.gpu_us(op))];
            if on_cpu.is_none() && on_gpu.is_none() {
                continue;
            }
            let [to_device, issue] = match op {
                Op::Step => {
                    [gpu.and_then(|gpu| gpu.cpu_step_to_device.micros()), gpu.and_then(|gpu| gpu.issue.micros())]
                }
                Op::Pack => [gpu.and_then(|gpu| gpu.cpu_pack_to_device.micros()), None],
                _ => [None, None],
            };
            let name = format!("{}, {}, {}", measured.cell.batch, measured.cell.seq, op.name());
            let [on_cpu, to_device, on_gpu, issue] = [on_cpu, to_device, on_gpu, issue].map(statistics);
            table.row(&[name, on_cpu, to_device, on_gpu, issue]);
        }
    }
    table
}

fn statistics(micros: Option<Micros>) -> String {
    micros.map_or_else(
        || "-".to_owned(),
        |Micros { mean, p50, p10, p90 }| {
            let [mean, p50, p10, p90] = [mean, p50, p10, p90].map(format_figure);
            format!("{p50} ({mean}, {p10} to {p90})")
        },
    )
}
