//! `kvtop`: the real program in a real terminal, in pipes, and what it costs.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use tidekv_core::units::Bytes;

use crate::common::{GIB, Pool, Ran, Victim, World, patience};
use crate::tmux::Terminal;

/// `kvtop` itself, on this folder.
fn kvtop(world: &World, args: &[&str]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvtop"));
    let output = command.args(args).env("KVCACHED_RUNTIME_DIR", world.path("")).env_remove("NO_COLOR").output();
    Ran::new(&output.unwrap())
}

/// Two pools with something to see.
fn two_pools(world: &World) -> [Pool; 2] {
    let pools = [world.pool("alpha", Bytes::gib(4)), world.pool("beta", Bytes::gib(2))];
    world.device(Bytes::gib(16), Bytes::gib(12));
    pools[0].uses(Bytes::gib(1), Bytes::mib(512));
    pools[1].uses(Bytes::mib(1800), Bytes::mib(100));
    pools
}

/// Starts a program in the terminal so that its process is known, and waits for its screen.
fn start(world: &World, terminal: &Terminal, program: &str) -> u32 {
    let file = world.path("pid");
    terminal.line(&format!("sh -c 'echo $$ > {}; exec {program}'", file.display()));
    terminal.wait_for("kvtop's screen", |screen| screen.contains("Press 'q' to quit"));
    fs::read_to_string(file).unwrap().trim().parse().unwrap()
}

const ORDINARY: &str = "alternate=0 cursor=1 mouse=0";
const TAKEN: &str = "alternate=1 cursor=0 mouse=0";

/// Everything as before, with the prompt back.
#[track_caller]
fn assert_restored(terminal: &Terminal, before: &str) {
    terminal.wait_for_prompt();
    assert_eq!(terminal.modes(), ORDINARY);
    assert_eq!(terminal.line_modes(), before);
}

#[test]
fn keys_and_pools_that_come_and_go() {
    let world = World::new();
    let pools = two_pools(&world);
    let terminal = Terminal::open(&world, 80, 24);
    let before = terminal.line_modes();
    start(&world, &terminal, "kvtop --refresh 0.1");
    assert_eq!(terminal.modes(), TAKEN);
    let screen = terminal.wait_for("both pools", |screen| screen.contains("alpha") && screen.contains("beta"));
    let row = |screen: &str, name: &str| {
        screen.lines().find(|line| line.get(1..).is_some_and(|l| l.starts_with(name))).map(str::to_owned)
    };
    assert!(row(&screen, "alpha").unwrap().contains(" 1.0G/4.0G "), "{screen}");
    assert!(row(&screen, "beta").unwrap().contains(" 87%!"), "{screen}");
    assert!(screen.lines().any(|line| line.starts_with("host ") && line.contains(" of 12.0G")), "{screen}");

    // Order, its reverse, filter.
    terminal.keys(&["s"]);
    terminal.wait_for("the order", |screen| screen.contains("sort: used"));
    terminal.keys(&["r"]);
    terminal.wait_for("the reverse", |screen| screen.contains("sort: used reversed"));
    terminal.keys(&["/", "b", "e", "t"]);
    terminal.wait_for("the filter", |screen| screen.contains("filter: bet_") && screen.contains("1 of 2 pools"));
    terminal.keys(&["Escape"]);
    terminal.wait_for("all pools", |screen| screen.contains("  2 pools"));

    // Pause: the picture stands still while a pool changes, and is right afterwards.
    terminal.keys(&["p"]);
    terminal.wait_for("the pause", |screen| screen.contains("PAUSED"));
    pools[0].uses(Bytes::gib(3), Bytes::ZERO);
    terminal.keys(&["r"]);
    let screen = terminal.wait_for("the order", |screen| !screen.contains("reversed"));
    assert!(row(&screen, "alpha").unwrap().contains(" 1.0G/4.0G "), "{screen}");
    terminal.keys(&["p"]);
    terminal.wait_for("the change", |screen| row(screen, "alpha").is_some_and(|row| row.contains(" 3.0G/4.0G ")));

    // Help and details.
    terminal.keys(&["h"]);
    terminal.wait_for("the help", |screen| screen.contains(" Help ") && screen.contains("its fair share"));
    terminal.keys(&["h", "Home", "Enter"]);
    let details = terminal.wait_for("the details", |screen| screen.contains("IPC: alpha"));
    assert!(details.contains("Prealloc: 0.00 B | Used: 3.00 GB / 4.00 GB (75.0%) | Free: 1.00 GB"), "{details}");
    terminal.keys(&["Escape"]);

    // A pool comes, maps something, and is killed.
    let victim = Victim::spawn(&world, "gamma");
    terminal.wait_for("the new pool", |screen| row(screen, "gamma").is_some_and(|row| row.contains(" live ")));
    terminal.wait_for("the rate", |screen| {
        pools[1].change(|entry| entry.counters.maps += 1_000_000);
        row(screen, "beta").is_some_and(|row| row.contains("M/0 "))
    });
    victim.kill();
    let word = |screen: &str| row(screen, "gamma").and_then(|row| row.split_whitespace().nth(1).map(str::to_owned));
    terminal.wait_for("its death", |screen| word(screen).is_some_and(|word| word == "dead" || word == "returning"));
    assert_eq!(world.kvctl(&["gc"]).code, 0);
    terminal.wait_for("its end", |screen| word(screen).is_some_and(|word| word == "gone"));
    terminal.wait_for("its removal", |screen| word(screen).is_none());

    terminal.keys(&["q"]);
    terminal.wait_for_prompt();
    assert_eq!(terminal.status_of_last(), "0");
    assert_restored(&terminal, &before);
}

#[test]
fn another_size_is_used_at_once() {
    let world = World::new();
    let _pools = two_pools(&world);
    let terminal = Terminal::open(&world, 80, 24);
    start(&world, &terminal, "kvtop --refresh 3600");
    let has_title =
        |screen: &str, title: &str| screen.lines().any(|line| line.starts_with(" Name") && line.contains(title));
    assert!(!has_title(&terminal.screen(), "Demand"));
    terminal.resize(200, 50);
    let screen = terminal.wait_for("the columns", |screen| has_title(screen, "Demand") && has_title(screen, "Device"));
    assert!(screen.lines().nth(49).is_some_and(|line| line.starts_with("Press 'q' to quit")), "{screen}");
    terminal.resize(20, 5);
    terminal
        .wait_for("a small screen", |screen| screen.lines().nth(4).is_some_and(|line| line.starts_with("Press 'q'")));
    terminal.resize(80, 24);
    terminal.wait_for("the old size", |screen| has_title(screen, "Trend"));
    terminal.keys(&["C-c"]);
    terminal.wait_for_prompt();
    assert_eq!(terminal.status_of_last(), "0");
}

#[test]
fn signals_put_the_terminal_back_and_take_their_course() {
    for (signal, status) in [("TERM", "143"), ("HUP", "129"), ("INT", "130")] {
        let world = World::new();
        let terminal = Terminal::open(&world, 80, 24);
        let before = terminal.line_modes();
        let pid = start(&world, &terminal, "kvtop --mouse");
        assert_eq!(terminal.modes(), "alternate=1 cursor=0 mouse=1");
        kill(signal, pid);
        terminal.wait_for_prompt();
        assert_eq!(terminal.status_of_last(), status, "{signal}");
        assert_restored(&terminal, &before);
    }
}

#[test]
fn a_lost_terminal_ends_it() {
    let world = World::new();
    let terminal = Terminal::open(&world, 80, 24);
    let pid = start(&world, &terminal, "kvtop");
    terminal.hang_up();
    let deadline = patience();
    while is_running(pid) {
        assert!(Instant::now() < deadline, "{pid} is still there");
        thread::yield_now();
    }
}

#[test]
fn ctrl_z_stops_it_and_fg_brings_it_back() {
    let world = World::new();
    let _pools = two_pools(&world);
    let terminal = Terminal::open(&world, 80, 24);
    let before = terminal.line_modes();
    // As the shell's own job: the one who reads Ctrl-Z stops its whole process group.
    terminal.line("kvtop --refresh 0.1");
    terminal.wait_for("kvtop's screen", |screen| screen.contains("Press 'q' to quit"));
    for _ in 0..2 {
        terminal.keys(&["C-z"]);
        assert_restored(&terminal, &before);
        terminal.line("fg");
        terminal.wait_for("kvtop again", |screen| screen.contains("alpha") && screen.contains("Press 'q' to quit"));
        assert_eq!(terminal.modes(), TAKEN);
    }
    terminal.keys(&["q"]);
    assert_restored(&terminal, &before);
}

#[test]
fn a_panic_is_seen_on_the_terminal_as_it_was() {
    let world = World::new();
    let terminal = Terminal::open(&world, 80, 24);
    let before = terminal.line_modes();
    let program = std::env::current_exe().unwrap();
    terminal.line(&format!("{} --exact top::panics_on_its_screen --ignored --nocapture", program.display()));
    terminal.wait_for("the message", |screen| screen.contains("this is a planned panic"));
    assert_restored(&terminal, &before);
}

/// Not a test: what [`a_panic_is_seen_on_the_terminal_as_it_was`] runs.
#[test]
#[ignore = "started by another test in a terminal"]
fn panics_on_its_screen() {
    let _screen = tidekv_cli::screen::Screen::open(true, "run in a terminal").unwrap();
    panic!("this is a planned panic");
}

#[test]
fn no_colour_where_it_is_not_wanted() {
    let is_colour = |code: &str| {
        code.split(';').any(|part| matches!(part.parse(), Ok(30..=37 | 38 | 40..=47 | 48 | 90..=97 | 100..=107)))
    };
    let colours = |screen: &str| {
        let codes =
            screen.split("\x1b[").skip(1).filter_map(|rest| rest.split_once('m').map(|(code, _)| code.to_owned()));
        codes.filter(|code| is_colour(code)).collect::<Vec<_>>()
    };
    let world = World::new();
    let _pools = two_pools(&world);
    let terminal = Terminal::open(&world, 80, 24);
    start(&world, &terminal, "kvtop");
    assert!(!colours(&terminal.coloured_screen()).is_empty());
    terminal.keys(&["q"]);
    terminal.wait_for_prompt();
    // Set at all, even to nothing.
    for value in ["", "1"] {
        start(&world, &terminal, &format!("env NO_COLOR={value} kvtop"));
        terminal.wait_for("the pools", |screen| screen.contains("alpha"));
        assert_eq!(colours(&terminal.coloured_screen()), Vec::<String>::new());
        terminal.keys(&["q"]);
        terminal.wait_for_prompt();
    }
}

#[test]
fn a_named_pool_is_waited_for() {
    let world = World::new();
    let terminal = Terminal::open(&world, 80, 24);
    start(&world, &terminal, "kvtop VLLM --refresh 0.1");
    terminal.wait_for("the wait", |screen| screen.contains("Waiting for VLLM: not there yet."));
    let _other = world.pool("other", Bytes::gib(1));
    let _pool = world.pool("VLLM", Bytes::gib(1));
    let screen = terminal.wait_for("the pool", |screen| screen.contains(">VLLM "));
    assert!(!screen.lines().any(|line| line.starts_with(" other")), "{screen}");
    terminal.keys(&["q"]);
    terminal.wait_for_prompt();
}

#[test]
fn without_pools_it_says_so_and_leaves_after_count_looks() {
    let world = World::new();
    let terminal = Terminal::open(&world, 80, 24);
    start(&world, &terminal, "kvtop --refresh 3 --count 1");
    terminal.wait_for_prompt();
    assert_eq!(terminal.status_of_last(), "0");
    start(&world, &terminal, "kvctl kvtop");
    terminal.wait_for("the message", |screen| screen.contains("No active KVCached segments found."));
    terminal.keys(&["q"]);
    terminal.wait_for_prompt();
}

#[test]
fn names_of_foreign_files_do_nothing_to_the_terminal() {
    let world = World::new();
    world.kvcached_segment("evil\x1b[2J\x1b]0;title\x07\nname", [1 << 30, 0, 0]);
    for ran in [kvtop(&world, &["--once"]), world.kvctl(&["list"]), world.kvctl(&["watch", "--count", "1"])] {
        let (code, text) = ran.quiet();
        assert!(code == 0 && text.contains("evil\\u001b[2J\\u001b]0;title\\u0007\\u000aname"), "{text}");
        assert!(text.chars().all(|c| !c.is_control() || c == '\n'), "{text:?}");
    }
    let unknown = world.kvctl(&["limit", "evil\x1b[2J", "1G"]);
    assert!(unknown.code == 1 && !unknown.stderr.contains('\x1b'), "{unknown:?}");
    let json = kvtop(&world, &["--json", "--count", "1"]);
    let look: Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(look["pools"][0]["ipc"], "evil\x1b[2J\x1b]0;title\x07\nname", "data stays what it is");
    let terminal = Terminal::open(&world, 80, 24);
    start(&world, &terminal, "kvtop");
    terminal.wait_for("the name", |screen| screen.contains(">evil\\u0"));
    terminal.keys(&["q"]);
    terminal.wait_for_prompt();
}

#[test]
fn without_a_terminal_it_says_what_to_do() {
    let world = World::new();
    for ran in [kvtop(&world, &[]), world.kvctl(&["kvtop"])] {
        let error = ran.error();
        assert!(error.contains("no terminal") && error.contains("--once") && error.contains("--json"), "{error}");
    }
    for args in [&["--count", "0"][..], &["--refresh", "0"], &["--sort", "hedl"], &["--once", "--json"], &["--clor"]] {
        let ran = kvtop(&world, args);
        assert!(ran.code == 2 && ran.stdout.is_empty() && !ran.stderr.is_empty(), "{args:?}: {ran:?}");
    }
}

#[test]
fn help_and_version() {
    let world = World::new();
    let help = kvtop(&world, &["--help"]);
    let (code, text) = help.quiet();
    assert!(code == 0 && text.contains("Examples:\n") && text.contains("Usage: kvtop"), "{text}");
    assert!(text.contains("Exit status"), "{text}");
    let version = kvtop(&world, &["--version"]);
    assert_eq!(version.quiet(), (0, concat!("kvtop ", env!("CARGO_PKG_VERSION"), "\n")));
}

#[test]
fn once_is_a_plain_table() {
    let world = World::new();
    assert_eq!(kvtop(&world, &["--once"]).quiet(), (0, "No active KVCached segments found.\n"));
    let _pools = two_pools(&world);
    world.kvcached_segment("theirs", [i64::try_from(8 * GIB).unwrap(), 5, 6]);
    let ran = kvtop(&world, &["--once", "--sort", "used"]);
    let (code, text) = ran.quiet();
    assert!(code == 0 && !text.contains('\x1b'), "{text}");
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("Device") && lines[0].ends_with("Budget"), "{text}");
    let host: Vec<&str> = lines[1].split_whitespace().collect();
    assert_eq!(host[..5], ["host", "16.00", "GB", "3.36", "GB"], "{text}");
    let names: Vec<&str> = lines[4..].iter().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, ["beta", "alpha", "theirs"]);
    assert_eq!(world.kvctl(&["kvtop", "--once", "--sort", "used"]).stdout, text, "both programs are one");

    let filtered = kvtop(&world, &["--once", "--filter", "ALP"]);
    assert!(filtered.stdout.contains("alpha") && !filtered.stdout.contains("beta"), "{filtered:?}");
    let named = kvtop(&world, &["--once", "beta", "bta"]);
    assert!(named.code == 1 && named.stdout.contains("beta") && !named.stdout.contains("alpha"), "{named:?}");
    assert!(named.stderr.contains("IPC 'bta' not found. Did you mean 'beta'?"), "{named:?}");
    let unknown = kvtop(&world, &["--once", "bta"]);
    assert_eq!((unknown.code, unknown.stdout.as_str()), (1, ""));
}

#[test]
fn json_is_an_object_per_look() {
    let world = World::new();
    let pools = two_pools(&world);
    world.kvcached_segment("theirs", [i64::try_from(8 * GIB).unwrap(), 5, 6]);
    let mut child = Command::new(env!("CARGO_BIN_EXE_kvtop"))
        .args(["--json", "--refresh", "0.2", "--count", "3"])
        .env("KVCACHED_RUNTIME_DIR", world.path(""))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut look = || serde_json::from_str::<Value>(&lines.next().unwrap().unwrap()).unwrap();
    let first = look();
    // The first line is here while the program still runs: each is flushed.
    pools[0].change(|entry| entry.counters.maps += 100);
    pools[0].uses(Bytes::gib(2), Bytes::ZERO);
    let later = [look(), look()];
    assert!(lines.next().is_none());
    assert!(child.wait().unwrap().success());

    let device = &first["devices"][0];
    assert_eq!((device["device"].as_str(), device["total_bytes"].as_u64()), (Some("host"), Some(16 * GIB)));
    let parts = ["needed_bytes", "cached_bytes", "idle_bytes"].map(|part| device[part].as_u64().unwrap());
    assert_eq!(device["held_bytes"], parts.iter().sum::<u64>());
    let left = device["budget_bytes"].as_u64().unwrap().saturating_sub(device["held_bytes"].as_u64().unwrap());
    assert_eq!(device["free_bytes"], left.min(device["device_free_bytes"].as_u64().unwrap()));
    assert!(first["time"].as_str().unwrap().ends_with('Z'));
    let names: Vec<_> = first["pools"].as_array().unwrap().iter().map(|pool| pool["ipc"].as_str().unwrap()).collect();
    assert_eq!(names, ["alpha", "beta", "theirs"]);
    for key in ["used_change_bytes", "held_change_bytes", "maps_per_second", "unmaps_per_second"] {
        assert!(first["pools"][0].get(key).is_some_and(Value::is_null), "{key}: {first}");
    }
    let rates = later.each_ref().map(|look| look["pools"][0]["maps_per_second"].as_f64().unwrap());
    assert!(rates.iter().any(|&rate| rate > 0.0) && rates.iter().all(|&rate| rate <= 100.0 / 0.1), "{rates:?}");
    let change: i64 = later.iter().map(|look| look["pools"][0]["used_change_bytes"].as_i64().unwrap()).sum();
    assert_eq!(change, 1 << 30);
    assert!(later[1]["pools"][2]["maps_per_second"].is_null(), "kvcached's own count nothing");
}

#[test]
fn json_ends_when_its_reader_goes_away() {
    let world = World::new();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvtop"));
    command.args(["--json", "--refresh", "0.05"]).env("KVCACHED_RUNTIME_DIR", world.path(""));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().starts_with('{'));
    drop(lines);
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0), "{output:?}");
}

/// Issue 4: at most 2 % of a core at 10 pools and a look per second is at most 20 ms of processor time per look.
#[test]
fn a_look_at_ten_pools_costs_at_most_20_ms() {
    let world = World::new();
    let pools: Vec<Pool> = (0..10).map(|index| world.pool(&format!("pool-{index}"), Bytes::gib(4))).collect();
    pools[0].uses(Bytes::gib(1), Bytes::gib(1));
    let terminal = Terminal::open(&world, 80, 24);
    terminal.line("kvtop --refresh 0.05 --count 100");
    terminal.wait_for("kvtop's screen", |screen| screen.contains("pool-9"));
    terminal.wait_for_prompt();
    terminal.line("times > times.txt.new && mv times.txt.new ~/times.txt");
    let file = world.path("times.txt");
    terminal.wait_for("the times", |_| file.exists());
    let spent = children_time(&file);
    assert!(spent > Duration::ZERO && spent < Duration::from_millis(20) * 100, "{spent:?} for 100 looks");
}

/// What a shell's `times` says of its children: `0m0.01s 0m0.02s` in the second line.
fn children_time(file: &Path) -> Duration {
    let text = fs::read_to_string(file).unwrap();
    let seconds = |word: &str| {
        let (minutes, seconds) = word.trim_end_matches('s').split_once('m').unwrap();
        minutes.parse::<f64>().unwrap() * 60.0 + seconds.parse::<f64>().unwrap()
    };
    Duration::from_secs_f64(text.lines().nth(1).unwrap().split_whitespace().map(seconds).sum())
}

fn kill(signal: &str, pid: u32) {
    assert!(Command::new("kill").args([&format!("-{signal}"), &pid.to_string()]).status().unwrap().success());
}

/// Whether a process is there and not merely waiting to be collected.
fn is_running(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next()).is_some_and(|state| state != "Z")
}
