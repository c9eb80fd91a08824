//! What happens at the edges of a batch, and what others got wrong there. A test named `defect_n` is about the n-th
//! defect that was found in other systems when this one was designed.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

use tidekv_batch::{BatchConfig, BatchError, BlockTables, Changes, IdRun, LeaseError, Metadata, Padding, SeqId, Work};
use tidekv_core::units::KernelId;

const CONFIG: BatchConfig =
    BatchConfig { block_tokens: 4, max_rows: 4, max_row_tokens: 32, max_step_tokens: 32, max_ids: 16 };

fn run(first: u32, count: u32) -> IdRun {
    IdRun { first: KernelId(first), count }
}

fn tables_with(ids: u32) -> BlockTables {
    let mut tables = BlockTables::new(CONFIG).unwrap();
    tables.lend(&[run(100, ids)]).unwrap();
    tables
}

fn blocks(tables: &BlockTables, seq: u64) -> Vec<u32> {
    tables.blocks_of(SeqId(seq)).unwrap().map(|id| id.0).collect()
}

fn step(tables: &mut BlockTables, work: Work<'_>, padding: Padding) -> Result<Metadata, BatchError> {
    let mut out = Metadata::new(tables.shape()).unwrap();
    tables.step(work, padding, &mut out).map(|_| out)
}

/// `operation` is refused with `error` and leaves every bit as it was.
#[track_caller]
fn assert_refused<T, E>(tables: &mut BlockTables, error: E, operation: impl FnOnce(&mut BlockTables) -> Result<T, E>)
where
    T: std::fmt::Debug,
    E: std::fmt::Debug + PartialEq,
{
    let before = tables.clone();
    assert_eq!(operation(tables).unwrap_err(), error);
    assert_eq!(*tables, before);
}

#[test]
fn growth_over_a_boundary_takes_a_block_exactly_when_the_last_is_full() {
    let mut tables = tables_with(8);
    tables.admit(SeqId(1), 3, &[]).unwrap();
    for (held, new_blocks) in [(3, 0), (4, 1), (5, 0), (6, 0), (7, 0), (8, 1)] {
        assert_eq!(tables.lens(), [held]);
        assert_eq!(tables.update_block_table(Work::Decode).unwrap().new_blocks, new_blocks);
    }
    assert_eq!(blocks(&tables, 1), [100, 101, 102]);
}

#[test]
fn a_sequence_without_tokens_has_no_blocks_and_decodes_its_first() {
    let mut tables = tables_with(8);
    tables.admit(SeqId(1), 0, &[]).unwrap();
    assert_eq!(blocks(&tables, 1), []);
    let step = step(&mut tables, Work::Decode, Padding::NONE).unwrap();
    assert_eq!((&step.slot_mapping[..], &step.context_lens[..], &step.seq_lens[..]), (&[400][..], &[0][..], &[1][..]));
}

#[test]
fn a_prefill_of_many_blocks_takes_them_in_row_order() {
    let mut tables = tables_with(8);
    tables.admit(SeqId(1), 0, &[]).unwrap();
    tables.admit(SeqId(2), 3, &[]).unwrap();
    let step = step(&mut tables, Work::Rows(&[13, 6]), Padding::NONE).unwrap();
    assert_eq!(blocks(&tables, 1), [101, 102, 103, 104]);
    assert_eq!(blocks(&tables, 2), [100, 105, 106]);
    let (first, second): (Vec<i64>, Vec<i64>) = ((404..417).collect(), vec![403, 420, 421, 422, 423, 424]);
    assert_eq!(step.slot_mapping, [first, second].concat());
}

#[test]
fn a_row_that_would_overflow_is_found_before_anything_is_taken() {
    let mut tables = tables_with(16);
    tables.admit(SeqId(1), 0, &[]).unwrap();
    tables.admit(SeqId(2), 30, &[]).unwrap();
    let too_long = |tokens| BatchError::SequenceTooLong { seq: SeqId(2), tokens, max_row_tokens: 32 };
    assert_refused(&mut tables, too_long(33), |tables| tables.update_block_table(Work::Rows(&[5, 3])));
    tables.update_block_table(Work::Decode).unwrap();
    tables.update_block_table(Work::Decode).unwrap();
    assert_refused(&mut tables, too_long(33), |tables| tables.update_block_table(Work::Decode));
    let huge = too_long(32 + u64::from(u32::MAX));
    assert_refused(&mut tables, huge, |tables| tables.update_block_table(Work::Rows(&[0, u32::MAX])));
    let longer = BatchError::SequenceTooLong { seq: SeqId(3), tokens: 33, max_row_tokens: 32 };
    assert_refused(&mut tables, longer, |tables| tables.admit(SeqId(3), 33, &[]));
}

#[test]
fn out_of_blocks_is_all_or_nothing_and_says_how_many() {
    let mut tables = tables_with(3);
    tables.admit(SeqId(1), 4, &[]).unwrap();
    tables.admit(SeqId(2), 4, &[]).unwrap();
    let shortage = BatchError::Shortage { needed: 2, free: 1 };
    assert!(shortage.is_transient());
    assert_refused(&mut tables, shortage, |tables| tables.update_block_table(Work::Decode));
    assert_refused(&mut tables, shortage, |tables| tables.admit(SeqId(3), 8, &[]));
    let more = BatchError::Shortage { needed: 3, free: 1 };
    assert_refused(&mut tables, more, |tables| step(tables, Work::Rows(&[5, 4]), Padding::NONE));
    tables.lend(&[run(500, 1)]).unwrap();
    assert_eq!(tables.update_block_table(Work::Decode).unwrap().free_blocks, 0);
    assert_eq!((blocks(&tables, 1), blocks(&tables, 2)), (vec![100, 102], vec![101, 500]), "the last block is used");
}

#[test]
fn what_is_freed_in_flight_is_reused_after_all_that_was_free() {
    let mut tables = tables_with(6);
    tables.admit(SeqId(1), 8, &[]).unwrap();
    tables.release(SeqId(1), &mut Vec::new()).unwrap();
    tables.admit(SeqId(2), 16, &[]).unwrap();
    assert_eq!(blocks(&tables, 2), [102, 103, 104, 105]);
    // What goes back to the pool is not popped at all: the pool waits for its fence.
    let mut out = Vec::new();
    tables.remove(SeqId(2), &mut out).unwrap();
    assert_eq!(out, [102, 103, 104, 105].map(KernelId));
    assert_eq!(tables.free_ids().collect::<Vec<_>>(), [100, 101].map(KernelId));
}

#[test]
fn padding_repeats_the_end_and_points_nowhere() {
    let mut tables = tables_with(8);
    tables.admit(SeqId(1), 5, &[]).unwrap();
    tables.admit(SeqId(2), 0, &[]).unwrap();
    let step = step(&mut tables, Work::Rows(&[1, 2]), Padding { rows: 4, tokens: 6 }).unwrap();
    assert_eq!(step.slot_mapping, [405, 408, 409, -1, -1, -1]);
    assert_eq!(step.seq_lens, [6, 2, 0, 0]);
    assert_eq!(step.context_lens, [5, 0, 0, 0]);
    assert_eq!(step.query_start_loc, [0, 1, 3, 3, 3]);
    assert_eq!(step.seq_start_loc, [0, 6, 8, 8, 8]);
    assert_eq!((step.batch, step.tokens), (2, 3));
    for padding in [Padding { rows: 5, tokens: 0 }, Padding { rows: 0, tokens: 33 }] {
        let Padding { rows, tokens } = padding;
        let error = BatchError::PaddingTooLarge { rows, tokens, max_rows: 4, max_step_tokens: 32 };
        assert_refused(&mut tables, error, |tables| {
            tables.step(Work::Decode, padding, &mut Metadata::default()).map(|_| ())
        });
    }
}

#[test]
fn an_empty_batch_is_a_step_without_effect() {
    let mut tables = tables_with(8);
    for work in [Work::Decode, Work::Rows(&[])] {
        let out = step(&mut tables, work, Padding::NONE).unwrap();
        assert_eq!((&out.query_start_loc[..], &out.seq_start_loc[..]), (&[0][..], &[0][..]));
        assert!(out.slot_mapping.is_empty() && out.seq_lens.is_empty() && out.context_lens.is_empty());
        assert_eq!((out.max_query_len, out.max_seq_len, out.tokens), (0, 0, 0));
        assert_eq!(tables.free_blocks(), 8);
    }
    let padded = step(&mut tables, Work::Decode, Padding::decode(2)).unwrap();
    assert_eq!((padded.slot_mapping, padded.query_start_loc), (vec![-1, -1], vec![0, 0, 0]));
}

#[test]
fn defect_1_rows_and_lengths_have_one_order_in_a_mixed_batch() {
    let mut tables = tables_with(16);
    tables.admit(SeqId(1), 9, &[]).unwrap();
    tables.admit(SeqId(2), 0, &[]).unwrap();
    tables.admit(SeqId(3), 4, &[]).unwrap();
    tables.swap(SeqId(1), SeqId(2)).unwrap(); // new before running
    let step = step(&mut tables, Work::Rows(&[7, 1, 0]), Padding::NONE).unwrap();
    assert_eq!(tables.sequences(), [2, 1, 3].map(SeqId));
    assert_eq!((&step.seq_lens[..], &step.context_lens[..]), (&[7, 10, 4][..], &[0, 9, 4][..]));
    for (row, seq) in [(0, 2), (1, 1), (2, 3)] {
        let ids: Vec<u32> =
            tables.block_tables().row(row)[..blocks(&tables, seq).len()].iter().map(|&i| i as u32).collect();
        assert_eq!(ids, blocks(&tables, seq));
    }
}

#[test]
fn defect_2_a_step_is_taken_once_and_packed_for_every_layer() {
    let mut tables = tables_with(8);
    tables.admit(SeqId(1), 5, &[]).unwrap();
    tables.update_block_table(Work::Decode).unwrap();
    let after = tables.clone();
    let (mut first, mut later) = (Metadata::default(), Metadata::default());
    tables.pack_flash_attn_metadata(Padding::NONE, &mut first).unwrap();
    tables.pack_flash_attn_metadata(Padding::NONE, &mut later).unwrap();
    assert_eq!(first, later);
    assert_eq!(tables, after, "packing advances nothing, whichever layer asks");
}

#[test]
fn defect_3_a_shortage_changes_neither_rows_nor_names() {
    let mut tables = tables_with(1);
    let shortage = BatchError::Shortage { needed: 2, free: 1 };
    assert_refused(&mut tables, shortage, |tables| tables.admit(SeqId(1), 5, &[]));
    assert_eq!(tables.row_of(SeqId(1)), None);
    tables.admit(SeqId(1), 4, &[]).unwrap();
}

#[test]
fn defect_4_an_unknown_sequence_is_named_and_a_released_one_forgotten() {
    let mut tables = tables_with(8);
    tables.admit(SeqId(1), 5, &[]).unwrap();
    let unknown = BatchError::UnknownSequence { seq: SeqId(9) };
    let mut out = Vec::new();
    assert_refused(&mut tables, unknown, |tables| tables.release(SeqId(9), &mut out));
    assert_refused(&mut tables, unknown, |tables| tables.remove(SeqId(9), &mut out));
    assert_refused(&mut tables, unknown, |tables| tables.preempt(SeqId(9), &mut out));
    assert_refused(&mut tables, unknown, |tables| tables.swap(SeqId(1), SeqId(9)));
    assert_refused(&mut tables, unknown, |tables| tables.truncate(SeqId(9), 0));
    assert_refused(&mut tables, unknown, |tables| tables.share(SeqId(9), 0, &mut out));
    tables.release(SeqId(1), &mut out).unwrap();
    let gone = BatchError::UnknownSequence { seq: SeqId(1) };
    assert_refused(&mut tables, gone, |tables| tables.release(SeqId(1), &mut out));
    tables.admit(SeqId(1), 1, &[]).unwrap();
    let twice = BatchError::DuplicateSequence { seq: SeqId(1) };
    assert_refused(&mut tables, twice, |tables| tables.admit(SeqId(1), 1, &[]));
}

#[test]
fn defect_5_a_later_step_leaves_the_arrays_of_an_earlier_one_alone() {
    let mut tables = tables_with(8);
    tables.admit(SeqId(1), 3, &[]).unwrap();
    let in_flight = step(&mut tables, Work::Decode, Padding::NONE).unwrap();
    let kept = in_flight.clone();
    let next = step(&mut tables, Work::Decode, Padding::NONE).unwrap();
    assert_eq!(in_flight, kept);
    assert_ne!(in_flight, next);
    let row = tables.block_tables().row(0)[0];
    assert_eq!(row, 100, "entries that an earlier step reads stay; the table only grows behind them");
}

#[test]
fn defect_6_the_ring_is_checked_before_it_is_read() {
    let mut tables = tables_with(2);
    tables.admit(SeqId(1), 8, &[]).unwrap(); // the ring is empty, its cells still hold 100 and 101
    let shortage = BatchError::Shortage { needed: 1, free: 0 };
    assert_refused(&mut tables, shortage, |tables| tables.plan(Work::Decode));
    assert_refused(&mut tables, shortage, |tables| tables.update_block_table(Work::Rows(&[1])));
}

#[test]
fn defect_7_a_release_writes_only_what_it_frees() {
    let mut tables = tables_with(16);
    tables.admit(SeqId(1), 8, &[]).unwrap();
    let mut changes = Changes::default();
    tables.take_changes(&mut changes);
    assert!(!tables.has_changes());
    tables.release(SeqId(1), &mut Vec::new()).unwrap();
    assert!(tables.has_changes());
    tables.take_changes(&mut changes);
    assert_eq!(changes.ring.iter().map(|run| run.count).sum::<u32>(), 2);
    assert_eq!((changes.batch, changes.rows.len(), changes.table.len()), (0, 0, 0));
}

#[test]
fn shared_blocks_are_counted_and_never_enter_the_ring() {
    let mut tables = tables_with(6);
    let mut out = Vec::new();
    tables.admit(SeqId(1), 9, &[]).unwrap();
    tables.share(SeqId(1), 2, &mut out).unwrap();
    let prefix = out.clone();
    assert_eq!(prefix, [100, 101].map(KernelId));
    tables.admit(SeqId(2), 10, &prefix).unwrap();
    assert_eq!(blocks(&tables, 2), [100, 101, 103]);
    let counts = tables.counts();
    assert_eq!((counts.free, counts.exclusive, counts.shared), (2, 2, 2));

    out.clear();
    assert_eq!(tables.preempt(SeqId(1), &mut out), Ok(1), "sequence 2 still holds the first eight tokens");
    assert_eq!(out, [KernelId(102)]);
    out.clear();
    let left = tables.release(SeqId(2), &mut out).unwrap();
    assert_eq!((left.tokens, left.lost_tokens, left.unshared), (10, 10, 2));
    assert_eq!(out, prefix, "the last sharer's blocks go to whoever caches prefixes");
    assert_eq!(tables.free_ids().collect::<Vec<_>>(), [104, 105, 103].map(KernelId));
    tables.admit(SeqId(3), 8, &prefix).unwrap(); // and come back from there
    tables.check_invariants();
}

#[test]
fn what_cannot_be_shared_is_refused() {
    let mut tables = tables_with(6);
    let mut out = Vec::new();
    tables.admit(SeqId(1), 9, &[]).unwrap();
    let (seq, tokens, block_tokens) = (SeqId(1), 9, 4);
    let half = BatchError::SharedTooLong { seq, blocks: 3, tokens, block_tokens };
    assert_refused(&mut tables, half, |tables| tables.share(SeqId(1), 3, &mut out));
    let seq = SeqId(2);
    for id in [100, 105] {
        let own = BatchError::NotShared { seq, id: KernelId(id) };
        assert_refused(&mut tables, own, |tables| tables.admit(seq, 8, &[KernelId(id)]));
    }
    let twice = BatchError::BadPrefix { seq, id: KernelId(7) };
    assert_refused(&mut tables, twice, |tables| tables.admit(seq, 8, &[KernelId(7), KernelId(7)]));
    let large = BatchError::BadPrefix { seq, id: KernelId(1 << 31) };
    assert_refused(&mut tables, large, |tables| tables.admit(seq, 8, &[KernelId(1 << 31)]));
    let long = BatchError::SharedTooLong { seq, blocks: 2, tokens: 7, block_tokens };
    assert_refused(&mut tables, long, |tables| tables.admit(seq, 7, &[KernelId(7), KernelId(8)]));
    assert!(out.is_empty());
}

#[test]
fn a_cut_gives_empty_blocks_back_and_never_cuts_what_is_shared() {
    let mut tables = tables_with(6);
    tables.admit(SeqId(1), 14, &[]).unwrap();
    tables.share(SeqId(1), 1, &mut Vec::new()).unwrap();
    for tokens in [3, 15] {
        let error = BatchError::BadCut { seq: SeqId(1), tokens, held: 14, shared: 4 };
        assert_refused(&mut tables, error, |tables| tables.truncate(SeqId(1), tokens));
    }
    tables.truncate(SeqId(1), 6).unwrap();
    assert_eq!(tables.free_ids().collect::<Vec<_>>(), [104, 105, 102, 103].map(KernelId));
    let step = step(&mut tables, Work::Decode, Padding::NONE).unwrap();
    assert_eq!(step.slot_mapping, [406]);
    tables.check_invariants();
}

#[test]
fn a_full_batch_a_wrong_count_and_a_large_step_are_refused() {
    let mut tables = tables_with(16);
    (1..=4).for_each(|seq| {
        tables.admit(SeqId(seq), 1, &[]).unwrap();
    });
    let full = BatchError::BatchFull { seq: SeqId(5), max_rows: 4 };
    assert!(full.is_transient());
    assert_refused(&mut tables, full, |tables| tables.admit(SeqId(5), 0, &[]));
    let count = BatchError::WrongRowCount { given: 3, rows: 4 };
    assert_refused(&mut tables, count, |tables| tables.update_block_table(Work::Rows(&[1, 1, 1])));
    let large = BatchError::StepTooLarge { tokens: 33, max_step_tokens: 32 };
    assert_refused(&mut tables, large, |tables| tables.update_block_table(Work::Rows(&[30, 1, 1, 1])));
}

#[test]
fn there_is_something_to_pack_only_after_an_update() {
    let mut tables = tables_with(8);
    let nothing = BatchError::NothingToPack;
    let mut out = Metadata::default();
    assert_refused(&mut tables, nothing, |tables| tables.pack_flash_attn_metadata(Padding::NONE, &mut out));
    tables.admit(SeqId(1), 1, &[]).unwrap();
    tables.update_block_table(Work::Decode).unwrap();
    tables.admit(SeqId(2), 1, &[]).unwrap();
    assert_refused(&mut tables, nothing, |tables| tables.pack_flash_attn_metadata(Padding::NONE, &mut out));
}

#[test]
fn ids_are_lent_once_and_withdrawn_when_free() {
    let mut tables = tables_with(8);
    let again = LeaseError::AlreadyLent { id: KernelId(107) };
    assert_refused(&mut tables, again, |tables| tables.lend(&[run(50, 2), run(107, 2)]));
    let overlap = LeaseError::AlreadyLent { id: KernelId(51) };
    assert_refused(&mut tables, overlap, |tables| tables.lend(&[run(50, 2), run(51, 2)]));
    let many = LeaseError::TooMany { asked: 9, lent: 8, max_ids: 16 };
    assert_refused(&mut tables, many, |tables| tables.lend(&[run(0, 9)]));
    let large = LeaseError::IdTooLarge { first: KernelId(i32::MAX as u32), count: 2 };
    assert_refused(&mut tables, large, |tables| tables.lend(&[run(i32::MAX as u32, 2)]));

    tables.admit(SeqId(1), 5, &[]).unwrap(); // 100 and 101
    let in_use = LeaseError::InUse { in_use: 1, asked: 3 };
    assert!(in_use.is_transient());
    assert_refused(&mut tables, in_use, |tables| tables.withdraw(&[run(101, 3)]));
    let absent = LeaseError::NotLent { id: KernelId(108) };
    assert_refused(&mut tables, absent, |tables| tables.withdraw(&[run(106, 3)]));
    let twice = LeaseError::NotLent { id: KernelId(103) };
    assert_refused(&mut tables, twice, |tables| tables.withdraw(&[run(103, 2), run(102, 2)]));
    tables.withdraw(&[run(105, 1), run(102, 2)]).unwrap();
    assert_eq!(tables.free_ids().collect::<Vec<_>>(), [104, 106, 107].map(KernelId));
    let mut out = Vec::new();
    assert_eq!((tables.take_back(2, &mut out), tables.take_back(9, &mut out)), (2, 1));
    assert_eq!(out, [106, 107, 104].map(KernelId));
    tables.lend(&[run(102, 6)]).unwrap(); // all of them may return
    tables.check_invariants();
}

#[test]
#[cfg_attr(miri, ignore = "half a million blocks")]
fn prefix_sums_never_overflow() {
    let config = BatchConfig { block_tokens: 4096, max_row_tokens: 1 << 30, max_ids: 1 << 19, ..CONFIG };
    let mut tables = BlockTables::new(config).unwrap();
    tables.lend(&[run(0, 1 << 19)]).unwrap();
    tables.admit(SeqId(1), 1 << 30, &[]).unwrap();
    tables.admit(SeqId(2), (1 << 30) - 1, &[]).unwrap();
    let total = BatchError::TotalTooLong { tokens: 1 << 31 };
    assert_refused(&mut tables, total, |tables| tables.update_block_table(Work::Rows(&[0, 1])));
    assert_refused(&mut tables, total, |tables| tables.admit(SeqId(3), 1, &[]));
    let out = step(&mut tables, Work::Rows(&[0, 0]), Padding::NONE).unwrap();
    assert_eq!(out.seq_start_loc, [0, 1 << 30, i32::MAX]);
}
