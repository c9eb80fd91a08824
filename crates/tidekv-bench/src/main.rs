//! The `kvbench` binary: parse, run, and one exit code. Everything else is in the library.

#![forbid(unsafe_code)]

use std::env;
use std::process::ExitCode;

use tidekv_bench::cli::Cli;
use tidekv_cli::exit;

fn main() -> ExitCode {
    exit::main_of(Cli::parse_args(env::args_os()), Cli::run)
}
