//! From texts to a verdict. Pure.

use std::fmt;

use tidekv_cli::exit::Outcome;

use super::passes::{Passes, is_same};
use crate::servers::texts::TextAnswer;
use crate::statistics::{Confidence, Mcnemar, Proportion, Relabelled, mcnemar, relabel, wilson};

/// Passes that would not have shown a difference in this share of the texts have shown nothing.
const FINE_ENOUGH: f64 = 0.1;

/// What the texts say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Every text is the same.
    Identical,
    /// B differs from A more than either does from itself.
    Differs,
    /// Some texts differ, as they do from pass to pass of one side.
    AsThemselves,
    /// Some texts differ, and too few prompts or passes tell why.
    Underpowered,
}

impl Verdict {
    pub(super) fn outcome(self) -> Outcome {
        match self {
            Self::Identical | Self::AsThemselves => Outcome::Done,
            Self::Differs | Self::Underpowered => Outcome::Negative,
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Identical => "identical",
            Self::Differs => "differs",
            Self::AsThemselves => "no more than from themselves",
            Self::Underpowered => "underpowered",
        })
    }
}

/// See the [module](super).
#[derive(Debug)]
pub(super) struct Judged {
    pub(super) text_match: Option<Proportion>,
    /// `None` where the first pass was enough, or there are too few others.
    pub(super) later: Option<Relabelled>,
    pub(super) correct: Option<Correct>,
    pub(super) unanswered: usize,
    pub(super) verdict: Verdict,
}

/// How often each side is right.
#[derive(Debug)]
pub(super) struct Correct {
    pub(super) sides: [Option<Proportion>; 2],
    pub(super) mcnemar: Mcnemar,
}

pub(super) fn judge(passes: &Passes, correct: Option<&[Vec<bool>; 2]>) -> Judged {
    let matches: Vec<bool> = passes.first().map_or_else(Vec::new, |[a, b]| a.iter().zip(b).map(is_same).collect());
    let [of_a, of_b] = passes.later();
    let later: Vec<&Vec<TextAnswer>> = of_a.iter().chain(of_b).collect();
    let alike = |i: usize, j: usize| later[i].iter().zip(later[j]).filter(|pair| is_same(*pair)).count();
    let later = relabel(of_a.len(), matches.len(), Confidence::USUAL, alike);
    let verdict = match later {
        _ if passes.are_first_identical() => Verdict::Identical,
        Some(later) if later.p_value <= Confidence::USUAL.risk() => Verdict::Differs,
        Some(later) if later.seen_from.is_some_and(|least| least <= FINE_ENOUGH) => Verdict::AsThemselves,
        _ => Verdict::Underpowered,
    };
    Judged {
        text_match: share(&matches),
        later,
        correct: correct.map(|[a, b]| Correct { sides: [share(a), share(b)], mcnemar: disagreement(a, b) }),
        unanswered: passes.unanswered(),
        verdict,
    }
}

fn share(hits: &[bool]) -> Option<Proportion> {
    wilson(hits.iter().filter(|hit| **hit).count(), hits.len(), Confidence::USUAL)
}

/// McNemar's test of two yes-or-no answers to each question.
fn disagreement(a: &[bool], b: &[bool]) -> Mcnemar {
    let count = |wanted: (bool, bool)| a.iter().zip(b).filter(|(a, b)| (**a, **b) == wanted).count();
    mcnemar(count((true, false)), count((false, true)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::servers::sides::Arm;

    const PROMPTS: usize = 60;

    /// Passes in which each text is what `text` makes of side, pass and prompt.
    fn passes(count: usize, text: impl Fn(Arm, usize, usize) -> Result<String, String>) -> Passes {
        let mut passes = Passes::default();
        for arm in Arm::BOTH {
            for pass in 0..count {
                let answer = |prompt| TextAnswer { text: text(arm, pass, prompt), tokens: 1 };
                passes.add(arm, (0..PROMPTS).map(answer).collect());
            }
        }
        passes
    }

    fn verdict(count: usize, text: impl Fn(Arm, usize, usize) -> usize) -> Verdict {
        judge(&passes(count, |arm, pass, prompt| Ok(text(arm, pass, prompt).to_string())), None).verdict
    }

    /// As good as drawn, and the same every time: in every pass another tenth of the prompts.
    fn is_flipped(arm: Arm, pass: usize, prompt: usize) -> usize {
        let word = crate::load::data::mixed((10 * pass + arm.index()) as u64, prompt as u64);
        usize::from(word.is_multiple_of(10))
    }

    #[test]
    fn one_verdict_for_each_case() {
        assert_eq!(verdict(1, |_, _, prompt| prompt), Verdict::Identical);
        assert_eq!(verdict(5, |arm, _, _| arm.index()), Verdict::Differs);
        assert_eq!(verdict(5, is_flipped), Verdict::AsThemselves);
        // A third of B's texts are others, beside the noise.
        let third = |arm: Arm, pass: usize, prompt: usize| {
            is_flipped(arm, pass, prompt) + 2 * usize::from(arm == Arm::B && prompt.is_multiple_of(3))
        };
        assert_eq!(verdict(5, third), Verdict::Differs);
        assert_eq!(verdict(4, |arm, _, _| arm.index()), Verdict::Underpowered, "three later passes prove nothing");
        assert_eq!(verdict(1, |arm, _, _| arm.index()), Verdict::Underpowered, "and are no pass");
        assert_eq!(Verdict::Underpowered.outcome(), Outcome::Negative);
    }

    /// A static and an elastic server on an H200 were called different because all passes but one had begun alike: one
    /// pass that comes out otherwise, whole, is an accident of that pass.
    #[test]
    fn a_single_pass_with_another_schedule_is_no_difference_of_sides() {
        let odd =
            |arm: Arm, pass: usize, prompt: usize| usize::from(arm == Arm::B && pass <= 1 && prompt.is_multiple_of(4));
        assert_ne!(verdict(5, odd), Verdict::Differs);
    }

    #[test]
    fn an_answer_that_never_came_matches_nothing() {
        let judged = judge(&passes(2, |_, _, _| Err("gone".to_owned())), None);
        assert_eq!((judged.unanswered, judged.verdict), (4 * PROMPTS, Verdict::Underpowered));
        assert_eq!(judged.text_match.unwrap().value, 0.0);
    }

    #[test]
    fn right_answers_are_compared_question_by_question() {
        let passes = passes(1, |_, _, _| Ok(String::new()));
        let correct = [vec![true, true, false, true], vec![true, false, true, true]];
        let correct = judge(&passes, Some(&correct)).correct.unwrap();
        assert_eq!((correct.mcnemar.only_a, correct.mcnemar.only_b), (1, 1));
        assert_eq!(correct.sides.map(|side| side.unwrap().value), [0.75, 0.75]);
    }
}
