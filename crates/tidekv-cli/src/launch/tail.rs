//! Reading what instances wrote, from another process, while they write.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Where the lines are that were written before those of this file.
pub(super) fn previous(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

/// The last `count` lines of a log, those of the file before it included.
pub(crate) fn last(path: &Path, count: usize) -> io::Result<Vec<String>> {
    let mut text = match fs::read(previous(path)) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error),
    };
    text.extend(fs::read(path)?);
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    Ok(lines[lines.len().saturating_sub(count)..].iter().map(|&line| line.to_owned()).collect())
}

/// Reads a log as it grows, over the change to a new file.
#[derive(Debug)]
pub(crate) struct Follower {
    path: PathBuf,
    file: File,
    begun: Vec<u8>,
}

impl Follower {
    /// From its end on.
    pub(crate) fn at_end(path: &Path) -> io::Result<Self> {
        let mut file = File::open(path)?;
        file.seek(SeekFrom::End(0))?;
        Ok(Self { path: path.to_owned(), file, begun: Vec::new() })
    }

    /// The lines that were finished since; none if the log is gone.
    pub(crate) fn read(&mut self) -> io::Result<Option<Vec<String>>> {
        let mut lines = self.rest()?;
        let now = match fs::metadata(&self.path) {
            Ok(now) => now,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(if lines.is_empty() { None } else { Some(lines) });
            }
            Err(error) => return Err(error),
        };
        if now.ino() != self.file.metadata()?.ino() {
            lines.extend(self.rest()?);
            self.file = File::open(&self.path)?;
            lines.extend(self.rest()?);
        }
        Ok(Some(lines))
    }

    fn rest(&mut self) -> io::Result<Vec<String>> {
        self.file.read_to_end(&mut self.begun)?;
        let Some(end) = self.begun.iter().rposition(|&byte| byte == b'\n') else { return Ok(Vec::new()) };
        let whole: Vec<u8> = self.begun.drain(..=end).collect();
        Ok(String::from_utf8_lossy(&whole).lines().map(str::to_owned).collect())
    }
}
