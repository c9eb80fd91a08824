//! `kvctl share`: on which terms a pool shares its device.
//!
//! Floors are promises, so a floor is set only where all floors together fit the budget; that is looked at and written
//! under one lock, and two operators cannot both take the last of it.

use anyhow::bail;
use tidekv_core::units::Bytes;
use tidekv_shm::{EntryState, LedgerEntry, LedgerView, RuntimeDir};

use super::budget::decided_by;
use super::lock_deadline;
use crate::console::Console;
use crate::exit::Outcome;
use crate::request::ShareChange;
use crate::scene::{Place, Scene, bound};

pub(super) fn run(dir: &RuntimeDir, name: &str, change: ShareChange, console: &mut Console) -> anyhow::Result<Outcome> {
    let mut scene = Scene::look(dir)?;
    let name = &scene.full_name(name);
    let pools = scene.named(name);
    if pools.is_empty() {
        return Ok(scene.say_unknown(name, console));
    }
    if pools.iter().all(|pool| pool.place.is_none()) {
        bail!("{name} is kvcached's own: it has no ledger entry, and shares as first come, first served");
    }
    if !change.is_empty() {
        let places: Vec<&Place> = pools.iter().filter_map(|pool| pool.live_place()).collect();
        if places.is_empty() {
            console.note(format_args!("IPC '{name}' has no living owner: `kvctl gc` removes it."));
            return Ok(Outcome::Negative);
        }
        for place in places {
            apply(place, change)?;
        }
        scene = Scene::look(dir)?;
    }
    for place in scene.named(name).into_iter().filter_map(|pool| pool.place.as_ref()) {
        show(name, place, console)?;
    }
    Ok(Outcome::Done)
}

/// Why a change was refused.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("the pool has just ended")]
    Ended,
    #[error("a floor of {floor} is above the ceiling of {ceiling}")]
    AboveCeiling { floor: Bytes, ceiling: Bytes },
    #[error("a floor of {floor} does not fit: of a budget of {budget}, {taken} are other pools' floors")]
    AboveBudget { floor: Bytes, budget: Bytes, taken: Bytes },
}

pub(crate) fn apply(place: &Place, change: ShareChange) -> anyhow::Result<()> {
    let outcome = place.ledger.update(lock_deadline(), |view| {
        let Some(index) = view.index_of(place.entry.slot).filter(|&index| is_same(&view.entries[index], &place.entry))
        else {
            return Err(Refusal::Ended);
        };
        let changed = changed(&view.entries[index], change);
        check(view, index, &changed)?;
        view.entries[index] = changed;
        Ok(())
    })?;
    Ok(outcome?)
}

fn is_same(now: &LedgerEntry, seen: &LedgerEntry) -> bool {
    (now.pid, now.started, &now.name) == (seen.pid, seen.started, &seen.name)
}

fn changed(entry: &LedgerEntry, change: ShareChange) -> LedgerEntry {
    LedgerEntry {
        weight: change.weight.unwrap_or(entry.weight),
        floor: change.floor.unwrap_or(entry.floor),
        ceiling: change.ceiling.unwrap_or(entry.ceiling),
        priority: change.priority.unwrap_or(entry.priority),
        ..entry.clone()
    }
}

fn check(view: &LedgerView, index: usize, changed: &LedgerEntry) -> Result<(), Refusal> {
    let LedgerEntry { floor, ceiling, .. } = *changed;
    if floor > ceiling {
        return Err(Refusal::AboveCeiling { floor, ceiling });
    }
    // A floor that is lowered may always be: it can only help.
    if floor <= view.entries[index].floor {
        return Ok(());
    }
    let others = view.entries.iter().enumerate().filter(|&(other, _)| other != index);
    let living = others.filter(|(_, entry)| entry.state == EntryState::Live);
    let taken = Bytes(living.fold(0, |sum: u64, (_, entry)| sum.saturating_add(entry.claim().kept_floor().0)));
    let budget = view.header.budget;
    if floor > budget.saturating_sub(taken) {
        return Err(Refusal::AboveBudget { floor, budget, taken });
    }
    Ok(())
}

fn show(name: &str, place: &Place, console: &mut Console) -> anyhow::Result<()> {
    let Place { device, header, entry, fair, owed, alive, .. } = place;
    let owner = if *alive { "alive" } else { "gone" };
    let (wants, usage) = (entry.claim().wants(), place.usage());
    for (title, text) in [
        ("IPC", format!("{name} (group {}, pid {}, {owner}) on {device}", entry.group, entry.pid)),
        ("Weight", entry.weight.to_string()),
        ("Priority", entry.priority.to_string()),
        ("Floor", entry.floor.to_string()),
        ("Ceiling", bound(entry.ceiling)),
        ("Limit", bound(entry.limit)),
        ("Budget", format!("{} for all pools of {device}, {}", header.budget, decided_by(header))),
        ("Wants", format!("{wants}: {} held in use, {} waited for", usage.used(), entry.demand)),
        ("Holds", format!("{}: {} needed, {} cached, {} idle", usage.held(), usage.needed, usage.cached, usage.idle)),
        ("Fair share", fair.to_string()),
        ("Owes", owed.to_string()),
    ] {
        console.line(format_args!("{title:<12} {text}"))?;
    }
    Ok(())
}
