//! `kvbench report DIR`: all results of a folder as one HTML file that needs nothing else.
//!
//! ```text
//!   DIR ──runs──> runs, by benchmark ──┬─ overview       every run: where, when, of which build
//!                                      ├─ serving        latency against rate; memory beside latency over time
//!                                      ├─ samples        distributions
//!                                      ├─ summary        figures
//!                                      ├─ reproduce      the command for each
//!                                      └─ environment    ──> page.rs ──> FILE.html
//!                                                            bundle.rs ──> FILE.tar.gz
//! ```
//!
//! There is no script in the page, nothing is loaded from anywhere, and all text from results passes through
//! `html::escape`. Every plot has its numbers beside it in a table.

mod bundle;
mod environment;
mod html;
mod page;
mod plot;
mod reproduce;
mod samples;
mod serving;
mod summary;
mod variants;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::{Args, ValueHint};
use serde_json::Value;

use crate::output;
use crate::result::PendingFile;
use crate::runs::{Run, expand, natural, read_file};
use tidekv_cli::exit::Outcome;

/// Arguments of `kvbench report`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct ReportArgs {
    /// A folder of results, or of folders of results; or one result
    #[arg(value_name = "DIR", value_hint = ValueHint::AnyPath)]
    pub dir: PathBuf,

    /// Where the page goes [default: report.html in DIR, or beside the one result]
    #[arg(long, short, value_name = "FILE.html", value_hint = ValueHint::FilePath)]
    pub output: Option<PathBuf>,

    /// Also pack the page, the raw results, environment, configuration and commands, to share them
    #[arg(long, value_name = "FILE.tar.gz", value_hint = ValueHint::FilePath)]
    pub bundle: Option<PathBuf>,

    /// Heading of the page [default: the name of DIR]
    #[arg(long, value_name = "TEXT")]
    pub title: Option<String>,
}

const EXAMPLES: &str = "\
Examples:
  kvbench report runs/                                  # writes runs/report.html
  kvbench report runs/ --output /tmp/report.html
  kvbench report runs/ --bundle runs.tar.gz             # everything that somebody else needs to look into it
  kvbench report before-and-after/ --title 'A and B'    # folders in the folder are read too

Results of kvbench, vLLM, SGLang and aiperf are read, one or several in a file (.json, .jsonl).
Files that are no results are named and left out. The page has no scripts and loads nothing.

Exit status: 0 written, 2 error.";

/// Reads the results, writes the page and says where it is.
pub fn run(args: &ReportArgs) -> anyhow::Result<Outcome> {
    let collected = Collected::read(&args.dir)?;
    let folder =
        if args.dir.is_dir() { args.dir.clone() } else { args.dir.parent().map(Path::to_owned).unwrap_or_default() };
    let target = args.output.clone().unwrap_or_else(|| folder.join("report.html"));
    let title = args.title.clone().unwrap_or_else(|| default_title(&args.dir));
    let page = page::render(&title, &collected);
    write(&target, page.as_bytes())?;
    output::print(&format!("{}\n", target.display()))?;
    if let Some(bundle) = &args.bundle {
        let bytes = bundle::pack(&title, &collected, &page)?;
        write(bundle, &bytes)?;
        output::print(&format!("{}\n", bundle.display()))?;
    }
    Ok(Outcome::Done)
}

fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let written = PendingFile::create(path).and_then(|file| file.commit(bytes));
    written.with_context(|| format!("cannot write {}", path.display()))
}

/// The last part of the path that says something.
fn default_title(dir: &Path) -> String {
    let absolute = fs::canonicalize(dir).unwrap_or_else(|_| dir.to_owned());
    absolute.file_stem().map_or_else(|| "results".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// What a folder has.
struct Collected {
    /// All runs, with paths as seen from the folder.
    runs: Vec<Run>,
    /// The files they are from: the same paths, and the bytes as they are.
    files: Vec<(PathBuf, PathBuf)>,
    /// Files that are no results, and why.
    left_out: Vec<(PathBuf, String)>,
}

impl Collected {
    fn read(dir: &Path) -> anyhow::Result<Self> {
        let mut collected = Self { runs: Vec::new(), files: Vec::new(), left_out: Vec::new() };
        let base = if dir.is_dir() { dir } else { dir.parent().unwrap_or(dir) };
        for file in files_of(dir)? {
            let shown = file.strip_prefix(base).unwrap_or(&file).to_owned();
            match read_file(&file) {
                Ok(mut runs) => {
                    runs.iter_mut().for_each(|run| shown.clone_into(&mut run.source.path));
                    collected.runs.extend(runs);
                    collected.files.push((shown, file));
                }
                Err(error) => {
                    let reason = error.root_cause().to_string();
                    output::warn(&format!("{} is left out: {reason}", file.display()));
                    collected.left_out.push((shown, reason));
                }
            }
        }
        if collected.runs.is_empty() {
            bail!("{} has no results: none of its .json files is one", dir.display());
        }
        Ok(collected)
    }
}

/// The results of a folder and of the folders in it.
fn files_of(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    if !dir.is_dir() {
        return expand(dir);
    }
    let cannot_use = || format!("cannot use {}", dir.display());
    let mut folders = vec![dir.to_owned()];
    for entry in fs::read_dir(dir).with_context(cannot_use)? {
        let path = entry.with_context(cannot_use)?.path();
        if path.is_dir() {
            folders.push(path);
        }
    }
    folders.sort_by_key(|folder| natural(folder));
    // A folder without results is nothing to complain about if another has some.
    let files: Vec<PathBuf> = folders.iter().filter_map(|folder| expand(folder).ok()).flatten().collect();
    if files.is_empty() {
        bail!("{} has no results: there is no .json file in it", dir.display());
    }
    Ok(files)
}

/// Names for the plots of a page, each once.
#[derive(Debug, Default)]
struct Numbering(usize);

impl Numbering {
    fn next_id(&mut self) -> String {
        self.0 += 1;
        format!("plot{}", self.0)
    }
}

/// What a run is called on the page: its file, without the ending.
fn run_label(run: &Run) -> String {
    let label = run.source.path.with_extension("").display().to_string();
    run.source.entry.map_or(label.clone(), |entry| format!("{label} #{entry}"))
}

/// A value as people write it: words without quotes, lists with commas.
fn words(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(words).collect::<Vec<_>>().join(", "),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests;
