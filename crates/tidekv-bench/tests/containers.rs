//! Pools in containers: process and mount namespaces of their own, as Docker makes them, and either one folder of shared
//! files for all or one for each. Needs `unshare` and the right to use it; says so and skips without.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]
#![allow(clippy::print_stdout, reason = "says what was skipped; a child hands over what it saw")]

mod support;

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use support::{children_of, kill, wait_until};
use tempfile::TempDir;
use tidekv_cli::cli::Cli;
use tidekv_cli::console::Console;
use tidekv_core::units::Bytes;
use tidekv_shm::ledger::LedgerView;
use tidekv_shm::{DeviceName, Ledger, RuntimeDir};

const BUDGET: Bytes = Bytes::mib(64);
/// What each pool wants; two of them want more than there is.
const WANTED: &str = "60M";

/// `kvbench hold` as the first process of its container.
struct Container(Child);

impl Container {
    /// With `prepare`, a command of the shell that runs in the container first.
    fn start(dir: &Path, name: &str, prepare: &str) -> Self {
        let hold = r#"exec "$KVBENCH" hold --name "$NAME" --bytes "$WANTED" --backend host --quiet"#;
        let mut command = unshare();
        command.args(["sh", "-c", &format!("{prepare}\n{hold}")]);
        command.env("KVBENCH", env!("CARGO_BIN_EXE_kvbench")).env("NAME", name).env("WANTED", WANTED);
        command.env("DIR", dir).env("KVCACHED_RUNTIME_DIR", dir).env("KVCACHED_HOST_BUDGET", BUDGET.0.to_string());
        Self(command.stdin(Stdio::null()).spawn().unwrap())
    }

    /// The pool's process, as it is called outside of the container.
    fn pool(&self) -> u32 {
        let mut pool = None;
        wait_until("the container to start", || {
            pool = children_of(self.0.id()).next();
            pool.is_some()
        });
        pool.unwrap()
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        // The pool is killed with `unshare`.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn unshare() -> Command {
    let mut command = Command::new("unshare");
    command.args(["--pid", "--mount", "--fork", "--mount-proc", "--kill-child", "--"]);
    command
}

/// A folder of shared files, or none where namespaces cannot be made.
fn folder(test: &str) -> Option<TempDir> {
    let can = unshare().arg("true").stderr(Stdio::null()).status();
    if can.is_ok_and(|status| status.success()) {
        let folder = tempfile::tempdir().unwrap();
        // For users that are not this one.
        fs::set_permissions(folder.path(), Permissions::from_mode(0o1777)).unwrap();
        return Some(folder);
    }
    println!("SKIPPED: {test}: namespaces cannot be made here (unshare --pid --mount)");
    None
}

fn look(dir: &Path) -> Option<LedgerView> {
    Ledger::open_existing(&RuntimeDir::at(dir), &DeviceName::host()).unwrap()?.read().ok()
}

fn held(view: &LedgerView, name: &str) -> Bytes {
    Bytes(view.entries.iter().filter(|entry| entry.name.as_str() == name).map(|entry| entry.reserved.0).sum())
}

/// Waits until the ledger is so, and demands at every look that the budget is kept.
fn wait_for(dir: &Path, what: &str, done: impl Fn(&LedgerView) -> bool) {
    let mut last = None;
    wait_until(what, || {
        look(dir).is_some_and(|view| {
            // Shown when the test fails.
            let entries = format!("{:?}", view.entries);
            if last.as_ref() != Some(&entries) {
                println!("{entries}");
                last = Some(entries);
            }
            let sum = Bytes(view.entries.iter().map(|entry| entry.reserved.0).sum());
            assert!(sum <= BUDGET, "{sum} of {BUDGET} are held");
            done(&view)
        })
    });
}

/// What `kvctl doctor --json` says.
fn doctor(dir: &Path) -> Value {
    let args = ["kvctl".as_ref(), "--dir".as_ref(), dir.as_os_str(), "doctor".as_ref(), "--json".as_ref()];
    let cli = Cli::parse_args(args.map(std::ffi::OsStr::to_owned)).unwrap();
    let out = Shared::default();
    let _ = tidekv_cli::run(&cli, &mut Console::to(out.clone(), io::sink(), false, None)).unwrap();
    serde_json::from_slice(&out.0.borrow()).unwrap()
}

fn check(report: &Value, id: &str) -> Value {
    let checks = report["checks"].as_array().unwrap();
    checks.iter().find(|check| check["id"] == id).unwrap().clone()
}

#[derive(Clone, Default)]
struct Shared(std::rc::Rc<std::cell::RefCell<Vec<u8>>>);

impl io::Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.borrow_mut().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Both pools are process 1 where they live. Their locks tell them apart, not their numbers.
#[test]
fn containers_with_one_folder_share_one_budget_and_survive_each_other() {
    let Some(folder) = folder("containers_with_one_folder_share_one_budget_and_survive_each_other") else { return };
    let dir = folder.path();
    let first = Container::start(dir, "first", "");
    wait_for(dir, "the first to have what it wants", |view| held(view, "first") > Bytes(BUDGET.0 * 3 / 4));
    let second = Container::start(dir, "second", "");
    let is_half = |bytes: Bytes| bytes.0.abs_diff(BUDGET.0 / 2) <= Bytes::mib(4).0;
    wait_for(dir, "equal shares", |view| is_half(held(view, "first")) && is_half(held(view, "second")));
    let view = look(dir).unwrap();
    assert_eq!(view.entries.iter().map(|entry| entry.pid).collect::<Vec<_>>(), [1, 1]);

    kill(first.pool());
    wait_for(dir, "the second to have what the first had", |view| {
        held(view, "first") == Bytes::ZERO && held(view, "second") > Bytes(BUDGET.0 * 3 / 4)
    });
    drop((first, second));
}

#[test]
fn doctor_names_pools_that_share_nothing_with_those_it_sees() {
    let Some(folder) = folder("doctor_names_pools_that_share_nothing_with_those_it_sees") else { return };
    let dir = folder.path();
    let own_folder = Container::start(dir, "own", r#"mount -t tmpfs shm "$DIR""#);
    let pid = own_folder.pool();
    let inside = Path::new("/proc").join(pid.to_string()).join("root").join(dir.strip_prefix("/").unwrap());
    wait_for(&inside, "the pool in the container", |view| held(view, "own") > Bytes::ZERO);
    assert!(look(dir).is_none(), "nothing of it is in the folder outside");

    let outside = check(&doctor(dir), "ledgers-elsewhere");
    assert_eq!(outside["status"], "note");
    let what = outside["what"].as_str().unwrap();
    assert!(what.contains(&format!("pid {pid} (kvbench)")), "{what}");
    // Seen from the pool's own folder, it is where it should be.
    let same = check(&doctor(&inside), "ledgers-elsewhere");
    assert!(!same["what"].as_str().unwrap().contains(&format!("pid {pid} ")), "{same}");

    drop(own_folder);
}

#[test]
fn doctor_says_that_the_folder_is_the_containers_alone() {
    let Some(folder) = folder("doctor_says_that_the_folder_is_the_containers_alone") else { return };
    let in_container =
        r#"mount -t tmpfs shm "$DIR" && exec "$TEST" --exact doctor_of_a_container --ignored --nocapture"#;
    let mut command = unshare();
    command.args(["sh", "-c", in_container]).env("DIR", folder.path()).env("TEST", std::env::current_exe().unwrap());
    let output = command.output().unwrap();
    let report = output.stdout.split(|&byte| byte == b'\n').find(|line| line.starts_with(b"{\""));
    let report = report.unwrap_or_else(|| panic!("{output:?}"));
    let check = check(&serde_json::from_slice(report).unwrap(), "runtime-dir-filesystem");
    assert_eq!(check["status"], "note", "{check}");
    assert!(check["fix"].as_str().unwrap().contains("--ipc=host"), "{check}");
}

/// Not a test: what the one above runs in a container.
#[test]
#[ignore = "started by another test, in a container"]
fn doctor_of_a_container() {
    let dir = std::env::var_os("DIR").expect("started by another test");
    println!("\n{}", serde_json::to_string(&doctor(Path::new(&dir))).unwrap());
}
