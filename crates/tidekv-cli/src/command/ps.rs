//! `kvctl ps`: what `kvctl up` runs, as its supervisors last said.

use serde::Serialize;
use tidekv_shm::RuntimeDir;

use crate::console::{Colour, Console};
use crate::exit::Outcome;
use crate::launch::house::{House, InstanceState, State, houses};

#[derive(Serialize)]
struct Row<'a> {
    id: &'a str,
    #[serde(flatten)]
    state: &'a State,
}

pub(super) fn run(dir: &RuntimeDir, json: bool, console: &mut Console) -> anyhow::Result<Outcome> {
    let houses = houses(dir)?;
    let dead = houses.iter().filter(|house| !house.is_alive).count();
    let alive: Vec<(&House, &State)> =
        houses.iter().filter(|house| house.is_alive).filter_map(|house| Some((house, house.state.as_ref()?))).collect();
    if json {
        let rows: Vec<Row<'_>> = alive.iter().map(|(house, state)| Row { id: &house.id, state }).collect();
        console.line(serde_json::to_string_pretty(&rows)?)?;
    } else {
        for (_, state) in &alive {
            show(state, console)?;
        }
    }
    if dead > 0 {
        console.note(format_args!("{dead} supervisors were killed: `kvctl gc` removes what they left."));
    }
    if alive.is_empty() {
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
    let head = format!(
        "  {:name$}  {:10}  {:engine$}  {:>8}  {:>8}  Address",
        "Instance", "State", "Engine", "PID", "Restarts"
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
        let address = one.address.as_deref().unwrap_or("-");
        let rest = format!("{:engine$}  {pid:>8}  {:>8}  {address}", one.engine, one.restarts);
        console.line(format_args!("  {:name$}  {word}  {rest}", one.name))?;
    }
    Ok(())
}
