//! The shell of a pipe: one command a line, without prompt and banner, to the end.
//!
//! Every line is carried out, also after one that failed. The exit code is that of the last command which did not end
//! with 0, so that a script that went wrong anywhere does not end well.

use std::io::{BufRead, Read};
use std::ops::ControlFlow;

use anyhow::{Context, bail};
use tidekv_shm::RuntimeDir;

use super::carry_out;
use super::launch::Launcher;
use crate::console::Console;
use crate::exit::Outcome;

/// No command is as long; what is, is no list of commands.
const LONGEST_LINE: usize = 64 << 10;

pub(super) fn run(dir: &RuntimeDir, mut input: impl BufRead, console: &mut Console) -> anyhow::Result<Outcome> {
    let launcher = Launcher::in_script();
    let mut failed = None;
    for number in 1_u64.. {
        let Some(line) = next_line(&mut input).with_context(|| format!("line {number}"))? else { break };
        match carry_out(&line, dir, &launcher, console) {
            ControlFlow::Continue(0) => {}
            ControlFlow::Continue(code) => failed = Some(code),
            ControlFlow::Break(()) => break,
        }
    }
    Ok(failed.map_or(Outcome::Done, Outcome::Code))
}

/// A line without its end, or nothing where the input ends. A line that is not text is one no command matches.
fn next_line(input: &mut impl BufRead) -> anyhow::Result<Option<String>> {
    let mut line = Vec::new();
    let limit = u64::try_from(LONGEST_LINE).unwrap_or(u64::MAX);
    input.by_ref().take(limit).read_until(b'\n', &mut line).context("cannot read commands")?;
    if line.is_empty() {
        return Ok(None);
    }
    if line.last() == Some(&b'\n') {
        line.pop();
    } else if line.len() == LONGEST_LINE {
        bail!(
            "it is longer than {LONGEST_LINE} bytes, so this is no list of commands; what came before it was carried out"
        );
    }
    Ok(Some(String::from_utf8_lossy(&line).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{self, BufReader};

    fn run_script(input: impl BufRead) -> anyhow::Result<Outcome> {
        let mut console = Console::to(io::sink(), io::sink(), false, None);
        run(&RuntimeDir::at("/not/there"), input, &mut console)
    }

    #[test]
    fn the_last_failure_is_the_answer() {
        for (text, outcome) in [
            (&b""[..], Outcome::Done),
            (b"\n# a comment\n\n", Outcome::Done),
            (b"help\nhelp list", Outcome::Done),
            (b"lsit\nhelp\n", Outcome::Code(2)),
            (b"!exit 7\nhelp\n", Outcome::Code(7)),
            (b"!exit 7\nlsit\n", Outcome::Code(2)),
            (b"exit\nlsit\n", Outcome::Done),
            (b"!exit 7\nexit\nlsit", Outcome::Code(7)),
            (b"\xff\xfe\nhelp\n", Outcome::Code(2)),
            (b"help\r\n", Outcome::Done),
        ] {
            assert_eq!(run_script(text).unwrap(), outcome, "{}", String::from_utf8_lossy(text));
        }
    }

    #[test]
    fn a_line_without_end_is_an_error_and_not_all_of_memory() {
        let endless = BufReader::new(io::repeat(b'x'));
        let error = run_script(b"help\n".chain(endless)).unwrap_err();
        assert!(format!("{error:#}").contains("line 2: it is longer than 65536 bytes"), "{error:#}");
    }
}
