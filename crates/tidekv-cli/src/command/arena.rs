//! `kvctl arena`: arenas of shared blocks, as anybody may look at them without attaching.

use anyhow::{Context, bail};
use serde::Serialize;
use tidekv_shm::RuntimeDir;
use tidekv_shm::arena::{Arena, ArenaError, ArenaName, Report};

use crate::console::{Colour, Console};
use crate::exit::Outcome;
use crate::request::ArenaAction;

pub(super) fn run(dir: &RuntimeDir, action: &ArenaAction, console: &mut Console) -> anyhow::Result<Outcome> {
    match action {
        ArenaAction::List { json } => list(dir, *json, console),
        ArenaAction::Check { name, json } => check(dir, name, *json, console),
        ArenaAction::Delete { name, force } => delete(dir, name, *force, console),
    }
}

/// An arena in JSON.
#[derive(Serialize)]
struct Row<'a> {
    arena: &'a str,
    id: &'a str,
    segments: u32,
    segment_bytes: u64,
    limit_bytes: u64,
    held_bytes: u64,
    unused_bytes: u64,
    damaged_bytes: u64,
    live_blocks: u64,
    shared_blocks: u64,
    members: Vec<Member>,
    problems: &'a [String],
}

#[derive(Serialize)]
struct Member {
    member: u32,
    pid: u32,
    alive: bool,
    caches: u32,
    blocks: u64,
    held_bytes: u64,
}

impl<'a> Row<'a> {
    fn new(name: &'a ArenaName, report: &'a Report) -> Self {
        let members = report.members.iter().map(|one| Member {
            member: one.member,
            pid: one.pid,
            alive: one.alive,
            caches: one.caches,
            blocks: one.blocks,
            held_bytes: one.held.0,
        });
        Self {
            arena: name.as_str(),
            id: &report.id,
            segments: report.segments,
            segment_bytes: report.segment_bytes.0,
            limit_bytes: report.limit.0,
            held_bytes: report.held.0,
            unused_bytes: report.unused.0,
            damaged_bytes: report.damaged.0,
            live_blocks: report.live,
            shared_blocks: report.shared,
            members: members.collect(),
            problems: &report.problems,
        }
    }
}

fn list(dir: &RuntimeDir, json: bool, console: &mut Console) -> anyhow::Result<Outcome> {
    let mut arenas = Vec::new();
    let mut failures = 0;
    for name in Arena::list(dir)? {
        match Arena::inspect(dir, &name) {
            Ok(report) => arenas.push((name, report)),
            // Deleted since the folder was read.
            Err(ArenaError::NotFound { .. }) => {}
            Err(error) => {
                console.note(format_args!("error: {:#}", anyhow::Error::new(error)));
                failures += 1;
            }
        }
    }
    if json {
        let rows: Vec<Row<'_>> = arenas.iter().map(|(name, report)| Row::new(name, report)).collect();
        console.line(serde_json::to_string_pretty(&rows)?)?;
    } else {
        let header = format!(
            "{:<24} {:>10} {:>10} {:>10} {:>10} {:>9}  Users",
            "Arena", "Size", "Limit", "Held", "Damaged", "Blocks"
        );
        console.line(console.paint(&header, Colour::BoldCyan))?;
        for (name, report) in &arenas {
            let size = tidekv_core::units::Bytes(u64::from(report.segments) * report.segment_bytes.0);
            let sizes = [size, report.limit, report.held, report.damaged]
                .map(|bytes| format!("{:>10}", bytes.to_string()))
                .join(" ");
            let blocks = report.live + report.shared;
            console.line(format_args!("{name:<24} {sizes} {blocks:>9}  {}", users(report)))?;
        }
    }
    if failures > 0 {
        bail!("{failures} of them could not be looked at");
    }
    Ok(Outcome::Done)
}

/// Process numbers; those of the dead are marked.
fn users(report: &Report) -> String {
    let user = |one: &tidekv_shm::arena::MemberState| format!("{}{}", one.pid, if one.alive { "" } else { " (gone)" });
    match report.members.is_empty() {
        true => "-".to_owned(),
        false => report.members.iter().map(user).collect::<Vec<_>>().join(", "),
    }
}

fn check(dir: &RuntimeDir, name: &ArenaName, json: bool, console: &mut Console) -> anyhow::Result<Outcome> {
    let report = match Arena::inspect(dir, name) {
        Ok(report) => report,
        Err(ArenaError::NotFound { .. }) => return Ok(unknown(name, console)),
        Err(error) => return Err(error).context("the arena cannot be checked"),
    };
    let sound = report.problems.is_empty();
    if json {
        console.line(serde_json::to_string_pretty(&Row::new(name, &report))?)?;
    } else {
        let Report { segments, spans, live, shared, held, .. } = report;
        let contents =
            format!("{segments} segments, {spans} spans, {live} live and {shared} shared blocks, {held} held");
        let (verdict, colour) = if sound { ("sound", Colour::Green) } else { ("NOT SOUND", Colour::Red) };
        console.line(console.paint(&format!("{name} is {verdict}: {contents}"), colour))?;
        for one in report.members.iter().filter(|one| !one.alive) {
            let (pid, blocks, held) = (one.pid, one.blocks, one.held);
            console
                .line(format_args!("pid {pid} is gone; {blocks} blocks ({held}) come back when somebody needs them"))?;
        }
        if report.damaged.0 > 0 {
            let damaged = report.damaged;
            console.line(format_args!("{damaged} are set aside: a word of theirs was damaged; the rest works on"))?;
        }
        for problem in &report.problems {
            console.line(problem)?;
        }
    }
    Ok(if sound { Outcome::Done } else { Outcome::Negative })
}

fn delete(dir: &RuntimeDir, name: &ArenaName, force: bool, console: &mut Console) -> anyhow::Result<Outcome> {
    if !Arena::list(dir)?.contains(name) {
        return Ok(unknown(name, console));
    }
    if force {
        Arena::unlink(dir, name)?;
    } else if !Arena::unlink_if_unused(dir, name)? {
        let users = Arena::inspect(dir, name).map_or_else(|_| "?".to_owned(), |report| users(&report));
        bail!("{name} is in use (pid {users}): --force deletes it; those who use it keep its memory until they end");
    }
    console.line(console.paint(&format!("Deleted arena '{name}'."), Colour::Green))?;
    Ok(Outcome::Done)
}

fn unknown(name: &ArenaName, console: &mut Console) -> Outcome {
    console.note(format_args!("There is no arena '{name}'."));
    Outcome::Negative
}
