//! From texts to a verdict. Pure.

use std::fmt;

use tidekv_cli::exit::Outcome;

use super::Rounds;
use crate::servers::texts::TextAnswer;
use crate::statistics::{Confidence, Mcnemar, Proportion, mcnemar, wilson};

/// What the texts say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Every text is the same.
    Identical,
    /// B differs from A, and A does not differ from itself as often.
    Differs,
    /// B differs from A as often as A does from itself.
    AsItself,
    /// Some texts differ, and too few to tell why.
    Underpowered,
}

impl Verdict {
    pub(super) fn outcome(self) -> Outcome {
        match self {
            Self::Identical | Self::AsItself => Outcome::Done,
            Self::Differs | Self::Underpowered => Outcome::Negative,
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Identical => "identical",
            Self::Differs => "differs",
            Self::AsItself => "no more than A from itself",
            Self::Underpowered => "underpowered",
        })
    }
}

/// See the [module](super).
#[derive(Debug)]
pub(super) struct Judged {
    pub(super) text_match: Option<Proportion>,
    pub(super) self_match: Option<Proportion>,
    pub(super) repeats: Mcnemar,
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

pub(super) fn judge(rounds: &Rounds, correct: Option<&[Vec<bool>; 2]>) -> Judged {
    let same = |(one, other): (&TextAnswer, &TextAnswer)| one.text.is_ok() && one.text == other.text;
    let with_a = |answers: &[TextAnswer]| rounds.a.answers.iter().zip(answers).map(same).collect::<Vec<bool>>();
    let (repeats, matches) = (with_a(&rounds.again.answers), with_a(&rounds.b.answers));
    let test = disagreement(&repeats, &matches);
    let all = [&rounds.a, &rounds.again, &rounds.b].into_iter().flat_map(|round| &round.answers);
    let mismatches = matches.iter().filter(|is_same| !**is_same).count();
    let verdict = if mismatches == 0 {
        Verdict::Identical
    } else if test.p_value <= Confidence::USUAL.risk() && test.only_a > test.only_b {
        Verdict::Differs
    } else if test.only_a <= test.only_b {
        Verdict::AsItself
    } else {
        Verdict::Underpowered
    };
    Judged {
        text_match: share(&matches),
        self_match: share(&repeats),
        repeats: test,
        correct: correct.map(|[a, b]| Correct { sides: [share(a), share(b)], mcnemar: disagreement(a, b) }),
        unanswered: all.filter(|answer| answer.text.is_err()).count(),
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
    use crate::servers::texts::TextAnswers;

    fn round(texts: impl IntoIterator<Item = String>) -> TextAnswers {
        let answers = texts.into_iter().map(|text| TextAnswer { text: Ok(text), tokens: 1 }).collect();
        TextAnswers { answers, seconds: 1.0 }
    }

    /// `n` prompts; A differs from itself in the first `own`, B from A in the first `other`.
    fn judged(n: usize, own: usize, other: usize) -> Judged {
        let texts = |wrong: usize| round((0..n).map(move |i| format!("{i}{}", if i < wrong { "x" } else { "" })));
        judge(&Rounds { a: texts(0), again: texts(own), b: texts(other) }, None)
    }

    #[test]
    fn one_verdict_for_each_case() {
        assert_eq!(judged(40, 0, 0).verdict, Verdict::Identical);
        assert_eq!(judged(40, 0, 12).verdict, Verdict::Differs);
        assert_eq!(judged(40, 12, 12).verdict, Verdict::AsItself);
        assert_eq!(judged(40, 12, 0).verdict, Verdict::Identical);
        assert_eq!(
            judged(40, 0, 2).verdict,
            Verdict::Underpowered,
            "two texts of forty prove nothing, and are no pass"
        );
        assert_eq!(judged(40, 0, 2).verdict.outcome(), Outcome::Negative);
        assert_eq!(judged(40, 0, 12).repeats.only_a, 12);
    }

    #[test]
    fn an_answer_that_never_came_matches_nothing() {
        let mut rounds = Rounds { a: round(["a".into()]), again: round(["a".into()]), b: round(["a".into()]) };
        rounds.a.answers[0].text = Err("gone".into());
        rounds.b.answers[0].text = Err("gone".into());
        let judged = judge(&rounds, None);
        assert_eq!((judged.unanswered, judged.verdict == Verdict::Identical), (2, false));
    }

    #[test]
    fn right_answers_are_compared_question_by_question() {
        let rounds = Rounds { a: round(["a".into()]), again: round(["a".into()]), b: round(["a".into()]) };
        let correct = [vec![true, true, false, true], vec![true, false, true, true]];
        let correct = judge(&rounds, Some(&correct)).correct.unwrap();
        assert_eq!((correct.mcnemar.only_a, correct.mcnemar.only_b), (1, 1));
        assert_eq!(correct.sides.map(|side| side.unwrap().value), [0.75, 0.75]);
    }
}
