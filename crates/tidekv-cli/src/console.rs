//! The only module that writes for people: lines to stdout and stderr, colour where it is seen.
//!
//! A reader that goes away (`kvctl limit ... | true`) is no error, and must not stop a command half-way: what is
//! written after that is dropped, and the command goes on to its exit code. Commands that would go on for ever ask
//! [`Console::is_reader_gone`].
//!
//! Names come from files that anybody may have made. Whatever else in a line a terminal would act upon is spelled out;
//! only newlines, tabs and the codes of [`Colour`] pass.

use std::borrow::Cow;
use std::env;
use std::fmt;
use std::io::{self, IsTerminal, Write};

use crate::text::{is_harmless, printable};

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

    /// Whether colour is wanted.
    pub fn has_colour(&self) -> bool {
        self.colour
    }

    /// Whether nobody reads stdout any more.
    pub fn is_reader_gone(&self) -> bool {
        self.reader_gone
    }

    /// Writes one line, or several, to stdout.
    pub fn line(&mut self, text: impl fmt::Display) -> io::Result<()> {
        if self.reader_gone {
            return Ok(());
        }
        match writeln!(self.out, "{}", harmless_line(&text.to_string())).and_then(|()| self.out.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                self.reader_gone = true;
                Ok(())
            }
            outcome => outcome,
        }
    }

    /// Writes a line to stderr, or nowhere if that is closed.
    pub fn note(&mut self, text: impl fmt::Display) {
        let _ = writeln!(self.err, "{}", harmless_line(&text.to_string()));
    }

    /// `text` in a colour, where colour is wanted.
    pub fn paint(&self, text: &str, colour: Colour) -> String {
        if self.colour { format!("{}{text}{RESET}", colour.code()) } else { text.to_owned() }
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
    const ALL: [Self; 4] = [Self::Green, Self::Yellow, Self::Red, Self::BoldCyan];

    fn code(self) -> &'static str {
        match self {
            Self::Green => "\x1b[32m",
            Self::Yellow => "\x1b[33m",
            Self::Red => "\x1b[31m",
            Self::BoldCyan => "\x1b[1;36m",
        }
    }
}

const RESET: &str = "\x1b[0m";

/// A line that does nothing to a terminal but appear on it, in our colours.
pub(crate) fn harmless_line(text: &str) -> Cow<'_, str> {
    let passes = |character: char| is_harmless(character) || matches!(character, '\n' | '\t');
    if text.chars().all(passes) {
        return Cow::Borrowed(text);
    }
    let codes = || Colour::ALL.map(Colour::code).into_iter().chain([RESET]);
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(character) = rest.chars().next() {
        let code = codes().find(|&code| rest.starts_with(code));
        let (taken, after) = rest.split_at(code.map_or(character.len_utf8(), str::len));
        if code.is_some() || passes(character) {
            shown.push_str(taken);
        } else {
            shown.push_str(&printable(taken));
        }
        rest = after;
    }
    Cow::Owned(shown)
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
    fn nothing_but_our_colours_acts_upon_a_terminal() {
        let painted = "\x1b[32mname\x1b[0m";
        assert_eq!(harmless_line(painted), painted);
        assert_eq!(harmless_line("a\tb\nc"), "a\tb\nc");
        assert_eq!(harmless_line("\x1b[2J\x1b]0;title\x07\r\x7f"), "\\u001b[2J\\u001b]0;title\\u0007\\u000d\\u007f");
        let mixed = "\x1b[31mevil\x1b[?25l\u{9b}2J\x1b[0m";
        assert_eq!(harmless_line(mixed), "\x1b[31mevil\\u001b[?25l\\u009b2J\x1b[0m");
    }

    #[test]
    fn colour_only_where_it_is_wanted() {
        let plain = Console::to(io::sink(), io::sink(), false, None);
        assert_eq!(plain.paint("x", Colour::Red), "x");
        let coloured = Console::to(io::sink(), io::sink(), true, None);
        assert_eq!(coloured.paint("x", Colour::BoldCyan), "\x1b[1;36mx\x1b[0m");
    }
}
