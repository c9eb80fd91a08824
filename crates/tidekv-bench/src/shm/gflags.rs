//! Flags as gflags takes them, for the benchmarks whose ancestors used it.
//!
//! | written | read as |
//! | --- | --- |
//! | `-num_iterations=5`, `-num_iterations 5` | `--num-iterations=5`, `--num-iterations 5` |
//! | `--nocleanup`, `-nocleanup`, `--no-cleanup` | `--cleanup=false` |
//! | `--cleanup`, `--cleanup=true`, `--cleanup=1`, `--cleanup=yes` | `--cleanup=true` |
//!
//! Underscores are dashes by the time we see them. A flag given twice has its last value.

use std::ffi::OsString;

/// Subcommands that take such flags.
const SUBCOMMANDS: [&str; 4] = ["shm", "shm-alloc", "shm-lookup", "shm-transfer"];

/// Flags of theirs that are true or false.
const SWITCHES: [&str; 4] = ["cleanup", "measure-mmap-only", "use-memcpy", "verify-data"];

/// The arguments with long flags as clap takes them; all others as they are.
pub fn with_long_flags(args: Vec<OsString>) -> Vec<OsString> {
    let Some(first) = subcommand_at(&args) else { return args };
    let mut flags_are_over = false;
    let translate = |(index, arg): (usize, OsString)| {
        flags_are_over |= arg == "--";
        if index <= first || flags_are_over { arg } else { long_flag(arg) }
    };
    args.into_iter().enumerate().map(translate).collect()
}

/// Where the subcommand stands, if it is one of ours. Only `--log-file` can come before it.
fn subcommand_at(args: &[OsString]) -> Option<usize> {
    let mut index = 1;
    while args.get(index)?.to_str()?.starts_with('-') {
        index += if args[index] == "--log-file" { 2 } else { 1 };
    }
    SUBCOMMANDS.contains(&args[index].to_str()?).then_some(index)
}

fn long_flag(arg: OsString) -> OsString {
    let Some(text) = arg.to_str() else { return arg };
    let name = match (text.strip_prefix("--"), text.strip_prefix('-')) {
        (Some(name), _) => name.to_owned(),
        // One letter is a short flag, and a digit begins a number.
        (None, Some(name)) if name.len() > 1 && name.starts_with(|c: char| c.is_ascii_alphabetic()) => dashes(name),
        _ => return arg,
    };
    let switch = name.strip_prefix("no").map(|rest| rest.strip_prefix('-').unwrap_or(rest));
    match switch.filter(|switch| SWITCHES.contains(switch)) {
        Some(switch) => format!("--{switch}=false").into(),
        None => format!("--{name}").into(),
    }
}

/// Underscores of the name, not of the value.
fn dashes(flag: &str) -> String {
    match flag.split_once('=') {
        Some((name, value)) => format!("{}={value}", name.replace('_', "-")),
        None => flag.replace('_', "-"),
    }
}

/// A value of a switch.
pub fn parse_switch(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "t" | "yes" | "y" | "1" => Ok(true),
        "false" | "f" | "no" | "n" | "0" => Ok(false),
        _ => Err("write true or false".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(args: &[&str]) -> Vec<OsString> {
        with_long_flags(["kvbench"].iter().chain(args).map(OsString::from).collect()).split_off(1)
    }

    #[test]
    fn every_spelling() {
        for (written, read) in [
            ("-num_iterations=5", "--num-iterations=5"),
            ("-num_iterations", "--num-iterations"),
            ("-output=a_b.json", "--output=a_b.json"),
            ("--nocleanup", "--cleanup=false"),
            ("-nocleanup", "--cleanup=false"),
            ("--no-verify-data", "--verify-data=false"),
            ("-nouse_memcpy", "--use-memcpy=false"),
            ("--cleanup=false", "--cleanup=false"),
            ("-q", "-q"),
            ("-5", "-5"),
            ("--nonsense", "--nonsense"),
        ] {
            assert_eq!(translated(&["shm-alloc", written]), ["shm-alloc", read], "{written}");
        }
    }

    #[test]
    fn other_subcommands_and_values_are_left_alone() {
        assert_eq!(translated(&["vmm", "-nocleanup"]), ["vmm", "-nocleanup"]);
        assert_eq!(translated(&["compare", "shm", "-nocleanup"]), ["compare", "shm", "-nocleanup"]);
        assert_eq!(translated(&["shm", "--", "-nocleanup"]), ["shm", "--", "-nocleanup"]);
        let args = ["--log-file", "x", "shm", "-seed=2"];
        assert_eq!(translated(&args), ["--log-file", "x", "shm", "--seed=2"]);
        assert_eq!(translated(&[]), [""; 0]);
    }

    #[test]
    fn switches_as_gflags_reads_them() {
        for text in ["true", "TRUE", "t", "1", "y", "yes"] {
            assert_eq!(parse_switch(text), Ok(true));
        }
        for text in ["false", "F", "0", "n", "no"] {
            assert_eq!(parse_switch(text), Ok(false));
        }
        assert!(parse_switch("maybe").is_err());
    }
}
