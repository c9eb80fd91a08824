//! `kvctl arena ...`

use clap::{Args, Subcommand};

/// `kvctl arena`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  kvctl arena list
  kvctl arena check kv
  kvctl arena delete kv

Exit status: 0 done, 1 the answer is no (no such arena, or something is wrong in it), 2 error.")]
pub struct ArenaArgs {
    /// What to do with arenas.
    #[command(subcommand)]
    pub command: ArenaCommand,
}

/// What to do with arenas.
#[derive(Debug, Subcommand)]
pub enum ArenaCommand {
    /// List arenas, who uses them and how much is held
    #[command(after_help = "\
Examples:
  kvctl arena list
  kvctl arena list --json

Exit status: 0 listed, 2 one of them could not be looked at.")]
    List {
        /// Print a JSON list instead of a table
        #[arg(long)]
        json: bool,
    },
    /// Check that everything in an arena fits together
    #[command(after_help = "\
Examples:
  kvctl arena check kv
  kvctl arena check kv --json

Reads only, and may run while the arena is in use. Exit status: 0 sound, 1 problems were found, or no such arena.")]
    Check {
        /// The arena
        #[arg(value_name = "NAME")]
        arena: String,
        /// Print a JSON object instead of text
        #[arg(long)]
        json: bool,
    },
    /// Delete an arena
    #[command(after_help = "\
Examples:
  kvctl arena delete kv
  kvctl arena delete kv --force               # also while it is in use

Processes that use it keep its memory until they end. Exit status: 0 deleted, 1 no such arena, 2 it is in use and --force
was not given.")]
    Delete {
        /// The arena
        #[arg(value_name = "NAME")]
        arena: String,
        /// Even if processes use it
        #[arg(long)]
        force: bool,
    },
}
