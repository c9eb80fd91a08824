//! The only module that writes for people: lines to stdout and stderr, colour where it is seen.
//!
//! A reader that goes away (`kvctl limit ... | true`) is no error, and must not stop a command half-way: what is
//! written after that is dropped, and the command goes on to its exit code.

use std::env;
use std::fmt;
use std::io::{self, IsTerminal, Write};

/// Where a command's lines go, and how.
pub struct Console {
    out: Box<dyn Write>,
    err: Box<dyn Write>,
    colour: bool,
    width: Option<usize>,
    reader_gone: bool,
}

impl Console {
    /// This process's stdout and stderr. Colour and a width only on a terminal, no colour with `NO_COLOR`.
    pub fn standard() -> Self {
        let terminal = io::stdout().is_terminal();
        let width = terminal.then(terminal_size::terminal_size).flatten().map(|(width, _)| usize::from(width.0));
        // As kvcached's kvctl reads it: set at all, even to nothing.
        let colour = terminal && env::var_os("NO_COLOR").is_none();
        Self { out: Box::new(io::stdout()), err: Box::new(io::stderr()), colour, width, reader_gone: false }
    }

    /// Both streams into `out` and `err`, for tests.
    pub fn to(out: impl Write + 'static, err: impl Write + 'static, colour: bool, width: Option<usize>) -> Self {
        Self { out: Box::new(out), err: Box::new(err), colour, width, reader_gone: false }
    }

    /// Columns of the terminal; none where lines may be as long as they like.
    pub fn width(&self) -> Option<usize> {
        self.width
    }

    /// Writes one line, or several, to stdout.
    pub fn line(&mut self, text: impl fmt::Display) -> io::Result<()> {
        if self.reader_gone {
            return Ok(());
        }
        match writeln!(self.out, "{text}").and_then(|()| self.out.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                self.reader_gone = true;
                Ok(())
            }
            outcome => outcome,
        }
    }

    /// Writes a line to stderr, or nowhere if that is closed.
    pub fn note(&mut self, text: impl fmt::Display) {
        let _ = writeln!(self.err, "{text}");
    }

    /// `text` in a colour, where colour is wanted.
    pub fn paint(&self, text: &str, colour: Colour) -> String {
        if self.colour { format!("\x1b[{}m{text}\x1b[0m", colour.code()) } else { text.to_owned() }
    }
}

impl fmt::Debug for Console {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { out: _, err: _, colour, width, reader_gone } = self;
        f.debug_struct("Console")
            .field("colour", colour)
            .field("width", width)
            .field("reader_gone", reader_gone)
            .finish_non_exhaustive()
    }
}

/// kvcached's colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colour {
    /// Below half, or done.
    Green,
    /// From half of the limit on.
    Yellow,
    /// From 80 % of the limit on.
    Red,
    /// The header.
    BoldCyan,
}

impl Colour {
    fn code(self) -> &'static str {
        match self {
            Self::Green => "32",
            Self::Yellow => "33",
            Self::Red => "31",
            Self::BoldCyan => "1;36",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let mut closed = Console::to(Failing(io::ErrorKind::BrokenPipe), io::sink(), false, None);
        closed.line("x").unwrap();
        closed.line("y").unwrap();
        let mut full = Console::to(Failing(io::ErrorKind::StorageFull), io::sink(), false, None);
        assert_eq!(full.line("x").unwrap_err().kind(), io::ErrorKind::StorageFull);
    }

    #[test]
    fn colour_only_where_it_is_wanted() {
        let plain = Console::to(io::sink(), io::sink(), false, None);
        assert_eq!(plain.paint("x", Colour::Red), "x");
        let coloured = Console::to(io::sink(), io::sink(), true, None);
        assert_eq!(coloured.paint("x", Colour::BoldCyan), "\x1b[1;36mx\x1b[0m");
    }
}
