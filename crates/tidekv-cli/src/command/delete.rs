//! `kvctl delete`: the segment goes, the pool stays.

use anyhow::bail;
use tidekv_shm::{RuntimeDir, segment};

use crate::console::{Colour, Console};
use crate::exit::Outcome;
use crate::scene::Scene;

pub(super) fn run(dir: &RuntimeDir, name: &str, force: bool, console: &mut Console) -> anyhow::Result<Outcome> {
    let scene = Scene::look(dir)?;
    let name = &scene.full_name(name);
    let pools = scene.named(name);
    if pools.is_empty() {
        return Ok(scene.say_unknown(name, console));
    }
    let path = scene.segment_path(name);
    let owner = pools.iter().find_map(|pool| pool.live_place());
    // The ledger may be unreadable; the segment's own lock still says that somebody lives.
    let alive = owner.is_some() || segment::has_owner(&path)?;
    if alive && !force {
        let pid = owner.map_or_else(String::new, |place| format!(" (pid {})", place.entry.pid));
        bail!("{name} is alive{pid}: --force deletes its segment; the pool keeps its memory and makes it again");
    }
    if segment::delete(&path)? {
        console.line(console.paint(&format!("Deleted IPC '{name}'."), Colour::Green))?;
        return Ok(Outcome::Done);
    }
    if owner.is_none() && path.symlink_metadata().is_ok() {
        bail!("{} is not a pool's segment: `rm` removes it, if nobody needs it", path.display());
    }
    let why = if alive { "" } else { "; `kvctl gc` removes what is left of it" };
    console.note(format_args!("IPC '{name}' has no segment{why}."));
    Ok(Outcome::Negative)
}
