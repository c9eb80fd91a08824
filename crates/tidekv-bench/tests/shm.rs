//! `kvbench shm-alloc`, `shm-lookup`, `shm-transfer` and `shm` as people run them who know the originals: their flags,
//! their lines, the patterns that their tools search for; and what the originals lacked: exit codes, checked lookups,
//! nothing left behind.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

const SHM: &str = "/dev/shm";

/// Folders of one test: arenas in memory, profiles of copies beside them.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir_in(SHM).unwrap())
    }

    fn kvbench(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvbench"));
        command.args(args).env("KVCACHED_RUNTIME_DIR", self.0.path()).env("XDG_CACHE_HOME", self.0.path());
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.kvbench(args).output().unwrap()
    }

    /// What a run that succeeds prints.
    fn text(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.text(&[args, &["--json"]].concat())).unwrap()
    }

    /// The error of a run that fails with exit code 2.
    fn error(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
        assert!(stderr.contains("error: "), "{args:?}: {stderr}");
        stderr
    }
}

/// The number that a pattern such as `Linear Scan.*?Avg time per lookup: ([\d.]+) ns` captures.
fn captured(text: &str, words: &[&str], unit: &str) -> f64 {
    let mut rest = text;
    for word in words {
        rest = rest.split_once(word).unwrap_or_else(|| panic!("no {word:?} in {text}")).1;
    }
    let digits: String = rest.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
    assert!(rest[digits.len()..].starts_with(unit), "{words:?} is followed by {digits:?} and not by {unit:?}");
    digits.parse().unwrap()
}

/// `1 MB\s+([\d.]+)\s+([\d.]+)`, as a search through the whole text finds it.
fn one_megabyte_row(text: &str) -> [f64; 2] {
    let rows: Vec<&str> = text.lines().filter(|line| line.contains("1 MB")).collect();
    assert_eq!(rows.len(), 1, "a table of ours says 1 MB too: {rows:?}");
    let words: Vec<&str> = rows[0].split_whitespace().collect();
    assert_eq!(&words[..2], ["1", "MB"]);
    [words[2], words[3]].map(|word| word.parse().unwrap())
}

fn figures(summary: &Value, keys: &[&str]) {
    for key in keys {
        assert!(summary[key].as_f64().is_some_and(|value| value > 0.0), "{key} of {summary}");
    }
}

#[test]
fn allocation_has_every_line_and_every_figure() {
    let place = Place::new();
    let text = place.text(&["shm-alloc", "--num_iterations=100"]);
    for line in [
        "=== SHM Allocation Benchmark ===\nIterations: 100\nSize range: 4 KB - 1024 KB\n",
        "--- Full Allocation (shm_open + ftruncate + mmap) ---\n",
        "                    shm_open(): mean=",
        "                   ftruncate(): mean=",
        "                        mmap(): mean=",
        "        Total (all 3 syscalls): mean=",
        "Cleanup (munmap + close + unlink): mean=",
        "           Size (KB)      Mean Time (ns)   Throughput (MB/s)\n",
        "--- Side by side (medians) ---\n",
    ] {
        assert!(text.contains(line), "no {line:?} in {text}");
    }
    assert!(captured(&text, &["Total (all 3 syscalls)", "mean="], " ns") > 0.0);
    assert!(captured(&text, &["Throughput: "], " allocations/sec") > 0.0);
    let result = place.json(&["shm-alloc", "--num_iterations", "600", "--seed=3"]);
    assert_eq!((&result["name"], &result["args"]["seed"]), (&"shm-alloc".into(), &3.into()));
    figures(
        &result["summary"],
        &[
            "arena_pair_ns",
            "syscall_pair_ns",
            "speedup",
            "speedup_touched_64k",
            "speedup_touched_1m",
            "speedup_paged_64k",
            "speedup_paged_1m",
            "two_process_pair_ns",
        ],
    );
    assert_eq!(result["summary"]["sizes"].as_array().unwrap().len(), 9);
    assert_eq!(fs::read_dir(place.0.path()).unwrap().count(), 0, "no arena is left");
}

#[test]
fn one_side_alone_and_mmap_alone() {
    let place = Place::new();
    let small = ["--num_iterations=20", "--max_size_kb=8", "--procs=1"];
    let text =
        place.text(&[&["shm-alloc", "--impl=syscall", "--measure_mmap_only", "--touch=first"], &small[..]].concat());
    assert!(text.contains("--- mmap() Only (pre-created SHM) ---\n") && text.contains("mmap() only: mean="), "{text}");
    assert!(!text.contains("Arena") && !text.contains("Total (all 3 syscalls)"), "{text}");
    let text = place.text(&[&["shm-alloc", "--impl=arena"], &small[..]].concat());
    assert!(text.contains("--- Arena (") && !text.contains("shm_open()"), "{text}");
    let text = place.text(&[&["shm-alloc", "--impl=syscall", "--touch=all"], &small[..]].concat());
    assert!(text.contains("First touch of the memory: mean="), "{text}");
}

#[test]
fn segments_that_are_left_are_named() {
    let place = Place::new();
    let args = ["shm-alloc", "--impl=syscall", "--num_iterations=5", "--max_size_kb=4", "--nocleanup"];
    let text = place.text(&args);
    assert!(text.contains("5 segments are left behind"), "{text}");
    let named = text.lines().filter_map(|line| line.trim().strip_prefix("... to ").or(Some(line.trim())));
    let paths: Vec<PathBuf> =
        named.filter(|line| line.starts_with("/dev/shm/kvcached-bench-")).map(PathBuf::from).collect();
    assert!(!paths.is_empty() && paths.iter().all(|path| path.exists()), "{text}");
    // All five have the process in their names.
    let process = paths[0].to_str().unwrap().rsplit_once('-').unwrap().0.to_owned();
    let left = of_prefix(&process);
    left.iter().for_each(|path| fs::remove_file(path).unwrap());
    assert_eq!(left.len(), 5);
}

fn of_prefix(prefix: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(SHM).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.to_str().is_some_and(|path| path.starts_with(&format!("{prefix}-")))).collect()
}

#[test]
fn an_interrupt_leaves_nothing_behind() {
    let place = Place::new();
    let many = ["shm-alloc", "--num_iterations=10000000", "--impl=syscall"];
    let mut child = place.kvbench(&many).stdout(Stdio::null()).spawn().unwrap();
    let pid = Pid::from_child(&child);
    let prefix = format!("{SHM}/kvcached-bench-{}-{}", rustix::process::geteuid().as_raw(), child.id());
    let deadline = Instant::now() + Duration::from_secs(60);
    while of_prefix(&prefix).is_empty() {
        assert!(Instant::now() < deadline && child.try_wait().unwrap().is_none(), "it never made a segment");
        std::thread::yield_now();
    }
    kill_process(pid, Signal::TERM).unwrap();
    let status = child.wait().unwrap();
    assert_eq!(status.signal(), Some(Signal::TERM.as_raw()), "it ends as the signal asks");
    assert!(of_prefix(&prefix).is_empty(), "{:?}", of_prefix(&prefix));
}

#[test]
fn lookup_has_every_section_and_is_right() {
    let place = Place::new();
    let text = place.text(&["shm-lookup", "--num_lookups=1000"]);
    for section in [
        "--- Linear Scan (Current Mooncake Implementation) ---\nFound: 1000 / 1000\nTotal time: ",
        "--- Map Lower Bound (O(log n)) ---\nFound: 1000 / 1000\nTotal time: ",
        "--- Arithmetic Translation (O(1) - Flow-IPC Style) ---\nFound: 1000 / 1000\nTotal time: ",
        "--- Arena Handle (O(1), validity checked) ---\nFound: 1000 / 1000\nTotal time: ",
        "--- Summary ---\n",
        "Growth from 10 to 10000 segments (the same number of blocks): ",
        "every lookup was checked: 0 wrong\n",
    ] {
        assert!(text.contains(section), "no {section:?} in {text}");
    }
    assert!(captured(&text, &["Linear Scan", "Avg time per lookup: "], " ns") > 0.0);
    assert!(captured(&text, &["Arithmetic Translation", "Avg time per lookup: "], " ns") > 0.0);
    assert!(captured(&text, &["Linear Scan", "Throughput: "], " lookups/sec") > 0.0);

    let result = place.json(&["shm-lookup", "-num_lookups=2000", "-num_segments=50"]);
    let summary = &result["summary"];
    figures(
        summary,
        &["ours_ns", "ours_dependent_ns", "linear_ns", "tree_ns", "arithmetic_ns", "speedup", "ours_10_ns"],
    );
    assert_eq!(summary["wrong"], 0);
    assert_eq!(fs::read_dir(place.0.path()).unwrap().count(), 0, "no arena is left");
}

#[test]
fn transfer_has_every_line_and_every_figure() {
    let place = Place::new();
    let text = place.text(&["shm-transfer", "--num_transfers=20", "--max_transfer_size_mb=16", "--verify_data=true"]);
    for line in [
        "=== SHM Transfer Benchmark ===\nNumber of transfers: 20\n",
        "Average time: ",
        "Bandwidth: ",
        "Total transfers: ",
        "Total data: ",
        "Data verification: passed\n",
        "--- Transfer Performance by Size ---\n                Size       Avg Time (\u{3bc}s)    Bandwidth (GB/s)\n",
        "--- Methods side by side",
    ] {
        assert!(text.contains(line), "no {line:?} in {text}");
    }
    assert!(one_megabyte_row(&text).iter().all(|figure| *figure > 0.0));

    let args = ["shm-transfer", "--num_transfers=20", "--max_transfer_size_mb=16", "--threads=2", "--use_memcpy=false"];
    let result = place.json(&args);
    let sizes = result["summary"]["sizes"].as_array().unwrap();
    assert_eq!(sizes.len(), 2 * 8);
    for size in sizes {
        figures(size, &["kb", "ours_gibps", "memcpy_gibps", "best_gibps"]);
        assert!(["hot", "cold"].contains(&size["temperature"].as_str().unwrap()));
    }
    assert!(place.0.path().join("tidekv").is_dir(), "the profile is kept where XDG_CACHE_HOME says");
}

#[test]
fn the_methods_by_name() {
    let place = Place::new();
    for method in ["memcpy", "nt", "movsb"] {
        let copy = format!("--copy={method}");
        let args =
            ["shm-transfer", "--num_transfers=3", "--max_transfer_size_mb=1", "--pattern=cold", "--verify_data", &copy];
        if cfg!(target_arch = "x86_64") || method == "memcpy" {
            assert!(place.text(&args).contains("(memcpy of cold blocks;"));
        } else {
            assert!(place.error(&args).contains("x86-64"));
        }
    }
}

#[test]
fn the_suite_writes_six_files_that_compare_with_themselves() {
    let place = Place::new();
    let folder = place.0.path().join("run");
    let dir = folder.to_str().unwrap();
    let counts = ["--num_iterations=100", "--num_lookups=1000", "--num_transfers=20", "--max_transfer_size_mb=1"];
    let text = place.text(&[&["shm", "--output-dir", dir, "--pattern=cold"], &counts[..]].concat());
    assert!(text.contains("| Operation") && text.contains("| Speedup |"), "{text}");
    let last = text.trim_end().lines().last().unwrap();
    assert!(last.starts_with("Copying is not the bottleneck"), "{last}");
    for name in ["allocation", "lookup", "transfer"] {
        let written = fs::read_to_string(folder.join(format!("{name}.txt"))).unwrap();
        assert!(text.contains(&written), "{name}.txt is not what was printed");
        let result: Value = serde_json::from_slice(&fs::read(folder.join(format!("{name}.json"))).unwrap()).unwrap();
        assert_eq!(result["schema"], "tidekv.bench.v1");
    }
    let compared = place.text(&["compare", dir, dir, "--fail-above", "0"]);
    for name in ["allocation", "lookup", "transfer"] {
        assert!(compared.contains(&format!("=== {name} ===\n")), "{compared}");
    }
    folders_that_differ(&place, &folder);
}

/// A figure made worse, a result removed, and a folder beside a file.
fn folders_that_differ(place: &Place, folder: &Path) {
    let (a, other) = (folder.to_str().unwrap(), place.0.path().join("worse"));
    let b = other.to_str().unwrap();
    fs::create_dir(&other).unwrap();
    for name in ["allocation.json", "lookup.json", "transfer.json"] {
        fs::copy(folder.join(name), other.join(name)).unwrap();
    }
    let mut result: Value = serde_json::from_slice(&fs::read(other.join("lookup.json")).unwrap()).unwrap();
    result["summary"]["ours_ns"] = (2.0 * result["summary"]["ours_ns"].as_f64().unwrap()).into();
    fs::write(other.join("lookup.json"), result.to_string()).unwrap();
    let worse = place.run(&["compare", a, b, "--fail-above=10%", "--json"]);
    assert_eq!(worse.status.code(), Some(1));
    let object: Value = serde_json::from_slice(&worse.stdout).unwrap();
    assert_eq!((&object["failed"], &object["schema"]), (&true.into(), &"tidekv.compare_folders.v1".into()));
    assert_eq!(
        (&object["results"]["lookup"]["failed"], &object["results"]["transfer"]["failed"]),
        (&true.into(), &false.into())
    );

    fs::copy(folder.join("lookup.json"), other.join("lookup.json")).unwrap();
    fs::remove_file(other.join("transfer.json")).unwrap();
    let gone = place.run(&["compare", a, b, "--fail-above=10%"]);
    assert_eq!(gone.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&gone.stdout).contains("missing in B: transfer\n"));
    assert_eq!(place.run(&["compare", b, a, "--fail-above=10%"]).status.code(), Some(0));
    assert!(place.error(&["compare", a, other.join("lookup.json").to_str().unwrap()]).contains("one is a folder"));
    fs::remove_dir_all(&other).unwrap();
    fs::create_dir(&other).unwrap();
    assert!(place.error(&["compare", a, b]).contains("has no results"));
}

#[test]
fn repeats_show_their_spread() {
    let place = Place::new();
    let args = ["shm-alloc", "--impl=syscall", "--num_iterations=20", "--max_size_kb=8", "--repeat=3"];
    let text = place.text(&args);
    assert!(text.contains("--- 3 repeats ---\n") && text.contains("| syscall_pair_ns"), "{text}");
}

#[test]
fn wrong_flags_are_errors() {
    let place = Place::new();
    for args in [
        &["shm-alloc", "--min_size_kb=0"][..],
        &["shm-alloc", "--no_such_flag=1"],
        &["shm-alloc", "--cleanup=perhaps"],
        &["shm-lookup", "--segment_size_mb=0"],
        &["shm-lookup", "--num_iterations=5"],
        &["shm-transfer", "--transfer_size_kb=131073"],
        &["shm", "--num_transfers=none"],
    ] {
        place.error(args);
    }
}

#[test]
fn an_arena_that_cannot_be_made_is_one_sentence() {
    let place = Place::new();
    let file = place.0.path().join("file");
    fs::write(&file, "").unwrap();
    let output = place.kvbench(&["shm-alloc", "--impl=arena"]).env("KVCACHED_RUNTIME_DIR", &file).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("error: the arena cannot be made: "), "{stderr}");
}
