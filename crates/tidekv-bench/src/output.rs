//! Where results go: the flags that every benchmark has, and the only code that writes to stdout.
//!
//! ```text
//!                    stdout          FILE of --output    stderr
//!   (no flag)        tables          the JSON object     warnings, progress bar on a terminal
//!   --json           the object      the JSON object     warnings
//!   --quiet          nothing         the JSON object     nothing
//!   --quiet --json   the object      the JSON object     nothing
//! ```
//!
//! The object on stdout and the one in the file are the same bytes. The file is written first, so a reader
//! that closes stdout early never costs a result; that it did is no error. A file that cannot be written is one, but what was
//! measured is printed all the same.

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;

use crate::progress::Progress;
use crate::result::{BenchResult, PendingFile};

/// Flags shared by all benchmarks. Flatten them into the arguments of a subcommand.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    /// Print the result as one JSON object instead of tables
    #[arg(long)]
    pub json: bool,

    /// Also write the JSON object to FILE, whole or not at all
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,

    /// Measure less: done within a minute, for a first look
    #[arg(long)]
    pub quick: bool,

    /// No tables, no progress bar, no warnings
    #[arg(long, short)]
    pub quiet: bool,
}

impl OutputArgs {
    /// Checks that the result can be written at the end. Call it before the first measurement.
    pub fn open(&self) -> anyhow::Result<Output> {
        if let Some(path) = &self.output {
            drop(PendingFile::create(path).with_context(|| format!("cannot write a result to {}", path.display()))?);
        }
        if cfg!(debug_assertions) && !self.quiet {
            warn("this is a debug build, whose times mean little: build kvbench with --release");
        }
        Ok(Output { args: self.clone() })
    }
}

/// A checked way out for one result.
#[derive(Debug)]
pub struct Output {
    args: OutputArgs,
}

impl Output {
    /// A way out for one of several results, whose flags were checked with those of the first.
    pub fn unchecked(args: OutputArgs) -> Self {
        Self { args }
    }

    /// A bar over `steps` where one is wanted and seen.
    pub fn progress(&self, steps: u64) -> Progress {
        Progress::new(steps, !self.args.json && !self.args.quiet)
    }

    /// Writes the file and prints `tables` or the object. `tables` is whole lines.
    pub fn emit(&self, result: &BenchResult, tables: &str) -> anyhow::Result<()> {
        self.emit_to(&mut io::stdout().lock(), result, tables)
    }

    fn emit_to(&self, stdout: &mut impl Write, result: &BenchResult, tables: &str) -> anyhow::Result<()> {
        let write = |path: &PathBuf| result.write(path).with_context(|| format!("cannot write {}", path.display()));
        let written = self.args.output.as_ref().map_or(Ok(()), write);
        if self.args.json {
            print_to(stdout, &result.to_json()?)?;
        } else if !self.args.quiet {
            print_to(stdout, tables)?;
        }
        written
    }
}

/// Writes whole lines to stdout. That nobody reads them any more is not an error.
pub fn print(text: &str) -> anyhow::Result<()> {
    print_to(&mut io::stdout().lock(), text)
}

/// Writes `warning: ...` to stderr, or nowhere if stderr is closed.
pub fn warn(sentence: &str) {
    let _ = writeln!(io::stderr(), "warning: {sentence}");
}

fn print_to(stdout: &mut impl Write, text: &str) -> anyhow::Result<()> {
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        outcome => outcome.context("cannot write to stdout"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostInfo;

    struct Failing(io::ErrorKind);

    impl Write for Failing {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_closed_pipe_is_no_error_and_a_full_disk_is() {
        assert!(print_to(&mut Failing(io::ErrorKind::BrokenPipe), "x").is_ok());
        let error = print_to(&mut Failing(io::ErrorKind::StorageFull), "x").unwrap_err();
        assert_eq!(error.downcast_ref::<io::Error>().map(io::Error::kind), Some(io::ErrorKind::StorageFull));
    }

    #[test]
    fn an_output_that_cannot_be_written_is_found_before_measuring() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("missing/a.json");
        let error = OutputArgs { output: Some(path), ..OutputArgs::default() }.open().unwrap_err();
        assert!(error.to_string().starts_with("cannot write a result to "), "{error}");
    }

    /// Nine minutes of measuring were lost to a file that was too large.
    #[test]
    fn what_was_measured_is_printed_even_where_the_file_cannot_be_written() {
        let folder = tempfile::tempdir().unwrap();
        let args = OutputArgs { output: Some(folder.path().join("a.json")), ..OutputArgs::default() };
        let output = args.open().unwrap();
        drop(folder);
        let result = BenchResult::new("x", &serde_json::json!({}), HostInfo::current()).unwrap();
        let mut stdout = Vec::new();
        let error = output.emit_to(&mut stdout, &result, "table\n").unwrap_err();
        assert!(error.to_string().starts_with("cannot write "), "{error}");
        assert_eq!(stdout, b"table\n");
    }

    #[test]
    fn the_file_holds_the_object() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        let args = OutputArgs { output: Some(path.clone()), quiet: true, ..OutputArgs::default() };
        let output = args.open().unwrap();
        assert!(!path.exists(), "the check leaves nothing behind");
        let result = BenchResult::new("x", &serde_json::json!({}), HostInfo::current()).unwrap();
        output.emit(&result, "table\n").unwrap();
        assert_eq!(BenchResult::read(&path).unwrap(), result);
    }
}
