//! Figures and a table.

use super::Plan;
use super::judge::Judged;
use crate::result::BenchResult;
use crate::statistics::Proportion;
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
    if let Some(later) = judged.later {
        result.set_figure("self_match", later.within);
        result.set_figure("cross_match", later.across);
        result.set_figure("excess", later.excess());
        result.set_figure("p_value", later.p_value);
        if let Some(least) = later.seen_from {
            result.set_figure("seen_from", least);
        }
    }
    if let Some(correct) = &judged.correct {
        for (name, side) in ["a", "b"].iter().zip(correct.sides) {
            if let Some(share) = side {
                result.set_figure(&format!("correct.{name}"), share.value);
                result.set_interval(&format!("correct.{name}_ci"), share.low, share.high);
            }
        }
        let test = correct.mcnemar;
        result.set_figure("correct.mcnemar.only_a", to_f64(test.only_a as u64));
        result.set_figure("correct.mcnemar.only_b", to_f64(test.only_b as u64));
        result.set_figure("correct.mcnemar.p_value", test.p_value);
    }
    result.set_figure("unanswered", to_f64(judged.unanswered as u64));
    result.set_text("verdict", &judged.verdict.to_string());
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
    if let Some(later) = judged.later {
        let percent = |share: f64| format!("{:.1} %", share * 100.0);
        text += &format!(
            "Later passes, each in an order of its own: {} the same in two of one side, {} in one of {a} and one of {b}; p = {}\n",
            percent(later.within),
            percent(later.across),
            format_figure(later.p_value)
        );
        text += &match later.seen_from {
            Some(least) => format!("A difference of {} of the texts would have been seen.\n", percent(least)),
            None => "So few passes can prove no difference: give more --passes.\n".to_owned(),
        };
    }
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
