//! Everything that somebody else needs to look into some results: `docs/formats/bundle.md`.
//!
//! ```text
//!   kvbench-bundle/README.md            what this is, and the commands
//!                  report.html          the page
//!                  environment.json     every machine, once
//!                  configuration.json   the arguments of each run
//!                  reproduce.sh         the commands
//!                  results/...          the files as they are, to the byte
//! ```
//!
//! Names, order, owners and dates inside are fixed: the same results make the same bytes.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read, Write as _};
use std::path::{Component, Path};

use anyhow::{Context, bail};
use flate2::write::GzEncoder;
use flate2::{Compression, GzBuilder};
use serde_json::{Map, Value, json};
use tar::{Builder, EntryType, Header};

use super::{Collected, environment, reproduce, run_label};
use crate::output;
use crate::result::{self, MAX_READ_BYTES};
use crate::runs::Run;

const FOLDER: &str = "kvbench-bundle";

/// Arguments and fields whose values are not for sharing.
const SECRETS: [&str; 6] = ["api_key", "key", "token", "password", "authorization", "headers"];

/// The bytes of a bundle.
pub(super) fn pack(title: &str, collected: &Collected, page: &str) -> anyhow::Result<Vec<u8>> {
    let runs: Vec<&Run> = collected.runs.iter().collect();
    runs.iter().flat_map(|run| secrets_in(run)).for_each(|warning| output::warn(&warning));
    let machines: Vec<Map<String, Value>> =
        environment::of(&runs).into_iter().map(|environment| environment.fields).collect();
    let configuration = runs.iter().map(|run| {
        json!({"run": run_label(run), "tool": run.tool.to_string(), "benchmark": run.name, "date": run.date(), "args": run.args})
    });
    let configuration: Vec<Value> = configuration.collect();
    let script = script(&runs);
    let mut archive = Archive::new();
    archive.add("README.md", read_me(title, &runs, &script).as_bytes(), 0o644)?;
    archive.add("report.html", page.as_bytes(), 0o644)?;
    archive.add("environment.json", result::render(&machines)?.as_bytes(), 0o644)?;
    archive.add("configuration.json", result::render(&configuration)?.as_bytes(), 0o644)?;
    archive.add("reproduce.sh", script.as_bytes(), 0o755)?;
    for (shown, file) in &collected.files {
        let mut bytes = Vec::new();
        let read = File::open(file).and_then(|file| file.take(MAX_READ_BYTES + 1).read_to_end(&mut bytes));
        read.with_context(|| format!("cannot read {}", file.display()))?;
        archive.add(&format!("results/{}", inside(shown)?), &bytes, 0o644)?;
    }
    archive.finish().context("the bundle cannot be packed")
}

/// The same path with nothing in it that could lead out of the bundle.
fn inside(path: &Path) -> anyhow::Result<String> {
    let mut parts = Vec::new();
    for component in path.components() {
        match component {
            Component::Normal(part) => parts.push(part.to_string_lossy().into_owned()),
            Component::CurDir => {}
            _ => bail!("{} cannot stand in a bundle", path.display()),
        }
    }
    Ok(parts.join("/"))
}

fn script(runs: &[&Run]) -> String {
    let mut script =
        "#!/usr/bin/env bash\n# The commands that made the results, one for each measurement.\nset -euo pipefail\n"
            .to_owned();
    let mut seen = Vec::new();
    for run in runs {
        let reproduction = reproduce::of(run);
        if seen.contains(&reproduction) {
            continue;
        }
        // A name of a file may hold anything; a comment ends with its line.
        let label = run_label(run).replace(char::is_control, " ");
        let _ = writeln!(script, "\n# {label}");
        if let Some(note) = &reproduction.note {
            let _ = writeln!(script, "# {}", note.replace(char::is_control, " "));
        }
        let _ = writeln!(script, "{}", reproduction.command);
        seen.push(reproduction);
    }
    script
}

fn read_me(title: &str, runs: &[&Run], script: &str) -> String {
    let title = title.replace(char::is_control, " ");
    let count = runs.len();
    let commands: String = script.lines().skip(3).map(|line| format!("    {line}\n")).collect();
    format!(
        "# {title}\n\n{count} benchmark runs, packed by `kvbench report --bundle`.\n\n\
         - `report.html`: plots and tables; open it in a browser, it loads nothing.\n\
         - `environment.json`: machines, devices, drivers and versions.\n\
         - `configuration.json`: what was measured, with all arguments.\n\
         - `reproduce.sh`: the commands.\n\
         - `results/`: the raw results as they were written.\n\n\
         Make the page again with `kvbench report results/`; compare with `kvbench compare`.\n\n\
         ## Commands\n\n{commands}"
    )
}

/// A sentence for each value that looks like a secret.
fn secrets_in(run: &Run) -> Vec<String> {
    let held = |fields: &Map<String, Value>, place: &str| {
        let is_secret = |(key, value): &(&String, &Value)| {
            SECRETS.contains(&key.to_lowercase().as_str())
                && !value.is_null()
                && value.as_str().is_none_or(|text| !text.is_empty() && text != "...")
        };
        let said = |(key, _): (&String, &Value)| {
            format!("{} holds {place}{key}: look at it before you share the bundle", run.source)
        };
        fields.iter().filter(is_secret).map(said).collect::<Vec<String>>()
    };
    let mut all = held(&run.args, "args.");
    all.extend(held(&run.extra, ""));
    all
}

/// A tar file in gzip.
struct Archive(Builder<GzEncoder<Vec<u8>>>);

impl Archive {
    fn new() -> Self {
        Self(Builder::new(GzBuilder::new().mtime(0).write(Vec::new(), Compression::best())))
    }

    fn add(&mut self, name: &str, bytes: &[u8], mode: u32) -> anyhow::Result<()> {
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Regular);
        header.set_size(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
        header.set_mode(mode);
        let path = format!("{FOLDER}/{name}");
        self.0.append_data(&mut header, &path, bytes).with_context(|| format!("{path} cannot be packed"))
    }

    fn finish(self) -> io::Result<Vec<u8>> {
        let mut encoder = self.0.into_inner()?;
        encoder.flush()?;
        encoder.finish()
    }
}
