//! Which engines an interpreter could import, asked of it without importing them: importing torch alone takes seconds and
//! may start the GPU.
//!
//! The interpreter is a foreign program. It gets a process group of its own and a deadline, after which the whole group is
//! killed; it may print what it likes, of which a bounded part is read and the last line that makes sense counts.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use serde::Deserialize;

use super::Probe;
use super::deadline::Pending;

/// What is asked for, by the names of their distributions.
pub(in super::super) const PACKAGES: [&str; 4] = ["torch", "vllm", "sglang", "kvcached"];

/// The answer is a few hundred bytes.
const ANSWER_MAX: u64 = 64 << 10;

const QUESTION: &str = r#"
import json, sys
import importlib.metadata as metadata
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = str(metadata.version(name))
    except Exception:
        pass
print()
print(json.dumps({"python": sys.version.split()[0], "executable": sys.executable, "packages": found}))
"#;

/// Which interpreter to ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct Interpreter(PathBuf);

/// What it said.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub(in super::super) struct Python {
    /// Its own version.
    pub(in super::super) python: String,
    pub(in super::super) executable: String,
    /// Versions of those of [`PACKAGES`] that it can import.
    pub(in super::super) packages: BTreeMap<String, String>,
}

impl Interpreter {
    /// The one that was named, else the virtual environment's, else the first `python3` on the path.
    pub(in super::super) fn choose(named: Option<&Path>, virtual_env: Option<OsString>) -> Self {
        let of_env = |folder: OsString| Path::new(&folder).join("bin/python");
        let chosen = named.map(Path::to_owned).or_else(|| virtual_env.filter(|it| !it.is_empty()).map(of_env));
        let Some(path) = chosen else { return Self("python3".into()) };
        // It is started in another folder; a name without one is looked for on the path.
        let bare = path.components().count() == 1 && !path.has_root() && named.is_some_and(|it| !it.starts_with("."));
        Self(if bare && !path.exists() { path } else { std::path::absolute(&path).unwrap_or(path) })
    }

    pub(in super::super) fn ask(&self, limit: Duration) -> Probe<Python> {
        let path = self.0.display();
        let mut child = self.spawn().map_err(|error| format!("cannot run {path}: {error}"))?;
        let answer = child.stdout.take().map(|stdout| Pending::start("it", limit, || read_some(stdout)));
        let answer = answer.ok_or_else(|| "it has no output".to_owned()).and_then(Pending::get);
        end(&mut child);
        let answer = answer.map_err(|why| format!("{path}: {why}"))?;
        parse(&answer).ok_or_else(|| format!("{path} does not answer like Python 3.8 or later"))
    }

    fn spawn(&self) -> std::io::Result<Child> {
        Command::new(&self.0)
            .args(["-c", QUESTION])
            .args(PACKAGES)
            // A folder without modules: the current one comes first in what Python imports.
            .current_dir("/")
            .env_remove("ENABLE_KVCACHED")
            .env_remove("KVCACHED_AUTOPATCH")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
    }
}

fn read_some(stdout: ChildStdout) -> Vec<u8> {
    let mut bytes = Vec::new();
    // What was read before an error is as good as any answer.
    let _ = stdout.take(ANSWER_MAX).read_to_end(&mut bytes);
    bytes
}

/// Kills whatever is left of it. Its number, and so its group's, is taken until it is waited for.
fn end(child: &mut Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    let _ = child.wait();
}

/// The last line that is an answer: start-up files may print their own before it.
fn parse(output: &[u8]) -> Option<Python> {
    let text = String::from_utf8_lossy(output);
    text.lines().rev().find_map(|line| serde_json::from_str(line).ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_interpreter_that_was_named_comes_first() {
        let choose = |named: Option<&str>, env: &str| Interpreter::choose(named.map(Path::new), Some(env.into())).0;
        assert_eq!(choose(Some("/opt/python"), "/venv"), Path::new("/opt/python"));
        assert_eq!(choose(Some("python3.99"), "/venv"), Path::new("python3.99"));
        assert_eq!(choose(Some("./python"), ""), std::env::current_dir().unwrap().join("python"));
        assert_eq!(choose(None, "/venv"), Path::new("/venv/bin/python"));
        assert_eq!(choose(None, ""), Path::new("python3"));
    }

    #[test]
    fn the_last_line_that_is_an_answer_counts() {
        let answer = r#"{"python": "3.11.7", "executable": "/p", "packages": {"torch": "2.7.0"}}"#;
        let python = parse(format!("hello\n{{}}\n{answer}\nbye\n").as_bytes()).unwrap();
        assert_eq!((python.python.as_str(), python.packages["torch"].as_str()), ("3.11.7", "2.7.0"));
        for garbage in [&b""[..], b"hello", b"{}", b"[1]", b"\xff\xfe\0", br#"{"python": 3}"#] {
            assert_eq!(parse(garbage), None, "{garbage:?}");
        }
    }

    /// A folder with a program that does as the script says.
    fn program(script: &str) -> (tempfile::TempDir, Interpreter) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("python");
        // Written by another process: a child that another test starts at this moment must not have it open for writing, or
        // it cannot be run.
        let write = ["-c", r#"printf '#!/bin/sh\n%s\n' "$1" > "$0" && chmod 755 "$0""#];
        let mut shell = std::process::Command::new("sh");
        assert!(shell.args(write).arg(&path).arg(script).status().unwrap().success());
        let interpreter = Interpreter::choose(Some(&path), None);
        (folder, interpreter)
    }

    #[test]
    fn a_program_that_hangs_is_killed_with_its_children() {
        let (folder, hangs) = program("sleep 600 & echo $! > \"${0%/*}/child\"; echo ready; wait");
        // Long enough for the script to have started its child on a busy machine; the test waits for all of it.
        let why = hangs.ask(Duration::from_secs(3)).unwrap_err();
        assert!(why.contains("did not answer within 3 s"), "{why}");
        let child: i32 = fs::read_to_string(folder.path().join("child")).unwrap().trim().parse().unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while rustix::process::test_kill_process(Pid::from_raw(child).unwrap()).is_ok() && !is_zombie(child) {
            assert!(std::time::Instant::now() < deadline, "its child {child} lives");
            std::thread::yield_now();
        }
    }

    /// Dead, and its new parent has not looked yet.
    fn is_zombie(pid: i32) -> bool {
        fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z "))
    }

    #[test]
    fn endless_output_and_other_programs_are_no_answer() {
        let patience = Duration::from_secs(60);
        for script in ["exec yes", "exit 3", "echo no such module", "printf '\\377\\000'"] {
            let (_folder, program) = program(script);
            let why = program.ask(patience).unwrap_err();
            assert!(why.contains("does not answer like Python"), "{script}: {why}");
        }
        let missing = Interpreter::choose(Some(Path::new("/no/such/python")), None);
        assert!(missing.ask(patience).unwrap_err().starts_with("cannot run /no/such/python: "));
    }

    #[test]
    fn packages_are_found_by_their_metadata_and_not_imported() {
        let folder = tempfile::tempdir().unwrap();
        let package = folder.path().join("torch-9.9.1.dist-info");
        fs::create_dir(&package).unwrap();
        fs::write(package.join("METADATA"), "Metadata-Version: 2.1\nName: torch\nVersion: 9.9.1\n").unwrap();
        fs::write(folder.path().join("torch.py"), "raise SystemExit(1)\n").unwrap();
        let script = format!("PYTHONPATH='{}' exec python3 \"$@\"", folder.path().display());
        let (_folder, python) = program(&script);
        match python.ask(Duration::from_secs(60)) {
            Ok(answer) => assert_eq!(answer.packages["torch"], "9.9.1"),
            Err(why) => eprintln!("SKIPPED: packages_are_found_by_their_metadata_and_not_imported: {why}"),
        }
    }
}
