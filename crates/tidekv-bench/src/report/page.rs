//! The page around the parts.

use clap::CommandFactory;

use super::html::{Grid, Html};
use super::{Collected, Numbering, environment, reproduce, run_label, samples, serving, summary};
use crate::cli::Cli;
use crate::compare::said_by_all;
use crate::runs::Run;

const STYLE: &str = include_str!("style.css");

/// Commands that stand in the open; repeats with other seeds have one each.
const MAX_COMMANDS: usize = 8;

/// Nothing may be loaded or run, whatever a result holds.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'";

/// The whole file.
pub(super) fn render(title: &str, collected: &Collected) -> String {
    let benchmarks = by_benchmark(&collected.runs);
    let mut numbering = Numbering::default();
    let mut page = Html::fixed("<!DOCTYPE html>\n");
    page.open("html", &[("lang", "en")]).open("head", &[]);
    page.open("meta", &[("charset", "utf-8")]);
    page.open("meta", &[("name", "viewport"), ("content", "width=device-width, initial-scale=1")]);
    page.open("meta", &[("http-equiv", "Content-Security-Policy"), ("content", POLICY)]);
    page.open("meta", &[("name", "color-scheme"), ("content", "light dark")]);
    page.open("meta", &[("name", "generator"), ("content", &format!("kvbench {}", env!("CARGO_PKG_VERSION")))]);
    page.element("title", &[], &Html::text(format!("{title} - kvbench report")));
    page.element("style", &[], &Html::fixed(STYLE)).close("head").open("body", &[]);
    page.element("a", &[("class", "skip"), ("href", "#content")], &Html::text("To the results"));
    page.push(&head(title, collected, &benchmarks));
    page.open("main", &[("id", "content")]);
    page.push(&notices(collected)).push(&overview(&collected.runs));
    for (name, runs) in &benchmarks {
        page.push(&benchmark(name, runs, &mut numbering));
    }
    page.push(&commands(&collected.runs));
    page.open("section", &[]).push(&environment::html(&collected.runs.iter().collect::<Vec<_>>())).close("section");
    page.close("main");
    page.push(&foot()).close("body").close("html");
    page.into_string() + "\n"
}

/// Runs of one benchmark together, in the order in which they first appear.
fn by_benchmark(runs: &[Run]) -> Vec<(&str, Vec<&Run>)> {
    let mut found: Vec<(&str, Vec<&Run>)> = Vec::new();
    for run in runs {
        match found.iter_mut().find(|(name, _)| *name == run.name) {
            Some((_, others)) => others.push(run),
            None => found.push((&run.name, vec![run])),
        }
    }
    found
}

fn head(title: &str, collected: &Collected, benchmarks: &[(&str, Vec<&Run>)]) -> Html {
    let mut dates: Vec<&str> = collected.runs.iter().map(Run::date).filter(|date| !date.is_empty()).collect();
    dates.sort_unstable();
    let days: Vec<&str> =
        [dates.first(), dates.last()].into_iter().flatten().map(|date| date.get(..10).unwrap_or(date)).collect();
    let when = match days[..] {
        [first, last] if first == last => format!(", measured on {first}"),
        [first, last] => format!(", measured from {first} to {last}"),
        _ => String::new(),
    };
    let count = |number: usize, word: &str| format!("{number} {word}{}", if number == 1 { "" } else { "s" });
    let (runs, kinds) = (count(collected.runs.len(), "run"), count(benchmarks.len(), "benchmark"));
    let mut out = Html::new();
    out.open("header", &[]).element("p", &[("class", "kicker")], &Html::text("kvbench report"));
    out.element("h1", &[], &Html::text(title));
    out.element("p", &[("class", "lead")], &Html::text(format!("{runs} of {kinds}{when}.")));
    out.open("nav", &[("aria-label", "Contents")]).open("ul", &[]);
    let sections = [("overview".to_owned(), "Overview".to_owned())]
        .into_iter()
        .chain(benchmarks.iter().map(|(name, _)| (anchor(name), (*name).to_owned())))
        .chain([
            ("reproduce".to_owned(), "Reproduce".to_owned()),
            ("environment".to_owned(), "Environment".to_owned()),
        ]);
    for (id, name) in sections {
        out.open("li", &[]).element("a", &[("href", &format!("#{id}"))], &Html::text(name)).close("li");
    }
    out.close("ul").close("nav").close("header");
    out
}

/// An id: nothing but letters, digits and dashes, whatever the name.
fn anchor(name: &str) -> String {
    let plain = |character: char| if character.is_ascii_alphanumeric() { character } else { '-' };
    format!("benchmark-{}", name.chars().map(plain).collect::<String>())
}

/// What somebody should know before reading on.
fn notices(collected: &Collected) -> Html {
    let own = said_by_all(&collected.runs).into_iter().map(|(sentence, run, count)| match count {
        1 => format!("{}: {sentence}", run_label(run)),
        count => format!("{count} of {} runs: {sentence}", collected.runs.len()),
    });
    let debug = collected.runs.iter().filter(|run| run.host.build == "debug").count();
    let debug = (debug > 0).then(|| format!("{debug} of the runs are of a debug build, whose times mean little."));
    let left_out = collected.left_out.iter().map(|(path, reason)| format!("{} is left out: {reason}.", path.display()));
    let all: Vec<String> = debug.into_iter().chain(own).chain(left_out).collect();
    let mut out = Html::new();
    if all.is_empty() {
        return out;
    }
    out.open("section", &[("class", "notices"), ("aria-label", "Warnings")]).element(
        "h2",
        &[],
        &Html::text("Before you read on"),
    );
    out.open("ul", &[]);
    for notice in &all {
        out.element("li", &[], &Html::text(notice));
    }
    out.close("ul").close("section");
    out
}

fn overview(runs: &[Run]) -> Html {
    let mut grid = Grid::new("All runs", &["run", "benchmark", "by", "measured", "device", "build"]);
    for run in runs {
        let device = run.host.gpu.clone().unwrap_or_else(|| run.host.cpu.clone());
        let build = [run.host.commit.as_str(), run.host.build.as_str()]
            .iter()
            .filter(|part| !part.is_empty())
            .copied()
            .collect::<Vec<_>>();
        let or_dash = |text: String| if text.is_empty() { "-".to_owned() } else { text };
        grid.row(vec![
            run_label(run),
            run.name.clone(),
            run.tool.to_string(),
            or_dash(run.date().replace('T', " ").trim_end_matches('Z').to_owned()),
            or_dash(device),
            or_dash(build.join(", ")),
        ]);
    }
    let mut out = Html::new();
    out.open("section", &[])
        .element("h2", &[("id", "overview")], &Html::text("Overview"))
        .push(&grid.fitting("All runs"))
        .close("section");
    out
}

fn benchmark(name: &str, runs: &[&Run], numbering: &mut Numbering) -> Html {
    let mut out = Html::new();
    out.open("section", &[]).element("h2", &[("id", &anchor(name))], &Html::text(name));
    if let Some(about) = Cli::command().find_subcommand(name).and_then(clap::Command::get_about) {
        out.element("p", &[("class", "lead")], &Html::text(format!("{about}.")));
    }
    out.push(&serving::html(runs, numbering));
    // Runs with different arguments have different series: each is shown by itself.
    let are_repeats = runs.iter().all(|run| run.samples.keys().eq(runs[0].samples.keys()));
    if are_repeats {
        out.push(&samples::html(runs, numbering));
    } else {
        for run in runs.iter().filter(|run| !run.samples.is_empty()) {
            out.element("h3", &[], &Html::text(run_label(run))).push(&samples::html(&[run], numbering));
        }
    }
    out.push(&summary::html(runs)).close("section");
    out
}

/// One command for each thing that was measured.
fn commands(runs: &[Run]) -> Html {
    let mut found: Vec<(reproduce::Reproduction, Vec<String>)> = Vec::new();
    for run in runs {
        let reproduction = reproduce::of(run);
        match found.iter_mut().find(|(seen, _)| *seen == reproduction) {
            Some((_, labels)) => labels.push(run_label(run)),
            None => found.push((reproduction, vec![run_label(run)])),
        }
    }
    let block = |(reproduction, labels): &(reproduce::Reproduction, Vec<String>)| {
        let first: Vec<&str> = labels.iter().take(4).map(String::as_str).collect();
        let more = if labels.len() > 4 { format!(" and {} more", labels.len() - 4) } else { String::new() };
        let mut out = Html::new();
        out.element("h3", &[], &Html::text(format!("{}{more}", first.join(", "))));
        out.open("pre", &[("tabindex", "0")]).element("code", &[], &Html::text(&reproduction.command)).close("pre");
        if let Some(note) = &reproduction.note {
            out.element("p", &[("class", "note")], &Html::text(note));
        }
        out
    };
    let (shown, folded) = found.split_at(found.len().min(MAX_COMMANDS));
    let mut out = Html::new();
    out.open("section", &[]).element("h2", &[("id", "reproduce")], &Html::text("Reproduce"));
    for one in shown {
        out.push(&block(one));
    }
    if !folded.is_empty() {
        let summary = format!("{} more commands", folded.len());
        out.open("details", &[]).element("summary", &[], &Html::text(summary));
        for one in folded {
            out.push(&block(one));
        }
        out.close("details");
    }
    out.close("section");
    out
}

fn foot() -> Html {
    let text = format!(
        "Made by kvbench {} ({}). Times of requests count from the moment at which they should have been sent, where the \
         result has it. Bars span the repeats; curves show all measurements that the file kept.",
        env!("CARGO_PKG_VERSION"),
        env!("TIDEKV_COMMIT")
    );
    let mut out = Html::new();
    out.element("footer", &[], &Html::text(text));
    out
}
