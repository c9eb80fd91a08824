//! `kvctl completions` and `kvctl man`: our own definitions, as packagers install them.

use std::path::Path;

use clap::CommandFactory;

use crate::cli::{Cli, Program, ServeCli, Shell, TopCli};
use crate::console::Console;
use crate::exit::Outcome;
use crate::generate::{self, Pools};

pub(super) fn completions(shell: Shell, program: Program, console: &mut Console) -> anyhow::Result<Outcome> {
    let script = match program {
        Program::Kvctl => generate::completions(shell, &Cli::command(), Pools::OfKvctl),
        Program::Kvtop => generate::completions(shell, &TopCli::command(), Pools::OfSubcommand("kvtop")),
        Program::Kvserve => generate::completions(shell, &ServeCli::command(), Pools::None),
    };
    console.line(script.trim_end())?;
    Ok(Outcome::Done)
}

pub(super) fn man(dir: &Path, console: &mut Console) -> anyhow::Result<Outcome> {
    for path in generate::write_pages(dir, &generate::pages([Cli::command(), TopCli::command(), ServeCli::command()])?)?
    {
        console.line(path.display())?;
    }
    Ok(Outcome::Done)
}
