//! `kvctl trim`: idle memory back now, not when it decays; and cached prefixes, which a pool gives only when asked.

use std::time::Duration;

use anyhow::bail;
use tidekv_core::share::MemoryUse;
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
    cached: bool,
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
        match trim(name, place, cached, wait, console)? {
            Outcome::Done => {}
            other => outcome = other,
        }
    }
    Ok(outcome)
}

fn trim(
    name: &str,
    place: &Place,
    cached: bool,
    wait: Option<Duration>,
    console: &mut Console,
) -> anyhow::Result<Outcome> {
    let LedgerEntry { name: entry_name, group, .. } = &place.entry;
    let asked = place.ledger.update(lock_deadline(), |view| {
        let entry = view.by_name_mut(entry_name, *group)?;
        entry.trim_request = entry.trim_request.saturating_add(1);
        if cached {
            entry.trim_cached = entry.trim_request;
        }
        Some((entry.trim_request, entry.usage()))
    })?;
    let ended = |console: &mut Console| {
        console.note(format_args!("{name} on {} has ended.", place.device));
        Ok(Outcome::Negative)
    };
    let Some((request, before)) = asked else { return ended(console) };
    let kept = |usage: MemoryUse| if cached { usage.cached } else { Bytes::ZERO };
    let Some(timeout) = wait else {
        let prefixes = if cached { format!(" and {} of cached prefixes", before.cached) } else { String::new() };
        console.line(format_args!("Asked {name} to give back {} of idle memory{prefixes}.", before.idle))?;
        let nothing = before.idle == Bytes::ZERO && kept(before) == Bytes::ZERO;
        return Ok(if nothing { Outcome::Done } else { Outcome::Draining });
    };
    match wait::until(place, timeout, |entry| entry.trim_done >= request)? {
        Waited::Done(entry) => {
            let given = before.held().saturating_sub(entry.reserved);
            console.line(format_args!("{name} gave back {given} and holds {}.", entry.reserved))?;
            Ok(Outcome::Done)
        }
        Waited::NotYet(entry) => {
            let usage = entry.usage();
            let prefixes = if cached { format!(", {} cached", usage.cached) } else { String::new() };
            let line = format!("Still draining: {name} holds {} ({} idle{prefixes}).", usage.held(), usage.idle);
            console.line(console.paint(&line, Colour::Yellow))?;
            Ok(Outcome::Draining)
        }
        Waited::Ended => ended(console),
    }
}
