//! Processes of another user, for real: both sides see by `SO_PEERCRED` that they are not to be spoken to, even where
//! somebody has opened the folder to them. Only root can start a process as somebody else; elsewhere the forged
//! credentials of `src/peer.rs` must do.

mod support;

use std::fs::{Permissions, set_permissions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;

use support::{Worker, listen, pool, role, say, soon};
use tidekv_ipc::broadcast::{Broadcaster, Channel, strategy};
use tidekv_ipc::message::Deed;
use tidekv_ipc::{LaneError, SocketDir};

/// Nobody, on most systems; somebody else, on all.
const STRANGER: u32 = 65_534;

/// The processes that the tests start.
#[test]
fn worker() {
    let Some((words, dir)) = role() else { return };
    match words[0].as_str() {
        "serve" => support::serve(&dir, &words),
        "knock" => knock(&dir),
        "pose" => pose(&dir),
        other => panic!("no role {other}"),
    }
}

/// Connects to a worker as a scheduler would.
fn knock(dir: &SocketDir) {
    let mut stream = UnixStream::connect(dir.socket_path(0, 0).expect("short")).expect("a worker");
    say("connected");
    // The worker may close before this is sent.
    let _ = stream.write_all(&support::fake::order(1, &Deed::Hello { stage: 0, rank: 0 }, Channel::Socket));
    let mut answer = Vec::new();
    let end = stream.read_to_end(&mut answer);
    let is_end = end.as_ref().is_ok_and(|_| answer.is_empty())
        || end.as_ref().is_err_and(|error| error.kind() == ErrorKind::ConnectionReset);
    say(if is_end { "turned away" } else { "spoken to" });
    listen();
}

/// Sits in a worker's place.
fn pose(dir: &SocketDir) {
    let _listener = UnixListener::bind(dir.socket_path(0, 0).expect("short")).expect("a socket");
    say("listening");
    listen();
}

/// A process of another user, if that is possible here.
fn stranger(dir: &SocketDir, role: &str) -> Option<Worker> {
    let skipped = |why: &str| {
        eprintln!("SKIPPED: {why}");
        None
    };
    if !rustix::process::geteuid().is_root() {
        return skipped("only root can start a process as somebody else");
    }
    let mut command = Worker::command(dir, role);
    command.uid(STRANGER).gid(STRANGER).current_dir("/");
    // The program may lie where others cannot reach it.
    let mut probe = std::process::Command::new(command.get_program());
    probe.arg("--list").uid(STRANGER).gid(STRANGER).current_dir("/").stdout(std::process::Stdio::null());
    if !probe.status().is_ok_and(|status| status.success()) {
        return skipped("another user cannot run this program");
    }
    Some(Worker::spawn(command))
}

/// A pool's folder that others can get at once it is opened to them: a folder for temporary files may be private itself.
fn folder() -> (tempfile::TempDir, SocketDir) {
    let root = tempfile::Builder::new().prefix("tidekv-strangers-").tempdir_in("/tmp").expect("a temporary folder");
    let dir = SocketDir::new(root.path(), &pool());
    (root, dir)
}

fn open_to(path: &Path, mode: u32) {
    set_permissions(path, Permissions::from_mode(mode)).expect("ours");
}

#[test]
fn a_stranger_is_turned_away_by_a_worker() {
    let (root, dir) = folder();
    let mut worker = Worker::start(&dir, 0, 0);
    for path in [root.path(), dir.path(), &dir.socket_path(0, 0).unwrap()] {
        open_to(path, 0o777);
    }
    let Some(mut stranger) = stranger(&dir, "knock") else { return };
    stranger.expect("connected");
    stranger.expect("turned away");
    // The worker serves us as before.
    open_to(dir.path(), 0o700);
    let mut caster = Broadcaster::new(dir, 0, 1, strategy("seq").unwrap(), None);
    assert_eq!(caster.connect(soon()), [Ok(worker.instance)]);
    worker.expect("came");
}

#[test]
fn a_stranger_in_a_workers_place_is_not_spoken_to() {
    let (root, dir) = folder();
    std::fs::create_dir(dir.path()).unwrap();
    open_to(root.path(), 0o777);
    open_to(dir.path(), 0o777);
    let Some(mut stranger) = stranger(&dir, "pose") else { return };
    stranger.expect("listening");
    let mut caster = Broadcaster::new(dir.clone(), 0, 1, strategy("ring").unwrap(), None);
    // As long as others may reach into the folder, not even the socket is looked at.
    assert!(matches!(caster.connect(soon())[0], Err(LaneError::Place(_))));
    open_to(dir.path(), 0o700);
    assert_eq!(caster.connect(soon()), [Err(LaneError::WrongUser { uid: STRANGER })]);
}
