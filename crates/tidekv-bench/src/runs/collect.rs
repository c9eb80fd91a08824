//! From paths to runs: files, and folders of files.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use super::{Run, parse};
use crate::result::{MAX_READ_BYTES, ResultError};

/// The most files of one folder. A wrong path must not cost an hour.
const MAX_FILES: usize = 10_000;

/// The files that a path stands for: itself, or the `.json` and `.jsonl` files of a folder in the order of their names.
pub fn expand(path: &Path) -> anyhow::Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let cannot_use = || format!("cannot use {}", path.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(path).with_context(cannot_use)? {
        let file = entry.with_context(cannot_use)?.path();
        let is_hidden = file.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
        let is_result = file.extension().is_some_and(|extension| extension == "json" || extension == "jsonl");
        if is_result && !is_hidden && file.is_file() {
            files.push(file);
        }
        if files.len() > MAX_FILES {
            bail!("{} has more than {MAX_FILES} results: give a folder of fewer", path.display());
        }
    }
    if files.is_empty() {
        bail!("{} has no results: there is no .json file in it", path.display());
    }
    files.sort_by_key(|file| natural(file));
    Ok(files)
}

/// A key by which `rate2` comes before `rate16`: digits count as numbers.
pub fn natural(path: &Path) -> Vec<(String, u64)> {
    let name = path.to_string_lossy();
    let mut key = Vec::new();
    let mut rest = name.as_ref();
    while !rest.is_empty() {
        let text_end = rest.find(|character: char| character.is_ascii_digit()).unwrap_or(rest.len());
        let (text, from_digit) = rest.split_at(text_end);
        let digits_end = from_digit.find(|character: char| !character.is_ascii_digit()).unwrap_or(from_digit.len());
        let (digits, behind) = from_digit.split_at(digits_end);
        // More digits than fit are all alike, and the text behind decides.
        key.push((text.to_owned(), if digits.is_empty() { 0 } else { digits.parse().unwrap_or(u64::MAX) }));
        rest = behind;
    }
    key
}

/// The runs of one file.
pub fn read_file(path: &Path) -> anyhow::Result<Vec<Run>> {
    let not_read = |source| ResultError::Read { source };
    let read = || -> Result<Vec<Run>, ResultError> {
        let mut bytes = Vec::new();
        let file = File::open(path).map_err(not_read)?;
        file.take(MAX_READ_BYTES + 1).read_to_end(&mut bytes).map_err(not_read)?;
        parse(&bytes)
    };
    let mut runs = read().with_context(|| format!("cannot use {}", path.display()))?;
    runs.iter_mut().for_each(|run| path.clone_into(&mut run.source.path));
    Ok(runs)
}

/// The runs of all these files and folders, in order.
pub fn read_all(paths: &[PathBuf]) -> anyhow::Result<Vec<Run>> {
    let mut runs = Vec::new();
    for path in paths {
        for file in expand(path)? {
            runs.extend(read_file(&file)?);
        }
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_names_are_in_their_order() {
        let mut names =
            ["r16.json", "r2.json", "r2-10.json", "r2-9.json", "a/r3", "r", "r99999999999999999999999"].map(Path::new);
        names.sort_by_key(|name| natural(name));
        let sorted = ["a/r3", "r", "r2-9.json", "r2-10.json", "r2.json", "r16.json", "r99999999999999999999999"];
        assert_eq!(names, sorted.map(Path::new));
    }
}
