//! The folder of shared files: what it is, and whose files are in it.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access, statfs, statvfs};
use rustix::process::geteuid;
use tidekv_core::units::Bytes;
use tidekv_shm::segment::SEGMENT_BYTES;
use tidekv_shm::{Ledger, RuntimeDir};

use super::Probe;

/// File systems by the number that the kernel gives them.
const FILESYSTEMS: [(u64, Filesystem); 17] = [
    (0x0102_1994, Filesystem::Memory("tmpfs")),
    (0x8584_58f6, Filesystem::Memory("ramfs")),
    (0xef53, Filesystem::Disk("ext4")),
    (0x5846_5342, Filesystem::Disk("xfs")),
    (0x9123_683e, Filesystem::Disk("btrfs")),
    (0x794c_7630, Filesystem::Disk("overlay")),
    (0x2fc1_2fc1, Filesystem::Disk("zfs")),
    (0x6969, Filesystem::Network("NFS")),
    (0xff53_4d42, Filesystem::Network("CIFS")),
    (0xfe53_4d42, Filesystem::Network("SMB")),
    (0x517b, Filesystem::Network("SMB")),
    (0x0102_1997, Filesystem::Network("9p")),
    (0x6573_5546, Filesystem::Network("FUSE")),
    (0x0bd0_0bd0, Filesystem::Network("Lustre")),
    (0x00c3_6400, Filesystem::Network("Ceph")),
    (0x4750_4653, Filesystem::Network("GPFS")),
    (0x5346_414f, Filesystem::Network("AFS")),
];

/// The folder, and what this user could do with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct Folder {
    pub(in super::super) path: PathBuf,
    /// Who asks.
    pub(in super::super) uid: u32,
    pub(in super::super) state: Probe<FolderState>,
}

/// What there is at the folder's path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) enum FolderState {
    /// Nothing. Pools make it, if the nearest folder above it lets them.
    Missing { can_be_made: bool },
    /// Something else.
    NotAFolder,
    /// A folder.
    There {
        mode: u32,
        owner: u32,
        /// Why this user cannot make files in it.
        refusal: Option<String>,
        filesystem: Filesystem,
        /// A container engine made it for one container.
        of_container: bool,
        space: Space,
        files: Files,
    },
}

/// How a file system keeps its files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Filesystem {
    /// In memory: gone with the machine's restart.
    Memory(&'static str),
    /// On a disk.
    Disk(&'static str),
    /// Behind a server, or a program.
    Network(&'static str),
    /// One that we do not know.
    Other(u64),
}

/// Room for files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Space {
    pub(in super::super) total: Bytes,
    /// For this user.
    pub(in super::super) free: Bytes,
    /// How many more files there can be; `None` where that has no bound.
    pub(in super::super) free_files: Option<u64>,
}

/// Files that are not, or not quite, this user's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct Files {
    /// Segments and ledgers of others: how many, by their user number.
    pub(in super::super) of_others: BTreeMap<u32, u32>,
    /// Files with the name of a ledger of this user that are not one: no pool can use that device.
    pub(in super::super) usurped: Vec<PathBuf>,
}

impl Folder {
    /// Looks at the folder. Makes nothing in it.
    pub(super) fn read(dir: &RuntimeDir) -> Self {
        let path = dir.path().to_owned();
        let state = look(dir).map_err(|error| format!("cannot look at {}: {error}", path.display()));
        Self { path, uid: geteuid().as_raw(), state }
    }
}

fn look(dir: &RuntimeDir) -> io::Result<FolderState> {
    let path = dir.path();
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(FolderState::Missing { can_be_made: can_be_made(path) });
        }
        Err(error) => return Err(error),
    };
    if !metadata.is_dir() {
        return Ok(FolderState::NotAFolder);
    }
    let known = statfs(path)?.f_type.cast_unsigned();
    let filesystem = FILESYSTEMS.iter().find(|(number, _)| *number == known);
    Ok(FolderState::There {
        mode: metadata.mode() & 0o7777,
        owner: metadata.uid(),
        refusal: access(path, Access::WRITE_OK | Access::EXEC_OK).err().map(|errno| errno.to_string()),
        filesystem: filesystem.map_or(Filesystem::Other(known), |&(_, filesystem)| filesystem),
        of_container: fs::read_to_string("/proc/self/mountinfo").is_ok_and(|mounts| of_container(&mounts, path)),
        space: space(path)?,
        files: files(dir)?,
    })
}

/// Whether the nearest folder that exists lets us make others in it.
fn can_be_made(path: &Path) -> bool {
    let above = path.ancestors().skip(1).find(|above| above.as_os_str().is_empty() || above.exists());
    let above = above.filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
    above.is_dir() && access(above, Access::WRITE_OK | Access::EXEC_OK).is_ok()
}

/// Whether the folder is on a mount that Docker, Podman or containerd made for one container: they call its source `shm`.
/// With `--ipc=host`, and where a folder of the host is mounted, the source is another.
fn of_container(mounts: &str, path: &Path) -> bool {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let mount = |line: &str| {
        let (place, kind) = line.split_once(" - ")?;
        let place = PathBuf::from(place.split(' ').nth(4)?);
        Some((place, kind.split(' ').nth(1) == Some("shm")))
    };
    // Of several at one place the last one is seen.
    let mounts = mounts.lines().filter_map(mount).filter(|(place, _)| path.starts_with(place));
    mounts.max_by_key(|(place, _)| place.components().count()).is_some_and(|(_, is_shm)| is_shm)
}

fn space(path: &Path) -> io::Result<Space> {
    let stat = statvfs(path)?;
    let bytes = |blocks: u64| Bytes(blocks.saturating_mul(stat.f_frsize));
    // A file system without a table of files says 0 of 0.
    let free_files = (stat.f_files > 0).then_some(stat.f_favail);
    Ok(Space { total: bytes(stat.f_blocks), free: bytes(stat.f_bavail), free_files })
}

fn files(dir: &RuntimeDir) -> io::Result<Files> {
    let me = geteuid().as_raw();
    let mut files = Files::default();
    for entry in fs::read_dir(dir.path())?.filter_map(Result::ok) {
        let Ok(metadata) = entry.metadata() else { continue };
        let looks_like_ours = entry.file_name().as_encoded_bytes().starts_with(b"kvcached");
        let is_segment = metadata.is_file() && metadata.len() == SEGMENT_BYTES as u64;
        if metadata.uid() != me && (looks_like_ours || is_segment) {
            *files.of_others.entry(metadata.uid()).or_default() += 1;
        }
    }
    for device in Ledger::list(dir).unwrap_or_default() {
        let path = dir.ledger_path(&device);
        let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
        if !metadata.is_file() || metadata.uid() != me || metadata.mode() & 0o777 != 0o600 {
            files.usurped.push(path);
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use tidekv_shm::DeviceName;

    fn state(dir: &RuntimeDir) -> FolderState {
        Folder::read(dir).state.unwrap()
    }

    #[test]
    fn a_folder_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o1770)).unwrap();
        let dir = RuntimeDir::at(folder.path());
        let usurped = dir.ledger_path(&DeviceName::host());
        fs::write(&usurped, "not a ledger").unwrap();
        fs::set_permissions(&usurped, fs::Permissions::from_mode(0o644)).unwrap();
        let FolderState::There { mode, owner, refusal, space, files, .. } = state(&dir) else { panic!() };
        assert_eq!((mode, owner, refusal), (0o1770, geteuid().as_raw(), None));
        assert!(space.total >= space.free && space.total > Bytes::ZERO, "{space:?}");
        assert_eq!(files, Files { of_others: BTreeMap::new(), usurped: vec![usurped] });
    }

    #[test]
    fn a_containers_own_folder() {
        let host = "25 1 0:23 / / rw - ext4 /dev/vda rw\n26 25 0:24 / /dev/shm rw,nosuid - tmpfs tmpfs rw\n";
        let own = format!("{host}30 26 0:27 / /dev/shm rw - tmpfs shm rw,size=65536k\n");
        assert!(of_container(&own, Path::new("/dev/shm")));
        assert!(!of_container(&own, Path::new("/dev")));
        assert!(!of_container(host, Path::new("/dev/shm")));
        assert!(!of_container("", Path::new("/dev/shm")));
    }

    #[test]
    fn what_is_no_folder() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        assert_eq!(state(&RuntimeDir::at(&file)), FolderState::NotAFolder);
        let missing = |path: PathBuf| state(&RuntimeDir::at(path));
        assert_eq!(missing(folder.path().join("a/b")), FolderState::Missing { can_be_made: true });
        assert!(Folder::read(&RuntimeDir::at(file.join("below"))).state.is_err());
    }

    #[test]
    fn memory_is_known_as_memory() {
        let FolderState::There { filesystem, .. } = state(&RuntimeDir::at("/proc")) else { panic!() };
        assert!(matches!(filesystem, Filesystem::Other(_)), "{filesystem:?}");
        if let FolderState::There { filesystem, .. } = state(&RuntimeDir::at("/dev/shm")) {
            assert_eq!(filesystem, Filesystem::Memory("tmpfs"));
        }
    }
}
