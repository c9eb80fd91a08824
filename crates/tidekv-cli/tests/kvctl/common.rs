//! A folder of segments and ledgers, pools that live here, and runs of the binary.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tidekv_core::units::{Bytes, GroupId};
use tidekv_shm::{DeviceName, EntrySpec, Ledger, LedgerEntry, OwnedEntry, PoolName, PoolSegment, RuntimeDir};

pub(crate) const PAGE: Bytes = Bytes::mib(2);
pub(crate) const GIB: u64 = 1 << 30;

/// Long enough that only a hang reaches it.
pub(crate) fn patience() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// The `PATH` of this process with our binaries first.
pub(crate) fn path_with_our_binaries() -> String {
    let folder = Path::new(env!("CARGO_BIN_EXE_kvctl")).parent().unwrap();
    format!("{}:{}", folder.display(), std::env::var("PATH").unwrap())
}

/// Makes a program that does as the script says. Another process writes it: a child that another test starts at this moment
/// must not have it open for writing, or it cannot be run.
pub(crate) fn make_program(path: &Path, script: &str) {
    let write = ["-c", r#"printf '#!/bin/sh\n%s\n' "$1" > "$0" && chmod 755 "$0""#];
    assert!(Command::new("sh").args(write).arg(path).arg(script).status().unwrap().success());
}

/// Says past the capture of test output why a test did not run; `scripts/test` lists these lines.
pub(crate) fn skipped(test: &str, reason: &str) {
    let _ = std::io::stderr().write_all(format!("SKIPPED: {test}: {reason}\n").as_bytes());
}

/// What a run of the binary gave.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ran {
    pub(crate) fn new(output: &Output) -> Self {
        Self {
            code: output.status.code().expect("not ended by a signal"),
            stdout: String::from_utf8(output.stdout.clone()).unwrap(),
            stderr: String::from_utf8(output.stderr.clone()).unwrap(),
        }
    }

    /// Exit code and stdout; nothing on stderr.
    #[track_caller]
    pub(crate) fn quiet(&self) -> (i32, &str) {
        assert_eq!(self.stderr, "", "{self:?}");
        (self.code, &self.stdout)
    }

    /// Exit code 2, nothing on stdout and one line `error: ...` on stderr, which is returned.
    #[track_caller]
    pub(crate) fn error(&self) -> &str {
        assert_eq!((self.code, self.stdout.as_str()), (2, ""), "{self:?}");
        assert!(self.stderr.starts_with("error: ") && self.stderr.trim_end().lines().count() == 1, "{self:?}");
        &self.stderr
    }
}

/// A folder of shared files, gone at the end of the test.
pub(crate) struct World {
    folder: TempDir,
}

impl World {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn dir(&self) -> RuntimeDir {
        RuntimeDir::at(self.folder.path())
    }

    pub(crate) fn ledger(&self) -> Ledger {
        Ledger::open(&self.dir(), &DeviceName::host()).unwrap()
    }

    pub(crate) fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// The binary on this folder, found as users point to it.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvctl"));
        command.args(args).env("KVCACHED_RUNTIME_DIR", self.folder.path()).env_remove("NO_COLOR");
        command
    }

    pub(crate) fn kvctl(&self, args: &[&str]) -> Ran {
        Ran::new(&self.command(args).output().unwrap())
    }

    /// The same with something to read.
    pub(crate) fn kvctl_reading(&self, args: &[&str], input: &[u8]) -> Ran {
        let mut command = self.command(args);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // Short enough for the pipe's own buffer. A child that does not read to the end is free to do so.
        let _ = child.stdin.take().unwrap().write_all(input);
        Ran::new(&child.wait_with_output().unwrap())
    }

    /// A segment as kvcached makes it: 24 bytes, for everybody.
    pub(crate) fn kvcached_segment(&self, name: &str, words: [i64; 3]) -> PathBuf {
        let path = self.path(name);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        fs::write(&path, bytes).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        path
    }

    /// A living pool of ours on the host.
    pub(crate) fn pool(&self, name: &str, limit: Bytes) -> Pool {
        Pool::new(&self.dir(), name, limit)
    }

    /// Sets what the ledger says of the device.
    pub(crate) fn device(&self, total: Bytes, budget: Bytes) {
        let set = self.ledger().update(patience(), |view| {
            view.header.total = total;
            view.header.budget = budget;
        });
        set.unwrap();
    }

    pub(crate) fn entry(&self, name: &str) -> LedgerEntry {
        self.ledger().read().unwrap().by_name(name, GroupId(0)).unwrap().clone()
    }
}

pub(crate) fn words(path: &Path) -> [i64; 3] {
    let bytes = fs::read(path).unwrap();
    assert_eq!(bytes.len(), 24);
    [0, 8, 16].map(|at| i64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap()))
}

/// What a pool keeps in shared files, without its memory.
pub(crate) struct Pool {
    pub(crate) entry: OwnedEntry,
    pub(crate) segment: PoolSegment,
}

impl Pool {
    pub(crate) fn new(dir: &RuntimeDir, name: &str, limit: Bytes) -> Self {
        let name = PoolName::new(name).unwrap();
        let segment = PoolSegment::create(dir, &name, limit).unwrap();
        let ledger = Ledger::open(dir, &DeviceName::host()).unwrap();
        let spec = EntrySpec { limit, ..EntrySpec::new(name, GroupId(0), PAGE) };
        Self { entry: ledger.register(patience(), spec).unwrap(), segment }
    }

    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut LedgerEntry) -> T) -> T {
        self.entry.update(patience(), |view, me| change(&mut view.entries[me])).unwrap()
    }

    /// Publishes what it uses and what it holds besides.
    pub(crate) fn uses(&self, in_use: Bytes, idle: Bytes) {
        self.segment.publish(in_use, idle).unwrap();
        self.change(|entry| {
            (entry.in_use, entry.idle) = (in_use, idle);
            entry.reserved = Bytes(in_use.0 + idle.0);
        });
    }

    /// Answers the next change of the entry for which `answer` says that it did, as a pool's own thread would, while
    /// `meanwhile` runs.
    pub(crate) fn answering<T>(
        &self,
        answer: impl Fn(&mut LedgerEntry) -> bool + Send + Sync,
        meanwhile: impl FnOnce() -> T,
    ) -> T {
        let watch = self.entry.ledger().watch().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let deadline = patience();
                while !self.change(&answer) {
                    let left = deadline.saturating_duration_since(Instant::now());
                    assert!(watch.wait(left).unwrap(), "nobody asked for anything");
                }
            });
            meanwhile()
        })
    }

    /// Holds the ledger's lock, as a pool does that is stopped at a bad moment, while `meanwhile` runs.
    pub(crate) fn holding_the_lock<T>(&self, meanwhile: impl FnOnce() -> T) -> T {
        let (held, is_held) = mpsc::channel();
        let (done, is_done) = mpsc::channel::<()>();
        thread::scope(|scope| {
            scope.spawn(move || {
                self.change(|_| {
                    held.send(()).unwrap();
                    // Ends with the other side, also when that panics.
                    let _ = is_done.recv();
                });
            });
            is_held.recv().unwrap();
            let result = meanwhile();
            drop(done);
            result
        })
    }
}

/// A process of its own that has a pool, for killing.
pub(crate) struct Victim {
    child: Child,
}

const VICTIM_DIR: &str = "KVCTL_TEST_VICTIM_DIR";
const VICTIM_NAME: &str = "KVCTL_TEST_VICTIM_NAME";
const READY: &str = "the pool is there";

impl Victim {
    pub(crate) fn spawn(world: &World, name: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "common::a_pool_until_it_is_killed", "--ignored", "--nocapture"])
            .env(VICTIM_DIR, world.folder.path())
            .env(VICTIM_NAME, name)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.map(Result::unwrap).any(|line| line.contains(READY)), "the child ended early");
        Self { child }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn kill(mut self) -> u32 {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.child.id()
    }
}

/// Not a test: what [`Victim`] runs.
#[test]
#[ignore = "started by other tests, to be killed"]
fn a_pool_until_it_is_killed() {
    let dir = RuntimeDir::at(std::env::var_os(VICTIM_DIR).expect("started by another test"));
    let name = std::env::var(VICTIM_NAME).unwrap();
    let pool = Pool::new(&dir, &name, Bytes::gib(1));
    pool.uses(Bytes::mib(64), Bytes::mib(16));
    println!("{READY}");
    // Until the parent goes away, at the latest.
    let _ = std::io::stdin().read_line(&mut String::new());
    panic!("still alive");
}
