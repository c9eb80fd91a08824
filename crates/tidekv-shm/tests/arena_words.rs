//! Every word of a living arena, written over: nobody panics, hangs or leaves the arena's memory, and what has nothing to
//! do with the word works on. The fuzz target of the same name writes over many words in any order.

#![allow(clippy::cast_possible_truncation, reason = "a number below nine")]

#[path = "support/damage.rs"]
mod damage;

use damage::{BITMAPS, BLOCK_WORDS, CACHES, Do, HEAD, MEMBERS, SLOT_WORDS, World, step};
use tidekv_shm::RuntimeDir;

fn run(words: impl Iterator<Item = usize>, values: impl Fn(u64) -> Vec<u64>) {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder");
    let world = World::new(&RuntimeDir::at(folder.path()));
    for word in words {
        for (at, value) in values(world.word(word)).into_iter().enumerate() {
            let recovered = (word + at).is_multiple_of(2);
            let steps = script(word, value, recovered);
            let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.run(&steps)));
            assert!(ran.is_ok(), "word {word} written over with {value:#x}, recovered before: {recovered}");
        }
    }
}

/// What members do before and after a word is written over: with the dead still there, or recovered already.
fn script(word: usize, value: u64, recovered: bool) -> Vec<u8> {
    let mut steps = Vec::new();
    if recovered {
        steps.extend(step(Do::Recover, 0, 0));
    }
    for which in 0..7 {
        steps.extend(step(Do::Alloc, which % 2, which));
        steps.extend(step(Do::Alloc, which % 2, 1));
    }
    steps.extend([step(Do::Free, 0, 3), step(Do::Free, 1, 4), step(Do::Exchange, 0, 0)].concat());
    steps.extend(damage::damage(word, value));
    steps.extend(step(Do::Verify, 0, (word % 2) as u8));
    let after = [Do::NewCache, Do::FreeAny, Do::Alloc, Do::Recover, Do::Free, Do::Share, Do::Resize, Do::NewCache];
    for which in 0..24 {
        steps.extend(step(after[usize::from(which) % after.len()], which / 8, which));
    }
    steps.extend([step(Do::Exchange, 1, 0), step(Do::Rejoin, 0, 0), step(Do::Grow, 1, 0)].concat());
    for which in 0..12 {
        steps.extend(step(Do::Alloc, which, which * 5));
        steps.extend(step(Do::FreeAny, which / 3, which * 7));
    }
    steps
}

fn all((first, count): (usize, usize)) -> impl Iterator<Item = usize> {
    first..first + count
}

#[test]
fn a_slot_word_that_is_written_over() {
    run(all(SLOT_WORDS), |now| {
        let word = |state: u64, class: u64, owner: u64, reach: u64| state << 61 | class << 56 | owner << 40 | reach;
        let reaches = [1, 4, 0xffff].map(|reach| [word(2, 27, 0, reach), word(2, 3, 3, reach), word(4, 31, 0, reach)]);
        let claimed = [word(1, 0, 3, 0), word(1, 0, 3, 16), word(1, 0, 1 << 15 | 2, 5)];
        let tails = [word(3, 0, 3, 1), word(3, 31, 1, 40), word(3, 31, 3, 0xffff)];
        let others = [0, u64::MAX, now ^ 1, now ^ 1 << 56, now ^ 1 << 40, now ^ 1 << 16];
        [reaches.concat(), claimed.to_vec(), tails.to_vec(), others.to_vec()].concat()
    });
}

#[test]
fn a_bitmap_that_is_written_over() {
    run(all(BITMAPS), |_| vec![1, u64::MAX]);
}

#[test]
fn a_block_word_that_is_written_over() {
    run(all(BLOCK_WORDS).filter(|word| word % 17 == 0 || word % 128 == 0), |now| {
        let word = |state: u64, who: u64| (now >> 34) << 34 | state << 32 | who;
        let all = [0, u64::MAX, word(0, 5), word(1, 0), word(1, 2), word(1, 99), word(2, 0), word(2, 5), word(3, 1)];
        vec![all[(now % 9) as usize], word(1, 2), word(3, 0x8002), word(2, u64::from(u32::MAX))]
    });
}

#[test]
fn a_word_of_the_head_or_a_member_that_is_written_over() {
    let members = all(MEMBERS).filter(|word| word % 16 == 0 || *word < MEMBERS.0 + 64 && word % 16 < 4);
    run(all(HEAD).chain(members), |now| vec![0, 1, now ^ 1, 1 << 33, u64::MAX]);
}

#[test]
fn a_word_of_a_cache_that_is_written_over() {
    run(all(CACHES).filter(|word| *word < CACHES.0 + 8 || word % 100 == 0), |_| vec![0, 1, 2, 3, 4, 9, u64::MAX]);
}
