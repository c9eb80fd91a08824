//! What instances write: lines that go to a file of bounded size, and to whoever looks.
//!
//! ```text
//!   name.log      up to 8 MiB; then it becomes
//!   name.log.1    the 8 MiB before, of which there is one
//! ```

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::tail::previous;

/// A file grows to this, and there are two of them.
const FILE_BYTES: u64 = 8 << 20;
/// A longer line is cut into several.
const LINE_BYTES: usize = 16 << 10;

/// Appends lines.
#[derive(Debug)]
pub(crate) struct LogFile {
    path: PathBuf,
    file: File,
    bytes: u64,
    max_bytes: u64,
}

impl LogFile {
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        Self::bounded(path, FILE_BYTES)
    }

    fn bounded(path: &Path, max_bytes: u64) -> io::Result<Self> {
        let file = open(path)?;
        Ok(Self { path: path.to_owned(), bytes: file.metadata()?.len(), file, max_bytes })
    }

    pub(crate) fn line(&mut self, line: &str) -> io::Result<()> {
        let added = line.len() as u64 + 1;
        if self.bytes > 0 && self.bytes + added > self.max_bytes {
            fs::rename(&self.path, previous(&self.path))?;
            self.file = open(&self.path)?;
            self.bytes = 0;
        }
        self.bytes += added;
        self.file.write_all(format!("{line}\n").as_bytes())
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

/// Takes what a process writes apart into lines, none of them longer than [`LINE_BYTES`]. Ends with the last writer.
pub(crate) fn each_line(mut from: impl Read, mut tell: impl FnMut(&str)) {
    let mut buffer = [0; 8192];
    let mut begun: Vec<u8> = Vec::new();
    loop {
        let count = match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => break,
        };
        for &byte in &buffer[..count] {
            if byte == b'\n' || begun.len() == LINE_BYTES {
                tell(String::from_utf8_lossy(&begun).trim_end_matches('\r'));
                begun.clear();
            }
            if byte != b'\n' {
                begun.push(byte);
            }
        }
    }
    if !begun.is_empty() {
        tell(&String::from_utf8_lossy(&begun));
    }
}

#[cfg(test)]
mod tests {
    use super::super::tail::{Follower, last};
    use super::*;

    #[test]
    fn files_stay_small_and_the_last_lines_are_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("1-a.log");
        let mut log = LogFile::bounded(&path, 100).unwrap();
        let mut follower = Follower::at_end(&path).unwrap();
        let mut followed = Vec::new();
        for number in 0..1000 {
            log.line(&format!("line {number}")).unwrap();
            if number % 3 == 0 {
                followed.extend(follower.read().unwrap().unwrap());
            }
        }
        followed.extend(follower.read().unwrap().unwrap());
        assert_eq!(followed, (0..1000).map(|number| format!("line {number}")).collect::<Vec<_>>());
        assert!(fs::metadata(&path).unwrap().len() <= 100 && fs::metadata(previous(&path)).unwrap().len() <= 100);
        assert_eq!(last(&path, 3).unwrap(), ["line 997", "line 998", "line 999"]);
        let most = last(&path, 10_000).unwrap();
        assert!(most.len() > 10 && most.last().unwrap() == "line 999", "both files count: {}", most.len());
        fs::remove_file(&path).unwrap();
        assert_eq!(follower.read().unwrap(), None);
    }

    #[test]
    fn lines_are_cut_and_the_last_one_needs_no_end() {
        let long = "x".repeat(LINE_BYTES + 5);
        let text = format!("a\r\n\n{long}\nlast");
        let mut lines = Vec::new();
        each_line(text.as_bytes(), |line| lines.push(line.to_owned()));
        assert_eq!(lines, ["a".to_owned(), String::new(), "x".repeat(LINE_BYTES), "x".repeat(5), "last".to_owned()]);
    }
}
