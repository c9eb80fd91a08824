//! Several judged figures of one comparison: how a result and a table show them, and what they come to.

use serde_json::{Map, Value, json};

use super::judge::{Judged, Verdict};

/// Adds `*_ratio`, `ci` and `verdicts` to an entry of a result.
pub(crate) fn add_ratios(
    entry: &mut Map<String, Value>,
    figures: impl IntoIterator<Item = (&'static str, Option<Judged>)>,
) {
    let (mut intervals, mut verdicts) = (Map::new(), Map::new());
    for (name, judged) in figures {
        let Some(judged) = judged else { continue };
        verdicts.insert(name.to_owned(), judged.verdict.to_string().into());
        if let Some(ratio) = judged.ratio {
            entry.insert(format!("{name}_ratio"), ratio.value.into());
            intervals.insert(name.to_owned(), json!([ratio.low, ratio.high]));
        }
    }
    entry.insert("ci".to_owned(), intervals.into());
    entry.insert("verdicts".to_owned(), verdicts.into());
}

/// A ratio with its interval, as a table has it.
pub(crate) fn ratio_cell(judged: Option<Judged>) -> String {
    match judged.and_then(|judged| judged.ratio) {
        Some(ratio) => format!("{:.3} [{:.3}, {:.3}]", ratio.value, ratio.low, ratio.high),
        None => "-".to_owned(),
    }
}

/// Worse if one of them is, else underpowered if one of them is.
pub(crate) fn worst<'a>(figures: impl IntoIterator<Item = &'a Option<Judged>>) -> Verdict {
    figures.into_iter().flatten().fold(Verdict::NoDifference, |worst, judged| match (worst, judged.verdict) {
        (Verdict::Worse, _) | (_, Verdict::Worse) => Verdict::Worse,
        (Verdict::Underpowered, _) | (_, Verdict::Underpowered) => Verdict::Underpowered,
        _ => Verdict::NoDifference,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statistics::Estimate;

    fn judged(verdict: Verdict) -> Option<Judged> {
        let ratio = Some(Estimate { value: 1.0, low: 0.98, high: 1.0204 });
        Some(Judged { verdict, ratio, difference: None, p_value: 1.0, may_be_worse: false })
    }

    #[test]
    fn one_bad_figure_is_enough_and_none_is_no_difference() {
        let (fine, unsure, bad) = (judged(Verdict::Better), judged(Verdict::Underpowered), judged(Verdict::Worse));
        assert_eq!(worst(&[]), Verdict::NoDifference);
        assert_eq!(worst(&[fine, None]), Verdict::NoDifference);
        assert_eq!(worst(&[fine, unsure]), Verdict::Underpowered);
        assert_eq!(worst(&[unsure, bad, fine]), Verdict::Worse);
    }

    #[test]
    fn a_figure_that_a_side_does_not_have_is_left_out() {
        let mut entry = Map::new();
        add_ratios(&mut entry, [("ttft", judged(Verdict::Underpowered)), ("itl", None)]);
        let expected = json!({"ttft_ratio": 1.0, "ci": {"ttft": [0.98, 1.0204]}, "verdicts": {"ttft": "underpowered"}});
        assert_eq!(Value::from(entry), expected);
        assert_eq!([ratio_cell(judged(Verdict::Worse)), ratio_cell(None)], ["1.000 [0.980, 1.020]", "-"]);
    }
}
