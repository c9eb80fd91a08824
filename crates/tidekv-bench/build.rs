//! Tells the crate which commit it is built from, as the environment variable `TIDEKV_COMMIT` of its compilation.
//!
//! ```text
//!   TIDEKV_COMMIT set              its value: for builds from an archive or inside a container
//!   inside a git work tree         `1a2b3c4d5e6f`, or `1a2b3c4d5e6f-dirty` with uncommitted changes
//!   neither, or no git installed   `unknown`; never an error
//! ```

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-env-changed=TIDEKV_COMMIT");
    println!("cargo::rerun-if-changed=build.rs");
    let commit = given_commit().or_else(git_commit).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo::rustc-env=TIDEKV_COMMIT={commit}");
}

fn given_commit() -> Option<String> {
    let value = env::var("TIDEKV_COMMIT").ok()?;
    let line = value.lines().next()?.trim();
    (!line.is_empty()).then(|| line.to_owned())
}

fn git_commit() -> Option<String> {
    watch_git();
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    // Untracked files are left out: a result that was just written into the tree does not change the code.
    // Without optional locks, because a refreshed index would be a change of the files watched above.
    let dirty = git(&["--no-optional-locks", "status", "--porcelain", "--untracked-files=no"])
        .is_none_or(|changes| !changes.is_empty());
    Some(if dirty { format!("{commit}-dirty") } else { commit })
}

/// Asks cargo to run this script again when the commit, or its being dirty, may have changed. git itself says
/// where its files are, so work trees (whose HEAD is elsewhere) and packed references are covered.
fn watch_git() {
    let Some(root) = git(&["rev-parse", "--show-toplevel"]) else {
        return;
    };
    for file in ["HEAD", "index", "packed-refs", "logs/HEAD", "reftable"] {
        watch_git_file(file, false);
    }
    if let Some(branch) = git(&["symbolic-ref", "--quiet", "HEAD"]) {
        // A packed branch has no file until the next commit makes one: its folder changes then.
        watch_git_file(&branch, true);
    }
    // Any edit to a tracked source may make the tree dirty, and none of them touches git's files.
    for source in ["crates", "Cargo.toml", "Cargo.lock"] {
        watch(&Path::new(&root).join(source));
    }
}

fn watch_git_file(name: &str, or_its_folder: bool) {
    let Some(path) = git(&["rev-parse", "--git-path", name]).map(PathBuf::from) else {
        return;
    };
    if path.exists() {
        watch(&path);
    } else if or_its_folder && let Some(folder) = path.ancestors().find(|folder| folder.is_dir()) {
        watch(folder);
    }
}

/// A path that does not exist would make cargo run this script on every build.
fn watch(path: &Path) {
    if path.exists() {
        println!("cargo::rerun-if-changed={}", path.display());
    }
}

/// The output of a git command that succeeded.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
