//! `kvctl trim`: idle memory back now, not when it decays.

use std::time::Duration;

use anyhow::bail;
use tidekv_core::units::Bytes;
use tidekv_shm::{LedgerEntry, RuntimeDir};

use super::lock_deadline;
use super::wait::{self, Waited};
use crate::console::{Colour, Console};
use crate::exit::Outcome;
use crate::scene::{Place, Scene};

pub(super) fn run(
    dir: &RuntimeDir,
    name: &str,
    wait: Option<Duration>,
    console: &mut Console,
) -> anyhow::Result<Outcome> {
    let scene = Scene::look(dir)?;
    let name = &scene.full_name(name);
    let pools = scene.named(name);
    if pools.is_empty() {
        return Ok(scene.say_unknown(name, console));
    }
    if pools.iter().all(|pool| pool.place.is_none()) {
        bail!("{name} is kvcached's own: it gives idle memory back only when its limit is lowered");
    }
    let places: Vec<&Place> = pools.iter().filter_map(|pool| pool.live_place()).collect();
    if places.is_empty() {
        console.note(format_args!("IPC '{name}' has no living owner: `kvctl gc` removes it."));
        return Ok(Outcome::Negative);
    }
    let mut outcome = Outcome::Done;
    for place in places {
        match trim(name, place, wait, console)? {
            Outcome::Done => {}
            other => outcome = other,
        }
    }
    Ok(outcome)
}

fn trim(name: &str, place: &Place, wait: Option<Duration>, console: &mut Console) -> anyhow::Result<Outcome> {
    let LedgerEntry { name: entry_name, group, .. } = &place.entry;
    let asked = place.ledger.update(lock_deadline(), |view| {
        let entry = view.by_name_mut(entry_name, *group)?;
        entry.trim_request = entry.trim_request.saturating_add(1);
        Some((entry.trim_request, entry.reserved, entry.idle))
    })?;
    let ended = |console: &mut Console| {
        console.note(format_args!("{name} on {} has ended.", place.device));
        Ok(Outcome::Negative)
    };
    let Some((request, held, idle)) = asked else { return ended(console) };
    let Some(timeout) = wait else {
        console.line(format_args!("Asked {name} to give back {idle} of idle memory."))?;
        return Ok(if idle == Bytes::ZERO { Outcome::Done } else { Outcome::Draining });
    };
    match wait::until(place, timeout, |entry| entry.trim_done >= request)? {
        Waited::Done(entry) => {
            let given = held.saturating_sub(entry.reserved);
            console.line(format_args!("{name} gave back {given} and holds {}.", entry.reserved))?;
            Ok(Outcome::Done)
        }
        Waited::NotYet(entry) => {
            let line = format!("Still draining: {name} holds {} ({} idle).", entry.reserved, entry.idle);
            console.line(console.paint(&line, Colour::Yellow))?;
            Ok(Outcome::Draining)
        }
        Waited::Ended => ended(console),
    }
}
