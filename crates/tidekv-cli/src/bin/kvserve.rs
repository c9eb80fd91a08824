//! The `kvserve` binary: a model behind an OpenAI-compatible API. Everything else is in the libraries.

#![forbid(unsafe_code)]

use std::env;
use std::process::ExitCode;

use clap::Parser;
use tidekv_cli::cli::ServeCli;
use tidekv_cli::console::Console;
use tidekv_cli::{exit, run_serve};

fn main() -> ExitCode {
    exit::main_of(ServeCli::try_parse_from(env::args_os()), |cli| run_serve(cli, &mut Console::standard()))
}
