//! A machine or a neighbour that does not do as it should: one sentence, exit code 2, and nothing is harmed.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{Signal, geteuid};

use crate::process::{Server, kvctl, kvserve};

const SMALL: [&str; 6] = ["--port", "0", "--threads", "1", "--kv-budget", "64M"];

/// Says past the capture of test output why a test did not run; `scripts/test` lists these lines.
fn skipped(test: &str, reason: &str) {
    use std::io::Write;
    let _ = std::io::stderr().write_all(format!("SKIPPED: {test}: {reason}\n").as_bytes());
}

/// The one sentence of a `kvserve` that did not start.
#[track_caller]
fn sentence(output: &Output) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(output.stdout.is_empty() && text.starts_with("error: ") && text.lines().count() == 1, "{output:?}");
    text
}

fn files(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The same program with the same arguments and variables, started by a shell that does something before.
fn behind(shell: &[&str], command: &Command) -> Command {
    let mut behind = Command::new(shell[0]);
    behind.args(&shell[1..]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => behind.env(name, value),
            None => behind.env_remove(name),
        };
    }
    behind
}

#[test]
fn a_bound_on_the_size_of_files_is_an_error_and_not_the_end_of_the_process() {
    let dir = tempfile::tempdir().unwrap();
    for blocks in [0, 1, 16] {
        let script = format!("ulimit -f {blocks}; exec \"$0\" \"$@\"");
        let output = behind(&["sh", "-c", &script], &kvserve(dir.path(), &SMALL)).output().unwrap();
        let text = sentence(&output);
        assert!(text.contains("`ulimit -f`"), "{text}");
        assert_eq!(files(dir.path()), Vec::<String>::new(), "{blocks} blocks");
    }
}

/// Opening it waited for a reader, for ever.
#[test]
fn a_log_that_is_a_pipe_without_a_reader_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("log");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let mut command = kvserve(dir.path(), &SMALL);
    let text = sentence(&command.env("KVCACHED_LOG_FILE", &pipe).output().unwrap());
    assert!(text.contains("is a pipe that nobody reads"), "{text}");
    assert_eq!(files(dir.path()), ["log"]);
}

#[test]
fn a_new_log_is_for_its_user_alone() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let mut server = Server::start_with(&[], |command| {
        command.env("KVCACHED_LOG_FILE", &log).env("KVCACHED_LOG_LEVEL", "INFO");
    });
    assert_eq!(fs::metadata(&log).unwrap().mode() & 0o7777, 0o600);
    server.signal(Signal::TERM);
    assert_eq!(server.wait().code(), Some(0));
}

/// In a user namespace of its own, which may have none: this machine's others keep theirs.
#[test]
fn no_free_inotify_instance_is_named_with_its_setting() {
    let dir = tempfile::tempdir().unwrap();
    let script = "echo 0 > /proc/sys/user/max_inotify_instances || exit 77; exec \"$0\" \"$@\"";
    let command = kvserve(dir.path(), &SMALL);
    let shell = ["unshare", "--user", "--map-root-user", "sh", "-c", script];
    let output = match behind(&shell, &command).stdin(Stdio::null()).output() {
        Ok(output)
            if output.status.code() != Some(77) && !String::from_utf8_lossy(&output.stderr).contains("unshare: ") =>
        {
            output
        }
        _ => return skipped("no_free_inotify_instance_is_named_with_its_setting", "no user namespaces here"),
    };
    let text = sentence(&output);
    assert!(text.contains("fs.inotify.max_user_instances"), "{text}");
    assert_eq!(files(dir.path()), Vec::<String>::new());
}

/// Writing to it would change a file elsewhere.
#[test]
fn a_hard_link_at_a_pools_or_ledgers_name_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let uid = geteuid().as_raw();
    let segment = [1_i64 << 30, 0, 0].map(i64::to_ne_bytes).concat();
    for (name, bytes) in [
        ("chat".to_owned(), segment),
        ("chat".to_owned(), Vec::new()),
        (format!("kvcached-ledger-{uid}-host"), b"somebody's".to_vec()),
    ] {
        let (file, link) = (elsewhere.path().join("file"), dir.path().join(&name));
        fs::write(&file, &bytes).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        fs::hard_link(&file, &link).unwrap();
        let mut command = kvserve(dir.path(), &SMALL);
        let text = sentence(&command.env("KVCACHED_IPC_NAME", "chat").output().unwrap());
        assert!(text.contains("hard link") && text.contains(&name), "{text}");
        assert_eq!(fs::read(&file).unwrap(), bytes);
        assert_eq!(files(dir.path()), [name], "nothing else is left");
        fs::remove_file(link).unwrap();
    }
}

#[test]
fn a_folder_in_which_others_could_replace_files_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |part: &str| {
        let text = sentence(&kvserve(dir.path(), &SMALL).output().unwrap());
        assert!(text.contains(part) && text.contains("KVCACHED_RUNTIME_DIR"), "{text}");
        for args in [&["list"][..], &["gc"], &["limit", "chat", "1G"]] {
            let text = sentence(&kvctl(dir.path(), args));
            assert!(text.contains(part), "{args:?}: {text}");
        }
        let doctor = kvctl(dir.path(), &["doctor", "--json"]);
        let checks: serde_json::Value = serde_json::from_slice(&doctor.stdout).unwrap();
        assert!(checks.to_string().contains("no pool of yours starts"), "{checks}");
        assert_eq!(files(dir.path()), Vec::<String>::new());
    };
    let mode = |mode| fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
    mode(0o777);
    refused("everybody could replace the files");
    mode(0o1777);
    assert!(kvctl(dir.path(), &["list"]).status.success(), "a sticky one is everybody's, as /dev/shm");
    mode(0o700);
    if !geteuid().is_root() {
        return skipped("a_folder_in_which_others_could_replace_files_is_refused", "only root can give a folder away");
    }
    std::os::unix::fs::chown(dir.path(), Some(12_345), None).unwrap();
    refused("belongs to user 12345");
}
