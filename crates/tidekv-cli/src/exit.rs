//! Outcome to exit code, in one place.
//!
//! ```text
//!   0  done                            also when the reader of stdout went away: `kvctl list | head`
//!   1  the answer is no                no pool of that name, say
//!   2  error                           one sentence on stderr; nothing was changed unless it says so
//!   3  accepted and still draining     the pool knows; its memory is not back yet
//! ```

use std::process::ExitCode;

/// How a command that did its work ended. Errors travel as `Err` beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Outcome {
    /// Done.
    Done,
    /// The answer is no, and stderr says why.
    Negative,
    /// Accepted; the pool is still carrying it out.
    Draining,
}

/// Exit code of an error, the command line's own included.
pub const ERROR_CODE: u8 = 2;

/// The exit code of a finished command, and the sentence for stderr when there is one.
pub fn code_and_message(outcome: &anyhow::Result<Outcome>) -> (ExitCode, Option<String>) {
    match outcome {
        Ok(Outcome::Done) => (ExitCode::SUCCESS, None),
        Ok(Outcome::Negative) => (ExitCode::from(1), None),
        Ok(Outcome::Draining) => (ExitCode::from(3), None),
        Err(error) => (ExitCode::from(ERROR_CODE), Some(format!("error: {}", sentence(error)))),
    }
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
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn every_outcome_has_its_code() {
        assert_eq!(code_and_message(&Ok(Outcome::Done)), (ExitCode::SUCCESS, None));
        assert_eq!(code_and_message(&Ok(Outcome::Negative)), (ExitCode::from(1), None));
        assert_eq!(code_and_message(&Ok(Outcome::Draining)), (ExitCode::from(3), None));
    }

    #[test]
    fn an_error_is_one_line_and_repeats_nothing() {
        let error = anyhow!("disk\n full").context("cannot write: disk full").context("nothing changed");
        let (code, message) = code_and_message(&Err(error));
        assert_eq!(code, ExitCode::from(2));
        assert_eq!(message.unwrap(), "error: nothing changed: cannot write: disk full");
    }
}
