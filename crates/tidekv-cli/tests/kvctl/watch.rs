//! `kvctl watch`: on a real terminal and in pipes.

use std::fs;
use std::io::pipe;

use tidekv_core::units::Bytes;

use crate::common::World;
use crate::tmux::Terminal;

const ORDINARY: &str = "alternate=0 cursor=1 mouse=0";

fn wait_for_watch(terminal: &Terminal) -> String {
    terminal.wait_for("watch's screen", |screen| screen.starts_with("Every "))
}

#[test]
fn the_list_is_refreshed_with_what_changed() {
    let world = World::new();
    let pool = world.pool("alpha", Bytes::gib(4));
    pool.uses(Bytes::gib(1), Bytes::ZERO);
    let terminal = Terminal::open(&world, 80, 24);
    terminal.line("echo what was here before");
    terminal.wait_for_prompt();
    terminal.line("kvctl watch -n 0.1");
    wait_for_watch(&terminal);
    assert_eq!(terminal.modes(), "alternate=1 cursor=0 mouse=0");
    let screen = terminal.wait_for("the pool", |screen| screen.contains("alpha"));
    assert!(screen.lines().nth(2).is_some_and(|line| line.starts_with("IPC") && line.contains("+Used")), "{screen}");
    assert!(screen.contains("1.00 GB  25.0 %"), "{screen}");
    terminal.wait_for("the rate", |screen| {
        pool.change(|entry| entry.counters.maps += 1_000_000);
        screen.lines().nth(3).is_some_and(|line| line.contains("M  "))
    });
    pool.uses(Bytes::gib(2), Bytes::ZERO);
    terminal.wait_for("the new figure", |screen| screen.contains("2.00 GB  50.0 %"));
    let other = world.pool("beta", Bytes::gib(1));
    terminal.wait_for("another pool", |screen| screen.lines().nth(4).is_some_and(|line| line.starts_with("beta ")));
    drop(other);
    terminal.wait_for("its end", |screen| !screen.contains("beta"));

    terminal.keys(&["C-c"]);
    let screen = terminal.wait_for_prompt();
    assert!(screen.contains("what was here before") && !screen.contains("Every "), "{screen}");
    assert_eq!(terminal.modes(), ORDINARY);
    assert_eq!(terminal.status_of_last(), "0");
}

#[test]
fn the_difference_is_that_to_the_look_before() {
    let world = World::new();
    let pool = world.pool("alpha", Bytes::gib(4));
    let terminal = Terminal::open(&world, 120, 24);
    // A difference is shown until the next look: long enough to be seen.
    terminal.line("kvctl watch -n 3");
    wait_for_watch(&terminal);
    pool.uses(Bytes::gib(1), Bytes::mib(512));
    let screen = terminal.wait_for("the difference", |screen| screen.contains("+1.0G"));
    assert!(screen.lines().nth(3).is_some_and(|line| line.contains("+1.5G")), "held as well: {screen}");
    terminal.wait_for("no difference", |screen| screen.contains("25.0 %  0 "));
    terminal.keys(&["q"]);
    terminal.wait_for_prompt();
}

#[test]
fn more_pools_than_lines() {
    let world = World::new();
    for index in 0..30 {
        world.kvcached_segment(&format!("pool-{index:02}"), [1 << 30, 0, 0]);
    }
    let terminal = Terminal::open(&world, 80, 20);
    terminal.line("kvctl watch -n 3600");
    // Title, blank, header, 16 of 30 pools.
    let screen = terminal.wait_for("the rest", |screen| screen.contains("... 14 more"));
    assert_eq!(screen.lines().filter(|line| line.starts_with("pool-")).count(), 16, "{screen}");
    assert_eq!(screen.lines().count(), 20);
    terminal.resize(80, 40);
    terminal.wait_for("all of them", |screen| screen.contains("pool-29") && !screen.contains(" more"));
    terminal.resize(30, 4);
    terminal
        .wait_for("a small screen", |screen| screen.lines().nth(3).is_some_and(|line| line.starts_with("... 30 more")));
    terminal.keys(&["q"]);
    terminal.wait_for_prompt();
    assert_eq!(terminal.modes(), ORDINARY);
    assert_eq!(terminal.status_of_last(), "0");
}

#[test]
fn a_signal_and_an_error_put_the_terminal_back() {
    let world = World::new();
    let folder = world.path("pools");
    fs::create_dir(&folder).unwrap();
    let terminal = Terminal::open(&world, 80, 24);
    let pid = world.path("pid");
    let run = format!("sh -c 'echo $$ > {}; exec kvctl --dir {} watch -n 0.1'", pid.display(), folder.display());
    terminal.line(&run);
    wait_for_watch(&terminal);
    let pid = fs::read_to_string(pid).unwrap();
    assert!(std::process::Command::new("kill").args(["-TERM", pid.trim()]).status().unwrap().success());
    terminal.wait_for_prompt();
    assert_eq!((terminal.modes().as_str(), terminal.status_of_last().as_str()), (ORDINARY, "143"));

    terminal.clear();
    terminal.line(&run);
    wait_for_watch(&terminal);
    fs::remove_dir(&folder).unwrap();
    fs::write(&folder, "not a folder any more").unwrap();
    let screen = terminal.wait_for_prompt();
    assert!(screen.contains("error: "), "{screen}");
    assert_eq!((terminal.modes().as_str(), terminal.status_of_last().as_str()), (ORDINARY, "2"));
}

#[test]
fn count_and_names() {
    let world = World::new();
    let _pools = [world.pool("alpha", Bytes::gib(1)), world.pool("beta", Bytes::gib(1))];
    let terminal = Terminal::open(&world, 80, 24);
    // Shown for four seconds, long enough to be seen.
    terminal.line("kvctl watch -n 4 --count 1 beta late");
    let screen = terminal.wait_for("the wait", |screen| screen.contains("Waiting for late: not there yet."));
    assert!(!screen.contains("alpha ") && screen.contains("\nbeta "), "{screen}");
    terminal.wait_for_prompt();
    assert_eq!(terminal.status_of_last(), "0");
}

#[test]
fn in_a_pipe_lists_come_one_after_another() {
    let world = World::new();
    let long = "x".repeat(60);
    let _pools = [world.pool("alpha", Bytes::gib(1)), world.pool(&long, Bytes::gib(1))];
    let ran = world.kvctl(&["watch", "-n", "0.05", "--count", "3"]);
    let (code, text) = ran.quiet();
    assert!(code == 0 && text.chars().all(|c| !c.is_control() || c == '\n'), "{text:?}");
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 12);
    for list in lines.chunks(4) {
        assert!(list[0].len() == "2026-01-02 03:04:05".len() && list[0].starts_with("20"), "{text}");
        assert!(list[1].starts_with("IPC ") && list[1].ends_with(" Device"), "{text}");
        assert!(list[2].starts_with("alpha ") && list[3].starts_with(&format!("{long} ")), "{text}");
    }
    let nothing = World::new().kvctl(&["watch", "--count", "1"]);
    assert!(nothing.quiet().1.ends_with("\nNo active KVCached segments found.\n"), "{nothing:?}");
}

#[test]
fn a_reader_that_went_away_ends_it() {
    let world = World::new();
    let (reader, writer) = pipe().unwrap();
    drop(reader);
    let output = world.command(&["watch", "-n", "0.05"]).stdout(writer).output().unwrap();
    assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0), "{output:?}");
}
