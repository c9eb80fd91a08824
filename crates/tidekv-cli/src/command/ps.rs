//! `kvctl ps`: what `kvctl up` runs, as its supervisors last said.

use serde::Serialize;
use tidekv_shm::RuntimeDir;

use crate::console::{Colour, Console};
use crate::exit::Outcome;
use crate::launch::house::{InstanceState, State, houses};
use crate::scene::Scene;

#[derive(Serialize)]
struct Row {
    id: String,
    #[serde(flatten)]
    state: State,
}

pub(super) fn run(dir: &RuntimeDir, json: bool, console: &mut Console) -> anyhow::Result<Outcome> {
    let houses = houses(dir)?;
    let dead = houses.iter().filter(|house| !house.is_alive).count();
    let alive = houses.into_iter().filter(|house| house.is_alive);
    let mut rows: Vec<Row> = alive.filter_map(|house| Some(Row { id: house.id, state: house.state? })).collect();
    let scene = Scene::look(dir)?;
    // What it is called, and not what it was to be called: a pool has another name where that was taken.
    for one in rows.iter_mut().flat_map(|row| &mut row.state.instances) {
        let names: Vec<&str> = one.pools(&scene).iter().map(|pool| pool.name.as_str()).collect();
        one.pool = (!names.is_empty()).then(|| names.join(","));
    }
    if json {
        console.line(serde_json::to_string_pretty(&rows)?)?;
    } else {
        for row in &rows {
            show(&row.state, console)?;
        }
    }
    if dead > 0 {
        console.note(format_args!("{dead} supervisors were killed: `kvctl gc` removes what they left."));
    }
    if rows.is_empty() {
        if !json {
            console.note("Nothing runs: `kvctl up` starts it.");
        }
        return Ok(Outcome::Negative);
    }
    Ok(Outcome::Done)
}

fn show(state: &State, console: &mut Console) -> anyhow::Result<()> {
    let router = state.router.as_deref().unwrap_or("no router");
    let config = state.config.as_ref().map_or_else(|| "no file".to_owned(), |path| path.display().to_string());
    console.line(format_args!("{router}  (pid {}, {config})", state.pid))?;
    let wide = |of: fn(&InstanceState) -> usize, least| state.instances.iter().map(of).max().unwrap_or(0).max(least);
    let (name, engine) = (wide(|one| one.name.len(), 8), wide(|one| one.engine.len(), 6));
    let pool = wide(|one| one.pool.as_ref().map_or(1, String::len), 4);
    let head = format!(
        "  {:name$}  {:10}  {:engine$}  {:>8}  {:>8}  {:pool$}  Address",
        "Instance", "State", "Engine", "PID", "Restarts", "Pool"
    );
    console.line(console.paint(&head, Colour::BoldCyan))?;
    for one in &state.instances {
        let colour = match one.state.as_str() {
            "ready" => Colour::Green,
            "failed" => Colour::Red,
            _ => Colour::Yellow,
        };
        let word = console.paint(&format!("{:10}", one.state), colour);
        let pid = one.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
        let (of, address) = (one.pool.as_deref().unwrap_or("-"), one.address.as_deref().unwrap_or("-"));
        let rest = format!("{:engine$}  {pid:>8}  {:>8}  {of:pool$}  {address}", one.engine, one.restarts);
        console.line(format_args!("  {:name$}  {word}  {rest}", one.name))?;
    }
    Ok(())
}
