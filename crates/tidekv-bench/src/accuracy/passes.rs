//! The passes: who is asked when, in which order, and what came of it.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;

use crate::load::data::mixed;
use crate::load::{Endpoint, Item};
use crate::random::Random;
use crate::servers::session::Session;
use crate::servers::sides::Arm;
use crate::servers::texts::{Asking, TextAnswer, ask};

/// What each side said: pass by pass, in the order of the prompts.
#[derive(Debug, Default)]
pub(super) struct Passes {
    sides: [Vec<Vec<TextAnswer>>; 2],
}

impl Passes {
    /// One more pass of a side. One that somebody interrupted counts only as the first, as far as it came.
    pub(super) fn add(&mut self, arm: Arm, answers: Vec<TextAnswer>) {
        let is_whole = self.sides.iter().flatten().all(|pass| pass.len() <= answers.len());
        let side = &mut self.sides[arm.index()];
        if !answers.is_empty() && (side.is_empty() || is_whole) {
            side.push(answers);
        }
    }

    /// The first pass of both, of the prompts that both have answered; `None` before that.
    pub(super) fn first(&self) -> Option<[&[TextAnswer]; 2]> {
        let [a, b] = [self.sides[0].first()?, self.sides[1].first()?];
        let common = a.len().min(b.len());
        Some([&a[..common], &b[..common]])
    }

    /// The later passes, as many of each side.
    pub(super) fn later(&self) -> [&[Vec<TextAnswer>]; 2] {
        let count = self.sides.iter().map(|side| side.len().saturating_sub(1)).min().unwrap_or(0);
        self.sides.each_ref().map(|side| side.get(1..=count).unwrap_or_default())
    }

    /// Whether both sides said the same in the first pass, every prompt of it.
    pub(super) fn are_first_identical(&self) -> bool {
        self.first().is_some_and(|[a, b]| a.iter().zip(b).all(is_same))
    }

    /// Answers that never came.
    pub(super) fn unanswered(&self) -> usize {
        self.sides.iter().flatten().flatten().filter(|answer| answer.text.is_err()).count()
    }
}

/// Whether two answers are the same text. One that never came is like nothing.
pub(super) fn is_same((one, other): (&TextAnswer, &TextAnswer)) -> bool {
    one.text.is_ok() && one.text == other.text
}

/// Who is asked, and for which of its passes. Where only one server is up at a time it is stopped as rarely as the first
/// passes, which may be all that is needed, allow.
pub(super) fn turns(passes: u8, both_up: bool) -> Vec<(Arm, u8)> {
    if both_up {
        return (0..passes).flat_map(|pass| Arm::order(pass.into()).map(|arm| (arm, pass))).collect();
    }
    let of_b = (0..passes).map(|pass| (Arm::B, pass));
    std::iter::once((Arm::A, 0)).chain(of_b).chain((1..passes).map(|pass| (Arm::A, pass))).collect()
}

/// One pass: the first in the order of the prompts, so that both sides' are as equal as they can be, later ones each in
/// another, so that no two have more in common than any two.
pub(super) fn ask_once(
    session: &Session,
    endpoint: Endpoint,
    items: Vec<Item>,
    asking: &Asking,
    (arm, pass, seed): (Arm, u8, u64),
) -> anyhow::Result<Vec<TextAnswer>> {
    let mut order: Vec<usize> = (0..items.len()).collect();
    if pass > 0 {
        let number = 2 * u64::from(pass) + arm.index() as u64;
        Random::seeded(mixed(seed, u64::MAX - number)).shuffle(&mut order);
    }
    let mut items: Vec<Option<Item>> = items.into_iter().map(Some).collect();
    let in_order = order.iter().filter_map(|&index| items[index].take()).collect();
    // Of this run alone: servers that were there before may have the prompts from an earlier one.
    let salt = format!("kvbench-{:016x}", RandomState::new().hash_one(pass));
    let asking = Asking { cache_salt: Some(salt), ..asking.clone() };
    let answers = ask(session, endpoint, in_order, &asking)?.answers;
    let mut answers: Vec<(usize, TextAnswer)> = order.into_iter().zip(answers).collect();
    answers.sort_unstable_by_key(|(index, _)| *index);
    Ok(answers.into_iter().map(|(_, answer)| answer).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(texts: &[&str]) -> Vec<TextAnswer> {
        texts.iter().map(|text| TextAnswer { text: Ok((*text).to_owned()), tokens: 1 }).collect()
    }

    #[test]
    fn each_side_has_every_pass_once_and_the_first_ones_come_first() {
        for both_up in [true, false] {
            let turns = turns(5, both_up);
            for arm in Arm::BOTH {
                let of_arm: Vec<u8> = turns.iter().filter(|turn| turn.0 == arm).map(|turn| turn.1).collect();
                assert_eq!(of_arm, [0, 1, 2, 3, 4]);
            }
            assert_eq!((turns[0], turns[1]), ((Arm::A, 0), (Arm::B, 0)));
        }
        let switches = |turns: &[(Arm, u8)]| turns.windows(2).filter(|two| two[0].0 != two[1].0).count();
        assert_eq!(switches(&turns(5, false)), 2, "a server is started three times");
        assert_eq!(turns(1, false), [(Arm::A, 0), (Arm::B, 0)]);
    }

    #[test]
    fn an_interrupted_pass_counts_only_as_the_first() {
        let mut passes = Passes::default();
        passes.add(Arm::A, answers(&["a", "b", "c"]));
        assert!(passes.first().is_none());
        passes.add(Arm::B, answers(&["a", "b"]));
        assert_eq!(passes.first().unwrap().map(<[_]>::len), [2, 2]);
        assert!(passes.are_first_identical());
        passes.add(Arm::A, answers(&["a"]));
        assert_eq!(passes.later().map(<[_]>::len), [0, 0]);

        let mut passes = Passes::default();
        for _ in 0..3 {
            passes.add(Arm::A, answers(&["a", "b"]));
        }
        passes.add(Arm::B, answers(&["a", "x"]));
        passes.add(Arm::B, answers(&["a", "x"]));
        passes.add(Arm::B, answers(&["a"]));
        assert!(!passes.are_first_identical());
        assert_eq!(passes.later().map(<[_]>::len), [1, 1], "as many of each");
    }
}
