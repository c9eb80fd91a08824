//! `kvctl down`: tells every supervisor of this user to stop, and waits for it.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use tidekv_shm::RuntimeDir;

use crate::console::Console;
use crate::exit::Outcome;
use crate::launch::house::houses;

pub(super) fn run(dir: &RuntimeDir, wait: Duration, console: &mut Console) -> anyhow::Result<Outcome> {
    let deadline = Instant::now() + wait;
    let mut told = Vec::new();
    for house in houses(dir)? {
        if house.signal(Signal::TERM)? {
            told.push(house);
        }
    }
    if told.is_empty() {
        console.note("Nothing runs.");
        return Ok(Outcome::Negative);
    }
    let mut outcome = Outcome::Done;
    for house in told {
        let pid = house.state.as_ref().map_or(0, |state| state.pid);
        if house.wait_until_gone(deadline) {
            console.line(format_args!("Stopped supervisor {pid}."))?;
        } else {
            console.line(format_args!("Supervisor {pid} is still letting requests end."))?;
            outcome = Outcome::Draining;
        }
    }
    Ok(outcome)
}
