//! The GPU's side: the same stage on a device, and the CPU's steps brought to it.
//!
//! ```text
//!   floor           an empty kernel, launched and waited for; the same as a graph        beside every cell, in turns
//!   update, pack    the halves of the fused kernel, each launched and waited for
//!   step            the fused kernel, launched and waited for; as a graph; only issued
//!   in graph        (device time of a graph of 101 steps - of 1 step) / 100
//!   to device       the CPU's step, live table and arrays copied into pinned memory, sent, waited for
//! ```

use tidekv_batch::cuda::{CudaBatch, CudaBatchError, DecodeGraph, NothingGraph, Upload};
use tidekv_batch::{BatchConfig, IdRun, Metadata, Padding, SeqId, Work};
use tidekv_core::units::KernelId;

use super::cell::{Cell, CellError, DeviceTimes, Measured, Timed};
use super::device::{DeviceSide, Floors};
use super::reference::{self, Subject};
use super::{Op, Plan, cpu};
use crate::host::HostInfo;
use crate::stats::{Samples, to_f64};

/// Steps of the two graphs whose device times are compared.
const SHORT_GRAPH: u32 = 1;
const LONG_GRAPH: u32 = 101;
/// Launches of a sample of a floor.
const FLOOR_LAUNCHES: u32 = 64;

/// One device, and the floors seen on it so far.
pub(super) struct CudaSide {
    device: u32,
    host: HostInfo,
    launch_floor: Timed,
    graph_floor: Timed,
}

impl CudaSide {
    pub(super) fn new(device: u32, host: HostInfo) -> Self {
        Self { device, host, launch_floor: Timed::new(FLOOR_LAUNCHES), graph_floor: Timed::new(FLOOR_LAUNCHES) }
    }
}

impl DeviceSide for CudaSide {
    fn measure(&mut self, plan: &Plan, cell: Cell, measured: &mut Measured) -> Result<(), CellError> {
        if plan.verify {
            let mut subject = OnGpu::new(self.device, plan, cell)?;
            let runs = cpu::runs(plan, cell);
            measured.verified_steps += reference::verify(&mut subject, cell, plan.block_size, &runs)?;
        }
        let mut stage = Stage::new(self.device, plan, cell)?;
        let mut host = plan.cpu.then(|| HostToDevice::new(plan, cell, &stage.batch)).transpose()?;
        let mut times = DeviceTimes::default();
        let done = (|| {
            stage.floors(&mut self.launch_floor, &mut self.graph_floor)?;
            for op in Op::ALL.into_iter().filter(|&op| plan.wants(op)) {
                times.ops.push((op, stage.operation(op)?));
            }
            if plan.wants(Op::Step) {
                times.graph_launch = stage.graph_launch()?;
                times.issue = stage.issue()?;
                times.in_graph_us = stage.in_graph_us()?;
            }
            if let Some(host) = &mut host {
                if plan.wants(Op::Pack) {
                    times.cpu_pack_to_device = host.pack(&stage.batch)?;
                }
                if plan.wants(Op::Step) {
                    times.cpu_step_to_device = host.step(&stage.batch)?;
                }
            }
            stage.batch.check()
        })();
        done.map_err(|error| of_cuda(cell, &error))?;
        measured.gpu = Some(times);
        Ok(())
    }

    fn host(&self) -> HostInfo {
        self.host.clone()
    }

    fn floors(&mut self) -> Floors {
        let median = |times: &Timed| times.micros().map(|micros| micros.p50);
        Floors { launch_us: median(&self.launch_floor), graph_us: median(&self.graph_floor) }
    }
}

fn of_cuda(cell: Cell, error: &CudaBatchError) -> CellError {
    match error {
        CudaBatchError::Config(error) => CellError::of_config(cell, error),
        CudaBatchError::Batch(error) => CellError::of_batch(cell, *error),
        CudaBatchError::Device(source) if error.is_out_of_memory() => {
            CellError::OutOfMemory { cell, reason: source.to_string() }
        }
        CudaBatchError::Device(source) => CellError::Failed { cell, reason: source.to_string() },
        CudaBatchError::TooManyRows { .. } => CellError::OutOfMemory { cell, reason: error.to_string() },
        _ => CellError::Failed { cell, reason: error.to_string() },
    }
}

/// As on the CPU, with room for the long graph.
fn config(plan: &Plan, cell: Cell) -> BatchConfig {
    let mut config = cpu::config(plan, cell);
    let rows_grow = plan.steps_per_sample.max(LONG_GRAPH);
    config.max_row_tokens = config.max_row_tokens.max(cell.seq + rows_grow);
    // A graph of many steps is refused unless every row can begin a block in its first.
    let row_blocks = cell.seq.div_ceil(plan.block_size) + rows_grow.div_ceil(plan.block_size) + 1;
    config.max_ids = config.max_ids.max(cell.batch.saturating_mul(row_blocks));
    config
}

type Times = Result<Timed, CudaBatchError>;
type Done = Result<(), CudaBatchError>;

/// A full batch on the device, each row somewhere in its last block.
struct Stage {
    cell: Cell,
    samples: u32,
    /// Decode steps of a sample.
    steps: u32,
    batch: CudaBatch,
    base: Vec<u32>,
    queries: Vec<u32>,
}

impl Stage {
    fn new(device: u32, plan: &Plan, cell: Cell) -> Result<Self, CellError> {
        let config = config(plan, cell);
        cpu::check_memory(config, cell)?;
        let mut batch = CudaBatch::open(device, config).map_err(|error| of_cuda(cell, &error))?;
        batch.lend(&cpu::pages(config.max_ids)).map_err(|error| CellError::of_lease(cell, error))?;
        let base = cpu::base_lengths(plan, cell);
        for (seq, &tokens) in (0..).zip(&base) {
            batch.admit(SeqId(seq), tokens, &[]).map_err(|error| CellError::of_batch(cell, error))?;
        }
        let queries = vec![1; cell.batch as usize];
        Ok(Self { cell, samples: plan.iterations, steps: plan.steps_per_sample, batch, base, queries })
    }

    /// Every row is cut back to where samples begin, and the device knows it.
    fn reset(&mut self) -> Done {
        for (seq, &tokens) in (0..).zip(&self.base) {
            self.batch.truncate(SeqId(seq), tokens)?;
        }
        self.batch.flush()?;
        self.batch.wait()
    }

    /// Samples of `steps` times `step`; every sample begins with the same rows.
    fn sampled(&mut self, mut step: impl FnMut(&mut CudaBatch) -> Done) -> Times {
        let mut times = Timed::new(self.steps);
        for _ in 0..self.samples {
            self.reset()?;
            times.time(|| (0..self.steps).try_for_each(|_| step(&mut self.batch)))?;
            self.batch.wait()?;
        }
        self.reset()?;
        Ok(times)
    }

    fn floors(&mut self, launch: &mut Timed, graph: &mut Timed) -> Done {
        let Self { batch, samples, .. } = self;
        let mut nothing: NothingGraph = batch.capture_nothing(1)?;
        for _ in 0..*samples {
            launch.time(|| (0..FLOOR_LAUNCHES).try_for_each(|_| batch.launch_nothing().and_then(|()| batch.wait())))?;
            graph.time(|| {
                (0..FLOOR_LAUNCHES)
                    .try_for_each(|_| batch.launch_nothing_graph(&mut nothing).and_then(|()| batch.wait()))
            })?;
        }
        Ok(())
    }

    fn operation(&mut self, op: Op) -> Times {
        match op {
            Op::Update => self.sampled(|batch| batch.update_decode().and_then(|_| batch.wait())),
            Op::Pack => self.pack(),
            Op::Step => self.sampled(|batch| batch.step(Work::Decode, Padding::NONE).and_then(|_| batch.wait())),
            Op::Mixed => self.mixed(),
            Op::Prefill | Op::Free => self.come_and_go(op),
        }
    }

    fn pack(&mut self) -> Times {
        self.reset()?;
        self.batch.update_decode()?;
        let mut times = Timed::new(self.steps);
        let batch = &mut self.batch;
        for _ in 0..self.samples {
            times.time(|| {
                (0..self.steps).try_for_each(|_| batch.pack_decode(Padding::NONE).and_then(|()| batch.wait()))
            })?;
        }
        self.reset()?;
        Ok(times)
    }

    fn graph_launch(&mut self) -> Times {
        let mut graph: DecodeGraph = self.batch.capture_decode(Padding::NONE, SHORT_GRAPH)?;
        self.sampled(|batch| batch.launch(&mut graph).and_then(|()| batch.wait()))
    }

    /// The host's part: calls that do not wait.
    fn issue(&mut self) -> Times {
        self.sampled(|batch| batch.step(Work::Decode, Padding::NONE).map(drop))
    }

    /// What one more step costs the device inside a graph.
    fn in_graph_us(&mut self) -> Result<Option<f64>, CudaBatchError> {
        let mut clock = self.batch.device_clock()?;
        let mut graphs = [SHORT_GRAPH, LONG_GRAPH].map(|steps| (steps, Samples::new()));
        for (steps, samples) in &mut graphs {
            let mut graph = self.batch.capture_decode(Padding::NONE, *steps)?;
            for _ in 0..self.samples {
                self.reset()?;
                samples.push(nanos(self.batch.launch_timed(&mut graph, &mut clock)?));
            }
        }
        self.reset()?;
        let [short, long] = graphs.map(|(_, samples)| samples.percentiles().map(|times| to_f64(times.p50)));
        let steps = f64::from(LONG_GRAPH - SHORT_GRAPH);
        Ok(short.zip(long).map(|(short, long)| (long - short) / 1e3 / steps))
    }

    /// The first row computes its prompt, all others decode.
    fn mixed(&mut self) -> Times {
        let mut times = Timed::new(1);
        let room = self.batch.tables().shape().config().max_step_tokens - self.cell.batch;
        self.queries[0] = self.cell.seq.min(room);
        // The prompt is what the first row has when a sample is over.
        self.base[0] = self.base[0].min(self.queries[0]);
        for _ in 0..self.samples {
            self.reset()?;
            self.batch.truncate(SeqId(0), 0)?;
            let (batch, queries) = (&mut self.batch, &self.queries);
            times.time(|| batch.step(Work::Rows(queries), Padding::NONE).and_then(|_| batch.wait()))?;
        }
        self.queries[0] = 1;
        self.reset()?;
        Ok(times)
    }

    /// Everybody comes and computes a prompt; then everybody goes, and the device knows it.
    fn come_and_go(&mut self, wanted: Op) -> Times {
        let (mut prefill, mut free) = (Timed::new(1), Timed::new(1));
        let mut freed = Vec::new();
        self.leave(&mut freed)?;
        for _ in 0..self.samples {
            prefill.time(|| self.come())?;
            free.time(|| self.leave(&mut freed))?;
        }
        for (seq, &tokens) in (0..).zip(&self.base) {
            self.batch.admit(SeqId(seq), tokens, &[])?;
        }
        self.reset()?;
        Ok(if wanted == Op::Prefill { prefill } else { free })
    }

    fn come(&mut self) -> Done {
        let Cell { batch, seq } = self.cell;
        for row in 0..batch {
            self.batch.admit(SeqId(u64::from(row)), 0, &[])?;
        }
        let chunk = (self.batch.tables().shape().config().max_step_tokens / batch).min(seq);
        let mut held = 0;
        while held < seq {
            let now = chunk.min(seq - held);
            self.queries.fill(now);
            self.batch.step(Work::Rows(&self.queries), Padding::NONE)?;
            held += now;
        }
        self.queries.fill(1);
        self.batch.wait()
    }

    fn leave(&mut self, out: &mut Vec<KernelId>) -> Done {
        for seq in 0..u64::from(self.cell.batch) {
            self.batch.release(SeqId(seq), out)?;
        }
        self.batch.flush()?;
        self.batch.wait()
    }
}

/// Clocks of devices tick in nanoseconds at best.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a time: not negative, and far below 2^64 ns"
)]
fn nanos(micros: f64) -> u64 {
    (micros * 1e3).round() as u64
}

/// The CPU path where attention is on the device: what it prepared must get there.
struct HostToDevice {
    host: cpu::Stage,
    upload: Upload,
}

impl HostToDevice {
    fn new(plan: &Plan, cell: Cell, batch: &CudaBatch) -> Result<Self, CellError> {
        let host = cpu::Stage::new(plan, cell)?;
        let config = host.tables.shape().config();
        let row_cells = config.max_row_tokens.div_ceil(config.block_tokens) as usize;
        // Four words of 32 bits and one of 64 for each row, beside the live table.
        let bytes = cell.batch as usize * (4 * row_cells + 64) + 64;
        let upload = batch.upload(bytes).map_err(|error| of_cuda(cell, &error))?;
        Ok(Self { host, upload })
    }

    fn pack(&mut self, batch: &CudaBatch) -> Times {
        self.host.tables.update_block_table(Work::Decode)?;
        let mut times = Timed::new(self.host.steps);
        for _ in 0..self.host.samples {
            times.time(|| {
                (0..self.host.steps).try_for_each(|_| {
                    self.host.tables.pack_flash_attn_metadata(Padding::NONE, &mut self.host.out)?;
                    self.send(batch)
                })
            })?;
        }
        self.host.reset()?;
        Ok(times)
    }

    fn step(&mut self, batch: &CudaBatch) -> Times {
        let mut times = Timed::new(self.host.steps);
        for _ in 0..self.host.samples {
            times.time(|| {
                (0..self.host.steps).try_for_each(|_| {
                    self.host.tables.step(Work::Decode, Padding::NONE, &mut self.host.out)?;
                    self.send(batch)
                })
            })?;
            self.host.reset()?;
        }
        Ok(times)
    }

    /// The live part of the table and all arrays, side by side, in one copy.
    fn send(&mut self, batch: &CudaBatch) -> Done {
        let Self { host, upload } = self;
        let (view, out) = (host.tables.block_tables(), &host.out);
        let live = view.max_blocks as usize;
        let mut fits = (0..view.rows).all(|row| upload.push(&view.row(row)[..live]));
        fits &= upload.push(&out.slot_mapping);
        for array in [&out.seq_lens, &out.context_lens, &out.query_start_loc, &out.seq_start_loc] {
            fits &= upload.push(array);
        }
        debug_assert!(fits, "made for the largest step");
        upload.send(batch)
    }
}

/// The device's path, to be verified.
struct OnGpu {
    cell: Cell,
    batch: CudaBatch,
    out: Metadata,
    table: Vec<i32>,
}

impl OnGpu {
    fn new(device: u32, plan: &Plan, cell: Cell) -> Result<Self, CellError> {
        let config = cpu::config(plan, cell);
        cpu::check_memory(config, cell)?;
        let batch = CudaBatch::open(device, config).map_err(|error| of_cuda(cell, &error))?;
        let out = Metadata::new(batch.tables().shape()).map_err(|error| CellError::of_config(cell, &error))?;
        Ok(Self { cell, batch, out, table: Vec::new() })
    }
}

impl Subject for OnGpu {
    fn lend(&mut self, runs: &[IdRun]) -> Result<(), CellError> {
        self.batch.lend(runs).map_err(|error| CellError::of_lease(self.cell, error))
    }

    fn admit(&mut self, seq: SeqId, tokens: u32) -> Result<(), CellError> {
        self.batch.admit(seq, tokens, &[]).map(drop).map_err(|error| CellError::of_batch(self.cell, error))
    }

    fn release(&mut self, seq: SeqId) -> Result<(), CellError> {
        let released = self.batch.release(seq, &mut Vec::new());
        released.map(drop).map_err(|error| CellError::of_batch(self.cell, error))
    }

    fn step(&mut self, work: Work<'_>, padding: Padding) -> Result<&Metadata, CellError> {
        let stepped = self.batch.step(work, padding).and_then(|_| {
            self.batch.read_back(&mut self.out)?;
            self.batch.read_back_table()
        });
        self.table = stepped.map_err(|error| of_cuda(self.cell, &error))?;
        Ok(&self.out)
    }

    fn table_row(&mut self, row: usize, blocks: usize) -> Result<Vec<i32>, CellError> {
        let stride = self.batch.tables().shape().stride() as usize;
        Ok(self.table[row * stride..][..blocks].to_vec())
    }
}
