//! The supervisor's own side: building its folder, saying what it does, leaving.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use rustix::fs::{FlockOperation, flock};
use tidekv_shm::RuntimeDir;

use super::{LOCK, STATE, State, leave_street, private_folder, remove_house, street};

/// The supervisor's own folder. It is removed on drop, with all that is in it, unless it is left to `kvctl gc`.
#[derive(Debug)]
pub(crate) struct OwnHouse {
    path: PathBuf,
    id: String,
    is_left: bool,
    /// Held, never read.
    #[cfg_attr(not(test), expect(dead_code, reason = "closing it is what it is for"))]
    lock: File,
}

impl OwnHouse {
    pub(crate) fn build(dir: &RuntimeDir) -> anyhow::Result<Self> {
        let street = street(dir);
        if let Some(root) = street.parent() {
            fs::create_dir_all(root).with_context(|| format!("cannot make {}", root.display()))?;
        }
        let id = format!("{}-{:08x}", std::process::id(), unlikely_twice());
        let path = street.join(&id);
        let making = || format!("cannot make {}", path.display());
        let mut tries = 3;
        loop {
            make_private(&street)?;
            match DirBuilder::new().mode(0o700).create(&path) {
                // The last one out has just removed the street.
                Err(error) if error.kind() == io::ErrorKind::NotFound && tries > 0 => tries -= 1,
                made => break made.with_context(making)?,
            }
        }
        let lock = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path.join(LOCK));
        let lock = lock.with_context(making)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).with_context(making)?;
        Ok(Self { path, id, is_left: false, lock })
    }

    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// Something of it still runs: the folder stays, and by it `kvctl gc` finds that.
    pub(crate) fn leave(&mut self) {
        self.is_left = true;
    }

    /// Where an instance's lines go. Its name comes from a configuration: what is not plain in it is left out.
    pub(crate) fn log_path(&self, number: usize, name: &str) -> PathBuf {
        let plain = name.chars().filter(|letter| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_'));
        self.path.join(format!("{number}-{}.log", plain.take(64).collect::<String>()))
    }

    /// Says what is being done. Readers see the old file or the new one.
    pub(crate) fn write(&self, state: &State) -> io::Result<()> {
        let fresh = self.path.join("state.json.new");
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&fresh)?;
        file.write_all(&serde_json::to_vec_pretty(state)?)?;
        fs::rename(&fresh, self.path.join(STATE))
    }
}

impl Drop for OwnHouse {
    fn drop(&mut self) {
        if self.is_left {
            return;
        }
        if let Err(error) = remove_house(&self.path) {
            tracing::warn!("{} stays: {error}; `kvctl gc` removes it", self.path.display());
        }
        leave_street(&self.path);
    }
}

/// Makes a folder for us alone, or makes sure that the one that is there is.
fn make_private(path: &Path) -> anyhow::Result<()> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(error).with_context(|| format!("cannot make {}", path.display()));
        }
        _ => {}
    }
    private_folder(path)?;
    Ok(())
}

/// A number that two runs with the same process number hardly share.
fn unlikely_twice() -> u32 {
    use std::hash::{BuildHasher, RandomState};
    let number = RandomState::new().hash_one(std::process::id());
    u32::try_from(number >> 32).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use rustix::process::Signal;

    use super::super::houses;
    use super::*;

    fn world() -> (tempfile::TempDir, RuntimeDir) {
        let folder = tempfile::tempdir().unwrap();
        let dir = RuntimeDir::at(folder.path());
        (folder, dir)
    }

    #[test]
    fn a_house_is_seen_while_its_owner_lives_and_gone_with_it() {
        let (_folder, dir) = world();
        assert!(houses(&dir).unwrap().is_empty());
        let own = OwnHouse::build(&dir).unwrap();
        let state = State { pid: std::process::id(), config: None, router: None, instances: Vec::new() };
        own.write(&state).unwrap();
        let found = houses(&dir).unwrap();
        assert_eq!((found.len(), found[0].is_alive, &found[0].state), (1, true, &Some(state)));
        drop(own);
        assert!(houses(&dir).unwrap().is_empty());
    }

    #[test]
    fn a_dead_owners_house_is_cleared() {
        let (_folder, dir) = world();
        let own = OwnHouse::build(&dir).unwrap();
        let path = own.path.clone();
        fs::write(own.log_path(1, "../../etc/pass wd"), "line\n").unwrap();
        // As if it had been killed: nothing of its own runs, and the kernel drops the lock.
        flock(&own.lock, FlockOperation::Unlock).unwrap();
        std::mem::forget(own);
        let found = houses(&dir).unwrap();
        assert!(!found[0].is_alive && found[0].state.is_none());
        assert!(!found[0].signal(Signal::TERM).unwrap());
        assert!(found[0].clear().unwrap().is_empty());
        assert!(!path.exists());
    }

    #[test]
    fn a_house_that_is_left_stays_for_whoever_cleans_up() {
        let (_folder, dir) = world();
        let mut own = OwnHouse::build(&dir).unwrap();
        let path = own.path.clone();
        own.leave();
        drop(own);
        let found = houses(&dir).unwrap();
        assert!(found.len() == 1 && !found[0].is_alive && found[0].path == path);
        assert!(found[0].clear().unwrap().is_empty() && !path.exists());
    }

    #[test]
    fn names_of_logs_are_plain() {
        let (_folder, dir) = world();
        let own = OwnHouse::build(&dir).unwrap();
        assert_eq!(own.log_path(2, "../../etc/pass wd").file_name().unwrap(), "2-etcpasswd.log");
    }

    #[test]
    fn a_folder_of_everybody_is_refused() {
        let (_folder, dir) = world();
        let street = street(&dir);
        fs::create_dir(&street).unwrap();
        fs::set_permissions(&street, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(OwnHouse::build(&dir).unwrap_err().to_string().contains("yours alone"));
        assert!(houses(&dir).is_err());
    }
}
