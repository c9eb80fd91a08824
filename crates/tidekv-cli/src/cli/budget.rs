//! Arguments of `kvctl budget`.

use clap::Args;

use super::WaitArgs;

/// `kvctl budget`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  kvctl budget                                # of every device: how much, and who decided it
  kvctl budget host
  kvctl budget host 8G --wait 5s              # pools above their share give back, as with a limit
  kvctl budget host auto                      # what the device has, less what no pool holds

A size that you set holds above what pools were given (KVCACHED_HOST_BUDGET, --kv-budget), whoever comes later. It lasts for as
long as the device has pools. After auto the next pool that is given a size sets it again.
Exit status: 0 done, 1 no pool uses such a device, 3 set, and pools still hold more.")]
pub struct BudgetArgs {
    /// The device: host, or the UUID of a GPU as `kvctl list` shows it
    pub device: Option<String>,

    /// What all pools of the device may hold together: 512M, 20G; or auto
    #[arg(allow_hyphen_values = true)]
    pub size: Option<String>,

    /// Print a JSON list
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    #[expect(missing_docs, reason = "clap would take a doc comment for the help of the subcommand")]
    pub wait: WaitArgs,
}
