//! The judgements as people and as programs read them.
//!
//! ```text
//!   GPU
//!     ok    driver         580.95.05 (CUDA 13.0)
//!     FIX   compute mode   GPU 0: exclusive process
//!                          means: one process at a time can use it: the second engine fails to start
//!                          fix:   sudo nvidia-smi -i 0 -c DEFAULT
//!   ...
//!   1 finding
//! ```
//!
//! Names of programs, GPUs and files come from others: what a terminal would obey is shown instead.

use std::collections::BTreeMap;

use anyhow::Context;
use serde::Serialize;
use unicode_width::UnicodeWidthStr;

use super::check::{Check, Group, Status};
use super::facts::{Facts, PACKAGES};
use super::judge::pool_of;
use crate::console::{Colour, Console};
use crate::gpu::{ComputeMode, Gpu, GpuMemory, GpuUser, MigPart};

/// Lines are not made narrower than this, whatever the terminal says.
const TEXT_WIDTH_MIN: usize = 40;

/// Writes the report for people.
pub(super) fn text(checks: &[Check], console: &mut Console) -> anyhow::Result<()> {
    let lines = said_once(checks);
    let title_width = lines.iter().map(|line| line.check.title.width()).max().unwrap_or(0);
    // Two blanks, the word, two blanks, the title, two blanks.
    let indent = 2 + WORD_WIDTH + 2 + title_width + 2;
    let width = console.width().map(|width| width.saturating_sub(indent).max(TEXT_WIDTH_MIN));
    let mut group: Option<Group> = None;
    for Line { check, subjects } in &lines {
        if group != Some(check.group) {
            if group.is_some() {
                console.line("")?;
            }
            console.line(console.paint(check.group.title(), Colour::BoldCyan))?;
            group = Some(check.group);
        }
        let what =
            if subjects.is_empty() { check.what.clone() } else { format!("{}: {}", subjects.join(", "), check.what) };
        let what = wrapped(&visible(&what), width, indent);
        console.line(format_args!("  {}  {:<title_width$}  {what}", word(check.status, console), check.title))?;
        if let Some(means) = &check.means {
            let width = width.map(|width| width - LABEL_WIDTH);
            let means = wrapped(&visible(means), width, indent + LABEL_WIDTH);
            console.line(format_args!("{:indent$}{:<LABEL_WIDTH$}{means}", "", "means:"))?;
        }
        if let Some(fix) = &check.fix {
            let label = if check.status == Status::Finding { "fix:" } else { "tip:" };
            // Never wrapped: it is there to be copied.
            console.line(format_args!("{:indent$}{label:<LABEL_WIDTH$}{}", "", visible(fix)))?;
        }
    }
    let findings = checks.iter().filter(|check| check.status == Status::Finding).count();
    let (sum, colour) = match findings {
        0 => ("no findings".to_owned(), Colour::Green),
        1 => ("1 finding".to_owned(), Colour::Red),
        several => (format!("{several} findings"), Colour::Red),
    };
    console.line("")?;
    Ok(console.line(console.paint(&sum, colour))?)
}

/// A line of the report: a check, and everything that the same is said of.
struct Line<'a> {
    check: &'a Check,
    subjects: Vec<&'a str>,
}

/// The checks without repetitions: eight GPUs that are all well take one line, and so does a reason for which a row of
/// checks was skipped.
fn said_once(checks: &[Check]) -> Vec<Line<'_>> {
    let mut lines: Vec<Line<'_>> = Vec::new();
    for check in checks {
        let subject = check.subject.as_deref();
        if let Some(Line { check: last, subjects }) = lines.last_mut() {
            let same = last.what == check.what && last.status == check.status && last.group == check.group;
            if same && last.id == check.id && last.means == check.means && last.fix == check.fix {
                subjects.extend(subject);
                continue;
            }
            if same && check.status == Status::Skipped {
                continue;
            }
        }
        lines.push(Line { check, subjects: subject.into_iter().collect() });
    }
    lines
}

const WORD_WIDTH: usize = 4;
const LABEL_WIDTH: usize = "means: ".len();

fn word(status: Status, console: &Console) -> String {
    let (word, colour) = match status {
        Status::Ok => ("ok", Some(Colour::Green)),
        Status::Note => ("note", Some(Colour::Yellow)),
        Status::Finding => ("FIX", Some(Colour::Red)),
        Status::Skipped => ("skip", None),
    };
    let padded = format!("{word:<WORD_WIDTH$}");
    colour.map_or_else(|| padded.clone(), |colour| console.paint(&padded, colour))
}

/// Control characters as text.
fn visible(text: &str) -> String {
    let show = |c: char| if c.is_control() { c.escape_default().collect() } else { c.to_string() };
    text.chars().map(show).collect()
}

/// Broken between words so that no line is wider than `width`, the further ones indented.
fn wrapped(text: &str, width: Option<usize>, indent: usize) -> String {
    let Some(width) = width else { return text.to_owned() };
    let (mut out, mut column) = (String::new(), 0);
    for word in text.split(' ') {
        if column > 0 && column + 1 + word.width() > width {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent));
            column = 0;
        } else if column > 0 {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += word.width();
    }
    out
}

/// Writes the report for programs: one [`Report`] object.
pub(super) fn json(facts: &Facts, checks: &[Check], console: &mut Console) -> anyhow::Result<()> {
    let report = Report {
        checks,
        findings: checks.iter().filter(|check| check.status == Status::Finding).collect(),
        versions: versions(facts),
        gpus: gpus(facts).iter().map(|gpu| GpuRow::new(gpu, facts)).collect(),
    };
    Ok(console.line(serde_json::to_string_pretty(&report).context("cannot write JSON")?)?)
}

/// What `kvctl doctor --json` prints.
///
/// | key        | what                                                                                              |
/// |------------|---------------------------------------------------------------------------------------------------|
/// | `checks`   | every check: `id`, `group`, `title`, `subject` (or null), `status` (`ok`, `note`, `finding`, `skipped`), `what`, `means` and `fix` (or null) |
/// | `findings` | those of them that are findings; exit status 1 if there is one                                    |
/// | `versions` | `kvctl`, and where they are known `driver`, `cuda`, `python`, `interpreter`, `torch`, `vllm`, `sglang`, `kvcached`; those that are not known are null |
/// | `gpus`     | a [`GpuRow`] each; empty without a driver                                                         |
///
/// The pair of `id` and `subject` names a check; ids are never renamed. Sizes are in bytes.
#[derive(Serialize)]
struct Report<'a> {
    checks: &'a [Check],
    findings: Vec<&'a Check>,
    versions: BTreeMap<&'a str, Option<&'a str>>,
    gpus: Vec<GpuRow<'a>>,
}

/// A GPU in JSON. What the driver does not say is null.
#[derive(Serialize)]
struct GpuRow<'a> {
    index: u32,
    name: &'a str,
    uuid: &'a str,
    total_bytes: Option<u64>,
    free_bytes: Option<u64>,
    compute_mode: Option<ComputeMode>,
    persistence: Option<bool>,
    /// Null on a GPU that cannot be divided.
    mig: Option<MigRow<'a>>,
    /// Processes that use it.
    users: Option<Vec<UserRow<'a>>>,
}

#[derive(Serialize)]
struct MigRow<'a> {
    enabled: bool,
    pending: bool,
    parts: Vec<PartRow<'a>>,
}

#[derive(Serialize)]
struct PartRow<'a> {
    uuid: &'a str,
    total_bytes: Option<u64>,
    free_bytes: Option<u64>,
}

#[derive(Serialize)]
struct UserRow<'a> {
    pid: u32,
    name: Option<&'a str>,
    bytes: Option<u64>,
    /// The pool that this process has, if it has one.
    pool: Option<&'a str>,
}

impl<'a> GpuRow<'a> {
    fn new(gpu: &'a Gpu, facts: &'a Facts) -> Self {
        let live = facts.pools.as_ref().map_or(&[][..], |pools| &pools.live);
        let (total_bytes, free_bytes) = in_bytes(gpu.memory);
        let parts = |parts: &'a [MigPart]| {
            let part = |part: &'a MigPart| {
                let (total_bytes, free_bytes) = in_bytes(part.memory);
                PartRow { uuid: &part.uuid, total_bytes, free_bytes }
            };
            parts.iter().map(part).collect()
        };
        let user = |user: &'a GpuUser| UserRow {
            pid: user.pid,
            name: user.name.as_deref(),
            bytes: user.memory.map(|bytes| bytes.0),
            pool: pool_of(user, live).map(|pool| pool.name.as_str()),
        };
        Self {
            index: gpu.index,
            name: &gpu.name,
            uuid: &gpu.uuid,
            total_bytes,
            free_bytes,
            compute_mode: gpu.compute_mode,
            persistence: gpu.persistence,
            mig: gpu.mig.as_ref().map(|mig| MigRow {
                enabled: mig.enabled,
                pending: mig.pending,
                parts: parts(&mig.parts),
            }),
            users: gpu.users.as_ref().map(|users| users.iter().map(user).collect()),
        }
    }
}

fn in_bytes(memory: Option<GpuMemory>) -> (Option<u64>, Option<u64>) {
    memory.map(|memory| (memory.total.0, memory.free.0)).unzip()
}

fn gpus(facts: &Facts) -> &[Gpu] {
    match &facts.gpus {
        Ok(Ok(report)) => &report.gpus,
        Ok(Err(_)) | Err(_) => &[],
    }
}

fn versions(facts: &Facts) -> BTreeMap<&str, Option<&str>> {
    let driver = facts.gpus.as_ref().ok().and_then(|gpus| gpus.as_ref().ok());
    let python = facts.python.as_ref().ok();
    let mut versions = BTreeMap::from([
        ("kvctl", Some(env!("CARGO_PKG_VERSION"))),
        ("driver", driver.and_then(|report| report.driver.as_deref())),
        ("cuda", driver.and_then(|report| report.cuda.as_deref())),
        ("python", python.map(|python| python.python.as_str())),
        ("interpreter", python.map(|python| python.executable.as_str())),
    ]);
    for package in PACKAGES {
        let version = python.and_then(|python| python.packages.get(package));
        versions.insert(package, version.map(String::as_str));
    }
    versions
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_kept_whole_and_lines_within_the_width() {
        assert_eq!(wrapped("a bb ccc", None, 2), "a bb ccc");
        assert_eq!(wrapped("a bb ccc", Some(4), 2), "a bb\n  ccc");
        assert_eq!(wrapped("aaaaaa b", Some(4), 1), "aaaaaa\n b");
    }

    #[test]
    fn what_a_terminal_would_obey_is_shown() {
        assert_eq!(visible("py\x1b[2Jthon\nü"), "py\\u{1b}[2Jthon\\nü");
    }
}
