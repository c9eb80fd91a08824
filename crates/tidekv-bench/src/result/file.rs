//! A file that appears under its name whole or not at all.
//!
//! ```text
//!   create    runs/.a.json.4711.0.partial    beside its target, so that the rename stays on one file system
//!   commit    write, flush to disk, rename to runs/a.json
//!   dropped   the partial file is removed; runs/a.json is what it was before
//! ```
//!
//! A target that is not a regular file (a pipe, `/dev/stdout`, `/dev/null`) is written to directly: a rename
//! would replace the device itself.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process;

/// Names tried for the partial file before giving up. More than one is taken only if a process of the same id
/// was killed half-way.
const MAX_ATTEMPTS: u32 = 16;

/// A file that is being written and has not got its name yet.
#[derive(Debug)]
#[must_use = "dropping a PendingFile removes it; call commit to keep it"]
pub struct PendingFile {
    file: File,
    /// The partial file and the target; `None` where the target is written to directly.
    rename: Option<(PathBuf, PathBuf)>,
}

impl PendingFile {
    /// Starts a file that will be called `path`. Creating and dropping one is a fair test of whether a result
    /// can be written there, before the hours that it takes to measure it.
    pub fn create(path: &Path) -> io::Result<Self> {
        // A link is followed, so that the file it points to is replaced and not the link.
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        match fs::metadata(&target) {
            Ok(found) if found.is_dir() => return Err(io::Error::from(io::ErrorKind::IsADirectory)),
            Ok(found) if !found.is_file() => {
                let file = OpenOptions::new().write(true).open(&target)?;
                return Ok(Self { file, rename: None });
            }
            Ok(_) | Err(_) => {}
        }
        for attempt in 0..MAX_ATTEMPTS {
            let partial = partial_path(&target, attempt)?;
            match OpenOptions::new().write(true).create_new(true).open(&partial) {
                Ok(file) => {
                    return Ok(Self { file, rename: Some((partial, target)) });
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::from(io::ErrorKind::AlreadyExists))
    }

    /// Writes `contents` and gives the file its name.
    pub fn commit(mut self, contents: &[u8]) -> io::Result<()> {
        self.file.write_all(contents)?;
        if let Some((partial, target)) = &self.rename {
            // Without this a power cut after the rename could leave an empty file under the final name.
            self.file.sync_all()?;
            fs::rename(partial, target)?;
            self.rename = None;
        }
        Ok(())
    }
}

impl Drop for PendingFile {
    fn drop(&mut self) {
        if let Some((partial, _)) = &self.rename {
            // Nothing can be done about a file that will not go, and its name says what it is.
            let _ = fs::remove_file(partial);
        }
    }
}

fn partial_path(target: &Path, attempt: u32) -> io::Result<PathBuf> {
    let file_name = target.file_name().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidFilename))?;
    let mut name = OsString::from(".");
    name.push(file_name);
    name.push(format!(".{}.{attempt}.partial", process::id()));
    Ok(target.with_file_name(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_old_file_stays_until_the_new_one_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        fs::write(&path, "old").unwrap();

        drop(PendingFile::create(&path).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(names(folder.path()), ["a.json"], "an abandoned file leaves nothing behind");

        let pending = PendingFile::create(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        pending.commit(b"new").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(names(folder.path()), ["a.json"]);
    }

    #[test]
    fn a_leftover_of_the_same_process_id_is_stepped_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        fs::write(partial_path(&path, 0).unwrap(), "left by a killed process").unwrap();
        PendingFile::create(&path).unwrap().commit(b"new").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
    }

    #[test]
    fn a_link_is_followed_and_stays_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("real.json"), folder.path().join("link.json"));
        fs::write(&real, "old").unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        PendingFile::create(&link).unwrap().commit(b"new").unwrap();
        assert_eq!(fs::read_to_string(&real).unwrap(), "new");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    }

    #[test]
    fn a_device_is_written_to_and_not_replaced() {
        PendingFile::create(Path::new("/dev/null")).unwrap().commit(b"gone").unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
    }

    #[test]
    fn impossible_targets_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(PendingFile::create(folder.path()).unwrap_err().kind(), io::ErrorKind::IsADirectory);
        let missing = folder.path().join("no/such/a.json");
        assert_eq!(PendingFile::create(&missing).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
