//! Several measurements at once: one comparison for each.
//!
//! As with single figures, a measurement of A that B lacks is a failure where failing was asked for, and one that only
//! B has is named.

use std::collections::BTreeMap;

use anyhow::Context;
use serde::Serialize;

use super::comparison::{Comparison, Terms};
use super::groups::Pairs;
use crate::result::{self, ResultError};

/// Two sides with several measurements each.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SetComparison {
    schema: &'static str,
    /// The share given by `--fail-above`.
    pub fail_above: Option<f64>,
    /// Whether a comparison failed, or a result is gone, where failing was asked for.
    pub failed: bool,
    /// Comparisons by the name of their files, without `.json`, or by what was measured.
    pub results: BTreeMap<String, Comparison>,
    /// Results that only B has.
    pub missing_in_a: Vec<String>,
    /// Results that only A has.
    pub missing_in_b: Vec<String>,
}

impl SetComparison {
    pub(super) fn of(pairs: Pairs, terms: &Terms) -> anyhow::Result<Self> {
        let Pairs { pairs, missing_in_a, missing_in_b } = pairs;
        let mut results = BTreeMap::new();
        for pair in pairs {
            let comparison = Comparison::of(&pair.a, &pair.b, terms)
                .with_context(|| format!("{} of the two sides cannot be compared", pair.label))?;
            let known = results.insert(pair.label, comparison);
            debug_assert!(known.is_none(), "each pair has a label of its own");
        }
        let gone = terms.may_fail && !missing_in_b.is_empty();
        Ok(Self {
            schema: "tidekv.compare_folders.v1",
            fail_above: terms.tolerance.filter(|_| terms.may_fail).map(super::judge::Tolerance::share),
            failed: gone || results.values().any(|comparison| comparison.failed),
            results,
            missing_in_a,
            missing_in_b,
        })
    }

    /// One JSON object.
    pub fn to_json(&self) -> Result<String, ResultError> {
        result::render(self)
    }

    /// One table after the other.
    pub fn to_text(&self) -> String {
        let each = self.results.iter().map(|(name, comparison)| format!("=== {name} ===\n{}\n", comparison.to_text()));
        let mut text: String = each.collect();
        for (side, missing) in [("B", &self.missing_in_b), ("A", &self.missing_in_a)] {
            if !missing.is_empty() {
                text += &format!("missing in {side}: {}\n", missing.join(", "));
            }
        }
        text + if self.failed { "FAILED\n" } else { "" }
    }
}
