//! Two folders of results, such as `kvbench shm --output-dir` writes: every pair of files of one name is compared.
//!
//! As with single figures, a result of A that B lacks is a failure where failing was asked for, and one that only B has
//! is named.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, bail};
use serde::Serialize;

use super::{Comparison, Tolerance, read};
use crate::result::{self, BenchResult, ResultError};

/// Two folders, file by file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FolderComparison {
    schema: &'static str,
    /// The share given by `--fail-above`.
    pub fail_above: Option<f64>,
    /// Whether a comparison failed, or a result is gone, where failing was asked for.
    pub failed: bool,
    /// Comparisons by the name of their files, without `.json`.
    pub results: BTreeMap<String, Comparison>,
    /// Results that only B has.
    pub missing_in_a: Vec<String>,
    /// Results that only A has.
    pub missing_in_b: Vec<String>,
}

impl FolderComparison {
    /// Compares the results of folder `b` with those of folder `a`.
    pub fn of(a: &Path, b: &Path, fail_above: Option<Tolerance>) -> anyhow::Result<Self> {
        let (of_a, of_b) = (results(a)?, results(b)?);
        let mut compared = BTreeMap::new();
        for (name, first) in &of_a {
            if let Some(second) = of_b.get(name) {
                let comparison = Comparison::of(first, second, fail_above)
                    .with_context(|| format!("{name}.json of the two folders cannot be compared"))?;
                compared.insert(name.clone(), comparison);
            }
        }
        let only = |here: &BTreeMap<String, BenchResult>, there: &BTreeMap<String, BenchResult>| {
            here.keys().filter(|name| !there.contains_key(*name)).cloned().collect::<Vec<_>>()
        };
        let (missing_in_a, missing_in_b) = (only(&of_b, &of_a), only(&of_a, &of_b));
        let gone = fail_above.is_some() && !missing_in_b.is_empty();
        Ok(Self {
            schema: "tidekv.compare_folders.v1",
            fail_above: fail_above.map(Tolerance::share),
            failed: gone || compared.values().any(|comparison| comparison.failed),
            results: compared,
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
        let mut text: String = self
            .results
            .iter()
            .map(|(name, comparison)| format!("=== {name} ===\n{}\n", comparison.to_text()))
            .collect();
        for (side, missing) in [("B", &self.missing_in_b), ("A", &self.missing_in_a)] {
            if !missing.is_empty() {
                text += &format!("missing in {side}: {}\n", missing.join(", "));
            }
        }
        text + if self.failed { "FAILED\n" } else { "" }
    }
}

/// The results of a folder by the names of their files.
fn results(folder: &Path) -> anyhow::Result<BTreeMap<String, BenchResult>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot use {}", folder.display()))? {
        let path = entry.with_context(|| format!("cannot use {}", folder.display()))?.path();
        let is_result = path.extension().is_some_and(|extension| extension == "json");
        if let (true, Some(name)) = (is_result, path.file_stem().and_then(|stem| stem.to_str())) {
            found.insert(name.to_owned(), read(&path)?);
        }
    }
    if found.is_empty() {
        bail!("{} has no results: there is no .json file in it", folder.display());
    }
    Ok(found)
}
