//! `kvctl doctor` on the machine that the tests run on. It may have findings of its own, so checks are compared by their
//! ids; what depends on the machine is tested beside the code, with machines that are made up.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tidekv_core::units::{Bytes, GroupId};
use tidekv_shm::{DeviceName, EntrySpec, Ledger, PoolName};

use crate::common::{GIB, PAGE, Ran, Victim, World, make_program, patience};
use crate::tmux::Terminal;

/// What scripts may rely on. Ids are never renamed; new ones are added here.
const IDS: [&str; 29] = [
    "driver",
    "gpus",
    "gpu-compute-mode",
    "gpu-mig",
    "gpu-persistence",
    "gpu-memory",
    "gpu-users",
    "runtime-dir",
    "runtime-dir-filesystem",
    "runtime-dir-mode",
    "runtime-dir-space",
    "runtime-dir-files",
    "ledgers",
    "ledgers-elsewhere",
    "leftovers",
    "kvcached-segments",
    "host-memory",
    "huge-pages",
    "memlock",
    "address-space",
    "max-map-count",
    "overcommit",
    "cpu-governor",
    "cpu-affinity",
    "cgroup-memory",
    "cgroup-cpu",
    "cgroup-pids",
    "environment",
    "versions",
];

/// The report as an object, after a look at what must hold on every machine.
#[track_caller]
fn report(ran: &Ran) -> Value {
    let (code, text) = ran.quiet();
    let report: Value = serde_json::from_str(text).unwrap();
    let findings = report["findings"].as_array().unwrap();
    assert_eq!(code, i32::from(!findings.is_empty()), "{text}");
    for finding in findings {
        assert!(finding["fix"].is_string() && finding["means"].is_string(), "{finding}");
    }
    report
}

/// The one check of this id.
#[track_caller]
fn check<'a>(report: &'a Value, id: &str) -> &'a Value {
    let checks = report["checks"].as_array().unwrap();
    let mut of_id = checks.iter().filter(|check| check["id"] == id);
    let check = of_id.next().unwrap_or_else(|| panic!("no check {id}"));
    assert!(of_id.next().is_none(), "more than one check {id}");
    check
}

fn program(world: &World, script: &str) -> PathBuf {
    let path = world.path("python");
    make_program(&path, script);
    path
}

#[test]
fn every_check_is_in_the_report() {
    let world = World::new();
    let report = report(&world.kvctl(&["doctor", "--json"]));
    for id in IDS {
        let checks = report["checks"].as_array().unwrap();
        assert!(checks.iter().any(|check| check["id"] == id), "{id}");
    }
    for check in report["checks"].as_array().unwrap() {
        assert!(IDS.iter().any(|id| check["id"] == *id), "{check} is not in the list");
        let status = check["status"].as_str().unwrap();
        assert!(["ok", "note", "finding", "skipped"].contains(&status), "{check}");
    }
    assert!(report["gpus"].is_array());
    assert_eq!(report["versions"]["kvctl"], env!("CARGO_PKG_VERSION"));
    assert_eq!(world.files(), Vec::<String>::new(), "it changes nothing");
}

#[test]
fn text_for_people_ends_with_the_number_of_findings() {
    let world = World::new();
    let ran = world.kvctl(&["doctor"]);
    let (code, text) = ran.quiet();
    let findings = text.lines().filter(|line| line.starts_with("  FIX ")).count();
    assert_eq!(code, i32::from(findings > 0));
    let last = match findings {
        0 => "no findings".to_owned(),
        1 => "1 finding".to_owned(),
        several => format!("{several} findings"),
    };
    assert_eq!(text.lines().last(), Some(last.as_str()), "{text}");
    assert!(!text.contains('\x1b'), "no colour in a pipe");
}

#[test]
fn what_a_killed_process_left_is_found_and_its_fix_mends_it() {
    let world = World::new();
    let look = || report(&world.kvctl(&["doctor", "--json"]));
    let victim = Victim::spawn(&world, "victim");
    let alive = look();
    assert_eq!(check(&alive, "leftovers")["status"], "ok", "{alive}");
    assert_eq!(check(&alive, "ledgers")["what"], "1 pool is alive");
    let pid = victim.kill();

    let ran = world.kvctl(&["doctor", "--json"]);
    assert_eq!(ran.code, 1);
    let dead = report(&ran);
    let finding = check(&dead, "leftovers");
    assert_eq!(finding["status"], "finding");
    let what = finding["what"].as_str().unwrap();
    assert!(what.contains("entry of victim") && what.contains(&pid.to_string()), "{what}");
    assert_eq!(finding["fix"], "kvctl gc");

    assert_eq!(world.kvctl(&["gc"]).code, 0);
    assert_eq!(check(&look(), "leftovers")["status"], "ok");
}

/// The fix is for the folder that was looked at, wherever one types it.
#[test]
fn another_folder_is_named_in_the_fix() {
    let world = World::new();
    Victim::spawn(&world, "victim").kill();
    let folder = world.path("");
    let folder = folder.to_str().unwrap().trim_end_matches('/');
    let elsewhere = World::new();
    let dead = report(&elsewhere.kvctl(&["--dir", folder, "doctor", "--json"]));
    assert_eq!(check(&dead, "leftovers")["fix"], format!("kvctl --dir '{folder}' gc"));
    assert_eq!(check(&dead, "runtime-dir")["what"], folder);
}

#[test]
fn kvcached_own_segments_and_ledgers_that_cannot_be_read_are_notes() {
    let world = World::new();
    world.kvcached_segment("theirs", [1 << 30, 0, 0]);
    // A ledger of a release to come.
    let pool = world.pool("ours", Bytes::gib(1));
    let path = pool.entry.ledger().path().to_owned();
    let mut bytes = fs::read(&path).unwrap();
    bytes[8] = 99;
    fs::write(&path, bytes).unwrap();
    let report = report(&world.kvctl(&["doctor", "--json"]));
    assert_eq!(check(&report, "kvcached-segments")["status"], "note");
    assert_eq!(check(&report, "kvcached-segments")["what"], "theirs");
    assert_eq!(check(&report, "ledgers")["status"], "note", "{report}");
    assert_eq!(check(&report, "leftovers")["status"], "ok", "{report}");
}

#[test]
fn a_folder_that_everybody_can_change() {
    let world = World::new();
    let mode = |mode: u32| {
        fs::set_permissions(world.path(""), fs::Permissions::from_mode(mode)).unwrap();
        let report = report(&world.kvctl(&["doctor", "--json"]));
        check(&report, "runtime-dir-mode")["status"].as_str().unwrap().to_owned()
    };
    assert_eq!([0o777, 0o1777, 0o700, 0o770].map(mode), ["finding", "ok", "ok", "note"]);
}

#[test]
fn variables_that_are_misspelt_or_make_no_sense() {
    let world = World::new();
    let mut command = world.command(&["doctor", "--json"]);
    command.env("KVCACHED_GPU_UTILISATION", "0.9").env("KVCACHED_PAGE_SIZE_MB", "two");
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let findings = report["findings"].as_array().unwrap();
    let fix = |subject: &str| {
        let finding = findings.iter().find(|finding| finding["subject"] == subject).unwrap();
        assert_eq!(finding["id"], "environment");
        finding["fix"].as_str().unwrap().to_owned()
    };
    assert!(fix("KVCACHED_GPU_UTILISATION").starts_with("export KVCACHED_GPU_UTILIZATION="));
    assert_eq!(fix("KVCACHED_PAGE_SIZE_MB"), "export KVCACHED_PAGE_SIZE_MB=2");
}

#[test]
fn an_interpreter_that_hangs_is_given_up() {
    let world = World::new();
    let path = program(&world, "echo starting; exec sleep 600");
    let begin = Instant::now();
    let report = report(&world.kvctl(&["doctor", "--json", "--python", path.to_str().unwrap()]));
    // 5 s by itself; a machine that is busy takes longer, and nothing near 600 s.
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
    let versions = check(&report, "versions");
    assert_eq!(versions["status"], "skipped");
    assert!(versions["what"].as_str().unwrap().contains("did not answer within 5 s"), "{versions}");
    assert!(report["versions"]["torch"].is_null());
}

#[test]
fn an_interpreter_that_is_none() {
    let world = World::new();
    let versions = |path: &str| {
        let report = report(&world.kvctl(&["doctor", "--json", "--python", path]));
        assert_eq!(check(&report, "versions")["status"], "skipped", "{report}");
        check(&report, "versions")["what"].as_str().unwrap().to_owned()
    };
    let garbage = program(&world, "printf '\\033[31m\\377 {'");
    assert!(versions(garbage.to_str().unwrap()).contains("does not answer like Python"));
    assert!(versions("/no/such/python").starts_with("cannot run /no/such/python: "));
    assert!(versions("/").starts_with("cannot run /: "));
}

#[test]
fn versions_come_from_the_interpreter_that_was_named() {
    let world = World::new();
    let answer = r#"{"python": "3.12.1", "executable": "/p", "packages": {"torch": "2.8.0", "vllm": "0.11.0"}}"#;
    let path = program(&world, &format!("echo '{answer}'"));
    let report = report(&world.kvctl(&["doctor", "--json", "--python", path.to_str().unwrap()]));
    assert_eq!(check(&report, "versions")["what"], "torch 2.8.0, vllm 0.11.0 (Python 3.12.1, /p)");
    assert_eq!(report["versions"]["vllm"], "0.11.0");
    assert!(report["versions"]["sglang"].is_null());
}

/// A run with the driver's library that `nvml.c` makes, in front of one that the machine may have. None without a C
/// compiler.
fn with_driver(world: &World, variables: &[(&str, &str)]) -> Option<Value> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/kvctl/nvml.c");
    let folder = world.path("driver");
    fs::create_dir_all(&folder).unwrap();
    let library = folder.join("libnvidia-ml.so.1");
    if !library.exists() {
        let Ok(compiled) = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source).status()
        else {
            eprintln!("SKIPPED: tests with a driver: no C compiler");
            return None;
        };
        assert!(compiled.success());
    }
    let mut command = world.command(&["doctor", "--json"]);
    command.env("LD_LIBRARY_PATH", &folder).envs(variables.iter().copied());
    Some(serde_json::from_slice(&command.output().unwrap().stdout).unwrap())
}

#[test]
fn gpus_their_parts_and_their_users() {
    let world = World::new();
    let device = DeviceName::new("GPU-0000").unwrap();
    let ledger = Ledger::open(&world.dir(), &device).unwrap();
    let spec = EntrySpec::new(PoolName::new("ours").unwrap(), GroupId(0), PAGE);
    let _pool = ledger.register(patience(), spec).unwrap();
    let own = std::process::id();
    let Some(report) = with_driver(&world, &[("NVML_STUB_PID", &own.to_string())]) else { return };

    assert_eq!(report["versions"]["driver"], "580.95.05");
    assert_eq!(report["versions"]["cuda"], "13.0");
    let gpus = report["gpus"].as_array().unwrap();
    assert_eq!(gpus.len(), 2, "the lost one is a finding: {report}");
    assert_eq!((&gpus[0]["uuid"], &gpus[0]["name"]), (&"GPU-0000".into(), &"NVIDIA Stub".into()));
    assert_eq!(gpus[0]["free_bytes"], 100 * GIB);
    let users = gpus[0]["users"].as_array().unwrap();
    assert_eq!(
        (&users[0]["pid"], &users[0]["pool"], &users[0]["bytes"]),
        (&own.into(), &"ours".into(), &(30 * GIB).into())
    );
    assert!(users[0]["name"].is_string() && users[1]["name"].is_null() && users[1]["bytes"].is_null(), "{report}");
    assert_eq!(gpus[1]["mig"]["parts"][0]["uuid"], "MIG-0002");

    let of = |id: &str, subject: &str| {
        let checks = report["checks"].as_array().unwrap();
        let check = checks.iter().find(|check| check["id"] == id && check["subject"] == subject);
        check.unwrap_or_else(|| panic!("{id} of {subject}: {report}"))["status"].as_str().unwrap()
    };
    assert_eq!(of("gpus", "GPU 2"), "finding");
    assert_eq!((of("gpu-compute-mode", "GPU 0"), of("gpu-compute-mode", "GPU 1")), ("finding", "ok"));
    assert_eq!((of("gpu-persistence", "GPU 0"), of("gpu-persistence", "GPU 1")), ("ok", "note"));
    assert_eq!((of("gpu-memory", "GPU 0"), of("gpu-memory", "GPU 1 part 0")), ("ok", "ok"));
    assert_eq!(check(&report, "driver")["status"], "ok");
}

#[test]
fn drivers_that_will_not_do() {
    let world = World::new();
    // As nvml.h numbers them: no permission, not loaded, another version, anything else.
    for (variables, status, words) in [
        (("NVML_STUB_DRIVER", "535.129.03"), "finding", "older than series 550"),
        (("NVML_STUB_INIT", "4"), "finding", "may not use"),
        (("NVML_STUB_INIT", "9"), "skipped", "pools will use host memory"),
        (("NVML_STUB_INIT", "18"), "finding", "different versions"),
        (("NVML_STUB_INIT", "999"), "finding", "does not work"),
    ] {
        let Some(report) = with_driver(&world, &[variables]) else { return };
        let driver = check(&report, "driver");
        assert_eq!(driver["status"], status, "{driver}");
        assert!(driver["what"].as_str().unwrap().contains(words), "{driver}");
    }
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let world = World::new();
    let mut command: Command = world.command(&["doctor"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(matches!(output.status.code(), Some(0 | 1)), "{output:?}");
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
}

#[test]
fn a_terminal_of_80_columns() {
    let world = World::new();
    let terminal = Terminal::open(&world, 80, 100);
    terminal.line("kvctl doctor");
    // The command that was typed has no such word in it.
    terminal.wait_for("the last line", |screen| screen.contains("finding"));
    let screen = terminal.wait_for_prompt();
    for group in ["GPU", "Shared files", "Host memory", "CPU", "Container", "Environment"] {
        assert!(screen.lines().any(|line| line.trim_end() == group), "{group}: {screen}");
    }
}
