//! The command line itself, for every command that the definitions have: help, errors, names that are nearly right,
//! pipes that close, colour. A new command is covered as soon as [`runs`] says how to run it.

use std::io::pipe;
use std::process::{Command, Stdio};

use clap::CommandFactory;
use tidekv_cli::cli::{Cli, is_pool_name};
use tidekv_core::units::Bytes;

use crate::common::{GIB, Pool, World, words};
use crate::tmux::Terminal;

/// A folder with a pool of ours and one of kvcached's.
fn peopled() -> (World, Pool) {
    let world = World::new();
    let pool = world.pool("qwen-chat", Bytes::gib(1));
    pool.uses(Bytes::mib(64), Bytes::mib(16));
    world.device(Bytes::gib(8), Bytes::gib(8));
    world.kvcached_segment("theirs", [i64::try_from(4 * GIB).unwrap(), 0, 0]);
    (world, pool)
}

/// Runs that print something, at least one for every command, and that end by themselves. [`peopled`] has what they need.
fn runs() -> Vec<&'static [&'static str]> {
    let runs: Vec<&[&str]> = vec![
        &["list"],
        &["list", "--json"],
        &["limit", "theirs", "1G"],
        &["limit-percent", "qwen-chat", "50"],
        &["share", "qwen-chat"],
        &["budget"],
        &["budget", "--json"],
        &["delete", "theirs"],
        &["gc"],
        &["trim", "qwen-chat"],
        &["arena", "list"],
        &["arena", "list", "--json"],
        &["kvtop", "--once"],
        &["kvtop", "--json", "--count", "2", "--refresh", "50ms"],
        &["watch", "--count", "2", "-n", "50ms"],
        &["shell", "--help"],
        &["doctor"],
        &["doctor", "--json"],
        &["events"],
        &["events", "--json"],
        &["up", "--check"],
        &["ps", "--help"],
        &["down", "--help"],
        &["logs", "--help"],
        &["completions", "zsh"],
        &["man", "man"],
        &["names"],
    ];
    for command in Cli::command().get_subcommands() {
        assert!(runs.iter().any(|args| args[0] == command.get_name()), "no run of {}", command.get_name());
    }
    runs
}

/// A run in the world's folder, where relative paths lead.
fn command(world: &World, args: &[&str]) -> Command {
    let mut command = world.command(args);
    command.current_dir(world.path("")).stdin(Stdio::null());
    command
}

#[test]
fn help_everywhere_with_examples() {
    let world = World::new();
    let ran = world.kvctl(&["--help"]);
    let (code, help) = ran.quiet();
    assert_eq!(code, 0);
    for command in Cli::command().get_subcommands() {
        let name = command.get_name();
        assert_eq!(help.contains(&format!("\n  {name} ")), !command.is_hide_set(), "{name} in {help}");
        for args in [&[name, "--help"][..], &[name, "-h"], &["help", name]] {
            let own = world.kvctl(args);
            let (code, own) = own.quiet();
            assert_eq!(code, 0, "{args:?}");
            for part in ["Examples:\n", "Exit status", &format!("Usage: kvctl {name}")] {
                assert!(own.contains(part), "{args:?} lacks {part:?}:\n{own}");
            }
        }
    }
    let output = Command::new(env!("CARGO_BIN_EXE_kvtop")).arg("--help").output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && help.contains("Examples:\n") && help.contains("Usage: kvtop"), "{help}");
}

#[test]
fn a_wrong_command_line_is_exit_code_2() {
    let world = World::new();
    for args in [&["lsit"][..], &["limit"], &["limit", "a"], &["list", "--jsn"], &["gc", "a"], &["--dir"]] {
        let ran = world.kvctl(args);
        assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "{args:?}");
        assert!(!ran.stderr.is_empty());
    }
    for command in Cli::command().get_subcommands() {
        let ran = world.kvctl(&[command.get_name(), "--no-such-flag"]);
        assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "{ran:?}");
        assert!(ran.stderr.contains("'--no-such-flag'") && ran.stderr.contains("Usage: kvctl"), "{ran:?}");
    }
}

#[test]
fn nothing_asked_and_nothing_to_read_is_nothing_done() {
    // No arguments are the shell, and the shell of a pipe that is empty has nothing to do.
    assert_eq!(World::new().kvctl(&[]).quiet(), (0, ""));
}

#[test]
fn a_wrong_command_suggests_the_nearest() {
    let world = World::new();
    for command in Cli::command().get_subcommands() {
        let name = command.get_name();
        let last = name.chars().last().unwrap();
        let ran = world.kvctl(&[&format!("{name}{last}")]);
        assert!(ran.code == 2 && ran.stderr.contains(&format!("'{name}'")), "{name}: {ran:?}");
    }
}

#[test]
fn a_wrong_pool_suggests_the_nearest_for_every_command_that_takes_one() {
    let (world, _pool) = peopled();
    let definitions = Cli::command();
    let takers = definitions.get_subcommands().filter(|command| command.get_positionals().any(is_pool_name));
    for command in takers {
        let name = command.get_name();
        let mut args = vec![name, "qwen-caht"];
        args.extend(match name {
            "limit" => &["1G"][..],
            "limit-percent" => &["50"],
            "kvtop" => &["--once"],
            "watch" => &["--count", "1"],
            _ => &[],
        });
        let ran = world.kvctl(&args);
        // A list that stays says so in the list.
        let said = if name == "watch" { &ran.stdout } else { &ran.stderr };
        assert!(said.contains("Did you mean 'qwen-chat'?"), "{args:?}: {ran:?}");
        // A screen that stays waits for a pool to come; whoever asks once gets an answer.
        if !["watch", "events"].contains(&name) {
            assert_eq!(ran.code, 1, "{args:?}: {ran:?}");
        }
    }
}

#[test]
fn a_reader_that_went_away_is_no_error_and_stops_nothing() {
    for args in runs().into_iter().chain([&["--help"][..], &["limit", "qwen-caht", "1G"]]) {
        let (world, _pool) = peopled();
        let heard = command(&world, args).output().unwrap();
        let (world, _pool) = peopled();
        let (reader, writer) = pipe().unwrap();
        drop(reader);
        let unheard = command(&world, args).stdout(writer).output().unwrap();
        assert_eq!(unheard.status.code(), heard.status.code(), "{args:?}: {unheard:?}");
        let said = String::from_utf8(unheard.stderr).unwrap();
        assert!(!said.contains("panicked") && !said.to_lowercase().contains("broken pipe"), "{args:?}: {said}");
        if args[0] == "limit" && args[1] == "theirs" {
            assert_eq!(words(&world.path("theirs"))[0], 1 << 30, "it was done all the same");
        }
    }
}

#[test]
fn pipes_get_no_escape_sequences() {
    for args in runs() {
        let (world, _pool) = peopled();
        let output = command(&world, args).output().unwrap();
        assert!(output.status.code().is_some_and(|code| [0, 1, 3].contains(&code)), "{args:?}: {output:?}");
        assert!(!output.stdout.is_empty() || ["events", "gc"].contains(&args[0]), "{args:?} says nothing: {output:?}");
        for text in [output.stdout, output.stderr] {
            assert!(!text.contains(&0x1b), "{args:?}: {}", String::from_utf8_lossy(&text));
        }
    }
}

#[test]
fn terminals_get_colour_unless_no_color_is_set() {
    let (world, _pool) = peopled();
    let terminal = Terminal::open(&world, 120, 40);
    // To the world's folder, which is its home.
    terminal.line("cd");
    let mut number = 0;
    let mut shows_colour = |line: &str| {
        number += 1;
        // The sum is not in the line that is echoed.
        terminal.line(&format!("clear; {line}; echo over $(({number} + 1000))"));
        let over = format!("over {}", number + 1000);
        terminal.wait_for(line, |screen| screen.lines().any(|line| line == over));
        terminal.wait_for_prompt();
        terminal.coloured_screen().contains('\x1b')
    };
    assert!(shows_colour("kvctl list"));
    assert!(!shows_colour("NO_COLOR=1 kvctl list"));
    // As kvcached reads it: set at all, even to nothing.
    assert!(!shows_colour("NO_COLOR= kvctl list"));
    assert!(shows_colour("kvctl --help"), "clap's own");
    for args in runs() {
        assert!(!shows_colour(&format!("NO_COLOR=1 kvctl {}", args.join(" "))), "{args:?}");
    }
}

#[test]
fn the_folder_is_the_flag_or_the_variable() {
    let (world, other) = (World::new(), World::new());
    let _pool = other.pool("elsewhere", Bytes::gib(1));
    let folder = other.path("");
    let ran = world.kvctl(&["list", "--dir", folder.to_str().unwrap()]);
    assert!(ran.quiet().1.contains("elsewhere"));
    assert_eq!(world.kvctl(&["list"]).quiet(), (0, "No active KVCached segments found.\n"));
    let missing = world.path("not/there");
    let ran = world.kvctl(&["--dir", missing.to_str().unwrap(), "list"]);
    assert_eq!(ran.quiet(), (0, "No active KVCached segments found.\n"));
}
