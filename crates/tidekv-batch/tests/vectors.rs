//! Steps worked out by hand, with blocks of 4 tokens: two sequences run and a third joins them.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

use tidekv_batch::{BatchConfig, BlockTables, IdRun, Metadata, Padding, SeqId, Work};
use tidekv_core::units::KernelId;

const SEQ0: SeqId = SeqId(0);
const SEQ1: SeqId = SeqId(1);
const SEQ2: SeqId = SeqId(2);

/// Ten blocks; sequence 1 holds 8 tokens in [0, 1], sequence 2 holds 5 in [2, 3].
fn two_running() -> BlockTables {
    let config = BatchConfig { block_tokens: 4, max_rows: 8, max_row_tokens: 64, max_step_tokens: 64, max_ids: 10 };
    let mut tables = BlockTables::new(config).unwrap();
    tables.lend(&[IdRun { first: KernelId(0), count: 10 }]).unwrap();
    tables.admit(SEQ1, 8, &[]).unwrap();
    tables.admit(SEQ2, 5, &[]).unwrap();
    tables
}

/// Sequence 0 joins with `tokens` tokens and takes the first row, as the vectors have it.
fn join(tables: &mut BlockTables, tokens: u32) {
    tables.admit(SEQ0, tokens, &[]).unwrap();
    tables.swap(SEQ0, SEQ1).unwrap();
    tables.swap(SEQ1, SEQ2).unwrap();
    assert_eq!(tables.sequences(), [SEQ0, SEQ1, SEQ2]);
}

fn blocks(tables: &BlockTables, seq: SeqId) -> Vec<u32> {
    tables.blocks_of(seq).unwrap().map(|id| id.0).collect()
}

fn assert_tables(tables: &BlockTables) {
    assert_eq!(blocks(tables, SEQ0), [4, 5]);
    assert_eq!(blocks(tables, SEQ1), [0, 1, 6]);
    assert_eq!(blocks(tables, SEQ2), [2, 3]);
    let view = tables.block_tables();
    assert_eq!((view.rows, view.max_blocks), (3, 3));
    assert_eq!((&view.row(0)[..2], &view.row(1)[..3], &view.row(2)[..2]), (&[4, 5][..], &[0, 1, 6][..], &[2, 3][..]));
    assert_eq!(tables.free_blocks(), 3);
    tables.check_invariants();
}

/// Both ways to prepare a step give the same arrays and leave the same state.
fn step_both_ways(tables: &mut BlockTables, work: Work<'_>) -> Metadata {
    let mut in_one_pass = Metadata::new(tables.shape()).unwrap();
    let mut packed = Metadata::new(tables.shape()).unwrap();
    let mut other = tables.clone();
    let taken = tables.step(work, Padding::NONE, &mut in_one_pass).unwrap();
    assert_eq!(other.plan(work), Ok(taken));
    assert_eq!(other.update_block_table(work), Ok(taken));
    other.pack_flash_attn_metadata(Padding::NONE, &mut packed).unwrap();
    assert_eq!(in_one_pass, packed);
    assert_eq!(*tables, other);
    in_one_pass
}

#[test]
fn one_query_token_each_with_the_prompt_held() {
    let mut tables = two_running();
    join(&mut tables, 6);
    let step = step_both_ways(&mut tables, Work::Decode);
    assert_tables(&tables);
    assert_eq!(step.slot_mapping, [22, 24, 13]);
    assert_eq!(step.seq_lens, [7, 9, 6]);
    assert_eq!(step.context_lens, [6, 8, 5]);
    assert_eq!(step.seq_start_loc, [0, 7, 16, 22]);
    assert_eq!(step.query_start_loc, [0, 1, 2, 3]);
    assert_eq!((step.max_query_len, step.max_seq_len), (1, 9));
    assert_eq!((step.num_prefills, step.num_prefill_tokens, step.num_decode_tokens), (0, 0, 3));
}

#[test]
fn the_prompt_computed_in_the_same_step() {
    let mut tables = two_running();
    join(&mut tables, 0);
    let step = step_both_ways(&mut tables, Work::Rows(&[6, 1, 1]));
    assert_tables(&tables);
    assert_eq!(step.slot_mapping, [16, 17, 18, 19, 20, 21, 24, 13]);
    assert_eq!(step.seq_lens, [6, 9, 6]);
    assert_eq!(step.context_lens, [0, 8, 5]);
    assert_eq!(step.query_start_loc, [0, 6, 7, 8]);
    assert_eq!(step.seq_start_loc, [0, 6, 15, 21]);
    assert_eq!((step.max_query_len, step.max_seq_len), (6, 9));
    assert_eq!((step.num_prefills, step.num_prefill_tokens, step.num_decode_tokens), (1, 6, 2));
}

#[test]
fn released_blocks_are_given_out_last() {
    let mut tables = two_running();
    join(&mut tables, 6);
    step_both_ways(&mut tables, Work::Decode);
    tables.release(SEQ1, &mut Vec::new()).unwrap();
    tables.admit(SeqId(3), 16, &[]).unwrap();
    assert_eq!(blocks(&tables, SeqId(3)), [7, 8, 9, 0]);
    assert_eq!(tables.free_ids().map(|id| id.0).collect::<Vec<_>>(), [1, 6]);
}
