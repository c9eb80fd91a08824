//! Where the sockets lie, and who may be there.
//!
//! ```text
//!   <root>/kvcached-tp-<pool>-<8 hex>/          0700, ours, no link      root: $KVCACHED_RUNTIME_DIR, else /tmp
//!       w0.sock  w1.sock  ...                   one for each rank of stage 0
//!       pp1/w0.sock  ...                        pipeline stages above 0 have a folder of their own
//! ```
//!
//! The names are kvcached's: the eight digits are the beginning of `uuid5(NAMESPACE_DNS, pool)`. `/tmp` belongs to
//! everybody, so a folder that somebody else made there first is refused, and so is one that others may enter.
//!
//! | file | what |
//! | --- | --- |
//! | `folder` | opening, making and locking the folder |
//! | `place` | taking a socket's place, and leaving it |
//! | `stale` | what dead workers left behind, for `kvctl gc` |

pub(crate) mod folder;
pub(crate) mod place;
mod stale;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use tidekv_shm::{PoolName, RuntimeDir};
use uuid::Uuid;

use crate::error::IpcError;

pub use stale::{StaleDir, remove_stale_dir, stale_dirs};

/// What the kernel has room for in a socket's address, less the final zero.
const PATH_BYTES_MAX: usize = 107;
/// What a runtime folder is when nobody chose one.
const SHARED_MEMORY: &str = "/dev/shm";
const PREFIX: &str = "kvcached-tp-";
const DIGITS: usize = 8;

/// The folder of one pool's sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketDir {
    path: PathBuf,
}

impl SocketDir {
    /// `<root>/kvcached-tp-<name>-<hex>`. It is made when the first worker takes a place in it.
    pub fn new(root: impl Into<PathBuf>, pool: &PoolName) -> Self {
        Self { path: root.into().join(folder_name(pool.as_str())) }
    }

    /// In `KVCACHED_RUNTIME_DIR`, or in `/tmp` where that is unset or empty.
    pub fn from_env(pool: &PoolName) -> Self {
        Self::new(socket_root(&RuntimeDir::from_env()), pool)
    }

    /// The pool's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The socket of one rank of one stage.
    pub fn socket_path(&self, stage: u32, rank: u32) -> Result<PathBuf, IpcError> {
        let path = self.stage_path(stage).join(format!("w{rank}.sock"));
        let bytes = path.as_os_str().len();
        if bytes > PATH_BYTES_MAX {
            return Err(IpcError::PathTooLong { path, bytes, max: PATH_BYTES_MAX });
        }
        Ok(path)
    }

    fn stage_path(&self, stage: u32) -> PathBuf {
        match stage {
            0 => self.path.clone(),
            stage => self.path.join(format!("pp{stage}")),
        }
    }
}

/// Where the folders of sockets lie for a folder of shared files: in that folder, or in `/tmp`, as kvcached has it, where
/// nobody chose one.
pub fn socket_root(dir: &RuntimeDir) -> PathBuf {
    if *dir == RuntimeDir::at(SHARED_MEMORY) { "/tmp".into() } else { dir.path().to_owned() }
}

fn folder_name(pool: &str) -> String {
    let uuid = Uuid::new_v5(&Uuid::NAMESPACE_DNS, pool.as_bytes()).simple().to_string();
    format!("{PREFIX}{pool}-{}", &uuid[..DIGITS])
}

/// The pool whose folder has this name; nobody else's folder has it by chance.
fn pool_of_folder(name: &str) -> Option<&str> {
    let (pool, _) = name.strip_prefix(PREFIX)?.rsplit_once('-')?;
    (folder_name(pool) == name).then_some(pool)
}
