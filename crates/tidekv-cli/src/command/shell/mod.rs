//! `kvctl shell`, also `kvctl` alone: commands one after another, at a prompt or from a pipe.
//!
//! ```text
//!   terminal ──> prompt ──┐                ┌──> Show, Nothing, Leave
//!   pipe ──────> script ──┴─ line ─> order ┼──> launch: kvctl itself, a process for each command
//!                               (decides)  └──> launch: sh, only for what follows a `!`
//!
//!   words      quotes and backslashes         complete   what Tab offers, and what `kvctl names` answers
//!   history    ~/.kvctl_history
//! ```
//!
//! A line is never given to a system shell unless it begins with `!`: [`order`] decides that without starting anything,
//! and is tested with arbitrary lines.

pub(super) mod complete;
mod history;
mod launch;
mod order;
mod prompt;
mod script;
mod words;

use std::io::{self, IsTerminal};
use std::ops::ControlFlow;

use tidekv_shm::RuntimeDir;

use self::launch::{Ended, Launcher};
use self::order::Order;
use crate::console::Console;
use crate::exit::{ERROR_CODE, Outcome};

pub(super) fn run(dir: &RuntimeDir, console: &mut Console) -> anyhow::Result<Outcome> {
    if io::stdin().is_terminal() && io::stdout().is_terminal() {
        prompt::run(dir, console)
    } else {
        script::run(dir, io::stdin().lock(), console)
    }
}

/// Carries out a line and gives its exit code; or says that it was the last.
fn carry_out(line: &str, dir: &RuntimeDir, launcher: &Launcher, console: &mut Console) -> ControlFlow<(), u8> {
    let ended = match order::order(line, dir.path()) {
        Ok(Order::Nothing) => return ControlFlow::Continue(0),
        Ok(Order::Leave) => return ControlFlow::Break(()),
        Ok(Order::Show(text)) => return ControlFlow::Continue(show(&text, console)),
        Ok(Order::Command(args)) => launcher.kvctl(&args),
        Ok(Order::System(command)) => launcher.system(&command).inspect(|ended| say_status(*ended, console)),
        Err(refusal) => {
            console.note(refusal);
            return ControlFlow::Continue(ERROR_CODE);
        }
    };
    ControlFlow::Continue(match ended {
        Ok(ended) => {
            say_signal(ended, console);
            ended.code()
        }
        Err(error) => {
            console.note(format_args!("error: {error:#}"));
            ERROR_CODE
        }
    })
}

fn show(text: &str, console: &mut Console) -> u8 {
    match console.line(text) {
        Ok(()) => 0,
        Err(error) => {
            console.note(format_args!("error: cannot write: {error}"));
            ERROR_CODE
        }
    }
}

/// The status of a line that the system's shell carried out, which it alone does not say.
fn say_status(ended: Ended, console: &mut Console) {
    if ended.code() != 0 && !ended.was_interrupted() {
        console.note(format_args!("Exit status: {}", ended.code()));
    }
}

/// A command that was killed could not say so itself.
fn say_signal(ended: Ended, console: &mut Console) {
    if ended.was_interrupted() {
        // Behind the `^C`.
        console.note("");
    }
    if let Some(signal) = ended.unexpected_signal() {
        console.note(format_args!("The command was ended by signal {signal}."));
    }
}
