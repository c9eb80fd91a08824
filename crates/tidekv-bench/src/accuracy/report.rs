//! Figures and a table.

use super::Plan;
use super::judge::Judged;
use crate::result::BenchResult;
use crate::statistics::{Mcnemar, Proportion};
use crate::stats::to_f64;
use crate::table::{Table, format_figure};

pub(super) fn fill(result: &mut BenchResult, judged: &Judged, token_match: Option<f64>) {
    if let Some(share) = judged.text_match {
        result.set_figure("text_match", share.value);
        result.set_interval("text_match_ci", share.low, share.high);
    }
    if let Some(share) = token_match {
        result.set_figure("token_match", share);
    }
    if let Some(share) = judged.self_match {
        result.set_figure("self_match", share.value);
    }
    fill_test(result, "mcnemar", judged.repeats);
    if let Some(correct) = &judged.correct {
        for (name, side) in ["a", "b"].iter().zip(correct.sides) {
            if let Some(share) = side {
                result.set_figure(&format!("correct.{name}"), share.value);
                result.set_interval(&format!("correct.{name}_ci"), share.low, share.high);
            }
        }
        fill_test(result, "correct.mcnemar", correct.mcnemar);
    }
    result.set_figure("unanswered", to_f64(judged.unanswered as u64));
    result.set_text("verdict", &judged.verdict.to_string());
}

fn fill_test(result: &mut BenchResult, place: &str, test: Mcnemar) {
    result.set_figure(&format!("{place}.only_a"), to_f64(test.only_a as u64));
    result.set_figure(&format!("{place}.only_b"), to_f64(test.only_b as u64));
    result.set_figure(&format!("{place}.p_value"), test.p_value);
}

pub(super) fn table(plan: &Plan, judged: &Judged, token_match: Option<f64>) -> String {
    let mut table = Table::new(&[format!("{} prompts, greedy", plan.num_prompts).as_str(), "share", "95 % interval"]);
    let mut row = |name: String, share: Option<Proportion>| {
        if let Some(share) = share {
            let interval = format!("{:.1} .. {:.1} %", share.low * 100.0, share.high * 100.0);
            table.row(&[name, format!("{:.1} %", share.value * 100.0), interval]);
        }
    };
    let [a, b] = plan.names;
    row(format!("same text from {a} and {b}"), judged.text_match);
    row(format!("same text from {a} twice"), judged.self_match);
    if let Some(correct) = &judged.correct {
        for (name, side) in plan.names.iter().zip(correct.sides) {
            row(format!("right answers of {name}"), side);
        }
    }
    let mut text = format!("A {a} ({}), B {b} ({})\n\n{}\n", plan.a, plan.b, table.render());
    text += &match token_match {
        Some(share) => format!("Tokens of {a} before the first that differs: {:.2} %\n", share * 100.0),
        None => "The server does not split texts into tokens (/tokenize): texts alone were compared.\n".to_owned(),
    };
    text += &format!(
        "{a} repeats itself and {b} differs: {} prompts; the other way round: {}; McNemar p = {}\n",
        judged.repeats.only_a,
        judged.repeats.only_b,
        format_figure(judged.repeats.p_value)
    );
    if let Some(correct) = &judged.correct {
        let test = correct.mcnemar;
        text += &format!(
            "Right with {a} alone: {}, with {b} alone: {}; McNemar p = {}\n",
            test.only_a,
            test.only_b,
            format_figure(test.p_value)
        );
    }
    if judged.unanswered > 0 {
        text += &format!("{} answers never came and match nothing\n", judged.unanswered);
    }
    text + &format!("Verdict: {}\n", judged.verdict)
}
