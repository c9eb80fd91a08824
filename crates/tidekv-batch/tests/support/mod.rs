//! What the GPU tests share: opening a batch or skipping loudly, and a batch on both sides whose every answer must agree.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part of this")]

use std::io::Write;

use tidekv_batch::cuda::{CudaBatch, CudaBatchError};
use tidekv_batch::{BatchConfig, BatchError, BlockTables, IdRun, Metadata, Padding, SeqId, Work};
use tidekv_core::units::KernelId;
use tidekv_mem::MemError;

/// A batch on the first GPU, or says loudly that the test did not run. With `TIDEKV_REQUIRE_GPU` set, that is a failure.
pub fn open(test: &str, config: BatchConfig) -> Option<CudaBatch> {
    match CudaBatch::open(0, config) {
        Ok(batch) => Some(batch),
        Err(CudaBatchError::Device(
            error @ (MemError::Unavailable { .. } | MemError::NoSuchDevice { count: 0, .. }),
        )) => {
            assert!(std::env::var_os("TIDEKV_REQUIRE_GPU").is_none(), "{test} needs a GPU: {error}");
            // Straight to the descriptor, in one write: the harness swallows what passing tests print.
            let _ = std::io::stderr().write_all(format!("SKIPPED: {test}: {error}\n").as_bytes());
            None
        }
        Err(error) => panic!("{test}: {error}"),
    }
}

/// `count`, or a tenth of it where a tool that checks every access of the device makes each step slow.
pub fn rounds(count: usize) -> usize {
    if std::env::var_os("TIDEKV_SHORT_TESTS").is_some() { count.div_ceil(10) } else { count }
}

pub fn run(first: u32, count: u32) -> IdRun {
    IdRun { first: KernelId(first), count }
}

/// The same batch on both sides.
pub struct Twin {
    pub gpu: CudaBatch,
    pub cpu: BlockTables,
    expected: Metadata,
    found: Metadata,
}

impl Twin {
    pub fn open(test: &str, config: BatchConfig) -> Option<Self> {
        let gpu = open(test, config)?;
        let cpu = BlockTables::new(config).unwrap();
        let metadata = Metadata::new(cpu.shape()).unwrap();
        Some(Self { gpu, cpu, expected: metadata.clone(), found: metadata })
    }

    pub fn lend(&mut self, runs: &[IdRun]) {
        self.cpu.lend(runs).unwrap();
        self.gpu.lend(runs).unwrap();
    }

    pub fn admit(&mut self, seq: u64, tokens: u32, shared: &[KernelId]) -> Result<u32, BatchError> {
        let answer = self.cpu.admit(SeqId(seq), tokens, shared);
        assert_eq!(self.gpu.admit(SeqId(seq), tokens, shared), answer);
        answer
    }

    pub fn release(&mut self, seq: u64) -> Vec<KernelId> {
        let (mut cpu, mut gpu) = (Vec::new(), Vec::new());
        let left = self.cpu.release(SeqId(seq), &mut cpu);
        assert_eq!(self.gpu.release(SeqId(seq), &mut gpu), left);
        assert_eq!(gpu, cpu);
        left.unwrap();
        cpu
    }

    /// A step on both sides, which must agree on whether it can be done.
    pub fn step(&mut self, work: Work<'_>, padding: Padding) -> bool {
        let expected = self.cpu.step(work, padding, &mut self.expected);
        match (self.gpu.step(work, padding), expected) {
            (Ok(found), Ok(expected)) => {
                assert_eq!(found, expected);
                true
            }
            (Err(CudaBatchError::Batch(found)), Err(expected)) => {
                assert_eq!(found, expected);
                false
            }
            (found, expected) => panic!("{found:?} on the device, {expected:?} on the host"),
        }
    }

    /// The CPU does a decode step that the device did in another way.
    pub fn mirror_decode(&mut self, padding: Padding) {
        self.cpu.step(Work::Decode, padding, &mut self.expected).unwrap();
    }

    /// The arrays of the latest step, bit for bit.
    pub fn compare_metadata(&mut self) {
        self.gpu.read_back(&mut self.found).unwrap();
        assert_eq!(self.found, self.expected);
    }

    /// Every live cell of the table, and the ring by what the mirror says of it.
    pub fn compare_tables(&self) {
        let cells = self.gpu.read_back_table().unwrap();
        let stride = self.cpu.shape().stride() as usize;
        for (row, &seq) in self.cpu.sequences().iter().enumerate() {
            let expected = self.cpu.blocks_of(seq).unwrap().map(|id| i32::try_from(id.0).unwrap());
            let found = &cells[row * stride..][..expected.len()];
            assert!(expected.eq(found.iter().copied()), "row {row}, sequence {seq}");
        }
        assert_eq!(self.gpu.tables().sequences(), self.cpu.sequences());
        assert_eq!(self.gpu.tables().lens(), self.cpu.lens());
        assert_eq!(self.gpu.tables().next_slots(), self.cpu.next_slots());
        assert!(self.gpu.tables().free_ids().eq(self.cpu.free_ids()));
    }

    pub fn compare(&mut self) {
        self.compare_metadata();
        self.compare_tables();
    }
}

/// A xorshift generator: tests name their seed, so a failure can be run again.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).max(1))
    }

    pub fn below(&mut self, bound: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        u32::try_from((self.0 >> 16) % u64::from(bound.max(1))).unwrap()
    }
}
