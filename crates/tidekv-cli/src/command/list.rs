//! `kvctl list`: kvcached's table and JSON, and what we know besides.
//!
//! ```text
//!   IPC                             Limit         Used      %   State      PID       Held      Idle     ...
//!   kvcached_vLLM_4711           20.00 GB      4.00 GB  20.0 %  live       4711      5.00 GB   1.00 GB  ...
//!   `---------------- as kvcached prints it ---------------'  `------ ours, as far as the terminal is wide
//! ```

use anyhow::Context;
use serde::Serialize;
use tidekv_core::units::Bytes;
use tidekv_shm::{RuntimeDir, UNLIMITED};

use crate::console::{Colour, Console};
use crate::exit::Outcome;
use crate::scene::{Place, Pool, Scene, State};
use crate::text::{kvcached_percent, kvcached_size};

pub(super) fn run(dir: &RuntimeDir, names: &[String], json: bool, console: &mut Console) -> anyhow::Result<Outcome> {
    let scene = Scene::look(dir)?;
    let shown: Vec<&Pool> = if names.is_empty() {
        scene.pools.iter().collect()
    } else {
        names.iter().flat_map(|name| scene.named(name)).collect()
    };
    if json {
        let rows: Vec<Row<'_>> = shown.iter().map(|pool| Row::new(pool)).collect();
        console.line(serde_json::to_string_pretty(&rows).context("cannot write JSON")?)?;
    } else if shown.is_empty() && names.is_empty() {
        console.line("No active KVCached segments found.")?;
    } else if !shown.is_empty() {
        table(&shown, console)?;
    }
    scene.say_unreadable(console);

    let mut outcome = Outcome::Done;
    for name in names.iter().filter(|name| scene.named(name).is_empty()) {
        outcome = scene.say_unknown(name, console);
    }
    Ok(outcome)
}

/// A column of ours: its title and what stands in it. All but the last are padded to their width.
struct Column {
    title: &'static str,
    width: usize,
    text: fn(&Pool) -> String,
}

/// The most telling first: they go from the right when the terminal is narrow.
const COLUMNS: [Column; 7] = [
    Column { title: "State", width: 9, text: |pool| pool.state().word().to_owned() },
    Column { title: "PID", width: 8, text: |pool| place(pool, |place| place.entry.pid.to_string()) },
    Column { title: "Held", width: 11, text: |pool| size(pool, |place| place.entry.reserved) },
    Column { title: "Idle", width: 11, text: |pool| size(pool, |place| place.entry.idle) },
    Column { title: "Demand", width: 11, text: |pool| size(pool, |place| place.entry.demand) },
    Column { title: "Share", width: 11, text: |pool| size(pool, |place| place.fair) },
    Column { title: "Device", width: 4, text: |pool| place(pool, |place| place.device.to_string()) },
];

fn place(pool: &Pool, text: impl Fn(&Place) -> String) -> String {
    pool.place.as_ref().map_or_else(|| "-".to_owned(), text)
}

fn size(pool: &Pool, bytes: impl Fn(&Place) -> Bytes) -> String {
    place(pool, |place| kvcached_size(i64::try_from(bytes(place).0).unwrap_or(i64::MAX)))
}

fn table(pools: &[&Pool], console: &mut Console) -> anyhow::Result<()> {
    let fits = fitting_columns(pools, console.width());
    let ours = |cell: &dyn Fn(&Column) -> String| -> String {
        COLUMNS[..fits].iter().map(|column| format!("  {:<width$}", cell(column), width = column.width)).collect()
    };
    let header = format!("{:<24} {:>12} {:>12} {:>6}", "IPC", "Limit", "Used", "%");
    let header = format!("{header} {}", ours(&|column| column.title.to_owned()));
    console.line(console.paint(header.trim_end(), Colour::BoldCyan))?;
    for pool in pools {
        let (limit, used) = (pool.limit(), pool.used());
        let theirs = theirs(pool);
        let line = format!("{theirs}{}", ours(&|column| (column.text)(pool)));
        console.line(console.paint(line.trim_end(), colour(used, limit)))?;
    }
    Ok(())
}

/// A row as kvcached prints it.
fn theirs(pool: &Pool) -> String {
    let (limit, used) = (pool.limit(), pool.used());
    let percent = kvcached_percent(used, limit);
    format!("{:<24} {:>12} {:>12} {percent:>5} %", pool.name, kvcached_size(limit), kvcached_size(used))
}

/// How many of our columns the terminal has room for. Without a terminal all of them.
fn fitting_columns(pools: &[&Pool], width: Option<usize>) -> usize {
    let Some(width) = width else { return COLUMNS.len() };
    let widest =
        |text: &dyn Fn(&Pool) -> String| pools.iter().map(|pool| text(pool).chars().count()).max().unwrap_or(0);
    let mut used = widest(&|pool| theirs(pool));
    COLUMNS
        .iter()
        .take_while(|column| {
            used += 2 + column.width.max(widest(&|pool| (column.text)(pool)));
            used <= width
        })
        .count()
}

/// Green below half of the limit, red from 80 % on.
fn colour(used: i64, limit: i64) -> Colour {
    let (used, limit) = (i128::from(used), i128::from(limit));
    match () {
        () if limit == 0 || used * 100 < limit * 50 => Colour::Green,
        () if used * 100 < limit * 80 => Colour::Yellow,
        () => Colour::Red,
    }
}

/// A pool in JSON: kvcached's three keys first. What only a ledger says is null for pools of kvcached's own.
#[derive(Serialize)]
struct Row<'a> {
    ipc: &'a str,
    limit_bytes: i64,
    used_bytes: i64,
    prealloc_bytes: i64,
    state: State,
    device: Option<&'a str>,
    group: Option<u32>,
    pid: Option<u32>,
    owner_alive: Option<bool>,
    reserved_bytes: Option<u64>,
    in_use_bytes: Option<u64>,
    idle_bytes: Option<u64>,
    demand_bytes: Option<u64>,
    reclaim_bytes: Option<u64>,
    page_bytes: Option<u64>,
    weight: Option<u32>,
    priority: Option<i32>,
    floor_bytes: Option<u64>,
    /// Null as well where there is no ceiling.
    ceiling_bytes: Option<u64>,
    fair_bytes: Option<u64>,
    owed_bytes: Option<u64>,
    limit_revision: Option<u64>,
    applied_revision: Option<u64>,
    limit_applied: Option<bool>,
    counters: Option<CountersRow>,
}

#[derive(Serialize)]
struct CountersRow {
    maps: u64,
    unmaps: u64,
    waits: u64,
    reclaims: u64,
    failures: u64,
}

impl<'a> Row<'a> {
    fn new(pool: &'a Pool) -> Self {
        let place = pool.place.as_ref();
        let entry = place.map(|place| &place.entry);
        Self {
            ipc: &pool.name,
            limit_bytes: pool.limit(),
            used_bytes: pool.used(),
            prealloc_bytes: pool.prealloc(),
            state: pool.state(),
            device: place.map(|place| place.device.as_str()),
            group: entry.map(|entry| entry.group.0),
            pid: entry.map(|entry| entry.pid),
            owner_alive: place.map(|place| place.alive),
            reserved_bytes: entry.map(|entry| entry.reserved.0),
            in_use_bytes: entry.map(|entry| entry.in_use.0),
            idle_bytes: entry.map(|entry| entry.idle.0),
            demand_bytes: entry.map(|entry| entry.demand.0),
            reclaim_bytes: entry.map(|entry| entry.reclaim.0),
            page_bytes: entry.map(|entry| entry.page_bytes.0),
            weight: entry.map(|entry| entry.weight),
            priority: entry.map(|entry| entry.priority),
            floor_bytes: entry.map(|entry| entry.floor.0),
            ceiling_bytes: entry.filter(|entry| entry.ceiling != UNLIMITED).map(|entry| entry.ceiling.0),
            fair_bytes: place.map(|place| place.fair.0),
            owed_bytes: place.map(|place| place.owed.0),
            limit_revision: entry.map(|entry| entry.limit_revision),
            applied_revision: entry.map(|entry| entry.applied_revision),
            limit_applied: entry.map(|entry| entry.applied_revision >= entry.limit_revision),
            counters: entry.map(|entry| CountersRow {
                maps: entry.counters.maps,
                unmaps: entry.counters.unmaps,
                waits: entry.counters.waits,
                reclaims: entry.counters.reclaims,
                failures: entry.counters.failures,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::io::{self, Write};
    use std::rc::Rc;

    use tidekv_shm::SegmentView;

    use super::*;

    #[derive(Clone, Default)]
    struct Buffer(Rc<RefCell<Vec<u8>>>);

    impl Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.borrow_mut().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn printed(pools: &[Pool], colour: bool, width: Option<usize>) -> String {
        let out = Buffer::default();
        let mut console = Console::to(out.clone(), io::sink(), colour, width);
        table(&pools.iter().collect::<Vec<_>>(), &mut console).unwrap();
        String::from_utf8(out.0.take()).unwrap()
    }

    fn theirs(limit: i64, used: i64) -> Pool {
        Pool { name: "theirs".to_owned(), segment: Some(SegmentView { limit, used, prealloc: 0 }), place: None }
    }

    #[test]
    fn colours_change_at_50_and_80_percent() {
        for (used, code) in [(0, "32"), (499, "32"), (500, "33"), (799, "33"), (800, "31"), (2000, "31")] {
            let text = printed(&[theirs(1000, used)], true, None);
            let row = text.lines().nth(1).unwrap();
            assert!(row.starts_with(&format!("\x1b[{code}mtheirs ")) && row.ends_with("\x1b[0m"), "{used}: {row:?}");
        }
        assert!(printed(&[theirs(1, 0)], true, None).starts_with("\x1b[1;36mIPC "));
    }

    #[test]
    fn our_columns_go_from_the_right_when_the_terminal_is_narrow() {
        let header = |width| printed(&[theirs(1 << 30, 0)], false, width).lines().next().unwrap().to_owned();
        let kvcached = "IPC                             Limit         Used      %";
        assert_eq!(header(Some(60)), kvcached);
        assert_eq!(header(Some(70)), format!("{kvcached}   State"));
        assert_eq!(header(Some(80)), format!("{kvcached}   State      PID"));
        assert!(header(None).ends_with("Device") && header(Some(200)) == header(None));
        for width in [60, 70, 80, 100, 120, 200] {
            let text = printed(&[theirs(1 << 30, 0)], false, Some(width));
            assert!(text.lines().all(|line| line.len() <= width), "{width}:\n{text}");
        }
    }
}
