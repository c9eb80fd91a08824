//! `kvbench frag`, `idle`, `share` and `hold` as a person runs them, small enough for a debug build.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

mod support;

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tidekv_shm::{RuntimeDir, segment};

fn kvbench(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvbench"));
    command.args(args);
    let ours = ["KVCACHED_IPC_NAME", "KVCACHED_MAX_CACHED_TOKENS", "KVCACHED_PAGE_SIZE_MB", "KVCACHED_HOST_BUDGET"];
    for variable in ours {
        command.env_remove(variable);
    }
    command
}

fn summary(args: &[&str]) -> Value {
    let output = kvbench(args).arg("--json").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut result: Value = serde_json::from_slice(&output.stdout).unwrap();
    result["summary"].take()
}

fn figure(summary: &Value, path: &str) -> f64 {
    summary.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("{path} is missing in {summary}"))
}

fn refused(output: &Output, part: &str) {
    let stderr = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{stderr}");
    assert!(stderr.contains("error: ") && stderr.contains(part), "{stderr} lacks {part:?}");
}

#[test]
fn scattered_blocks_waste_memory_and_churn_brings_it_back() {
    let summary = summary(&["frag", "--quick", "--keep", "10,100"]);
    // 10 blocks a page: a tenth of them, scattered, pin most pages.
    assert!(figure(&summary, "/waste/keep10") > 5.0);
    assert!(figure(&summary, "/churn_waste/keep10") < 1.5);
    assert!(figure(&summary, "/evict_waste/pages/keep10") < figure(&summary, "/evict_waste/age/keep10"));
    assert!((figure(&summary, "/waste/keep100") - 1.0).abs() < 1e-9, "all blocks are live and nothing is wasted");
}

/// The promise: 64 MiB for an idle model of 36 layers, 1.15 times the packed floor with its cache full.
#[test]
fn an_idle_model_holds_little_and_its_cache_lies_packed() {
    let summary = summary(&["idle", "--requests", "300", "--decay", "100ms"]);
    assert!(figure(&summary, "/idle_bytes") <= f64::from(64 << 20), "{summary}");
    assert!(figure(&summary, "/waste") <= 1.15, "{summary}");
    assert!(figure(&summary, "/waste") < figure(&summary, "/age_waste"), "{summary}");
}

#[test]
fn without_a_prefix_cache_there_is_no_waste_to_speak_of() {
    let summary = summary(&["idle", "--requests", "50", "--decay", "50ms", "--max-cached-tokens", "0"]);
    assert_eq!(figure(&summary, "/floor_bytes"), 0.0);
    assert!(summary.get("waste").is_none(), "{summary}");
    assert!(figure(&summary, "/idle_bytes") > 0.0, "the null block's page stays");
}

#[test]
fn two_processes_share_and_the_memory_files_agree() {
    let pattern = ["--pattern", "full", "--cycles", "1", "--phase", "1500ms"];
    let summary = summary(&[&["share", "--weights", "1,3"], &pattern[..]].concat());
    assert_eq!(figure(&summary, "/over_budget_bytes"), 0.0);
    assert!(figure(&summary, "/moments") > 0.0);
    assert!(figure(&summary, "/share_error") < 0.2, "{summary}");
    for path in ["/grant_ms/p99", "/share_ms/p99", "/exhausted", "/reclaims"] {
        assert!(figure(&summary, path) >= 0.0);
    }
}

#[test]
fn bad_input_is_one_sentence() {
    for (args, part) in [
        (&["frag", "--keep", "0"][..], "--keep"),
        (&["frag", "--layers", "0"], "--layers"),
        (&["idle", "--requests", "0"], "--requests"),
        (&["idle", "--decay=-1s"], "--decay"),
        (&["share", "--weights", "1,0"], "is not a weight"),
        (&["share", "--budget-pages", "3"], "--budget-pages"),
        (&["share", "--phase", "100ms"], "--phase"),
        (&["hold", "--name", "x", "--bytes", "1K"], "--bytes"),
        (&["hold", "--name", "x", "--bytes", "4M", "--weight", "0"], "--weight"),
    ] {
        refused(&kvbench(args).output().unwrap(), part);
    }
}

/// A pool that holds memory, and the line it says once it does.
fn hold(dir: &Path, length: &str) -> Child {
    let mut child =
        kvbench(&["hold", "--name", "kvcached_held", "--bytes", "4M", "--backend", "host", "--for", length])
            .env("KVCACHED_RUNTIME_DIR", dir)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("kvcached_held") && line.contains(&child.id().to_string()), "{line}");
    child
}

#[test]
fn a_held_pool_leaves_nothing_behind_when_its_time_is_over() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = hold(folder.path(), "300ms");
    assert_eq!(segment::list(&RuntimeDir::at(folder.path())).len(), 1);
    assert!(child.wait().unwrap().success());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// Not SIGINT, which a shell makes its background jobs ignore, and they their children: these tests among them.
fn terminate(child: &Child) {
    // One that has ended is not waited for yet, so the number is still its own.
    kill_process(Pid::from_child(child), Signal::TERM).unwrap();
}

#[test]
fn a_held_pool_that_is_terminated_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = hold(folder.path(), "1h");
    assert!(segment::has_owner(&folder.path().join("kvcached_held")).unwrap());
    terminate(&child);
    assert_eq!(support::end_of(&mut child).signal(), Some(Signal::TERM.as_raw()));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// `timeout` and supervisors send a signal to a process and once more to its group. `TIDEKV_SIGNALS` pairs of them.
#[test]
fn two_sigterms_some_milliseconds_apart_leave_nothing_behind() {
    let pairs: u64 = std::env::var("TIDEKV_SIGNALS").map_or(6, |count| count.parse().unwrap());
    // The time between the two is what is tested.
    let (_nobody, nobody_says) = mpsc::channel::<()>();
    let left = (0..pairs).filter(|pair| {
        let folder = tempfile::tempdir().unwrap();
        let mut child = hold(folder.path(), "1h");
        terminate(&child);
        let _ = nobody_says.recv_timeout(Duration::from_millis(pair * 50 / pairs));
        terminate(&child);
        support::end_of(&mut child);
        fs::read_dir(folder.path()).unwrap().count() > 0
    });
    assert_eq!(left.count(), 0, "of {pairs} pools left something");
}

/// `KVCACHED_LOG_FILE` and `--log-file`: lines with their level, behind what was there; a bad path is one warning.
#[test]
fn logs_are_appended_to_the_file_that_was_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("kvcached.log");
    fs::write(&log, "before\n").unwrap();
    let hold = |log_file: &Path| {
        let mut command = kvbench(&["hold", "--name", "logged", "--bytes", "4M", "--for", "1s", "--backend", "host"]);
        command.env("KVCACHED_RUNTIME_DIR", folder.path()).env("KVCACHED_LOG_LEVEL", "DEBUG");
        command.env("KVCACHED_LOG_FILE", log_file);
        command
    };
    // Half of the time is over when somebody deletes the pool's segment, which is worth a warning.
    let mut holder = hold(&log).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut first_line = String::new();
    BufReader::new(holder.stdout.as_mut().unwrap()).read_line(&mut first_line).unwrap();
    segment::delete(&folder.path().join("logged")).unwrap();
    assert!(holder.wait().unwrap().success());
    let text = fs::read_to_string(&log).unwrap();
    assert!(text.starts_with("before\n"), "{text}");
    assert!(text.lines().any(|line| line.contains(" WARN ") && line.contains("segment")), "{text}");

    let output = hold(&folder.path().join("missing/kvcached.log")).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{stderr}");
    assert_eq!(stderr.lines().filter(|line| line.starts_with("warning: logs go to")).count(), 1, "{stderr}");
}
