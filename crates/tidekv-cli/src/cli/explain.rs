//! Arguments of the commands that explain: `kvctl doctor` and `kvctl events`.

use std::path::PathBuf;

use clap::Args;

/// `kvctl doctor`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  kvctl doctor
  kvctl doctor --json | jq '.findings[].fix'
  kvctl doctor --python ~/venvs/vllm/bin/python

Changes nothing. Exit status: 0 nothing found, 1 at least one finding, 2 error.")]
pub struct DoctorArgs {
    /// Print a JSON object instead of a report
    #[arg(long)]
    pub json: bool,

    /// The interpreter that is asked for torch, vLLM, SGLang and kvcached [default: $VIRTUAL_ENV, else python3]
    #[arg(long, value_name = "PATH")]
    pub python: Option<PathBuf>,
}

/// `kvctl events`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  kvctl events                                # the last 40
  kvctl events VLLM --last 200
  kvctl events --follow
  kvctl events --follow --json | jq 'select(.kind == \"refused\")'

Each device keeps its latest 4096 events until its last pool has left in order, or until `kvctl gc`. Events that follow
each other closely and are of one sort are told as one, with how often it happened.
Exit status: 0 shown, or left with Ctrl-C; 1 no event and no pool of that name; 2 error.")]
pub struct EventsArgs {
    /// Only what happened to these pools, or for them
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,

    /// Go on with new events as they happen, until Ctrl-C
    #[arg(short, long)]
    pub follow: bool,

    /// How many of the past to show
    #[arg(short = 'n', long, value_name = "N", default_value_t = 40)]
    pub last: usize,

    /// Print a JSON object per line
    #[arg(long)]
    pub json: bool,
}
