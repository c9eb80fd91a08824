//! `kvctl limit` and `kvctl limit-percent`: the operator's word to a pool.
//!
//! The bytes go to the segment, where kvcached's pools look, then bytes and a new revision to the pool's ledger entry.
//! A pool of ours answers by raising its applied revision; one of kvcached's own never answers.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tidekv_core::units::Bytes;
use tidekv_shm::{LedgerEntry, LedgerHeader, RuntimeDir, SegmentError, SegmentView, segment};

use super::lock_deadline;
use super::wait::{self, Waited};
use crate::console::{Colour, Console};
use crate::exit::Outcome;
use crate::request::Limit;
use crate::scene::{Place, Pool, Scene};
use crate::text::kvcached_size;

pub(super) fn run(
    dir: &RuntimeDir,
    name: &str,
    limit: Limit,
    wait: Option<Duration>,
    console: &mut Console,
) -> anyhow::Result<Outcome> {
    let scene = Scene::look(dir)?;
    let name = &scene.full_name(name);
    let pools = scene.named(name);
    if pools.is_empty() {
        return Ok(scene.say_unknown(name, console));
    }
    let places: Vec<&Place> = pools.iter().filter_map(|pool| pool.live_place()).collect();
    let is_ours = pools.iter().any(|pool| pool.place.is_some());
    if is_ours && places.is_empty() {
        console.note(format_args!("IPC '{name}' has no living owner, so nobody would obey: `kvctl gc` removes it."));
        return Ok(Outcome::Negative);
    }
    let bytes = in_bytes(name, limit, &places)?;
    let word = i64::try_from(bytes.0).context("a limit is below 8 EiB")?;
    if let Some(view) = pools.iter().find(|pool| pool.place.is_none()).and_then(|pool| pool.segment) {
        if !view.is_plausible() {
            bail!("{name} has 24 bytes, but they are no pool's numbers: nothing was written to it");
        }
        if bytes == Bytes::ZERO {
            bail!("{name} is kvcached's own: it ignores a limit of 0, and its tools would no longer list it");
        }
        if !(SegmentView { limit: word, ..view }).is_plausible() {
            bail!("{name} is kvcached's own: give it a limit from 4 KiB to 4 PiB");
        }
    }

    let used = pools.iter().map(|pool| needs(pool)).max().unwrap_or(0);
    let lowered = pools.iter().any(|pool| word < pool.limit());
    let above = i128::from(word) < used;
    if above && lowered {
        console.line(format_args!("No enough free space to decrease for the new kv_cache_limit for {name}"))?;
    }
    let revisions = write(&scene, name, is_ours, &places, bytes)?;
    warn(name, bytes, &places, console);
    let size = kvcached_size(word);
    console.line(format_args!("Updated kv cache limit for {name} to {size} ({word} bytes)"))?;

    match wait {
        Some(timeout) if is_ours => wait_for_all(name, &revisions, timeout, console),
        Some(_) => {
            console.note(format_args!("{name} is kvcached's own and does not say when it has applied a limit."));
            Ok(if above { Outcome::Draining } else { Outcome::Done })
        }
        None => Ok(if above { Outcome::Draining } else { Outcome::Done }),
    }
}

/// Writes the limit to the segment, then to the pool's entries; the new revision of each, or none where the pool is gone.
pub(crate) fn write<'a>(
    scene: &Scene,
    name: &str,
    is_ours: bool,
    places: &[&'a Place],
    bytes: Bytes,
) -> anyhow::Result<Vec<(&'a Place, Option<u64>)>> {
    match segment::write_limit(&scene.segment_path(name), bytes) {
        Ok(()) => {}
        // Deleted under a living pool, which is about to make it again from what its entry says.
        Err(SegmentError::NotFound { .. }) if is_ours => {}
        Err(error) => return Err(error.into()),
    }
    let mut revisions = Vec::new();
    for &place in places {
        let revision = publish(place, bytes).with_context(|| {
            format!("the segment of {name} has the new limit, but its ledger entry on {} has not", place.device)
        })?;
        revisions.push((place, revision));
    }
    Ok(revisions)
}

/// Says what such a limit means, where it is probably not meant.
fn warn(name: &str, bytes: Bytes, places: &[&Place], console: &mut Console) {
    if bytes == Bytes::ZERO {
        console.note(format_args!("warning: with a limit of 0 {name} can hold nothing."));
        return;
    }
    let knows_device = |place: &&&Place| place.header.total > Bytes::ZERO || place.header.explicit_budget;
    let smallest = places.iter().filter(knows_device).min_by_key(|place| place.header.budget);
    if let Some(place) = smallest.filter(|place| bytes > place.header.budget) {
        let (device, budget) = (&place.device, place.header.budget);
        console.note(format_args!(
            "warning: all pools of {device} together have {budget}: {name} never comes to its limit."
        ));
    }
}

/// What the pool cannot give back at once.
fn needs(pool: &Pool) -> i128 {
    let in_use = pool.live_place().map_or(0, |place| i128::from(place.entry.in_use.0));
    in_use.max(pool.used().into())
}

/// The limit in bytes. A percentage is one of the budget where somebody gave one, else of the device, as kvcached's is; of the
/// smallest, where the pool is on several.
fn in_bytes(name: &str, limit: Limit, places: &[&Place]) -> anyhow::Result<Bytes> {
    let percent = match limit {
        Limit::Size(bytes) => return Ok(bytes),
        Limit::Percent(percent) => percent,
    };
    let whole = |place: &&&Place| {
        let LedgerHeader { budget, total, explicit_budget, .. } = place.header;
        if explicit_budget { budget } else { total }
    };
    let Some(smallest) = places.iter().min_by_key(whole) else {
        bail!(
            "{name} is kvcached's own: no ledger says on which device it is and how large that is; \
             give a size to `kvctl limit`"
        );
    };
    if smallest.header.total == Bytes::ZERO && !smallest.header.explicit_budget {
        bail!("the ledger of {} does not say how large it is; give a size to `kvctl limit`", smallest.device);
    }
    Ok(percent.of(whole(&smallest)))
}

/// Writes bytes and a new revision to the entry; the revision, or nothing if the pool is gone.
fn publish(place: &Place, limit: Bytes) -> Result<Option<u64>, tidekv_shm::LedgerError> {
    let LedgerEntry { name, group, .. } = &place.entry;
    place.ledger.update(lock_deadline(), |view| {
        let entry = view.by_name_mut(name, *group)?;
        entry.limit = limit;
        entry.limit_revision = entry.limit_revision.saturating_add(1);
        Some(entry.limit_revision)
    })
}

fn wait_for_all(
    name: &str,
    revisions: &[(&Place, Option<u64>)],
    timeout: Duration,
    console: &mut Console,
) -> anyhow::Result<Outcome> {
    let deadline = Instant::now() + timeout;
    let mut outcome = Outcome::Done;
    for (place, revision) in revisions {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = match revision {
            Some(revision) => wait::until(place, left, |entry| entry.applied_revision >= *revision)?,
            None => Waited::Ended,
        };
        match waited {
            Waited::Done(_) => {}
            Waited::NotYet(entry) => {
                let held = format!("{name} still holds {} on {}", entry.reserved, place.device);
                console.line(console.paint(&format!("Still draining: {held}."), Colour::Yellow))?;
                outcome = Outcome::Draining;
            }
            Waited::Ended => {
                console.note(format_args!("{name} on {} ended before it applied the limit.", place.device));
                return Ok(Outcome::Negative);
            }
        }
    }
    Ok(outcome)
}
