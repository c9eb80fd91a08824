//! The `kvtop` binary: `kvctl kvtop` under the name that kvcached's users type.

#![forbid(unsafe_code)]

use std::env;
use std::process::ExitCode;

use clap::Parser;
use tidekv_cli::cli::TopCli;
use tidekv_cli::console::Console;
use tidekv_cli::{exit, run_top};

fn main() -> ExitCode {
    exit::main_of(TopCli::try_parse_from(env::args_os()), |cli| run_top(cli, &mut Console::standard()))
}
