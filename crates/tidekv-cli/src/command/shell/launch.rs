//! Carrying out an order: each command is a process of its own, kvctl again.
//!
//! ```text
//!   shell ──spawn──> kvctl --dir DIR watch -n 2          Ctrl-C: the kernel sends SIGINT to both.
//!     │   <──exit────                                    The command ends as it would outside of the shell;
//!     └─ SIGINT is caught and dropped                    the shell asks for the next line.
//! ```
//!
//! So Ctrl-C means the same for every command, also for one that waits in the kernel; a command that fails, however it
//! fails, cannot take the shell with it; and each sees the terminal as wide as it is now. A process costs about 3 ms,
//! which nobody notices at a prompt.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use rustix::stdio::stdin;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use signal_hook::SigId;
use signal_hook::consts::{SIGINT, SIGPIPE};

use crate::program;

/// Starts processes and waits for them.
pub(super) struct Launcher {
    /// What commands read: the terminal, or nothing where the input is a list of commands.
    reads_terminal: bool,
    /// Our SIGINT, while there is a prompt.
    interrupts: Option<SigId>,
}

impl Launcher {
    /// For a person at a terminal: Ctrl-C ends commands and not us.
    pub(super) fn at_terminal() -> anyhow::Result<Self> {
        // Caught and not ignored: a process that we start begins with the default again.
        let interrupts = signal_hook::flag::register(SIGINT, Arc::new(AtomicBool::new(false)));
        Ok(Self { reads_terminal: true, interrupts: Some(interrupts.context("cannot catch Ctrl-C")?) })
    }

    /// For a list of commands: they must not read it, and Ctrl-C ends everything.
    pub(super) fn in_script() -> Self {
        Self { reads_terminal: false, interrupts: None }
    }

    /// Runs kvctl with these arguments.
    pub(super) fn kvctl(&self, args: &[OsString]) -> anyhow::Result<Ended> {
        self.run(Command::new(program::path()).arg0("kvctl").args(args)).context("cannot start kvctl")
    }

    /// Has the system's shell carry out a line.
    pub(super) fn system(&self, line: &str) -> anyhow::Result<Ended> {
        self.run(Command::new("sh").arg("-c").arg(line)).context("cannot start sh")
    }

    fn run(&self, command: &mut Command) -> io::Result<Ended> {
        if !self.reads_terminal {
            return command.stdin(Stdio::null()).status().map(Ended);
        }
        let modes = TerminalModes::save();
        let status = command.status();
        modes.restore();
        status.map(Ended)
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        if let Some(id) = self.interrupts.take() {
            signal_hook::low_level::unregister(id);
        }
    }
}

/// How the terminal was set before a command that may have been killed while it had it set otherwise.
struct TerminalModes(Option<Termios>);

impl TerminalModes {
    fn save() -> Self {
        Self(tcgetattr(stdin()).ok())
    }

    fn restore(self) {
        // A terminal that is gone needs nothing.
        let _ = self.0.map(|modes| tcsetattr(stdin(), OptionalActions::Drain, &modes));
    }
}

/// How a process ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ended(ExitStatus);

impl Ended {
    /// As shells count: the exit code, or 128 and the signal.
    pub(super) fn code(self) -> u8 {
        let code = self.0.code().or_else(|| self.0.signal().map(|signal| 128 + signal));
        code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
    }

    /// Whether Ctrl-C ended it, so that the cursor stands behind a `^C`.
    pub(super) fn was_interrupted(self) -> bool {
        self.0.signal() == Some(SIGINT)
    }

    /// The signal that ended it and that the user did not send: not Ctrl-C, not a pipe whose reader left.
    pub(super) fn unexpected_signal(self) -> Option<i32> {
        self.0.signal().filter(|signal| ![SIGINT, SIGPIPE].contains(signal))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Background jobs of a shell ignore SIGINT, and so do their children: this test, where it is started by one.
    const INTERRUPTED: &str = "exec env --default-signal=INT sh -c 'kill -INT $$'";

    #[test]
    fn codes_are_those_of_shells() {
        let launcher = Launcher::in_script();
        for (line, code, signal) in [
            ("exit 0", 0, None),
            ("exit 7", 7, None),
            ("kill -KILL $$", 137, Some(9)),
            (INTERRUPTED, 130, None),
            ("read line", 1, None),
        ] {
            let ended = launcher.system(line).unwrap();
            assert_eq!((ended.code(), ended.unexpected_signal()), (code, signal), "{line}");
        }
        assert!(launcher.system(INTERRUPTED).unwrap().was_interrupted());
    }
}
