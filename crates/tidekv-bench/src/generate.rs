//! `kvbench completions` and `kvbench man`: as of kvctl, by the same code.

use std::path::PathBuf;

use clap::{Args, CommandFactory, ValueHint};
use tidekv_cli::cli::Shell;
use tidekv_cli::console::Console;
use tidekv_cli::exit::Outcome;
use tidekv_cli::generate::{self, Pools};

use crate::cli::Cli;

/// `kvbench completions`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  kvbench completions bash > /etc/bash_completion.d/kvbench
  kvbench completions zsh > \"${fpath[1]}/_kvbench\"
  kvbench completions fish > ~/.config/fish/completions/kvbench.fish

Exit status: 0 printed.")]
pub struct CompletionsArgs {
    /// For which shell
    #[arg(value_enum)]
    pub shell: Shell,
}

/// `kvbench man`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  kvbench man ~/.local/share/man/man1         # kvbench.1, kvbench-vmm.1, ...

Exit status: 0 written, 2 the folder cannot be written.")]
pub struct ManArgs {
    /// Where to; made if it is not there
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
}

/// Prints completions.
pub fn completions(args: &CompletionsArgs) -> anyhow::Result<Outcome> {
    Console::standard().line(generate::completions(args.shell, &Cli::command(), Pools::None).trim_end())?;
    Ok(Outcome::Done)
}

/// Writes the man pages, and says which.
pub fn man(args: &ManArgs) -> anyhow::Result<Outcome> {
    let mut console = Console::standard();
    for path in generate::write_pages(&args.dir, &generate::pages([Cli::command()])?)? {
        console.line(path.display())?;
    }
    Ok(Outcome::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_benchmark_is_in_and_what_is_hidden_is_not() {
        let pages = generate::pages([Cli::command()]).unwrap();
        let files: Vec<&str> = pages.iter().map(|page| page.file.as_str()).collect();
        let bash = generate::completions(Shell::Bash, &Cli::command(), Pools::None);
        for command in Cli::command().get_subcommands() {
            let (name, is_shown) = (command.get_name(), !command.is_hide_set());
            assert_eq!(files.contains(&format!("kvbench-{name}.1").as_str()), is_shown, "{name}");
            assert_eq!(bash.contains(&format!("kvbench,{name})")), is_shown, "{name}");
        }
        assert_eq!(files[0], "kvbench.1");
    }
}
