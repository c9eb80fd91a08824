//! A living arena of two members, with two dead ones, in which any word becomes any value at any moment: no panic, no
//! hang, no block outside of its segment, and what has nothing to do with a damaged word works on.
//!
//! An input is a list of steps of three bytes: what, a member, and a number; a step that writes over a word takes the ten
//! bytes behind it too, its place and its value. `crates/tidekv-shm/tests/support/damage.rs` is the rest.

#![no_main]

#[path = "../../crates/tidekv-shm/tests/support/damage.rs"]
#[allow(dead_code, reason = "the plain test builds its steps with the rest")]
mod damage;

use std::sync::LazyLock;

use damage::World;
use libfuzzer_sys::fuzz_target;
use tidekv_shm::RuntimeDir;

/// Then the number of the process. A fuzzer does not end in a way that lets it clean up, so the next one does. No other target has a
/// folder that begins like this, or it would take ours for one that was left.
const FOLDER: &str = "/dev/shm/kvcached-fuzz-words-";

static WORLD: LazyLock<World> = LazyLock::new(|| {
    for entry in std::fs::read_dir("/dev/shm").into_iter().flatten().flatten() {
        let path = entry.path();
        let pid = path.to_str().and_then(|path| path.strip_prefix(FOLDER));
        if pid.is_some_and(|pid| !std::path::Path::new("/proc").join(pid).exists()) {
            let _ = std::fs::remove_dir_all(path);
        }
    }
    World::new(&RuntimeDir::at(format!("{FOLDER}{}", std::process::id())))
});

fuzz_target!(|data: &[u8]| WORLD.run(data));
