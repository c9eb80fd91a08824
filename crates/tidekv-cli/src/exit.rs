//! Outcome to exit code, in one place for all our binaries.
//!
//! ```text
//!   0  done                            also when the reader of stdout went away: `kvctl list | head`
//!   1  the answer is no                no pool of that name; a figure that got worse
//!   2  error                           one sentence on stderr; nothing was changed unless it says so
//!   3  accepted and still draining     the pool knows; its memory is not back yet
//! ```

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;

use signal_hook::consts::SIGXFSZ;

use crate::console::harmless_line;

/// How a command that did its work ended. Errors travel as `Err` beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Outcome {
    /// Done; where there was a question, the answer is yes.
    Done,
    /// The answer is no, and stderr says why.
    Negative,
    /// Accepted; the pool is still carrying it out.
    Draining,
    /// As a command ended that was run on the way and has said why: what `kvctl shell` answers.
    Code(u8),
}

/// Exit code of an error, the command line's own included.
pub const ERROR_CODE: u8 = 2;

/// The whole of a `main`: does what the command line says, or shows what is wrong with it, and ends in one exit code.
///
/// A write beyond `ulimit -f` is an error like any other instead of the end of the process. A handler and not "ignored", which
/// the programs that we start would inherit.
pub fn main_of<C>(parsed: Result<C, clap::Error>, run: impl FnOnce(&C) -> anyhow::Result<Outcome>) -> ExitCode {
    // Should that fail, everything else works.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
    ExitCode::from(code_of(parsed, run))
}

/// The same as a number, for programs that have a `main` of their own.
pub fn code_of<C>(parsed: Result<C, clap::Error>, run: impl FnOnce(&C) -> anyhow::Result<Outcome>) -> u8 {
    let cli = match parsed {
        Ok(cli) => cli,
        Err(answer) => {
            // `--help` and `--version` arrive here too, and go to stdout. A reader that went away is no error.
            let _ = answer.print();
            return if answer.use_stderr() { ERROR_CODE } else { 0 };
        }
    };
    let (code, message) = code_and_message(&run(&cli));
    if let Some(message) = message {
        // With stderr closed there is nobody to tell; the code still says it.
        let _ = writeln!(io::stderr(), "{}", harmless_line(&message));
    }
    code
}

/// The exit code of a finished command, and the sentence for stderr when there is one.
fn code_and_message(outcome: &anyhow::Result<Outcome>) -> (u8, Option<String>) {
    match outcome {
        Ok(Outcome::Done) => (0, None),
        Ok(Outcome::Negative) => (1, None),
        Ok(Outcome::Draining) => (3, None),
        Ok(Outcome::Code(code)) => (*code, None),
        Err(error) if is_broken_pipe(error) => (0, None),
        Err(error) => (ERROR_CODE, Some(format!("error: {}", sentence(error)))),
    }
}

/// Whether the error is that our reader went away, which is its right.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| io_kind(cause) == Some(io::ErrorKind::BrokenPipe))
}

fn io_kind(cause: &(dyn std::error::Error + 'static)) -> Option<io::ErrorKind> {
    cause.downcast_ref::<io::Error>().map(io::Error::kind)
}

/// The error and its causes on one line. A cause that the line before it already quotes is left out.
fn sentence(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let cause = cause.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        if line.contains(&cause) {
            continue;
        }
        if !line.is_empty() {
            line.push_str(": ");
        }
        line.push_str(&cause);
    }
    if error.chain().any(|cause| io_kind(cause) == Some(io::ErrorKind::FileTooLarge)) {
        line.push_str("; `ulimit -f` says how large this shell's programs may make a file");
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context, anyhow};

    #[test]
    fn every_outcome_has_its_code() {
        assert_eq!(code_and_message(&Ok(Outcome::Done)), (0, None));
        assert_eq!(code_and_message(&Ok(Outcome::Negative)), (1, None));
        assert_eq!(code_and_message(&Ok(Outcome::Draining)), (3, None));
        assert_eq!(code_and_message(&Ok(Outcome::Code(7))), (7, None));
    }

    #[test]
    fn an_error_is_one_line_and_repeats_nothing() {
        let error = anyhow!("disk\n full").context("cannot write: disk full").context("nothing changed");
        let (code, message) = code_and_message(&Err(error));
        assert_eq!(code, 2);
        assert_eq!(message.unwrap(), "error: nothing changed: cannot write: disk full");
    }

    #[test]
    fn a_reader_that_went_away_is_no_error() {
        let gone: anyhow::Result<Outcome> =
            Err(io::Error::from(io::ErrorKind::BrokenPipe)).context("cannot write the table");
        assert_eq!(code_and_message(&gone), (0, None));
        let full: anyhow::Result<Outcome> = Err(io::Error::from(io::ErrorKind::StorageFull).into());
        assert!(code_and_message(&full).1.is_some());
    }
}
