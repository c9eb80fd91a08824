//! Arguments of the commands that look at pools and change them, each once.

use clap::Args;

/// `kvctl list`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  kvctl list
  kvctl list VLLM SGLANG
  kvctl list --json | jq '.[] | select(.owner_alive == false) | .ipc'

Limit, Used and % are kvcached's: Used counts cached prefixes. Held is Needed (by running requests), Cached (only
kept: a neighbour that waits may have it) and Idle (nothing in it) together.
Rows without an owner are kvcached's own pools: they have a segment and no ledger entry.
Exit status: 0 listed, 1 a name that was given does not exist.")]
pub struct ListArgs {
    /// Only these pools
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,

    /// Print a JSON list instead of a table
    #[arg(long)]
    pub json: bool,
}

/// `kvctl limit`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  kvctl limit VLLM 20G
  kvctl limit VLLM 512MB --wait 5s

Exit status: 0 applied, or nothing is above the limit; 3 accepted, and the pool still uses more than the limit.")]
pub struct LimitArgs {
    /// The pool
    pub name: String,

    /// The limit: 512, 20M, 1.5G, 1.5GiB
    #[arg(allow_hyphen_values = true)]
    pub size: String,

    #[command(flatten)]
    #[expect(missing_docs, reason = "clap would take a doc comment for the help of the subcommand")]
    pub wait: WaitArgs,
}

/// `kvctl limit-percent`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  kvctl limit-percent VLLM 50
  kvctl limit-percent VLLM 12.5% --wait 5s

It is a part of the device's budget where somebody gave one (kvctl budget), else of the device's memory, as kvcached's is.
Both are read from the ledger, so this needs a pool of tidekv; for a pool of kvcached's own
give a size to `kvctl limit`. Exit status as `kvctl limit`.")]
pub struct LimitPercentArgs {
    /// The pool
    pub name: String,

    /// 0 to 100
    #[arg(allow_hyphen_values = true)]
    pub percent: String,

    #[command(flatten)]
    #[expect(missing_docs, reason = "clap would take a doc comment for the help of the subcommand")]
    pub wait: WaitArgs,
}

/// How long to wait for the pool.
#[derive(Args, Debug)]
pub struct WaitArgs {
    /// Wait until the pool has done it, at most this long [without a value: 5s]
    #[arg(long, value_name = "DURATION", num_args = 0..=1, default_missing_value = "5s", allow_hyphen_values = true)]
    pub wait: Option<String>,
}

/// `kvctl share`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  kvctl share VLLM                            # show it
  kvctl share VLLM --weight 4                 # four times what a pool of weight 1 gets
  kvctl share VLLM --floor 2G --ceiling 40G   # always 2 GiB, never more than 40 GiB
  kvctl share VLLM --priority 1 --ceiling none

A change lasts as long as the pool. Exit status: 0 done, 1 no such pool, 2 refused, and nothing has changed.")]
pub struct ShareArgs {
    /// The pool
    pub name: String,

    /// Part of what is shared, against the weights of the others: 1 or more
    #[arg(long, allow_hyphen_values = true)]
    pub weight: Option<String>,

    /// Memory that is kept for the pool whether it uses it or not
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub floor: Option<String>,

    /// The most that it may hold, or `none`
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub ceiling: Option<String>,

    /// Pools of a higher priority are served first; 0 is usual, negative is allowed
    #[arg(long, allow_hyphen_values = true)]
    pub priority: Option<String>,
}

/// `kvctl delete`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  kvctl delete VLLM
  kvctl delete VLLM --force                   # also of a pool that is alive

A living pool keeps its memory and its limit, and makes its segment again.
Exit status: 0 deleted, 1 no such pool, 2 it is alive and --force was not given.")]
pub struct DeleteArgs {
    /// The pool
    pub name: String,

    /// Even if the pool is alive
    #[arg(long)]
    pub force: bool,
}

/// `kvctl gc`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  kvctl gc --dry-run
  kvctl gc
  kvctl gc --dry-run --json | jq -r '.[] | select(.action == \"left\") | .what'

Ends what a killed `kvctl up` left running. Removes ledger entries of owners that are gone, their segments, ledgers
without entries, arenas that nobody uses, unfinished files and segments that kvbench was asked to leave (--cleanup=false),
and says what it removed. Nothing that a process still owns is touched; where that cannot be known, the file is left and
named, and so is what Mooncake's benchmarks left (mooncake_bench_*).
Exit status: 0 done, 2 something could not be looked at or removed.")]
pub struct GcArgs {
    /// Only say what would be removed
    #[arg(long)]
    pub dry_run: bool,

    /// Print a JSON list of what was found: {action, what, why}
    #[arg(long)]
    pub json: bool,
}

/// `kvctl trim`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  kvctl trim VLLM
  kvctl trim VLLM --wait 2s
  kvctl trim VLLM --cached --wait 10s

Exit status: 0 done, or there is nothing to give back; 3 asked, and not done yet.")]
pub struct TrimArgs {
    /// The pool
    pub name: String,

    /// Cached prefixes too: the engine forgets what no request uses
    #[arg(long)]
    pub cached: bool,

    #[command(flatten)]
    #[expect(missing_docs, reason = "clap would take a doc comment for the help of the subcommand")]
    pub wait: WaitArgs,
}
