//! The command line as it was typed: names and flags, nothing checked beyond their number. [`request`](crate::request)
//! turns this into something that makes sense. Help, completions and man pages all come from these definitions.
//!
//! ```text
//!   pools      list, limit, limit-percent, share, delete, gc, trim
//!   screens    kvtop, watch
//!   budget     budget
//!   explain    doctor, events
//!   arena      arena list, check, delete
//!   generate   completions, man, names
//!   launch     up, ps, down, logs
//!   serve      kvserve
//!   access     who may ask a server: of up and of kvserve
//! ```

mod access;
mod arena;
mod budget;
mod explain;
mod generate;
mod launch;
mod pools;
mod screens;
mod serve;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Arg, Parser, Subcommand, ValueHint};

pub use access::AccessArgs;
pub use arena::{ArenaArgs, ArenaCommand};
pub use budget::BudgetArgs;
pub use explain::{DoctorArgs, EventsArgs};
pub use generate::{CompletionsArgs, ManArgs, NamesArgs, Program, Shell};
pub use launch::{DownArgs, LogsArgs, PsArgs, UpArgs};
pub use pools::{DeleteArgs, GcArgs, LimitArgs, LimitPercentArgs, ListArgs, ShareArgs, TrimArgs, WaitArgs};
pub use screens::{TopArgs, TopCli, WatchArgs};
pub use serve::ServeCli;

/// Look at KV-cache pools, and set their limits and shares
#[derive(Debug, Parser)]
#[command(name = "kvctl", version, after_help = EXAMPLES)]
pub struct Cli {
    /// Folder of the shared files [default: $KVCACHED_RUNTIME_DIR, else /dev/shm]
    #[arg(long, global = true, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,

    /// What to do; nothing is [`Command::Shell`].
    #[command(subcommand)]
    pub command: Option<Command>,
}

const EXAMPLES: &str = "\
Examples:
  kvctl                                       # a prompt, with completion of commands and pool names
  kvctl list                                  # pools of tidekv and of kvcached, and what they use
  kvctl kvtop                                 # the same, live on the whole screen
  kvctl limit kvcached_vLLM_4711 20G --wait 5s   # lower a limit, and wait until memory is back
  kvctl share kvcached_vLLM_4711 --weight 4 --floor 2G
  kvctl budget host 8G                        # what all pools of a device may hold together
  kvctl events --follow                       # who got, asked for and gave back what, and why
  kvctl doctor                                # what on this machine will cause trouble, and how to mend it
  kvctl gc                                    # remove what killed processes left behind
  kvctl up --config models.yaml               # several models behind one address

Sizes are 1024-based: 512, 20M, 1.5G, 1.5GiB. Durations: 200ms, 5s, 1m.
Exit status: 0 done, 1 the answer is no (no such pool), 2 error, 3 accepted and still draining.";

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List pools and their usage
    List(ListArgs),
    /// Set the limit of a pool
    Limit(LimitArgs),
    /// Set the limit of a pool as a percentage of its device's budget, or of its memory
    LimitPercent(LimitPercentArgs),
    /// Show or set how a pool shares its device with others
    Share(ShareArgs),
    /// Show or set what all pools of a device may hold together
    Budget(BudgetArgs),
    /// Remove the segment of a pool
    Delete(DeleteArgs),
    /// Remove what processes left behind that are gone
    Gc(GcArgs),
    /// Ask a pool to give back its idle memory now
    Trim(TrimArgs),
    /// Look at, check and delete arenas of shared blocks
    Arena(ArenaArgs),
    /// Show pools and devices on the whole screen, live
    Kvtop(TopArgs),
    /// List pools again and again, with what changed
    Watch(WatchArgs),
    /// Type commands at a prompt, with history and completion
    Shell(ShellArgs),
    /// Look for what is wrong with this machine, and say how to mend it
    Doctor(DoctorArgs),
    /// Show who was granted, refused or asked for what, and why
    Events(EventsArgs),
    /// Start many models behind one address, and keep them running
    #[cfg(feature = "serve")]
    Up(UpArgs),
    /// List what `kvctl up` runs
    Ps(PsArgs),
    /// Stop what `kvctl up` runs
    Down(DownArgs),
    /// Show what an instance wrote
    Logs(LogsArgs),
    /// Print completions for a shell
    Completions(CompletionsArgs),
    /// Write the man pages
    Man(ManArgs),
    /// Print the names of the pools (what completions ask)
    #[command(hide = true)]
    Names(NamesArgs),
}

/// Whether an argument is the name of a pool, or several. Such arguments are completed with the pools that there are.
pub fn is_pool_name(arg: &Arg) -> bool {
    arg.is_positional() && ["name", "names"].contains(&arg.get_id().as_str())
}

/// `kvctl shell`
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  kvctl shell
  echo 'list --json' | kvctl shell            # commands from a pipe, without a prompt

At the prompt: every command of kvctl, without the word kvctl; `help`, `help COMMAND`, `exit`. A line that begins with
`!` goes to the system's shell, and no other line does. History is kept in ~/.kvctl_history.
Exit status: 0; from a pipe that of the last command which did not end with 0.")]
pub struct ShellArgs {}

impl Cli {
    /// Parses the arguments of this process, program name first.
    pub fn parse_args(args: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        Self::try_parse_from(args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn clap_finds_nothing_wrong_with_the_definitions() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_subcommand_has_examples_and_says_what_it_answers() {
        for command in Cli::command().get_subcommands().chain([&TopCli::command()]) {
            let help = command.clone().render_long_help().to_string();
            assert!(help.contains("Examples:\n") && help.contains("Exit status"), "{}", command.get_name());
        }
    }
}
