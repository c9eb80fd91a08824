//! What a row gives does not depend on its company: not on the other rows, not on chunks, not on threads or block
//! sizes, to the last bit. Everything that the engine promises about equal tokens rests on this.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[path = "support/lab.rs"]
mod lab;

use lab::Lab;
use tidekv_serve::config::{ModelSource, SyntheticSize};
use tidekv_serve::model::Model;

/// Tokens of a sequence in a step.
type Chunk = fn(usize, usize) -> usize;

fn model(size: SyntheticSize) -> Model {
    Model::load(&ModelSource::Synthetic { size, seed: 3 }).unwrap()
}

/// Texts of several lengths, around the borders of blocks and tiles.
fn texts(lengths: &[u32]) -> Vec<Vec<u32>> {
    let token = |text: u32, at: u32| (text * 131 + at * at * 7 + at * 13) % 251;
    (0..).zip(lengths).map(|(text, &len)| (0..len).map(|at| token(text, at)).collect()).collect()
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// Each text alone, its prompt in one piece.
fn alone(size: SyntheticSize, texts: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let mut lab = Lab::new(model(size), 1, 16, 512).unwrap();
    let one = |text: &Vec<u32>| bits(&lab.logits(std::slice::from_ref(text), |_, _| usize::MAX).unwrap()[0]);
    texts.iter().map(one).collect()
}

#[test]
fn neither_batch_nor_chunk_nor_block_nor_thread_shows() {
    let texts = texts(&[1, 7, 15, 16, 17, 33, 64, 90]);
    let wanted = alone(SyntheticSize::Tiny, &texts);
    // Chunks by sequence and step: token by token, odd pieces, whole prompts, and a mixture of decoding and prompts.
    let chunks: [(&str, Chunk); 5] = [
        ("one token", |_, _| 1),
        ("three tokens", |_, _| 3),
        ("seventeen tokens", |_, _| 17),
        ("everything", |_, _| usize::MAX),
        ("a mixture", |sequence, step| (sequence * 5 + step * 3) % 23),
    ];
    for (block_tokens, threads) in [(16, 1), (4, 2), (64, 3)] {
        let mut lab = Lab::new(model(SyntheticSize::Tiny), threads, block_tokens, 1024).unwrap();
        for (name, chunk) in chunks {
            for (text, logits) in lab.logits(&texts, chunk).unwrap().iter().enumerate() {
                assert!(
                    bits(logits) == wanted[text],
                    "{name} at a time, blocks of {block_tokens}, {threads} threads: text {text} differs"
                );
            }
        }
    }
}

/// Products of this size go to other threads when many rows come together, and stay when there are few.
#[test]
fn large_steps_on_many_threads_give_what_small_ones_give() {
    let texts = texts(&[40, 70]);
    let wanted = alone(SyntheticSize::Small, &texts);
    let mut lab = Lab::new(model(SyntheticSize::Small), 2, 16, 512).unwrap();
    let chunks: [Chunk; 2] = [|_, _| usize::MAX, |sequence, _| 9 + sequence];
    for chunk in chunks {
        for (logits, wanted) in lab.logits(&texts, chunk).unwrap().iter().zip(&wanted) {
            assert!(bits(logits) == *wanted);
        }
    }
}

/// The test above could not fail if the model ignored its context.
#[test]
fn every_logit_depends_on_the_whole_context() {
    let mut lab = Lab::new(model(SyntheticSize::Tiny), 1, 16, 512).unwrap();
    let text = texts(&[40]).remove(0);
    let mut other = text.clone();
    other[0] += 1;
    let logits = lab.logits(&[text, other], |_, _| usize::MAX).unwrap();
    let last = |of: &[f32]| bits(&of[of.len() - 260..][0x20..0x7f]);
    let differing = last(&logits[0]).iter().zip(last(&logits[1])).filter(|(a, b)| **a != *b).count();
    assert!(differing > 80, "only {differing} of 95 logits see the first of 40 tokens");
}
