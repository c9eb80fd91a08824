//! What kvctl does to files of other programs in the shared folder: nothing, however much they look like ours.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use rustix::fs::{AtFlags, CWD, statat};
use tidekv_core::units::{Bytes, GroupId};
use tidekv_shm::{DeviceName, EntrySpec, EntryState, Ledger, LedgerEntry, PoolName};

use crate::common::{PAGE, Victim, World, patience, skipped};

const FILES: usize = 10_000;

/// Contents that other programs have, most of them in files of 24 bytes.
fn contents(number: usize) -> Vec<u8> {
    let n = i64::try_from(number).unwrap();
    let ints = |words: [i64; 3]| words.map(i64::to_ne_bytes).concat();
    let doubles = |words: [f64; 3]| words.map(f64::to_ne_bytes).concat();
    match number % 10 {
        0 => doubles([1.0, 0.5, 1e9 + n as f64]),
        1 => vec![0; 24],
        2 => format!("somebody's notes, {number:06}").into_bytes(),
        3 => format!("{:024x}", 0x5eed_0000_1234_u64.wrapping_mul(n.cast_unsigned() | 1)).into_bytes(),
        4 => ints([n % 100 + 1, 2, 3]),
        5 => ints([-1 - n, 4096, 0]),
        6 => doubles([n as f64, 0.0, 0.0]),
        7 => ints([1, 0, 0]),
        _ => Vec::new(),
    }
}

/// Makes the files and gives their names. Empty ones are half of them called as pools are, and long unchanged.
fn plant(folder: &Path, files: usize) -> Vec<(PathBuf, Vec<u8>)> {
    let long_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(3600);
    let file = |number: usize| {
        let name = if number % 10 == 9 { format!("kvcached_vLLM_{number}") } else { format!("psm_{number:08x}") };
        let (path, bytes) = (folder.join(name), contents(number));
        fs::write(&path, &bytes).unwrap();
        let mode = if (number / 10).is_multiple_of(2) { 0o600 } else { 0o644 };
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_modified(long_ago).unwrap();
        (path, bytes)
    };
    (0..files).map(file).collect()
}

fn assert_untouched(planted: &[(PathBuf, Vec<u8>)]) {
    let changed = planted.iter().filter(|(path, bytes)| fs::read(path).ok().as_ref() != Some(bytes));
    let changed: Vec<_> = changed.collect();
    assert!(changed.is_empty(), "{} of {FILES} removed or changed, such as {:?}", changed.len(), changed[0]);
}

/// A Python process with a shared memory of 24 bytes in `/dev/shm`, which it uses until its input ends.
struct SharedMemory {
    process: Child,
    path: PathBuf,
}

impl SharedMemory {
    fn start() -> Option<Self> {
        let script = "import sys\n\
            from multiprocessing.shared_memory import SharedMemory\n\
            memory = SharedMemory(create=True, size=24)\n\
            memory.buf[:24] = bytes(24)\n\
            print(memory.name, flush=True)\n\
            sys.stdin.read()\n\
            memory.close(); memory.unlink()";
        let mut python = Command::new("python3");
        let python = python.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = python.spawn().ok()?;
        let mut name = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut name).unwrap();
        let path = Path::new("/dev/shm").join(name.trim());
        Some(Self { process, path })
    }

    /// Whether it could still take its name away by itself.
    fn end(mut self) -> bool {
        drop(self.process.stdin.take());
        self.process.wait().unwrap().success() && !self.path.exists()
    }
}

#[test]
fn gc_removes_none_of_ten_thousand_files_of_others_and_all_that_killed_pools_left() {
    let world = World::new();
    let planted = plant(&world.path(""), FILES);
    let victims: Vec<_> = ["killed-1", "killed-2", "kvcached_vLLM_77"].map(|name| Victim::spawn(&world, name)).into();
    let before = world.files().len();
    let ledgers = before - planted.len() - victims.len();
    victims.into_iter().for_each(|victim| {
        victim.kill();
    });

    // What looking at each file costs, in this very moment.
    let start = Instant::now();
    for entry in fs::read_dir(world.path("")).unwrap() {
        statat(CWD, entry.unwrap().path(), AtFlags::SYMLINK_NOFOLLOW).unwrap();
    }
    let look = start.elapsed();
    let start = Instant::now();
    let ran = world.kvctl(&["gc"]);
    let took = start.elapsed();

    assert_untouched(&planted);
    let (code, text) = ran.quiet();
    for name in ["killed-1", "killed-2", "kvcached_vLLM_77"] {
        assert!(text.contains(&format!("Removed segment {name}: it has no owner\n")), "{text}");
    }
    assert_eq!((code, world.files().len()), (0, planted.len()), "{text}");
    // Three entries, their segments and one ledger with its events; nothing is said of files that are nobody's business.
    assert_eq!((text.lines().count(), ledgers), (7, 2), "{text}");
    println!("gc took {took:?}, readdir and fstatat of every file {look:?}");
    assert_eq!(world.kvctl(&["gc"]).quiet(), (0, "Nothing to remove.\n"));
    assert_untouched(&planted);
}

/// Its owner has it open and mapped, which nobody can see, and no lock on it.
#[test]
fn gc_leaves_the_shared_memory_of_a_living_python() {
    let test = "gc_leaves_the_shared_memory_of_a_living_python";
    let Some(memory) = SharedMemory::start() else { return skipped(test, "no python3") };
    let world = World::new();
    // A copy in a folder of the test, so that gc sees nothing but it.
    let own = world.path("own");
    fs::create_dir(&own).unwrap();
    let copy = own.join(memory.path.file_name().unwrap());
    fs::copy(&memory.path, &copy).unwrap();
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o600)).unwrap();
    let gc = Command::new(env!("CARGO_BIN_EXE_kvctl")).args(["gc"]).env("KVCACHED_RUNTIME_DIR", &own).output().unwrap();
    assert_eq!((gc.status.code(), gc.stdout.as_slice()), (Some(0), &b"Nothing to remove.\n"[..]));
    assert!(copy.exists());
    // On everybody's folder nothing is removed: a dry run says what would be.
    let mut dry = Command::new(env!("CARGO_BIN_EXE_kvctl"));
    let dry = dry.args(["--dir", "/dev/shm", "gc", "--dry-run"]).output().unwrap();
    let name = memory.path.file_name().unwrap().to_str().unwrap();
    assert!(!String::from_utf8_lossy(&dry.stdout).contains(name), "{dry:?}");
    assert!(memory.path.exists() && memory.end());
}

#[test]
fn a_limit_is_written_to_no_file_of_others_and_none_is_deleted() {
    let world = World::new();
    for (path, bytes) in plant(&world.path(""), 20) {
        let name = path.file_name().unwrap().to_str().unwrap();
        for args in [
            &["limit", name, "1G"][..],
            &["limit-percent", name, "50"],
            &["delete", name],
            &["delete", name, "--force"],
        ] {
            let ran = world.kvctl(args);
            assert!(matches!(ran.code, 1 | 2) && ran.stdout.is_empty(), "{args:?}: {ran:?}");
            assert_eq!(ran.stderr.matches("error: ").count(), usize::from(ran.code == 2), "{args:?}: {ran:?}");
            assert_eq!(fs::read(&path).ok().as_ref(), Some(&bytes), "{args:?}");
        }
        let ran = world.kvctl_reading(&["shell"], format!("limit {name} 1G\ndelete {name}\n").as_bytes());
        assert_ne!(ran.code, 0, "{ran:?}");
        assert_eq!(fs::read(&path).ok().as_ref(), Some(&bytes));
    }
}

/// A pool's entry is its proof after the pool's death. Somebody who uses the file meanwhile keeps it.
#[test]
fn a_lock_of_anybody_keeps_the_segment_of_a_killed_pool() {
    let world = World::new();
    Victim::spawn(&world, "victim").kill();
    let user = fs::File::open(world.path("victim")).unwrap();
    rustix::fs::flock(&user, rustix::fs::FlockOperation::LockShared).unwrap();
    assert!(!world.kvctl(&["gc"]).quiet().1.contains("segment"));
    assert_eq!(world.files(), ["victim"]);
    assert_eq!(world.kvctl(&["gc"]).quiet(), (0, "Nothing to remove.\n"));
    // Said, and not left to closing: a child that another test starts at this moment has a copy for an instant.
    rustix::fs::flock(&user, rustix::fs::FlockOperation::Unlock).unwrap();
    let ran = world.kvctl(&["gc"]);
    assert!(
        ran.quiet().1.starts_with("Left segment victim: ") && ran.stdout.contains("kvctl delete victim"),
        "{ran:?}"
    );
}

/// A name proves nothing either: a dead pool had this one, and something else has it now.
#[test]
fn a_file_that_only_has_a_dead_pools_name_stays() {
    let world = World::new();
    let spec = EntrySpec::new(PoolName::new("psm_1").unwrap(), GroupId(0), PAGE);
    let ledger = Ledger::open(&world.dir(), &DeviceName::host()).unwrap();
    let dead = LedgerEntry { state: EntryState::Returning, reserved: Bytes::gib(1), ..LedgerEntry::new(0, &spec) };
    ledger.update(patience(), |view| view.entries.push(dead)).unwrap();
    fs::write(world.path("psm_1"), "0123456789abcdef01234567").unwrap();
    let ran = world.kvctl(&["gc"]);
    assert!(ran.quiet().1.contains("Removed entry of psm_1") && !ran.stdout.contains("segment"), "{ran:?}");
    assert_eq!(world.files(), ["psm_1"]);
}
