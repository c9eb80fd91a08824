//! Outcome to exit code, in one place.
//!
//! ```text
//!   0  done, or yes                 also when the reader of stdout went away: `kvbench ... | head`
//!   1  done, and the answer is no   `compare --fail-above` found a figure that got worse
//!   2  error                        one sentence on stderr; nothing half-written is left behind
//! ```

use std::io;
use std::process::ExitCode;

/// How a command that did its work ended. Errors travel as `Err` beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum ExitStatus {
    /// Done; where there was a question, the answer is yes.
    Done,
    /// Done, and the answer is no.
    Negative,
}

/// Exit code of an error, the command line's own included.
pub const ERROR_CODE: u8 = 2;

/// The exit code of a finished command, and the sentence for stderr when there is one.
pub fn code_and_message(outcome: &anyhow::Result<ExitStatus>) -> (ExitCode, Option<String>) {
    match outcome {
        Ok(ExitStatus::Done) => (ExitCode::SUCCESS, None),
        Ok(ExitStatus::Negative) => (ExitCode::from(1), None),
        Err(error) if is_broken_pipe(error) => (ExitCode::SUCCESS, None),
        Err(error) => (ExitCode::from(ERROR_CODE), Some(format!("error: {}", sentence(error)))),
    }
}

/// Whether the error is that our reader went away, which is its right.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let kind = |cause: &(dyn std::error::Error + 'static)| cause.downcast_ref::<io::Error>().map(io::Error::kind);
    error.chain().any(|cause| kind(cause) == Some(io::ErrorKind::BrokenPipe))
}

/// The error and its causes on one line. A cause that the line above it already quotes is left out.
fn sentence(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        let cause = cause.split_whitespace().collect::<Vec<_>>().join(" ");
        if line.contains(&cause) {
            continue;
        }
        if !line.is_empty() {
            line.push_str(": ");
        }
        line.push_str(&cause);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context, anyhow};

    fn message(error: anyhow::Error) -> Option<String> {
        code_and_message(&Err(error)).1
    }

    #[test]
    fn causes_are_joined_and_not_repeated() {
        let error = anyhow!("disk full").context("cannot write: disk full").context("no result kept");
        assert_eq!(message(error).unwrap(), "error: no result kept: cannot write: disk full");
    }

    #[test]
    fn a_message_of_several_lines_becomes_one() {
        assert_eq!(message(anyhow!("first\n  second")).unwrap(), "error: first second");
    }

    #[test]
    fn a_reader_that_went_away_is_no_error() {
        let gone: anyhow::Result<ExitStatus> =
            Err(io::Error::from(io::ErrorKind::BrokenPipe)).context("cannot write the table");
        assert_eq!(code_and_message(&gone).1, None);
        assert!(message(io::Error::from(io::ErrorKind::StorageFull).into()).is_some());
    }

    #[test]
    fn a_negative_answer_is_not_an_error() {
        assert_eq!(code_and_message(&Ok(ExitStatus::Negative)), (ExitCode::from(1), None));
    }
}
