//! The shell of a person: a prompt, history, completion. It ends when it is told to, and for no other reason.

use std::ops::ControlFlow;

use anyhow::Context;
use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{CompletionType, Config, Editor};
use tidekv_shm::RuntimeDir;

use super::carry_out;
use super::complete::Completer;
use super::history::{self, HistoryFile};
use super::launch::Launcher;
use crate::console::Console;
use crate::exit::Outcome;

const BANNER: &str = "Entering kvcached shell. Type 'help' for commands, 'exit' to quit.";
const PROMPT: &str = "kvcached> ";

pub(super) fn run(dir: &RuntimeDir, console: &mut Console) -> anyhow::Result<Outcome> {
    let launcher = Launcher::at_terminal()?;
    let mut editor = editor(dir).context("cannot read from the terminal")?;
    let history = HistoryFile::of_user();
    history.load(&mut editor);
    console.line(BANNER)?;
    loop {
        match editor.readline(PROMPT) {
            Ok(line) => {
                history.add(&mut editor, &line);
                if carry_out(&line, dir, &launcher, console) == ControlFlow::Break(()) {
                    return Ok(Outcome::Done);
                }
            }
            // Ctrl-C: the line is dropped, and there is a new one.
            Err(ReadlineError::Interrupted | ReadlineError::Signal(_)) => {}
            // Ctrl-D, or a terminal that is gone.
            Err(ReadlineError::Eof) => return Ok(Outcome::Done),
            Err(error) => return Err(error).context("cannot read from the terminal"),
        }
    }
}

fn editor(dir: &RuntimeDir) -> rustyline::Result<Editor<Completer, FileHistory>> {
    let config = Config::builder()
        .max_history_size(history::LINES)?
        .history_ignore_dups(true)?
        .history_ignore_space(true)
        .completion_type(CompletionType::List)
        .build();
    let mut editor = Editor::with_config(config)?;
    editor.set_helper(Some(Completer::new(dir)));
    Ok(editor)
}
