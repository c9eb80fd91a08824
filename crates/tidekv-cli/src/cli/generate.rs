//! Arguments of the commands that write what packagers install, `kvctl completions` and `kvctl man`, and of the one that
//! installed completions ask, `kvctl names`.

use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};

/// `kvctl completions`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  kvctl completions bash > /etc/bash_completion.d/kvctl
  kvctl completions zsh > \"${fpath[1]}/_kvctl\"
  kvctl completions fish > ~/.config/fish/completions/kvctl.fish
  kvctl completions bash --program kvtop > /etc/bash_completion.d/kvtop

Exit status: 0 printed.")]
pub struct CompletionsArgs {
    /// For which shell
    #[arg(value_enum)]
    pub shell: Shell,

    /// For which of our programs
    #[arg(long, value_enum, default_value_t = Program::Kvctl)]
    pub program: Program,
}

/// A shell that completions can be made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Shell {
    /// GNU Bash.
    Bash,
    /// Z shell.
    Zsh,
    /// fish.
    Fish,
}

/// A program of this package.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Program {
    /// `kvctl`.
    Kvctl,
    /// `kvtop`.
    Kvtop,
    /// `kvserve`.
    Kvserve,
}

/// `kvctl man`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  kvctl man ~/.local/share/man/man1           # kvctl.1, kvctl-list.1, ..., kvtop.1, kvserve.1
  kvctl man /tmp/man && man -l /tmp/man/kvctl-limit.1

Exit status: 0 written, 2 the folder cannot be written.")]
pub struct ManArgs {
    /// Where to; made if it is not there
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
}

/// `kvctl names`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  kvctl names                                 # of all pools, one per line
  kvctl names -- limit kvc                    # those that `kvctl limit kvc` may become
  kvctl names -- limit VLLM 20                # none: no pool is asked for here

Exit status: 0 printed.")]
pub struct NamesArgs {
    /// A command line without its program, the word to complete last
    #[arg(value_name = "WORD", last = true)]
    pub words: Vec<String>,
}
