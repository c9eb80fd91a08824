//! Random operations against the dullest possible model: vectors and a queue, every array computed token by token.
//!
//! After each operation the model and the tables agree on every id in order, a refused operation has left every bit as
//! it was, and a replica that is told only of changes and does the steps itself has the same cells.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]
#![allow(clippy::cast_possible_truncation, reason = "a model of small batches")]

mod dull;
mod replica;

use proptest::prelude::*;
use tidekv_batch::{BatchConfig, BatchError, BlockTables, IdRun, Metadata, Padding, SeqId, Update, Work};
use tidekv_core::units::KernelId;

use dull::Dull;
use replica::Replica;

/// An operation; numbers are reduced to what the state of the moment has.
#[derive(Clone, Debug)]
enum Op {
    Lend {
        first: u32,
        count: u32,
    },
    Withdraw {
        first: u32,
        count: u32,
        second: u32,
    },
    TakeBack(u32),
    Admit {
        seq: u64,
        tokens: u32,
        sharing: Option<(usize, u32)>,
    },
    /// Prefix blocks that a cache kept from earlier.
    AdmitCached {
        seq: u64,
        first: u32,
        blocks: u32,
    },
    Release(usize),
    Remove(usize),
    Preempt(usize),
    Swap(usize, usize),
    Truncate(usize, u32),
    Share(usize, u32),
    Decode {
        times: u32,
        padding: Padding,
    },
    Rows {
        queries: Vec<u32>,
        padding: Padding,
    },
}

fn op(config: BatchConfig) -> impl Strategy<Value = Op> {
    let BatchConfig { block_tokens, max_rows, max_row_tokens, max_step_tokens, max_ids } = config;
    let id = 0..max_ids * 2;
    let tokens = prop_oneof![0..=max_row_tokens + 1, 0..=block_tokens * 2];
    let padding = (0..=max_rows, 0..=max_step_tokens).prop_map(|(rows, tokens)| Padding { rows, tokens });
    let padding = prop_oneof![Just(Padding::NONE), padding];
    let seq = 0..u64::from(max_rows) + 2;
    let row = any::<usize>();
    let query = prop_oneof![Just(0), Just(1), 0..=block_tokens * 2 + 1, Just(max_row_tokens)];
    let blocks = 0..=max_row_tokens / block_tokens + 1;
    prop_oneof![
        3 => (id.clone(), 0..=max_ids).prop_map(|(first, count)| Op::Lend { first, count }),
        1 => (id.clone(), 0..8u32, id.clone()).prop_map(|(first, count, second)| Op::Withdraw { first, count, second }),
        1 => (0..6u32).prop_map(Op::TakeBack),
        6 => (seq.clone(), tokens.clone(), prop::option::of((row, blocks.clone())))
            .prop_map(|(seq, tokens, sharing)| Op::Admit { seq, tokens, sharing }),
        1 => (seq, id, 0..4u32).prop_map(|(seq, first, blocks)| Op::AdmitCached { seq, first, blocks }),
        2 => row.prop_map(Op::Release),
        1 => row.prop_map(Op::Remove),
        1 => row.prop_map(Op::Preempt),
        1 => (row, row).prop_map(|(a, b)| Op::Swap(a, b)),
        1 => (row, tokens).prop_map(|(row, tokens)| Op::Truncate(row, tokens)),
        2 => (row, blocks).prop_map(|(row, blocks)| Op::Share(row, blocks)),
        4 => (1..=block_tokens * 2, padding.clone()).prop_map(|(times, padding)| Op::Decode { times, padding }),
        4 => (prop::collection::vec(query, 1..9), padding).prop_map(|(queries, padding)| Op::Rows { queries, padding }),
    ]
}

/// The tables, the model and the replica, side by side.
struct Bench {
    tables: BlockTables,
    dull: Dull,
    replica: Replica,
    step: Metadata,
    /// Whether whole states are compared around every operation.
    thorough: bool,
}

impl Bench {
    fn new(config: BatchConfig, thorough: bool) -> Self {
        let tables = BlockTables::new(config).unwrap();
        let (replica, step) = (Replica::new(&tables), Metadata::new(tables.shape()).unwrap());
        Self { tables, dull: Dull::new(config), replica, step, thorough }
    }

    fn seq_at(&self, row: usize) -> SeqId {
        let sequences = self.tables.sequences();
        // Nobody in particular, in an empty batch.
        if sequences.is_empty() { SeqId(u64::MAX) } else { sequences[row % sequences.len()] }
    }

    fn run(&mut self, op: &Op) {
        // Steps compare for themselves: several in a row may be done before one is refused.
        let is_step = matches!(op, Op::Decode { .. } | Op::Rows { .. });
        let before = (self.thorough && !is_step).then(|| self.tables.clone());
        let refused = !self.apply(op);
        if let Some(before) = before.filter(|_| refused) {
            assert_eq!(self.tables, before, "a refusal changes nothing");
        }
        assert!(self.tables.free_ids().map(|id| id.0).eq(self.dull.free.iter().copied()));
        let counts = self.tables.counts();
        let held: u32 = self.dull.rows.iter().map(|row| (row.ids.len() - row.shared) as u32).sum();
        assert_eq!((counts.free as usize, counts.exclusive), (self.dull.free.len(), held));
        assert_eq!(counts.shared as usize, self.dull.shared_ids().len());
        for (row, dull) in self.dull.rows.iter().enumerate() {
            assert_eq!(self.tables.sequences()[row], dull.seq);
            assert_eq!(self.tables.lens()[row] as u32, dull.tokens);
            assert!(self.tables.blocks_of(dull.seq).unwrap().map(|id| id.0).eq(dull.ids.iter().copied()));
        }
        if self.thorough {
            self.tables.check_invariants();
        }
    }

    /// Does the operation on both sides; says whether it was done.
    fn apply(&mut self, op: &Op) -> bool {
        let mut out = Vec::new();
        let (tables, dull) = (&mut self.tables, &mut self.dull);
        match *op {
            Op::Lend { first, count } => {
                let done = tables.lend(&[IdRun { first: KernelId(first), count }]).is_ok();
                assert_eq!(done, dull.lend(first..first + count));
                done
            }
            Op::Withdraw { first, count, second } => {
                let runs = [(first, count), (second, 1)];
                let done = tables.withdraw(&runs.map(|(first, count)| IdRun { first: KernelId(first), count })).is_ok();
                assert_eq!(done, dull.withdraw((first..first + count).chain([second]).collect()));
                done
            }
            Op::TakeBack(count) => {
                tables.take_back(count, &mut out);
                assert!(out.iter().map(|id| id.0).eq(dull.take_back(count)));
                true
            }
            Op::Admit { seq, tokens, sharing } => {
                let prefix = sharing.map_or(Vec::new(), |(row, blocks)| dull.shared_start(row, blocks));
                self.admit(SeqId(seq), tokens, &prefix)
            }
            Op::AdmitCached { seq, first, blocks } => {
                let prefix: Vec<u32> = (first..first + blocks).collect();
                let tokens = blocks * tables.shape().config().block_tokens + 1;
                self.admit(SeqId(seq), tokens, &prefix)
            }
            Op::Release(row) => {
                self.leave(row, |tables, seq, out| tables.release(seq, out).map(|left| left.lost_tokens))
            }
            Op::Remove(row) => {
                self.leave_for_good(row, |tables, seq, out| tables.remove(seq, out).map(|left| left.lost_tokens))
            }
            Op::Preempt(row) => self.leave_for_good(row, BlockTables::preempt),
            Op::Swap(a, b) => {
                let (a, b) = (self.seq_at(a), self.seq_at(b));
                let done = self.tables.swap(a, b).is_ok();
                assert_eq!(done, self.dull.swap(a, b));
                done
            }
            Op::Truncate(row, tokens) => {
                let seq = self.seq_at(row);
                let done = self.tables.truncate(seq, tokens).is_ok();
                assert_eq!(done, self.dull.truncate(seq, tokens));
                done
            }
            Op::Share(row, blocks) => {
                let seq = self.seq_at(row);
                let done = self.tables.share(seq, blocks, &mut out).is_ok();
                assert_eq!(done.then(|| out.iter().map(|id| id.0).collect()), self.dull.share(seq, blocks));
                done
            }
            Op::Decode { times, padding } => {
                let queries = vec![1; tables.batch() as usize];
                (0..times).all(|_| self.step(Work::Decode, &queries, padding))
            }
            Op::Rows { ref queries, padding } => {
                let queries: Vec<u32> = queries.iter().cycle().take(tables.batch() as usize).copied().collect();
                self.step(Work::Rows(&queries), &queries, padding)
            }
        }
    }

    fn admit(&mut self, seq: SeqId, tokens: u32, prefix: &[u32]) -> bool {
        let shared: Vec<KernelId> = prefix.iter().copied().map(KernelId).collect();
        let admitted = self.tables.admit(seq, tokens, &shared);
        assert_eq!(admitted.ok(), self.dull.admit(seq, tokens, prefix), "{seq} {tokens} {prefix:?}: {admitted:?}");
        admitted.is_ok()
    }

    fn leave(&mut self, row: usize, leave: Leave) -> bool {
        self.leave_to(row, leave, true)
    }

    fn leave_for_good(&mut self, row: usize, leave: Leave) -> bool {
        self.leave_to(row, leave, false)
    }

    fn leave_to(&mut self, row: usize, leave: Leave, to_ring: bool) -> bool {
        let (seq, mut out) = (self.seq_at(row), Vec::new());
        let lost = leave(&mut self.tables, seq, &mut out).ok();
        let expected = self.dull.leave(seq, to_ring);
        assert_eq!(lost.map(|lost| (lost, out.iter().map(|id| id.0).collect())), expected);
        lost.is_some()
    }

    /// A step by both calls, against the model and the replica.
    fn step(&mut self, work: Work<'_>, queries: &[u32], padding: Padding) -> bool {
        self.replica.catch_up(&mut self.tables);
        let mut apart = self.thorough.then(|| self.tables.clone());
        let planned = self.tables.plan(work);
        let stepped = self.tables.step(work, padding, &mut self.step);
        assert_eq!(planned, stepped);
        let expected = self.dull.step(queries, padding);
        assert_eq!(stepped.is_ok(), expected.is_ok(), "{stepped:?} {expected:?}");
        match expected {
            Ok((expected, new_blocks)) => {
                assert_eq!(self.step, expected);
                let taken = Update { tokens: expected.tokens, new_blocks, free_blocks: self.tables.free_blocks() };
                assert_eq!(stepped, Ok(taken));
                self.replica.step(queries);
                self.replica.assert_equals(&self.tables);
                if let Some(apart) = &mut apart {
                    let mut packed = Metadata::new(apart.shape()).unwrap();
                    assert_eq!(apart.update_block_table(work), Ok(taken));
                    apart.pack_flash_attn_metadata(padding, &mut packed).unwrap();
                    assert_eq!(packed, expected);
                    assert_eq!(*apart, self.tables);
                }
                true
            }
            Err(shortage) => {
                let reported = match stepped {
                    Err(BatchError::Shortage { needed, free }) => Some((needed, free as usize)),
                    _ => None,
                };
                assert_eq!(reported, shortage);
                assert!(apart.is_none_or(|before| before == self.tables), "a refusal changes nothing");
                false
            }
        }
    }
}

type Leave = fn(&mut BlockTables, SeqId, &mut Vec<KernelId>) -> Result<u32, BatchError>;

fn small(block_tokens: u32) -> BatchConfig {
    let max_row_tokens = block_tokens * 6 - block_tokens / 2;
    BatchConfig { block_tokens, max_rows: 6, max_row_tokens, max_step_tokens: block_tokens * 12 + 6, max_ids: 24 }
}

fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig { cases: if cfg!(miri) { 1 } else { cases }, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases(1500))]

    #[test]
    fn small_batches(
        (config, ops) in prop::sample::select(vec![1, 16, 64])
            .prop_map(small)
            .prop_flat_map(|config| (Just(config), prop::collection::vec(op(config), 1..if cfg!(miri) { 12 } else { 80 })))
    ) {
        let mut bench = Bench::new(config, true);
        bench.run(&Op::Lend { first: 3, count: 16 });
        ops.iter().for_each(|op| bench.run(op));
    }
}

proptest! {
    #![proptest_config(cases(16))]

    /// Batches of up to 2,048 rows, over enough steps that every row goes over a boundary.
    #[test]
    #[cfg_attr(miri, ignore = "thousands of rows")]
    fn large_batches(
        block_tokens in prop::sample::select(vec![1u32, 16, 64]),
        lens in prop::collection::vec(0u32..100, 0..=2048),
        ops in prop::collection::vec(any::<(u8, usize)>(), 1..6),
    ) {
        let config =
            BatchConfig { block_tokens, max_rows: 2048, max_row_tokens: 512, max_step_tokens: 65_536, max_ids: 1 << 20 };
        let mut bench = Bench::new(config, false);
        // A page of the slab layout: seven blocks, then a gap.
        let pages: Vec<IdRun> = (0..20_000).map(|page| IdRun { first: KernelId(page * 12), count: 7 }).collect();
        let lent = if block_tokens == 1 { &pages[..] } else { &pages[..2_500] };
        bench.tables.lend(lent).unwrap();
        bench.dull.free.extend(lent.iter().flat_map(|run| run.first.0..run.first.0 + run.count));
        for (seq, &tokens) in (0..).zip(&lens) {
            bench.admit(SeqId(seq), tokens, &[]);
        }
        for &(kind, row) in &ops {
            bench.run(&match kind % 4 {
                0 => Op::Release(row),
                1 => Op::Rows { queries: vec![0, 1, 17, 3], padding: Padding::decode(2048) },
                2 => Op::Swap(row, row / 3),
                _ => Op::Decode { times: 9, padding: Padding::NONE },
            });
        }
        bench.run(&Op::Decode { times: block_tokens.min(16) + 1, padding: Padding::decode(2048) });
        bench.tables.check_invariants();
    }
}
