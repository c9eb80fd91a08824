//! The folder of segments and ledgers, and what killed processes left in it.

use std::path::Path;

use tidekv_core::units::Bytes;

use super::super::check::{
    Check, KVCACHED_SEGMENTS, LEDGERS, LEDGERS_ELSEWHERE, LEFTOVERS, RUNTIME_DIR, RUNTIME_DIR_FILES,
    RUNTIME_DIR_FILESYSTEM, RUNTIME_DIR_MODE, RUNTIME_DIR_SPACE,
};
use super::super::facts::{Elsewhere, Facts, Files, Filesystem, Folder, FolderState, Pools, Space};
use super::super::quoted;
use super::{count, some_of};
use crate::command::gc::Found;

/// Ledgers and segments are small, but a pool that cannot make them does not start.
const SPACE_MIN: Bytes = Bytes::mib(16);
const FILES_MIN: u64 = 256;
/// Docker gives a container 64 MiB unless told otherwise: too little for engines with several workers.
const CONTAINER_MIN: Bytes = Bytes::mib(256);

pub(super) fn judge(facts: &Facts) -> Vec<Check> {
    let mut checks = match &facts.folder {
        Ok(folder) => folder_checks(folder),
        Err(why) => not_there(RUNTIME_DIR.finding(why, "no pool can start", move_from(Path::new("")))),
    };
    checks.push(ledgers(facts.pools.as_ref()));
    checks.push(ledgers_elsewhere(facts.elsewhere.as_deref()));
    checks.push(leftovers(facts.left_behind.as_deref(), &facts.gc_command));
    checks.push(kvcached_segments(facts.left_behind.as_deref()));
    checks
}

/// Where to go from a folder that will not do.
fn move_from(path: &Path) -> String {
    let other = if path == Path::new("/dev/shm") { "\"$XDG_RUNTIME_DIR/kvcached\"" } else { "/dev/shm" };
    format!("export KVCACHED_RUNTIME_DIR={other}, for engines and for kvctl")
}

/// A judgement of the folder itself, and nothing to say about what is in it.
fn not_there(folder: Check) -> Vec<Check> {
    let others = [RUNTIME_DIR_FILESYSTEM, RUNTIME_DIR_MODE, RUNTIME_DIR_SPACE, RUNTIME_DIR_FILES];
    let mut checks = vec![folder];
    checks.extend(others.map(|kind| kind.skipped("no folder to look at")));
    checks
}

fn folder_checks(folder: &Folder) -> Vec<Check> {
    let (path, elsewhere) = (folder.path.display(), move_from(&folder.path));
    match &folder.state {
        Err(why) => not_there(RUNTIME_DIR.finding(why, "no pool can start", elsewhere)),
        Ok(FolderState::NotAFolder) => {
            not_there(RUNTIME_DIR.finding(format!("{path} is not a folder"), "no pool can start", elsewhere))
        }
        Ok(FolderState::Missing { can_be_made: true }) => {
            not_there(RUNTIME_DIR.ok(format!("{path} is not there; the first pool makes it")))
        }
        Ok(FolderState::Missing { can_be_made: false }) => not_there(RUNTIME_DIR.finding(
            format!("{path} is not there, and this user cannot make it"),
            "no pool can start",
            format!("sudo install -d -m 0700 -o \"$USER\" {}", quoted(&folder.path)),
        )),
        Ok(FolderState::There { mode, owner, refusal, filesystem, of_container, space, files }) => vec![
            writable(&folder.path, refusal.as_deref()),
            kept_in(*filesystem, *of_container, elsewhere),
            permissions(&folder.path, *mode, *owner, folder.uid),
            room(&folder.path, *of_container, *space),
            whose(files),
        ],
    }
}

fn writable(path: &Path, refusal: Option<&str>) -> Check {
    let shown = path.display();
    match refusal {
        None => RUNTIME_DIR.ok(shown.to_string()),
        Some(refusal) => RUNTIME_DIR.finding(
            format!("{shown}: this user cannot make files in it: {refusal}"),
            "no pool of this user can start",
            move_from(path),
        ),
    }
}

fn kept_in(filesystem: Filesystem, of_container: bool, elsewhere: String) -> Check {
    match filesystem {
        Filesystem::Memory(name) if of_container => RUNTIME_DIR_FILESYSTEM
            .note(
                format!("{name}, made for this container alone"),
                "pools outside of this container, and those of other containers, have ledgers of their own: they and the \
                 pools here share no memory, and each side takes a GPU of both for its own",
            )
            .advice("start all of them with --ipc=host, or mount one folder into all and name it in KVCACHED_RUNTIME_DIR"),
        Filesystem::Memory(name) => RUNTIME_DIR_FILESYSTEM.ok(format!("{name}, in memory")),
        Filesystem::Disk(name) => RUNTIME_DIR_FILESYSTEM
            .note(
                format!("{name}, on a disk"),
                "each map and unmap writes there; files of pools stay after the machine restarts, until kvctl gc",
            )
            .advice(elsewhere),
        Filesystem::Network(name) => RUNTIME_DIR_FILESYSTEM.finding(
            format!("{name}, behind a server or a program"),
            "locks are slow there or do not hold, and pools of other machines would be taken for ours",
            elsewhere,
        ),
        Filesystem::Other(number) => {
            RUNTIME_DIR_FILESYSTEM.note(format!("type {number:#x}, which we do not know"), "locks may be slow there")
        }
    }
}

fn permissions(path: &Path, mode: u32, owner: u32, me: u32) -> Check {
    const STICKY: u32 = 0o1000;
    // What users show as who are not in this user namespace.
    const NOBODY: u32 = 65_534;
    let what = format!("{mode:04o}, of user {owner}");
    let open_to = |who: u32| mode & who != 0 && mode & STICKY == 0;
    let fix = format!("sudo chmod +t {}", quoted(path));
    if open_to(0o002) {
        let means = "everybody can remove and replace the files of your pools, so no pool of yours starts";
        return RUNTIME_DIR_MODE.finding(what, means, fix);
    }
    if open_to(0o020) {
        let means = "everybody in its group can remove and replace the files of your pools";
        return RUNTIME_DIR_MODE.note(what, means).advice(fix);
    }
    if owner == NOBODY && me != NOBODY {
        return RUNTIME_DIR_MODE
            .note(what, "its owner is outside of this container, and can replace the files of your pools");
    }
    if owner != me && owner != 0 {
        let means = "that user can remove and replace the files of your pools, so no pool of yours starts";
        return RUNTIME_DIR_MODE.finding(what, means, move_from(path));
    }
    RUNTIME_DIR_MODE.ok(what)
}

fn room(path: &Path, of_container: bool, space: Space) -> Check {
    let Space { total, free, free_files } = space;
    let what = format!("{free} free of {total}");
    let enough = SPACE_MIN.max(Bytes(total.0 / 20).min(Bytes::gib(1)));
    let full = "new pools will not start, and engines that use shared memory fail";
    let list = format!("du -a {} | sort -n | tail shows what fills it; kvctl gc removes what is ours", quoted(path));
    if free < enough {
        return RUNTIME_DIR_SPACE.finding(what, full, list);
    }
    if let Some(files) = free_files.filter(|&files| files < FILES_MIN) {
        return RUNTIME_DIR_SPACE.finding(format!("{what}, but room for {files} more files"), full, list);
    }
    if of_container && total < CONTAINER_MIN {
        return RUNTIME_DIR_SPACE
            .note(what, "as Docker gives it to a container: too small for engines with several workers")
            .advice("docker run --shm-size=8g");
    }
    RUNTIME_DIR_SPACE.ok(what)
}

fn whose(files: &Files) -> Check {
    if !files.usurped.is_empty() {
        let paths: Vec<String> = files.usurped.iter().map(|path| quoted(path)).collect();
        let paths = paths.join(" ");
        return RUNTIME_DIR_FILES.finding(
            format!("named like ledgers of ours, with another owner or mode: {paths}"),
            "no pool of this user can start on these devices",
            format!("sudo rm -r {paths}"),
        );
    }
    if files.of_others.is_empty() {
        return RUNTIME_DIR_FILES.ok("none");
    }
    let of_user = |(uid, number): (&u32, &u32)| format!("{number} of user {uid}");
    let list: Vec<String> = files.of_others.iter().map(of_user).collect();
    let means = "pools share a device only with pools of their own user; those of others count as memory that is taken";
    RUNTIME_DIR_FILES.note(some_of(&list), means)
}

fn ledgers(pools: Result<&Pools, &String>) -> Check {
    match pools {
        Err(why) => LEDGERS.skipped(why),
        Ok(pools) if pools.unreadable.is_empty() => {
            let alive = count(pools.live.len(), "pool is alive", "pools are alive");
            LEDGERS.ok([&[alive], &pools.budgets[..]].concat().join("; "))
        }
        Ok(pools) => LEDGERS.note(
            some_of(&pools.unreadable),
            "pools on these devices are not listed in full; what is said of them here may be wrong",
        ),
    }
}

fn ledgers_elsewhere(found: Result<&[Elsewhere], &String>) -> Check {
    let found = match found {
        Err(why) => return LEDGERS_ELSEWHERE.skipped(why),
        Ok([]) => return LEDGERS_ELSEWHERE.ok("none that this user may see"),
        Ok(found) => found,
    };
    let named = |Elsewhere { pid, program, ledger }: &Elsewhere| format!("pid {pid} ({program}): {}", ledger.display());
    LEDGERS_ELSEWHERE
        .note(
            some_of(&found.iter().map(named).collect::<Vec<_>>()),
            "these pools are of another user, of another container or of another KVCACHED_RUNTIME_DIR: they and the pools \
             here share no memory, and each side takes a device of both for its own",
        )
        .advice("start all of them as one user with the same folder: see \"Containers\" in docs/security.md")
}

fn leftovers(found: Result<&[Found], &String>, gc: &str) -> Check {
    let found = match found {
        Ok(found) => found,
        Err(why) => return LEFTOVERS.skipped(why),
    };
    let stale = found.iter().filter_map(|found| match found {
        Found::Stale { what } => Some(what.as_str()),
        Found::Left { .. } | Found::Foreign { .. } | Found::Failed { .. } => None,
    });
    let stale: Vec<&str> = stale.collect();
    if stale.is_empty() {
        return LEFTOVERS.ok("nothing");
    }
    let means = "processes were killed; what was counted for them may be missing from the others until it is removed";
    LEFTOVERS.finding(some_of(&stale), means, gc)
}

fn kvcached_segments(found: Result<&[Found], &String>) -> Check {
    let found = match found {
        Ok(found) => found,
        Err(why) => return KVCACHED_SEGMENTS.skipped(why),
    };
    let left = found.iter().filter_map(|found| match found {
        Found::Left { name, .. } => Some(name.as_str()),
        Found::Stale { .. } | Found::Foreign { .. } | Found::Failed { .. } => None,
    });
    let left: Vec<&str> = left.collect();
    if left.is_empty() {
        return KVCACHED_SEGMENTS.ok("none");
    }
    KVCACHED_SEGMENTS
        .note(some_of(&left), "segments that kvcached made do not say whether they are in use")
        .advice(format!("kvctl delete {}, if you know that its engine is gone", left[0]))
}
