//! `kvctl logs`: what an instance wrote, and what it writes.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tidekv_shm::RuntimeDir;

use crate::console::Console;
use crate::exit::Outcome;
use crate::interrupt::Interrupt;
use crate::launch::house::{InstanceState, houses};
use crate::launch::tail::{self, Follower};
use crate::text::nearest;

/// How often a log is looked at.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

pub(super) fn run(
    dir: &RuntimeDir,
    instance: &str,
    count: usize,
    follow: bool,
    console: &mut Console,
) -> anyhow::Result<Outcome> {
    let states = houses(dir)?.into_iter().filter(|house| house.is_alive).filter_map(|house| house.state);
    let all: Vec<InstanceState> = states.flat_map(|state| state.instances).collect();
    let Some(found) = all.iter().find(|one| one.name == instance) else {
        let meant = nearest(instance, all.iter().map(|one| one.name.as_str()));
        let meant = meant.map(|meant| format!(" Did you mean '{meant}'?")).unwrap_or_default();
        console.note(format_args!("No instance '{instance}' runs.{meant}"));
        return Ok(Outcome::Negative);
    };
    let path: PathBuf = found.log.clone();
    let reading = || format!("cannot read {}", path.display());
    if !path.exists() {
        console.note(format_args!("{instance} has written nothing yet."));
        return Ok(Outcome::Done);
    }
    let mut follower = if follow { Some(Follower::at_end(&path).with_context(reading)?) } else { None };
    for line in tail::last(&path, count).with_context(reading)? {
        console.line(line)?;
    }
    let Some(follower) = &mut follower else { return Ok(Outcome::Done) };
    let interrupt = Interrupt::catch()?;
    while !console.is_reader_gone() {
        // A log that is gone went with its supervisor.
        let Some(lines) = follower.read().with_context(reading)? else { break };
        for line in lines {
            console.line(line)?;
        }
        let mut fds = [PollFd::new(&interrupt, PollFlags::IN)];
        let timeout = Timespec::try_from(LOOK_AGAIN).expect("less than a second");
        match poll(&mut fds, Some(&timeout)) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => break,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Outcome::Done)
}
