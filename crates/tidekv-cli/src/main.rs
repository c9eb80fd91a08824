//! The `kvctl` binary: parse, run, and one exit code. Everything else is in the library.

#![forbid(unsafe_code)]

use std::env;
use std::io::{self, Write};
use std::process::ExitCode;

use tidekv_cli::cli::Cli;
use tidekv_cli::console::Console;
use tidekv_cli::{exit, run};

fn main() -> ExitCode {
    let cli = match Cli::parse_args(env::args_os()) {
        Ok(cli) => cli,
        Err(answer) => {
            // `--help` and `--version` arrive here too, and go to stdout. A reader that went away is no error.
            let _ = answer.print();
            return if answer.use_stderr() { ExitCode::from(exit::ERROR_CODE) } else { ExitCode::SUCCESS };
        }
    };
    let (code, message) = exit::code_and_message(&run(&cli, &mut Console::standard()));
    if let Some(message) = message {
        // With stderr closed there is nobody to tell; the code still says it.
        let _ = writeln!(io::stderr(), "{message}");
    }
    code
}
