//! The `kvctl` binary: parse, run, and one exit code. Everything else is in the library.

#![forbid(unsafe_code)]

use std::env;
use std::process::ExitCode;

use tidekv_cli::cli::Cli;
use tidekv_cli::console::Console;
use tidekv_cli::{exit, run};

fn main() -> ExitCode {
    exit::main_of(Cli::parse_args(env::args_os()), |cli| run(cli, &mut Console::standard()))
}
