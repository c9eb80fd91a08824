//! `kvctl budget`: what all pools of a device may hold together, and who decided it.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde::Serialize;
use tidekv_core::units::Bytes;
use tidekv_shm::{BudgetAuthor, BudgetRight, DeviceName, Ledger, LedgerHeader, RuntimeDir};

use super::lock_deadline;
use crate::console::{Colour, Console};
use crate::exit::Outcome;
use crate::request::{BudgetRequest, BudgetSize};
use crate::scene::{Device, Scene};
use crate::text::nearest;

/// How long a pool may take to look at the device, after nobody had to.
const LOOK_WITHIN: Duration = Duration::from_secs(1);

pub(super) fn run(dir: &RuntimeDir, request: &BudgetRequest, console: &mut Console) -> anyhow::Result<Outcome> {
    let mut scene = Scene::look(dir)?;
    let mut outcome = Outcome::Done;
    if let Some(name) = &request.device {
        if let Some((_, error)) = scene.unreadable.iter().find(|(unreadable, _)| unreadable == name) {
            bail!("the ledger of {name} cannot be read: {error}");
        }
        let Some(device) = scene.devices.iter().find(|device| device.name == *name) else {
            return Ok(say_unknown(&scene, name, console));
        };
        if let Some(size) = request.size {
            warn(device, size, console);
            let Some(ended) = set(dir, device, size, request, console)? else {
                return Ok(say_unknown(&scene, name, console));
            };
            outcome = ended;
            scene = Scene::look(dir)?;
        }
    }
    let is_asked_for = |device: &&Device| request.device.as_ref().is_none_or(|name| device.name == *name);
    let shown: Vec<&Device> = scene.devices.iter().filter(is_asked_for).collect();
    if request.json {
        let rows: Vec<BudgetJson<'_>> = shown.iter().map(|device| BudgetJson::new(device, &scene)).collect();
        console.line(serde_json::to_string_pretty(&rows).context("cannot write JSON")?)?;
    } else if request.size.is_none() {
        if shown.is_empty() {
            console.line("No pool uses a device.")?;
        }
        for device in shown {
            let Device { name, header, .. } = device;
            let held = held(&scene, name);
            console.line(format_args!("{name}: {}, {}; pools hold {held}", header.budget, decided_by(header)))?;
        }
    }
    scene.say_unreadable(console);
    Ok(outcome)
}

/// Sets it, and says what became of it; nothing where the device's last pool has just ended.
fn set(
    dir: &RuntimeDir,
    device: &Device,
    size: BudgetSize,
    request: &BudgetRequest,
    console: &mut Console,
) -> anyhow::Result<Option<Outcome>> {
    let name = &device.name;
    let Some(ledger) = Ledger::open_existing(dir, name)? else { return Ok(None) };
    let watch = ledger.watch()?;
    let author = BudgetAuthor::here(BudgetRight::Operator, "kvctl");
    let given = match size {
        BudgetSize::Given(size) => Some(size),
        BudgetSize::Auto => None,
    };
    let before = ledger.update(lock_deadline(), |view| {
        let before = view.header.budget;
        view.header.decide_budget(given, author);
        before
    })?;
    // Until a deadline, woken by every change of the ledger.
    let until = |within: Duration, done: &dyn Fn(&LedgerHeader, Bytes) -> bool| {
        let deadline = Instant::now() + within;
        loop {
            let view = ledger.read()?;
            let (header, held) = (view.header, view.reserved());
            let left = deadline.saturating_duration_since(Instant::now());
            if done(&header, held) || left.is_zero() {
                return Ok::<_, tidekv_shm::LedgerError>((header, held));
            }
            watch.wait(left)?;
        }
    };
    let (header, held) = match given {
        Some(size) => until(request.wait.unwrap_or_default(), &|_, held| held <= size)?,
        // While a size held nobody had to know what else is on the device.
        None => until(LOOK_WITHIN, &|header, _| header.refreshed_ms > 0)?,
    };
    if !request.json {
        console.line(format_args!(
            "Updated the budget of {name}: {before} -> {}, {}",
            header.budget,
            decided_by(&header)
        ))?;
    }
    if given.is_none_or(|size| held <= size) {
        return Ok(Some(Outcome::Done));
    }
    if !request.json {
        let line = format!("Still draining: pools of {name} hold {held}.");
        console.line(console.paint(&line, Colour::Yellow))?;
    }
    Ok(Some(Outcome::Draining))
}

fn warn(device: &Device, size: BudgetSize, console: &mut Console) {
    let Device { name, header, .. } = device;
    match size {
        BudgetSize::Given(Bytes::ZERO) => {
            console.note(format_args!("warning: with a budget of 0 no pool of {name} can hold anything."))
        }
        BudgetSize::Given(size) if header.total > Bytes::ZERO && size > header.total => {
            console.note(format_args!("warning: {name} has {} in all: pools never come to {size}.", header.total));
        }
        _ => {}
    }
}

fn say_unknown(scene: &Scene, name: &DeviceName, console: &mut Console) -> Outcome {
    let names = || scene.devices.iter().map(|device| device.name.as_str());
    let meant = nearest(name.as_str(), names()).map(|name| format!(" Did you mean '{name}'?")).unwrap_or_default();
    console.note(format_args!("Error: no pool uses the device '{name}'.{meant}"));
    if names().next().is_some() {
        console.note(format_args!("Devices: {}", names().collect::<Vec<_>>().join(", ")));
    }
    Outcome::Negative
}

/// What pools hold of a device, the dead ones included.
fn held(scene: &Scene, device: &DeviceName) -> Bytes {
    let places = scene.pools.iter().filter_map(|pool| pool.place.as_ref()).filter(|place| place.device == *device);
    Bytes(places.fold(0, |sum: u64, place| sum.saturating_add(place.entry.reserved.0)))
}

/// Who decided a budget, in words.
pub(crate) fn decided_by(header: &LedgerHeader) -> String {
    let author = header.setting.author;
    let named = author.map(|author| format!("{} (pid {})", author.name.as_str(), author.pid));
    if header.explicit_budget {
        return match named {
            Some(named) if header.is_operators() => format!("set by {named}"),
            Some(named) => format!("given by {named}"),
            None => "given by a pool of an older release".to_owned(),
        };
    }
    if header.total == Bytes::ZERO {
        return "of a device that nobody has looked at".to_owned();
    }
    let percent = (header.utilization() * 10_000.0).round() / 100.0;
    let asked = named.filter(|_| author.is_some_and(|author| author.right == BudgetRight::Pool));
    let asked = asked.map(|named| format!(", as {named} asks")).unwrap_or_default();
    format!("derived: {percent} % of {} less {} that no pool holds{asked}", header.total, header.non_pool)
}

/// A device's budget in JSON.
#[derive(Serialize)]
struct BudgetJson<'a> {
    device: &'a str,
    budget_bytes: u64,
    /// `operator`, `pool` or `derived`.
    source: &'static str,
    /// Null where nobody decided, or a pool of an older release.
    author: Option<String>,
    pid: Option<u32>,
    revision: u64,
    utilization: f64,
    total_bytes: u64,
    non_pool_bytes: u64,
    held_bytes: u64,
}

impl<'a> BudgetJson<'a> {
    fn new(device: &'a Device, scene: &Scene) -> Self {
        let header = &device.header;
        let author = header.setting.author;
        Self {
            device: device.name.as_str(),
            budget_bytes: header.budget.0,
            source: match () {
                () if header.is_operators() => "operator",
                () if header.explicit_budget => "pool",
                () => "derived",
            },
            author: author.map(|author| author.name.as_str().to_owned()),
            pid: author.map(|author| author.pid),
            revision: header.setting.revision,
            utilization: header.utilization(),
            total_bytes: header.total.0,
            non_pool_bytes: header.non_pool.0,
            held_bytes: held(scene, &device.name).0,
        }
    }
}
