//! What the command line means, and that the reference tells right from wrong.

use clap::Parser;
use tidekv_batch::{IdRun, Metadata, Padding, SeqId, Work};

use super::cell::Timed;
use super::reference::{self, Mismatch, Subject};
use super::*;

#[derive(Debug, Parser)]
struct Line {
    #[command(flatten)]
    args: PrepareBatchArgs,
}

fn plan(flags: &[&str]) -> anyhow::Result<Plan> {
    let line = Line::try_parse_from([&["prepare-batch"], flags].concat())?;
    Plan::of(&line.args)
}

#[test]
fn the_defaults_are_those_that_people_know() {
    let usual = plan(&[]).unwrap();
    assert_eq!(usual.batch_sizes, [16, 32, 64, 128, 256]);
    assert_eq!(usual.seq_lens, [128, 256, 512, 1024]);
    assert_eq!((usual.iterations, usual.block_size, usual.verify), (100, 16, false));
    assert_eq!((usual.cpu, usual.cuda), (true, Wanted::IfThere));
    let quick = plan(&["--quick"]).unwrap();
    assert!(quick.verify && quick.cells().count() == 4);
}

#[test]
fn lists_take_spaces_and_commas() {
    for flags in
        [&["--batch-sizes", "16", "32", "64"][..], &["--batch-sizes", "16,32,64"], &["--batch-sizes", "16 32", "64"]]
    {
        assert_eq!(plan(flags).unwrap().batch_sizes, [16, 32, 64]);
    }
    let some = plan(&["--ops", "step,free", "--backend", "cpu"]).unwrap();
    assert_eq!((some.ops, some.cuda), (vec![Op::Step, Op::Free], Wanted::No));
}

#[test]
fn what_cannot_be_measured_is_refused() {
    for (flags, part) in [
        (&["--batch-sizes", "0"][..], "--batch-sizes has 0"),
        (&["--batch-sizes", "16", "16"], "--batch-sizes has 16 twice"),
        (&["--seq-lens", "4294967295"], "--seq-lens has 4294967295"),
        (&["--iterations", "0"], "--iterations is 0"),
        (&["--block-size", "24"], "--block-size is 24"),
        (&["--ops", "fly"], "not an operation"),
        (&["--backend", "tpu"], "not a back-end"),
    ] {
        let error = plan(flags).unwrap_err().to_string();
        assert!(error.contains(part), "{error} lacks {part}");
    }
}

#[test]
fn a_sample_is_divided_by_its_steps() {
    let mut times = Timed::new(64);
    assert_eq!(times.micros(), None);
    assert_eq!(times.time(|| 7), 7);
    let micros = times.micros().unwrap();
    let sample_us = crate::stats::to_f64(times.samples().values_ns()[0]) / 1e3;
    assert!((micros.p50 * 64.0 - sample_us).abs() < 1e-9 && micros.p10 <= micros.p90);
}

type Spoil = fn(&mut Metadata);

/// Right in everything but one array of one step.
struct Wrong {
    inner: cpu::OnCpu,
    steps_left: u32,
    spoil: Spoil,
    out: Metadata,
}

impl Subject for Wrong {
    fn lend(&mut self, runs: &[IdRun]) -> Result<(), CellError> {
        self.inner.lend(runs)
    }

    fn admit(&mut self, seq: SeqId, tokens: u32) -> Result<(), CellError> {
        self.inner.admit(seq, tokens)
    }

    fn release(&mut self, seq: SeqId) -> Result<(), CellError> {
        self.inner.release(seq)
    }

    fn step(&mut self, work: Work<'_>, padding: Padding) -> Result<&Metadata, CellError> {
        self.out = self.inner.step(work, padding)?.clone();
        self.steps_left -= 1;
        if self.steps_left == 0 {
            (self.spoil)(&mut self.out);
        }
        Ok(&self.out)
    }

    fn table_row(&mut self, row: usize, blocks: usize) -> Result<Vec<i32>, CellError> {
        self.inner.table_row(row, blocks)
    }
}

#[test]
fn the_reference_finds_a_single_wrong_number() {
    let plan = plan(&["--quick"]).unwrap();
    let cell = Cell { batch: 5, seq: 40 };
    let runs = cpu::runs(&plan, cell);
    let mut right = cpu::OnCpu::new(&plan, cell).unwrap();
    let steps = reference::verify(&mut right, cell, plan.block_size, &runs).unwrap();
    assert!(steps > u64::from(plan.block_size), "{steps}");

    let spoils: [(&str, Spoil); 4] = [
        ("slot_mapping", |step| step.slot_mapping[3] += 1),
        ("seq_lens", |step| step.seq_lens[4] -= 1),
        ("query_start_loc", |step| step.query_start_loc.truncate(5)),
        ("the numbers", |step| step.max_seq_len += 1),
    ];
    for (named, spoil) in spoils {
        let inner = cpu::OnCpu::new(&plan, cell).unwrap();
        let mut wrong = Wrong { inner, steps_left: 9, spoil, out: Metadata::default() };
        let error = reference::verify(&mut wrong, cell, plan.block_size, &runs).unwrap_err();
        let CellError::Wrong { mismatch: Mismatch { step, field, .. }, .. } = error else { panic!("{error}") };
        assert_eq!((step, field), (9, named));
    }
}
