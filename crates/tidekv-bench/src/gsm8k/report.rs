//! From scores to figures and a table.

use serde_json::json;

use super::data::Protocol;
use super::score::Score;
use crate::result::BenchResult;
use crate::servers::texts::TextAnswers;
use crate::statistics::{Confidence, Proportion, wilson};
use crate::stats::to_f64;
use crate::table::{Table, format_figure};

/// What an exam came to.
#[derive(Debug)]
pub(super) struct Marks {
    right: Option<Proportion>,
    numeric: Option<Proportion>,
    invalid: Option<Proportion>,
    /// How many questions stood in their own prompt, and how the others did.
    leak: Option<(usize, Option<Proportion>)>,
    questions: usize,
    unanswered: usize,
    first_failure: Option<String>,
    seconds: f64,
    output_tokens: u64,
}

fn share(scores: &[Score], is: fn(&Score) -> bool) -> Option<Proportion> {
    wilson(scores.iter().filter(|score| is(score)).count(), scores.len(), Confidence::USUAL)
}

impl Marks {
    pub(super) fn of(protocol: Protocol, shots: usize, scores: &[Score], answers: &TextAnswers) -> Self {
        let leaked = shots.min(scores.len());
        let failures = || answers.answers.iter().filter_map(|answer| answer.text.as_ref().err());
        Self {
            right: share(scores, |score| score.is_right),
            numeric: share(scores, |score| score.is_right_number),
            invalid: share(scores, |score| score.is_invalid),
            leak: (protocol == Protocol::Kvcached && leaked > 0)
                .then(|| (leaked, share(&scores[leaked..], |score| score.is_right))),
            questions: scores.len(),
            unanswered: failures().count(),
            first_failure: failures().next().cloned(),
            seconds: answers.seconds,
            output_tokens: answers.answers.iter().map(|answer| answer.tokens).sum(),
        }
    }

    pub(super) fn fill(&self, result: &mut BenchResult) {
        let mut set_share = |place: &str, share: Option<Proportion>| {
            if let Some(share) = share {
                result.set_figure(&format!("{place}accuracy"), share.value);
                result.set_interval(&format!("{place}accuracy_ci"), share.low, share.high);
            }
        };
        set_share("", self.right);
        set_share("numeric.", self.numeric);
        if let Some((leaked, unleaked)) = self.leak {
            set_share("unleaked.", unleaked);
            result.set_figure("leaked_questions", to_f64(leaked as u64));
        }
        if let Some(invalid) = self.invalid {
            result.set_figure("invalid_rate", invalid.value);
        }
        result.set_figure("unanswered", to_f64(self.unanswered as u64));
        result.set_figure("total_output_tokens", to_f64(self.output_tokens));
        result.set_figure("latency", self.seconds);
        if self.seconds > 0.0 {
            result.set_figure("questions_per_second", to_f64(self.questions as u64) / self.seconds);
            result.set_figure("tokens_per_second", to_f64(self.output_tokens) / self.seconds);
        }
    }

    /// The keys that readers of vLLM's and of kvcached's results know, at the top level.
    pub(super) fn fill_known_keys(&self, result: &mut BenchResult, shots: usize, max_tokens: u32, parallel: usize) {
        for key in
            ["accuracy", "invalid_rate", "latency", "questions_per_second", "total_output_tokens", "tokens_per_second"]
        {
            if let Some(value) = result.summary.get(key).cloned() {
                result.set_more(key, value);
            }
        }
        result.set_more("num_questions", self.questions);
        result.set_more("num_shots", shots);
        result.set_more("max_tokens", max_tokens);
        result.set_more("timestamp", jiff::Timestamp::now().to_string());
        result.set_more("task", "gsm8k");
        result.set_more("backend", "openai");
        result.set_more("num_requests", self.questions);
        result.set_more("other", json!({"num_questions": self.questions, "parallel": parallel}));
    }

    pub(super) fn table(&self, model: &str) -> String {
        let mut table = Table::new(&["GSM8K", "accuracy", "95 % interval"]);
        let mut row = |name: &str, share: Option<Proportion>| {
            if let Some(share) = share {
                let interval = format!("{:.1} .. {:.1} %", share.low * 100.0, share.high * 100.0);
                table.row(&[name.to_owned(), format!("{:.1} %", share.value * 100.0), interval]);
            }
        };
        row("as published figures are scored", self.right);
        row("with signs and decimals", self.numeric);
        if let Some((_, unleaked)) = self.leak {
            row("without questions that stood in their own prompt", unleaked);
        }
        row("no number in the answer", self.invalid);
        let mut text =
            format!("{}\n{model}: {} questions in {} s", table.render(), self.questions, format_figure(self.seconds));
        text += &format!(", {} tokens\n", self.output_tokens);
        if let Some((leaked, _)) = self.leak {
            text += &format!(
                "{leaked} questions were asked with their answer in the prompt: that is this protocol's leak\n"
            );
        }
        if let Some(failure) = &self.first_failure {
            text +=
                &format!("{} questions were not answered and count as wrong; the first: {failure}\n", self.unanswered);
        }
        text
    }
}
