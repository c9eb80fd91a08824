//! Names, folders that are not to be trusted, and places that are taken, dead or raced for.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::sync::Barrier;

use rustix::fs::{FlockOperation, flock};

use super::place::Place;
use super::*;
use crate::error::NotOurs;

fn root() -> (tempfile::TempDir, SocketDir) {
    let root = tempfile::tempdir().unwrap();
    let dir = SocketDir::new(root.path(), &PoolName::new("pool").unwrap());
    (root, dir)
}

#[test]
fn paths_are_kvcacheds() {
    let dir = SocketDir::new("/tmp", &PoolName::new("kvcached_vLLM_4711").unwrap());
    // python3 -c "import uuid; print(uuid.uuid5(uuid.NAMESPACE_DNS, 'kvcached_vLLM_4711').hex[:8])"
    let folder = "/tmp/kvcached-tp-kvcached_vLLM_4711-85573725";
    assert_eq!(dir.path(), Path::new(folder));
    assert_eq!(dir.socket_path(0, 3).unwrap(), PathBuf::from(format!("{folder}/w3.sock")));
    assert_eq!(dir.socket_path(2, 0).unwrap(), PathBuf::from(format!("{folder}/pp2/w0.sock")));
}

#[test]
fn a_path_that_the_kernel_has_no_room_for_is_refused() {
    let pool = PoolName::new("p").unwrap();
    let rooted = |letters| SocketDir::new("/".to_owned() + &"r".repeat(letters), &pool);
    let short = rooted(1).socket_path(0, 0).unwrap().as_os_str().len();
    let exact = rooted(1 + 107 - short);
    assert_eq!(exact.socket_path(0, 0).unwrap().as_os_str().len(), 107);
    let error = exact.socket_path(0, 10).unwrap_err();
    assert!(matches!(error, IpcError::PathTooLong { bytes: 108, max: 107, .. }), "{error}");
}

#[test]
fn only_our_own_names_are_recognised() {
    assert_eq!(pool_of_folder(&folder_name("a-b")), Some("a-b"));
    let name = folder_name("pool");
    assert_eq!(pool_of_folder(&name), Some("pool"));
    for other in ["kvcached-tp-pool-00000000", "kvcached-tp-", "kvcached-tp-pool", "pool", ""] {
        assert_eq!(pool_of_folder(other), None, "{other}");
    }
}

#[test]
fn a_place_is_made_private_and_leaves_nothing() {
    let (root, dir) = root();
    let deep = SocketDir::new(root.path().join("a/b"), &PoolName::new("pool").unwrap());
    for dir in [&dir, &deep] {
        let places = [(0, 0), (0, 1), (2, 0)].map(|(stage, rank)| Place::take(dir, stage, rank).unwrap());
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(dir.path()), mode(&dir.path().join("pp2"))), (0o700, 0o700));
        let [first, rest @ ..] = places;
        drop(first);
        assert!(dir.path().exists() && !dir.path().join("w0.sock").exists());
        drop(rest);
        assert!(!dir.path().exists());
    }
}

#[test]
fn folders_that_others_could_reach_into_are_refused() {
    let (root, dir) = root();
    let why = |dir: &SocketDir| match Place::take(dir, 0, 0) {
        Err(IpcError::NotOurs { why, .. }) => why,
        other => panic!("{other:?}"),
    };
    fs::create_dir(dir.path()).unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o750)).unwrap();
    assert_eq!(why(&dir), NotOurs::Mode { mode: 0o750 });
    fs::set_permissions(dir.path(), Permissions::from_mode(0o701)).unwrap();
    assert_eq!(why(&dir), NotOurs::Mode { mode: 0o701 });
    fs::remove_dir(dir.path()).unwrap();

    let elsewhere = root.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    fs::set_permissions(&elsewhere, Permissions::from_mode(0o700)).unwrap();
    symlink(&elsewhere, dir.path()).unwrap();
    assert_eq!(why(&dir), NotOurs::NotAFolder);
    fs::remove_file(dir.path()).unwrap();
    fs::write(dir.path(), "a file").unwrap();
    assert_eq!(why(&dir), NotOurs::NotAFolder);
    fs::remove_file(dir.path()).unwrap();

    // A stage's folder is looked at too.
    let place = Place::take(&dir, 0, 0).unwrap();
    symlink(&elsewhere, dir.path().join("pp1")).unwrap();
    assert!(matches!(Place::take(&dir, 1, 0), Err(IpcError::NotOurs { why: NotOurs::NotAFolder, .. })));
    drop(place);
}

#[test]
fn somebody_elses_folder_is_refused() {
    let (_root, dir) = root();
    fs::create_dir(dir.path()).unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o700)).unwrap();
    if std::os::unix::fs::chown(dir.path(), Some(65_534), None).is_err() {
        eprintln!("SKIPPED: only root can give a folder away");
        return;
    }
    let error = Place::take(&dir, 0, 0).unwrap_err();
    assert!(matches!(error, IpcError::NotOurs { why: NotOurs::Owner { uid: 65_534 }, .. }), "{error}");
}

#[test]
fn a_living_workers_place_is_taken_and_a_dead_ones_is_replaced() {
    let (_root, dir) = root();
    let place = Place::take(&dir, 0, 0).unwrap();
    assert!(matches!(Place::take(&dir, 0, 0), Err(IpcError::Taken { .. })));
    Place::take(&dir, 0, 1).unwrap();
    drop(place);
    // A listener that nobody cleared up after.
    let path = dir.socket_path(0, 0).unwrap();
    make_folder(&dir);
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let place = Place::take(&dir, 0, 0).unwrap();
    // A file that is not ours any more stays.
    fs::remove_file(&path).unwrap();
    let other = UnixListener::bind(&path).unwrap();
    drop(place);
    assert!(path.exists());
    drop(other);
}

fn make_folder(dir: &SocketDir) {
    fs::create_dir_all(dir.path()).unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o700)).unwrap();
}

#[test]
fn of_many_who_race_for_a_place_one_wins() {
    let (_root, dir) = root();
    for round in 0..50 {
        if round % 2 == 1 {
            make_folder(&dir);
            drop(UnixListener::bind(dir.socket_path(0, 0).unwrap()).unwrap());
        }
        let barrier = Barrier::new(4);
        let race = || {
            barrier.wait();
            Place::take(&dir, 0, 0)
        };
        let results: Vec<_> = std::thread::scope(|scope| {
            let racers: Vec<_> = (0..4).map(|_| scope.spawn(race)).collect();
            racers.into_iter().map(|racer| racer.join().unwrap()).collect()
        });
        assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1, "{results:?}");
        let lost = |result: &&Result<Place, IpcError>| matches!(result, Err(IpcError::Taken { .. }));
        assert_eq!(results.iter().filter(lost).count(), 3, "{results:?}");
    }
}

#[test]
fn coming_and_going_at_once_always_finds_a_folder() {
    let (_root, dir) = root();
    std::thread::scope(|scope| {
        for rank in 0..4 {
            let dir = &dir;
            scope.spawn(move || (0..50).for_each(|_| drop(Place::take(dir, rank % 2, rank).unwrap())));
        }
    });
    assert!(!dir.path().exists());
}

#[test]
fn what_dead_workers_left_is_found_and_removed() {
    let (root, dead) = root();
    let living = SocketDir::new(root.path(), &PoolName::new("living").unwrap());
    let busy = SocketDir::new(root.path(), &PoolName::new("busy").unwrap());
    let place = Place::take(&living, 1, 0).unwrap();
    make_folder(&busy);
    let lock = fs::File::open(busy.path()).unwrap();
    flock(&lock, FlockOperation::LockExclusive).unwrap();
    make_folder(&dead);
    drop(UnixListener::bind(dead.socket_path(0, 0).unwrap()).unwrap());
    fs::create_dir(dead.path().join("pp1")).unwrap();
    fs::set_permissions(dead.path().join("pp1"), Permissions::from_mode(0o700)).unwrap();
    drop(UnixListener::bind(dead.socket_path(1, 7).unwrap()).unwrap());
    // Not named as ours are, or open to others.
    for name in ["kvcached-tp-other-00000000", &folder_name("open")] {
        fs::create_dir(root.path().join(name)).unwrap();
        fs::set_permissions(root.path().join(name), Permissions::from_mode(0o755)).unwrap();
    }

    let expected = StaleDir { path: dead.path().to_owned(), pool: "pool".to_owned(), sockets: 2 };
    assert_eq!(stale_dirs(root.path()).unwrap(), [expected]);
    assert_eq!(remove_stale_dir(living.path()), Ok(false));
    assert!(matches!(remove_stale_dir(busy.path()), Err(IpcError::FolderBusy { .. })));
    assert_eq!(remove_stale_dir(&root.path().join("kvcached-tp-other-00000000")), Ok(false));
    // Something that no worker put there keeps the folder.
    fs::write(dead.path().join("notes"), "").unwrap();
    assert_eq!(remove_stale_dir(dead.path()), Ok(false));
    fs::remove_file(dead.path().join("notes")).unwrap();
    assert_eq!(remove_stale_dir(dead.path()), Ok(true));
    assert!(!dead.path().exists() && living.socket_path(1, 0).unwrap().exists());
    assert_eq!(stale_dirs(root.path()).unwrap(), []);
    assert_eq!(stale_dirs(&root.path().join("nowhere")), Ok(vec![]));
    drop(place);
}
