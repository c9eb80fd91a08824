//! Arguments of the commands that stay and refresh: `kvctl kvtop`, which is also the program `kvtop`, and `kvctl watch`.

use std::path::PathBuf;

use clap::{Args, Parser};

/// For `kvtop` and for `kvctl kvtop`, which are the same.
const TOP_EXAMPLES: &str = "\
Examples:
  kvtop
  kvtop VLLM SGLANG --refresh 0.5
  kvtop --sort held --filter qwen
  kvtop --once                                # a table, and out: also for a pipe
  kvtop --json --count 60 > samples.jsonl     # one object per line and second

Keys: q quit, h help, s sort, r reverse, / filter, p pause, arrows to move, Enter for the details of a pool.
It only reads and takes no lock: no pool ever waits for it. A pool that is named and not there yet is waited for.
Colour follows pressure; NO_COLOR turns it off. Times are local, in JSON they are UTC.
Exit status: 0 left, 1 --once and a name that was given does not exist, 2 no terminal to draw on.";

/// Show KV-cache pools and devices on the whole screen, live
#[derive(Debug, Parser)]
#[command(name = "kvtop", version, after_help = TOP_EXAMPLES)]
pub struct TopCli {
    /// Folder of the shared files [default: $KVCACHED_RUNTIME_DIR, else /dev/shm]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,

    #[command(flatten)]
    #[expect(missing_docs, reason = "clap would take a doc comment for the help of the program")]
    pub top: TopArgs,
}

/// `kvctl kvtop`, `kvtop`
#[derive(Args, Debug)]
#[command(after_help = TOP_EXAMPLES)]
pub struct TopArgs {
    /// Only these pools
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,

    /// Time between two looks: seconds, or with a unit as in 500ms
    #[arg(short, long, value_name = "SEC", default_value = "1", allow_hyphen_values = true)]
    pub refresh: String,

    /// Order of the pools: name, used, held, demand, share, rate or pressure
    #[arg(long, value_name = "KEY", default_value = "name")]
    pub sort: String,

    /// Only pools whose name contains this
    #[arg(long, value_name = "TEXT")]
    pub filter: Option<String>,

    /// Let the mouse choose pools and scroll; the terminal's own selection then needs Shift
    #[arg(long)]
    pub mouse: bool,

    /// Print one table and leave
    #[arg(long, conflicts_with = "json")]
    pub once: bool,

    /// Print a JSON object per look instead of drawing
    #[arg(long)]
    pub json: bool,

    /// Leave after so many looks
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
}

/// `kvctl watch`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  kvctl watch
  kvctl watch -n 0.5 VLLM
  kvctl watch --count 10 > log.txt            # ten lists, without cursor codes

+Used and +Held are what changed since the look before, Maps/s and Unmaps/s pages. Ctrl-C or q leaves, and the
terminal is as it was. A name that is not there yet is waited for. Exit status: 0 left, 2 error.")]
pub struct WatchArgs {
    /// Only these pools
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,

    /// Time between two looks: seconds, or with a unit as in 500ms
    #[arg(short = 'n', long, value_name = "SEC", default_value = "1", allow_hyphen_values = true)]
    pub interval: String,

    /// Leave after so many looks
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
}
