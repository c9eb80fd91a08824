//! The whole way from files to text and exit code, on machines that are made up.

use std::cell::RefCell;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use tempfile::TempDir;
use tidekv_core::units::Bytes;
use tidekv_shm::RuntimeDir;

use super::facts::{Deadlines, Interpreter, Sources};
use super::{examine, quoted};
use crate::console::Console;
use crate::exit::Outcome;
use crate::gpu::{ComputeMode, Gpu, GpuError, GpuMemory, GpuReport};

/// The files of a machine without fault, and what is expected of it.
const HEALTHY: [(&str, &str); 12] = [
    ("proc/meminfo", "MemTotal: 64000000 kB\nMemAvailable: 60000000 kB\nCommitLimit: 32000000 kB\n"),
    (
        "proc/self/limits",
        "Max locked memory  unlimited  unlimited  bytes\nMax address space  unlimited  unlimited  bytes\n",
    ),
    ("proc/self/status", "Name: kvctl\nCpus_allowed_list:\t0-7\n"),
    ("proc/self/cgroup", "0::/\n"),
    ("proc/sys/vm/max_map_count", "1048576\n"),
    ("proc/sys/vm/overcommit_memory", "0\n"),
    ("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size [advise] never deny force\n"),
    ("sys/devices/system/cpu/online", "0-7\n"),
    ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n"),
    ("sys/devices/system/cpu/cpu1/cpufreq/scaling_governor", "performance\n"),
    ("sys/fs/cgroup/memory.max", "max\n"),
    ("sys/fs/cgroup/cpu.max", "max 100000\n"),
];

struct Machine {
    root: TempDir,
    sources: Sources,
}

impl Machine {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in HEALTHY {
            write(root.path(), path, text);
        }
        let sources = Sources {
            root: root.path().to_owned(),
            // Made by the first pool, so that what file system the tests run on makes no difference.
            dir: RuntimeDir::at(root.path().join("shm")),
            interpreter: Interpreter::choose(Some(Path::new("/no/such/python")), None),
            environment: Vec::new(),
            gpus: || Err(GpuError::NoDriver { why: "it is not loaded".to_owned() }),
            deadlines: Deadlines::default(),
        };
        Self { root, sources }
    }

    fn examine(&self, json: bool, colour: bool, width: Option<usize>) -> (Outcome, String) {
        let out = Output::default();
        let mut console = Console::to(out.clone(), io::sink(), colour, width);
        let outcome = examine(&self.sources, json, &mut console).unwrap();
        let text = String::from_utf8(out.0.borrow().clone()).unwrap();
        (outcome, text)
    }
}

fn write(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

#[derive(Clone, Default)]
struct Output(Rc<RefCell<Vec<u8>>>);

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.borrow_mut().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn gpus() -> Vec<Gpu> {
    let gpu = |index| Gpu {
        index,
        name: "H\x1b[2J200".to_owned(),
        uuid: format!("GPU-{index}"),
        memory: Some(GpuMemory { total: Bytes::gib(140), free: Bytes::gib(139) }),
        compute_mode: Some(if index == 2 { ComputeMode::ExclusiveProcess } else { ComputeMode::Default }),
        persistence: Some(true),
        mig: None,
        users: Some(Vec::new()),
    };
    (0..3).map(gpu).collect()
}

#[test]
fn a_healthy_machine_has_no_findings_and_leaves_with_0() {
    let machine = Machine::new();
    let (outcome, text) = machine.examine(false, false, None);
    assert_eq!(outcome, Outcome::Done, "{text}");
    assert!(text.ends_with("\n\nno findings\n") && !text.contains("FIX") && !text.contains('\x1b'), "{text}");
    let skipped: Vec<&str> = text.lines().filter(|line| line.contains("  skip  ")).collect();
    assert_eq!(skipped.len(), 3, "a reason is given once: {text}");
    assert!(skipped[0].contains("pools will use host memory"), "{text}");
    assert!(!machine.sources.dir.path().exists(), "nothing is made");
}

#[test]
fn a_finding_is_explained_and_leaves_with_1() {
    let machine = Machine::new();
    write(machine.root.path(), "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor", "powersave\n");
    let (outcome, text) = machine.examine(false, false, None);
    assert_eq!(outcome, Outcome::Negative, "{text}");
    let lines: Vec<&str> = text.lines().collect();
    let at = lines.iter().position(|line| line.starts_with("  FIX   governor ")).unwrap();
    assert!(lines[at].ends_with("  performance on 1; powersave on 1"), "{text}");
    assert!(lines[at + 1].trim_start().starts_with("means: the clock"), "{text}");
    assert!(lines[at + 2].trim_start().starts_with("fix:   echo performance | sudo tee"), "{text}");
    assert_eq!(lines.last(), Some(&"1 finding"));
}

#[test]
fn gpus_of_which_the_same_is_said_share_a_line() {
    let mut machine = Machine::new();
    machine.sources.gpus = || {
        let driver = Some("580.95.05".to_owned());
        Ok(GpuReport { driver, gpus: gpus(), ..GpuReport::default() })
    };
    let (outcome, text) = machine.examine(false, false, None);
    assert_eq!(outcome, Outcome::Negative);
    assert!(text.contains("GPU 0, GPU 1: default") && text.contains("GPU 2: exclusive process"), "{text}");
    assert!(text.contains("sudo nvidia-smi -i 2 -c DEFAULT"), "{text}");
    assert!(text.contains("H\\u{1b}[2J200") && !text.contains('\x1b'), "{text}");

    let (_, json) = machine.examine(true, false, None);
    let report: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(report["findings"].as_array().unwrap().len(), 1);
    assert_eq!(report["findings"][0]["id"], "gpu-compute-mode");
    assert_eq!(report["findings"][0]["subject"], "GPU 2");
    assert_eq!(report["gpus"][2]["compute_mode"], "exclusive-process");
    assert_eq!(report["gpus"][0]["total_bytes"], 140u64 << 30);
    assert_eq!(report["versions"]["driver"], "580.95.05");
    assert!(report["versions"]["torch"].is_null());
}

/// A driver that never answers costs its own checks, and is one finding.
#[test]
fn what_hangs_is_given_up() {
    let mut machine = Machine::new();
    machine.sources.gpus = || {
        loop {
            std::thread::park();
        }
    };
    machine.sources.deadlines.gpus = Duration::from_millis(10);
    let (outcome, text) = machine.examine(false, false, None);
    assert_eq!(outcome, Outcome::Negative, "{text}");
    assert!(text.contains("  FIX   driver ") && text.contains("did not answer within 0.01 s"), "{text}");
    assert!(text.ends_with("\n1 finding\n"), "{text}");
}

#[test]
fn paths_are_quoted_for_shells() {
    assert_eq!(quoted(Path::new("/a b/it's")), r"'/a b/it'\''s'");
}

/// On a terminal lines end before its edge, except what is there to be copied.
#[test]
fn a_terminal_gets_colour_and_short_lines() {
    let machine = Machine::new();
    write(machine.root.path(), "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor", "powersave\n");
    let (_, text) = machine.examine(false, true, Some(80));
    assert!(text.contains("\x1b[31mFIX \x1b[0m") && text.contains("\x1b[32mok  \x1b[0m"), "{text}");
    let plain = ["\x1b[31m", "\x1b[32m", "\x1b[33m", "\x1b[1;36m", "\x1b[0m"]
        .iter()
        .fold(text, |text, code| text.replace(code, ""));
    for line in plain.lines().filter(|line| !line.contains(" fix: ") && !line.contains(" tip: ")) {
        assert!(line.chars().count() <= 80, "{line}");
    }
}
