//! The command lines inside Python: the same code as the binaries, with another `main`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Once;

use clap::Parser;
use pyo3::prelude::*;
use tidekv_bench::cli::Cli as BenchCli;
use tidekv_cli::cli::{Cli, TopCli};
use tidekv_cli::console::Console;
use tidekv_cli::{exit, logging, program};

use crate::error::Refused;

/// Logs go where `KVCACHED_LOG_LEVEL` and `KVCACHED_LOG_FILE` say, from the first object on that has any.
pub(crate) fn start_logging() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // The engine's process is not ours to end.
        let warnings = logging::start(None).unwrap_or_else(|error| vec![error.to_string()]);
        for warning in warnings {
            use std::io::Write;
            let _ = writeln!(std::io::stderr(), "tidekv: warning: {warning}");
        }
    });
}

/// Runs one of the tools in this process and gives its exit code.
#[pyfunction]
pub(crate) fn run_tool(py: Python<'_>, name: &str, arguments: Vec<OsString>) -> PyResult<u8> {
    let args: Vec<OsString> = std::iter::once(name.into()).chain(arguments).collect();
    // Tools that start themselves again need a file to start: the console script beside this interpreter.
    let scripts: PathBuf = py.import("sysconfig")?.call_method1("get_path", ("scripts",))?.extract()?;
    program::start_with(scripts.join(name));
    match name {
        "kvctl" => {
            Ok(py.detach(|| exit::code_of(Cli::parse_args(args), |cli| tidekv_cli::run(cli, &mut Console::standard()))))
        }
        "kvtop" => Ok(py.detach(|| {
            exit::code_of(TopCli::try_parse_from(args), |cli| tidekv_cli::run_top(cli, &mut Console::standard()))
        })),
        "kvbench" => Ok(py.detach(|| exit::code_of(BenchCli::parse_args(args), BenchCli::run))),
        _ => Err(Refused::argument(format!("{name:?} is not a tool: use kvctl, kvtop or kvbench")).into()),
    }
}
