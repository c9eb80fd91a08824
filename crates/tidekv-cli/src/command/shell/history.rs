//! Lines of earlier sessions: `~/.kvctl_history`, mode 0600, the latest 1,000.
//!
//! Each line is written when it is entered, so that a session that is killed keeps what it had, and two at once do not
//! lose each other's lines. Without a home, or with one that cannot be written, there is simply no history: that is
//! never a reason to say anything.

use std::env;
use std::fs;
use std::path::PathBuf;

use rustyline::Editor;
use rustyline::history::FileHistory;

use super::complete::Completer;

/// How many lines are kept.
pub(super) const LINES: usize = 1000;

/// Where they are kept, if anywhere.
pub(super) struct HistoryFile(Option<PathBuf>);

impl HistoryFile {
    /// In the home of this user, as kvcached's.
    pub(super) fn of_user() -> Self {
        let home = env::var_os("HOME").filter(|home| !home.is_empty());
        Self::at(home.map(|home| PathBuf::from(home).join(".kvctl_history")))
    }

    /// Only a file: `ln -s /dev/null ~/.kvctl_history` is how some turn it off, and a device must not get our mode.
    fn at(path: Option<PathBuf>) -> Self {
        let may_be_file = |path: &PathBuf| fs::metadata(path).map_or(true, |metadata| metadata.is_file());
        Self(path.filter(may_be_file))
    }

    /// Reads what is there.
    pub(super) fn load(&self, editor: &mut Editor<Completer, FileHistory>) {
        let _ = self.0.as_ref().map(|path| editor.load_history(path));
    }

    /// Adds a line, here and in the file.
    pub(super) fn add(&self, editor: &mut Editor<Completer, FileHistory>, line: &str) {
        // False for an empty line, or one that repeats the last or begins with a blank.
        if editor.add_history_entry(line).unwrap_or(false) {
            let _ = self.0.as_ref().map(|path| editor.append_history(path));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustyline::Config;
    use rustyline::history::History;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;
    use tidekv_shm::RuntimeDir;

    fn editor() -> Editor<Completer, FileHistory> {
        let config = Config::builder().max_history_size(3).unwrap().history_ignore_space(true).build();
        let mut editor = Editor::with_config(config).unwrap();
        editor.set_helper(Some(Completer::new(&RuntimeDir::at("/not/there"))));
        editor
    }

    fn lines(path: &Path) -> Vec<String> {
        let mut editor = editor();
        HistoryFile::at(Some(path.to_owned())).load(&mut editor);
        editor.history().iter().cloned().collect()
    }

    #[test]
    fn lines_are_kept_privately_and_bounded_and_sessions_do_not_lose_each_others() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("history");
        let file = HistoryFile::at(Some(path.clone()));
        let (mut one, mut two) = (editor(), editor());
        file.add(&mut one, "list");
        file.add(&mut two, "gc");
        file.add(&mut one, " secret");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(lines(&path), ["list", "gc"]);
        for line in ["a", "b", "c", "d"] {
            file.add(&mut one, line);
        }
        assert_eq!(lines(&path), ["b", "c", "d"]);
        assert!(fs::read_to_string(&path).unwrap().lines().count() <= 10, "the file is bounded too");
    }

    #[test]
    fn what_is_no_file_or_cannot_be_written_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        let mode = |path: &str| fs::metadata(path).unwrap().permissions().mode();
        let before = mode("/dev/null");
        for path in [None, Some(link), Some(folder.path().join("no/such/folder"))] {
            let file = HistoryFile::at(path);
            let mut editor = editor();
            file.load(&mut editor);
            file.add(&mut editor, "list");
            assert_eq!(editor.history().len(), 1, "this session has it");
        }
        assert_eq!(mode("/dev/null"), before);
        let garbage = folder.path().join("garbage");
        fs::write(&garbage, b"\xff\xfe\n\0").unwrap();
        let file = HistoryFile::at(Some(garbage));
        let mut editor = editor();
        file.load(&mut editor);
        file.add(&mut editor, "list");
    }
}
