//! Arguments of the commands that run many models: `kvctl up`, `ps`, `down` and `logs`.

use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::AccessArgs;

/// `kvctl up`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  kvctl up                                    # two synthetic models behind http://127.0.0.1:8080: no GPU, no download
  kvctl up --config models.yaml
  kvctl up --config models.yaml --check       # only says whether it is right
  curl localhost:8080/v1/completions -d '{\"model\": \"default\", \"prompt\": \"Hello\", \"max_tokens\": 16}'

Starts every instance of the configuration, waits until each is well, starts again what ends, and puts a router with an
OpenAI-compatible API and a dashboard before them. kvcached's configurations work: docs/launching.md has all keys. The pool of the
instance chat is kvcached_chat: `kvctl limit chat 2G`, or `pool: {limit: 2G}` in the file. Ctrl-C or
SIGTERM lets requests end and stops everything; a second one does not wait. KVCACHED_WEB_API_KEY is the key with which limits can be
changed over HTTP, and is needed to listen on another address than this machine's own.
Exit status: 0 told to stop and all stopped, or --check found nothing wrong; 2 error: nothing was started, or nothing runs any more.")]
pub struct UpArgs {
    /// What to start, as YAML [default: two synthetic models on host memory]
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,

    /// Only check the configuration
    #[arg(long)]
    pub check: bool,

    /// Address of the router, instead of router_host
    #[arg(long, value_name = "HOST")]
    pub host: Option<String>,

    /// Port of the router, instead of router_port; 0 for any free one, which is printed
    #[arg(long, value_name = "PORT")]
    pub port: Option<u16>,

    /// Who may ask.
    #[command(flatten)]
    pub access: AccessArgs,
}

/// `kvctl ps`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  kvctl ps
  kvctl ps --json | jq -r '.[].instances[].name'

Exit status: 0 listed, 1 nothing runs.")]
pub struct PsArgs {
    /// Print a JSON list instead of a table
    #[arg(long)]
    pub json: bool,
}

/// `kvctl down`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  kvctl down
  kvctl down --wait 5m                        # requests that take long may end

Does what Ctrl-C does where `kvctl up` runs. Exit status: 0 all stopped, 1 nothing ran, 3 told, and still draining.")]
pub struct DownArgs {
    /// How long to wait for it
    #[arg(long, value_name = "DURATION", default_value = "60s", allow_hyphen_values = true)]
    pub wait: String,
}

/// `kvctl logs`
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  kvctl logs tiny
  kvctl logs tiny -n 500 | less
  kvctl logs tiny --follow

Exit status: 0 shown, or left with Ctrl-C; 1 no instance of that name runs.")]
pub struct LogsArgs {
    /// The instance
    pub instance: String,

    /// How many of the last lines
    #[arg(short = 'n', long, value_name = "N", default_value_t = 100)]
    pub lines: usize,

    /// Go on with new lines as they come, until Ctrl-C
    #[arg(short, long)]
    pub follow: bool,
}
