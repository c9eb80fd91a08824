//! The command line itself: help, errors, pipes that close.

use std::io::pipe;

use tidekv_core::units::Bytes;

use crate::common::{GIB, World};

const COMMANDS: [&str; 7] = ["list", "limit", "limit-percent", "share", "delete", "gc", "trim"];

#[test]
fn help_everywhere_with_examples() {
    let world = World::new();
    let (code, help) = (world.kvctl(&["--help"]).code, world.kvctl(&["--help"]).stdout);
    assert_eq!(code, 0);
    for command in COMMANDS {
        assert!(help.contains(&format!("\n  {command} ")), "{command} is not in {help}");
        let own = world.kvctl(&[command, "--help"]);
        let (code, own) = own.quiet();
        assert!(code == 0 && own.contains("Examples:\n") && own.contains(&format!("Usage: kvctl {command}")), "{own}");
    }
}

#[test]
fn a_wrong_command_line_is_exit_code_2() {
    let world = World::new();
    for args in [&[][..], &["lsit"], &["limit"], &["limit", "a"], &["list", "--jsn"], &["gc", "a"]] {
        let ran = world.kvctl(args);
        assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "{args:?}");
        assert!(!ran.stderr.is_empty());
    }
}

#[test]
fn a_reader_that_went_away_is_no_error_and_stops_nothing() {
    let world = World::new();
    world.kvcached_segment("theirs", [i64::try_from(4 * GIB).unwrap(), 0, 0]);
    for args in [&["list"][..], &["list", "--json"], &["--help"], &["gc"], &["limit", "theirs", "1G"]] {
        let (reader, writer) = pipe().unwrap();
        drop(reader);
        let output = world.command(args).stdout(writer).output().unwrap();
        assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0), "{args:?}: {output:?}");
    }
    assert_eq!(crate::common::words(&world.path("theirs"))[0], i64::try_from(GIB).unwrap());
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
