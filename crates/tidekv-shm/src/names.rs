//! What the shared files are called, and where they lie.
//!
//! | file | name |
//! | --- | --- |
//! | pool segment | `<pool>`, and `<pool>_g<id>` for groups above 0; by default `kvcached_<engine>_<process group>` |
//! | ledger | `kvcached-ledger-<uid>-<device>` |
//! | events | `kvcached-events-<uid>-<device>` |
//! | arena | `kvcached-arena-<uid>-<name>`, see `arena::ArenaName` |
//!
//! Names come from people and environment variables, so they are cleaned the way kvcached does it before they become
//! part of a path: nothing but `[A-Za-z0-9_-]` is left, so a name can neither leave the folder nor hide in it.

use std::fmt;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, stat};
use rustix::io::Errno;
use rustix::process::{geteuid, getpgrp};
use tidekv_core::units::GroupId;

/// A cleaned name has at most this many characters.
pub(crate) const NAME_MAX: usize = 64;
/// A cleaned name with the longest group suffix still fits.
pub(crate) const GROUPED_NAME_MAX: usize = NAME_MAX + "_g4294967295".len();

/// The folder of all shared files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeDir(PathBuf);

impl RuntimeDir {
    /// `KVCACHED_RUNTIME_DIR`, or `/dev/shm` where that is unset or empty.
    pub fn from_env() -> Self {
        match std::env::var_os("KVCACHED_RUNTIME_DIR") {
            Some(path) if !path.is_empty() => Self(path.into()),
            _ => Self("/dev/shm".into()),
        }
    }

    /// This folder. It is made, for this user alone, when the first file is.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Where a pool's segment lies. For group g > 0 the name is `pool.with_group(g)`.
    pub fn segment_path(&self, name: &PoolName) -> PathBuf {
        self.0.join(name.as_str())
    }

    /// Where this user's ledger of a device lies.
    pub fn ledger_path(&self, device: &DeviceName) -> PathBuf {
        self.0.join(format!("{}{device}", ledger_prefix()))
    }

    /// Where what happened on a device is written down, beside its ledger.
    pub fn events_path(&self, device: &DeviceName) -> PathBuf {
        self.0.join(format!("{}{device}", events_prefix()))
    }

    /// Refuses a folder in which another user could replace files under us. One that is not there is no refusal.
    pub fn check(&self) -> Result<(), FolderError> {
        let path = || self.0.clone();
        let found = match stat(&self.0) {
            Ok(found) => found,
            Err(Errno::NOENT) => return Ok(()),
            Err(error) => return Err(FolderError::Os { call: "stat", path: path(), source: error.into() }),
        };
        let mode = Mode::from_raw_mode(found.st_mode);
        let trusted = [0, geteuid().as_raw()].contains(&found.st_uid) || is_of_no_user_here(found.st_uid);
        if !trusted {
            return Err(FolderError::Owner { path: path(), uid: found.st_uid });
        }
        if mode.contains(Mode::WOTH) && !mode.contains(Mode::SVTX) {
            return Err(FolderError::Mode { path: path(), mode: mode.as_raw_mode() & 0o7777 });
        }
        Ok(())
    }

    /// Makes the folder with mode 0700 if it is not there, and checks it if it is.
    pub(crate) fn ensure(&self) -> Result<(), FolderError> {
        if self.0.is_dir() {
            return self.check();
        }
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&self.0);
        made.map_err(|source| FolderError::Os { call: "mkdir", path: self.0.clone(), source })
    }
}

/// Whether files that belong to users outside of this user namespace show this number. In a container without root of its host,
/// the host's `/dev/shm` has it.
fn is_of_no_user_here(uid: u32) -> bool {
    const OVERFLOW: u32 = 65_534;
    let everybody = |map: String| map.split_whitespace().eq(["0", "0", "4294967295"]);
    uid == OVERFLOW && !std::fs::read_to_string("/proc/self/uid_map").is_ok_and(everybody)
}

/// Why a folder is not used for shared files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FolderError {
    /// Whoever owns a folder may remove and replace every file in it.
    #[error("{} belongs to user {uid}, who could replace every file in it: set KVCACHED_RUNTIME_DIR to a folder of your own", .path.display())]
    Owner {
        /// The folder.
        path: PathBuf,
        /// Its owner.
        uid: u32,
    },
    /// Everybody may remove and replace every file in it.
    #[error(
        "everybody could replace the files in {}, whose mode is {mode:04o}: `chmod +t` it, or set KVCACHED_RUNTIME_DIR to a folder of your own", .path.display()
    )]
    Mode {
        /// The folder.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The operating system refused a call.
    #[error("{call} of {} failed", .path.display())]
    Os {
        /// The system call.
        call: &'static str,
        /// The folder.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// What this user's ledgers are called, up to the device.
pub(crate) fn ledger_prefix() -> String {
    format!("kvcached-ledger-{}-", geteuid().as_raw())
}

/// What this user's events files are called, up to the device.
pub(crate) fn events_prefix() -> String {
    format!("kvcached-events-{}-", geteuid().as_raw())
}

/// A name that nothing usable is left of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// The empty name.
    #[error("the name is empty: give at least one character of A-Z, a-z, 0-9, '_' or '-'")]
    Empty,
}

/// A pool, as operators name it: 1 to 64 characters of `[A-Za-z0-9_-]`, longer only by its group's suffix.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolName(String);

impl PoolName {
    /// Any text, cleaned as kvcached cleans `KVCACHED_IPC_NAME`: other characters become `-`, the 65th and all after
    /// it are cut off.
    pub fn new(text: &str) -> Result<Self, NameError> {
        clean(text).map(Self)
    }

    /// `kvcached_<tag>_<process group>`, which is what kvcached calls a pool that nobody named.
    pub fn default_for(tag: &str) -> Self {
        let group = getpgrp().as_raw_nonzero();
        // Cut the tag, not the number: the number is what tells two engines apart.
        let room = NAME_MAX - "kvcached__".len() - group.to_string().len();
        let tag: String = clean(tag).unwrap_or_else(|NameError::Empty| "proc".to_owned()).chars().take(room).collect();
        Self(format!("kvcached_{tag}_{group}"))
    }

    /// The name of one group's segment: unchanged for group 0, `<name>_g<id>` for the others.
    #[must_use]
    pub fn with_group(&self, group: GroupId) -> Self {
        match group {
            GroupId(0) => self.clone(),
            GroupId(id) => Self(format!("{}_g{id}", self.0)),
        }
    }

    /// `<name>-<n>`, still at most 64 characters: another name to try when this one belongs to a living pool.
    #[must_use]
    pub fn numbered(&self, n: u32) -> Self {
        let suffix = format!("-{n}");
        let stem: String = self.0.chars().take(NAME_MAX - suffix.len()).collect();
        Self(stem + &suffix)
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for PoolName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// A device whose memory is shared: `host`, or the UUID of a GPU or of a part of one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceName(String);

impl DeviceName {
    /// The memory of this machine.
    pub fn host() -> Self {
        Self("host".to_owned())
    }

    /// A device's UUID as its driver prints it (`GPU-...`, `MIG-...`), cleaned like a pool's name.
    pub fn new(text: &str) -> Result<Self, NameError> {
        clean(text).map(Self)
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// Whether a character may stand in a name.
pub(crate) fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-'
}

fn clean(text: &str) -> Result<String, NameError> {
    if text.is_empty() {
        return Err(NameError::Empty);
    }
    let keep = |c: char| if u8::try_from(c).is_ok_and(is_name_byte) { c } else { '-' };
    Ok(text.chars().take(NAME_MAX).map(keep).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_cleaned_as_kvcached_does() {
        let clean = |text: &str| PoolName::new(text).unwrap().as_str().to_owned();
        assert_eq!(clean("VLLM"), "VLLM");
        assert_eq!(clean("my pool/é.1"), "my-pool---1");
        assert_eq!(clean("../../etc/passwd"), "------etc-passwd");
        assert_eq!(clean(&"x".repeat(70)), "x".repeat(64));
        assert_eq!(clean(&"é".repeat(70)), "-".repeat(64), "characters are counted, not bytes");
        assert_eq!(PoolName::new(""), Err(NameError::Empty));
    }

    #[test]
    fn the_default_name_keeps_its_number() {
        let group = getpgrp().as_raw_nonzero().to_string();
        assert_eq!(PoolName::default_for("vLLM").as_str(), format!("kvcached_vLLM_{group}"));
        assert_eq!(PoolName::default_for("").as_str(), format!("kvcached_proc_{group}"));
        let long = PoolName::default_for(&"x".repeat(100));
        assert!(long.as_str().len() == NAME_MAX && long.as_str().ends_with(&format!("_{group}")), "{long}");
    }

    #[test]
    fn groups_have_segments_of_their_own() {
        let name = PoolName::new(&"n".repeat(64)).unwrap();
        assert_eq!(name.with_group(GroupId(0)), name);
        assert_eq!(name.with_group(GroupId(7)).as_str(), format!("{name}_g7"));
        assert_eq!(name.with_group(GroupId(u32::MAX)).as_str().len(), GROUPED_NAME_MAX);
        assert_eq!(name.numbered(12).as_str(), format!("{}-12", "n".repeat(61)));
    }

    #[test]
    fn files_begin_with_kvcached() {
        let dir = RuntimeDir::at("/dev/shm");
        let device = DeviceName::new("MIG-GPU-1/2/3").unwrap();
        let uid = geteuid().as_raw();
        assert_eq!(dir.ledger_path(&device), PathBuf::from(format!("/dev/shm/kvcached-ledger-{uid}-MIG-GPU-1-2-3")));
        assert_eq!(dir.events_path(&device), PathBuf::from(format!("/dev/shm/kvcached-events-{uid}-MIG-GPU-1-2-3")));
        assert_eq!(dir.segment_path(&PoolName::new("a").unwrap()), PathBuf::from("/dev/shm/a"));
    }
}
