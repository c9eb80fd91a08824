//! Servers end with their benchmark, however that ends.

use std::fs;
use std::path::Path;

use tidekv_bench::load::mock::{Mock, Script};

use crate::support::{KvBench, Running, kill, wait_for_end, wait_until};

/// Long enough to be interrupted.
const LONG: [&str; 6] = ["--rates", "1", "--seconds", "600", "--warmup-requests", "1"];

/// All processes below the run, its guards and their servers.
fn below(run: &Running) -> Vec<u32> {
    let guards = run.wait_for_children(2);
    let mut servers = Vec::new();
    wait_until("servers to start", || {
        servers = guards.iter().flat_map(|&guard| crate::support::children_of(guard)).collect();
        servers.len() == 2
    });
    guards.into_iter().chain(servers).collect()
}

fn files_in(dir: &Path) -> usize {
    fs::read_dir(dir).map_or(0, Iterator::count)
}

#[test]
fn a_killed_benchmark_takes_its_servers_with_it() {
    let mut run = Running::start(KvBench::new("overhead").args(&LONG));
    let processes = below(&run);
    assert_eq!(processes.len(), 4);
    run.kill();
    processes.into_iter().for_each(wait_for_end);
}

#[test]
fn an_interrupted_benchmark_stops_its_servers_removes_its_folders_and_keeps_what_it_has() {
    let kept = tempfile::tempdir().unwrap();
    let file = kept.path().join("partial.json");
    let mut run = Running::start(KvBench::new("overhead").args(&LONG).args(&["--output", file.to_str().unwrap()]));
    let processes = below(&run);
    run.interrupt();
    assert_eq!(run.code(), Some(130));
    processes.into_iter().for_each(wait_for_end);
    assert_eq!(files_in(run.dir()), 0);
    let result: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(
        (&result["partial"], &result["summary"]["verdict"]),
        (&true.into(), &"interrupted: nothing is concluded".into())
    );
}

#[test]
fn every_benchmark_of_servers_ends_with_130_when_it_is_interrupted() {
    for (subcommand, args) in [
        ("latency-benefit", &["--calibration", "600"][..]),
        ("multi-model", &["--rate", "0.01"]),
        ("accuracy", &["--num-prompts", "100000", "--parallel", "1"]),
    ] {
        let mut run = Running::start(KvBench::new(subcommand).args(args));
        let guards = run.wait_for_children(1);
        run.interrupt();
        assert_eq!(run.code(), Some(130), "{subcommand}");
        guards.into_iter().for_each(wait_for_end);
        assert_eq!(files_in(run.dir()), 0, "{subcommand}");
    }
}

#[test]
fn a_guard_that_is_killed_takes_its_own_server_with_it() {
    let mut run = Running::start(KvBench::new("overhead").args(&LONG));
    let processes = below(&run);
    kill(processes[0]);
    wait_for_end(processes[2]);
    run.kill();
    processes.into_iter().for_each(wait_for_end);
}

#[test]
fn what_a_server_starts_itself_is_stopped_too_and_its_last_words_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let noted = dir.path().join("pid");
    // A server that starts a process of its own, and ends without ever serving.
    let line = format!("sleep 600 & echo $! > {}; echo the disk is on fire; exit 3", noted.display());
    let fine = "sleep 600 # {port}";
    let line = format!("{line} # {{port}}");
    KvBench::new("overhead").args(&["--a-cmd", &line, "--b-cmd", fine]).refused("the disk is on fire");
    let pid = fs::read_to_string(noted).unwrap().trim().parse().unwrap();
    wait_for_end(pid);
}

/// A server that somebody forgot was measured as both sides, and no overhead was found.
#[test]
fn a_server_that_is_there_already_is_not_taken_for_one_that_was_started() {
    let mock = Mock::start(|_| Script::error(404, "not asked")).unwrap();
    let url = mock.base_url().to_string();
    let dir = tempfile::tempdir().unwrap();
    let noted = dir.path().join("started");
    let line = format!("touch {}; sleep 600", noted.display());
    let args = ["--a-cmd", &line, "--b-cmd", &line, "--a-url", &url, "--b-url", &url];
    KvBench::new("overhead").args(&args).refused("answers at");
    assert!(!noted.exists(), "nothing was started beside it");
}

#[test]
fn a_server_that_never_answers_is_given_up() {
    let line = "sleep 600 # {port}";
    KvBench::new("accuracy")
        .args(&["--a-cmd", line, "--b-cmd", line, "--start-timeout", "1"])
        .refused("--start-timeout");
    KvBench::new("overhead").args(&["--a-cmd", "true", "--b-cmd", "true"]).refused("{port}");
    KvBench::new("overhead").args(&["--a-cmd", line]).refused("--b-cmd");
}
