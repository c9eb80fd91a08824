//! Two sides of one benchmark, figure by figure.

use std::collections::HashMap;

use anyhow::bail;
use serde::Serialize;

use super::direction::{self, Direction};
use super::judge::{Judged, Tolerance, Verdict, judge, judge_pairs, judge_runs, ratio};
use super::warnings::warnings;
use crate::runs::Run;
use crate::statistics::{
    Bootstrap, Confidence, Estimate, coefficient_of_variation, detectable_change, enough_pairs, enough_runs, median,
    runs_for,
};

/// By what a comparison is made.
#[derive(Clone, Debug)]
pub struct Terms {
    /// What is no difference; `None` for the usual, which depends on whether there are several runs.
    pub tolerance: Option<Tolerance>,
    /// Whether a figure that may be worse by more than the tolerance, or is gone, is a failure.
    pub may_fail: bool,
    /// How sure intervals are.
    pub confidence: Confidence,
    /// Whether the n-th run of A belongs to the n-th of B.
    pub paired: bool,
    /// Only figures whose path has one of these in it; all if there are none.
    pub only: Vec<String>,
}

impl Default for Terms {
    fn default() -> Self {
        Self { tolerance: None, may_fail: false, confidence: Confidence::USUAL, paired: false, only: Vec::new() }
    }
}

/// The runs of two sides, figure by figure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    schema: &'static str,
    /// The benchmark.
    pub name: String,
    /// How many runs A and B have.
    pub runs: [usize; 2],
    /// What is no difference, as a share.
    pub tolerance: f64,
    /// The share given by `--fail-above`.
    pub fail_above: Option<f64>,
    /// How sure the intervals are; absent with one run a side, which has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub confidence: Option<f64>,
    /// Whether a figure may be worse, or is gone, where failing was asked for.
    pub failed: bool,
    /// B over A of what most people look at first; only for servers under load.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub headline: Option<Headline>,
    /// Figures that both sides have, in the order of A.
    pub figures: Vec<Compared>,
    /// Paths of figures that only B has.
    pub missing_in_a: Vec<String>,
    /// Paths of figures that only A has.
    pub missing_in_b: Vec<String>,
    /// Why the two may differ for other reasons than the code.
    pub warnings: Vec<String>,
}

/// B over A, medians of the runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Headline {
    /// Requests in a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub throughput: Option<f64>,
    /// Median time to the first token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttft: Option<f64>,
}

/// One figure of both sides.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// Path in `summary`, joined by dots; for a server under load also the keys at the top of its file.
    pub path: String,
    /// Which way is better.
    pub better: Direction,
    /// Value in A, the median of its runs.
    pub a: f64,
    /// Value in B, likewise.
    pub b: f64,
    /// B over A, or `None` where that is not a number.
    pub ratio: Option<f64>,
    /// What B is, measured by A.
    pub verdict: Verdict,
    /// What several runs say beyond that.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub evidence: Option<RunEvidence>,
    #[serde(skip)]
    may_be_worse: bool,
}

/// What several runs a side say about one figure.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RunEvidence {
    /// The interval of B over A; of B minus A where there is no ratio.
    pub interval: Option<Estimate>,
    /// Whether the interval is one of differences.
    pub is_difference: bool,
    /// Coefficients of variation of A and B: their noise, as a share.
    pub noise: [Option<f64>; 2],
    /// Probability that sides which do not differ are as far apart as these.
    pub p_value: f64,
    /// The smallest change, as a share, that such runs show four times in five.
    pub detectable: Option<f64>,
    /// How many runs a side would show a change of the tolerance; only where these did not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runs_needed: Option<usize>,
}

impl Comparison {
    /// Compares the runs of `b` with those of `a`. Results of different benchmarks have nothing to compare.
    pub fn of(a: &[Run], b: &[Run], terms: &Terms) -> anyhow::Result<Self> {
        let (Some(first_a), Some(first_b)) = (a.first(), b.first()) else {
            bail!("a side has no runs");
        };
        if first_a.name != first_b.name {
            bail!("the first is a result of `{}` and the second of `{}`", first_a.name, first_b.name);
        }
        if terms.paired && a.len() != b.len() {
            bail!("--paired takes as many runs of A as of B, and there are {} and {}", a.len(), b.len());
        }
        let several = a.len() > 1 || b.len() > 1;
        let usual = if several { Tolerance::OF_RUNS } else { Tolerance::OF_ONE_RUN };
        let tolerance = terms.tolerance.unwrap_or(usual);
        let (of_a, of_b) = (Figures::of(a, &terms.only), Figures::of(b, &terms.only));
        let in_both =
            |path: &Vec<String>| Some(Compared::of(path, of_a.values(path), of_b.by_path.get(path)?, tolerance, terms));
        let figures: Vec<Compared> = of_a.order.iter().filter_map(in_both).collect();
        let (missing_in_a, missing_in_b) = (of_b.not_in(&of_a), of_a.not_in(&of_b));
        let any_worse = figures.iter().any(|figure| figure.may_be_worse);
        Ok(Self {
            schema: "tidekv.compare.v1",
            name: first_a.name.clone(),
            runs: [a.len(), b.len()],
            tolerance: tolerance.share(),
            fail_above: terms.may_fail.then(|| tolerance.share()),
            confidence: several.then(|| terms.confidence.share()),
            failed: terms.may_fail && (any_worse || !missing_in_b.is_empty()),
            headline: Headline::of(a, b),
            figures,
            missing_in_a,
            missing_in_b,
            warnings: warnings(a, b, terms.paired),
        })
    }

    /// Whether there are several runs on a side, and so intervals.
    pub fn has_intervals(&self) -> bool {
        self.confidence.is_some()
    }

    /// How many figures have this verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        self.figures.iter().filter(|figure| figure.verdict == verdict).count()
    }

    /// How many figures may be worse by more than the tolerance.
    pub fn count_not_passed(&self) -> usize {
        self.figures.iter().filter(|figure| figure.may_be_worse).count()
    }
}

impl Headline {
    fn of(a: &[Run], b: &[Run]) -> Option<Self> {
        if !a.iter().chain(b).all(Run::is_serving) {
            return None;
        }
        let middle = |runs: &[Run], value: fn(&Run) -> Option<f64>| {
            median(&runs.iter().map(value).collect::<Option<Vec<f64>>>()?)
        };
        let b_over_a = |value| ratio(middle(a, value)?, middle(b, value)?);
        Some(Self { throughput: b_over_a(Run::throughput), ttft: b_over_a(Run::ttft_p50_ms) })
    }
}

impl Compared {
    fn of(path: &[String], a: &[Option<f64>], b: &[Option<f64>], tolerance: Tolerance, terms: &Terms) -> Self {
        let better = direction::of_path(path);
        let present = |values: &[Option<f64>]| values.iter().flatten().copied().collect::<Vec<f64>>();
        let (runs_a, runs_b) = (present(a), present(b));
        // A figure is here only if a run of each side has it.
        let (middle_a, middle_b) = (median(&runs_a).unwrap_or(0.0), median(&runs_b).unwrap_or(0.0));
        let mut compared = Self {
            path: path.join("."),
            better,
            a: middle_a,
            b: middle_b,
            ratio: ratio(middle_a, middle_b),
            verdict: judge(better, middle_a, middle_b, tolerance),
            evidence: None,
            may_be_worse: false,
        };
        if a.len() == 1 && b.len() == 1 {
            compared.may_be_worse = compared.verdict == Verdict::Worse;
            return compared;
        }
        let bootstrap = Bootstrap { confidence: terms.confidence, ..Bootstrap::default() };
        let judged = if terms.paired {
            let pairs: Vec<(f64, f64)> = a.iter().zip(b).filter_map(|(a, b)| a.zip(*b)).collect();
            judge_pairs(better, &pairs, tolerance, terms.confidence)
        } else {
            judge_runs(better, &runs_a, &runs_b, tolerance, &bootstrap)
        };
        compared.verdict = judged.verdict;
        compared.may_be_worse = judged.may_be_worse;
        // That of pairs is the middle of their ratios, not the ratio of two medians.
        compared.ratio = judged.ratio.map_or(compared.ratio, |ratio| Some(ratio.value));
        compared.evidence = Some(RunEvidence::of(&judged, &runs_a, &runs_b, tolerance, terms));
        compared
    }
}

impl RunEvidence {
    fn of(judged: &Judged, a: &[f64], b: &[f64], tolerance: Tolerance, terms: &Terms) -> Self {
        let noise = [a, b].map(coefficient_of_variation);
        // What cancels in pairs is part of the noise of each side, so it says little about what pairs can show.
        let known = noise[0].zip(noise[1]).filter(|_| !terms.paired);
        let detectable =
            known.and_then(|(of_a, of_b)| detectable_change((a.len(), of_a), (b.len(), of_b), terms.confidence));
        let needed = || {
            let fewest = (1..).find(|&runs| is_enough(runs, terms))?;
            match known {
                Some((a, b)) => Some(runs_for(tolerance.share(), a.max(b), terms.confidence)?.max(fewest)),
                None => Some(fewest).filter(|&fewest| a.len().min(b.len()) < fewest),
            }
        };
        Self {
            interval: judged.ratio.or(judged.difference),
            is_difference: judged.ratio.is_none(),
            noise,
            p_value: judged.p_value,
            detectable,
            runs_needed: if judged.verdict == Verdict::Underpowered { needed() } else { None },
        }
    }
}

fn is_enough(runs: usize, terms: &Terms) -> bool {
    let risk = terms.confidence.risk();
    if terms.paired { enough_pairs(runs, risk) } else { enough_runs(runs, runs, risk) }
}

/// The figures of a side: what each of its runs has under a path.
struct Figures {
    order: Vec<Vec<String>>,
    by_path: HashMap<Vec<String>, Vec<Option<f64>>>,
}

impl Figures {
    fn of(runs: &[Run], only: &[String]) -> Self {
        let mut figures = Self { order: Vec::new(), by_path: HashMap::new() };
        for (place, run) in runs.iter().enumerate() {
            for figure in run.figures() {
                let is_wanted = only.is_empty() || {
                    let path = figure.path.join(".");
                    only.iter().any(|part| path.contains(part.as_str()))
                };
                if !is_wanted {
                    continue;
                }
                let values = figures.by_path.entry(figure.path.clone()).or_insert_with(|| {
                    figures.order.push(figure.path);
                    vec![None; runs.len()]
                });
                values[place] = Some(figure.value);
            }
        }
        figures
    }

    fn values(&self, path: &[String]) -> &[Option<f64>] {
        self.by_path.get(path).map_or(&[], Vec::as_slice)
    }

    fn not_in(&self, other: &Self) -> Vec<String> {
        let missing = self.order.iter().filter(|path| !other.by_path.contains_key(*path));
        missing.map(|path| path.join(".")).collect()
    }
}
