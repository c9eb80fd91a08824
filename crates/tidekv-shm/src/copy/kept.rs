//! The profile of this machine in the user's cache folder.
//!
//! ```text
//!   $XDG_CACHE_HOME/tidekv/copy-<number>.profile        or ~/.cache/tidekv/...
//! ```
//!
//! The number is a checksum of processor and processor count, so that machines that share a home do not quarrel. The
//! file is a convenience: damaged, foreign or missing it is measured again, and where it cannot be written the next
//! process measures too. A reader never sees half of one, because it is renamed into place.

use std::env;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::profile::{MachineKey, Profile};

/// A profile has about 500 bytes. More is not one, and is not read.
const MAX_BYTES: u64 = 4096;

/// Where the profile of a machine is kept, if this user has a place for such things.
pub(super) fn user_path(key: &MachineKey) -> Option<PathBuf> {
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    let number = super::crc32c(format!("{} {}", key.processor, key.cpus).as_bytes());
    Some(cache.join("tidekv").join(format!("copy-{number:08x}.profile")))
}

/// The profile at `path`, if it is one of this machine.
pub(super) fn load(path: &Path, key: &MachineKey) -> Option<Profile> {
    let mut text = String::new();
    // Not waiting for a writer, should somebody have put a pipe there.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    file.take(MAX_BYTES).read_to_string(&mut text).ok()?;
    Profile::from_text(&text, key)
}

/// Keeps a profile; whether that worked.
pub(super) fn store(path: &Path, key: &MachineKey, profile: &Profile) -> bool {
    let Some(folder) = path.parent() else { return false };
    if DirBuilder::new().recursive(true).mode(0o700).create(folder).is_err() {
        return false;
    }
    let partial = path.with_extension(format!("{}.partial", std::process::id()));
    let written = write(&partial, &profile.to_text(key)).and_then(|()| fs::rename(&partial, path));
    if written.is_err() {
        // Nothing can be done about a file that will not go, and its name says what it is.
        let _ = fs::remove_file(&partial);
    }
    written.is_ok()
}

fn write(path: &Path, text: &str) -> std::io::Result<()> {
    let mut file: File = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> MachineKey {
        MachineKey { processor: "x".to_owned(), cpus: 1 }
    }

    #[test]
    fn what_is_kept_comes_back_and_nothing_else_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/er/copy.profile");
        assert_eq!(load(&path, &key()), None);
        let profile = Profile::assumed();
        assert!(store(&path, &key(), &profile));
        assert_eq!(load(&path, &key()), Some(profile));
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn a_place_that_cannot_be_written_is_no_error() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(!store(&file.join("copy.profile"), &key(), &Profile::assumed()));
        assert!(!store(folder.path(), &key(), &Profile::assumed()), "a folder stands where the file ought to");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing half-written is left");
    }

    #[test]
    fn large_and_binary_files_are_no_profiles() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("copy.profile");
        for bytes in [vec![0xFF; 100], vec![b'a'; 1 << 20]] {
            fs::write(&path, bytes).unwrap();
            assert_eq!(load(&path, &key()), None);
        }
    }
}
